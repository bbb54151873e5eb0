"""Calls of 8 bits without a mask that want the output alone: products sum the weights as
they are stored, by columns of ones behind V's, in place of an addition an element. Outputs are
normalised by what they are made of; a log-sum-exp would be off by the weights' rounding."""

from __future__ import annotations

from dataclasses import replace

from ....spec.problem import Problem
from ....targets.target import Target
from .choices import ranked_choices
from .feasible import make_plan
from .plan import ALONE, Plan

WHY = "weights summed as they are stored, by columns of ones: for calls that want no log-sum-exp"


def plans(problem: Problem, target: Target) -> tuple[Plan, ...]:
    """The plan for such calls; none but beside three consumers that look for maxima."""
    if problem.direction != "fwd" or not problem.eight_bit or problem.masks:
        return ()
    ranked = ranked_choices(problem)
    usual = next((choice for choice in ranked if make_plan(problem, choice, target)), None)
    if usual is None or usual.consumers != 3:
        return ()
    plan = make_plan(problem, replace(usual, sums_stored=True), target)
    return (replace(plan, family=ALONE, why=(*plan.why, WHY)),) if plan else ()

"""Shared facts of this instruction's families: needs of a target, names, sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterator

from ...spec.problem import Problem
from ...targets.target import Instruction

PREFIX = "sm90_"  # of the names of kernels, whose symbols begin with them
NEEDS: frozenset[Instruction] = frozenset({"griddepcontrol", "setmaxnreg", "tma", "wgmma"})
BARRIER_BYTES = 8
LIGHT_SCORES = frozenset({"alibi"})  # a multiply-add an element needs no registers


def boxes_of(head_dim: int, element_bytes: int = 2) -> int:
    """128-byte boxes, which the swizzle spans, of a row of so many elements."""
    return -(-head_dim * element_bytes // 128)


def refuse_together(problem: Problem) -> Iterator[str]:
    """Why no template has all parts of the problem. Specs of this kind are refused by `resolve`,
    but a trace may have such problems, too."""
    beside = problem.decode or problem.eight_bit or problem.widens
    hidden = (problem.attn_mask or problem.dropout) and not problem.eight_bit
    if (problem.bias or problem.positions or hidden) and beside:
        yield "no kernel does all of this together yet"

"""View, variable lengths: what the template of the kernel that orders sequences reads."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec.problem import Problem
from ..uses import FragmentUse
from ..view import (
    FragmentView,
    KernelView,
    TensorView,
    fragment_view,
    tensor_view,
)
from ..view_axis import AxisView, axis_view
from .order import VarlenPlan


@dataclass(frozen=True)
class OrderView:
    """Values of templates/kernels/support/order.cu.j2.

    fragments: C++ of the structs that are used. q_seq, kv_seq: where sequences of queries and of
    keys lie. threads: of a CTA. queries, keys: the axes of tiles whose order is written, None for
    one that no kernel works through. many_ctas: whether the grid has a CTA an SM, of which the
    first orders; else there is one. output: the output whose rows of no sequence are filled, None
    where others fill them or there are none. before_forward: whether a forward follows, which may
    start while this kernel runs.
    """

    kernel: KernelView
    fragments: tuple[str, ...]
    q_seq: FragmentView
    kv_seq: FragmentView
    threads: int
    queries: AxisView | None
    keys: AxisView | None
    many_ctas: bool
    output: TensorView | None
    before_forward: bool


def fills_output(problem: Problem, plan: VarlenPlan) -> bool:
    """Whether the kernel fills rows of the output that are of no sequence, which are left as they
    are where outputs join."""
    return plan.fills and problem.q_seq != "dense" and not problem.continues


def order_view(
    problem: Problem,
    plan: VarlenPlan,
    kernel: KernelView,
    uses: dict[str, list[FragmentUse]],
    fragments: tuple[str, ...],
) -> OrderView:
    """The view of the kernel that orders the sequences of `problem` as its plan says."""
    return OrderView(
        kernel=kernel,
        fragments=fragments,
        q_seq=fragment_view(uses["q_seq"][0]),
        kv_seq=fragment_view(uses["kv_seq"][0]),
        threads=plan.threads,
        queries=axis_view(problem, plan.q, of_queries=True) if plan.q else None,
        keys=axis_view(problem, plan.kv, of_queries=False) if plan.kv else None,
        many_ctas=plan.fills,
        output=tensor_view(problem, "o") if fills_output(problem, plan) else None,
        before_forward=problem.direction == "fwd",
    )

"""View, combining: what the template of the kernel that joins parts of an output reads."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec.problem import Problem
from ..uses import FragmentUse
from ..view import CPP_ELEMENTS, FragmentView, KernelView, fragment_view
from .combine import CombinePlan


@dataclass(frozen=True)
class CombineView:
    """Values of templates/kernels/support/combine.cu.j2.

    fragments: C++ of the structs that are used. softmax: how a row is finished. element: C++ type
    of the output. head_dim_v: columns of a head's row. threads: of a CTA; ctas: of an SM;
    smem_bytes: of shared memory that a CTA uses. max_splits: the most parts of a row. ragged:
    whether rows may belong to no sequence, which the kernel before has cleared. dependent: whether
    it may start before that one has ended.
    """

    kernel: KernelView
    fragments: tuple[str, ...]
    softmax: FragmentView
    element: str
    head_dim_v: int
    threads: int
    ctas: int
    smem_bytes: int
    max_splits: int
    ragged: bool
    dependent: bool


def combine_view(
    problem: Problem,
    plan: CombinePlan,
    kernel: KernelView,
    uses: dict[str, list[FragmentUse]],
    fragments: tuple[str, ...],
) -> CombineView:
    """The view of the kernel that joins the parts of `problem` as its plan says."""
    return CombineView(
        kernel=kernel,
        fragments=fragments,
        softmax=fragment_view(uses["softmax"][0]),
        element=CPP_ELEMENTS[problem.dtype_q],
        head_dim_v=problem.head_dim_v,
        threads=plan.threads,
        ctas=plan.ctas,
        smem_bytes=plan.smem_bytes,
        max_splits=plan.max_splits,
        ragged=problem.q_seq != "dense",
        dependent=plan.is_dependent,
    )

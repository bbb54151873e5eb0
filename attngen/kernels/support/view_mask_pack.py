"""View, arbitrary masks: what the template of the kernel that packs their bits reads."""

from __future__ import annotations

from dataclasses import dataclass

from ..view import KernelView
from .mask_pack import MaskPlan


@dataclass(frozen=True)
class MaskPackView:
    """Values of templates/kernels/support/mask_pack.cu.j2.

    packs_rows: whether the kernel writes a row of bits a query, for kernels that work on tiles of
    queries. packs_columns: whether it writes a row of bits a key, for those that work on tiles of
    keys. threads, warps: of a CTA.
    """

    kernel: KernelView
    threads: int
    warps: int
    packs_rows: bool
    packs_columns: bool


def mask_pack_view(plan: MaskPlan, kernel: KernelView) -> MaskPackView:
    """The view of the kernel that packs a mask as its plan says."""
    return MaskPackView(
        kernel=kernel,
        threads=plan.threads,
        warps=plan.threads // 32,
        packs_rows=plan.rows,
        packs_columns=plan.columns,
    )

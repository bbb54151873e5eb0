"""View, masks of callables: what the template of the kernel that makes their bits reads."""

from __future__ import annotations

from dataclasses import dataclass

from ..uses import FragmentUse
from ..view import FragmentView, KernelView, captured_view
from .mask_make import SIDE, MakePlan


@dataclass(frozen=True)
class MaskMakeView:
    """Values of templates/kernels/support/mask_make.cu.j2.

    struct: C++, that of the mask, whose name and values `mask` has. threads: of a CTA; side:
    granules of its block, down and across.
    """

    kernel: KernelView
    struct: str
    mask: FragmentView
    threads: int
    side: int


def mask_make_view(
    plan: MakePlan, kernel: KernelView, use: FragmentUse, struct: str
) -> MaskMakeView:
    """The view of the kernel that makes a mask as its plan says."""
    return MaskMakeView(
        kernel=kernel,
        struct=struct,
        mask=captured_view(use),
        threads=plan.threads,
        side=SIDE,
    )

"""View, masks of callables: what the template of the kernel that makes their bits reads."""

from __future__ import annotations

from dataclasses import dataclass

from ...fragments.features import program_named
from ...fragments.mask_lowering import captured_members, state_bytes
from ..uses import FragmentUse
from ..view import FragmentView, KernelView, captured_view
from .mask_make import SIDE, MakePlan


@dataclass(frozen=True)
class MaskMakeView:
    """Values of templates/kernels/support/mask_make.cu.j2.

    struct: C++, that of the mask, whose name and values `mask` has; captures: its members that say
    where captured tensors lie; state_bytes: that have room for it. threads: of a CTA; side:
    granules of its block, down and across.
    """

    kernel: KernelView
    struct: str
    mask: FragmentView
    captures: tuple[str, ...]
    state_bytes: int
    threads: int
    side: int


def mask_make_view(
    plan: MakePlan, kernel: KernelView, use: FragmentUse, struct: str
) -> MaskMakeView:
    """The view of the kernel that makes a mask as its plan says."""
    program = program_named(use.fragment.name)
    assert program is not None
    return MaskMakeView(
        kernel=kernel,
        struct=struct,
        mask=captured_view(use),
        captures=captured_members(program),
        state_bytes=state_bytes(program),
        threads=plan.threads,
        side=SIDE,
    )

"""Checks of masks that are made of callables, before the kernels of a call."""

from __future__ import annotations

from dataclasses import replace

from ..fragments.features import Features
from ..fragments.program import MASK_PREFIX
from . import layouts
from .attention_spec import DTYPES_8BIT, MAX_HEAD_DIM, AttentionSpec
from .masks import masks_of
from .problem import BITS, CAST_HEAD_DIM, LISTED
from .violations import Violation


def spec_of_mask(name: str) -> AttentionSpec:
    """The spec of the kernel that makes masks of the program whose fragment has this name."""
    return AttentionSpec(head_dim=CAST_HEAD_DIM, mask=name, directions=("mask",))


def iteration_of(spec: AttentionSpec) -> str:
    """Which blocks kernels visit under a mask made before: those that it shows, or of 8 bits, over
    pages, beside biases and of wide heads all of the range."""
    eight = spec.dtype in DTYPES_8BIT or spec.widens
    wide = max(spec.head_dim, spec.head_dim_v or spec.head_dim) > MAX_HEAD_DIM
    others = eight or wide or layouts.parse(spec.layout).paged or spec.bias != "none"
    return BITS if others else LISTED


def as_booleans(spec: AttentionSpec) -> AttentionSpec:
    """The spec whose mask, made before, is booleans: kernels serve either or neither."""
    return replace(spec, mask_mod=False, attn_mask=True)


def named_mask_mod(found: Violation) -> Violation:
    """The violation as one of a mask_mod, where it is of the booleans that stand for that."""
    return replace(found, field="mask_mod") if found.field == "attn_mask" else found


def check_made(spec: AttentionSpec, features: Features) -> list[Violation]:
    """Find what is wrong with the name of a mask made before."""
    name = spec.mask_mod
    if isinstance(name, bool) or name == LISTED:
        return []
    if name.startswith(MASK_PREFIX) and name in features["mask"]:
        return []
    reason = f"mask_mod {name!r} is unknown; available: {LISTED!r}, of a mask made before the "
    return [Violation("mask_mod", reason + "call's kernels, or a function", LISTED)]


def check_traced_mask(spec: AttentionSpec) -> list[Violation]:
    """Traced masks are made before kernels of attention, by a kernel that makes no other; such as
    visit blocks of a mask made before may ask one where this has no bits."""
    words = masks_of(spec.mask).fragments
    traced = [word for word in words if word.startswith(MASK_PREFIX)]
    is_one = len(words) == 1 and bool(traced)
    if traced and spec.directions != ("mask",):
        if len(traced) == 1 and spec.mask_mod == LISTED and iteration_of(spec) == LISTED:
            return []
        reason = f"mask {spec.mask!r} is of a callable, which has directions=('mask',) alone, but "
        reason += "beside mask_mod='listed' and operands of 16 bits without a bias or pages"
        return [Violation("directions", reason, ("mask",))]
    if "mask" in spec.directions and not is_one:
        reason = f"directions 'mask' is for the mask of a callable; got {spec.mask!r}"
        return [Violation("directions", reason, ("fwd",))]
    return []

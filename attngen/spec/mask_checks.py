"""Checks of masks that are made of callables, before the kernels of a call."""

from __future__ import annotations

from ..fragments.features import Features
from ..fragments.program import MASK_PREFIX
from . import layouts
from .attention_spec import DTYPES_8BIT, AttentionSpec
from .masks import masks_of
from .problem import CAST_HEAD_DIM, LISTED
from .violations import Violation


def spec_of_mask(name: str) -> AttentionSpec:
    """The spec of the kernel that makes masks of the program whose fragment has this name."""
    return AttentionSpec(head_dim=CAST_HEAD_DIM, mask=name, directions=("mask",))


def check_listed(spec: AttentionSpec, features: Features) -> list[Violation]:
    """Find what is missing in kernels that visit the blocks of a mask made before."""
    found: list[Violation] = []
    name = spec.mask_mod
    if isinstance(name, bool):
        return found
    traced = name.startswith(MASK_PREFIX) and name in features["mask"]
    if name != LISTED and not traced:
        reason = f"mask_mod {name!r} is unknown; available: {LISTED!r}, of a mask made before the "
        found.append(Violation("mask_mod", reason + "call's kernels, or a function", LISTED))
    layout = layouts.parse(spec.layout)
    lacking = spec.dtype in DTYPES_8BIT or spec.widens or layout.paged or spec.decode
    if lacking or spec.bias != "none":
        reason = "mask_mod: kernels that visit the blocks of a mask have no 8 bits, pages, split "
        found.append(Violation("mask_mod", reason + "keys and biases yet; pass attn_mask", False))
    return found


def check_traced_mask(spec: AttentionSpec) -> list[Violation]:
    """Traced masks are made before kernels of attention, by a kernel that makes no other."""
    traced = masks_of(spec.mask).fragments
    is_one = len(traced) == 1 and traced[0].startswith(MASK_PREFIX)
    if is_one and spec.directions != ("mask",):
        reason = f"mask {spec.mask!r} is of a callable, which has directions=('mask',) alone"
        return [Violation("directions", reason, ("mask",))]
    if "mask" in spec.directions and not is_one:
        reason = f"directions 'mask' is for the mask of a callable; got {spec.mask!r}"
        return [Violation("directions", reason, ("fwd",))]
    return []

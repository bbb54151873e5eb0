"""Calls with functions within transforms of torch.func: kernels serve those whose functions read
nothing that a transform has wrapped, and learn nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...call.table import AttentionCall
from . import routing
from .callable_fingerprint import fingerprint
from .torch_private import has_transforms, is_wrapped, untransformed


def pass_by(call: AttentionCall) -> bool:
    """Whether no transform is on, or each leaves alone what the functions of a call read, and the
    mask that what they show is joined with."""
    if not has_transforms():
        return True
    if untransformed is None or routing.CHECK_VALUES or call.block_mask is not None:
        return False
    if call.mask_mod is not None and call.attn_mask is not None and is_wrapped(call.attn_mask):
        return False
    return all(map(_reads_plain_tensors, filter(callable, (call.score_mod, call.mask_mod))))


def aside() -> AbstractContextManager[Any]:
    """Code in which no transform is on, to trace functions and make masks."""
    on = untransformed is not None and has_transforms()
    return untransformed() if untransformed is not None and on else nullcontext()


def _reads_plain_tensors(mod: Any) -> bool:
    """Whether all that a function reads is known, and neither wrapped nor to have gradients."""
    key, tensors = fingerprint(mod)
    return key is not None and not any(is_wrapped(x) or x.requires_grad for x in tensors)

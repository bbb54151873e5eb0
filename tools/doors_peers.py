"""Peers of `tools/doors_speed.py`: masks with which they can be timed, and time to compile."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor import config as inductor

from attngen.errors import MeasureError


def register_masks() -> None:
    """Let transformers make these masks, in this process."""
    from transformers import AttentionMaskInterface

    for name, mask in (("eager", own_mask), ("flex_attention", flex_mask)):
        AttentionMaskInterface.register(name, mask)


def own_mask(*, dtype: torch.dtype, **given: Any) -> torch.Tensor:
    """The mask [b, 1, q, kv] that a model's own attention adds to the scores, made by kernels
    alone."""
    from transformers.masking_utils import sdpa_mask

    whole = given | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    shown: Any = sdpa_mask(**whole)
    hidden = torch.finfo(dtype).min
    return torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill_(~shown, hidden)


def flex_mask(*, q_offset: int | torch.Tensor, **given: Any) -> Any:
    """The mask of FlexAttention, whose queries stay where they are when the cache counts them."""
    from transformers.masking_utils import flex_attention_mask

    place = q_offset.clone() if isinstance(q_offset, torch.Tensor) else q_offset
    return flex_attention_mask(q_offset=place, **given)


@contextmanager
def compiled(until: float, sorts: bool) -> Iterator[None]:
    """Let Inductor compile until a time of the monotonic clock. sorts: PyTorch does for it."""
    persistent = {"triton.persistent_reductions": not sorts}  # by which alone Inductor sorts
    with ended(until), inductor.patch(persistent):
        yield


@contextmanager
def ended(until: float) -> Iterator[None]:
    """Raise a MeasureError in what takes longer than until, of the monotonic clock."""

    def end(*_: Any) -> None:
        raise MeasureError("not compiled in time")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(1e-3, until - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

"""Lengths that vary: as calls say them, and as operations take them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...call.table import Lengths
from ...spec.layouts import Format, parse

Given = tuple[Tensor | None, ...]  # in the order of signature.LENGTHS


def settle(layout: str, given: Given) -> Given:
    """The lengths of a call as operations take them: of each side, dense operands' as `seqused`."""
    parsed = parse(layout)
    if not parsed.one_length and not _any(given[:2]):
        return given
    q, kv = given[0::2], given[1::2]
    if parsed.one_length:
        q, kv = (own if _any(own) else other for own, other in ((q, kv), (kv, q)))
    sides = zip(_of_side(q, parsed.q_format), _of_side(kv, parsed.kv_format), strict=True)
    return tuple(x for pair in sides for x in pair)


def _any(side: Given) -> bool:
    return any(x is not None for x in side)


def _of_side(side: Given, axes: Format) -> Given:
    cu_seqlens, *_ = side
    if axes == "thd" or cu_seqlens is None:
        return side
    return None, None, cu_seqlens.diff()


def rows_of_none(lse: Tensor, given: Mapping[str, Tensor | None]) -> Tensor | None:
    """Which rows of an LSE belong to no sequence, a broadcast of it; None where all do for certain.
    given: the lengths of an operation, by their names."""
    rows = lse.shape[-1]
    if (used := given.get("seqused_q")) is not None:
        return torch.arange(rows, device=lse.device) >= used[:, None, None]
    if (ends := given.get("cu_seqlens_q")) is None:
        return None
    return ~packed_rows_in_use(ends, given.get("cu_seqlens_q_padded"), rows)


def rows_in_use(lengths: Lengths, axes: list[str], carrier: Tensor) -> Tensor | None:
    """Which rows of a carrier of these axes belong to a sequence, a broadcast of it; None where no
    lengths say, or where these do not fit, which is for the checks to name."""
    ends, used = lengths.cu_seqlens, lengths.seqused
    if len(axes) != carrier.ndim or any(
        isinstance(x, Tensor) and x.ndim != 1 for x in (ends, used)
    ):
        return None
    sizes = dict(zip(axes, carrier.shape, strict=True))
    if "t" in axes:
        if not isinstance(ends, Tensor):
            return None
        shown = packed_rows_in_use(ends, lengths.padded, sizes["t"])
        return shown.reshape([sizes["t"] if axis == "t" else 1 for axis in axes])
    if used is None and isinstance(ends, Tensor):
        used = ends.diff()
    if not isinstance(used, Tensor) or used.shape[0] != sizes["b"]:
        return None
    shown = torch.arange(sizes["s"], device=carrier.device) < used[:, None]
    if axes.index("s") < axes.index("b"):
        shown = shown.t()
    return shown.reshape([sizes[axis] if axis in "bs" else 1 for axis in axes])


def packed_rows_in_use(ends: Tensor, offsets: Tensor | None, rows: int) -> Tensor:
    """Which of so many packed rows belong to a sequence, bool [rows]. ends: cumulative lengths;
    offsets: where sequences begin, if there are gaps."""
    starts = (ends if offsets is None else offsets)[:-1].long()
    lengths = ends.long().diff()
    # As kernels have it, whatever the integers say: what does not lie in the tensor has no rows.
    lies = (starts >= 0) & (lengths >= 0) & (starts + lengths <= rows)
    starts, lengths = starts.where(lies, 0), lengths.where(lies, 0)
    steps = torch.zeros(rows + 1, dtype=torch.int32, device=ends.device)
    ones = torch.ones_like(starts, dtype=torch.int32)
    steps.index_add_(0, starts, ones)
    steps.index_add_(0, starts + lengths, -ones)
    return steps[:-1].cumsum(0) > 0

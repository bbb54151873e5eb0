"""Decode: which calls have few queries a sequence, how their keys are split, where pages lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..layouts import parse, size
from ..load import LoadedKernel
from ..run_time import Extent, choose_splits
from .signature import Arguments

ROWS = 64  # of a tile: queries times the heads of a group
DTYPES = (torch.float16, torch.bfloat16)
SMALLEST_PAGE = 8  # rows that a swizzled copy can place


def serves(
    q: Tensor, k: Tensor, optional: Mapping[str, Tensor | None], arguments: Arguments
) -> bool:
    """Whether the kernels that split keys take a call: all with pages, and dense 16-bit ones whose
    queries, with the heads of a group, fill no more than a tile, or that say `num_splits`."""
    layout = parse(arguments.layout)
    if layout.paged:
        return True
    if "thd" in layout.formats or optional["seqused_q"] is not None:
        return False
    if q.dtype not in DTYPES or k.dtype != q.dtype or arguments.out_dtype not in (None, q.dtype):
        return False
    heads_q, heads_kv = size(q.shape, layout.q_format, "h"), size(k.shape, layout.kv_format, "h")
    rows = size(q.shape, layout.q_format, "s") * heads_q // max(1, heads_kv)
    return rows <= ROWS or arguments.num_splits > 0


def splits_of(
    kernels: Sequence[LoadedKernel],
    extents: Mapping[str, Extent],
    optional: Mapping[str, Tensor | None],
    asked: int,
) -> int:
    """Into how many parts the keys of each sequence are split."""
    first, q, k = kernels[0], extents["q"], extents["k"]
    entry = first.kernel
    tiles = -(-q.seq * (q.heads // k.heads) // entry.tile_rows) * k.heads * q.batch
    slots = first.multiprocessors * entry.ctas
    return asked or choose_splits(tiles, -(-keys_of(extents, optional) // entry.block_keys), slots)


def keys_of(extents: Mapping[str, Extent], optional: Mapping[str, Tensor | None]) -> int:
    """Keys that a sequence may have at most."""
    table = optional["page_table_k"]
    return extents["k"].seq * (1 if table is None else table.shape[1])


def numbers_of(
    extents: Mapping[str, Extent], optional: Mapping[str, Tensor | None]
) -> dict[str, int | float]:
    """Parameters that say where pages lie; none where there are none."""
    found: dict[str, int | float] = {}
    for name in ("k", "v"):
        table = optional[f"page_table_{name}"]
        if table is not None:
            found[f"{name}_page_table_stride"] = table.stride(0)
            found[f"{name}_page_size"] = extents[name].seq
            found["kv_len"] = keys_of(extents, optional)
    return found


def violations(
    extents: Mapping[str, Extent], optional: Mapping[str, Tensor | None], arguments: Arguments
) -> Iterator[str]:
    """What the kernels that read pages cannot take, of a call with pages."""
    if parse(arguments.layout).q_format == "thd":
        yield "packed queries over paged keys have no kernels yet; pass bshd or sbhd queries"
    if optional["seqused_q"] is not None:
        yield "seqused_q beside pages has no kernels yet; leave it out"
    for name in ("k", "v"):
        rows, table = extents[name].seq, optional[f"page_table_{name}"]
        if rows < SMALLEST_PAGE or rows & (rows - 1):
            yield (
                f"{name} has pages of {rows} positions; kernels read powers of two from "
                f"{SMALLEST_PAGE} on"
            )
        if table is not None and table.ndim == 2 and table.shape[1] > 1 and table.stride(1) != 1:
            yield f"page_table_{name}: a sequence's pages have stride {table.stride(1)}, need 1"

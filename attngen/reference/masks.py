"""Which keys a query sees, and where the diagonal lies: bands, tensors, callables, blocks.

True = takes part, everywhere. Positions i (query) and j (key) count inside one sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..call.fragments import fragments_of
from ..call.positions import Positions
from ..call.table import AttentionCall, Sides
from ..spec.masks import band_of, masks_of
from .callables import Shape, map_mask
from .fragments import operands_of_sequence, positions, seen_by

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def diagonal_offset(mask: str, bottom_right: bool | None, s_q: int, s_kv: int) -> int:
    """Δ: query i lies on the diagonal with key i + Δ; lengths are the actual ones."""
    if bottom_right is None:
        bottom_right = mask.endswith("bottom_right")
    return s_kv - s_q if bottom_right else 0


def positions_of(call: AttentionCall, b: int) -> Positions | None:
    """The positions of sequence b of a call, whose number among dropout's is that of a first one
    plus b; None where it gives none."""
    given = None if call.positions is None else Positions.of(call.positions)
    if call.places is None:
        return given
    query, key, diagonal, sequence = call.places[b].tolist()
    return Positions(query, key, diagonal, 0 if given is None else given.head, sequence - b)


def diagonal_of(call: AttentionCall, b: int, s_q: int, s_kv: int) -> int:
    """Δ of sequence b of a call: as its positions say, or its alignment."""
    if (stands := positions_of(call, b)) is not None:
        return stands.diagonal
    return diagonal_offset(call.mask, call.bottom_right, s_q, s_kv)


def visible(
    s_q: int,
    s_kv: int,
    *,
    mask: str = "none",
    window: Sides = (-1, -1),
    bottom_right: bool | None = None,
    delta: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The band that a mask's name and a window leave, bool [s_q, s_kv], True = seen. delta: key on
    the first query's diagonal, where no alignment says it."""
    left, right = band_of(mask, window)
    diagonal = torch.arange(s_q, device=device)[:, None]
    delta = diagonal_offset(mask, bottom_right, s_q, s_kv) if delta is None else delta
    diagonal = diagonal + delta
    j = torch.arange(s_kv, device=device)[None, :]
    seen = torch.ones(s_q, s_kv, dtype=torch.bool, device=device)
    if left is not None:
        seen = seen & (j >= diagonal - left)
    if right is not None:
        seen = seen & (j <= diagonal + right)
    return seen


def sequence_visible(call: AttentionCall, b: int, heads: int, s_q: int, s_kv: int) -> Tensor:
    """Keys that sequence b sees under all masks, bool, broadcasts to [heads, s_q, s_kv]."""
    device = call.q.device
    seen = visible(
        s_q,
        s_kv,
        mask=call.mask,
        window=call.window,
        delta=diagonal_of(call, b, s_q, s_kv),
        device=device,
    )
    named = [each for each in fragments_of(call.mask, None) if each.name != "causal"]
    if named:
        delta = diagonal_of(call, b, s_q, s_kv)
        known, given = positions(s_q, s_kv, delta, device), dict(call.fragment_arguments)
        for each in named:
            seen = seen & seen_by(each, operands_of_sequence(given, each, b), known)
    if call.attn_mask is not None:
        seen = seen & sequence_slice(call.attn_mask, b, s_q, s_kv)
    hidden = seen if hides(call) else None
    if call.block_mask is not None:
        hidden = seen = seen & block_mask_visible(call.block_mask, b, (heads, s_q, s_kv), hidden)
    if call.mask_mod is not None:
        seen = seen & map_mask(call.mask_mod, b, (heads, s_q, s_kv), hidden, device)
    return seen


def hides(call: AttentionCall) -> bool:
    """Whether a call has a mask or a window, but for callables, that may hide keys."""
    bounded = band_of(call.mask, call.window) != (None, None)
    return bounded or bool(masks_of(call.mask).fragments) or call.attn_mask is not None


def sequence_slice(tensor: Tensor, b: int, s_q: int, s_kv: int) -> Tensor:
    """The part of a [b, h, s_q, s_kv] broadcast that concerns sequence b: 3 dimensions."""
    tensor = tensor[(None,) * (4 - tensor.ndim)]
    return tensor[b if tensor.shape[0] > 1 else 0, :, :s_q, :s_kv]


def block_mask_visible(block_mask: BlockMask, b: int, shape: Shape, seen: Tensor | None) -> Tensor:
    """Pairs that a BlockMask shows, bool [heads, s_q, s_kv].

    A full block shows all its positions, a partial block those that its mask_mod keeps, and
    a block in neither list shows none. For masks of `create_block_mask` that is the mask_mod.
    seen: what other masks show; None for all.
    """
    _, s_q, s_kv = shape
    partial, full = listed_pairs(block_mask, b, shape)
    device = block_mask.kv_indices.device
    asked = partial if seen is None else partial & seen
    kept = map_mask(block_mask.mask_mod, b, shape, asked.expand(-1, s_q, s_kv), device)
    return (partial & kept) | full


def listed_pairs(block_mask: BlockMask, b: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Pairs of sequence b in the partial, and in the full blocks of a BlockMask, each bool
    [heads or 1, s_q, s_kv], or [] where there are none."""
    _, s_q, s_kv = shape
    q_block, kv_block = block_mask.BLOCK_SIZE
    blocks = (-(-s_q // q_block), -(-s_kv // kv_block))

    def shown(count: Tensor | None, index: Tensor | None) -> Tensor:
        if count is None or index is None:
            return torch.zeros((), dtype=torch.bool, device=block_mask.kv_indices.device)
        b_stored = b if count.shape[0] > 1 else 0
        listed = listed_blocks(count[b_stored], index[b_stored], *blocks)
        rows = listed.repeat_interleave(q_block, dim=-2)
        return rows.repeat_interleave(kv_block, dim=-1)[..., :s_q, :s_kv]

    return (
        shown(block_mask.kv_num_blocks, block_mask.kv_indices),
        shown(block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    )


def listed_blocks(count: Tensor, index: Tensor, rows: int, cols: int) -> Tensor:
    """Lists of key blocks per row of blocks, as bool [heads, rows, cols].

    count: int32 [heads, rows], index: int32 [heads, rows, n]; what lies past the count is
    unspecified and not read.
    """
    count, index = count[:, :rows], index[:, :rows]
    in_list = torch.arange(index.shape[-1], device=index.device) < count[..., None]
    # One column more takes the unspecified entries, and the blocks beyond these lengths.
    column = torch.where(in_list, index, cols).clamp(max=cols).long()
    hits = torch.zeros(*index.shape[:-1], cols + 1, dtype=torch.int32, device=index.device)
    return hits.scatter_add(-1, column, in_list.int())[..., :cols] > 0

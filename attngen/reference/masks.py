"""Which keys a query sees, and where the diagonal lies: bands, tensors, callables, blocks.

True = takes part, everywhere. Positions i (query) and j (key) count inside one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import SpecError
from .call import AttentionCall, MaskMod, ScoreMod, Window
from .wording import shape_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MASKS = (
    "none",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
    "arbitrary",
)


def band(mask: str, window: Window) -> tuple[int | None, int | None]:
    """Keys left and right of the diagonal that are seen, both inclusive; None = all of them."""
    left, right = (None if side is None or side < 0 else side for side in window)
    return left, 0 if "causal" in mask else right


def diagonal_offset(mask: str, bottom_right: bool | None, s_q: int, s_kv: int) -> int:
    """Δ: query i lies on the diagonal with key i + Δ; lengths are the actual ones."""
    if bottom_right is None:
        bottom_right = mask.endswith("bottom_right")
    return s_kv - s_q if bottom_right else 0


def visible(
    s_q: int,
    s_kv: int,
    *,
    mask: str = "none",
    window: Window = (-1, -1),
    bottom_right: bool | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The band that a mask's name and a window leave, bool [s_q, s_kv], True = seen."""
    left, right = band(mask, window)
    diagonal = torch.arange(s_q, device=device)[:, None]
    diagonal = diagonal + diagonal_offset(mask, bottom_right, s_q, s_kv)
    j = torch.arange(s_kv, device=device)[None, :]
    seen = torch.ones(s_q, s_kv, dtype=torch.bool, device=device)
    if left is not None:
        seen = seen & (j >= diagonal - left)
    if right is not None:
        seen = seen & (j <= diagonal + right)
    return seen


def sequence_visible(call: AttentionCall, b: int, heads: int, s_q: int, s_kv: int) -> Tensor:
    """What sequence b sees under all masks of the call, bool, broadcasts to [heads, s_q, s_kv]."""
    device = call.q.device
    seen = visible(
        s_q,
        s_kv,
        mask=call.mask,
        window=call.window,
        bottom_right=call.bottom_right,
        device=device,
    )
    if call.attn_mask is not None:
        seen = seen & sequence_slice(call.attn_mask, b, s_q, s_kv)
    if call.mask_mod is not None:
        seen = seen & map_positions(call.mask_mod, b, heads, s_q, s_kv, device)
    if call.block_mask is not None:
        seen = seen & block_mask_visible(call.block_mask, b, heads, s_q, s_kv)
    return seen


def sequence_slice(tensor: Tensor, b: int, s_q: int, s_kv: int) -> Tensor:
    """The part of a [b, h, s_q, s_kv] broadcast that concerns sequence b: 3 dimensions."""
    tensor = tensor[(None,) * (4 - tensor.ndim)]
    return tensor[b if tensor.shape[0] > 1 else 0, :, :s_q, :s_kv]


def map_positions(
    mod: MaskMod, b: int, heads: int, s_q: int, s_kv: int, device: torch.device
) -> Tensor:
    """`mod(b, h, i, j)` of every position of sequence b, bool [heads, s_q, s_kv]."""
    if heads * s_q * s_kv == 0:
        return torch.ones(heads, s_q, s_kv, dtype=torch.bool, device=device)
    every_j = torch.vmap(_one_number("mask_mod", mod), in_dims=(None, None, None, 0))
    every_ij = torch.vmap(every_j, in_dims=(None, None, 0, None))
    every_hij = torch.vmap(every_ij, in_dims=(None, 0, None, None))
    mapped: Tensor = every_hij(*_indices(b, heads, s_q, s_kv, device))
    return mapped.to(torch.bool)


def map_scores(mod: ScoreMod, scores: Tensor, b: int) -> Tensor:
    """`mod(score, b, h, i, j)` of every score of sequence b, [heads, s_q, s_kv]."""
    if scores.numel() == 0:
        return scores
    every_j = torch.vmap(_one_number("score_mod", mod), in_dims=(0, None, None, None, 0))
    every_ij = torch.vmap(every_j, in_dims=(0, None, None, 0, None))
    every_hij = torch.vmap(every_ij, in_dims=(0, None, 0, None, None))
    heads, s_q, s_kv = scores.shape
    mapped: Tensor = every_hij(scores, *_indices(b, heads, s_q, s_kv, scores.device))
    return mapped.to(scores.dtype)


def _one_number(name: str, mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, which raises SpecError where it returns anything but a tensor of one number."""

    def checked(*position: Tensor) -> Tensor:
        found: object = mod(*position)
        if isinstance(found, Tensor) and not found.ndim:
            return found
        raise SpecError(
            f"{name} needs to return one number a position, as a tensor; got {shape_of(found)}."
        )

    return checked


def block_mask_visible(block_mask: BlockMask, b: int, heads: int, s_q: int, s_kv: int) -> Tensor:
    """What a BlockMask shows, bool [heads or 1, s_q, s_kv].

    A full block shows all its positions, a partial block those that its mask_mod keeps, and
    a block in neither list shows none. For masks of `create_block_mask` that is the mask_mod.
    """
    q_block, kv_block = block_mask.BLOCK_SIZE
    blocks = (-(-s_q // q_block), -(-s_kv // kv_block))

    def shown(count: Tensor | None, index: Tensor | None) -> Tensor:
        if count is None or index is None:
            return torch.zeros((), dtype=torch.bool, device=block_mask.kv_indices.device)
        b_stored = b if count.shape[0] > 1 else 0
        listed = _listed_blocks(count[b_stored], index[b_stored], *blocks)
        rows = listed.repeat_interleave(q_block, dim=-2)
        return rows.repeat_interleave(kv_block, dim=-1)[..., :s_q, :s_kv]

    partial = shown(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = shown(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    device = block_mask.kv_indices.device
    kept = map_positions(block_mask.mask_mod, b, heads, s_q, s_kv, device)
    return (partial & kept) | full


def _listed_blocks(count: Tensor, index: Tensor, rows: int, cols: int) -> Tensor:
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


def _indices(
    b: int, heads: int, s_q: int, s_kv: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Index tensors as FlexAttention passes them: int32 b [], h [heads], i [s_q], j [s_kv]."""
    h, i, j = (torch.arange(n, dtype=torch.int32, device=device) for n in (heads, s_q, s_kv))
    return torch.tensor(b, dtype=torch.int32, device=device), h, i, j

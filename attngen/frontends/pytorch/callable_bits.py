"""Masks of callables as kernels of attention read them: bits, and the blocks that these show, made
by a kernel of the mask's own program."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...call.cache import CallCache
from ...call.made_mask import parts_of
from ...call.prepare_mask import ListedBlocks, PreparedMask, prepare_mask
from ...errors import SpecError
from ...fragments.features import register_program
from ...reference.masks import listed_blocks
from .callable_mask import MOST_BYTES, Sizes, places_of
from .callable_program import Traced
from .descriptions import described, device_of
from .operation import current, format_of, is_current, start
from .torch_private import guard

_EMPTY, _PARTIAL, _FULL = range(3)  # states of blocks


@dataclass(frozen=True, eq=False)
class Listed:
    """The blocks of a BlockMask: their states, uint8 [b or 1, h or 1, rows, columns], and how many
    queries and keys each has."""

    states: Tensor
    queries: int
    keys: int

    @classmethod
    def of(cls, block_mask: Any, sizes: Sizes) -> Listed:
        """The blocks of a mask's lists, for a call of these sizes."""
        queries, keys = block_mask.BLOCK_SIZE
        rows, columns = -(-sizes.i // queries), -(-sizes.j // keys)
        shape = *block_mask.kv_num_blocks.shape[:2], rows, columns
        states = torch.full(shape, _EMPTY, dtype=torch.uint8, device=block_mask.kv_indices.device)
        for state, kind in ((_PARTIAL, ""), (_FULL, "full_")):
            counts = getattr(block_mask, f"{kind}kv_num_blocks")
            if counts is not None:
                index = getattr(block_mask, f"{kind}kv_indices")
                pairs = zip(counts, index, strict=True)
                found = torch.stack([listed_blocks(*each, rows, columns) for each in pairs])
                states[:, :, : found.shape[2]][found] = state
        return cls(states, queries, keys)


prepared_masks: CallCache[PreparedMask] = CallCache(guard)


def made_by(
    traced: Traced,
    sizes: Sizes,
    device: torch.device,
    *,
    columns: bool,
    listed: Listed | None = None,
) -> Tensor:
    """The mask of a mask_mod, int32 [b or 1, h or 1, words] of `call/made_mask.py`.

    columns: with what gradients need; listed: blocks of which it says what takes part, if not all.
    Nothing waits for the device.
    Raises: SpecError where it is too large; CompileError, LaunchError.
    """
    on, (batches, heads) = places_of(traced.program), listed.states.shape[:2] if listed else (1, 1)
    planes = (
        sizes.b if "b" in on or batches > 1 else 1,
        sizes.h if "h" in on or heads > 1 else 1,
    )
    parts = parts_of(sizes.i, sizes.j, columns=columns)
    if 4 * math.prod(planes) * parts.words > MOST_BYTES:
        raise SpecError(
            f"mask_mod over {sizes.i} x {sizes.j} pairs of {math.prod(planes)} planes takes more "
            f"than {MOST_BYTES >> 30} GiB of bits. Name a mask, or pass a window."
        )
    with torch.inference_mode(False), torch.no_grad():  # a call that trains may save it
        made = torch.zeros(*planes, parts.words, dtype=torch.int32, device=device)
    _make(traced, made, sizes, listed)
    return made


def _make(traced: Traced, made: Tensor, sizes: Sizes, listed: Listed | None) -> None:
    """Run the kernel of a mask's program."""
    tensors = (made, *traced.captures, *((listed.states,) if listed else ()))
    program, places = traced.program, (sizes.i, sizes.j)
    block = (listed.queries, listed.keys) if listed else None
    # Numbers by their types, too: 1, 1.0 and True are equal.
    key = program.name, places, block, *map(repr, traced.numbers), *map(format_of, tensors)

    def prepared() -> PreparedMask:
        register_program(program)
        captures = [described(x) for x in traced.captures]
        device = device_of(made.device)
        blocks = ListedBlocks(described(listed.states), *block) if listed and block else None
        form = described(made)
        return prepare_mask(program, traced.numbers, captures, form, places, device, blocks)

    found = prepared_masks.remember(key, prepared)
    pointers = [x.data_ptr() for x in tensors]
    if is_current(found.device):
        start(found, pointers)
        return
    with current(found.device):
        start(found, pointers)

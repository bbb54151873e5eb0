"""Masks of callables as kernels of attention read them: bits, and the blocks that these show, made
by a kernel of the mask's own program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....call.cache import CallCache
from ....call.made_mask import parts_of
from ....call.prepare.mask import ListedBlocks, PreparedMask, prepare_mask
from ....call.room import bytes_named
from ....call.tensors import TensorDesc
from ....errors import SpecError
from ....fragments.features import register_program
from ....fragments.program import Program
from ....reference.masks import listed_blocks
from ..descriptions import described, device_of
from ..operation import format_of, start_on_its_device
from ..torch_private import guard
from .asked import AskedMaker, asked_maker_of
from .mask import MOST_BYTES, Sizes, places_of
from .program import Traced

VARIABLE = "ATTNGEN_MASK_MEGABYTES"  # says another limit of bits
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


@dataclass(frozen=True, eq=False)
class Maker:
    """The making of masks of one shape, of one program and its numbers, of captured tensors of one
    format each. map_words: of a plane; block_states: of a BlockMask."""

    shape: tuple[int, ...]
    map_words: int
    device: torch.device
    prepared: PreparedMask
    block_states: Tensor | None = None

    def __call__(self, captures: Sequence[Tensor], shown: Tensor | None = None) -> Tensor:
        """A mask of these tensors. shown: booleans beside the function, if it was made for such.
        Raises: LaunchError."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # a call that trains may save it
                return self(captures, shown)
        made = torch.empty(self.shape, dtype=torch.int32, device=self.device)
        made[..., : self.map_words].zero_()
        pointers = [made.data_ptr(), *[x.data_ptr() for x in captures]]
        if self.block_states is not None:
            pointers.append(self.block_states.data_ptr())
        if shown is not None:
            pointers.append(shown.data_ptr())
        start_on_its_device(self.prepared, pointers)
        return made


def planes_of(program: Program, sizes: Sizes, beside: Sequence[Tensor | None]) -> tuple[int, int]:
    """Sequences and heads that a mask tells apart, 1 where all are alike. beside: broadcasts of
    [b, h, …] that it is joined with."""
    on = places_of(program)
    shapes = [tuple(x.shape) for x in beside if x is not None]
    heads, batches = (max([1, *[x[axis] for x in shapes if len(x) >= -axis]]) for axis in (-3, -4))
    return (
        sizes.b if "b" in on or batches > 1 else 1,
        sizes.h if "h" in on or heads > 1 else 1,
    )


def made_by(
    traced: Traced,
    sizes: Sizes,
    device: torch.device,
    *,
    columns: bool,
    listed: Listed | None = None,
) -> Tensor:
    """The mask of a mask_mod, int32 [b or 1, h or 1, words] of `call/made_mask.py`. Arguments and
    errors as of `maker_of`. Nothing waits for the device."""
    return maker_of(traced, sizes, device, columns=columns, listed=listed)(traced.captures)


def maker_of(
    traced: Traced,
    sizes: Sizes,
    device: torch.device,
    *,
    columns: bool,
    listed: Listed | None = None,
    shown: Tensor | None = None,
    may_ask: bool = False,
) -> Maker | AskedMaker:
    """The making of a mask_mod's masks.

    columns: with what gradients need; listed: blocks of which it says what takes part, if not all;
    shown: booleans beside it, a broadcast of [b, h, s_q, s_kv]; may_ask: whether kernels may ask
    its program where bits are too large.
    Raises: SpecError where it is too large; CompileError, LaunchError.
    """
    states = listed.states if listed else None
    planes = planes_of(traced.program, sizes, (states, shown))
    parts = parts_of(sizes.i, sizes.j, columns=columns)
    if 4 * math.prod(planes) * parts.words > (most := bytes_named(VARIABLE, MOST_BYTES)):
        if may_ask and states is None and shown is None:
            register_program(traced.program)
            return asked_maker_of(traced, sizes, device, planes, MOST_BYTES)
        raise SpecError(
            f"mask_mod over {sizes.i} x {sizes.j} pairs of {math.prod(planes)} planes takes more "
            f"than {most >> 20} MiB of bits. Name a mask, or pass a window."
        )
    shape, program, places = (*planes, parts.words), traced.program, (sizes.i, sizes.j)
    block = (listed.queries, listed.keys) if listed else None
    tensors = (*traced.captures, states, shown)
    # Numbers by their types, too: 1, 1.0 and True are equal.
    numbers = tuple(map(repr, traced.numbers))
    key = program.name, numbers, places, block, shape, device, *map(format_of, tensors)

    def prepared() -> PreparedMask:
        register_program(program)
        captures = [described(x) for x in traced.captures]
        blocks = ListedBlocks(described(states), *block) if block and states is not None else None
        form = TensorDesc.contiguous(shape, "int32")
        where = device_of(device)
        more = None if shown is None else described(shown)
        return prepare_mask(program, traced.numbers, captures, form, places, where, blocks, more)

    return Maker(shape, parts.map_words, device, prepared_masks.remember(key, prepared), states)

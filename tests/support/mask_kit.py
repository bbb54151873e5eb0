"""Mask functions built as transformers builds its own, the masks that they make, and requests."""

from __future__ import annotations

from typing import Any

import torch
from attngen.integrations import transformers as door
from torch import Tensor

from attngen.frontends.integrations.mask_plan import PlannedMask

B, H, D = 2, 2, 16


def named(function: Any, name: str) -> Any:
    """A function under the name and in the module of one of the library's."""
    function.__qualname__, function.__module__ = name, "transformers.masking_utils"
    return function


CAUSAL = named(lambda b, h, i, j: j <= i, "causal_mask_function")
EVERYWHERE = named(lambda b, h, i, j: (i >= 0) & (j >= 0), "bidirectional_mask_function")


def window(sliding_window: int) -> Any:
    def inner_mask(b, h, i, j):
        return j > i - sliding_window

    return named(inner_mask, "sliding_window_overlay.<locals>.inner_mask")


def both_ways(sliding_window: int) -> Any:
    def inner_mask(b, h, i, j):
        return (i - j).abs() <= sliding_window

    return named(inner_mask, "sliding_window_bidirectional_overlay.<locals>.inner_mask")


def chunks(chunk_size: int, left_padding: Tensor) -> Any:
    def inner_mask(b, h, i, j):
        begins = left_padding[b]
        return (j - begins) // chunk_size == (i - begins) // chunk_size

    return named(inner_mask, "chunked_overlay.<locals>.inner_mask")


def documents(packed_sequence_mask: Tensor) -> Any:
    def inner_mask(b, h, i, j):
        return packed_sequence_mask[b, i] == packed_sequence_mask[b, j]

    return named(inner_mask, "packed_sequence_mask_function.<locals>.inner_mask")


def blocks(block_sequence_ids: Tensor) -> Any:
    def inner_mask(b, h, i, j):
        group = block_sequence_ids[b, i]
        return (group == block_sequence_ids[b, j]) & (group >= 0)

    return named(inner_mask, "blockwise_overlay.<locals>.inner_mask")


def counted(mask_function: Any, position_ids: Tensor) -> Any:
    def inner_mask(b, h, i, j):
        return mask_function(b, h, position_ids[b, i], position_ids[b, j])

    return named(inner_mask, "remap_positions_for_packed_sequence.<locals>.inner_mask")


def every(*mask_functions: Any) -> Any:
    def and_mask(b, h, i, j):
        found = mask_functions[0](b, h, i, j)
        for each in mask_functions[1:]:
            found = found & each(b, h, i, j)
        return found

    return named(and_mask, "and_masks.<locals>.and_mask")


def either(*mask_functions: Any) -> Any:
    def or_mask(b, h, i, j):
        found = mask_functions[0](b, h, i, j)
        for each in mask_functions[1:]:
            found = found | each(b, h, i, j)
        return found

    return named(or_mask, "or_masks.<locals>.or_mask")


def dense_of(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask):
    """The mask by its function, bool [b, 1, q, kv]."""
    b = torch.arange(batch_size)[:, None, None]
    i = (torch.arange(q_length) + q_offset)[:, None]
    j = torch.arange(kv_length) + kv_offset
    mask = mask_function(b, 0, i, j).expand(batch_size, q_length, kv_length)
    if attention_mask is not None:
        room = kv_offset + kv_length - attention_mask.shape[1]
        whole = torch.nn.functional.pad(attention_mask, (0, max(room, 0)))
        mask = mask & whole[:, None, kv_offset : kv_offset + kv_length]
    return mask[:, None]


def padded(*spans: tuple[int, int], room: int = 12) -> Tensor:
    """A padding mask whose sequences are rows from the first to before the second number."""
    there = torch.arange(room)
    return torch.stack([(there >= a) & (there < b) for a, b in spans])


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2], [0] * 7 + [1] * 5])
PLACES = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3], [*range(7), *range(5)]])
BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, 2, 2, 2], [-1] * 6 + [0] * 4 + [-1] * 2])
NO_PADDING = torch.zeros(B, dtype=torch.long)
LEFT, RIGHT = padded((5, 12), (0, 12)), padded((0, 9), (0, 12))
SLIDING = every(window(4), CAUSAL)
Sizes = tuple[int, int, Any, int]  # of queries and keys, and where both stand
WHOLE, STEP, GROWN = (12, 12, 0, 0), (1, 12, 11, 0), (3, 12, 9, 0)
FIXED, BEGUN = (5, 12, 0, 0), (2, 12, 6, 0)  # of a cache whose last rows are empty
PLANNED: dict[str, tuple[Any, Sizes, Tensor | None]] = {
    "causal": (CAUSAL, WHOLE, None),
    "causal step": (CAUSAL, STEP, None),
    "causal chunk of a prompt": (CAUSAL, GROWN, None),
    "causal, all tokens": (CAUSAL, WHOLE, padded((0, 12), (0, 12))),
    "causal behind padding": (CAUSAL, WHOLE, LEFT),
    "step behind padding": (CAUSAL, STEP, LEFT),
    "chunk of a prompt behind padding": (CAUSAL, GROWN, LEFT),
    "causal before padding": (CAUSAL, WHOLE, RIGHT),
    "fixed cache": (CAUSAL, FIXED, None),
    "fixed cache, later": (CAUSAL, BEGUN, None),
    "fixed cache behind padding": (CAUSAL, BEGUN, padded((3, 8), (0, 8), room=8)),
    "fixed cache, a tensor's place": (CAUSAL, (1, 12, torch.tensor(6), 0), None),
    "fixed cache, a tensor's place behind padding": (
        CAUSAL,
        (1, 12, torch.tensor(6), 0),
        padded((3, 7), (0, 7), room=7),
    ),
    "window": (SLIDING, WHOLE, None),
    "window behind padding": (SLIDING, WHOLE, LEFT),
    "window of a rolling cache": (SLIDING, (1, 4, 20, 17), None),
    "window of a rolling cache behind padding": (
        SLIDING,
        (1, 4, 20, 17),
        padded((18, 21), (0, 21), room=21),
    ),
    "encoder": (EVERYWHERE, WHOLE, RIGHT),
    "encoder behind padding": (EVERYWHERE, WHOLE, LEFT),
    "cross attention": (EVERYWHERE, (3, 12, 0, 0), RIGHT),
    "window both ways": (every(both_ways(3), EVERYWHERE), WHOLE, RIGHT),
    "keys before and behind the queries": (both_ways(3), (4, 12, 5, 0), None),
    "chunks": (every(chunks(4, NO_PADDING), CAUSAL), WHOLE, None),
    "chunks behind padding": (every(chunks(4, torch.tensor([5, 0])), CAUSAL), WHOLE, LEFT),
    "documents": (every(counted(CAUSAL, PLACES), documents(DOCUMENTS)), WHOLE, None),
    "documents under a window": (
        every(counted(SLIDING, PLACES), documents(DOCUMENTS)),
        WHOLE,
        None,
    ),
    "blocks": (either(CAUSAL, blocks(BLOCKS)), WHOLE, None),
    "blocks beside a window": (either(SLIDING, blocks(BLOCKS)), WHOLE, None),
    "blocks beside a window both ways": (either(both_ways(2), blocks(BLOCKS)), WHOLE, None),
    "blocks that a window cuts": (every(either(CAUSAL, blocks(BLOCKS)), window(2)), WHOLE, None),
    "blocks that a window both ways cuts": (
        every(both_ways(1), either(CAUSAL, blocks(BLOCKS))),
        WHOLE,
        LEFT,
    ),
    "blocks of an encoder": (either(EVERYWHERE, blocks(BLOCKS)), WHOLE, RIGHT),
    "blocks of a chunk of a prompt": (either(CAUSAL, blocks(BLOCKS)), GROWN, None),
    "blocks of a rolling cache": (
        either(SLIDING, blocks(torch.nn.functional.pad(BLOCKS, (6, 0), value=-1))),
        (3, 6, 14, 11),
        None,
    ),
    "blocks behind padding": (either(CAUSAL, blocks(BLOCKS)), WHOLE, LEFT),
    "blocks of a fixed cache": (
        either(CAUSAL, blocks(BLOCKS)),
        FIXED,
        padded((1, 5), (0, 5), room=5),
    ),
    "blocks of documents": (
        every(either(counted(SLIDING, PLACES), blocks(BLOCKS)), documents(DOCUMENTS)),
        WHOLE,
        None,
    ),
}


def request_of(function: Any, sizes: Sizes, padding: Tensor | None) -> dict[str, Any]:
    names = "q_length", "kv_length", "q_offset", "kv_offset"
    return {
        "batch_size": B,
        **dict(zip(names, sizes, strict=True)),
        "mask_function": function,
        "attention_mask": padding,
    }


def operands_of(s_q: int, s_kv: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, s, D, generator=generator) for s in (s_q, s_kv, s_kv)]


def whole(case: str) -> PlannedMask:
    """The plan of a case."""
    found = door.mask_of(**request_of(*PLANNED[case]))
    assert isinstance(found, PlannedMask)
    return found

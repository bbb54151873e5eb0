"""Masks of callables as kernels of attention read them: bits, and the blocks that these show, made
by a kernel of the mask's own program."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...call.cache import CallCache
from ...call.made_mask import parts_of
from ...call.prepare_mask import PreparedMask, prepare_mask
from ...errors import SpecError
from ...fragments.features import register_program
from .callable_mask import MOST_BYTES, Sizes, places_of
from .callable_program import Traced
from .descriptions import described, device_of
from .operation import current, format_of, is_current, start
from .torch_private import guard

prepared_masks: CallCache[PreparedMask] = CallCache(guard)


def made_by(traced: Traced, sizes: Sizes, device: torch.device, *, columns: bool) -> Tensor:
    """The mask of a mask_mod, int32 [b or 1, h or 1, words] of `call/made_mask.py`.

    columns: with what gradients need. Nothing waits for the device.
    Raises: SpecError where it is too large; CompileError, LaunchError.
    """
    on = places_of(traced.program)
    planes = sizes.b if "b" in on else 1, sizes.h if "h" in on else 1
    parts = parts_of(sizes.i, sizes.j, columns=columns)
    if 4 * math.prod(planes) * parts.words > MOST_BYTES:
        raise SpecError(
            f"mask_mod over {sizes.i} x {sizes.j} pairs of {math.prod(planes)} planes takes more "
            f"than {MOST_BYTES >> 30} GiB of bits. Name a mask, or pass a window."
        )
    with torch.inference_mode(False), torch.no_grad():  # a call that trains may save it
        made = torch.empty(*planes, parts.words, dtype=torch.int32, device=device)
        made[..., : parts.map_words].zero_()
    _make(traced, made, sizes)
    return made


def _make(traced: Traced, made: Tensor, sizes: Sizes) -> None:
    """Run the kernel of a mask's program."""
    tensors = (made, *traced.captures)
    program, places = traced.program, (sizes.i, sizes.j)
    # Numbers by their types, too: 1, 1.0 and True are equal.
    key = program.name, places, *map(repr, traced.numbers), *map(format_of, tensors)

    def prepared() -> PreparedMask:
        register_program(program)
        captures = [described(x) for x in traced.captures]
        device = device_of(made.device)
        return prepare_mask(program, traced.numbers, captures, described(made), places, device)

    found = prepared_masks.remember(key, prepared)
    pointers = [x.data_ptr() for x in tensors]
    if is_current(found.device):
        start(found, pointers)
        return
    with current(found.device):
        start(found, pointers)

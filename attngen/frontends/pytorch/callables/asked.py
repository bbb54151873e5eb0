"""Masks of callables that kernels of attention ask themselves: maps of blocks, and what the program
reads, where bits of all pairs would take too much memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....call.made_mask import asked_parts_of
from ....call.prepare.mask import PreparedMask, prepare_mask
from ....call.tensors import TensorDesc
from ....errors import SpecError
from ....fragments.mask_lowering import STATE_STEP, state_bytes
from ..descriptions import device_of
from ..operation import start_on_its_device
from .mask import Sizes
from .program import Traced

_WORD_BYTES = 4
_SHORT = 1 << 31  # elements of a tensor whose places have 32 bits


@dataclass(frozen=True)
class Copy:
    """A captured tensor behind a mask: the byte at which it begins, and its description."""

    start: int
    described: TensorDesc

    @property
    def kept(self) -> tuple[int, ...]:
        """Sizes of what is copied, of broadcast axes one element."""
        found = self.described
        return tuple([n if step else 1 for n, step in zip(found.shape, found.strides, strict=True)])


@dataclass(frozen=True, eq=False)
class AskedMaker:
    """The making of such masks, of one program and its numbers, of captured tensors of one format
    each. shape: of a mask; map_words: of all its maps; copies: of captured tensors."""

    shape: tuple[int, ...]
    map_words: int
    copies: tuple[Copy, ...]
    device: torch.device
    prepared: PreparedMask

    def __call__(self, captures: Sequence[Tensor], shown: Tensor | None = None) -> Tensor:
        """A mask of these tensors. Raises: LaunchError."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # a call that trains may save it
                return self(captures)
        made = torch.empty(self.shape, dtype=torch.int32, device=self.device)
        words = made.view(-1)
        words[: self.map_words].zero_()
        room = words.view(torch.uint8)
        pointers = [made.data_ptr()]
        with torch.no_grad():
            for each, x in zip(self.copies, captures, strict=True):
                kept = each.kept
                size = math.prod(kept) * x.element_size()
                behind = room[each.start : each.start + size].view(x.dtype).view(kept)
                behind.copy_(x.as_strided(kept, x.stride(), x.storage_offset()))
                pointers.append(behind.data_ptr())
        start_on_its_device(self.prepared, pointers)
        return made


def asked_maker_of(
    traced: Traced, sizes: Sizes, device: torch.device, planes: tuple[int, int], most: int
) -> AskedMaker:
    """The making of masks of a mask_mod of so many planes, of at most so many bytes.

    Raises: SpecError where they are too large; CompileError, LaunchError.
    """
    maps = math.prod(planes) * asked_parts_of(sizes.i, sizes.j).words
    end = maps * _WORD_BYTES + state_bytes(traced.program)
    copies = []
    for x in traced.captures:
        made = Copy(end, _described(x))
        copies.append(made)
        bytes_ = math.prod(made.kept) * x.element_size()
        end += -(-bytes_ // STATE_STEP) * STATE_STEP
    if end > most or any(map(_is_beyond, traced.program.captures, copies)):
        raise SpecError(
            f"mask_mod over {sizes.i} x {sizes.j} pairs takes more than {most >> 20} MiB with the "
            "tensors that it captures. Name a mask, or pass a window."
        )
    words = -(-end // (_WORD_BYTES * math.prod(planes)))
    shape = (*planes, 1, words)
    captures = [each.described for each in copies]
    form, where = TensorDesc.contiguous(shape, "int32"), device_of(device)
    places = sizes.i, sizes.j
    prepared = prepare_mask(traced.program, traced.numbers, captures, form, places, where)
    return AskedMaker(shape, maps, tuple(copies), device, prepared)


def _described(x: Tensor) -> TensorDesc:
    """A copy of a tensor without gaps, of whose broadcast axes it has one element."""
    strides, step = [0] * x.ndim, 1
    for axis in reversed(range(x.ndim)):
        if x.stride(axis) and x.shape[axis] > 1:
            strides[axis], step = step, step * x.shape[axis]
    return TensorDesc(tuple(x.shape), tuple(strides), str(x.dtype).removeprefix("torch."))


def _is_beyond(capture: tuple[str, int, str], copy: Copy) -> bool:
    """Whether places in a copy want more bits than the program gives them."""
    _, _, type_ = capture
    return type_ == "i" and math.prod(copy.kept) >= _SHORT

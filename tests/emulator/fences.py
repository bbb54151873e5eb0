"""Memory of the host between pages that nobody may touch, for operands of kernels."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # of addresses that the copy engine takes
PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


class Fences:
    """Tensors each of which ends where an inaccessible page begins, or begins where one ends.

    at_end: which of both. What is left of the pages holds 0xFF, NaN in every floating dtype.
    """

    def __init__(self, *, at_end: bool) -> None:
        self._at_end = at_end
        self._memory: list[mmap.mmap] = []

    def empty_strided(
        self, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """A tensor, NaN, whose elements are all that there is to its memory."""
        reach = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        size = (reach + 1) * dtype.itemsize if 0 not in sizes else 0
        memory = ctypes.c_char * max(size, 1)
        flat = torch.frombuffer(memory.from_address(self._map(size)), dtype=torch.uint8)
        whole = flat[: size - size % dtype.itemsize].view(dtype)
        return whole.as_strided(tuple(sizes), tuple(strides))

    def copy(self, tensor: Tensor) -> Tensor:
        """A tensor of equal values, sizes and strides."""
        made = self.empty_strided(tensor.shape, tensor.stride(), tensor.dtype)
        return made.copy_(tensor) if tensor.numel() else made

    def check(self) -> None:
        """Nothing: an access outside has ended the launch that made it."""

    def _map(self, size: int) -> int:
        """Address of so many bytes."""
        page = mmap.PAGESIZE
        inside = max(1, -(-size // page)) * page
        memory = mmap.mmap(-1, inside + 2 * page)
        memory[:] = b"\xff" * len(memory)
        self._memory.append(memory)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for fence in (first, first + page + inside):
            if _libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), PROT_NONE):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        start = inside - size if self._at_end else 0
        return first + page + start // ALIGNMENT * ALIGNMENT

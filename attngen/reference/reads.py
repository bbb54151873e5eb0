"""Reads of callables out of range, found before a device does; asked for by ATTNGEN_CHECK=1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..call.table import AttentionCall, named
from ..errors import SpecError
from .callables import Shape
from .core import accumulation_dtype
from .masks import sequence_visible
from .mod_errors import line_of

_aten = torch.ops.aten


class _OutOfRange(Exception):
    """An index that a tensor does not have, and the pair, by its place, that reads it; None where
    the indices are not one for each pair."""

    def __init__(self, value: int, shape: list[int], axis: int, pair: int | None) -> None:
        super().__init__(f"index {value} of axis {axis} of a tensor {shape}")
        self.pair = pair


class _Watch(TorchDispatchMode):
    """Raises _OutOfRange before an operation on so many pairs reads what is not there."""

    def __init__(self, pairs: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pairs = pairs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for tensor, axis, index, low in _indices_of(func, args):
            size = tensor.numel() if axis < 0 else tensor.shape[axis]
            wrong = (index < low * size) | (index >= size)
            if bool(wrong.any()):
                place = wrong.nonzero()[0]
                of_pairs = index.ndim > 0 and index.shape[0] == self.pairs
                pair = int(place[0]) if of_pairs else None
                value = int(index[tuple(place)])
                raise _OutOfRange(value, [*tensor.shape], max(axis, 0), pair)
        return func(*args, **(kwargs or {}))


def _indices_of(func: Any, args: tuple[Any, ...]) -> Iterator[tuple[Tensor, int, Tensor, int]]:
    """Reads of an operation: a tensor, the axis (−1: all as one), the indices, and whether these
    may count from the end, −1, or begin at 0."""
    packet = func.overloadpacket
    if packet in (_aten.index, _aten._unsafe_index):
        tensor, indices = args[:2]
        if any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices):
            return
        for axis, index in enumerate(indices):
            if index is not None:
                yield tensor, axis, index, -1
    elif packet in (_aten.index_select, _aten.gather):
        tensor, axis, index = args[:3]
        yield tensor, axis % max(tensor.ndim, 1), index, 0
    elif packet is _aten.take:
        yield args[0], -1, args[1], -1
    elif packet is _aten.embedding:
        yield args[0], 0, args[1], 0


def check_reads(call: AttentionCall, b: int, shape: Shape) -> None:
    """Call `mask_mod` and `score_mod` for the pairs of sequence b that other masks, or all of them,
    leave; waits for the device. shape: heads, queries and keys.

    Raises: SpecError where one reads what a tensor does not have.
    """
    heads, s_q, s_kv = shape
    if call.mask_mod is not None:
        others = AttentionCall(**{**named(call), "mask_mod": None})
        seen = sequence_visible(others, b, heads, s_q, s_kv)
        _check("mask_mod", call.mask_mod, b, seen.expand(shape), None)
    if call.score_mod is not None and not isinstance(call.score_mod, str):
        seen = sequence_visible(call, b, heads, s_q, s_kv)
        dtype = accumulation_dtype(call.q.dtype)
        _check("score_mod", call.score_mod, b, seen.expand(shape), dtype)


def _check(
    name: str, mod: Callable[..., Tensor], b: int, seen: Tensor, dtype: torch.dtype | None
) -> None:
    """Call one of them for what is seen, bool [heads, s_q, s_kv]. dtype: of the scores that it
    gets, all 0; None where it gets none."""
    h, i, j = seen.nonzero().to(torch.int32).unbind(1)
    if not len(h):
        return
    given = [torch.full_like(h, b), h, i, j]
    if dtype is not None:
        given.insert(0, torch.zeros(len(h), dtype=dtype, device=seen.device))
    try:
        with torch.no_grad(), _Watch(len(h)):
            torch.vmap(mod)(*given)
    except _OutOfRange as error:
        where = f"for sequence {b}"
        if (at := error.pair) is not None:
            where += f", head {int(h[at])}, query {int(i[at])} and key {int(j[at])}"
        raise SpecError(
            f"{name} reads {error}{line_of(error)}, {where}, which take part. Hide the pair by a "
            "mask, or clamp the index."
        ) from error
    except Exception:  # said where the callable is called for its result
        return

"""Masks of callables: their programs evaluated on the device, for kernels that take booleans.

Positions are axes of length 1 but for their own, so that what depends on a row alone costs a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import and_
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ....call.table import AttentionCall
from ....errors import SpecError
from ....fragments.program import Operation, Program
from ....reference import Operands
from ....reference.masks import listed_pairs
from ....spec import layouts
from ..torch_private import current_stream, is_capturing
from .program import Traced

Make = Callable[["Traced", "Sizes", torch.device], Tensor]
_Versions = tuple[tuple[TensorWeakRef, int, int], ...]
_MOST_MASKS = 64
MOST_BYTES = 8 << 30  # of a mask
MOST_AT_ONCE = 1 << 24  # pairs that are evaluated together
_DTYPES = {"f": torch.float32, "i": torch.int32, "l": torch.int64, "b": torch.bool}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in (
        "add sub mul ge gt le lt eq ne where exp exp2 log log2 log1p expm1 sin cos tanh sqrt rsqrt "
        "sigmoid floor ceil trunc round abs neg sign fmod div pow").split()},
    **{"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor},
    **{"not": torch.logical_not, "invert": torch.bitwise_not, "erf": torch.erf},
    **{"min": torch.minimum, "max": torch.maximum, "recip": torch.reciprocal},
    **{"fdiv": torch.floor_divide, "mod": torch.remainder},
    "ratio": torch.div,
    "tdiv": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sequences, query heads, queries and keys of a call."""

    b: int
    h: int
    i: int
    j: int

    @classmethod
    def of(cls, call: AttentionCall, operands: Operands) -> Sizes:
        """Sizes of a checked call, keys of pages as many as its table has room for."""
        s_q, s_kv = operands.dense_s_q, operands.dense_s_kv
        if operands.layout.paged:
            fmt, pairs = operands.layout.kv_format, zip(call.page_tables, "kv", strict=True)
            pages = [(x.shape[1], getattr(operands, name).shape) for x, name in pairs]
            s_kv = min([n * layouts.size(shape, fmt, "s") for n, shape in pages])
        return cls(
            operands.batch,
            operands.h_q,
            call.q.shape[0] if s_q is None else s_q,  # of packed tokens any sequence may have all
            operands.k.shape[0] if s_kv is None else s_kv,
        )


def places_of(program: Program) -> frozenset[str]:
    """Which of b and h a program's result depends on."""
    found: dict[str, frozenset[str]] = {}
    for place, each in enumerate(program.operations):
        own = [found.get(arg, frozenset([arg]) & {"b", "h"}) for arg in each.args]
        found[f"v{place}"] = frozenset[str]().union(*own)
    return found.get(program.value, frozenset([program.value]) & {"b", "h"})


def shown_by(traced: Traced, sizes: Sizes, device: torch.device) -> Tensor:
    """The pairs that a mask_mod shows, bool [b or 1, h or 1, i, j].

    Raises: SpecError where that is too large.
    """
    on = places_of(traced.program)
    planes = sizes.b if "b" in on else 1, sizes.h if "h" in on else 1
    if math.prod((*planes, sizes.i, sizes.j)) > MOST_BYTES:
        raise SpecError(
            f"mask_mod over {sizes.i} x {sizes.j} pairs of {math.prod(planes)} planes takes more "
            f"than {MOST_BYTES >> 30} GiB of booleans. Name a mask, or pass a window."
        )
    shown = torch.empty(*planes, sizes.i, sizes.j, dtype=torch.bool, device=device)
    every = [torch.arange(n, dtype=torch.int32, device=device) for n in (*planes, sizes.i, sizes.j)]
    b, h, i, j = every
    rows = max(1, MOST_AT_ONCE // max(1, sizes.j))
    for one, other in product(range(len(b)), range(len(h))):
        # Some rows at a time: each operation of the program leaves a number a pair.
        for part, to in zip(i.split(rows), shown[one, other].split(rows), strict=True):
            values = {"b": b[one], "h": h[other], "i": part[:, None], "j": j}
            to.copy_(_Evaluation(traced, values).value(traced.program.value))
    return shown


class Masks:
    """Masks that are still in use: the layers of a step share one that backwards keep."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], tuple[TensorWeakRef, _Versions]] = {}

    def of(
        self,
        make: Make,
        traced: Traced,
        sizes: Sizes,
        device: torch.device,
        kinds: Sequence[str] = ("",),
    ) -> Tensor:
        """The mask that `make` makes of a mask_mod, of tensors that hold what they held then.
        kinds: of those that serve, the last of which is made."""
        if traced.key is None:
            return make(traced, sizes, device)
        key = traced.key, sizes, device
        return self.kept(lambda: make(traced, sizes, device), key, traced.sources, device, kinds)

    def kept(
        self,
        make: Callable[[], Tensor],
        key: tuple[Any, ...],
        sources: Sequence[Tensor],
        device: torch.device,
        kinds: Sequence[str] = ("",),
    ) -> Tensor:
        """The mask that `make` makes, of a function and sizes that the key tells, and of these
        tensors. kinds: as of `of`."""
        if any([x.is_inference() for x in sources]):
            return make()
        stream = 0
        if device.type == "cuda":
            if is_capturing():  # whose masks hold nothing before a replay
                return make()
            stream = current_stream(device.index)
        for kind in kinds:
            own = kind, stream, key
            found, versions = self.made.get(own, (None, ()))
            mask: Tensor | None = None if found is None else found()
            if mask is not None and _are_same(versions, sources):
                return mask
        mask = make()
        if len(self.made) >= _MOST_MASKS:
            self.made.clear()
        self.made[own] = (
            TensorWeakRef(mask),
            tuple([(TensorWeakRef(x), x._version, x.data_ptr()) for x in sources]),
        )
        return mask


def _are_same(versions: _Versions, tensors: Sequence[Tensor]) -> bool:
    """Whether these are the tensors of then, as many, and hold what they held."""
    pairs = zip(versions, tensors, strict=False)
    return len(versions) == len(tensors) and all(
        [
            known() is x and version == x._version and place == x.data_ptr()
            for (known, version, place), x in pairs
        ]
    )


class _Evaluation:
    """A program's values for tensors of positions."""

    def __init__(self, traced: Traced, values: dict[str, Any]) -> None:
        self.traced, self.values = traced, values
        self.device = values["i"].device
        for place, each in enumerate(traced.program.operations):
            self.values[f"v{place}"] = self._result(each)

    def value(self, name: str, type_: str | None = None) -> Any:
        """A value by its name, a literal or number as a tensor of its type."""
        kind, is_literal, word = name.partition(":")
        if name in self.values:
            return self.values[name]
        if is_literal:
            number: float = float(word) if kind == "f" else int(word)
        else:
            place = int(name[1:])
            kind, number = self.traced.program.numbers[place], self.traced.numbers[place]
        # Made on the device: a copy from the host could not be captured in a graph.
        return torch.full((), number, dtype=_DTYPES[type_ or kind], device=self.device)

    def _result(self, operation: Operation) -> Tensor:
        if operation.name == "load":
            return self._load(*operation.args).to(_DTYPES[operation.type])
        given = [self.value(each) for each in operation.args]
        dtype = _DTYPES[operation.type]
        if operation.name == "cast":
            (only,) = given
            found: Tensor = only.to(dtype)
            return found
        made: Tensor = _FUNCTIONS[operation.name](*given)
        return made.to(dtype)

    def _load(self, capture: str, *indices: str) -> Tensor:
        tensor = self.traced.captures[int(capture)]
        places = []
        for size, index in zip(tensor.shape, indices, strict=True):
            at = self.value(index).long()
            places.append(torch.where(at < 0, at + size, at).clamp(0, size - 1))
        return tensor[tuple(places)]


def listed_by(block_mask: Any, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Pairs in the partial and in the full blocks of a BlockMask, bool [b or 1, h or 1, i, j]."""
    planes = max(1, *[len(x) for x in _counts_of(block_mask)])
    shape = sizes.h, sizes.i, sizes.j
    pairs = [listed_pairs(block_mask, b, shape) for b in range(min(planes, sizes.b))]
    partial, full = zip(*pairs, strict=True)
    return _stacked(partial, shape), _stacked(full, shape)


def _counts_of(block_mask: Any) -> Iterator[Tensor]:
    yield block_mask.kv_num_blocks
    if block_mask.full_kv_num_blocks is not None:
        yield block_mask.full_kv_num_blocks


def _stacked(planes: Sequence[Tensor], shape: tuple[int, int, int]) -> Tensor:
    return torch.stack([x.expand(x.shape[0] if x.ndim == 3 else 1, *shape[1:]) for x in planes])


def in_all(shown: Sequence[Tensor]) -> Tensor:
    """The pairs that all of these show, broadcasts of [b, h, s_q, s_kv]: where lengths vary each
    may reach as far behind the longest as it likes, and the least decides."""
    shown = [torch.atleast_2d(x) for x in shown]
    for axis in (-2, -1):
        reach = min([x.shape[axis] for x in shown if x.shape[axis] != 1], default=1)
        shown = [x.narrow(axis, 0, min(x.shape[axis], reach)) for x in shown]
    return reduce(and_, shown)

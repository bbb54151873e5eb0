"""Calls of DTensors with functions: each rank attends with what it has, and its functions count
sequences and heads as those of whole tensors do."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ....call.fragments import operands_of as fragment_operands
from ....call.table import INPUTS, PAGE_TABLES, AttentionCall, given_by
from ....errors import SpecError
from ....results import AttentionAux
from ..checked_call import arguments_of, operands_of
from ..sharding import Sharded
from .compiled import blocks_of, lists_of

Start = tuple[int | None, int | None]


def attend(attend: Callable[..., Any], call: AttentionCall) -> Any:
    """The results of a call of DTensors with functions, DTensors.

    attend: `attention`, for a rank's own part. Captured DTensors are whole on each rank, and have
    gradients of all ranks; a captured tensor of another kind has those of its own rank.
    Raises: SpecError where a rank cannot attend by itself.
    """
    plain = replace(call, score_mod=None, mask_mod=None, block_mask=None)
    if call.places is not None:
        raise SpecError("places of sequences beside functions of DTensors: pass positions")
    operands = operands_of(plain)
    shards = Sharded.of(dict(zip(INPUTS, operands, strict=True)), arguments_of(plain))
    slots = {each.name: each.slot for each in fragment_operands(call.mask, None)}
    given = {
        name: _part_of(shards, slots.get(name, name), x) for name, x in given_by(plain).items()
    }
    functions = _Functions(shards, call.q)
    given |= {name: functions.of(getattr(call, name)) for name in call.functions}
    if isinstance(call.score_mod, str):
        given["score_mod"] = call.score_mod
    out, aux = attend(**{**given, "return_lse": True})
    if not out.numel():  # a rank without sequences has gradients, too, which others wait for
        out = out + sum([0 * x.sum() for x in functions.read])
    absent = out.new_empty(0)
    found = [
        aux.lse,
        *[absent if x is None else x for x in (aux.amax_s, aux.amax_o, aux.max_logit)],
    ]
    out, lse, amax_s, amax_o, max_logit = shards.joined((out, *found), operands)
    if not call.wants_aux:
        return out
    return out, AttentionAux(
        lse=lse,
        max_logit=max_logit if call.return_max_logit else None,
        rng_state=call.rng_state,
        amax_s=amax_s if call.return_amax else None,
        amax_o=amax_o if call.return_amax else None,
    )


def _part_of(shards: Sharded, name: str, x: Any) -> Any:
    """This rank's part of an argument, of the name of its operand."""
    if name == "page_table":
        tables = x if isinstance(x, (tuple, list)) else (x, x)
        return tuple(map(shards.part_of, PAGE_TABLES, tables))
    if not isinstance(x, Tensor):
        return x
    if name in INPUTS:
        return shards.part_of(name, x)
    return shards.whole(x) if hasattr(x, "device_mesh") else x


class _Functions:
    """Functions of this rank's sequences and heads.

    start: the numbers of the first of these, None of what is not parted; read: DTensors that they
    closed over, whole on this rank.
    """

    def __init__(self, shards: Sharded, q: Tensor) -> None:
        self.shards = shards
        self.start = shards.starts_of(q)
        self.read: list[Tensor] = []

    def of(self, x: Any) -> Any:
        """A function, or a BlockMask, of this rank."""
        if isinstance(x, types.FunctionType):
            return _counting_from(self._with_whole_tensors(x), self.start)
        if not hasattr(x, "mask_mod"):
            return _counting_from(x, self.start)
        b, h, *rest = x.shape
        sizes = self.shards.rows_of("batch", b), self.shards.rows_of("heads", h)

        def own(lists: Tensor | None) -> Tensor | None:
            if lists is None:
                return None
            for axis, rows in enumerate(sizes):
                if lists.shape[axis] > 1:
                    lists = lists[(slice(None),) * axis + (rows,)]
            return lists

        lists: list[Any] = [own(each) for each in lists_of(x)]
        pairs = zip((b, h), sizes, strict=True)
        planes = [len(range(n)[rows]) if n > 1 else n for n, rows in pairs]
        return blocks_of(lists, x.BLOCK_SIZE, (*planes, *rest), self.of(x.mask_mod))

    def _with_whole_tensors(self, function: types.FunctionType) -> types.FunctionType:
        """A function that closes over this rank's tensors where it closed over DTensors."""
        contents = [cell.cell_contents for cell in function.__closure__ or ()]
        own = list(map(self._whole, contents))
        if all(a is b for a, b in zip(own, contents, strict=True)):
            return function
        made = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(map(types.CellType, own)),
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made

    def _whole(self, x: Any) -> Any:
        """A thing that a function closes over, whole on this rank."""
        if isinstance(x, types.FunctionType):
            return self._with_whole_tensors(x)
        if not (isinstance(x, Tensor) and hasattr(x, "device_mesh")):
            return x
        found = self.shards.whole(x)
        self.read.append(found)
        return found


def _counting_from(mod: Any, start: Start) -> Any:
    """A function of a rank's own numbers of sequences and heads."""
    first, head = start
    if first is None and head is None:
        return mod

    def own(*positions: Tensor) -> Tensor:
        *score, b, h, i, j = positions
        b = b if first is None else b + first
        h = h if head is None else h + head
        found: Tensor = mod(*score, b, h, i, j)
        return found

    return own

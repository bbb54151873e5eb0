"""Calls with functions in code that torch.compile traces: dynamo traces a function to a graph, as
it does for FlexAttention, and what becomes of the call is worked out where that is lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call.table import CARRIERS, FUNCTIONS, AttentionCall, given_by
from ....errors import SpecError
from ....results import AttentionAux
from ..torch_private import as_compiled, is_traced, untraced
from .builder import as_read
from .program import Traced, mask_program, score_program
from .prologue import Step, evaluate, prologue_of
from .trace import TRACING, trace

_META = torch.device("meta")
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_MODS = "mods"  # the option that says which functions there are


class Branch:
    """A function of positions as dynamo traced it, or as one whose tensors torch.func has wrapped:
    a function of these, and of what else it reads."""

    def __init__(self, graph: Callable[..., Any], read: Sequence[Any]) -> None:
        self._graph, self._read = graph, tuple(read)

    def __call__(self, *positions: Tensor) -> Any:
        return self._graph(*positions, *self._read)

    def traced(self, name: str, device: torch.device) -> Traced:
        """Its program, and the tensors that this reads, on the device. name: of the argument.

        Raises: SpecError naming what kernels lack.
        """
        given = [_as_tensor(x, device) for x in self._read]
        symbols = [isinstance(x, (torch.SymInt, torch.SymFloat)) for x in self._read]
        found = None
        try:
            found = self._program(name, given)
        except SpecError:  # of a number that is asked for as one, if there is any
            if not any(symbols):
                raise
        if found is None:
            every = zip(self._read, given, symbols, strict=True)
            known = [_as_number(x) if symbol else other for x, other, symbol in every]
            found = self._program(name, known, sized=True)
        assert found is not None  # for these sizes
        return found

    def _program(self, name: str, given: Sequence[Any], sized: bool = False) -> Traced | None:
        """The program for tensors and numbers that stand for what the function reads.

        sized: whether it may be for their sizes alone; None where it has to be.
        """
        formats = [_format_of(x, sized) if isinstance(x, Tensor) else x for x in given]
        with untraced():
            stand_ins = [_stand_in(*x) if type(x) is _Format else x for x in formats]
            try:
                found = self._without_values(name, stand_ins)
            except (RuntimeError, TypeError) as error:  # whose words are torch's here
                raise SpecError(f"{name} is not traced without values: {error}") from error
        # What is made in the function has a place of its own.
        places = [x if isinstance(x, Tensor) else torch.empty(0) for x in stand_ins]
        origins = [prologue_of(*origin, places) for origin in found.origins]
        worked_on = {place for each in origins if isinstance(each, Step) for place in each.places()}
        if not sized and any(_varies(given[place]) for place in worked_on):
            return None  # whose sizes the work may have for good
        sources = tuple([evaluate(each, given) for each in origins if each is not None])
        if len(sources) < len(origins) or any(x.device == _META for x in sources):
            raise SpecError(f"{name} makes a tensor. Make it before the call.")
        return Traced(found.program, tuple(map(as_read, sources)), found.numbers, sources)

    def _without_values(self, name: str, stand_ins: Sequence[Any]) -> Traced:
        """The program of tensors on the meta device. Raises: as `traced`, and what torch does."""

        def mod(*positions: Tensor) -> Any:
            return self._graph(*positions, *stand_ins)

        with TRACING:
            graph = trace(name, mod, _META)
            return score_program(graph, _META) if name == "score_mod" else mask_program(graph)


def _as_tensor(x: Any, device: torch.device) -> Any:
    """A number that may be another in each call, as a tensor; a tensor of one number on the device;
    another value as it is."""
    if isinstance(x, (torch.SymInt, torch.SymFloat)):
        number: Any = x
        dtype = torch.int64 if isinstance(x, torch.SymInt) else torch.float32
        return torch.full((), number, dtype=dtype, device=device)
    alone = isinstance(x, Tensor) and not x.ndim and x.device != device
    return x.to(device) if alone else x


def _as_number(x: Any) -> Any:
    """A number that a program has for good, of one that may vary."""
    if isinstance(x, torch.SymInt):
        return int(x)
    return float(x) if isinstance(x, torch.SymFloat) else x


class _Format(NamedTuple):
    """The part of a tensor that a program depends on."""

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    dtype: torch.dtype
    learned: bool


def _varies(x: Any) -> bool:
    """Whether a tensor's sizes or strides may be others in another call."""
    if not isinstance(x, Tensor):
        return False
    return any(isinstance(n, torch.SymInt) for n in (*x.shape, *x.stride()))


def _hint_of(n: Any) -> int:
    """A number of its kind, for one that may be another in each call."""
    hint = getattr(n.node, "hint", None) if isinstance(n, torch.SymInt) else None
    return int(n if hint is None else hint)


def _format_of(x: Tensor, sized: bool) -> _Format:
    """The format of a tensor; sized: for its sizes and strides alone."""
    steps, sizes = tuple(x.stride()), tuple(x.shape)
    if not sized:
        # Which a program tells apart.
        bool(sum([(n - 1) * step for n, step in zip(sizes, steps, strict=True)]) < 1 << 31)
    number = _as_number if sized else _hint_of
    return _Format(tuple(map(number, sizes)), tuple(map(number, steps)), x.dtype, x.requires_grad)


def _stand_in(
    sizes: tuple[int, ...], steps: tuple[int, ...], dtype: torch.dtype, learned: bool
) -> Tensor:
    """A tensor of that format without values."""
    made = torch.empty_strided(sizes, steps, dtype=dtype, device=_META)
    return made.requires_grad_(learned)


class Blocks(NamedTuple):
    """A BlockMask as calls read it."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    BLOCK_SIZE: tuple[int, int]
    shape: tuple[int, ...]
    mask_mod: Any


def blocks_of(lists: Sequence[Any], size: Any, shape: Sequence[int], mask_mod: Any) -> Any:
    """A BlockMask of these lists, of blocks of such a size."""
    partial, partial_index, full, full_index = lists
    return Blocks(partial, partial_index, full, full_index, size, tuple(shape), mask_mod)


def lists_of(block_mask: Any) -> list[Any]:
    """Counts and numbers of the partial blocks of a BlockMask, and of its full ones or None."""
    return [getattr(block_mask, name) for name in _LISTS]


def is_traced_call(call: AttentionCall) -> bool:
    """Whether the functions of a call are graphs that dynamo made."""
    return any(map(is_branch, _functions_of(call)))


def is_branch(function: Any) -> bool:
    """Whether a function is such a graph, or a BlockMask has one."""
    return isinstance(getattr(function, "mask_mod", function), Branch)


def _functions_of(call: AttentionCall) -> Iterator[Any]:
    yield from (call.score_mod, call.mask_mod, call.block_mask)


def attend(_: Callable[..., Any], call: AttentionCall) -> Any:
    """The results of a call in code that dynamo traces; None where it cannot be said to it."""
    if _operator is None or (call.mask_mod is not None and call.block_mask is not None):
        return None
    options = {name: x for name, x in given_by(call).items() if name not in _UNSAID}
    score: Callable[..., Tensor] = _score_of_none
    mask: Callable[..., Tensor] = _all_of_none
    lists: tuple[Any, ...] = ()
    if isinstance(call.score_mod, str):
        options["score_mod"] = call.score_mod
    elif call.score_mod is not None:
        score = call.score_mod
    if call.mask_mod is not None:
        mask = call.mask_mod
    elif call.block_mask is not None:
        blocks, mask = call.block_mask, call.block_mask.mask_mod
        lists = (
            *(blocks.kv_num_blocks, blocks.kv_indices),
            *(blocks.full_kv_num_blocks, blocks.full_kv_indices),
            *(*blocks.BLOCK_SIZE, *blocks.shape),
        )
    options[_MODS] = call.functions
    results = _operator(call.q, call.k, call.v, score, (*lists, mask), None, options)
    if not call.wants_aux:
        out, *_ = results
        return out
    found = dict(zip(_names_of(call), results, strict=True))
    return found.pop("o"), AttentionAux(**found)


_UNSAID = {*CARRIERS, *FUNCTIONS, "schedule"}


def _names_of(call: AttentionCall) -> tuple[str, ...]:
    """Names of the tensors that a call with by-products returns, as `AttentionAux` has them."""
    return (
        *("o", "lse"),
        *(["max_logit"] if call.return_max_logit else []),
        *(["rng_state"] if call.dropout_p > 0 or call.rng_state is not None else []),
        *(["amax_s", "amax_o"] if call.return_amax else []),
    )


def _score_of_none(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score


def _all_of_none(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= 0


_attention: list[Callable[..., Any]] = []  # that function, once it is there


def serve(attention: Callable[..., Any]) -> None:
    """Let calls that are traced from now on be those of `attngen.attention`."""
    _attention[:] = [attention]


def _run(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    mods: dict[str, Branch],
    lists: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    """The results of a call whose functions are graphs."""
    functions = options.pop(_MODS)
    score_mod, mask_mod = mods["score_mod"], mods["mask_mod"]
    if "score_mod" in functions:
        options["score_mod"] = score_mod
    if "mask_mod" in functions:
        options["mask_mod"] = mask_mod
    if "block_mask" in functions:
        tensors, (queries, keys, *shape) = lists[: len(_LISTS)], lists[len(_LISTS) :]
        options["block_mask"] = blocks_of(tensors, (queries, keys), shape, mask_mod)
    (attention,) = _attention
    with as_compiled() if is_traced((q,)) else nullcontext():
        found = attention(q, k, v, **options)
    if isinstance(found, Tensor):
        return (found,)
    out, aux = found
    by_products = (aux.lse, aux.max_logit, aux.rng_state, aux.amax_s, aux.amax_o)
    return (out, *[x for x in by_products if x is not None])


def _operator_of() -> Any:
    """The operation that dynamo gives functions to, as graphs; None where torch has none.

    Dynamo knows by its name that it takes arguments as FlexAttention's does, of which it is none.
    """
    try:
        from torch._ops import HigherOrderOperator
    except ImportError:
        return None

    class Attend(HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("attngen_attend")  # type: ignore[no-untyped-call]
            self.__name__ = "flex_attention"
            self.__module__ = __name__

        def __call__(
            self, q: Tensor, k: Tensor | None, v: Tensor | None, *rest: Any
        ) -> tuple[Tensor, ...]:
            # Of each function a graph, and what that reads beside positions.
            score_mod, (*lists, mask_mod), _, options, score_reads, mask_reads = rest
            mods = {
                "score_mod": Branch(score_mod, score_reads),
                "mask_mod": Branch(mask_mod, mask_reads),
            }
            return _run(q, k, v, mods, tuple(lists), dict(options))

    return Attend()


_operator = _operator_of()

"""Calls with callables on kernels: a `score_mod` is traced, and becomes a score fragment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...call.fragments import SLOTS
from ...call.table import AttentionCall, given_by
from ...errors import CompileError, CompilerMissing, SpecError
from ...fragments.features import register_program
from ...fragments.lowering import CAPTURED, NUMBER, PER_UNIT, UNIT
from ...reference.fp8 import is_fp8
from . import descriptions, routing
from .callable_builder import as_read
from .callable_fingerprint import fingerprint
from .callable_program import Traced, score_program
from .callable_trace import trace
from .torch_private import has_transforms, is_traced

log = logging.getLogger("attngen")
_WAY_OUT = "Pass backend='reference'"


def attend(attend: Callable[..., Any], call: AttentionCall) -> Any:
    """The results of a call with a `score_mod`, by kernels; None where these are not asked.

    attend: `attention`, for the call that stands for it. Raises: SpecError where the callable, or
    the call with it, has no kernels.
    """
    if call.functions != ("score_mod",) or not _may_have_kernels(call):
        return None
    if is_fp8(call.q.dtype):
        raise SpecError(f"score_mod beside {call.q.dtype} has no kernels yet. {_WAY_OUT}.")
    if routing.CHECK_VALUES:
        reference.check_on_host(call, reference.check(call))
    traced = _traced(call)
    fragment = register_program(traced.program)
    given = given_by(replace(call, score_mod=fragment.name, backend="cuda"))
    given |= {f"{CAPTURED}{place}": x for place, x in enumerate(traced.captures)}
    given |= {f"{NUMBER}{place}": x for place, x in enumerate(traced.numbers)}
    try:
        return attend(**given, **{UNIT: 1.0, PER_UNIT: 1.0})
    except CompilerMissing:
        raise
    except CompileError as error:
        raise SpecError(
            f"score_mod has no kernel that is worth running: {error}. Simplify it, or pass "
            "backend='reference'."
        ) from error


def _may_have_kernels(call: AttentionCall) -> bool:
    """Whether kernels are to serve a call, if they can, and nobody looks on."""
    if call.backend == "reference" or has_transforms():
        return False
    if is_traced((call.q, call.k, call.v)):
        return False
    return descriptions.device_arch(call.q.device) is not None


@dataclass(frozen=True, eq=False)
class _Known:
    """A function's fragment and numbers, and where among the tensors that its fingerprint names
    those are that it reads."""

    traced: Traced
    places: tuple[int, ...]

    def of(self, tensors: Sequence[Tensor]) -> Traced:
        """Its trace for the tensors of another call."""
        read = tuple([tensors[place] for place in self.places])
        learned = any([x.requires_grad for x in read])
        return replace(self.traced, captures=tuple(map(as_read, read)), learned=learned)


_known: dict[tuple[Any, ...], _Known] = {}
_MOST_KNOWN = 4096
_logged: set[Any] = set()


def _traced(call: AttentionCall) -> Traced:
    """The program of the call's function, traced if none like it was. Raises: SpecError naming what
    kernels lack."""
    mod: Any = call.score_mod
    key, tensors = fingerprint(mod)
    if key is not None and (known := _known.get(key)) is not None:
        traced = known.of(tensors)
    else:
        graph = trace("score_mod", mod, call.q.device)
        traced = score_program(graph, call.q.device)
        _keep(mod, key, tensors, traced, graph.meta["reads_values"])
    _check_captures(call, traced)
    return traced


def _keep(
    mod: Any,
    key: tuple[Any, ...] | None,
    tensors: Sequence[Tensor],
    traced: Traced,
    reads_values: bool,
) -> None:
    """Remember a trace, where a later call can know that it holds."""
    places = [[n for n, x in enumerate(tensors) if x is each] for each in traced.sources]
    numbers = any(not x.ndim and x.device.type == "cpu" for x in tensors)
    if key is None or reads_values or numbers or not all(places):
        code = getattr(mod, "__code__", type(mod))
        if code not in _logged:
            _logged.add(code)
            log.info(
                "score_mod %s is traced in each call: it reaches objects that may change, reads "
                "values of tensors, or computes with whole ones",
                getattr(mod, "__qualname__", mod),
            )
        return
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    kept = replace(traced, captures=(), sources=())
    _known[key] = _Known(kept, tuple([first for first, *_ in places]))


def _check_captures(call: AttentionCall, traced: Traced) -> None:
    """Raises: SpecError where kernels cannot read what a function captures."""
    if len(traced.captures) > len(SLOTS):
        raise SpecError(
            f"score_mod reads {len(traced.captures)} captured tensors; kernels take {len(SLOTS)}. "
            "Stack some of them into one."
        )
    for each in traced.captures:
        if each.device != call.q.device:
            raise SpecError(
                f"score_mod reads a tensor on {each.device}, where q is on {call.q.device}. Move "
                "it there before the call."
            )
        if not each.numel() or max(each.shape) >= 1 << 31:
            raise SpecError(f"score_mod reads a tensor of sizes {list(each.shape)}. {_WAY_OUT}.")
    if traced.learned and torch.is_grad_enabled():
        raise SpecError(
            "score_mod reads a tensor that requires a gradient, of which kernels have none: detach "
            "it, or pass backend='reference'."
        )

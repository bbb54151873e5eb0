"""Calls with callables on kernels: a `score_mod` becomes a score fragment, masks booleans."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...call.fragments import LEARNED, SLOTS
from ...call.table import AttentionCall, given_by
from ...errors import CompileError, CompilerMissing, LimitError, SpecError
from ...fragments.features import register_program
from ...fragments.lowering import CAPTURED, NUMBER, PER_UNIT, UNIT
from ...reference.fp8 import is_fp8
from . import descriptions, routing
from .callable_builder import as_read
from .callable_fingerprint import fingerprint
from .callable_gradients import stand_in
from .callable_mask import Masks, Sizes, listed_by
from .callable_program import Traced, mask_program, score_program
from .callable_trace import trace
from .torch_private import PLAIN, has_transforms, is_traced, undisturbed

log = logging.getLogger("attngen")
_WAY_OUT = "Pass backend='reference'"


def attend(attend: Callable[..., Any], call: AttentionCall) -> Any:
    """The results of a call with callables, by kernels; None where these are not asked.

    attend: `attention`, for the call that stands for it. Raises: SpecError where a callable, or the
    call with it, has no kernels.
    """
    if not _may_have_kernels(call):
        return None
    if is_fp8(call.q.dtype):
        which = " and ".join(call.functions)
        raise SpecError(f"{which} beside {call.q.dtype} has no kernels yet. {_WAY_OUT}.")
    if routing.CHECK_VALUES:
        reference.check_on_host(call, reference.check(call))
    replaced: dict[str, Any] = {"backend": "cuda"}
    added: dict[str, Any] = {}
    if call.mask_mod is not None or call.block_mask is not None:
        shown = _shown(call)
        others = call.attn_mask
        replaced |= {"mask_mod": None, "block_mask": None}
        replaced["attn_mask"] = shown if others is None else others & shown
    if "score_mod" in call.functions:
        traced = _traced("score_mod", call.score_mod, call.q.device)
        _check_count("score_mod", traced)
        replaced["score_mod"] = register_program(traced.program).name
        added = _arguments_of(traced)
        if traced.key is not None:
            known = _known.get(traced.key)  # None where another thread has emptied it
            if known is not None:
                known.is_served = True
    try:
        return attend(**given_by(replace(call, **replaced)), **added)
    except CompilerMissing:
        raise
    except CompileError as error:
        raise SpecError(
            f"score_mod has no kernel that is worth running: {error}. Simplify it, or pass "
            "backend='reference'."
        ) from error


def attend_known(
    attend: Callable[..., Any], carriers: Sequence[Any], given: Mapping[str, Any]
) -> Any:
    """The results of a call whose `score_mod` was traced before, as `attend` has them; None where
    that has to see it. carriers: q, k and v; given: whatever else the call gives."""
    mod, (q, *_) = given.get("score_mod"), carriers
    if not callable(mod) or routing.CHECK_VALUES or not undisturbed():
        return None
    if any(x is not None and type(x) not in PLAIN for x in carriers):
        return None
    if any(given.get(name) is not None for name in ("mask_mod", "block_mask")):
        return None
    if given.get("backend") == "reference" or is_fp8(q.dtype):
        return None
    if descriptions.device_arch(q.device) is None:
        return None
    key, tensors = fingerprint(mod)
    known = None if key is None else _known.get(("score_mod", *key))
    if known is None or not known.is_served:
        return None
    traced = known.of(tensors)
    if any(x.device != q.device for x in tensors):
        return None
    replaced = {"score_mod": known.traced.program.name, "backend": "cuda"}
    try:
        return attend(*carriers, **{**given, **replaced, **_arguments_of(traced)})
    except (SpecError, LimitError, CompileError):
        return None


def _arguments_of(traced: Traced) -> dict[str, Any]:
    """The arguments of a call that names the program's fragment."""
    captures = {f"{CAPTURED}{place}": x for place, x in enumerate(traced.captures)}
    numbers = {f"{NUMBER}{place}": x for place, x in enumerate(traced.numbers)}
    learned = {}
    if traced.program.learned:
        sources = [traced.sources[place] for place in traced.program.learned_captures]
        learned[LEARNED] = stand_in(sources)
    return {**captures, **numbers, **learned, UNIT: 1.0, PER_UNIT: 1.0}


def _shown(call: AttentionCall) -> Tensor:
    """The pairs that a call's mask_mod and block_mask show, bool, a broadcast of [b, h, s_q, s_kv].

    Raises: SpecError where they have no kernels.
    """
    sizes, device = Sizes.of(call, reference.check(call)), call.q.device
    found = []
    if call.mask_mod is not None:
        traced = _traced("mask_mod", call.mask_mod, device)
        found.append(masks.shown_by(traced, sizes, device))
    if call.block_mask is not None:
        partial, full = listed_by(call.block_mask, sizes)
        traced = _traced("mask_mod", call.block_mask.mask_mod, device)
        found.append((partial & masks.shown_by(traced, sizes, device)) | full)
    return reduce(and_, found)


def _may_have_kernels(call: AttentionCall) -> bool:
    """Whether kernels are to serve a call, if they can, and nobody looks on."""
    carriers = call.q, call.k, call.v
    if call.backend == "reference" or has_transforms() or is_traced(carriers):
        return False
    if not all([x is None or type(x) in PLAIN for x in carriers]):  # parts of DTensors, say
        return False
    return descriptions.device_arch(call.q.device) is not None


@dataclass(eq=False)
class _Known:
    """A function's fragment and numbers, and where among the tensors that its fingerprint names
    those are that it reads.

    is_served: whether a call with it has passed all checks, and its fragment is registered.
    """

    traced: Traced
    places: tuple[int, ...]
    is_served: bool = False

    def of(self, tensors: Sequence[Tensor]) -> Traced:
        """Its trace for the tensors of another call."""
        read = tuple([tensors[place] for place in self.places])
        captures = tuple([as_read(x) for x in read])
        known = self.traced
        return Traced(known.program, captures, known.numbers, read, known.key)


_known: dict[tuple[Any, ...], _Known] = {}
masks = Masks()
_MOST_KNOWN = 4096
_tracing = threading.RLock()  # torch traces one function at a time in a process
_logged: set[Any] = set()


def _traced(name: str, mod: Any, device: torch.device) -> Traced:
    """The program of a function, traced if none like it was, `score_mod` or `mask_mod` by its name.

    Raises: SpecError naming what kernels lack.
    """
    key, tensors = fingerprint(mod)
    key = None if key is None else (name, *key)
    if key is not None and (known := _known.get(key)) is not None:
        traced = known.of(tensors)
    else:
        with _tracing:
            graph = trace(name, mod, device)
            is_score = name == "score_mod"
            traced = score_program(graph, device) if is_score else mask_program(graph)
        _keep(mod, key, tensors, traced, graph.meta["reads_values"])
    for each in traced.captures:
        if each.device != device:
            raise SpecError(
                f"{name} reads a tensor on {each.device}, where q is on {device}. Move it there "
                "before the call."
            )
        if not each.numel() or max(each.shape) >= 1 << 31:
            raise SpecError(f"{name} reads a tensor of sizes {list(each.shape)}. {_WAY_OUT}.")
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
    if key is None or reads_values or numbers or traced.merged or not all(places):
        code = getattr(mod, "__code__", type(mod))
        if code not in _logged:
            _logged.add(code)
            log.info(
                "%s is traced in each call: it reaches objects that may change, reads "
                "values of tensors, or computes with whole ones",
                getattr(mod, "__qualname__", mod),
            )
        return
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    kept = replace(traced, captures=(), sources=(), key=key)
    _known[key] = _Known(kept, tuple([first for first, *_ in places]))


def _check_count(name: str, traced: Traced) -> None:
    """Raises: SpecError where a function captures more than kernels read."""
    if len(traced.captures) > len(SLOTS):
        raise SpecError(
            f"{name} reads {len(traced.captures)} captured tensors; kernels take {len(SLOTS)}. "
            "Stack some of them into one."
        )

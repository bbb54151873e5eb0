"""Calls with callables on kernels: a `score_mod` becomes a score fragment, masks bits or bools."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .... import reference
from ....call.backend import AUTO, asked
from ....call.fragments import LEARNED, SLOTS
from ....call.table import ROWS, AttentionCall, given_by, named
from ....errors import CompileError, CompilerMissing, LimitError, SpecError
from ....fragments.features import register_program
from ....fragments.names import CAPTURED, NUMBER, PER_UNIT, UNIT
from ....reference.fp8 import is_fp8
from ....spec import layouts
from .. import routing
from ..schedule import Schedule
from ..torch_private import PLAIN, undisturbed
from . import choice, compiled, transforms
from . import listed as callable_listed
from .builder import as_read
from .builtins import BuiltIn, built_in_of, mask_arguments, score_arguments
from .builtins import Sizes as Sizes4
from .fingerprint import fingerprint
from .gradients import stand_in
from .mask import Masks, Sizes, in_all, listed_by, shown_by
from .program import Traced, mask_program, score_program
from .prologue import Place, Prologue, evaluate, prologue_of
from .recall import recall, remember
from .trace import TRACING, trace

log = logging.getLogger("attngen")
_WAY_OUT = "Pass backend='reference'"


def attend(attend: Callable[..., Any], call: AttentionCall) -> Any:
    """The results of a call with callables, by kernels; None where these are not asked.

    attend: `attention`, for the call that stands for it. Raises: SpecError where a callable, or the
    call with it, has no kernels.
    """
    if (other := choice.other_way(call)) is not None:
        return other(attend, call)
    if not choice.may_have_kernels(call):
        return None
    call = transforms.opened(call)
    choice.refuse_before_launch(call)
    with transforms.aside(call):
        given, added = _stand_ins(call)
    try:
        return attend(**given, **added)
    except CompilerMissing:
        raise
    except CompileError as error:
        raise SpecError(
            f"score_mod has no kernel that is worth running: {error}. Simplify it, or pass "
            "backend='reference'."
        ) from error


def _stand_ins(call: AttentionCall) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the call that stands for one with callables, and those of its fragments."""
    if is_fp8(call.q.dtype) and call.score_mod is not None:
        raise SpecError(f"score_mod beside {call.q.dtype} has no kernels yet. {_WAY_OUT}.")
    if routing.CHECK_VALUES and not compiled.is_traced_call(call):
        reference.check_on_host(call, reference.check(call))
    replaced: dict[str, Any] = {"backend": "cuda"}
    added: dict[str, Any] = {}
    if call.mask_mod is not None or call.block_mask is not None:
        of_masks = _of_masks(call)
        _keep_mask(call.schedule, of_masks.get("attn_mask"))
        added = {name: of_masks.pop(name) for name in {*of_masks} - {*ROWS}}
        replaced |= of_masks
    if "score_mod" in call.functions:
        traced = _traced("score_mod", call.score_mod, call.q.device)
        _check_count("score_mod", traced)
        built_in, own = built_in_of(traced, is_mask=False), None
        if built_in is not None:
            sizes = _sizes_of(call.q, call.k, call.layout)
            given = {**named(call), **replaced}
            own = score_arguments(built_in, traced.sources, given, sizes)
        if own is not None:
            replaced |= {"score_mod": None, **own}
        else:
            replaced["score_mod"] = register_program(traced.program).name
            added |= _arguments_of(traced)
        _note(traced)
    return given_by(replace(call, **replaced)), added


def attend_known(
    attend: Callable[..., Any], carriers: Sequence[Any], given: Mapping[str, Any]
) -> Any:
    """The results of a call whose callables were traced before, as `attend` has them; None where
    that has to see them. carriers: q, k and v; given: whatever else the call gives."""
    mods, (q, k, v) = [name for name in _MODS if callable(given.get(name))], carriers
    if not mods or routing.CHECK_VALUES or not undisturbed():
        return None
    if any(x is not None and type(x) not in PLAIN for x in carriers):
        return None
    if given.get("block_mask") is not None or asked(given.get("backend", AUTO)) == "reference":
        return None
    if is_fp8(q.dtype) and "score_mod" in mods:
        return None
    made: dict[str, Any] = {**given, "backend": "cuda"}
    for name in mods:
        if (found := _find(name, given[name])) is None:
            return None
        known, tensors = found
        if known.device != q.device:  # where a call with it has found kernels
            return None
        own, built_in = None, known.built_in
        if built_in is not None:
            reads = built_in.reads
            sizes = _sizes_of(q, k, given.get("layout", "bshd")) if reads else _UNTOLD
            captures = known.read(tensors) if reads else []
            if name == "mask_mod":
                captures = [as_read(x) for x in captures]
                own = mask_arguments(built_in, captures, given, sizes[0])
            else:
                own = score_arguments(built_in, captures, {"q": q, **made}, sizes)
        if own is not None:
            made[name] = None
            made.update(own)
        elif name == "mask_mod":
            replaced = _made_again(known, tensors, {"q": q, "k": k, "v": v, **given})
            if replaced is None:
                return None
            made.update(replaced)
        else:
            # One that ran as what attngen has built in may be no fragment yet.
            made[name] = register_program(known.traced.program).name
            known.pass_on(tensors, made)
    try:
        return attend(*carriers, **made)
    except (SpecError, LimitError, CompileError):
        return None


def _made_again(
    known: _Known, tensors: Sequence[Tensor], arguments: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Arguments that stand for the mask_mod of such a call; None where nothing is known of calls
    like it, or its mask cannot be made. tensors: those that its function reaches."""
    listed = callable_listed.known_of(arguments)
    if listed is None:
        return None
    sources = known.read(tensors)
    read = [as_read(x) for x in sources], sources
    device = arguments["q"].device
    try:
        beside = arguments.get("attn_mask")
        made = callable_listed.made_again(listed, masks, known.traced, read, device, beside)
    except (SpecError, CompileError):
        return None
    own = callable_listed.stands_for(made, known.traced.program, arguments.get("mask", "none"))
    replaced = {"mask_mod": None, **own}
    _keep_mask(arguments.get("schedule"), made)
    # A schedule orders sequences of lengths that vary; of others it keeps masks alone.
    return replaced if listed.orders else {**replaced, "schedule": None}


def _keep_mask(schedule: Any, mask: Tensor | None) -> None:
    """Have the schedule of a call keep its mask, where other calls may find it."""
    if mask is not None and isinstance(schedule, Schedule):
        schedule.keep(mask)


def _find(name: str, mod: Any) -> tuple[_Known, list[Tensor]] | None:
    """Find what is known of a function that a call has had, and its tensors; None where that is
    nothing."""
    if isinstance(mod, compiled.Branch):
        return None
    # Work on whole tensors that require gradients has none where nobody wants any.
    kind = name, torch.is_grad_enabled()
    recalled = recall(kind, mod)
    if recalled is not None:
        return recalled
    key, tensors = fingerprint(mod)
    known = None if key is None else _known.get((*kind, *key))
    if known is None or not known.is_served:
        return None
    remember(kind, mod, known)
    return known, tensors


def _sizes_of(q: Tensor, k: Tensor | None, layout: str) -> Sizes4:
    """Sequences, query heads, queries and keys of a call, -1 where the shapes of Q and K do not say
    so."""
    parsed = layouts.parse(layout)
    axes = parsed.q_format
    if k is None or len(axes) != q.ndim:
        return _UNTOLD
    known = dict(zip(axes, q.shape, strict=False))
    keys = -1
    if k.ndim == q.ndim and "s" in parsed.kv_format and not parsed.paged:
        keys = k.shape[parsed.kv_format.index("s")]
    return known.get("b", -1), known.get("h", -1), known.get("s", -1), keys


def _arguments_of(traced: Traced) -> dict[str, Any]:
    """The arguments of a call that names the program's fragment."""
    captures = {f"{CAPTURED}{place}": x for place, x in enumerate(traced.captures)}
    learned = {}
    if traced.program.learned:
        sources = [traced.sources[place] for place in traced.program.learned_captures]
        learned[LEARNED] = stand_in(sources)
    return {**_numbers_of(traced), **captures, **learned}


def _numbers_of(traced: Traced) -> dict[str, Any]:
    """The numbers that a call passes for its program."""
    numbers = {f"{NUMBER}{place}": x for place, x in enumerate(traced.numbers)}
    return {**numbers, UNIT: 1.0, PER_UNIT: 1.0}


def _of_masks(call: AttentionCall) -> dict[str, Any]:
    """The arguments that stand for a call's mask_mod and block_mask: masks that attngen has, and
    pairs that take part, bool, a broadcast of [b, h, s_q, s_kv].

    Raises: SpecError where they have no kernels.
    """
    device = call.q.device
    replaced: dict[str, Any] = {"mask_mod": None, "block_mask": None}
    traced = None
    if call.mask_mod is not None:
        traced = _traced("mask_mod", call.mask_mod, device)
        built_in = built_in_of(traced, is_mask=True)
        own = None
        if built_in is not None:
            sequences, *_ = _sizes_of(call.q, call.k, call.layout)
            own = mask_arguments(built_in, traced.captures, named(call), sequences)
        if own is not None:
            _note(traced)
            replaced |= own
            traced = None
    if traced is None and call.block_mask is None:
        return replaced
    sizes, serve = Sizes.of(call, reference.check(call)), callable_listed.lists_serve(call)
    if traced is not None and call.block_mask is None and serve:
        _note(traced)
        made = callable_listed.made_for(call, masks, traced, sizes)
        return {**replaced, **callable_listed.stands_for(made, traced.program, call.mask)}
    found = [] if call.attn_mask is None else [call.attn_mask]
    if traced is not None:
        found.append(masks.of(shown_by, traced, sizes, device))
    if call.block_mask is not None:
        traced = _traced("mask_mod", call.block_mask.mask_mod, device)
        if serve:
            beside = in_all(found) if found else None
            made = callable_listed.made_of_blocks(call, masks, traced, sizes, beside)
            return {**replaced, "attn_mask": made}
        listed, full = listed_by(call.block_mask, sizes)
        shown = masks.of(shown_by, traced, sizes, device)
        found.append((listed & shown) | full)
    return {**replaced, "attn_mask": in_all(found)}


@dataclass(eq=False)
class _Known:
    """A function's fragment and numbers, and how those that it reads are made of the tensors that
    its fingerprint names.

    device: that of all its tensors, None where they have several; is_served: whether a call with
    it has passed all checks, and its fragment is registered; unread: what stands for tensors of
    such shapes that it learns; built_in: what attngen has of it.
    """

    traced: Traced
    places: tuple[Prologue, ...]
    device: torch.device | None
    is_served: bool = False
    unread: dict[Any, Tensor] = field(default_factory=dict)

    @cached_property
    def built_in(self) -> BuiltIn | None:
        name, *_ = self.traced.key or ("",)
        return built_in_of(self.traced, is_mask=name == "mask_mod")

    @cached_property
    def _numbers(self) -> dict[str, Any]:
        return _numbers_of(self.traced)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(f"{CAPTURED}{place}" for place in range(len(self.places)))

    def pass_on(self, tensors: Sequence[Tensor], made: dict[str, Any]) -> None:
        """Add the arguments of a call with its fragment."""
        made.update(self._numbers)
        read = self.read(tensors)
        for name, x in zip(self._names, read, strict=True):
            made[name] = as_read(x)
        if self.traced.program.learned:
            learned = self.traced.program.learned_captures
            made[LEARNED] = stand_in([read[place] for place in learned], self.unread)

    def of(self, tensors: Sequence[Tensor]) -> Traced:
        """Its trace for the tensors of another call."""
        read = tuple(self.read(tensors))
        captures = tuple([as_read(x) for x in read])
        known = self.traced
        return Traced(known.program, captures, known.numbers, read, key=known.key)

    def read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that its program reads, of those of another call."""
        return [
            tensors[each.place] if type(each) is Place else evaluate(each, tensors)
            for each in self.places
        ]


def _note(traced: Traced) -> None:
    """Let later calls find a trace at once, since one with it has passed all checks."""
    known = None if traced.key is None else _known.get(traced.key)
    if known is not None:  # else another thread has emptied it
        known.is_served = True


_MODS = ("mask_mod", "score_mod")  # in this order: a score may ask what stands for a mask
_UNTOLD = -1, -1, -1, -1
_known: dict[tuple[Any, ...], _Known] = {}
masks = Masks()
_MOST_KNOWN = 4096
_logged: set[Any] = set()


def _traced(name: str, mod: Any, device: torch.device) -> Traced:
    """The program of a function, traced if none like it was, `score_mod` or `mask_mod` by its name.

    Raises: SpecError naming what kernels lack.
    """
    if isinstance(mod, compiled.Branch):
        return mod.traced(name, device)
    key, tensors = fingerprint(mod)
    key = None if key is None else (name, torch.is_grad_enabled(), *key)
    if key is not None and (known := _known.get(key)) is not None:
        traced = known.of(tensors)
    else:
        with TRACING:
            graph = trace(name, mod, device)
            is_score = name == "score_mod"
            traced = score_program(graph, device) if is_score else mask_program(graph)
        if _keep(mod, key, tensors, traced, device, graph.meta["reads_values"]):
            traced = replace(traced, key=key)
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
    device: torch.device,
    reads_values: bool,
) -> bool:
    """Remember a trace, where a later call can know that it holds; returns whether it can."""
    origins = [prologue_of(*origin, tensors) for origin in traced.origins]
    places = tuple([each for each in origins if each is not None])
    numbers = any(not x.ndim and x.device.type == "cpu" for x in tensors)
    if key is None or reads_values or numbers or traced.merged or len(places) < len(origins):
        code = getattr(mod, "__code__", type(mod))
        if code not in _logged:
            _logged.add(code)
            log.info(
                "%s is traced in each call: it reaches objects that may change, reads "
                "values of tensors, or makes some",
                getattr(mod, "__qualname__", mod),
            )
        return False
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    kept = replace(traced, captures=(), sources=(), origins=(), key=key)
    on_one = all(x.device == device for x in tensors)
    _known[key] = _Known(kept, places, device if on_one else None)
    return True


def _check_count(name: str, traced: Traced) -> None:
    """Raises: SpecError where a function captures more than kernels read."""
    if len(traced.captures) > len(SLOTS):
        raise SpecError(
            f"{name} reads {len(traced.captures)} captured tensors; kernels take {len(SLOTS)}. "
            "Stack some of them into one."
        )

"""Calls like none before: their arguments are checked and routed, and the outcome is kept."""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import reference
from ...call.backend import default
from ...call.bind import Key, binder, homes_of
from ...call.cache import CallCache
from ...call.fragments import operands_of as fragment_operands
from ...call.table import CARRIERS, INPUTS, ROWS, AttentionCall, given_by, make_call, names
from ...errors import LimitError, SpecError
from ...reference.type_checks import type_violations
from . import eight_bits, left_padding, nested, on_reference, routing
from .callables import calls as callables
from .casts import autocast
from .checked_call import CheckedCall, Result, operands_of
from .checks import check_rest, traced_refusal
from .operation import format_of
from .torch_private import PLAIN, guard, is_deterministic, is_plain, may_be_kept

bind = binder(Tensor)
calls: CallCache[CheckedCall] = CallCache(guard)
Attend = Callable[..., Any]
# Raised by arguments without a hash, and by tensors without sizes: their checks say what they need.
_UNKEYED = (TypeError, RuntimeError, ValueError)
_LONGEST = names("longest")
_PACKAGE = f"{__name__.partition('.')[0]}."


def state() -> Key:
    """State of torch and of attngen, on which calls depend beside their arguments."""
    return torch.is_grad_enabled(), is_deterministic(), default.backend


class Bound(NamedTuple):
    """The key of a call, None where nothing may be kept of it, and its tensors."""

    key: Key | None
    tensors: list[Any]


def route(
    attend: Attend,
    carriers: tuple[Any, Any, Any],
    given: dict[str, Any],
    bound: Bound,
    refusal: SpecError | LimitError | None,
) -> Result:
    """`attention` of a call that `calls.find` has not found.

    attend: that function, for calls that stand for this one. refusal: of the kernels that were to
    serve it.

    Raises: TypeError where there is no argument of a name; SpecError, CompileError, LaunchError,
    CacheError, BundleError.
    """
    if not routing.CHECK_VALUES:
        given = {name: x for name, x in given.items() if not (name in _LONGEST and _is_unread(x))}
    if bound.key is None and not torch.compiler.is_compiling():
        if (served := callables.attend_known(attend, carriers, given)) is not None:
            return served  # type: ignore[no-any-return]
    q, k, v = carriers
    call = make_call("attention", ROWS, {"q": q, "k": k, "v": v}, given)
    if _has_nested(call):
        return nested.attend(attend, call)  # type: ignore[no-any-return]
    if left_padding.is_given(call):
        return left_padding.attend(attend, call)  # type: ignore[no-any-return]
    if (found := eight_bits.of_stored(attend, call)) is not None:
        return found
    device = q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # which knows no meta tensors
        cast = autocast(q, k, v)
        if any([a is not b for a, b in zip(cast, carriers, strict=True)]):
            return attend(*cast, **given)  # type: ignore[no-any-return]
    formats = _formats_of(bound)
    if formats is not None and refusal is None:
        if (known := calls.by_format.get(formats)) is not None:
            _note(bound, known)
            try:
                return known(bound.tensors, call.schedule)
            except (SpecError, LimitError) as error:
                refusal = error
    plainly = reference.converted(call)
    if plainly is not call:
        return _plainly(attend, given_by(plainly), given, bound)
    if eight_bits.needs_gradient(call):
        return eight_bits.differentiable(attend, call, carriers)
    if refusal is None and call.functions:
        try:
            if (served := callables.attend(attend, call)) is not None:
                return served  # type: ignore[no-any-return]
        except (SpecError, LimitError) as error:
            refusal = error
    check_rest(call.num_splits, call.deterministic, call.schedule)
    # A schedule of other calls is refused whatever serves this one; callables have asked it.
    if (refusal is None or (call.schedule and not call.functions)) and routing.use_kernels(call):
        operands = operands_of(call)
        checked = CheckedCall.of(call, operands)
        if formats is not None:
            slots = {x.name: x.slot for x in fragment_operands(call.mask, call.score_mod)}
            homes = homes_of(q, k, v, given, slots, Tensor)
            checked.homes = tuple([homes.get(name, -1) for name in INPUTS])
            calls.keep(formats, checked)
            _note(bound, checked)
        operands = checked.adapted(operands, call.schedule)
        if refusal is None and torch.compiler.is_compiling():
            refusal = traced_refusal(operands, checked.arguments, call.backend)
            if refusal is None:
                return checked.launch(operands)
        elif refusal is None:
            _warn_of_dropout(call)
            try:
                return checked.launch(operands)
            except (SpecError, LimitError) as error:
                refusal = error
    return _by_reference(call, refusal)


def _plainly(
    attend: Attend, plainly: dict[str, Any], given: dict[str, Any], bound: Bound
) -> Result:
    """The result of a call in plain words, whose kernels later serve the words of this one, too.

    plainly: all arguments of the plain call; given, bound: of this one.
    """
    q, k, v = (plainly.pop(name, None) for name in CARRIERS)
    ordered = {name: plainly[name] for name in given if name in plainly} | plainly
    found: Result = attend(q, k, v, **ordered)
    key, tensors = bound
    if key is None or torch.compiler.is_compiling():
        return found
    plain_key, plain = bind(state(), q, k, v, ordered)
    alike = len(plain) == len(tensors) and all(map(operator.is_, plain, tensors))
    if alike and (known := calls.find(plain_key, plain)) is not None:
        _note(bound, known)
    return found


def _by_reference(call: AttentionCall, refusal: SpecError | LimitError | None) -> Result:
    """The results of a call that no kernel serves. refusal: of those that were to serve it."""
    if refusal is not None:
        routing.leave_kernels(refusal, call.backend)
    out, aux = on_reference.run(call, routing.CHECK_VALUES)
    _warn_of_dropout(call)
    return (out, aux) if call.wants_aux else out


def _has_nested(call: AttentionCall) -> bool:
    """Whether q, k or v is a nested tensor. Raises: SpecError where one is no tensor."""
    operands = {"q": call.q, "k": call.k, "v": call.v}
    try:  # which costs a call less than to ask for types
        return call.q.is_nested or any([x.is_nested for x in (call.k, call.v) if x is not None])
    except (AttributeError, ValueError) as error:
        raise SpecError(type_violations(operands)) from error


def _is_unread(longest: object) -> bool:
    """Whether a longest length is a tensor of one, which may be another in each call and would have
    to be waited for: kernels do without."""
    return isinstance(longest, Tensor) and longest.numel() == 1


def _formats_of(bound: Bound) -> Key | None:
    """Key and formats of calls that one check serves; None where each call is checked."""
    key, tensors = bound
    if key is None or not all([isinstance(x, Tensor) for x in tensors]):
        return None
    if not may_be_kept(tensors):
        return None
    try:
        formats = (key, *[(format_of(x), x.requires_grad, _is_plain(x)) for x in tensors])
        hash(formats)
    except _UNKEYED:
        return None
    return formats


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN and is_plain(tensor)


def _note(bound: Bound, checked: CheckedCall) -> None:
    """Let calls like this one be found by guards of their tensors, if no subclass is among them."""
    if all(map(_is_plain, bound.tensors)):
        calls.note(bound.key, bound.tensors, checked)


_warned: list[str] = []


def _warn_of_dropout(call: AttentionCall) -> None:
    """Say once that a call with dropout alone returns its output alone."""
    if _warned or call.wants_aux or torch.compiler.is_compiling() or not call.dropout_p > 0:
        return
    _warned.append("dropout")
    warnings.warn(
        "attngen.attention(…, dropout_p=…) returns the output alone since 0.2; pass "
        "return_rng_state=True for (output, aux) with aux.rng_state",
        FutureWarning,
        stacklevel=_level_of_caller(),
    )


def _level_of_caller() -> int:
    """The stacklevel of a warning, for the function that calls this one, that names the line
    outside of attngen: some calls stand for others."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level

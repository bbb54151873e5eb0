"""Calls that run in FP8: under a recipe, in 16 bits; and those of FP8 operands that need gradients.

A recipe replaces the operands of a call, which is then an FP8 call like any other. Where a gradient
is needed `attngen::quantised` computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import reference
from ...call.bind import Key, binder, homes_of
from ...call.cache import CallCache
from ...call.fragments import operands_of as fragment_operands
from ...call.recipe import IN_16_BITS, GradientForm, Recipe, StoredGradients, in_force
from ...call.routing import backward_refusals
from ...call.table import (
    CARRIERS,
    INPUTS,
    LEARNED,
    LENGTHS,
    ROWS,
    STARTS,
    AttentionCall,
    given_by,
    make_call,
    named,
    names,
)
from ...errors import LimitError, SpecError
from ...reference.fp8 import is_fp8, output_dtype
from ...spec import layouts
from ...spec.layouts import axes_of
from . import routing
from .casts import autocast
from .checked_call import RESULTS, CheckedCall, Result, operands_of
from .checks import check_rest
from .lengths import rows_in_use
from .narrow import SIXTEEN_BITS, narrowed
from .operation import unobserved
from .quantised import QuantisedCall, dispatched
from .sharding import is_distributed
from .token_scales import by_heads
from .torch_private import guard, is_deterministic, is_plain, is_traced, levels, may_be_kept
from .transforms import is_transformed, may_have_tangents

_NUMBERS = names("number")
_RNG_STATE = INPUTS.index("rng_state")
DESCALES = ("descale_q", "descale_k", "descale_v")
Carriers = tuple[Any, Any, Any]
_bind = binder(Tensor)


class Replaced(NamedTuple):
    """An FP8 call that stands for another. q, k, v, given: its arguments; carriers: q, k and v of
    the other, which get its gradients; stores: how the backward stores its own."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    given: dict[str, Any]
    carriers: Carriers
    stores: StoredGradients


def replaced(recipe: Recipe, carriers: Carriers, given: dict[str, Any]) -> Replaced | None:
    """The call that a recipe makes of one in 16 bits, None for others, which run as they are: FP8
    operands, wider ones, nested tensors and left padding (whose parts come again), pages.

    Raises: SpecError where the recipe cannot serve the call.
    """
    present = [x for x in carriers if x is not None]
    if not present or not all([isinstance(x, Tensor) for x in present]):
        return None  # to be refused
    if any([x.is_nested or _is_stored(x) for x in present]) or "page_table" in given:
        return None
    if any([given.get(name) is not None for name in STARTS]):
        return None
    q, *_ = present
    device = q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        carriers = autocast(*carriers)
        present = [x for x in carriers if x is not None]
        q, *_ = present
    if any([x.dtype not in SIXTEEN_BITS for x in present]):
        return None
    if functions := [name for name in names("function") if callable(given.get(name))]:
        raise SpecError(
            f"{', '.join(functions)}: FP8 recipes take no functions. Call it under "
            "attngen.fp8.autocast(enabled=False), or name a fragment."
        )
    if may_have_tangents(present):
        raise SpecError("FP8 recipes have no forward-mode derivative; leave the autocast for it")
    with torch.no_grad():
        made = recipe.quantise(carriers, _rows_in_use(carriers, given), narrowed)
    q8, k8, v8 = made.carriers
    assert q8 is not None  # as q was
    scales = by_heads(made.scales, given.get("layout", "bshd")) if made.by_token else made.scales
    given = {"out_dtype": q.dtype, **given, **scales}
    return Replaced(q8, k8, v8, given, carriers, made.gradients)


def _rows_in_use(carriers: Carriers, given: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """Which rows of the carriers belong to sequences; None where no lengths say."""
    if all([given.get(name) is None for name in LENGTHS]):
        return (None,) * len(carriers)
    q, k, v = carriers
    call = make_call("attention", ROWS, {"q": q, "k": k, "v": v}, given)
    layout = layouts.parse(call.layout)
    found = []
    for name, x in zip(CARRIERS, carriers, strict=True):
        lengths = call.lengths("q" if name == "q" else "kv", layout)
        found.append(None if x is None else rows_in_use(lengths, axes_of(layout, name), x))
    return tuple(found)


def run(attend: Callable[..., Result], call: Replaced) -> Result:
    """The results of a replaced call. attend: `attention`, for one that needs no gradient."""
    learned = [call.given.get(name) for name in LEARNED]
    if not (is_transformed() or _needs_gradient((*call.carriers, *learned))):
        return attend(call.q, call.k, call.v, **call.given)
    key: Key | None = None
    tensors: list[Any] = []
    if not (torch.compiler.is_compiling() or routing.CHECK_VALUES):
        kept = [None if x is None else _kept_dtype(x) for x in call.carriers]
        form = is_deterministic(), call.stores.form, call.stores.may_have_16_bits, *kept
        key, tensors = _bind(form, call.q, call.k, call.v, call.given)
    if (known := calls.find(key, tensors)) is not None:
        return known.of_bound(tensors, call)
    made = make_call("attention", ROWS, {"q": call.q, "k": call.k, "v": call.v}, call.given)
    plainly, checked = _checked(made, call.carriers, call.stores)
    if key is not None and plainly is made and all(map(is_plain, tensors)):
        if may_be_kept(tensors):
            checked.keep_homes(call, made)
            calls.note(key, tensors, checked)
    return checked(operands_of(plainly), made.schedule, call.carriers, call.stores)


def of_stored(attend: Callable[..., Result], call: AttentionCall) -> Result | None:
    """The results of a call whose q, k and v hold FP8 numbers and their scale (`_data` and
    `_scale_inv`, as `attngen.fp8.Float8Tensor`), in their nominal dtype; None of other calls.
    attend: `attention`, for one that needs no gradient.

    Raises: SpecError where some of them alone do, or descales are given, too.
    """
    given = {name: x for name in CARRIERS if (x := getattr(call, name)) is not None}
    if not any(map(_is_stored, given.values())):
        return None
    others = [name for name, x in given.items() if not _is_stored(x)]
    reasons = [f"{name} needs a Float8Tensor as the others. Quantise it." for name in others]
    reasons += [
        f"{name} is said by the Float8Tensor itself. Leave it out."
        for name in DESCALES
        if getattr(call, name) is not None
    ]
    if reasons:
        raise SpecError(reasons)
    first, *_ = given.values()
    descales = [x._scale_inv.reshape(1) for x in given.values()]
    *_, last = descales
    scales = dict(zip(DESCALES, [*descales, last, last], strict=False))
    stored = {name: x._data for name, x in given.items()}
    dtype = first.dtype if call.out_dtype is None else call.out_dtype
    plain = AttentionCall(**{**named(call), **stored, **scales, "out_dtype": dtype})
    if not _needs_gradient((call.q, call.k, call.v, *_learned(call))):
        return attend(**given_by(plain))
    carriers = [None if (x := given.get(name)) is None else _Carrier.apply(x) for name in CARRIERS]  # type: ignore[no-untyped-call]
    q, k, v = carriers
    return differentiable(attend, plain, (q, k, v))


def _learned(call: AttentionCall) -> list[Any]:
    """Operands beside q, k and v of which kernels have gradients."""
    return [getattr(call, name) for name in LEARNED]


def _is_stored(x: Any) -> bool:
    """Whether a tensor holds FP8 numbers under another dtype."""
    stored = getattr(x, "_data", None)
    return isinstance(stored, Tensor) and is_fp8(stored.dtype) and hasattr(x, "_scale_inv")


class _Carrier(torch.autograd.Function):
    """One number that stands for the shape and the dtype of a tensor, to get its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        number: Tensor = x._data.new_zeros(1, dtype=x.dtype)
        return number.expand(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def needs_gradient(call: AttentionCall) -> bool:
    """Whether a gradient of a call of FP8 operands is needed, of which there is one."""
    if not is_fp8(call.q.dtype):
        return False
    learned = [getattr(call, name) for name in LEARNED]
    return _needs_gradient((call.q, call.k, call.v, *learned))


def _needs_gradient(tensors: tuple[Any, ...]) -> bool:
    given = [x for x in tensors if isinstance(x, Tensor)]
    return torch.is_grad_enabled() and any([x.requires_grad for x in given])


def differentiable(
    attend: Callable[..., Result], call: AttentionCall, carriers: Carriers
) -> Result:
    """The results of a call of FP8 operands whose gradients the carriers get, and its bias and its
    sink. attend: `attention`.

    Raises: SpecError with every violation at once; CompileError, LaunchError.
    """
    given = given_by(call)
    q: Tensor = given.pop("q").detach()
    k, v = [None if (x := given.pop(name, None)) is None else x.detach() for name in ("k", "v")]
    recipe = in_force.recipe
    stores = IN_16_BITS if recipe is None else recipe.stored_gradients()
    return run(attend, Replaced(q, k, v, given, carriers, stores))


@dataclass(eq=False)
class Differentiable:
    """An FP8 call with gradients that was checked, for all that differ from it in addresses alone.

    kernels: whether these serve it; backend: the one that it names; wide_backward: whether kernels
    compute the backward in 16 bits, whatever the recipe stores; launch: that of the kernels, once
    there was one.
    """

    checked: CheckedCall
    kernels: bool
    backend: str
    wide_backward: bool
    launch: QuantisedCall | None = None

    def keep_homes(self, call: Replaced, made: AttentionCall) -> None:
        """Know where operands are among the bound tensors of such calls. made: the call's value."""
        own = fragment_operands(made.mask, made.score_mod)
        slots = {each.name: each.slot for each in own}
        homes = homes_of(call.q, call.k, call.v, call.given, slots, Tensor)
        self.checked.homes = tuple([homes.get(name, -1) for name in INPUTS])

    def of_bound(self, tensors: list[Any], call: Replaced) -> Result:
        """The results for bound tensors. Raises: as `__call__`."""
        operands = tuple([None if home < 0 else tensors[home] for home in self.checked.homes])
        return self(operands, call.given.get("schedule"), call.carriers, call.stores)

    def __call__(
        self, operands: tuple[Any, ...], schedule: Any, carriers: Carriers, stores: StoredGradients
    ) -> Result:
        """The results for operands as a call gives them. Where kernels refuse, such as for an
        address, the reference serves a call that names no backend.

        Raises: SpecError, CompileError, LaunchError.
        """
        checked = self.checked
        operands = checked.completed(checked.adapted(operands, schedule))
        results = None
        if self.kernels:
            form = GradientForm() if self.wide_backward else stores.form
            try:
                if self._is_unobserved(carriers, operands):
                    return self._launched(operands, carriers, stores._replace(form=form))
                before = *form, stores.scale, stores.amax, *carriers
                results = dispatched(True, *before, *operands, *checked.arguments)
            except (SpecError, LimitError) as error:
                if torch.compiler.is_compiling():
                    raise
                routing.leave_kernels(error, self.backend)
        if results is None:
            arguments = checked.arguments._replace(num_splits=0)
            before = *stores.form, stores.scale, stores.amax, *carriers
            results = dispatched(False, *before, *operands, *arguments)
        if checked.by_products:
            return checked.with_aux(results, RESULTS, operands[_RNG_STATE])
        out, *_ = results
        return out


    def _is_unobserved(self, carriers: Carriers, operands: tuple[Any, ...]) -> bool:
        """Whether launches may stand for the operation."""
        if torch.compiler.is_compiling() or is_transformed() or levels._current_level >= 0:
            return False
        return unobserved(carriers) and unobserved(operands)

    def _launched(
        self, operands: tuple[Any, ...], carriers: Carriers, stores: StoredGradients
    ) -> Result:
        """The results by kernels, with nothing between. Raises: SpecError, LaunchError."""
        if self.launch is None:
            self.launch = QuantisedCall.of(operands, self.checked.arguments)
        found = self.launch(stores, carriers, operands)
        if not self.checked.by_products:
            return found["o"]
        return self.checked.with_aux([*found.values()], (*found,), operands[_RNG_STATE])


def _checked(
    call: AttentionCall, carriers: Carriers, stores: StoredGradients
) -> tuple[AttentionCall, Differentiable]:
    """A call with plain arguments, and what was found out about it.

    Raises: SpecError with every violation at once.
    """
    _refuse(call, carriers)
    call = reference.converted(call)
    check_rest(call.num_splits, call.deterministic, call.schedule)
    with torch.no_grad():
        kernels = routing.use_kernels(call)
        if not kernels:
            reference.check(call)
        wide = kernels and not _stores(call, stores)
    checked = CheckedCall.of(call, operands_of(call), kernels)
    return call, Differentiable(checked, kernels, call.backend, wide)


def _stores(call: AttentionCall, stores: StoredGradients) -> bool:
    """Whether the backward of a call that kernels serve is in 8 bits.

    Raises: SpecError with every reason why kernels have none, unless one of 16 bits may stand in.
    """
    if not stores.form.d_o_dtype:
        return False
    form, traced = stores.form, is_traced((call.q, call.k, call.v))
    reasons = backward_refusals(call, form.d_o_dtype, traced, mixed=form.mixed)
    if not reasons:
        return True
    if not stores.may_have_16_bits:
        raise SpecError(
            [
                f"{reason}. Take a recipe with backward='fp8_or_16' or '16' for gradients in "
                "16 bits, or backend='reference'."
                for reason in reasons
            ]
        )
    return False


calls: CallCache[Differentiable] = CallCache(guard)


def _refuse(call: AttentionCall, carriers: Carriers) -> None:
    """Raises: SpecError with each reason for which an FP8 call has no gradients."""
    reasons = []
    if is_distributed((*carriers, *_learned(call))):
        reasons.append("FP8 calls of distributed tensors have no gradients. Use to_local().")
    if is_fp8(output_dtype(call)):
        reasons.append(
            f"a gradient is needed, but of an output in 16 bits alone; got {call.out_dtype}. "
            "Leave out_dtype out, or call it under torch.no_grad()."
        )
    for name, x in zip(CARRIERS, carriers, strict=True):
        if x is not None and (kept := _kept_dtype(x)) is not None:
            reasons.append(
                f"{name} requires a gradient, which autograd would round to {kept}. Set its "
                "grad_dtype to torch.bfloat16 if it is a leaf; else pass 16 bits under "
                "attngen.fp8.autocast()."
            )
    numbers = [name for name in _NUMBERS if _is_learned(getattr(call, name))]
    reasons += [f"{name} requires a gradient, of which FP8 calls have none." for name in numbers]
    if call.page_table is not None:
        reasons.append("pages are inference only. Call it under torch.no_grad().")
    elif layouts.parse(call.layout).q_format == "thd":
        per_head = [
            n for n in DESCALES if isinstance(x := getattr(call, n), Tensor) and x.ndim == 2
        ]
        reasons += [f"{name} of packed tokens has gradients as float32 [1]." for name in per_head]
    if reasons:
        raise SpecError(reasons)


def _kept_dtype(carrier: Tensor) -> torch.dtype | None:
    """The FP8 dtype to which autograd would round a gradient that is needed; None of others. For a
    trace it is the carrier's own."""
    if not carrier.requires_grad or not is_fp8(carrier.dtype):
        return None
    if torch.compiler.is_compiling() or not carrier.is_leaf:  # others have no such attribute
        return carrier.dtype
    kept: torch.dtype | None = getattr(carrier, "grad_dtype", carrier.dtype)  # since torch 2.10
    return kept if kept is not None and is_fp8(kept) else None  # None is any


def _is_learned(number: object) -> bool:
    return isinstance(number, Tensor) and number.requires_grad

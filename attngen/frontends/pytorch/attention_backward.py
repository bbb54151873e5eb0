"""`attngen.attention_backward`: gradients of a call without autograd, of what it returned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...call.bind import Key, homes_of
from ...call.cache import CallCache
from ...call.fragments import operands_of as fragment_operands
from ...call.gradient_kernels import wanted_of_operands
from ...call.memory import order_in
from ...call.recipe import in_force
from ...call.table import (
    CARRIERS,
    GRADIENT_OF,
    INPUTS,
    LEARNED,
    ROWS,
    AttentionCall,
    WantedGradients,
    make_call,
)
from ...call.tensors import named
from ...errors import LimitError, SpecError
from ...reference.fp8 import is_fp8
from ...results import AttentionGradients
from . import left_padding, on_reference, routing
from .backward import differentiate, dispatch
from .calls import bind, state
from .casts import autocast, without_autocast
from .checked_call import CheckedCall, Operands, arguments_of, operands_of
from .checks import check_rest
from .operation import unobserved
from .outputs import laid_out
from .signature import CallForm, places_of
from .torch_private import guard, has_transforms, is_plain

_LEAVES = ("q", "k", "v", *LEARNED)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    **given: Any,
) -> AttentionGradients:
    """Gradients of `attention(q, k, v, **given)`, by its kernels of the backward.

    Args:
        dout: of the output, in its shape and dtype.
        q, k, v: as the call took them, in 16 bits on kernels; packed ones have a packed gradient.
        out, lse: as `attention(…, return_lse=True)` returned them.
        dlse: of the LSE, float32 in its shape; None where nothing depends on it.
        given: whatever else the call was given: with dropout the `rng_state` that it returned.
            Functions, schedules, rows that begin late (`seqstart_q`), nested tensors and 8 bits
            are refused, and transforms of torch.func around the call. Under torch.autocast float32
            operands are cast, as the call cast them.

    Returns: contiguous gradients in the operands' dtypes, or as `out_layout` lays them out; None
        of what the call has not.

    Raises:
        SpecError: with every violation at once.
        CompileError, LaunchError: where a kernel cannot be made or launched.
    """
    if reasons := _unfit(dout, dlse, out, lse):
        raise SpecError(reasons)
    key: Key | None = None
    tensors: list[Any] = []
    if not (torch.compiler.is_compiling() or routing.CHECK_VALUES or in_force.recipe is not None):
        key, tensors = bind(state(), q, k, v, given)
        known = known_calls.find(key, tensors)
        if known is not None and unobserved((dout, dlse, out, lse, *tensors)):
            return known(dout, dlse, out, lse, tensors)
    if _is_autocast(q):
        with without_autocast(q.device.type):
            cast_q, cast_k, cast_v = autocast(q, k, v)
            found = attention_backward(
                *(dout, cast_q, cast_k, cast_v, out, lse), dlse=dlse, **given
            )
        return _in_dtypes_of(found, (q, k, v))
    carriers = {"q": q, "k": k, "v": v}
    operands, others = (
        {name: _leaf(x) if name in _LEAVES else x for name, x in x.items()}
        for x in (carriers, given)
    )
    plainly = make_call("attention_backward", ROWS, operands, others)
    call = reference.converted(plainly)
    _refuse(call)
    with torch.enable_grad():
        on_kernels = routing.use_kernels(call)
    if on_kernels:
        try:
            made = KnownBackward.of(call)
            if key is not None and _may_be_kept(plainly, call, tensors):
                slots = {x.name: x.slot for x in fragment_operands(call.mask, call.score_mod)}
                homes = homes_of(q, k, v, given, slots, Tensor)
                made = replace(made, homes=tuple([homes.get(name, -1) for name in INPUTS]))
                known_calls.note(key, tensors, made)
            return made.run(dout, dlse, out, lse, operands_of(call))
        except (SpecError, LimitError) as refusal:
            routing.leave_kernels(refusal, call.backend)
    return _by_definition(call, {"dout": dout, "dlse": dlse, "out": out, "lse": lse})


def _may_be_kept(given: AttentionCall, call: AttentionCall, tensors: list[Tensor]) -> bool:
    """Whether a call in plain words has the tensors of one as given, which are plain, too."""
    pairs = ((getattr(given, name), getattr(call, name)) for name in ROWS)
    same = given is call or all(x is y for x, y in pairs if isinstance(x, Tensor))
    return same and all(map(is_plain, tensors))


def _is_autocast(q: object) -> bool:
    """Whether torch.autocast is on where the operands are, which knows no meta tensors."""
    there = isinstance(q, Tensor) and not q.is_meta
    return there and torch.is_autocast_enabled(q.device.type)  # type: ignore[attr-defined]


def _in_dtypes_of(
    found: AttentionGradients, carriers: tuple[Tensor | None, ...]
) -> AttentionGradients:
    """Gradients of operands that were cast, in the operands' own dtypes."""
    pairs = zip(("dq", "dk", "dv"), carriers, strict=True)
    made: dict[str, Any] = {
        name: gradient.to(x.dtype)
        for name, x in pairs
        if x is not None and (gradient := getattr(found, name)) is not None
    }
    return replace(found, **made)


def _unfit(dout: object, dlse: object, out: object, lse: object) -> list[str]:
    """Why a call has no gradients, whatever else it is given."""
    given = {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    wrong = {name: type(x).__name__ for name, x in given.items() if not isinstance(x, Tensor)}
    reasons = [f"{name} needs a tensor; got {found}" for name, found in wrong.items()]
    if has_transforms():
        reasons.append("attention_backward takes no transform of torch.func; transform attention")
    return reasons


def _leaf(x: object) -> object:
    """A tensor apart from whatever made it, which needs a gradient; anything else as it is."""
    return x.detach().requires_grad_() if isinstance(x, Tensor) else x


def _refuse(call: AttentionCall) -> None:
    """Raises: SpecError where the call has no gradient here."""
    check_rest(call.num_splits, call.deterministic, call.schedule)
    asked = {
        "functions": call.functions,
        "schedule": call.schedule is not None,
        "rows that begin late": left_padding.is_given(call),
        "operands in 8 bits": isinstance(call.q, Tensor) and is_fp8(call.q.dtype),
        "nested tensors": any(x.is_nested for x in _carriers(call)),
        "recipe of attngen.fp8": in_force.recipe is not None,
    }
    reasons = [f"attention_backward takes no {name}" for name, there in asked.items() if there]
    if call.dropout_p > 0 and call.rng_state is None:
        reasons.append("dropout needs the rng_state that the call returned")
    if reasons:
        raise SpecError(reasons)


def _carriers(call: AttentionCall) -> list[Tensor]:
    """Tensors of q, k and v."""
    return [x for x in (call.q, call.k, call.v) if isinstance(x, Tensor)]


def _leaves(call: AttentionCall) -> dict[str, Tensor]:
    """The operands that have a gradient, by their names."""
    found = {name: getattr(call, name) for name in _LEAVES}
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}


@dataclass(frozen=True, eq=False)
class KnownBackward:
    """A backward that kernels serve, for all calls that differ from it in addresses alone.

    checked: the forward; wanted: its gradients; leaves: operands that have one, with their dtypes.
    homes: where each of `INPUTS` is among the bound tensors, −1 for none; empty where it is not
    kept.
    """

    checked: CheckedCall
    wanted: WantedGradients
    leaves: tuple[tuple[str, torch.dtype], ...]
    homes: tuple[int, ...] = ()

    @classmethod
    def of(cls, call: AttentionCall) -> KnownBackward:
        """The backward of a checked call."""
        leaves = _leaves(call)
        wanted = wanted_of_operands({*leaves}, one_tensor=call.k is None)
        checked = CheckedCall.of(call, operands_of(call))
        return cls(checked, wanted, tuple((name, x.dtype) for name, x in leaves.items()))

    def __call__(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, tensors: list[Tensor]
    ) -> AttentionGradients:
        """The gradients for bound tensors. Raises: SpecError, LaunchError."""
        operands = tuple([None if home < 0 else tensors[home] for home in self.homes])
        return self.run(dout, dlse, out, lse, operands)

    def run(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, operands: Operands
    ) -> AttentionGradients:
        """The gradients for the operands of a call. Raises: SpecError, LaunchError."""
        with torch.no_grad():
            operands = self.checked.completed(self.checked.adapted(operands, None))
            operands = tuple([None if x is None else x.detach() for x in operands])
            present = [x for x in operands if x is not None]
            form = CallForm(self.checked.arguments, places_of(operands))
            tensors = (dout, dlse, out, lse, *present)
            plain = unobserved(tensors) and not torch.compiler.is_compiling()
            make = differentiate if plain else dispatch
            found = make(form, self.wanted, dout, dlse, out, lse, present)
            made = {GRADIENT_OF[name]: dtype for name, dtype in self.leaves}
            return AttentionGradients(**{name: found[name].to(x) for name, x in made.items()})


known_calls: CallCache[KnownBackward] = CallCache(guard)


def _by_definition(call: AttentionCall, given: dict[str, Tensor | None]) -> AttentionGradients:
    """The gradients by the reference, of results that are given by their names.

    Raises: SpecError where these or their gradients do not fit.
    """
    leaves = _leaves(call)
    gradients = [x for name in ("dout", "dlse") if (x := given[name]) is not None]

    def results(*operands: Tensor) -> tuple[Tensor, ...]:
        replaced: dict[str, Any] = dict(zip(leaves, operands, strict=True))
        out, aux = on_reference.run(replace(call, **replaced))
        assert aux.lse is not None  # the reference has one
        _hold({"dout": out, "out": out, "dlse": aux.lse, "lse": aux.lse}, given)
        return (out, aux.lse)[: len(gradients)]

    # A transform, which autograd's own calls below the dispatcher do not see.
    vjp: Any = torch.func.vjp(results, *[x.detach() for x in leaves.values()])
    _, pull = vjp
    found = pull(tuple(gradients))
    arguments = arguments_of(call)
    made = {}
    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        order = order_in(arguments, name) if name in CARRIERS else ""
        laid = laid_out(gradient, order if len(order) == leaf.ndim else "")
        made[GRADIENT_OF[name]] = laid
    return AttentionGradients(**made)


def _hold(made: dict[str, Tensor], given: dict[str, Tensor | None]) -> None:
    """Raises: SpecError where what is given is not like what is made."""
    pairs = [(name, like, x) for name, like in made.items() if (x := given[name]) is not None]
    reasons = [
        f"{name} needs {named(like)}, got {named(x)}"
        for name, like, x in pairs
        if (like.dtype, like.shape) != (x.dtype, x.shape)
    ]
    if reasons:
        raise SpecError(reasons)

"""Checked calls: what is known of calls that have kernels, and how these are launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from ... import reference
from ...call import operation_form
from ...call.numbers import Arguments
from ...call.prepared import PreparedCall
from ...call.schedule import Ordered, ordered_by
from ...call.table import INPUTS, LENGTHS, AttentionCall
from ...reference.dropout import draw_rng_state
from ...results import AttentionAux
from .autograd import DifferentiableCall
from .casts import Casts, cast, casts_of
from .checks import refuse_derivatives, refuse_unreadable
from .descriptions import described
from .forward import dispatched, find_alone, find_prepared, with_readable_bias
from .lengths import settle
from .operation import run, unobserved
from .schedule import Schedule
from .sharding import is_distributed, over_shards
from .signature import CallForm, places_of
from .torch_private import levels, undisturbed

Operands = tuple["Tensor | None", ...]  # of `INPUTS`
Result = Tensor | tuple[Tensor, AttentionAux]
_FIRST_LENGTH = INPUTS.index("cu_seqlens_q")
_BEHIND_LENGTHS = _FIRST_LENGTH + len(LENGTHS)
_RNG_STATE, _SLOPES = INPUTS.index("rng_state"), INPUTS.index("alibi_slopes")
_SCHEDULE, _BIAS = INPUTS.index("schedule"), INPUTS.index("bias")
_first: Callable[[Sequence[Tensor]], Tensor] = itemgetter(0)
RESULTS: tuple[str, ...] = ("o", "lse", "amax_s", "amax_o", "max_logit")  # of `attngen::forward`


@dataclass(eq=False)
class CheckedCall:
    """A call that was checked and has kernels, for all that differ from it in addresses alone.

    arguments: the operation's. default_slopes: query heads that take ALiBi's own slopes; casts:
    operands that are cast; lengths_as_given: whether operations take the lengths that a call gives.
    by_products: whether it returns an `AttentionAux`; differentiable: whether an operand needs a
    gradient. homes: where each of `INPUTS` is among the bound tensors, −1 for none; empty of a call
    that is not kept. ordered: what an order of its sequences depends on. prepared, trained: its
    launch without and with gradients, once there was one. direct: that launch for the bound tensors
    themselves, where nothing becomes of them before; names: of what it returns.
    """

    arguments: Arguments
    default_slopes: int
    casts: Casts
    lengths_as_given: bool
    by_products: bool
    differentiable: bool
    homes: tuple[int, ...] = ()
    ordered: Ordered | None = None
    prepared: PreparedCall | None = None
    trained: DifferentiableCall | None = None
    direct: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
    names: tuple[str, ...] = field(default=RESULTS)

    @classmethod
    def of(cls, call: AttentionCall, operands: Operands, kernels: bool = True) -> CheckedCall:
        """The facts about a call whose arguments were checked; operands: as it gives them; kernels:
        whether these serve it."""
        settled = settle_lengths(call.layout, operands)
        present = [x for x in operands if x is not None]
        return cls(
            arguments=arguments_of(call),
            default_slopes=operation_form.default_slopes_of(call, Tensor),
            casts=casts_of(settled, kernels),
            lengths_as_given=all([a is b for a, b in zip(settled, operands, strict=True)]),
            by_products=call.wants_aux,
            differentiable=torch.is_grad_enabled() and any([x.requires_grad for x in present]),
        )

    def __call__(self, tensors: list[Tensor], schedule: Schedule | None) -> Result:
        """The call of these tensors, of a kept call's formats. Raises: SpecError, LaunchError."""
        if self.direct is None or levels._current_level >= 0 or not undisturbed():
            operands = tuple([None if home < 0 else tensors[home] for home in self.homes])
            return self.launch(self.adapted(operands, schedule))
        results = self.direct(tensors)
        if not self.by_products:
            return _first(results)
        home = self.homes[_RNG_STATE]
        return self.with_aux(results, self.names, None if home < 0 else tensors[home])

    def into(self, out: Tensor, tensors: list[Tensor], schedule: Schedule | None) -> Result:
        """The call of these tensors, whose output kernels write to `out`.

        Raises: SpecError, LaunchError.
        """
        operands = tuple([None if home < 0 else tensors[home] for home in self.homes])
        operands = self.completed(self.adapted(operands, schedule))
        refuse_derivatives(operands, self.arguments, False)
        rng_state = operands[_RNG_STATE]
        operands, there = with_readable_bias(operands), described(out)
        if self.by_products:
            prepared = find_prepared(operands, self.arguments, into=there)
        else:
            prepared = find_alone(operands, self.arguments, there)
        results = run(prepared, (*operands, out))
        if not prepared.launches:
            out.zero_()
        if not self.by_products:
            return out
        return self.with_aux((out, *results), ("o", *prepared.names), rng_state)

    def adapted(self, operands: Operands, schedule: Schedule | None) -> Operands:
        """The operands of a call as operations take them: lengths, dtypes and the order of the
        schedule. Raises: SpecError where the schedule is for other calls."""
        given = operands[_FIRST_LENGTH:_BEHIND_LENGTHS]
        if not self.lengths_as_given:
            operands = settle_lengths(self.arguments.layout, operands)
        if self.casts:
            operands = cast(operands, self.casts)
        if schedule is None:
            return operands
        if self.ordered is None:
            self.ordered = ordered_by(operands, self.arguments)
        device = _q_of(operands).device
        return _with(operands, _SCHEDULE, schedule.table_of(self.ordered, given, device))

    def completed(self, operands: Operands) -> Operands:
        """Adapted operands with what is made for them: ALiBi's own slopes, a state of dropout."""
        if self.default_slopes:
            slopes = default_slopes(self.default_slopes, _q_of(operands))
            operands = _with(operands, _SLOPES, slopes)
        if self.arguments.dropout_p > 0:
            given = operands[_RNG_STATE]
            drawn = draw_rng_state(_q_of(operands).device) if given is None else given.contiguous()
            operands = _with(operands, _RNG_STATE, drawn)
        return operands

    def launch(self, operands: Operands) -> Result:
        """The results for adapted operands. Raises: SpecError, LaunchError, CompileError."""
        if self.default_slopes or self.arguments.dropout_p > 0:
            operands = self.completed(operands)
        rng_state = operands[_RNG_STATE]
        present = [x for x in operands if x is not None]
        if self.differentiable or levels._current_level >= 0:
            refuse_derivatives(operands, self.arguments, self.differentiable)
        results: Sequence[Tensor]
        names = RESULTS
        if torch.compiler.is_compiling() or not unobserved(present):
            refuse_unreadable(operands)
            attend = over_shards(dispatched) if is_distributed(operands) else dispatched
            results = attend(*operands, *self.arguments)
        elif self.differentiable:
            trained = self._train(operands)
            results, names = trained(present), trained.names
        else:
            operands = with_readable_bias(operands)
            prepared = self._prepare(operands)
            results, names = run(prepared, operands), prepared.names
        if self.by_products:
            return self.with_aux(results, names, rng_state)
        out, *_ = results
        return out

    def _train(self, operands: Operands) -> DifferentiableCall:
        """The launch of a call that has gradients, worked out once."""
        if self.trained is None:
            prepared = find_prepared(with_readable_bias(operands), self.arguments)
            form = CallForm(self.arguments, places_of(operands))
            self.trained = DifferentiableCall.of(form, prepared, self.by_products)
            if self._launches_bound_tensors():
                order = tuple([home for home in self.homes if home >= 0])
                self.names = self.trained.names
                self.direct = self.trained.of_bound(order)
        return self.trained

    def _prepare(self, operands: Operands) -> PreparedCall:
        """The launch of a call that has no gradients, worked out once, but under capture, where
        memory that nobody reads is the graph's own."""
        if self.prepared is not None:
            return self.prepared
        if self.by_products:
            prepared = find_prepared(operands, self.arguments)
        else:
            prepared = find_alone(operands, self.arguments)
            if torch.cuda.is_current_stream_capturing():
                return prepared
        self.prepared = prepared
        if self._launches_bound_tensors() and operands[_BIAS] is None:
            placed = prepared.placed([None if home < 0 else home for home in self.homes])
            self.names = prepared.names
            self.direct = partial(run, placed)
        return prepared

    def _launches_bound_tensors(self) -> bool:
        """Whether kernels take the tensors that a kept call binds, and nothing made of them."""
        made = self.casts or self.default_slopes or self.ordered is not None
        made = made or self.arguments.dropout_p > 0 or not self.lengths_as_given
        return bool(self.homes) and not made

    def with_aux(
        self, results: Sequence[Tensor], names: tuple[str, ...], rng_state: Tensor | None
    ) -> tuple[Tensor, AttentionAux]:
        """The output, and by-products of results of these names."""
        found, asked = dict(zip(names, results, strict=True)), self.arguments
        max_logit = found.get("max_logit") if asked.max_logit else None
        if asked.max_logit and max_logit is None:  # of no heads, which no kernel writes
            max_logit = found["lse"].new_empty(0)
        return found["o"], AttentionAux(
            lse=found["lse"],
            max_logit=max_logit,
            rng_state=rng_state,
            amax_s=found.get("amax_s") if asked.amax else None,
            amax_o=found.get("amax_o") if asked.amax else None,
        )


def _with(operands: Operands, place: int, tensor: Tensor | None) -> Operands:
    return (*operands[:place], tensor, *operands[place + 1 :])


def _q_of(operands: Operands) -> Tensor:
    q, *_ = operands
    assert q is not None  # the operation's schema
    return q


def settle_lengths(layout: str, operands: Operands) -> Operands:
    """The operands with their lengths as operations take them."""
    before, after = operands[:_FIRST_LENGTH], operands[_BEHIND_LENGTHS:]
    return (*before, *settle(layout, operands[_FIRST_LENGTH:_BEHIND_LENGTHS]), *after)


def operands_of(call: AttentionCall) -> Operands:
    """The operations' tensors of a call, in their order; ALiBi's own slopes and the schedule, which
    are made later, are none."""
    return operation_form.operands_of(call, Tensor)


def arguments_of(call: AttentionCall) -> Arguments:
    """Arguments of the operations for a checked call."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return operation_form.arguments_of(call, deterministic, Tensor)


_slopes: dict[tuple[int, torch.device], Tensor] = {}  # for ever, since graphs may read them


def default_slopes(heads: int, q: Tensor) -> Tensor:
    """ALiBi's own slopes, there for every stream. What a graph makes is not there before its
    replay: it keeps its own."""
    known = unobserved((q,))  # else heads may be a symbol
    if known and (slopes := _slopes.get((heads, q.device))) is not None:
        return slopes
    with torch.inference_mode(False):  # a call that trains may save them
        slopes = reference.default_alibi_slopes(heads, q.device)
    if known and not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        if q.is_cuda:  # later calls may be on other streams
            torch.cuda.current_stream(q.device).synchronize()
        _slopes[heads, q.device] = slopes
    return slopes

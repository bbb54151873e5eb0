"""Attention over a group as a function of autograd: parts, their messages, and their sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....call.context.packed import Together
from ....call.context.rounds import Rounds
from ....call.context.rows import rows_of
from ....call.context.steps import Part, Span
from ....call.context.visits import relative
from ....call.recipe import without_recipe
from ..backward_parts import RowSums
from ..casts import without_autocast
from .arrivals import forward_rounds
from .lanes import Lanes
from .launches import RunningRows, gradients_of, index_of, sink_gradient_of_rows
from .messages import Around, Gathered, Pair, Visit, new_pair
from .parts import (
    Attended,
    Features,
    Merged,
    Rows,
    Running,
    Sequences,
    Stored,
    backward_part,
    cut,
    forward_part,
    operation_arguments,
    sink_gradient,
)
from .returns import sums_of_rounds


@dataclass(frozen=True, eq=False)
class ContextCall:
    """A call over a group as one rank computes it.

    messages: how keys come and their gradients go; sequences: of the plan; used: the rank's rows in
    use of each; sums: the dtype in which outputs and gradients are added up; travels: that of
    gradients in messages. together: launches of several parts each, of packed sequences.
    """

    messages: Around | Gathered
    sequences: tuple[Sequences, ...]
    used: tuple[tuple[Rows, Span], ...]
    features: Features
    sums: torch.dtype
    travels: torch.dtype
    stored: Stored | None = None
    together: Together | None = None

    def used_tokens(self, device: torch.device) -> Tensor:
        """The rank's tokens in use, of launches."""
        assert self.together is not None
        return index_of(self.together.used, device)

    def carriers(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as parts read them and messages have them."""
        return (q, k, v) if self.stored is None else self.stored.carriers

    def numbers(self, read: Attended) -> Attended:
        """Operands of a part, as numbers in 8 bits where they are stored so."""
        if self.stored is None:
            return read
        q, k, v = map(self.stored.numbers, read.carriers)
        return read._replace(q=q, k=k, v=v)

    def widened(self, read: Attended) -> Attended:
        """Operands of a part's gradients, in 16 bits or more."""
        if self.stored is None:
            return read
        q, k, v = (self.stored.widened(*each) for each in zip("qkv", read.carriers, strict=True))
        return read._replace(q=q, k=k, v=v)

    def read(
        self, part: Part, visit: Visit, q: Tensor, bias: Tensor | None, learns: bool = False
    ) -> Attended:
        """Cut what a part reads out of the rank's queries and the keys at hand."""
        rows = self.sequences[part.sequence]
        k, v = visit.held[part.sequence]
        begin, end = relative(part, visit.spans)
        own = None if bias is None else cut(bias, part, rows)
        return Attended(
            rows.queries.of(q, part.queries), k[:, begin:end], v[:, begin:end], own, learns
        )


class ContextAttention(torch.autograd.Function):
    """Output and LSE of a rank's queries, [b, t, h, d_v] and [b, h, t], over the keys of all."""

    @staticmethod
    def forward(
        ctx: Any,
        call: ContextCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        of_q = q.dtype
        wide = of_q, k.dtype, v.dtype
        q, k, v = call.carriers(q, k, v)
        attend = _by_parts if call.together is None else _by_launches
        sums, lse, rounded = attend(call, (q, k, v), sink, bias)
        out = sums.to(of_q) if rounded is None else rounded
        ctx.save_for_backward(q, k, v, sink, bias, out, lse)
        ctx.call, ctx.wide = call, wide
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        call: ContextCall = ctx.call
        q, k, v, sink, bias, out, lse = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous()
        merged = Merged(out, lse, d_out, dlse)
        *_, sink_learns, bias_learns = ctx.needs_input_grad
        gradients = Gradients.zero(call, bias if bias_learns else None)
        with without_autocast(q.device.type), without_recipe():
            gradients.of_all(q, k, v, bias, merged)
        dsink = None
        if sink is not None and sink_learns and call.together is not None:
            dsink = sink_gradient_of_rows(sink, merged, call.used_tokens(q.device))
        elif sink is not None and sink_learns:
            dsink = sink_gradient(sink, merged, call.used)
        dq, dbias = gradients.of_queries, gradients.of_bias
        dk, dv = gradients.keys(k, v)
        of_q, of_k, of_v = ctx.wide
        return (
            None,
            torch.zeros_like(q, dtype=of_q) if dq is None else dq.to(of_q),
            dk.to(of_k),
            dv.to(of_v),
            dsink,
            None if dbias is None or bias is None else dbias.to(bias.dtype),
        )


Forward = tuple[Tensor, Tensor, Tensor | None]  # sums of outputs, LSEs, rounded outputs


def _by_parts(
    call: ContextCall, carriers: tuple[Tensor, ...], sink: Tensor | None, bias: Tensor | None
) -> Forward:
    """The forward by one part after another."""
    q, k, v = carriers
    begun, rows_of_parts = rows_of(call.messages.parts, q.shape[1])
    running = Running.before(q, v, call.sums, sink, call.used)
    running.is_begun = begun and len(call.sequences) == 1
    marks = iter(rows_of_parts)
    rounds = call.messages.rounds if isinstance(call.messages, Around) else None
    several = rounds is not None and running.begins(call.features.joins, q.dtype)
    lanes = Lanes(q, 0 if rounds is None else rounds.cut, several)
    with lanes, closing(forward_rounds(call.messages, k, v)) as rounds_of_keys:
        for visits in rounds_of_keys:
            lanes.begin()
            for at_hand, part in [(visit, part) for visit in visits for part in visit.parts]:
                rows, mark = call.sequences[part.sequence], next(marks)
                read = call.numbers(call.read(part, at_hand, q, bias))
                if call.features.joins:
                    with lanes.of(part.queries, (read.k, read.v)):
                        running.attend(call.features, part, rows, read, mark)
                    continue
                found = forward_part(call.features, part, rows, read, call.stored)
                running.add(rows.queries, part.queries, *found, mark)
    return *running.sums, running.rounded


def _by_launches(
    call: ContextCall, carriers: tuple[Tensor, ...], sink: Tensor | None, bias: Tensor | None
) -> Forward:
    """The forward by launches of several parts each."""
    q, k, v = carriers
    together, joins = call.together, call.features.joins
    assert together is not None and bias is None
    used = None if sink is None else call.used_tokens(q.device)
    rows = (sink, used, together.covered)
    running = RunningRows.before(q, v, call.sums, joins, *rows)
    for visit in call.messages.visits(k, v):
        ((k, v),) = visit.held
        for launch in visit.launches:
            read = call.numbers(Attended(q, k, v, None))
            if joins:
                running.attend(call.features, launch, read)
            else:
                running.add(call.features, launch, read, call.stored)
    return running.sums, running.lse, running.rounded


@dataclass(eq=False)
class Gradients:
    """Sums of a rank's gradients: dQ, dK with dV, and of the bias where it has one. Those of
    queries and of keys are None until there are any, and a first part of all is taken as it is.
    row_sums: what kernels keep of a sequence's dQ from part to part."""

    call: ContextCall
    of_bias: Tensor | None
    of_queries: Tensor | None = None
    of_keys: Pair | None = None
    row_sums: dict[int, RowSums] = field(default_factory=dict)

    @classmethod
    def zero(cls, call: ContextCall, bias: Tensor | None) -> Gradients:
        """None yet."""
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=call.sums)
        return cls(call, of_bias)

    def keys(self, k: Tensor, v: Tensor) -> Pair:
        """The sums of dK and dV."""
        if self.of_keys is None:
            dk, dv = (torch.zeros_like(x, dtype=self.call.sums) for x in (k, v))
            self.of_keys = dk, dv
        return self.of_keys

    def add_queries(self, q: Tensor, rows: Rows, span: Span, dq: Tensor) -> None:
        """Add a part's gradient of these rows of q."""
        if self.of_queries is None:
            if dq.shape == q.shape:
                self.of_queries = dq.to(self.call.sums)
                return
            self.of_queries = torch.zeros_like(q, dtype=self.call.sums)
        rows.of(self.of_queries, span).add_(dq)

    def of_all(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, merged: Merged) -> None:
        """Add the gradients of all keys that come by, and those that other ranks make of k and
        v."""
        messages = self.call.messages
        if isinstance(messages, Around) and messages.returning is not None:
            self._of_rounds(messages, messages.returning, (q, k, v), merged)
        else:
            self._of_visits(q, k, v, bias, merged)
        whole = self.of_queries is None and len(self.call.sequences) == 1
        for place, sums in self.row_sums.items():
            if (dq := sums.end(rounds=whole)) is None:
                continue
            if whole:
                self.of_queries = dq
                return
            rows = self.call.sequences[place].queries
            self.add_queries(q, rows, Span(0, dq.shape[1]), dq)

    def _of_rounds(
        self, around: Around, rounds: Rounds, operands: tuple[Tensor, ...], merged: Merged
    ) -> None:
        """Add the gradients of keys of several steps at a time."""
        q, k, v = operands

        def made_of(visit: Visit) -> Pair:
            (pair,) = self.of_visit(visit, q, None, merged)
            return pair

        stored = self.call.stored
        dtypes = self.call.sums, self.call.travels, k.dtype if stored is None else stored.wide
        self.of_keys = sums_of_rounds(around, rounds, (k, v), made_of, dtypes)

    def _of_visits(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, merged: Merged
    ) -> None:
        """Add the gradients of one visit's keys after another's."""
        messages, pending = self.call.messages, None
        for number, visit in enumerate(messages.visits(k, v)):
            made = list(self.of_visit(visit, q, bias, merged))
            if pending is not None:
                pending(self.keys(k, v))
                pending = None
            if number == 0 and messages.keeps_own and self._takes(made, k):
                continue
            pending = messages.returns(number, made, self.call.travels)
        if pending is not None:
            pending(self.keys(k, v))

    def _takes(self, made: Sequence[Pair], k: Tensor) -> bool:
        """Take the gradients of the rank's own keys as they are, if they are of all; whether it
        does."""
        if len(made) == 1:
            ((dk, dv),) = made
            if dk.shape == k.shape:
                self.of_keys = dk, dv
        return self.of_keys is not None

    def of_visit(
        self, visit: Visit, q: Tensor, bias: Tensor | None, merged: Merged
    ) -> Iterator[Pair]:
        """Gradients of the keys at hand, for each sequence of the plan; all others are added."""
        if self.call.together is not None:
            yield self._of_launches(visit, q, merged)
            return
        learns = self.of_bias is not None
        found: list[Pair | None] = [None] * len(visit.held)
        for part in visit.parts:
            rows = self.call.sequences[part.sequence]
            read = self.call.widened(self.call.read(part, visit, q, bias, learns))
            known = found[part.sequence]
            summed = self._in_row_sums(known, part, visit, read, q, merged)
            if summed is not None:
                found[part.sequence] = summed
                continue
            own = merged.of_rows(rows.queries, part.queries)
            made = backward_part(self.call.features, part, rows, read, own)
            self.add_queries(q, rows.queries, part.queries, made["dq"])
            own_keys = made["dk"], made["dv"]
            found[part.sequence] = self._added(known, own_keys, part, visit)
            if self.of_bias is not None:
                cut(self.of_bias, part, rows).add_(made["dbias"])
        for place, pair in enumerate(found):
            yield self._zero(visit, place) if pair is None else pair

    def _of_launches(self, visit: Visit, q: Tensor, merged: Merged) -> Pair:
        """Gradients of the keys at hand by launches; those of queries are added."""
        ((k, v),), call, rows = visit.held, self.call, Rows(slice(None), slice(None))
        found: Pair | None = None
        for launch in visit.gradients:
            read = call.widened(Attended(q, k, v, None))
            made = gradients_of(call.features, launch, read, merged)
            self.add_queries(q, rows, Span(0, q.shape[1]), made["dq"])
            own = made["dk"].to(call.sums), made["dv"].to(call.sums)
            for total, x in zip(found or (), own, strict=found is not None):
                total.add_(x)
            found = found or own
        return found or self._zero(visit, 0)

    def _in_row_sums(
        self,
        totals: Pair | None,
        part: Part,
        visit: Visit,
        read: Attended,
        q: Tensor,
        merged: Merged,
    ) -> Pair | None:
        """Gradients of a sequence's keys with a part's among them, by kernels that keep sums of dQ
        from part to part; None where they do not. The first part's are written to their place."""
        features = self.call.features
        if not features.joins or features.deterministic or read.bias is not None:
            return None
        if torch.compiler.is_compiling():  # of what nobody may look on at
            return None
        rows = self.call.sequences[part.sequence]
        if part.sequence not in self.row_sums:
            whole = rows.queries.all_of(q)
            of_all = merged.of_rows(rows.queries, Span(0, whole.shape[1]))
            self.row_sums[part.sequence] = RowSums(
                whole, of_all.out, of_all.lse, of_all.d_out, of_all.dlse
            )
        given = operation_arguments(features, part, rows)
        sums, (begin, end) = self.row_sums[part.sequence], relative(part, visit.spans)
        if totals is not None:
            made = new_pair(read.k, read.v, self.call.sums)
            fits = sums.add(part.queries.begin, read.q, (read.k, read.v), made, given)
            return self._added(totals, made, part, visit) if fits else None
        totals = visit.into or new_pair(*visit.held[part.sequence], self.call.sums)
        dk, dv = totals
        made = dk[:, begin:end], dv[:, begin:end]
        if not sums.add(part.queries.begin, read.q, (read.k, read.v), made, given):
            return None
        for total in totals:
            total[:, :begin].zero_()
            total[:, end:].zero_()
        return totals

    def _zero(self, visit: Visit, place: int) -> Pair:
        """No gradients of a sequence's keys that are at hand."""
        k, v = visit.held[place]
        sums = self.call.sums
        return k.new_zeros(k.shape, dtype=sums), v.new_zeros(v.shape, dtype=sums)

    def _added(self, totals: Pair | None, made: Pair, part: Part, visit: Visit) -> Pair:
        """Gradients of a sequence's keys with a part's among them: these alone where they are the
        first, and of all keys that are at hand."""
        dk, dv = (x.to(self.call.sums) for x in made)
        k, _ = visit.held[part.sequence]
        if totals is None:
            if dk.shape == k.shape:
                return dk, dv
            totals = self._zero(visit, part.sequence)
        begin, end = relative(part, visit.spans)
        for total, x in zip(totals, (dk, dv), strict=True):
            total[:, begin:end].add_(x)
        return totals

"""Messages of attention over a group: keys and values to whom they are needed, gradients back.

Every rank knows what every other needs, since a plan is arithmetic: nobody asks. A message is on
its way while the step before it computes; NCCL gives it a stream of its own. Gradients are added
up where keys are held, in the order of steps, so that the same call has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ....call.context.launches import Launch
from ....call.context.rounds import Region, Rounds
from ....call.context.steps import Part, Span, Step
from ....call.context.visits import spans_of
from .parts import Sequences

Group = Any  # a ProcessGroup; torch has no type of it where it is built without distributed
Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients, [b, t, h, d]
Finish = Callable[[Pair], None]  # adds to dK and dV what has come
Parcel = tuple[Tensor | None, int]  # what goes to a rank, or comes from it


@dataclass(frozen=True, eq=False)
class Visit:
    """Keys and values that are at hand, of each sequence of the plan from the first that is needed,
    and the parts that read them. into: where gradients of an only part's keys may be written.
    launches, gradients: those over packed tokens, whose keys are the only ones held."""

    parts: tuple[Part, ...]
    spans: list[Span]
    held: list[Pair]
    into: Pair | None = None
    launches: tuple[Launch, ...] = ()
    gradients: tuple[Launch, ...] = ()


@dataclass(frozen=True, eq=False)
class Around:
    """Keys that come from one rank at each step, and go from one to all who need them.

    plans: the steps of every rank; sequences: where this one holds them; rounds, returning: of its
    forward and its backward, which go by steps without.
    """

    group: Group
    rank: int
    plans: tuple[tuple[Step, ...], ...]
    sequences: tuple[Sequences, ...]
    rounds: Rounds | None = None
    returning: Rounds | None = None
    keeps_own: ClassVar = True  # gradients of a first visit, of keys that the rank holds

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the rank's forward, in their order."""
        if self.rounds is not None:
            return self.rounds.parts
        return tuple([part for step in self.plans[self.rank] for part in step.parts])

    def visits(self, k: Tensor, v: Tensor) -> Iterator[Visit]:
        """Each step's keys, the rank's own first; the next step's are asked for before one is
        given out."""
        pending = self._fetch(1, k, v)
        for number, step in enumerate(self.plans[self.rank]):
            if number:
                visit = pending()
                pending = self._fetch(number + 1, k, v)
            else:
                visit = self._own(step, k, v)
            yield visit

    def returns(self, number: int, made: Sequence[Pair], dtype: torch.dtype) -> Finish:
        """Send gradients of a step's keys to the rank that holds them, and begin to receive those
        of this rank's; the result adds these to dK and dV.

        made: for each sequence of the plan, of the keys that were at hand.
        """
        if number == 0:
            spans = self.spans(self.rank, 0)
            return lambda sums: self._add(sums, spans, made)
        reader, source = self.around(number)
        spans = self.spans(reader, number)
        sent = message_of(made).to(dtype) if tokens_of(self.spans(self.rank, number)) else None
        room = self._room(spans, sums_like=made, dtype=dtype)
        requests = self.swap([(sent, source)], [(room, reader)])

        def finish(sums: Pair) -> None:
            for request in requests:
                request.wait()
            if room is not None:
                self._add(sums, spans, self._pairs(room, spans, made))
            del sent_kept[:]

        sent_kept = [sent]  # until it has left
        return finish

    def ask(self, steps: Sequence[int], own: Pair, rooms: Mapping[int, Pair]) -> list[Any]:
        """Begin to bring keys and values of these steps to where rooms have them, and to send the
        rank's own to whom they are needed: those of its one sequence, all [t, b, h, d]."""
        sent, received = list[Parcel](), list[Parcel]()
        for number in steps:
            reader, source = self.around(number)
            (wanted,) = self.spans(reader, number)
            sent += [(x[slice(*wanted)], reader) for x in own if len(wanted)]
            received += [(x, source) for x in rooms.get(number, ())]
        return self.swap(sent, received)

    def give(
        self, steps: Sequence[int], made: Mapping[int, Pair], like: Pair, dtype: torch.dtype
    ) -> tuple[list[Any], list[tuple[Span, Pair]]]:
        """Begin to send gradients of these steps' keys to the ranks that hold them, and to receive
        those of this rank's: of which keys, and where they will be. All are [t, b, h, d]."""
        sent, received, found = list[Parcel](), list[Parcel](), []
        for number in steps:
            reader, source = self.around(number)
            sent += [(x.to(dtype), source) for x in made.get(number, ())]
            (span,) = self.spans(reader, number)
            if len(span):
                dk, dv = (x.new_empty(len(span), *x.shape[1:], dtype=dtype) for x in like)
                received += [(dk, reader), (dv, reader)]
                found.append((span, (dk, dv)))
        return self.swap(sent, received), found

    def room(self, region: Region, k: Tensor, v: Tensor) -> Pair:
        """Memory for keys and values of a region, [t, b, h, d]; k, v: the rank's own."""
        of_k, of_v = (x.new_empty(region.tokens, x.shape[0], *x.shape[2:]) for x in (k, v))
        return of_k, of_v

    def around(self, number: int) -> tuple[int, int]:
        """The ranks that read this one's keys at a step, and whose keys it reads."""
        ranks = len(self.plans)
        return (self.rank + number) % ranks, (self.rank - number) % ranks

    def spans(self, rank: int, number: int) -> list[Span]:
        """The keys that a rank reads at a step."""
        return spans_of(self.plans[rank][number].parts, len(self.sequences))

    def _own(self, step: Step, k: Tensor, v: Tensor) -> Visit:
        spans = spans_of(step.parts, len(self.sequences))
        return Visit(step.parts, spans, self._cut(k, v, spans))

    def _cut(self, k: Tensor, v: Tensor, spans: Sequence[Span]) -> list[Pair]:
        """Cut these spans out of the rank's own keys and values."""
        pairs = zip(self.sequences, spans, strict=True)
        return [(each.keys.of(k, span), each.keys.of(v, span)) for each, span in pairs]

    def _fetch(self, number: int, k: Tensor, v: Tensor) -> Callable[[], Visit]:
        """Begin to bring what a step needs; the result waits for it."""
        if number >= len(self.plans):
            own_step, *_ = self.plans[self.rank]
            return lambda: self._own(own_step, k, v)
        reader, source = self.around(number)
        step, wanted = self.plans[self.rank][number], self.spans(reader, number)
        spans, own = self.spans(self.rank, number), self._cut(k, v, wanted)
        sent = message_of(own) if tokens_of(wanted) else None
        like = self._cut(k, v, [Span(0, 0)] * len(wanted))
        room = self._room(spans, sums_like=like, dtype=k.dtype)
        requests = self.swap([(sent, reader)], [(room, source)])
        kept = [sent]

        def finish() -> Visit:
            for request in requests:
                request.wait()
            del kept[:]
            held = like if room is None else self._pairs(room, spans, like)
            return Visit(step.parts, spans, held)

        return finish

    def swap(self, sent: Sequence[Parcel], received: Sequence[Parcel]) -> list[Any]:
        """Begin to send and to receive what there is, with ranks of the group."""
        ops = [
            dist.P2POp(op, x, dist.get_global_rank(self.group, peer), self.group)
            for op, parcels in ((dist.isend, sent), (dist.irecv, received))
            for x, peer in parcels
            if x is not None
        ]
        return dist.batch_isend_irecv(ops) if ops else []

    @staticmethod
    def _room(
        spans: Sequence[Span], sums_like: Sequence[Pair], dtype: torch.dtype
    ) -> Tensor | None:
        """Memory for the keys and values of these spans, None where there are none."""
        count = sum(
            len(span) * x.shape[0] * x.shape[2] * x.shape[3]
            for span, pair in zip(spans, sums_like, strict=True)
            for x in pair
        )
        (x, _), *_ = sums_like
        return x.new_empty(count, dtype=dtype) if count else None

    @staticmethod
    def _pairs(flat: Tensor, spans: Sequence[Span], like: Sequence[Pair]) -> list[Pair]:
        """Keys and values of each sequence out of a message."""
        found, begin = [], 0
        for span, pair in zip(spans, like, strict=True):
            both = []
            for x in pair:
                batch, _, heads, dim = x.shape
                shape = (batch, len(span), heads, dim)
                end = begin + batch * len(span) * heads * dim
                both.append(flat[begin:end].view(shape))
                begin = end
            first, second = both
            found.append((first, second))
        return found

    def _add(self, sums: Pair, spans: Sequence[Span], made: Sequence[Pair]) -> None:
        """Add gradients of these keys to dK and dV."""
        for each, span, pair in zip(self.sequences, spans, made, strict=True):
            for total, x in zip(sums, pair, strict=True):
                each.keys.of(total, span).add_(x)


@dataclass(frozen=True, eq=False)
class Gathered:
    """Keys of all ranks at once, in the order of their sequences.

    index: where each token of the whole lies among those of all ranks, one behind the other;
    parts: of this rank, over the whole; sequences: where it holds queries, and the whole its keys.
    """

    group: Group
    ranks: int
    index: Tensor
    parts: tuple[Part, ...]
    sequences: tuple[Sequences, ...]
    keeps_own: ClassVar = False

    def visits(self, k: Tensor, v: Tensor) -> Iterator[Visit]:
        """All keys, in one step."""
        whole = tuple(self._whole(x) for x in (k, v))
        spans = spans_of(self.parts, len(self.sequences))
        held = [
            tuple(each.keys.of(x, span) for x in whole)
            for each, span in zip(self.sequences, spans, strict=True)
        ]
        yield Visit(self.parts, spans, held)  # type: ignore[arg-type]  # pairs

    def returns(self, number: int, made: Sequence[Pair], dtype: torch.dtype) -> Finish:
        """Exchange gradients as `Around` does: each rank adds up those of its own keys of all."""
        spans = spans_of(self.parts, len(self.sequences))

        def finish(sums: Pair) -> None:
            for place, total in enumerate(sums):
                batch, tokens, heads, dim = total.shape
                shape = (batch, tokens * self.ranks, heads, dim)
                parts = [pair[place] for pair in made]
                if [x.shape for x in parts] == [shape]:
                    (whole,) = (x.to(dtype) for x in parts)
                else:
                    whole = total.new_zeros(shape, dtype=dtype)
                    for each, span, x in zip(self.sequences, spans, parts, strict=True):
                        each.keys.of(whole, span).copy_(x)
                places = torch.empty_like(self.index)
                places[self.index] = torch.arange(len(self.index), device=places.device)
                by_rank = whole.index_select(1, places).unflatten(1, (self.ranks, tokens))
                sent = by_rank.movedim(1, 0).contiguous()
                found = torch.empty_like(sent)
                dist.all_to_all_single(found, sent, group=self.group)
                for x in found:
                    total.add_(x)

        return finish

    def _whole(self, x: Tensor) -> Tensor:
        own = x.contiguous()
        found = own.new_empty(self.ranks, *own.shape)
        gather_into(found, own, self.group)
        return found.movedim(0, 1).flatten(1, 2).index_select(1, self.index)


def gather_into(found: Tensor, own: Tensor, group: Group) -> None:
    """Fill [ranks, …] with each rank's tensor."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(found.flatten(0, 1), own, group=group)


def new_pair(k: Tensor, v: Tensor, dtype: torch.dtype) -> Pair:
    """New tensors of the shapes of keys and values, one behind the other, as a message has them."""
    whole = k.new_empty(k.numel() + v.numel(), dtype=dtype)
    return whole[: k.numel()].view(k.shape), whole[k.numel() :].view(v.shape)


def message_of(pairs: Sequence[Pair]) -> Tensor:
    """Keys and values of all sequences as one message: where they lie, if they are a `new_pair`."""
    if len(pairs) == 1:
        ((one, other),) = pairs
        if one._base is not None and one._base is other._base:
            size = one.numel() + other.numel()
            if one._base.shape == (size,) and one.storage_offset() == 0:
                return one._base
    return torch.cat([x.reshape(-1) for pair in pairs for x in pair])


def tokens_of(spans: Sequence[Span]) -> int:
    return sum(map(len, spans))

"""Calls over a group as they are given: what they may say, how sequences lie, who does what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ....call import backend as backends
from ....call.context import checks as context_checks
from ....call.context.checks import AXES, Over
from ....call.context.launches import Form
from ....call.context.order import Order
from ....call.context.packed import Together
from ....call.context.steps import Band, Length, Span, is_aligned
from ....call.context.visits import Bands
from ....errors import SpecError
from ....reference.core import default_alibi_slopes
from ....spec.masks import band_of
from ..routing import leave_kernels
from .function import ContextCall
from .messages import Around, Gathered
from .padding import Padding
from .parts import Features, Rows, Sequences, Stored
from .plans import (
    both_rounds_of,
    index_of,
    launches_around,
    launches_over_all,
    parts_of,
    queries_going_on,
    steps_around,
)
from .service import NO_KERNELS, service_of
from .together import AroundTogether, GatheredTogether

LENGTHS = tuple(
    name + side + end
    for side in ("q", "kv")
    for name, end in (("cu_seqlens_", ""), ("cu_seqlens_", "_padded"), ("seqused_", ""))
)
BANDS = Bands._fields
NUMBERS = ("softmax_scale", "softcap", "dropout_p", "bias_type")
SERVED = (
    *(*BANDS, *NUMBERS, *LENGTHS, "layout", "attn_mask", "bias", "alibi_slopes", "softmax", "sink"),
    *("rng_state", "deterministic", "backend", "return_lse", "return_rng_state"),
)
_GROUP = Over("a group", "rank", SERVED)
WIDE = (torch.float32, torch.float64)


class Ranks(NamedTuple):
    """A group, how many ranks it has, and which this one is."""

    group: Any
    size: int
    rank: int

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Find the ranks of a process group or a mesh of one axis; all ranks for None.

        Raises: SpecError where torch.distributed has not begun.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise SpecError("torch.distributed has no process group: call init_process_group first")
        found: Any = dist.group.WORLD if group is None else group
        found = found if isinstance(found, dist.ProcessGroup) else found.get_group()
        return cls(found, dist.get_world_size(found), dist.get_rank(found))


@dataclass(frozen=True, eq=False)
class Asked:
    """A call over a group: q, k and v as [b, t, h, d], one batch of packed tokens, the lengths of
    sequences, and whatever else it says. uniform: whether the batch is of equal sequences, which
    have one length here."""

    q: Tensor
    k: Tensor
    v: Tensor
    given: Mapping[str, Any]
    packed: bool
    uniform: bool
    lengths: tuple[Length, ...]

    @property
    def reads_pairs(self) -> bool:
        """Whether the call has a number for each pair, by which it knows its sequences."""
        return any(self.given.get(name) is not None for name in ("bias", "attn_mask"))

    @property
    def alike(self) -> Length | None:
        """The length of all sequences of a batch for plans, if these may take them as equal: what
        each has in use is cut then in every part. None where plans know their lengths, as where a
        diagonal depends on them."""
        first, *_ = self.lengths
        if self.uniform:
            return first
        if self.packed or not self.reads_pairs or torch.compiler.is_compiling():
            return None
        room_q, room_kv, *_ = first
        bands = self.bands
        if is_aligned(bands.mask, bands.bottom_right):
            if any(x.kv - x.q != room_kv - room_q for x in self.lengths):
                return None
        return Length(room_q, room_kv, room_q, room_kv)

    @property
    def planned(self) -> tuple[Length, ...]:
        """The lengths of plans."""
        alike = self.alike
        return self.lengths if alike is None else (alike,)

    @property
    def rooms(self) -> tuple[list[int], list[int]]:
        """Positions that there is room for along the axis of tokens, of queries and of keys: of
        each packed sequence, or of all sequences of a batch alike."""
        lengths = self.lengths if self.packed else self.lengths[:1]
        return [x.room_q for x in lengths], [x.room_kv for x in lengths]

    @property
    def bands(self) -> Bands:
        """The arguments of plans."""
        found = {name: x for name in BANDS if (x := self.given.get(name)) is not None}
        left, right = found.pop("window", (-1, -1))
        return Bands(**found, window=(left, right))

    @property
    def dropout_p(self) -> float:
        return float(self.given.get("dropout_p") or 0.0)

    @property
    def has_alibi(self) -> bool:
        """Whether scores have ALiBi's term."""
        slopes = self.given.get("alibi_slopes")
        asked = slopes is not None and slopes is not False
        return asked or self.given.get("bias_type") == "alibi"

    @property
    def by_position(self) -> bool:
        """Whether parts need to know where they stand."""
        return self.has_alibi or self.dropout_p > 0 or self.reads_pairs


def asked_of(q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any], ranks: int) -> Asked:
    """The call that is given. ranks: how many hold its sequences.

    Raises: SpecError with every argument that calls over a group do not take.
    """
    given = {name: x for name, x in given.items() if x is not None}
    if reasons := [*_violations(q, k, v, given)]:
        raise SpecError(reasons)
    layout = given.get("layout", "bshd")
    if layout == "thd":
        tokens = q.shape[0] * ranks, k.shape[0] * ranks
        lengths = context_checks.packed_lengths(given, tokens, _host, "ranks")
        return Asked(q[None], k[None], v[None], given, True, False, lengths)
    q, k, v = (x.permute(AXES[layout]) for x in (q, k, v))
    room_q, room_kv = q.shape[1] * ranks, k.shape[1] * ranks
    used = [given.get(f"seqused_{side}") for side in ("q", "kv")]
    whole = Length(room_q, room_kv, room_q, room_kv)
    if used == [None, None]:
        return Asked(q, k, v, given, False, True, (whole,))
    of_q, of_kv = (
        [room] * q.shape[0] if x is None else _host(x)
        for x, room in zip(used, (room_q, room_kv), strict=True)
    )
    lengths = tuple(whole._replace(q=a, kv=b) for a, b in zip(of_q, of_kv, strict=True))
    return Asked(q, k, v, given, False, False, lengths)


def packed_of(asked: Asked) -> Asked | None:
    """The call of padded sequences as one of packed ones, whose parts are put together; None where
    it has no lengths, or reads a bias or a mask."""
    if asked.packed or asked.uniform or asked.reads_pairs or torch.compiler.is_compiling():
        return None
    q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (asked.q, asked.k, asked.v))
    return replace(asked, q=q, k=k, v=v, packed=True)


def _violations(q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any]) -> Iterator[str]:
    """Arguments that calls over a group do not take."""
    yield from context_checks.violations((q, k, v), given, _GROUP)
    layout = given.get("layout", "bshd")
    of_format = "seqused" if layout == "thd" else "cu_seqlens"
    for name in sorted(name for name in given if name.startswith(of_format)):
        yield f"{name} beside layout={layout!r} is not served over a group; pass the other lengths"
    slopes = given.get("alibi_slopes")
    if isinstance(slopes, Tensor) and slopes.requires_grad:
        yield "alibi_slopes has no gradient over a group: detach it"


def _host(x: Tensor | Sequence[int]) -> list[int]:
    """Numbers of a tensor, which a plan is made of: those of a GPU are waited for."""
    return [int(n) for n in (x.tolist() if isinstance(x, Tensor) else x)]


def sequences_of(asked: Asked, share_q: int, share_kv: int) -> tuple[Sequences, ...]:
    """Where tensors hold the sequences of a plan, of which they have one part in so many."""
    if asked.alike is not None:
        all_ = Rows(slice(None), slice(None))
        return (Sequences(all_, all_, 0),)
    count = len(asked.lengths)
    if not asked.packed:
        rows = [Rows(slice(b, b + 1), slice(None)) for b in range(count)]
        return tuple(Sequences(x, x, b) for b, x in enumerate(rows))
    starts = [
        [*accumulate((n // share for n in rooms), initial=0)]
        for rooms, share in zip(asked.rooms, (share_q, share_kv), strict=True)
    ]
    of_q, of_kv = ([Rows(slice(None), slice(a, b)) for a, b in pairwise(x)] for x in starts)
    return tuple(Sequences(q, kv, b) for b, (q, kv) in enumerate(zip(of_q, of_kv, strict=True)))


def context_call(
    asked: Asked,
    order: Order,
    ranks: Ranks,
    gathers: bool,
    features: Features,
    reduce_dtype: torch.dtype,
) -> ContextCall:
    """The call as this rank computes it, by gathered keys or by those that come one rank's after
    another's. Raises: SpecError where the order has no steps for it."""
    lengths, form = asked.lengths, _form_of(asked, features)
    sequences = sequences_of(asked, ranks.size, 1 if gathers else ranks.size)
    messages_of = _gathered if gathers else _around
    messages, together = messages_of(asked, order, ranks, sequences, features, form)
    spans = (Span(0, order.used(ranks.rank, x.room_q, x.q)) for x in lengths)
    rows: Iterable[Rows] = (each.queries for each in sequences)
    if len(lengths) > len(sequences):
        rows = (Rows(slice(b, b + 1), slice(None)) for b in range(len(lengths)))
    used = tuple(zip(rows, spans, strict=True))
    sums = asked.q.dtype if asked.q.dtype in WIDE else torch.float32
    travels = sums if asked.q.dtype in WIDE else reduce_dtype
    return ContextCall(messages, sequences, used, features, sums, travels, together=together)


def _gathered(
    asked: Asked,
    order: Order,
    ranks: Ranks,
    sequences: tuple[Sequences, ...],
    features: Features,
    form: Form | None,
) -> tuple[Gathered, Together | None]:
    """The messages of gathered keys, and the launches that read them, None for parts alone."""
    parts = parts_of(order, ranks.rank, asked.planned, asked.bands)
    _, rooms = asked.rooms
    index = index_of(order, tuple(rooms), asked.q.device)
    whole = (ranks.group, ranks.size, index, parts, sequences)
    if form is None or not asked.packed:
        return Gathered(*whole), None
    together = launches_over_all(order, ranks.rank, asked.lengths, asked.bands, form)
    return GatheredTogether(*whole, together=together), together


def _around(
    asked: Asked,
    order: Order,
    ranks: Ranks,
    sequences: tuple[Sequences, ...],
    features: Features,
    form: Form | None,
) -> tuple[Around, Together | None]:
    """The messages of keys that come from one rank after another, and the launches that read them,
    None for parts alone. Raises: SpecError where parts compare stripes."""
    lengths, bands = asked.planned, asked.bands
    plans = steps_around(order, lengths, bands, asked.by_position)
    whole = (ranks.group, ranks.rank, plans, sequences)
    if form is not None and asked.packed:
        together, sent = launches_around(order, ranks.rank, lengths, bands, form)
        return AroundTogether(*whole, together=together, sent=sent), together
    if asked.by_position or torch.compiler.is_compiling():
        return Around(*whole), None
    going = queries_going_on(asked.q.shape, asked.k.shape[2], features.kernels)
    return Around(*whole, *both_rounds_of(order, lengths, bands, ranks.rank, going)), None


def _form_of(asked: Asked, features: Features) -> Form | None:
    """How parts of a call are put together; None where each is a call of its own, since it reads a
    bias or a mask, or its kernels know one diagonal for all. Plans have identities, of which a
    trace knows nothing."""
    placed = features.joins or not features.kernels
    if asked.reads_pairs or torch.compiler.is_compiling() or (asked.by_position and not placed):
        return None
    bands = asked.bands
    band = Band(*band_of(bands.mask, bands.window))
    return Form(band, asked.by_position, placed, apart=not features.kernels)


def features_of(
    asked: Asked,
    rng_state: Tensor | None,
    first_head: int,
    heads: int,
    stored: Stored | None = None,
) -> Features:
    """Whatever the call asks of scores and weights, of so many heads of all from the first on.
    stored: its operands in 8 bits.

    Raises: SpecError where kernels are asked for that there are none of.
    """
    given, narrow = asked.given, asked.q.dtype not in WIDE
    backend = backends.asked(given.get("backend", backends.AUTO))
    if backend == "cuda" and not narrow:
        raise SpecError(f"backend='cuda': kernels take 16 bits; q is {asked.q.dtype}")
    backends.check_backend(backend)
    service = NO_KERNELS
    if backend != "reference" and narrow:
        service = service_of(_any_part(asked), stored, learns=torch.is_grad_enabled())
        if service.reasons:
            leave_kernels(SpecError([*service.reasons]), backend)
    numbers = {name: given[name] for name in NUMBERS if name in given}
    if asked.has_alibi and numbers.get("bias_type") == "alibi":
        del numbers["bias_type"]
    if not asked.dropout_p > 0:
        numbers.pop("dropout_p", None)
    deterministic = given.get("deterministic")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return Features(
        numbers=numbers,
        slopes=slopes_of(asked, first_head, heads),
        attn_mask=_four_axes(given.get("attn_mask")),
        rng_state=rng_state,
        first_head=first_head,
        deterministic=bool(deterministic),
        kernels=service.serves,
        joins=service.joins,
        by_position=asked.by_position,
        padding=_padding_of(asked),
    )


def _padding_of(asked: Asked) -> Padding | None:
    """The lengths in use that parts of a batch cut, None where the plan has cut them."""
    if asked.uniform or asked.alike is None:
        return None
    of_q, of_kv = tuple([x.q for x in asked.lengths]), tuple([x.kv for x in asked.lengths])
    return Padding(of_q, of_kv, asked.q.device)


def _any_part(asked: Asked) -> dict[str, Any]:
    """Arguments of a part of a call, by what all parts have in common."""
    names = (*NUMBERS, "bias", "attn_mask", "alibi_slopes")
    given = {name: asked.given[name] for name in names if name in asked.given}
    if asked.by_position:
        given["positions"] = (0, 0)
    q, k, v = asked.q, asked.k, asked.v
    if (padding := _padding_of(asked)) is not None:
        given |= padding.of_all
    if asked.packed:
        q, k, v = (x.squeeze(0) for x in (q, k, v))
        ends = torch.zeros(2, dtype=torch.int32, device=q.device)
        given |= {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    return {"q": q, "k": k, "v": v, **given}


def slopes_of(asked: Asked, first: int, heads: int) -> Tensor | None:
    """ALiBi's slopes of so many heads from the first on, None without."""
    if not asked.has_alibi:
        return None
    slopes = asked.given.get("alibi_slopes")
    if not isinstance(slopes, Tensor):
        slopes = default_alibi_slopes(heads, asked.q.device)
    return slopes[..., first : first + asked.q.shape[2]]


def _four_axes(x: Tensor | None) -> Tensor | None:
    return None if x is None else x[(None,) * (4 - x.ndim)]


def bias_of(asked: Asked) -> Tensor | None:
    """The bias of the rank's queries and all keys, with four axes, in q's dtype."""
    found = _four_axes(asked.given.get("bias"))
    return None if found is None else found.to(asked.q.dtype)


def sink_of(asked: Asked, first: int) -> Tensor | None:
    """The score of each head that no key has, [h], in the dtype of sums; None without."""
    softmax, heads = asked.given.get("softmax", "vanilla"), asked.q.shape[2]
    dtype = asked.q.dtype if asked.q.dtype in WIDE else torch.float32
    if softmax == "off_by_one":
        return asked.q.new_zeros(heads, dtype=dtype)
    if softmax != "learnable":
        return None
    sink: Tensor = asked.given["sink"]
    return sink[first : first + heads].to(dtype)

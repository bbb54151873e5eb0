"""Ranks of context parallelism, simulated in one process by the reference in float64: parts of the
plan, merged, are one call over the whole, forward and backward."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen import reference
from attngen.call.context.order import Order
from attngen.call.context.steps import Length, Part, Span, steps_of
from attngen.frontends.pytorch.context.launches import sink_gradient_of_rows
from attngen.frontends.pytorch.context.parts import Merged, Rows, sink_gradient
from attngen.reference.masks import visible

HEADS, HEADS_KV, DIM = 4, 2, 8
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.3], dtype=torch.float64)
Arguments = dict[str, Any]


def randn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def attend(operands: list[Tensor], part: Part, features: Arguments) -> tuple[Tensor, Tensor]:
    """Output and LSE of a part, with all rows of q, of which others see nothing. operands: q of a
    rank, k and v of the source, one sequence [t, h, d]."""
    q, k, v = operands
    spans = (part.queries, part.keys, part.keys)
    more: Arguments = {"softcap": features.get("softcap", 0.0)}
    if "alibi_slopes" in features:  # by positions, of which a call knows but its own
        assert part.origin is not None
        i = part.origin.query + torch.arange(len(part.queries))[:, None]
        j = part.origin.key + torch.arange(len(part.keys))
        more["bias"] = -SLOPES[:, None, None] * (i - j).abs()
    cut = (x[slice(*span)][None] for x, span in zip((q, k, v), spans, strict=True))
    out, aux = reference.attention(*cut, window=part.window, **more)
    around = part.queries.begin, len(q) - part.queries.end
    pad = torch.nn.functional.pad
    return pad(out, (0, 0, 0, 0, *around)), pad(aux.lse, around, value=-torch.inf)


def merge(parts: list[tuple[Tensor, Tensor]], used: int, sink: Tensor | None) -> list[Tensor]:
    """Output [t, h, d] and LSE [h, t] of all parts of a rank's sequence, with the sink, once."""
    out, lse = (x[0] for x in attngen.merge_states(*zip(*parts, strict=True)))
    if sink is None:
        return [out, lse]
    whole = torch.where(torch.arange(len(out)) < used, torch.logaddexp(lse, sink[:, None]), lse)
    shares = torch.where(lse == -torch.inf, 0.0, (lse - whole.clamp(min=-1e9)).exp())
    return [out * shares.T[..., None], whole]


def by_ranks(
    order: Order, lengths: list[Length], arguments: Arguments, features: Arguments, *qkv: Tensor
) -> list[Tensor]:
    """Output [t, h, d] and LSE [h, t] of packed sequences that ranks hold."""
    rooms = [x.room_q for x in lengths], [x.room_kv for x in lengths]
    held = [
        [
            x[order.shard(rank, rooms[side])].split([each // order.ranks for each in rooms[side]])
            for x, side in zip(qkv, (0, 1, 1), strict=True)
        ]
        for rank in range(order.ranks)
    ]
    found = []
    for rank, (queries, _, _) in enumerate(held):
        by_position = "alibi_slopes" in features
        steps = steps_of(order, rank, lengths, by_position=by_position, **arguments)
        for b, (q, length) in enumerate(zip(queries, lengths, strict=True)):
            parts = [(torch.zeros_like(q)[None], q.new_full((1, HEADS, len(q)), -torch.inf))]
            for step in steps:
                _, k, v = (each[b] for each in held[step.source])
                mine = (part for part in step.parts if part.sequence == b)
                parts += [attend([q, k, v], part, features) for part in mine]
            used = order.used(rank, length.room_q, length.q)
            found.append(merge(parts, used, features.get("sink")))
    back = order.unshard(rooms[0])
    return [torch.cat([x[i] for x in found], i)[(slice(None),) * i + (back,)] for i in (0, 1)]


def by_one_call(
    lengths: list[Length], arguments: Arguments, features: Arguments, *qkv: Tensor
) -> list[Tensor]:
    """Output and LSE of packed sequences by one call."""
    ends = {
        "cu_seqlens_q": [x.q for x in lengths],
        "cu_seqlens_kv": [x.kv for x in lengths],
        "cu_seqlens_q_padded": [x.room_q for x in lengths],
        "cu_seqlens_kv_padded": [x.room_kv for x in lengths],
    }
    packed = {n: torch.tensor([*accumulate(x, initial=0)]).int() for n, x in ends.items()}
    given = {**arguments, **features, **packed}
    given |= {"softmax": "learnable"} if "sink" in features else {}
    out, aux = reference.attention(*qkv, layout="thd", **given)
    return [out, aux.lse]


CAUSAL, WINDOW = {"mask": "causal"}, {"window": (9, 2)}
ENDS = {"mask": "padding_causal_bottom_right", "window": (11, -1)}
SINK = {"sink": randn(HEADS, seed=8)}
CASES = [
    *((Order("dual_chunk", ranks), CAUSAL, SINK) for ranks in (2, 3, 4, 8)),
    (Order("dual_chunk", 1), CAUSAL, {}),
    (Order("dual_chunk", 3), {}, {"softcap": 2.0}),
    (Order("dual_chunk", 4), WINDOW, {"alibi_slopes": SLOPES}),
    (Order("dual_chunk", 2), ENDS, {**SINK, "softcap": 3.0}),
    (Order("contiguous", 4), CAUSAL, {"alibi_slopes": SLOPES}),
    (Order("contiguous", 8), WINDOW, SINK),
    (Order("contiguous", 3), ENDS, {}),
    (Order("striped", 4), CAUSAL, SINK),
    (Order("striped", 3, 2), {}, {}),
]


NAMES = ["-".join((o.name, str(o.ranks), *map(str, a.values()), *f)) for o, a, f in CASES]


@pytest.mark.parametrize(("order", "arguments", "features"), CASES, ids=NAMES)
def test_ranks_are_one_call(order: Order, arguments: Arguments, features: Arguments) -> None:
    n = order.multiple
    lengths = [Length.of(3 * n), Length(2 * n, 4 * n, 2 * n - 1, 3 * n + 1), Length(n, n, n, n)]
    tokens = sum(x.room_q for x in lengths), sum(x.room_kv for x in lengths)
    q = randn(tokens[0], HEADS, DIM, seed=1).requires_grad_()
    k, v = (randn(tokens[1], HEADS_KV, DIM, seed=x).requires_grad_() for x in (2, 3))
    leaves = [q, k, v]
    if "sink" in features:
        leaves.append(features["sink"].detach().clone().requires_grad_())
        features = {**features, "sink": leaves[-1]}
    found = by_ranks(order, lengths, arguments, features, q, k, v)
    wanted = by_one_call(lengths, arguments, features, q, k, v)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    d_o = randn(*q.shape, seed=5)
    both = (torch.autograd.grad((out * d_o).sum(), leaves) for out, _ in (found, wanted))
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


def part_gradients(
    operands: list[Tensor], part: Part, d_o: Tensor, delta: Tensor, lse: Tensor
) -> list[Tensor]:
    """Gradients of a part's queries, keys and values [t, h, d], of the whole call's LSE and of
    delta = rowsum(dO O), [h, t], as a rank has them once all parts are merged."""
    rows, columns = slice(*part.queries), slice(*part.keys)
    q, k, v = (x.transpose(0, 1) for x in operands)
    q, k, v, d_o = q[:, rows], k[:, columns], v[:, columns], d_o.transpose(0, 1)[:, rows]
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, 0) for x in (k, v))
    seen = visible(len(part.queries), len(part.keys), window=part.window)
    scores = (q @ k.transpose(1, 2) * DIM**-0.5).masked_fill(~seen, -torch.inf)
    weights = (scores - lse[:, rows, None]).exp()
    d_s = weights * (d_o @ v.transpose(1, 2) - delta[:, rows, None]) * DIM**-0.5
    of_keys = d_s.transpose(1, 2) @ q, weights.transpose(1, 2) @ d_o
    summed = (x.unflatten(0, (HEADS_KV, -1)).sum(1) for x in of_keys)
    return [x.transpose(0, 1) for x in (d_s @ k, *summed)]


@pytest.mark.parametrize(
    ("order", "arguments"), [(o, a) for o, a, _ in CASES[2::3]], ids=NAMES[2::3]
)
def test_gradients_of_parts_add_up(order: Order, arguments: Arguments) -> None:
    """Every part's gradients, of the merged output and LSE, are added where its rows are held."""
    room = 3 * order.multiple
    q, k, v, d_o = (
        randn(room, heads, DIM, seed=seed)
        for seed, heads in ((1, HEADS), (2, HEADS_KV), (3, HEADS_KV), (4, HEADS))
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = by_one_call([Length.of(room)], arguments, {}, *leaves)
    wanted = torch.autograd.grad(out, leaves, d_o)
    delta = (d_o * out.detach()).sum(-1).T
    index = [torch.tensor(order.shard(rank, [room])) for rank in range(order.ranks)]
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for rank, mine in enumerate(index):
        for step in steps_of(order, rank, [Length.of(room)], **arguments):
            theirs = index[step.source]
            operands = [q[mine], k[theirs], v[theirs]]
            for part in step.parts:
                of_rows = (d_o[mine], delta[:, mine], lse.detach()[:, mine])
                made = part_gradients(operands, part, *of_rows)
                homes = (
                    mine[slice(*part.queries)],
                    theirs[slice(*part.keys)],
                    theirs[slice(*part.keys)],
                )
                for total, home, x in zip(found, homes, made, strict=True):
                    total.index_add_(0, home, x)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_sink_of_no_weight_has_no_gradient_beside_rows_without_keys() -> None:
    lse = torch.tensor([[[-torch.inf, 0.5], [0.3, 1.0]]], dtype=torch.float64)
    out, d_out = randn(1, 2, 2, DIM, seed=1), randn(1, 2, 2, DIM, seed=2)
    sink = torch.tensor([-torch.inf, 0.3], dtype=torch.float64)
    merged = Merged(out, lse, d_out, torch.ones_like(lse))
    delta = (out * d_out).sum(-1).transpose(1, 2) - 1
    wanted = torch.stack([torch.zeros(()).double(), -((0.3 - lse[0, 1]).exp() * delta[0, 1]).sum()])
    rows = [(Rows(slice(0, 1), slice(0, 2)), Span(0, 2))]
    torch.testing.assert_close(sink_gradient(sink, merged, rows), wanted)
    torch.testing.assert_close(sink_gradient_of_rows(sink, merged, torch.arange(2)), wanted)

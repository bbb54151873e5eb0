"""Times of attention over a group beside an equal share of one GPU's: `bench` of
tools/context_parallel.py.

Causal calls in bf16, batch 1, of models' shapes: each strategy called as it is and as a CUDA graph,
what `auto` takes, and, where FlashAttention-3's operators are found, ring-flash-attention's method
(tools/ring_peer.py); interleaved rounds, medians, the longest rank's time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import attngen
from attngen import parallel
from attngen.bench.peers import Absent, load_fa3_operators
from attngen.bench.timing import following_milliseconds
from tools.graphs import captured
from tools.ring_peer import Ring

MOST_CALLS, LEAST_MS = 20, 30.0  # of a round
MOST_CAPTURED = 32768  # tokens of a call that is captured: longer ones do not wait for the host
ALONE, RING = "one GPU's share", "ring of FlashAttention-3"
COMMS: tuple[parallel.Comm, ...] = ("p2p", "all_gather", "a2a")
AUTO: parallel.Comm = "auto"
Call = Callable[[], Any]


class Shape(NamedTuple):
    """Heads of queries and of keys, and head dims."""

    heads: int
    heads_kv: int
    dim: int
    dim_v: int

    def operands(
        self,
        length: int,
        batch: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
    ) -> list[Tensor]:
        """q, k, v and the output's gradient of the whole, the same on every rank."""
        generator = torch.Generator(device).manual_seed(3)
        sizes = (self.heads, self.dim), (self.heads_kv, self.dim), (self.heads_kv, self.dim_v)
        return [
            torch.randn(batch, length, *size, device=device, generator=generator, dtype=dtype)
            for size in (*sizes, (self.heads, self.dim_v))
        ]


SHAPES = {
    "llama-8b": Shape(32, 8, 128, 128),
    "llama-70b": Shape(64, 8, 128, 128),
    "deepseek": Shape(128, 128, 192, 128),
}


@dataclass(frozen=True)
class Timed:
    """A direction of a call: eager, or a graph of it."""

    name: str
    call: Call


def lengths_of(tokens: int, ranks: int, count: int) -> list[int]:
    """So many lengths of all tokens, of which some are four times as long as others, and all a
    multiple of two chunks a rank."""
    shares, multiple = [place % 4 + 1 for place in range(count)], 2 * ranks
    *lengths, _ = (tokens * x // sum(shares) // multiple * multiple for x in shares)
    return [*lengths, tokens - sum(lengths)]


def timed_calls(
    shape: Shape, length: int, operators: Any, sequences: int
) -> Iterator[tuple[str, list[Timed]]]:
    """The calls of each direction, `forward` and `both`, of packed sequences where they are
    several."""
    *operands, d_out = shape.operands(length)
    given: dict[str, Any] = {"mask": "causal", "backend": "cuda"}
    of_one, ends, axis = {**given}, None, 1
    if sequences > 1:
        *operands, d_out = (x.squeeze(0) for x in (*operands, d_out))
        found = lengths_of(length, dist.get_world_size(), sequences)
        ends, axis = torch.tensor([*accumulate(found, initial=0)], dtype=torch.int32), 0
        given |= {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        of_one = {**given, "cu_seqlens_q": ends.cuda(), "cu_seqlens_kv": ends.cuda()}
    *own, own_d_out = (parallel.shard(x, None, axis, cu_seqlens=ends) for x in (*operands, d_out))
    alone = partial(attngen.attention, **of_one)
    strategies: tuple[parallel.Comm, ...] = (*COMMS, AUTO)
    over = {comm: partial(parallel.attention, comm=comm, **given) for comm in strategies}
    absent = operators is None or sequences > 1
    ring = None if absent else Ring(operators, dist.get_rank(), dist.get_world_size())
    forward: dict[str, Call] = {name: partial(_forward, call, own) for name, call in over.items()}
    forward[ALONE] = partial(_forward, alone, operands)
    both: dict[str, Call] = {
        name: partial(results, call, own, own_d_out) for name, call in over.items()
    }
    both[ALONE] = partial(results, alone, operands, d_out)
    if ring is not None:
        forward[RING] = partial(_forward, ring.forward, own)
        if shape.dim == shape.dim_v:  # FlashAttention-3's backward has one head dim
            both[RING] = partial(_ring_both, ring, own, own_d_out)
    for direction, calls in (("forward", forward), ("both", both)):
        eager = [Timed(name, call) for name, call in calls.items()]
        captures = COMMS if length <= MOST_CAPTURED else ()
        graphs = [Timed(f"{name}, graph", captured(calls[name])) for name in captures]
        yield direction, eager + graphs


def results(attend: Callable[..., Any], operands: list[Tensor], d_out: Tensor) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in operands]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def _forward(call: Callable[..., Any], operands: list[Tensor]) -> Any:
    with torch.no_grad():
        return call(*operands)


def _ring_both(ring: Ring, operands: list[Tensor], d_out: Tensor) -> Any:
    q, k, v = operands
    out, lse = ring.forward(q, k, v)
    return ring.backward(d_out, q, k, v, out, lse)


def milliseconds(call: Call, calls: int) -> float:
    """The mean time of so many calls, the longest of all ranks."""
    dist.barrier()
    torch.cuda.synchronize()
    taken = torch.tensor(following_milliseconds(call, calls), device="cuda")
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def interleaved(calls: list[Timed], rounds: int) -> dict[str, float]:
    """Medians of rounds in which every call is timed."""
    counts = {}
    for name, call in ((x.name, x.call) for x in calls):
        milliseconds(call, 1)
        once = milliseconds(call, 2)
        counts[name] = min(MOST_CALLS, max(1, round(LEAST_MS / once)))
    found: dict[str, list[float]] = {x.name: [] for x in calls}
    for _ in range(rounds):
        for x in calls:
            found[x.name].append(milliseconds(x.call, counts[x.name]))
    return {name: statistics.median(times) for name, times in found.items()}


def bench(shape: str, length: int, operators: Any, rounds: int, sequences: int) -> dict[str, Any]:
    """A row: milliseconds of each call, and the share of ideal of those over the group."""
    ranks = dist.get_world_size()
    row: dict[str, Any] = {"shape": shape, "length": length}
    if sequences > 1:
        row["sequences"] = sequences
    for direction, calls in timed_calls(SHAPES[shape], length, operators, sequences):
        times = interleaved(calls, rounds)
        times[ALONE] /= ranks
        row[f"{direction}, ms"] = {name: round(x, 3) for name, x in times.items()}
        row[f"{direction}, of ideal"] = {
            name: round(times[ALONE] / x, 3) for name, x in times.items() if name != ALONE
        }
    return row


def rows(
    shapes: Sequence[str], lengths: Sequence[int], rounds: int, sequences: int = 1
) -> Iterator[dict[str, Any]]:
    """A row for each length and shape, and what is timed beside."""
    try:
        _, operators = load_fa3_operators()
    except Absent:
        operators = None
    for length in lengths:
        for shape in shapes:
            yield bench(shape, length, operators, rounds, sequences)

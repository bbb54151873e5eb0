"""Cases of context parallelism by every strategy, each held to one call in float64.

A case's largest error is at most twice that of one call of the same kernels, plus 1e-3 of the
largest value. Ranks of nccl run kernels; those of gloo, on CPUs, the reference in float32, whose
parts of gradients are rounded to the operands' dtype where kernels' are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attngen
from attngen import parallel
from attngen.call.context.order import OrderName
from tools.context_bench import COMMS, Shape, results

USUAL = Shape(16, 8, 128, 128)
OTHERS = (  # keys for each head, for all; narrow, wide, values of fewer columns
    Shape(16, 16, 64, 64),
    Shape(16, 1, 128, 128),
    Shape(8, 4, 256, 256),
    Shape(16, 8, 192, 128),
)
TOKENS = 8192  # of a rank, of long calls
LONG_CHECKED = 4096  # tokens of whose calls all heads are held in float64 at once
INNER, MOST_LONG = 2, 4  # ranks: that exchange heads by a2a+p2p; whose long calls are checked


@dataclass(frozen=True)
class Case:
    """A call: its strategy and order, positions of each packed sequence, or of one dense one, what
    else it says, and its heads and head dims. padded: whether several are a batch of as many
    positions as the longest."""

    comm: parallel.Comm
    order: OrderName = "dual_chunk"
    lengths: tuple[int, ...] = (1536,)
    given: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    padded: bool = False
    shape: Shape = USUAL

    def __str__(self) -> str:
        words = [self.comm, self.order, *map(str, self.lengths), *map(str, self.given.items())]
        words += ["padded"] * self.padded
        words += [] if self.shape == USUAL else ["heads {}/{} dims {}/{}".format(*self.shape)]
        return " ".join([*words, *[str(self.dtype)] * (self.dtype != torch.bfloat16)])

    @property
    def batch(self) -> tuple[int, int]:
        """How many sequences operands have, and of how many positions; packed ones are one."""
        return (len(self.lengths), max(self.lengths)) if self.padded else (1, sum(self.lengths))

    @property
    def long(self) -> bool:
        """Whether it takes more memory than a definition of all heads at once should."""
        return max(self.lengths) > LONG_CHECKED

    @property
    def sequences(self) -> dict[str, Any]:
        """Arguments of packed or padded sequences."""
        if len(self.lengths) == 1:
            return {}
        if self.padded:
            used = torch.tensor(self.lengths, dtype=torch.int32)
            return {"seqused_q": used, "seqused_kv": used}
        ends = torch.tensor([*accumulate(self.lengths, initial=0)], dtype=torch.int32)
        return {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}


def cases(ranks: int) -> Iterator[Case]:
    """Masks and features, each by every strategy that serves it so many ranks."""
    dropped = {"dropout_p": 0.1, "alibi_slopes": True}
    features: list[dict[str, Any]] = [
        {},
        {"mask": "causal"},
        {"mask": "causal_bottom_right", "softcap": 30.0},
        {"window": (300, 40)},
        {"mask": "causal", **dropped},
        {"mask": "causal", "window": (512, 0)},
        {"mask": "causal", "softmax": "off_by_one", "deterministic": True},
    ]
    causal = {"mask": "causal"}
    comms: list[parallel.Comm] = [*COMMS]
    if ranks % INNER == 0 and ranks > INNER:
        comms.append("a2a+p2p")
    for comm in comms:
        yield from (Case(comm, given=given) for given in features)
        yield Case(comm, "contiguous", given=causal)
        yield Case(comm, lengths=(512, 256, 1280), given=causal)
        yield Case(comm, lengths=(512, 256, 1280), given={"mask": "causal", **dropped})
        for given in ({}, {"window": (300, 40)}, {"mask": "causal", "window": (512, 0)}):
            yield Case(comm, lengths=(512, 256, 1280), given=given)
            yield Case(comm, lengths=(500, 250, 1280), given=given, padded=True)
        yield Case(comm, lengths=(500, 250, 1280), given=causal, padded=True)
        if not comm.startswith("a2a"):  # which have no rows of a bias
            biased = {"mask": "causal", "bias": True}
            yield Case(comm, lengths=(500, 250, 1280), given=biased, padded=True)
        yield Case(comm, given=causal, dtype=torch.float16)
        for shape in OTHERS:
            if shape.heads_kv > 1 or not comm.startswith("a2a"):  # which spread heads of keys
                yield Case(comm, given=causal, shape=shape)
    for stripes in ("p2p", "a2a"):
        yield from (Case(stripes, "striped", given=given) for given in ({}, causal))
        yield Case(stripes, "striped", lengths=(512, 256, 1280), given=causal)
    if ranks <= MOST_LONG:  # as many queries a rank as let most of them wait for their keys
        long = (TOKENS * ranks,)
        yield Case("p2p", "dual_chunk", long, causal)
        yield Case("p2p", "contiguous", long, causal)


def check(case: Case) -> dict[str, Any]:
    """The largest errors of a case over all ranks, those of one call, and whether bits repeat."""
    on_cpu = dist.get_backend() == "gloo"
    device, backend = ("cpu", "reference") if on_cpu else ("cuda", "cuda")
    dtype = torch.float32 if on_cpu else case.dtype
    count, length = case.batch
    *operands, d_out = case.shape.operands(length, count, dtype, device)
    given = {**case.given, **case.sequences}
    packed = "layout" in given
    if "dropout_p" in given:
        given["rng_state"] = torch.tensor((5, 6), device=device)
    if packed:
        *operands, d_out = (x.squeeze(0) for x in (*operands, d_out))
    dim, ends = (0, given["cu_seqlens_q"]) if packed else (1, None)
    cut: dict[str, Any] = {"dim": dim, "order": case.order, "cu_seqlens": ends}
    *own, own_d_out = (parallel.shard(x, None, **cut) for x in (*operands, d_out))
    spread: dict[str, Any] = {"comm": case.comm, "order": case.order, "backend": backend}
    group = groups_of_two() if case.comm == "a2a+p2p" else None

    if "bias" in given:
        generator, size = (
            torch.Generator(device).manual_seed(4),
            (1, case.shape.heads, length, length),
        )
        given["bias"] = torch.randn(size, device=device, generator=generator, dtype=dtype)
        spread["bias"] = parallel.shard(given["bias"], None, 2)

    def over_group(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return parallel.attention(q, k, v, group=group, **{**given, **spread})

    found = results(over_group, own, own_d_out)
    again = results(over_group, own, own_d_out)
    whole = [parallel.unshard(x, None, **cut) for x in found]
    given |= {name: x.to(device) for name, x in case.sequences.items() if isinstance(x, Tensor)}
    one = results(partial(attngen.attention, **given, backend=backend), operands, d_out)
    exact = definition(operands, d_out, given)
    errors = {}
    for name, got, alone, truth in zip(("out", "dq", "dk", "dv"), whole, one, exact, strict=True):
        error, of_one = (float((x.double() - truth).abs().max()) for x in (got, alone))
        allowed = 2 * of_one + 1e-3 * float(truth.abs().max())
        errors[name] = {"error": error, "of one call": of_one, "allowed": allowed}
    same = torch.tensor(all(torch.equal(a, b) for a, b in zip(found, again, strict=True)))
    same = same.to(device).int()
    dist.all_reduce(same, dist.ReduceOp.MIN)
    right = all(x["error"] <= x["allowed"] for x in errors.values())
    repeats = bool(same) or not given.get("deterministic")
    return {"case": str(case), "right": right and repeats, "errors": errors, "same": bool(same)}


def definition(operands: list[Tensor], d_out: Tensor, given: dict[str, Any]) -> list[Tensor]:
    """Output and gradients in float64: of long calls, a head of keys after another."""
    by_definition = partial(attngen.attention, **given, backend="reference")
    *doubles, d_double = (x.double() for x in (*operands, d_out))
    if d_out.shape[-3] <= LONG_CHECKED:
        return results(by_definition, doubles, d_double)
    pieces = [[*x.chunk(operands[1].shape[-2], -2)] for x in (*doubles, d_double)]
    made = [
        results(by_definition, [*own], own_d_out) for *own, own_d_out in zip(*pieces, strict=True)
    ]
    return [torch.cat(x, -2) for x in zip(*made, strict=True)]


@cache
def groups_of_two() -> tuple[Any, Any]:
    """The inner and the outer group of this rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    inner = [[*range(first, first + INNER)] for first in range(0, ranks, INNER)]
    outer = [[*range(first, ranks, INNER)] for first in range(INNER)]
    found = {tuple(members): dist.new_group(members) for members in (*inner, *outer)}
    own, across = (next(x for x in side if rank in x) for side in (inner, outer))
    return found[tuple(own)], found[tuple(across)]

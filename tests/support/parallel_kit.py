"""Calls over a group of processes, each held to one call of the reference over the whole."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

STATE = (11, 12)
P2P_OP = dist.P2POp
HEADS, HEADS_KV, DIM, DIM_V = 4, 2, 8, 4


@dataclass(frozen=True)
class Case:
    """One call. comm, order, stripe: how it is spread; lengths: of packed sequences, or one of a
    dense batch; given: what else it says. learned: of the operands beside q, k and v. door: by
    which call it enters: `sdpa`, torch's under a `context_parallel`; `fp8`, under a recipe."""

    comm: str
    order: str = "dual_chunk"
    stripe: int = 1
    lengths: tuple[int, ...] = (24,)
    given: dict[str, Any] = field(default_factory=dict)
    learned: tuple[str, ...] = ()
    door: str = "attention"

    def __str__(self) -> str:
        words = [self.comm, self.order, *map(str, self.lengths)]
        words += [*(f"{k}={v}" for k, v in self.given.items()), *self.learned]
        return "-".join([*words, *[self.door] * (self.door != "attention")])

    @property
    def packed(self) -> bool:
        """Whether sequences are packed."""
        return len(self.lengths) > 1


def randn(*shape: int, seed: int) -> Tensor:
    """Draw numbers that are the same in every process."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole_of(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v and the gradient of the output of the whole, and its arguments."""
    tokens = sum(case.lengths)
    outer = (tokens,) if case.packed else (2, tokens)
    sizes = ((HEADS, DIM), (HEADS_KV, DIM), (HEADS_KV, DIM_V), (HEADS, DIM_V))
    tensors = [randn(*outer, *size, seed=seed) for seed, size in enumerate(sizes)]
    given = dict(case.given)
    if case.packed:
        ends = torch.tensor([*accumulate(case.lengths, initial=0)], dtype=torch.int32)
        given |= {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    if "dropout_p" in given:
        given["rng_state"] = torch.tensor(STATE)
    if "seqused" in given:
        used = torch.tensor(given.pop("seqused"), dtype=torch.int32)
        given |= {"seqused_q": used, "seqused_kv": used}
    if "sink" in case.learned:
        given |= {"softmax": "learnable", "sink": randn(HEADS, seed=8)}
    if "bias" in case.learned:
        given["bias"] = randn(1, HEADS, tokens, tokens, seed=9)
    return tensors, given


def results(
    attend: Any, operands: list[Tensor], given: dict[str, Any], d_out: Tensor
) -> list[Tensor]:
    """Output, LSE and gradients: of q, k, v, and of sink and bias where these are."""
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    for name in ("sink", "bias"):
        if name in given:
            given = {**given, name: given[name].detach().clone().requires_grad_()}
            leaves.append(given[name])
    q, k, v, *_ = leaves
    out, aux = attend(q, k, v, **given, backend="reference", return_lse=True)
    dlse = torch.where(aux.lse.isfinite(), aux.lse.detach().cos(), 0.0)
    found = torch.autograd.grad([out, aux.lse], leaves, [d_out, dlse])
    return [out.detach(), aux.lse.detach(), *found]


def error_by_sdpa(case: Case) -> float:
    """The largest difference of torch's function, whose buffers a context cuts and restores."""
    from torch.nn import functional

    from attngen import parallel

    (q, k, v, d_out), given = whole_of(case)
    causal = given.get("mask") == "causal"
    numbers = [x.transpose(1, 2).contiguous() for x in (q, k, v, d_out)]

    def made(*given: Tensor) -> list[Tensor]:
        *operands, of_output = (x.clone() for x in given)
        leaves = [x.requires_grad_() for x in operands]
        attend = functional.scaled_dot_product_attention
        out = attend(*leaves, is_causal=causal, enable_gqa=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, of_output)]

    wanted, before = made(*numbers), [x.clone() for x in numbers]
    with parallel.context_parallel(
        None, buffers=numbers, buffer_seq_dims=[2] * 4, comm=case.comm
    ):
        found = made(*numbers)
    assert all(map(torch.equal, numbers, before)), "buffers are not whole again"
    pairs = zip(found, (parallel.shard(x, None, 2) for x in wanted), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def error_by_fp8(case: Case) -> float:
    """The largest difference, of the largest number, of a call in FP8, whose messages have 8
    bits."""
    import attngen
    from attngen import fp8, parallel

    (q, k, v, d_out), given = whole_of(case)
    recipe = fp8.Float8CurrentScaling()
    numbers = [x.bfloat16() for x in (q, k, v, d_out)]
    own = [parallel.shard(x, None, 1) for x in numbers]
    sent = []

    def noted(op: Any, x: Tensor, peer: int, group: Any) -> Any:
        sent.append(x.dtype)
        return P2P_OP(op, x, peer, group)

    def made(attend: Any, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with fp8.autocast(recipe=recipe):
            out = attend(*leaves, **given, backend="reference")
            forward = {*sent}
        assert forward <= {torch.uint8}, forward
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    wanted = made(attngen.attention, *numbers)
    with mock.patch.object(dist, "P2POp", noted):
        found = made(partial(parallel.attention, comm=case.comm), *own)
    assert case.comm != "p2p" or {*sent} == {torch.uint8, torch.float32}
    pairs = zip(found, (parallel.shard(x, None, 1) for x in wanted), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def error_of(case: Case, group: Any, ranks: int) -> float:
    """The largest difference from one call over the whole, on this rank."""
    import attngen
    from attngen import parallel

    (q, k, v, d_out), given = whole_of(case)
    spread: dict[str, Any] = {"order": (case.order, case.stripe)}
    ends = {"cu_seqlens": given["cu_seqlens_q"]} if case.packed else {}
    dim = 0 if case.packed else 1

    def own(x: Tensor, axis: int = dim) -> Tensor:
        return parallel.shard(x, None, axis, **spread, **ends)

    wanted = results(attngen.attention, [q, k, v], dict(given), d_out)
    own_given = dict(given)
    if "bias" in given:
        own_given["bias"] = own(given["bias"], 2)

    def attend(*operands: Tensor, **arguments: Any) -> Any:
        return parallel.attention(
            *operands, group=group, comm=case.comm, **spread, **arguments
        )

    found = results(attend, [own(x) for x in (q, k, v)], own_given, own(d_out))
    again = results(attend, [own(x) for x in (q, k, v)], own_given, own(d_out))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "other bits"
    of_heads = 1 if case.packed else 2
    axes = [dim, of_heads, dim, dim, dim]
    expected = [own(x, axis) for x, axis in zip(wanted[:5], axes, strict=True)]
    rest = zip(found[5:], wanted[5:], (n for n in ("sink", "bias") if n in given), strict=True)
    for got, want, name in rest:
        if name == "sink":  # of this rank's rows: all ranks' are the whole's
            dist.all_reduce(got)
            expected.append(want)
        else:
            expected.append(own(want, 2))
    differences = zip(found, expected, strict=True)
    errors = [torch.where(a == b, 0.0, (a - b).abs()).max() for a, b in differences]
    joined = parallel.unshard(found[0], None, dim, **spread, **ends)
    errors.append((joined - wanted[0]).abs().max())
    return float(torch.stack(errors).max())


def _work(rank: int, ranks: int, folder: str, cases: list[Case]) -> None:
    """One process: the error of every case, or what it raised, to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    pair = None
    if ranks == 4:
        inner = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        outer = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        pair = inner[rank // 2], outer[rank % 2]
    lines = []
    for case in cases:
        group = pair if case.comm == "a2a+p2p" else None
        if case.door == "attention":
            error = error_of(case, group, ranks)
        else:
            error = {"sdpa": error_by_sdpa, "fp8": error_by_fp8}[case.door](case)
        lines.append(f"{error:.3e}\n")
    Path(folder, f"errors_{rank}").write_text("".join(lines))
    dist.destroy_process_group()


def errors_of(cases: list[Case], ranks: int) -> list[float]:
    """The largest error of each case over all ranks, in one start of as many processes."""
    # The loopback: no name needs to be resolved.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_nameindex()[0][1])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (ranks, folder, cases), ranks)
        texts = [Path(folder, f"errors_{rank}").read_text().split() for rank in range(ranks)]
    return [max(map(float, each)) for each in zip(*texts, strict=True)]

"""`attngen.parallel` between processes of a CPU: every strategy is one call over the whole."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from attngen import SpecError, fp8, parallel
from attngen.call.context.order import Order
from attngen.frontends.pytorch.context import (
    calls as context_calls,
)
from attngen.frontends.pytorch.context import (
    choice as context_choice,
)
from attngen.frontends.pytorch.context import (
    heads as context_heads,
)
from attngen.frontends.pytorch.context import (
    launches as context_launches,
)
from attngen.frontends.pytorch.context import (
    plans as context_plans,
)
from attngen.frontends.pytorch.context import (
    sdpa as context_sdpa,
)
from attngen.frontends.pytorch.context import (
    sharding as context_sharding,
)
from attngen.frontends.pytorch.context.calls import Ranks
from tests.support.parallel_kit import Case, errors_of

CAUSAL = {"mask": "causal"}
DROPPED = {"mask": "causal", "dropout_p": 0.3, "alibi_slopes": True}
CASES = [
    Case("p2p", given=CAUSAL, learned=("sink",)),
    Case("p2p", given={"window": (5, 2)}),
    Case("p2p", lengths=(8, 16, 4), given=DROPPED),
    Case("p2p", "contiguous", given=DROPPED),
    Case("p2p", given={"softcap": 2.0}, learned=("bias",)),
    Case("p2p", "striped", given=CAUSAL),
    Case("p2p", given={"mask": "padding_causal_bottom_right", "seqused": (19, 24)}),
    Case("all_gather", given={"window": (7, 0), **DROPPED}, learned=("bias", "sink")),
    Case("all_gather", lengths=(12, 20), given=CAUSAL),
    Case("all_gather", given={"mask": "padding_causal", "seqused": (19, 24)}),
    Case("p2p", given={**DROPPED, "seqused": (19, 0)}, learned=("bias", "sink")),
    Case("p2p", given={"mask": "causal_bottom_right", "seqused": (5, 24)}, learned=("bias",)),
    Case("all_gather", given={"window": (9, 2), "seqused": (19, 4)}, learned=("bias", "sink")),
    Case("a2a", given={"mask": "padding_causal", "seqused": (19, 24)}),
    Case("a2a", given=DROPPED, learned=("sink",)),
    Case("a2a", "striped", lengths=(8, 16), given={"window": (4, 4)}),
    Case("auto", given=CAUSAL),
    Case("auto", "striped", given=DROPPED),
    Case("p2p", given=CAUSAL, door="sdpa"),
    *(Case(comm, given=CAUSAL, door="fp8") for comm in ("p2p", "all_gather", "a2a")),
]
LIMITS = {"fp8": 0.02}  # of the largest number: parts have 16 bits, weights in 8 differ


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    return dict(zip(map(str, CASES), errors_of(CASES, 2), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_are_one_call(case: Case, errors: dict[str, float]) -> None:
    assert errors[str(case)] < LIMITS.get(case.door, 1e-10)


@pytest.mark.slow
def test_ranks_exchange_heads_inside_and_keys_outside() -> None:
    cases = [
        Case("a2a+p2p", given=DROPPED, learned=("sink",)),
        Case("a2a+p2p", lengths=(8, 16), given=CAUSAL),
        Case("p2p", given={"window": (5, 0)}),
        Case("all_gather", given=CAUSAL),
    ]
    assert max(errors_of(cases, 4)) < 1e-10


def operands(heads: int = 4, heads_kv: int = 2) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 12, n, 8) for n in (heads, heads_kv, heads_kv))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"score_mod": "temperature"}, "score_mod is not served over a group"),
        ({"mask": "prefix"}, "over a group it is a plain one"),
        ({"layout": "paged_kv_bshd_bshd_bshd"}, "over a group it is one of bshd"),
        ({"mask": "arbitrary"}, "needs attn_mask"),
        ({"cu_seqlens_q": [0, 5]}, "cu_seqlens_q beside layout='bshd'"),
        ({"softmax": "learnable"}, "needs sink"),
        ({"alibi_slopes": torch.ones(4, requires_grad=True)}, "no gradient over a group"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_what_no_part_has_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        context_calls.asked_of(*operands(), given, 2)


def test_gradients_in_8_bits_are_refused(alone: None) -> None:
    q, k, v = (x.bfloat16() for x in operands())
    recipe = fp8.Float8CurrentScaling(backward="fp8")
    with fp8.autocast(recipe=recipe), pytest.raises(SpecError, match="take a recipe with"):
        parallel.attention(q, k, v)
    with fp8.autocast(recipe=fp8.DelayedScaling()), pytest.raises(SpecError, match="in layers"):
        parallel.attention(q, k, v)
    with fp8.autocast():
        out = parallel.attention(*operands())
    assert isinstance(out, torch.Tensor) and out.dtype == torch.float32


def test_orders_and_strategies_are_refused_by_name() -> None:
    q, k, v = operands()
    with pytest.raises(SpecError, match="no process group"):
        parallel.attention(q, k, v)
    with pytest.raises(SpecError, match="did you mean 'all_gather'"):
        parallel.attention(q, k, v, comm="allgather")  # type: ignore[arg-type]  # a typo
    with pytest.raises(SpecError, match="takes group="):
        parallel.attention(q, k, v, comm="a2a+p2p")
    asked = context_calls.asked_of(q, k, v, CAUSAL, 2)
    for order, gathers, reason in (
        (Order("striped", 2, 2), False, "Use stripe=1, or comm='a2a'"),
        (Order("striped", 2), True, "Use comm='p2p' or 'a2a'"),
        (Order("dual_chunk", 5), False, "multiples of 10"),
    ):
        with pytest.raises(SpecError, match=reason):
            ranks = context_calls.Ranks(None, order.ranks, 0)
            features = context_calls.features_of(asked, None, 0, 4)
            context_calls.context_call(asked, order, ranks, gathers, features, torch.float32)
    for heads, given in (((4, 1), {}), ((4, 2), {"attn_mask": torch.ones(12, 24).bool()})):
        asked = context_calls.asked_of(*operands(*heads), given, 2)
        assert all("Use comm='p2p'" in x for x in context_choice.against_heads(asked, 2))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group of one rank, this process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield None
    dist.destroy_process_group()


def test_autocast_casts_once_in_both_directions(alone: None) -> None:
    leaves = [x.requires_grad_() for x in operands()]
    d_out = torch.randn(1, 12, 4, 8).bfloat16()

    def gradients(inside: bool) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            out = parallel.attention(*leaves, mask="causal")
            assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16
            if inside:
                return [out, *torch.autograd.grad(out, leaves, d_out)]
        return [out, *torch.autograd.grad(out, leaves, d_out)]

    found = gradients(False)
    assert {x.dtype for x in found[1:]} == {torch.float32}
    assert all(map(torch.equal, found, gradients(True)))
    narrow = [x.detach().bfloat16().requires_grad_() for x in leaves]
    wanted = parallel.attention(*narrow, mask="causal")
    assert isinstance(wanted, torch.Tensor)
    made = [wanted, *torch.autograd.grad(wanted, narrow, d_out)]
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, made, strict=True))


def test_what_kernels_do_not_serve_is_known_at_entry() -> None:
    wide = tuple(torch.randn(1, 12, 4, 264).bfloat16() for _ in range(3))
    asked = context_calls.asked_of(*wide, {"backend": "cuda"}, 2)
    with pytest.raises(SpecError) as refusal:
        context_calls.features_of(asked, None, 0, 4)
    reasons = "; ".join(refusal.value.reasons)
    assert "head dims above 256 have no kernels over a group" in reasons
    asked = context_calls.asked_of(*wide, {}, 2)
    assert not context_calls.features_of(asked, None, 0, 4).kernels


def test_batches_are_cut_where_positions_lie(alone: None) -> None:
    tokens, mask = torch.arange(16).view(2, 8), torch.ones(2, 1, 8, 8)
    ends = torch.tensor([0, 8])
    batch = {"tokens": tokens, "attention_mask": mask, "cu_seqlens_q": ends, "loss_mask": None}
    with mock.patch.object(context_sharding.Ranks, "of", lambda group: Ranks(group, 2, 1)):
        found = parallel.shard_batch({**batch, "x": tokens.T}, dims={"x": 0})
        with pytest.raises(SpecError, match="tokens: a sequence of 7 positions"):
            parallel.shard_batch({"tokens": tokens[:, 1:]})
        with pytest.raises(SpecError, match="flag .* has no axis 1"):
            parallel.shard_batch({"flag": torch.ones(2)})
    assert found["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert found["attention_mask"].shape == (2, 1, 4, 8)
    assert torch.equal(found["x"].T, found["tokens"]) and found["cu_seqlens_q"] is ends


def test_modules_attend_over_a_mesh(alone: None) -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    x, plain = torch.randn(1, 2, 8, 4), nn.functional.scaled_dot_product_attention
    module = parallel.ContextParallel(comm="p2p")._apply(Module(), None)
    with mock.patch.object(context_sdpa, "attention", wraps=parallel.attention) as attend:
        out = module(x)
    assert attend.call_count == 1 and nn.functional.scaled_dot_product_attention is plain
    torch.testing.assert_close(out, plain(x, x, x, is_causal=True))
    with pytest.raises(SpecError, match="need enable_gqa"), context_sdpa.over_group(None):
        nn.functional.scaled_dot_product_attention(x, x[:, :1], x[:, :1])
    with pytest.raises(SpecError, match="as many buffer_seq_dims"):
        with parallel.context_parallel(None, buffers=[x]):
            pass


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_calls_again_make_no_plan_and_no_index(alone: None, comm: parallel.Comm) -> None:
    q, k, v = operands()
    first = parallel.attention(q, k, v, comm=comm, mask="causal", window=(5, 0))
    parts = (context_plans.plans_of, context_plans.parts_of, context_plans.index_of)
    kept = (*parts, context_heads._indices)
    before = [each.cache_info().misses for each in kept]
    again = parallel.attention(q, k, v, comm=comm, mask="causal", window=[5, 0])
    assert [each.cache_info().misses for each in kept] == before and sum(before)
    assert isinstance(first, torch.Tensor) and torch.equal(first, again)  # type: ignore[arg-type]


@pytest.mark.parametrize("comm", ["p2p", "all_gather"])
def test_packed_calls_again_bring_nothing_to_the_device(alone: None, comm: parallel.Comm) -> None:
    """Neither a plan, nor the integers of a launch."""
    q, k, v = (x.flatten(0, 1) for x in operands())
    ends = torch.tensor([0, 2, 6, len(q)], dtype=torch.int32)
    given: dict[str, Any] = {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    first = parallel.attention(q, k, v, comm=comm, mask="causal", **given)
    launched = context_plans.launches_around, context_plans.launches_over_all
    kept = (*launched, context_launches.numbers_of, context_plans.index_of)
    before = [each.cache_info().misses for each in kept]
    again = parallel.attention(q, k, v, comm=comm, mask="causal", **given)
    assert [each.cache_info().misses for each in kept] == before and sum(before)
    assert isinstance(first, torch.Tensor) and torch.equal(first, again)  # type: ignore[arg-type]


@pytest.mark.parametrize("comm", ["p2p", "all_gather"])
def test_ranks_may_have_no_tokens_in_use(alone: None, comm: parallel.Comm) -> None:
    """A sink is in rows of which there are none, and messages have no keys."""
    q, k, v = (x.flatten(0, 1) for x in operands())
    none, room = (torch.tensor((0, n), dtype=torch.int32) for n in (0, len(q)))
    given: dict[str, Any] = {"layout": "thd", "cu_seqlens_q": none, "cu_seqlens_q_padded": room}
    q.requires_grad_()
    for keys in (len(k), 0):
        ends = torch.tensor((0, keys), dtype=torch.int32)
        out = parallel.attention(
            *(q, k[:keys], v[:keys]), comm=comm, softmax="off_by_one", cu_seqlens_kv=ends, **given
        )
        assert isinstance(out, torch.Tensor) and not out.any()
        assert not torch.autograd.grad(out.sum(), q)[0].any()
    cut: dict[str, Any] = {"dim": 0, "cu_seqlens": none}
    assert parallel.unshard(parallel.shard(q[:0], **cut), **cut).shape == (0, *q.shape[1:])

"""DTensor operands: each rank attends by itself, and what comes out is what whole tensors give."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import attngen
from attngen import SpecError
from attngen.frontends.pytorch import routing
from attngen.frontends.pytorch.callables import choice as callable_choice
from tests.support.paths import ROOT

RANKS = 4


@pytest.mark.slow
def test_calls_and_gradients_of_ranks_are_those_of_whole_tensors(tmp_path):
    command = [sys.executable, "-m", "tests.support.sharding_kit"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(tmp_path / "store")],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=280)[1] for process in processes]
        assert not any(process.returncode for process in processes), "\n".join(said)
    finally:
        for process in processes:
            process.kill()


@pytest.fixture
def mesh():
    """One of two ranks, which never hears of the other."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


Q, K = torch.randn(2, 6, 4, 16), torch.randn(2, 6, 2, 16)
ENDS = torch.tensor([0, 2, 4], dtype=torch.int32)
THD = {"layout": "thd", "cu_seqlens_q": ENDS, "cu_seqlens_kv": ENDS}
REFUSED = {
    "positions": (Shard(1), (Q, K), {}, "q is sharded along 's'.*\n.*k is sharded along 's'"),
    "head dim": (Shard(3), (Q, K), {}, "sharded along 'd'"),
    "one head": (Shard(2), (Q, K[:, :, :1]), {}, "k has 1 heads for 2 ranks: these must divide"),
    "tokens": (Shard(0), (Q[0], K[0]), THD, "packed tokens, whose sequences do not end where"),
    "dropout": (Shard(2), (Q, K), {"dropout_p": 0.5}, "dropout_p: each rank.*\n?.*dropout_p: what"),
    "ends": (
        Shard(0),
        (Q, K),
        {"mask": "padding", "cu_seqlens_q": ENDS, "cu_seqlens_kv": ENDS},
        "cu_seqlens_q, cu_seqlens_kv: of a sharded batch pass seqused_q",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_shards_that_a_rank_cannot_serve_are_refused_with_the_reason(mesh, name):
    place, operands, arguments, reason = REFUSED[name]
    q, k = (distribute_tensor(x, mesh, [place]) for x in operands)
    with pytest.raises(SpecError, match=reason):
        attngen.attention(q, k, k, **arguments)


def test_operands_that_do_not_lie_together_are_refused(mesh):
    q, k = (distribute_tensor(x, mesh, [Shard(0)]) for x in (Q, K))
    other = distribute_tensor(K, mesh, [Shard(2)])
    with pytest.raises(SpecError, match="q over batch, k over batch, v over heads"):
        attngen.attention(q, k, other)
    with pytest.raises(SpecError, match="v is a tensor of this rank beside DTensors"):
        attngen.attention(q, k, K)
    elsewhere = distribute_tensor(K, init_device_mesh("cpu", (1, 2)), [Replicate(), Shard(0)])
    with pytest.raises(SpecError, match="v lies on another device mesh"):
        attngen.attention(q, k, elsewhere)


def test_dropout_of_whole_tensors_is_the_same_on_each_rank(mesh):
    state = torch.tensor([3, 5])
    q, k, seed = (
        distribute_tensor(x, mesh, [Replicate()], src_data_rank=None) for x in (Q, K, state)
    )
    out, aux = attngen.attention(q, k, k, dropout_p=0.5, rng_state=seed, return_rng_state=True)
    want = attngen.attention(Q, K, K, dropout_p=0.5, rng_state=state)
    assert torch.equal(out.to_local(), want) and aux.rng_state is seed


def test_functions_in_compiled_code_are_refused(mesh, monkeypatch):
    """A rank's own numbers of heads are none of whole tensors."""
    monkeypatch.setattr(callable_choice.descriptions, "device_arch", lambda _: "sm_90a")
    monkeypatch.setattr(routing, "device_arch", lambda _: "sm_90a")
    q, k = (distribute_tensor(x.bfloat16(), mesh, [Shard(2)]) for x in (Q, K))

    def layer(q, k):
        return attngen.attention(q, k, k, score_mod=lambda s, b, h, i, j: s * h)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="score_mod: functions of heads and sequences"):
        compiled(q, k)

"""Calls with functions in code that torch.compile traces whole: kernels serve them as they do
outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask

import attngen

from . import oracle

pytestmark = pytest.mark.gpu

B, H, S, D = 2, 2, 40, 64


def layer_of(name: str) -> Callable[..., dict[str, Any]]:
    """Functions that a layer makes of a table [b, h] and a tensor of documents [b, s]."""

    def score(table: Tensor, documents: Tensor) -> dict[str, Any]:
        half = table / 2
        return {"score_mod": lambda s, b, h, i, j: s * half[b, h] - (i - j).abs() * 0.125}

    def learned(table: Tensor, documents: Tensor) -> dict[str, Any]:
        return {"score_mod": lambda s, b, h, i, j: torch.tanh(s) + table[h, 1] * table[b][0]}

    def mask(table: Tensor, documents: Tensor) -> dict[str, Any]:
        own = documents + 1
        return {"mask_mod": lambda b, h, i, j: (own[b, i] == own[b, j]) & ((i + j) % 3 != 0)}

    def causal(table: Tensor, documents: Tensor) -> dict[str, Any]:
        return {"mask_mod": lambda b, h, i, j: i >= j}

    def blocks(table: Tensor, documents: Tensor) -> dict[str, Any]:
        return {"block_mask": BLOCKS}

    def both(table: Tensor, documents: Tensor) -> dict[str, Any]:
        return score(table, documents) | mask(table, documents) | {"return_lse": True}

    known = {f.__name__: f for f in (score, learned, mask, causal, blocks, both)}
    return known[name]


NAMES = ("score", "learned", "mask", "causal", "blocks", "both")


def odd(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j) % 3 != 1


BLOCKS: Any = None


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = create_block_mask(odd, B, None, S, S, device=str(oracle.DEVICE), BLOCK_SIZE=16)
    monkeypatch.setitem(globals(), "BLOCKS", made)


def facts(name: str, dynamic: bool) -> tuple[Any, ...]:
    """Results and gradients of a layer, and of it compiled; the compiled code's kernels."""
    table = torch.tensor([[0.5, 1.0], [2.0, -0.25]], device=oracle.DEVICE)
    documents = (torch.arange(S, device=oracle.DEVICE) // 13).expand(B, -1).contiguous()
    operands = oracle.operands(B, H, H, S, S, D)
    make = layer_of(name)

    def layer(q: Tensor, k: Tensor, v: Tensor, table: Tensor, documents: Tensor) -> Any:
        return attngen.attention(q, k, v, backend="cuda", **make(table, documents))

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    found = []
    for call in (layer, compiled):
        leaves = [x.clone().requires_grad_() for x in (*operands, table)]
        with attngen.trace() as seen:
            result = call(*leaves, documents)
            out, *aux = result if isinstance(result, tuple) else (result,)
            loss = out.float().square().sum()
            if aux:
                loss = loss + aux[0].lse.sum()
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        found.append((out, *gradients))
    return (*found, seen)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", NAMES)
def test_compiled_layer_runs_kernels_and_changes_nothing(name: str, dynamic: bool) -> None:
    wanted, found, seen = facts(name, dynamic)
    assert len(seen.variants) >= 2  # of a forward, and of gradients
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) is (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


def passed(name: str, table: Tensor) -> dict[str, Any]:
    """Further arguments of a call with functions, and these, of a table [h]."""
    ends = torch.tensor([0, 13, S], dtype=torch.int32, device=oracle.DEVICE)
    documents = (torch.arange(S, device=oracle.DEVICE) // 13).expand(B, -1)
    state = torch.tensor([3, 5], device=oracle.DEVICE)
    half = torch.tensor(0.5)
    score = {"score_mod": lambda s, b, h, i, j: s + table[h] * (i - j)}
    mask = {"mask_mod": lambda b, h, i, j: documents[b][i] == documents[b][j]}
    packed = {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends, "mask": "causal"}
    bounded = {"window": (9, 3), "softcap": 5.0, "softmax": "learnable", "sink": table}
    shown = torch.ones(S, S, dtype=torch.bool, device=oracle.DEVICE).tril(3)
    known: dict[str, dict[str, Any]] = {
        "packed": packed | score | {"mask_mod": lambda b, h, i, j: (i + j) % 3 != 0},
        "dropout": {"dropout_p": 0.25, "rng_state": state, "return_rng_state": True} | score,
        "bounded": bounded | {"return_lse": True, "return_max_logit": True} | score | mask,
        "bias": {"bias": table[:, None, None].expand(-1, S, S).bfloat16(), "attn_mask": shown}
        | mask,
        "numbers": {"score_mod": lambda s, b, h, i, j: torch.where(i > j, s * half, s * 3)},
        "work": {"score_mod": lambda s, b, h, i, j: s + table.view(H, 1)[h, 0] * table.exp()[h]},
    }
    return known[name]


@pytest.mark.parametrize("name", ["packed", "dropout", "bounded", "bias", "numbers", "work"])
def test_other_arguments_beside_functions_stay_what_they_are(name: str) -> None:
    operands = oracle.operands(B, H, H, S, S, D)
    if name == "packed":
        operands = [first for first, _ in operands]
    table = torch.tensor([0.1, -0.2], device=oracle.DEVICE)

    def layer(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
        return attngen.attention(q, k, v, backend="cuda", **passed(name, table))

    found = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in (*operands, table)]
        result = call(*leaves)
        out, aux = result if isinstance(result, tuple) else (result, None)
        gradients = torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True)
        by_products = [] if aux is None else [aux.lse, aux.max_logit]
        found.append([x for x in (out, *by_products, *gradients) if x is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_inductor_compiles_a_layer() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        twice = table * 2
        out: Tensor = attngen.attention(
            *(q, k, v),
            score_mod=lambda s, b, h, i, j: s + twice[h] * (i - j),
            mask_mod=lambda b, h, i, j: (i + j) % 3 != 0,
            backend="cuda",
        )
        return out

    operands = oracle.operands(B, H, H, S, S, D)
    table = torch.tensor([0.25, -0.5], device=oracle.DEVICE)
    leaves = [x.clone().requires_grad_() for x in operands]
    out = torch.compile(layer, fullgraph=True)(*leaves, table)
    out.float().square().sum().backward()
    torch.testing.assert_close(out, layer(*operands, table))
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)


def test_another_length_and_another_tensor_compile_nothing() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        rows, keys = q.shape[1], k.shape[1]
        out: Tensor = attngen.attention(
            *(q, k, v),
            score_mod=lambda s, b, h, i, j: s + table[h, rows - 1 - i],
            mask_mod=lambda b, h, i, j: i + (keys - rows) >= j - 3,
            backend="cuda",
        )
        return out

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for length in (72, 104, 136):
        operands = oracle.operands(B, H, H, length, length, D)
        table = torch.randn(H, length, device=oracle.DEVICE)
        torch.testing.assert_close(compiled(*operands, table), layer(*operands, table))
        counts.append(counter.frame_count)
    assert len({*counts}) == 1


def makes(table: Tensor) -> dict[str, Any]:
    """A score of a tensor that it makes, on a device where a trace without values has none."""

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[h] * torch.arange(H, device=s.device)[h] * (i - j)

    return {"score_mod": score_mod}


@pytest.mark.parametrize("own", [{"softcap": 1e-39}, {"softcap": 0.0}], ids=["cap", "made"])
def test_traced_call_that_kernels_may_refuse_is_right(own: dict[str, float]) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, table: Tensor, backend: str = "auto") -> Tensor:
        out: Tensor = attngen.attention(
            *(q, k, v),
            mask_mod=lambda b, h, i, j: (i + j) % 3 != 0,
            backend=backend,
            **own,
            **makes(table),
        )
        return out

    operands = oracle.operands(B, H, H, S, S, D)
    table = torch.tensor([0.25, -0.5], device=oracle.DEVICE, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(*operands, table), layer(*operands, table, "reference")
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
    # The sum of squares, since sums of few digits come to hardly more than what rounding leaves.
    losses = (x.float().square().sum() for x in (found, wanted))
    (one,), (other,) = (torch.autograd.grad(loss, table) for loss in losses)
    torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2)


def test_exported_layers_run_kernels() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.tensor([0.25, -0.5], device=oracle.DEVICE)
            self.table = torch.nn.Parameter(table)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            table = self.table * 2
            out: Tensor = attngen.attention(
                *(q, k, v),
                score_mod=lambda s, b, h, i, j: s + table[h] * (i - j),
                mask_mod=lambda b, h, i, j: (i + j) % 3 != 0,
            )
            return out

    operands, layer = oracle.operands(B, H, H, S, S, D), Layer()
    with torch.no_grad(), attngen.trace() as seen:
        found = torch.export.export(layer, tuple(operands), strict=True).module()(*operands)
        assert seen.variants
        torch.testing.assert_close(found, layer(*operands), rtol=1e-2, atol=1e-2)

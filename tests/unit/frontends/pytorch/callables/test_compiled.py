"""Calls with functions in compiled code, on tensors without values that pass for those of a GPU:
what dynamo and AOT autograd make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import attngen
from attngen.frontends.pytorch import descriptions, routing

MASK, FORWARD = "attngen.mask_of_function.default", "attngen.forward.default"
BACKWARD = "attngen.backward.default"


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (descriptions, routing):
        monkeypatch.setattr(module, "device_arch", lambda _: "sm_90a")
    torch.compiler.reset()
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
        yield
    torch.compiler.reset()


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def operands(length: int) -> list[Tensor]:
    return [made(2, length, 2, 64, dtype=torch.bfloat16) for _ in range(3)]


def compiled(layer: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], list[Any]]:
    """A compiled layer, and the operations of attngen in each graph that it was lowered to."""
    graphs: list[list[str]] = []

    def keep(graph: GraphModule, _: Any) -> Any:
        own = [str(x.target) for x in graph.graph.nodes if str(x.target).startswith("attngen")]
        graphs.append(own)
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    return torch.compile(layer, fullgraph=True, backend=backend, **options), graphs


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_functions_become_operations_of_kernels(dynamic: bool) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, table: Tensor, documents: Tensor) -> Any:
        half, own = table / 2, documents + 1
        return attngen.attention(
            *(q, k, v),
            score_mod=lambda s, b, h, i, j: s * half[b, h] - (i - j).abs() * 0.125,
            mask_mod=lambda b, h, i, j: (own[b, i] == own[b, j]) & ((i + j) % 3 != 0),
            return_lse=True,
            backend="cuda",
        )

    call, graphs = compiled(layer, dynamic=dynamic)
    q, k, v = operands(40)
    table = made(2, 2)
    out, aux = call(q, k, v, table, made(2, 40, dtype=torch.int64))
    assert out.shape == q.shape and out.dtype == q.dtype
    assert aux.lse.shape == (2, 2, 40) and aux.lse.dtype == torch.float32
    leaves = [q, k, v, table]
    gradients = torch.autograd.grad(out.float().sum() + aux.lse.sum(), leaves)
    assert [x.shape for x in gradients] == [x.shape for x in leaves]
    assert graphs == [[MASK, FORWARD], [BACKWARD]]


def test_sizes_that_vary_are_read_as_tensors() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
        rows, keys = q.shape[1], k.shape[1]
        return attngen.attention(
            *(q, k, v),
            score_mod=lambda s, b, h, i, j: s + table[h, rows - 1 - i],
            mask_mod=lambda b, h, i, j: i + (keys - rows) >= j - 3,
            backend="cuda",
        )

    call, graphs = compiled(layer, dynamic=True)
    q, k, v = operands(72)
    table = made(2, 72)
    out = call(q, k, v, table)
    (gradient,) = torch.autograd.grad(out.float().sum(), table)
    assert out.shape == q.shape and gradient.shape == table.shape
    assert graphs == [[MASK, FORWARD], [BACKWARD]]


def test_what_attngen_has_built_in_makes_no_mask() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attngen.attention(q, k, v, mask_mod=lambda b, h, i, j: i >= j, backend="cuda")

    call, graphs = compiled(layer)
    q, k, v = operands(40)
    out = call(q, k, v)
    torch.autograd.grad(out.float().sum(), q)
    assert graphs == [[FORWARD], [BACKWARD]]

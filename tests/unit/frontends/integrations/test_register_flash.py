"""`register_flash`: PyTorch's own operations of attention, whose kernels are attngen's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attngen.integrations import torch as door
from torch import Tensor
from torch.nn import functional

from attngen import SpecError
from attngen.call.backend import default
from attngen.frontends.integrations import flash_registry

aten = torch.ops.aten
B, H, H_KV, S, D = 2, 4, 2, 6, 8


class Own:
    """PyTorch's kernels, which there are none of on CPU."""

    called: tuple[Any, ...] = ()

    def call_boxed(self, keys: Any, *given: Any) -> Any:
        assert isinstance(keys, torch._C.DispatchKeySet)
        self.called = given
        nothing = torch.empty(0)
        return nothing, nothing, None, None, 0, 0, nothing, nothing, nothing


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    """The operations on CPU, by the reference."""
    made = Own()
    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: made)
    handle = flash_registry.override("reference", "CPU")
    yield made
    handle.remove()
    with pytest.raises(NotImplementedError, match="CPU"):
        aten._scaled_dot_product_flash_attention(*operands("bhsd", H))


def operands(axes: str, heads_kv: int = H_KV, d_v: int = D) -> list[Tensor]:
    """Leaves [b, h, s, d], which lie in memory in the order of these axes."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for heads, dim in ((H, D), (heads_kv, D), (heads_kv, d_v)):
        sizes = {"b": B, "h": heads, "s": S, "d": dim}
        x = torch.randn([sizes[axis] for axis in axes], generator=generator)
        made.append((x if axes == "bhsd" else x.transpose(1, 2)).requires_grad_())
    return made


def alike(found: Any, shown: Any) -> None:
    """Hold results to what the operation's meta says of them."""
    for one, other in zip(found, shown, strict=True):
        if isinstance(other, Tensor):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert one.stride() == other.stride()
        else:
            assert one == other


def on_meta(operation: Any, tensors: list[Any], *rest: Any) -> Any:
    shown = [
        x if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for x in tensors
    ]
    return operation(*shown, *rest)


@pytest.mark.parametrize("axes", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("own")
def test_flash_operation_and_its_gradients_are_those_of_pytorch(axes: str, causal: bool) -> None:
    q, k, v = given = operands(axes)
    found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    alike(found, on_meta(aten._scaled_dot_product_flash_attention, given, 0.0, causal))
    out, *_ = found
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(out, given, d_out)
    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(out, wanted)
    for one, other in zip(gradients, torch.autograd.grad(wanted, given, d_out), strict=True):
        torch.testing.assert_close(one, other)
    assert [x.stride() for x in gradients] == [x.stride() for x in given]


@pytest.mark.parametrize("bias", [None, "learned", "mask"])
@pytest.mark.usefixtures("own")
def test_efficient_operation_and_its_gradients_are_those_of_pytorch(bias: str | None) -> None:
    given = operands("bhsd", H, d_v=5)
    added: Tensor | None = None
    if bias is not None:
        added = torch.randn(B, H, S, S, generator=torch.Generator().manual_seed(2))
    if bias == "mask":
        added = torch.zeros_like(added).masked_fill(added < -0.5, -torch.inf)
    elif added is not None:
        given.append(added.requires_grad_())
    causal = bias is None
    operation = aten._scaled_dot_product_efficient_attention
    found = operation(*given[:3], added, True, 0.0, causal, scale=0.3)
    alike(found, on_meta(operation, [*given[:3], added], True, 0.0, causal))
    out, *_ = found
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(out, given, d_out)
    attend = functional.scaled_dot_product_attention
    wanted = attend(*given[:3], attn_mask=added, is_causal=causal, scale=0.3)
    torch.testing.assert_close(out, wanted)
    for one, other in zip(gradients, torch.autograd.grad(wanted, given, d_out), strict=True):
        torch.testing.assert_close(one, other)
    _, lse, *_ = operation(*given[:3], added, False, 0.0, causal)
    assert lse.shape == (B, H, 0)


@pytest.mark.parametrize("window", [(None, None), (2, None), (2, 1)], ids=str)
@pytest.mark.usefixtures("own")
def test_operation_of_packed_tokens_is_that_of_the_door(window: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(9, H, D, generator=generator).requires_grad_() for _ in range(3)]
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    left, right = window
    causal = right is None
    sides = {"window_size_left": left, "window_size_right": right}
    operation = aten._flash_attention_forward
    found = operation(*given, ends, ends, 5, 5, 0.0, causal, False, **sides)
    out, lse, *_ = found
    shown = [*given, ends, ends]
    alike(found, on_meta(operation, shown, 5, 5, 0.0, causal, False))
    whole = (-1 if left is None else left, 0 if causal else right)
    aux = SimpleNamespace(lse=True)
    wanted, own_lse = door.varlen_attn(
        *given, ends, ends, 5, 5, window_size=whole, return_aux=aux, backend="reference"
    )
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, own_lse)
    gradients = torch.autograd.grad(out, given, torch.ones_like(out))
    for one, other in zip(
        gradients, torch.autograd.grad(wanted, given, torch.ones_like(out)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_calls_that_kernels_do_not_serve_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Own()
    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: own)
    q, k, v = operands("bhsd")
    for backend in ("auto", "reference"):
        handle = flash_registry.override(backend, "CPU")
        try:
            if backend == "auto":  # a CPU has no kernels
                assert aten._scaled_dot_product_flash_attention(q, k, v, 0.5)[0].numel() == 0
                assert own.called[3:] == (0.5,)
                continue
            with pytest.raises(SpecError, match="dropout's bits are PyTorch's own"):
                aten._scaled_dot_product_flash_attention(q, k, v, 0.5)
        finally:
            handle.remove()


def test_operations_take_the_backend_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: Own())
    handle = flash_registry.override("auto", "CPU")
    q, k, v = operands("bhsd")
    try:
        monkeypatch.setattr(default, "backend", "cuda")
        with pytest.raises(SpecError, match="cpu has no kernels"):
            aten._scaled_dot_product_flash_attention(q, k, v)
        monkeypatch.setattr(default, "backend", "reference")
        assert aten._scaled_dot_product_flash_attention(q, k, v)[0].shape == q.shape
    finally:
        handle.remove()
    with pytest.raises(SpecError, match="backend='gpu'; allowed"):
        door.register_flash("gpu")


def test_registry_of_pytorch_knows_and_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn import attention

    own = Own()
    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: own)
    made: list[Any] = []
    monkeypatch.setattr(flash_registry, "override", lambda backend: made.append(backend) or Own())
    monkeypatch.setattr(Own, "remove", lambda self: made.append("removed"), raising=False)
    door.register_flash("cuda")
    assert attention.current_flash_attention_impl() == "attngen"
    assert "attngen" in attention.list_flash_attention_impls()
    attention.restore_flash_attention_impl()
    assert made == ["cuda", "removed"]

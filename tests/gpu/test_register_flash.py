"""`register_flash`: PyTorch's own operations run on attngen's kernels, and agree with PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attngen.integrations.torch import register_flash
from torch import Tensor
from torch.nn import attention as registry
from torch.nn import functional

import attngen
from attngen.frontends.integrations import flash_registry

from . import oracle

pytestmark = [pytest.mark.gpu, pytest.mark.device, pytest.mark.filterwarnings("ignore")]
BACKENDS = [registry.SDPBackend.FLASH_ATTENTION, registry.SDPBackend.EFFICIENT_ATTENTION]
CASES: dict[str, dict[str, Any]] = {
    "flash": {},
    "causal": {"is_causal": True},
    "mask": {"mask": True},
    "head dim of V": {"d_v": 128},
}


def results(case: str, attend: Callable[..., Tensor]) -> list[Tensor]:
    """The output and the gradients of PyTorch's function."""
    given = dict(CASES[case])
    d_v = given.pop("d_v", 64)
    shapes = [(2, 4, 200, d) for d in (64, 64, d_v)]
    operands = [oracle.randn(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    if given.pop("mask", False):
        given["attn_mask"] = oracle.randn(2, 1, 200, 200, seed=5) > -1
    with registry.sdpa_kernel(BACKENDS):
        out = attend(*operands, **given)
    gradients = torch.autograd.grad(out, operands, oracle.randn(*out.shape, seed=7))
    return [out, *gradients]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("case", CASES)
def test_operations_of_pytorch_run_on_kernels(
    case: str, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend: Any = functional.scaled_dot_product_attention
    wanted = results(case, attend)
    launched = []

    def note(*given: Any, **named: Any) -> Any:
        launched.append(named["backend"])
        return attngen.attention(*given, **named)

    monkeypatch.setattr(flash_registry, "attention", note)
    register_flash()
    try:
        if traced:
            attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
        found = results(case, attend)
        again = results(case, attend)
    finally:
        registry.restore_flash_attention_impl()
    assert launched == ["cuda"] * 2
    for one, other, kept in zip(found, wanted, again, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(one.float(), kept.float(), atol=2e-2, rtol=2e-2)
    results(case, functional.scaled_dot_product_attention)
    assert len(launched) == 2  # it is PyTorch's again


def test_calls_with_dropout_stay_pytorchs() -> None:
    x = oracle.randn(1, 2, 100, 64)
    results = []
    for registered in (False, True):
        if registered:
            register_flash()
        try:
            torch.manual_seed(0)
            attend = functional.scaled_dot_product_attention
            with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
                results.append(attend(x, x, x, dropout_p=0.5))
        finally:
            if registered:
                registry.restore_flash_attention_impl()
    assert oracle.same(results[:1], results[1:])

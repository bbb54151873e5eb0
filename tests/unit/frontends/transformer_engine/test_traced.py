"""torch.compile follows the module whole: its gradients, its numbers, its caches."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen import te
from tests.support import te_kit
from tests.support.te_kit import Case, arguments, module_of, of_module


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def traced(module: te.DotProductAttention) -> Any:
    return torch.compile(module, backend="aot_eager", fullgraph=True)


def results(module: Any, case: Case, **more: Any) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    qkv = [x.requires_grad_() for x in te_kit.operands(case, dtype=torch.bfloat16)]
    torch.manual_seed(3)
    out = module(*qkv, **arguments(case), **more)
    out = out if isinstance(out, Tensor) else out[0]
    out.float().square().sum().backward()
    return [out, *(x.grad for x in qkv if x.grad is not None)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case",
    [
        Case(mask="causal"),
        Case(mask="padding", softmax="learnable"),
        Case("thd_thd_thd", "padding_causal", (2, 0)),
        Case("sbhd_sbhd_sbhd", "no_mask", (2, 1), bias_type="alibi"),
    ],
    ids=str,
)
def test_gradients(case: Case) -> None:
    module = module_of(of_module(case))
    expected = results(module, of_module(case))
    found = results(traced(module), of_module(case))
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_numbers_of_modules_may_differ() -> None:
    """The second module's dropout is a symbol; both return what they do untraced."""
    for dropout in (0.0, 0.25):
        case = Case(mask="causal", dropout=dropout)
        module = module_of(case, return_max_logit=dropout > 0)
        out, *_ = results(traced(module), case)
        assert out.shape == (3, 6, 32) and out.any()


def test_switches_are_read_when_a_call_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in te_kit.SWITCHES:
        monkeypatch.setenv(name, "0")
    case = Case(mask="causal")
    with pytest.raises(Exception, match="no backend may compute this call"):
        traced(module_of(case))(*te_kit.operands(case, dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("paged", [False, True])
def test_steps_of_a_cache(paged: bool) -> None:
    module = te.DotProductAttention(
        4, 8, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="padding_causal"
    ).eval()
    pages = {"is_paged": True, "page_size": 4, "total_num_pages": 16} if paged else {}
    caches = [te.InferenceParams(2, 32, 2, 8, torch.float32, **pages) for _ in range(2)]
    for each in caches:
        each.allocate_memory(1)
    compiled = traced(module)
    for number, count in enumerate((4, 1, 1)):
        q = te_kit.randn(2, count, 4, 8, seed=number, dtype=torch.float32)
        k, v = (te_kit.randn(2, count, 2, 8, seed=n + number, dtype=torch.float32) for n in (5, 9))
        found = []
        for call, cache in zip((module, compiled), caches, strict=True):
            cache.pre_step(OrderedDict({1: count, 2: count}))
            with torch.no_grad():
                found.append(call(q, k, v, inference_params=cache))
        assert torch.equal(*found)

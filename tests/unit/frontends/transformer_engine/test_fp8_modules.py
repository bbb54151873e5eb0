"""`te.DotProductAttention` under recipes of `attngen.fp8`."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen import SpecError, fp8, te
from tests.support import te_kit
from tests.support.te_kit import Case, Shape, module_of


def test_modules_follow_recipes_of_fp8_and_functions_do_not() -> None:
    shape = Shape(dim=16, dim_v=16)
    case = Case(mask="causal", shape=shape)
    module = module_of(case)
    q, k, v = (x.requires_grad_() for x in te_kit.operands(case, dtype=torch.bfloat16))
    given = dict(mask="causal", softmax_scale=0.25)
    ends = [te_kit.cumulative(x) for x in case.lengths()]

    def fused() -> Tensor:
        return te.fused_attn_fwd(
            True, 6, 9, *ends, q, k, v, q.dtype, 1, qkv_layout=case.layout, o_format="bshd",
            attn_mask_type="causal",
        )[0]  # fmt: skip

    plain = fused()
    with fp8.autocast():
        out = module(q, k, v)
        assert torch.equal(out, attngen.attention(q, k, v, **given).flatten(-2))
        assert torch.equal(fused(), plain)
    assert not torch.equal(out, plain.flatten(-2))
    out.float().sum().backward()
    assert q.grad.dtype == torch.bfloat16 and v.grad.any()
    with fp8.autocast(recipe=fp8.Float8CurrentScaling(fp8_dpa=False)):
        assert torch.equal(module(q, k, v), plain.flatten(-2))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_modules_keep_histories_of_recipes_in_their_state(checkpointed: bool) -> None:
    case = Case(mask="causal", shape=Shape(dim=16, dim_v=16))
    recipe = fp8.DelayedScaling(amax_history_len=4, backward="fp8")
    results = []
    qkv = te_kit.operands(case, dtype=torch.bfloat16)
    module, layer = module_of(case), fp8.Attention(4)
    for _ in range(2):
        for attend in (module, layer):
            tensors = [x.detach().requires_grad_() for x in qkv]
            given: dict[str, Any] = {"checkpoint_core_attention": checkpointed}
            if attend is layer:
                given = {"mask": "causal", "softmax_scale": 0.25}
            with fp8.autocast(recipe=recipe):
                out = attend(*tensors, **given)
            out.float().square().sum().backward()
            results.append(
                [out.flatten(-2) if attend is layer else out, *[x.grad for x in tensors]]
            )
    ours, theirs, *later = results
    assert all(map(torch.equal, ours, theirs)) and all(map(torch.equal, *later))
    copy = module_of(case)
    copy.load_state_dict(module.state_dict())
    with fp8.autocast(recipe=recipe):
        assert torch.equal(copy(*qkv), module(*qkv))
        longer = fp8.DelayedScaling(amax_history_len=8)
    with fp8.autocast(recipe=longer):
        copy(*qkv)
    found = torch.load(io.BytesIO(bytes(copy.get_extra_state().tolist())[12:]), weights_only=True)
    assert found["scales.amax_history"].shape == (8, 3)


def test_modules_return_fp8_where_the_recipe_says_so() -> None:
    case = Case(mask="causal", shape=Shape(dim=16, dim_v=16))
    module, tensors = module_of(case), te_kit.operands(case, dtype=torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in tensors)
    plain = module(q, k, v, fp8_output=True)
    assert type(plain) is Tensor
    with fp8.autocast(recipe=fp8.Float8CurrentScaling(fp8_mha=True)):
        out, wide = module(q, k, v, fp8_output=True), module(q, k, v)
        store = fp8.CurrentQuantizer(torch.float8_e4m3fn)
        again = module(store(q), store(k), store(v))
    assert isinstance(out, fp8.Float8Tensor) and out.dtype == torch.bfloat16
    assert torch.allclose(out.dequantize(), wide, rtol=0.07, atol=1e-2)
    out.dequantize().sum().backward()
    assert q.grad.any() and again.shape == wide.shape
    with fp8.autocast(), pytest.raises(SpecError, match="fp8_mha=True"):
        module(q, k, v, fp8_output=True)

"""FP8 calls that do not fit together, and FP8's arguments beside 16 bits, are refused."""

from __future__ import annotations

import pytest
import torch

from attngen.errors import SpecError
from attngen.reference import attention, fp8

E4M3, E5M2 = fp8.DTYPES
X = torch.zeros(2, 5, 4, 16)
KV = X[:, :, :2]
ONE = torch.ones(1)
FP8 = {"q": X.to(E4M3), "k": KV.to(E4M3), "v": KV.to(E4M3)}
HALF = {"q": X.half(), "k": KV.half(), "v": KV.half()}
CACHE = FP8 | {"q": X.half()}

# What is asked, and words that the refusal must contain.
REFUSED = {
    "k_16_bit": (FP8 | {"k": KV.half()}, ["float8_e4m3fn, float16, float8_e4m3fn"]),
    "q_32_bit": (FP8 | {"q": X}, ["k and v alike", "float32, float8_e4m3fn"]),
    "v_16_bit": (HALF | {"k": KV.to(E4M3)}, ["k and v alike", "float16, float8_e4m3fn, float16"]),
    "k_and_v_differ": (FP8 | {"v": KV.to(E5M2)}, ["in k and v alike", "float8_e5m2. Cast"]),
    "cache_and_v_differ": (CACHE | {"v": KV.to(E5M2)}, ["in k and v alike", "float8_e5m2. Cast"]),
    "cache_descale_q": (CACHE | {"descale_q": ONE}, ["descale_q belongs", "q is float16"]),
    "cache_scale_s": (CACHE | {"scale_s": ONE, "descale_s": ONE}, ["scale_s", "descale_s"]),
    "cache_descale_shape": (CACHE | {"descale_k": torch.ones(2, 4)}, ["descale_k needs", "[2, 4]"]),
    "cache_output": (CACHE | {"out_dtype": E4M3}, ["out_dtype", "q is float16"]),
    "cache_amax": (CACHE | {"return_amax": True}, ["return_amax", "float16"]),
    "cache_gradient": (CACHE | {"q": X.half().requires_grad_()}, ["no backward", "no_grad"]),
    "descale_number": (FP8 | {"descale_q": 1.0}, ["descale_q needs float32 [1]", "got 1.0"]),
    "descale_dtype": (FP8 | {"descale_k": ONE.int()}, ["descale_k needs", "got int32 [1]"]),
    "descale_scalar": (FP8 | {"descale_v": torch.tensor(1.0)}, ["descale_v", "got float32 []"]),
    "descale_query_heads": (
        FP8 | {"descale_q": torch.ones(2, 4)},
        ["descale_q needs float32 [1] or [b=2, h_kv=2]", "[2, 4]"],
    ),
    "descale_device": (FP8 | {"descale_q": ONE.to("meta")}, ["descale_q needs q's device"]),
    "scale_s_per_head": (
        FP8 | {"scale_s": torch.ones(2, 2), "descale_s": ONE},
        ["scale_s needs float32 [1]; got float32 [2, 2]"],
    ),
    "scale_s_alone": (FP8 | {"scale_s": ONE}, ["belong together", "got scale_s alone"]),
    "descale_s_alone": (FP8 | {"descale_s": ONE}, ["belong together", "got descale_s alone"]),
    "scale_o_16_bit_output": (FP8 | {"scale_o": ONE}, ["scale_o", "out_dtype=bfloat16"]),
    "scale_o_dtype": (
        FP8 | {"scale_o": ONE.long(), "out_dtype": E4M3},
        ["scale_o needs float32 [1]", "int64 [1]"],
    ),
    "out_dtype_float32": (FP8 | {"out_dtype": torch.float32}, ["out_dtype", "torch.float32"]),
    "out_dtype_name": (FP8 | {"out_dtype": "bf16"}, ["out_dtype", "'bf16'"]),
    "gradient": (FP8 | {"descale_q": ONE.clone().requires_grad_()}, ["no backward", "no_grad"]),
    "half_descale": (HALF | {"descale_v": ONE}, ["descale_v belongs to FP8", "q is float16"]),
    "half_scale_s": (HALF | {"scale_s": ONE, "descale_s": ONE}, ["scale_s belongs", "descale_s"]),
    "half_scale_o": (HALF | {"scale_o": ONE}, ["scale_o belongs to FP8"]),
    "half_amax": (HALF | {"return_amax": True}, ["return_amax", "float16"]),
    "half_out_dtype": (HALF | {"out_dtype": torch.bfloat16}, ["out_dtype", "q is float16"]),
    "half_out_fp8": (HALF | {"out_dtype": E4M3}, ["out_dtype", "float8_e4m3fn"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_fp8_inconsistent_call_is_refused_with_reason(case):
    asked, words = REFUSED[case]
    with pytest.raises(SpecError) as caught:
        attention(**asked)
    reason = str(caught.value)
    assert all(word in reason for word in words), reason


def test_fp8_several_violations_are_reported_together():
    wrong = {"descale_q": 1.0, "scale_s": ONE, "out_dtype": torch.int8, "descale_k": ONE.int()}
    with pytest.raises(SpecError) as caught:
        attention(**FP8, **wrong)
    assert len(caught.value.reasons) == 4
    with pytest.raises(SpecError) as caught:
        attention(**HALF, descale_q=ONE, scale_o=ONE, return_amax=True, out_dtype=E4M3)
    assert len(caught.value.reasons) == 4


ACCEPTED = {
    "plain": {},
    "e5m2_kv": {"k": KV.to(E5M2), "v": KV.to(E5M2)},
    "one_of_each_scale": {
        **{name: ONE for name in ("descale_q", "descale_k", "descale_v")},
        **{"scale_s": ONE, "descale_s": ONE, "scale_o": ONE, "out_dtype": E4M3},
    },
    "per_head": {"descale_q": torch.ones(2, 2), "descale_k": ONE, "descale_v": torch.ones(2, 2)},
    "out_e5m2": {"out_dtype": E5M2, "return_amax": True},
    "out_float16": {"out_dtype": torch.float16},
    "any_head_dim": {"q": X[..., :3].to(E4M3), "k": KV[..., :3].to(E4M3)},
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_fp8_legal_call_is_accepted(case):
    out, _ = attention(**(FP8 | ACCEPTED[case]))
    assert not out.float().any()


def test_half_out_dtype_of_its_own_is_accepted():
    out, _ = attention(**HALF, out_dtype=torch.float16)
    assert out.dtype == torch.float16


def test_fp8_gradient_switched_off_runs():
    with torch.no_grad():
        attention(**FP8, descale_q=ONE.clone().requires_grad_())

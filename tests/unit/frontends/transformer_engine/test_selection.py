"""The choice of a backend: what kernels serve, rules and their reasons, environment variables."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attngen import fp8, te
from attngen.call.routing import no_kernels
from attngen.frontends.transformer_engine import environment
from attngen.frontends.transformer_engine.kernels import Question, refusals

F16, NONE = te.FusedAttnBackend.F16_arbitrary_seqlen, te.FusedAttnBackend.No_Backend
PLAIN = Question(
    True, te.DType.kBFloat16, te.DType.kBFloat16, "bshd_bshd_bshd", "no_bias", "no_mask", "vanilla",
    0.0, 16, 16, 512, 512, 128, 128, -1, -1, False, False, False,
)  # fmt: skip
PARAMS = te.AttentionParams(qkv_layout="bshd_bshd_bshd", attn_mask_type="causal")

WIDE = fp8.Float8CurrentScaling()  # with gradients in 16 bits
# A call that kernels have no gradients of in 8 bits.
WIDE_BIAS: dict[str, Any] = {
    **{"head_dim_qk": 256, "head_dim_v": 256},
    "core_attention_bias_type": "post_scale_bias",
}
E4M3 = te.DType.kFloat8E4M3


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling:
    """A recipe of TransformerEngine's, by its name."""

    fp8_dpa: bool = True


def ask(**changes: Any) -> te.FusedAttnBackend:
    values = dataclasses.astuple(replace(PLAIN, **changes))
    assert len(values) == 19
    return te.get_fused_attn_backend(*values)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


# What TransformerEngine's fused attention refuses on Hopper, with any cuDNN.
REFUSED_THERE: list[dict[str, Any]] = [
    {"bias_type": "alibi", "mask_type": "padding"},
    {"bias_type": "alibi", "mask_type": "no_mask"},
    {"bias_type": "pre_scale_bias"},
    {"bias_type": "post_scale_bias", "mask_type": "padding_causal"},
    {"bias_type": "post_scale_bias", "mask_type": "causal", "window_left": 64, "window_right": 0},
    {"p_dropout": 0.1, "mask_type": "causal", "window_left": 64, "window_right": 0},
    {"p_dropout": 0.1, "mask_type": "padding"},
    {"p_dropout": 0.1, "mask_type": "causal_bottom_right"},
    {"mask_type": "causal_bottom_right", "max_seqlen_q": 600},
    {"softmax_type": "learnable", "deterministic": True},
    {"bias_type": "post_scale_bias", "deterministic": True},
    {"head_dim_qk": 129, "head_dim_v": 65},
    {"head_dim_qk": 256, "head_dim_v": 136},
    {"qkv_layout": "t3hd", "mask_type": "causal"},
]


@pytest.mark.parametrize("changes", REFUSED_THERE, ids=str)
def test_kernels_serve_what_is_refused_elsewhere(changes: dict[str, Any]) -> None:
    assert ask(**changes) == F16


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim_qk": 520, "head_dim_v": 520},
        {"q_dtype": E4M3, "kv_dtype": E4M3, "head_dim_qk": 256, "bias_type": "post_scale_bias"},
        {"q_dtype": torch.float32, "kv_dtype": torch.float32},
        {"qkv_layout": "paged_kv_bshd_bshd_bshd", "mask_type": "padding"},
        {"mask_type": "causal", "head_dim_qk": 1024, "head_dim_v": 1024, "is_training": False},
    ],
    ids=str,
)
def test_kernels_do_not_serve(changes: dict[str, Any]) -> None:
    assert ask(**changes) == NONE
    assert refusals(replace(PLAIN, **changes))


def test_inference_has_wider_heads_and_pages() -> None:
    wide = {"head_dim_qk": 576, "head_dim_v": 512, "is_training": False}
    assert ask(**wide, max_seqlen_q=1) == F16
    assert ask(**wide) == F16
    assert ask(**{**wide, "is_training": True}) == NONE
    assert ask(**{**wide, "head_dim_qk": 512, "is_training": True}) == F16
    pages = {"qkv_layout": "paged_kv_thd_bshd_bshd", "mask_type": "padding", "is_training": False}
    assert ask(**pages) == F16


def test_numbers_members_and_names_are_one() -> None:
    numbers = ask(
        qkv_layout=te.QKVLayout["thd_t2hd"], bias_type=3, mask_type=te.AttnMaskType["padding"],
        softmax_type=2, q_dtype=6, kv_dtype=torch.bfloat16,
    )  # fmt: skip
    assert numbers == ask(
        qkv_layout="thd_t2hd", bias_type="alibi", mask_type="padding", softmax_type="learnable"
    )
    for wrong in ({"qkv_layout": "bsd"}, {"mask_type": 9}, {"bias_type": "x"}, {"q_dtype": 77}):
        with pytest.raises(KeyError):
            ask(**wrong)


def test_every_layout_has_kernels_in_inference() -> None:
    for name in te.QKVLayouts:
        padded = "thd" in name or "paged" in name
        mask = "padding" if padded else "causal"
        assert ask(qkv_layout=name, mask_type=mask, is_training=False) == F16, name


def test_other_devices_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    assert refusals(PLAIN) == [no_kernels("the current device")]


def test_named_architecture_is_asked_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.targets.target.NAMED", "sm_80")
    assert refusals(PLAIN) == []
    in_8_bits = replace(PLAIN, q_dtype=E4M3, kv_dtype=E4M3)
    assert any("sm_80" in reason for reason in refusals(in_8_bits))


def test_fused_comes_before_flash_and_flash_before_unfused(monkeypatch: Any) -> None:
    chosen = te.get_attention_backend(PARAMS)
    assert chosen.use_fused_attention and not chosen.use_flash_attention
    assert chosen.fused_attention_backend == F16
    assert chosen.available_backends == [True, True, True]
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    chosen = te.get_attention_backend(PARAMS)
    assert chosen.use_flash_attention and str(chosen.flash_attention_backend) == "3.0.0"
    assert chosen.fused_attention_backend is None and not chosen.use_unfused_attention
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    chosen = te.get_attention_backend(PARAMS)
    assert chosen.use_unfused_attention and chosen.available_backends == [False, False, True]
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    assert te.get_attention_backend(PARAMS).available_backends == [False] * 3


@pytest.mark.parametrize(
    ("changes", "available"),
    [
        ({"core_attention_bias_type": "post_scale_bias"}, [False, True, True]),
        ({"core_attention_bias_type": "alibi"}, [True, True, True]),
        ({"softmax_type": "learnable"}, [False, True, True]),
        ({"return_max_logit": True}, [False, True, True]),
        ({"attn_mask_type": "arbitrary"}, [False, True, True]),
        ({"num_splits": 2}, [True, True, True]),
        ({"head_dim_qk": 1024, "head_dim_v": 1024}, [False, False, True]),
        ({"qkv_dtype": torch.float32}, [False, False, True]),
        ({"qkv_dtype": torch.uint8}, [False, False, False]),
        ({"fp8": True}, [False, True, True]),
        ({"fp8": True, "head_dim_qk": 256, "head_dim_v": 256}, [False, True, True]),
        ({"fp8": True, **WIDE_BIAS}, [False, False, True]),
        ({"fp8": True, **WIDE_BIAS, "fp8_meta": {"recipe": WIDE}}, [False, True, True]),
        ({"fp8": True, "is_training": False, "head_dim_qk": 256}, [False, True, True]),
        ({"fp8": True, "qkv_dtype": torch.float8_e4m3fn}, [False, True, True]),
        (
            {"fp8": True, "qkv_dtype": torch.float8_e4m3fn, "fp8_meta": {"recipe": WIDE}},
            [False, True, True],
        ),
        ({"qkv_dtype": torch.float8_e4m3fn}, [False, True, True]),
        ({"fp8": True, "fp8_meta": {"recipe": MXFP8BlockScaling()}}, [False, False, False]),
        ({"fp8": True, "fp8_output": True, "fp8_meta": {"recipe": WIDE}}, [False, False, False]),
        ({"fp8": True, "fp8_meta": {"recipe": SimpleNamespace(fp8_dpa=False)}}, [True, True, True]),
        ({"context_parallel": True}, [False, False, False]),
        ({"has_score_mod": True}, [False, False, False]),
        ({"inference_params": SimpleNamespace(), "attn_mask_type": "no_mask"}, [True, True, True]),
        ({"attn_mask_type": "padding", "cuda_graph": True}, [True, True, False]),
        ({"deterministic": True, "attention_dropout": 0.1}, [True, True, True]),
    ],
    ids=str,
)
def test_rules(changes: dict[str, Any], available: list[bool]) -> None:
    assert te.get_attention_backend(replace(PARAMS, **changes)).available_backends == available


def test_versions_of_flash_attention_have_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.FLASH_SWITCHES:
        flash, *_ = te.get_attention_backend(PARAMS).available_backends
        assert flash
        monkeypatch.setenv(name, "0")
    flash, *_ = te.get_attention_backend(PARAMS).available_backends
    assert not flash


def test_debugging_says_why(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("DotProductAttention")
    monkeypatch.setattr(logger, "level", logger.level)
    wide = replace(PARAMS, head_dim_qk=1024, head_dim_v=1024)
    te.get_attention_backend(wide)
    assert not caplog.records
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", "2")
    te.get_attention_backend(wide)
    assert "head_dim_qk=1024" in caplog.text
    assert "Disabling FusedAttention: head_dim 1024: kernels exist for 1 to 576" in caplog.text
    assert "Selected backend = UnfusedDotProductAttention" in caplog.text


def test_fp8_backend_is_chosen_where_kernels_have_both_directions(monkeypatch: Any) -> None:
    eight = replace(PARAMS, fp8=True)
    assert te.get_attention_backend(eight).fused_attention_backend is te.FusedAttnBackend.FP8
    wide = replace(eight, **WIDE_BIAS)
    assert not te.get_attention_backend(wide).use_fused_attention
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "0")
    assert te.get_attention_backend(wide).use_fused_attention, "a backward in 16 bits serves it"
    assert ask(q_dtype=7, kv_dtype=te.DType.kFloat8E4M3) is te.FusedAttnBackend.FP8
    assert ask(q_dtype=7, kv_dtype=7, head_dim_qk=256, bias_type="post_scale_bias") is NONE


def test_params_are_equal_whose_recipes_are() -> None:
    one = replace(PARAMS, fp8_meta={"recipe": 1, "more": 2})
    assert one == replace(PARAMS, fp8_meta={"recipe": 1})
    assert one != replace(PARAMS, fp8_meta={"recipe": 2}) and one != PARAMS
    assert PARAMS != 1

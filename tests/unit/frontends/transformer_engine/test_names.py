"""Names and numbers of TransformerEngine's enumerations."""

from __future__ import annotations

from enum import IntEnum

import pytest
import torch

import attngen
from attngen import te


class Foreign(IntEnum):
    """An enumeration of another package, equal by value."""

    NVTE_FP8 = 2


def test_numbers() -> None:
    assert {str(name): int(x) for name, x in te.QKVFormat.items()} == {
        "None": 8, "sbhd": 0, "bshd": 1, "thd": 2, "bshd_2sbhd": 3, "sbhd_2bshd": 4, "thd_2bshd": 5,
        "thd_2sbhd": 6, "bhsd": 7,
    }  # fmt: skip
    known = {name: int(x) for name, x in te.QKVLayout.items()}
    assert len(known) == 26 and [*known.values()] == [*range(26)]
    some = {"sb3hd": 0, "bs3hd": 5, "thd_thd_thd": 14, "thd_sbhd_sbhd": 18, "bhsd_bhsd_bhsd": 25}
    some |= {"paged_kv_bshd_bshd_bshd": 19, "paged_kv_thd_sbhd_sbhd": 24}
    assert {name: known[name] for name in some} == some
    assert {name: int(x) for name, x in te.AttnBiasType.items()} == {
        "no_bias": 0, "pre_scale_bias": 1, "post_scale_bias": 2, "alibi": 3,
    }  # fmt: skip
    assert {name: int(x) for name, x in te.AttnMaskType.items()} == {
        "no_mask": 0, "padding": 1, "causal": 2, "padding_causal": 3, "causal_bottom_right": 4,
        "padding_causal_bottom_right": 5,
    }  # fmt: skip
    assert {name: int(x) for name, x in te.SoftmaxType.items()} == {
        "vanilla": 0, "off-by-one": 1, "learnable": 2,
    }  # fmt: skip
    assert [te.META_QKV, te.META_O, te.META_S] == [2, 3, 8]
    assert [te.META_DQKV, te.META_DO, te.META_DP] == [0, 3, 5]


def test_backends() -> None:
    assert te.FusedAttnBackend["FP8"] == 2 and te.FusedAttnBackend["No_Backend"] == -1
    assert te.FusedAttnBackend.cast(Foreign.NVTE_FP8) is te.FusedAttnBackend.FP8
    assert te.FusedAttnBackend.cast(1) is te.FusedAttnBackend.F16_arbitrary_seqlen
    with pytest.raises(ValueError):
        te.FusedAttnBackend.cast(7)


def test_dtypes() -> None:
    assert te.TE_DType[torch.bfloat16] is te.DType.kBFloat16 == 6
    assert te.TE_DType_To_Torch[te.DType.kFloat8E5M2] is torch.float8_e5m2
    assert te.DType.cast(7) is te.DType.kFloat8E4M3


def test_formats() -> None:
    assert te.get_qkv_format("bs3hd") == ("bshd", "bshd", "bshd")
    assert te.get_qkv_format("thd_bshd_bshd", object()) == ("thd_2bshd", "thd", "bshd")
    with pytest.raises(KeyError):
        te.get_qkv_format("bsd")


def test_the_front_end_has_two_names() -> None:
    assert attngen.te is attngen.transformer_engine
    assert {"te", "transformer_engine"} <= {*dir(attngen)}
    assert [name for name in te.__all__ if not hasattr(te, name)] == []

"""Faults that kernels cannot take, of described calls."""

from __future__ import annotations

from typing import Any

import pytest

from attngen.call.checks import violations
from attngen.call.numbers import Arguments
from attngen.call.operands import extents_of, outputs_of, unpacked
from attngen.call.table import INPUTS, OPTIONAL
from attngen.call.tensors import TensorDesc
from attngen.spec import layouts

BATCH, LENGTH, HEADS, DIM = 2, 30, 4, 64
E4M3 = "float8_e4m3fn"
PACKED = [name for name in layouts.NAMES if name.startswith("t") and "paged" not in name]
SIZES = {"b": BATCH, "s": LENGTH, "h": HEADS, "d": DIM, "t": 2 * LENGTH, "2": 2, "3": 3}
SIZES |= {"pages": 9, "page_size": 16}
ENDS = TensorDesc.contiguous((BATCH + 1,), "int32")


def of(*shape: int, dtype: str = "float32", device: str | None = None) -> TensorDesc:
    return TensorDesc.contiguous(shape, dtype, device)


def carriers(name: str, dtype: str) -> list[TensorDesc | None]:
    """q, k and v as the layout has them."""
    layout = layouts.parse(name)
    return [
        of(*[SIZES[axis] for axis in layouts.axes_of(layout, x)], dtype=dtype)
        if layout.home(x) in ((x, 0, 0), (x, layout.home(x)[1], 0))
        else None
        for x in "qkv"
    ]


def faults(
    arguments: dict[str, Any] | None = None, dtype: str = "bfloat16", **given: TensorDesc
) -> list[str]:
    """Every fault of a call with these tensors; what is not given is as it should be."""
    asked = Arguments(**{"layout": "bshd", **(arguments or {})})
    named = dict(zip("qkv", carriers(asked.layout, dtype), strict=True)) | given
    q, k, v = unpacked(named["q"], named["k"], named["v"], asked.layout)  # type: ignore[type-var]
    assert q is not None and k is not None and v is not None
    out, _ = outputs_of(q, v, asked)
    tensors = {"q": q, "k": k, "v": v, "o": out}
    optional = dict.fromkeys(OPTIONAL) | {n: x for n, x in given.items() if n not in "qkv"}
    return violations(tensors, extents_of(tensors, asked.layout), optional, asked)


def test_plain_calls_have_no_faults() -> None:
    assert not faults() and not faults(dtype=E4M3)
    assert [*INPUTS[:3]] == [*"qkv"]


@pytest.mark.parametrize(
    ("faulty", "reason"),
    [
        ({"dtype": "int8"}, "q, k and v need one dtype of float16, bfloat16"),
        ({"k": of(2, 30, 4, 64, dtype="float16")}, "need one dtype"),
        ({"descale_q": of(1)}, "descale_q belongs to FP8 q, k and v; q is bfloat16"),
        ({"arguments": {"amax": True}}, "the maxima belong to FP8"),
        ({"arguments": {"out_dtype": "float64"}}, "out_dtype=float64: beside bfloat16"),
        ({"dtype": E4M3, "arguments": {"out_dtype": "float32"}}, "out_dtype beside FP8"),
        ({"dtype": E4M3, "scale_o": of(1)}, "scale_o scales an FP8 output"),
        ({"dtype": E4M3, "descale_k": of(2, 3)}, r"descale_k needs float32 [1] or [b=2, h_kv=4]"),
        ({"dtype": E4M3, "descale_k": of(1, dtype="float64")}, "descale_k needs float32"),
        ({"dtype": E4M3, "scale_s": of(1)}, "scale_s and descale_s belong together"),
        ({"cu_seqlens_q": ENDS}, "cu_seqlens_q belongs to thd here"),
        ({"seqused_q": of(2, dtype="int64")}, "seqused_q needs int32 [b] with b=2; got int64 [2]"),
        ({"seqused_kv": TensorDesc((2,), (2,), "int32")}, "seqused_kv has stride 2"),
        ({"arguments": {"mask": "padding"}}, "needs the lengths of k and v"),
        ({"k": of(3, 30, 4, 64, dtype="bfloat16")}, "batch: q has 2 sequences, k has 3"),
        ({"v": of(2, 31, 4, 64, dtype="bfloat16")}, "batch, length and heads do not agree"),
        ({"q": of(2, 30, 4, 72, dtype="bfloat16")}, "head dims of q and k differ: 72 and 64"),
        ({"q": of(2, 30, 6, 64, dtype="bfloat16")}, "6 query heads are not a multiple of 4"),
        ({"alibi_slopes": of(3)}, "alibi_slopes needs float32 [h_q=4] or [b=2, h_q=4]"),
        ({"sink": of(4)}, "sink belongs to softmax='learnable'"),
        ({"sink": of(3), "arguments": {"softmax": "learnable"}}, "sink needs float32 [h_q=4]"),
        ({"alibi_slopes": TensorDesc((4,), (1 << 30,), "float32")}, "reach beyond 2^31"),
        ({"arguments": {"dropout_p": 1.5}}, "dropout_p=1.5: kernels take a probability"),
        ({"arguments": {"dropout_p": 0.5}}, "needs rng_state, contiguous int64 [2]; got None"),
        ({"rng_state": of(2), "arguments": {"dropout_p": 0.5}}, "got float32 [2]"),
        ({"arguments": {"mask": "arbitrary"}}, "mask='arbitrary' needs attn_mask"),
        ({"attn_mask": of(30, 30)}, "attn_mask needs bool, a broadcast of [2, 4, 30, 30]"),
        ({"bias": of(30, 31, dtype="bfloat16")}, "bias needs bfloat16, a broadcast"),
        ({"arguments": {"bias_type": "alibi"}}, "bias_type='alibi': kernels take one of"),
        ({"schedule": of(3, 5, 4)}, "schedule needs contiguous int32 [3, 5, 4]"),
        ({"arguments": {"num_splits": 129}}, "num_splits=129 is no number of parts"),
        ({"arguments": {"num_splits": 2}, "dtype": E4M3}, "num_splits=2: kernels split the keys"),
        ({"sink": of(4, device="there")}, "sink is on there, q on None; move one"),
        ({"arguments": {"softmax_scale": -1.0}}, "softmax_scale=-1.0"),
        ({"arguments": {"softcap": -3.0}}, "softcap=-3.0"),
        (
            {"dtype": E4M3, "k": TensorDesc((2, 30, 4, 64), (7688, 256, 64, 1), E4M3)},
            "k: strides (7688, 256, 64, 1) of float8_e4m3fn; of FP8 operands all but the last",
        ),
        (
            {"dtype": E4M3, "v": TensorDesc((2, 30, 4, 64), (15360, 512, 128, 2), E4M3)},
            "v: the last axis has stride 2, needs 1",
        ),
    ],
    ids=str,
)
def test_fault_is_named(faulty: dict[str, Any], reason: str) -> None:
    assert reason in "; ".join(faults(**faulty))


def test_pages_have_tables_whose_entries_follow_each_other() -> None:
    name = "paged_kv_bshd_bshd_bshd"
    pages = {x: of(9, 16, 4, 64, dtype="bfloat16") for x in "kv"}
    pages |= {"q": of(2, 3, 4, 64, dtype="bfloat16"), "seqused_kv": of(2, dtype="int32")}

    def found(**tables: TensorDesc) -> str:
        return "; ".join(faults({"layout": name}, **pages, **tables))

    good = of(2, 5, dtype="int32")
    assert not found(page_table_k=good, page_table_v=good)
    wide = TensorDesc((2, 5), (1, 2), "int32")
    assert "page_table_v: a sequence's pages have stride 2" in found(
        page_table_k=good, page_table_v=wide
    )
    assert "needs page_table int32 [b=2, max_pages]" in found()
    long = of(2, 5, dtype="int64")
    assert "Cast it to torch.int32" in found(page_table_k=long, page_table_v=long)


@pytest.mark.parametrize("name", PACKED)
def test_descales_of_packed_sequences_are_one_for_each_and_head(name: str) -> None:
    given = {"cu_seqlens_q": ENDS}
    if layouts.parse(name).kv_format == "thd":
        given["cu_seqlens_kv"] = ENDS
    asked = {"layout": name, "out_dtype": "bfloat16"}
    assert not faults(asked, E4M3, **given, descale_k=of(BATCH, HEADS))
    assert "descale_k needs" in "; ".join(faults(asked, E4M3, **given, descale_k=of(1, HEADS)))


def test_mask_and_bias_may_reach_beyond_two_to_the_31_elements() -> None:
    """Kernels index them in 64 bits."""
    long = of(1, 50_000, HEADS, DIM, dtype="bfloat16")
    for name, dtype in (("attn_mask", "bool"), ("bias", "bfloat16")):
        large = {name: of(50_000, 50_000, dtype=dtype)}
        assert not faults(None, "bfloat16", **dict.fromkeys("qkv", long), **large)

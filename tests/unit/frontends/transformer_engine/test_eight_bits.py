"""`attngen.te` in FP8: the fused functions with quantizers, against float64 and the definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen import SpecError, fp8, reference, te
from attngen.spec import layouts
from tests.support import te_kit
from tests.support.te_kit import Case, Shape

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = te.FusedAttnBackend.FP8
SHAPE = Shape(dim=16, dim_v=16)


class Foreign:
    """A quantizer and a tensor as TransformerEngine has them: numbers as uint8, dtypes as ints."""

    def __init__(self, dtype: torch.dtype, scale: float) -> None:
        self.dtype = int(te.TE_DType[dtype])
        self.scale, self.amax = torch.tensor([scale]), torch.zeros(1)

    def __call__(self, x: Tensor) -> Any:
        stored = (x.float() * self.scale).to(te.TE_DType_To_Torch[te.DType(self.dtype)])
        return self.create_tensor_from_data(stored.view(torch.uint8), x.dtype)

    def create_tensor_from_data(self, data: Tensor, fake_dtype: torch.dtype) -> Any:
        made = fp8.Float8Tensor(
            data.view(te.TE_DType_To_Torch[te.DType(self.dtype)]), 1 / self.scale, fake_dtype
        )
        made._data, made._fp8_dtype = data, self.dtype
        return made


def numbers(x: Any) -> Tensor:
    """The numbers of an FP8 tensor of whatever kind, in float64; others as they are."""
    if not isinstance(x, fp8.Float8Tensor):
        return x.double()
    data = x._data
    if data.dtype == torch.uint8:
        data = data.view(te.TE_DType_To_Torch[te.DType(x._fp8_dtype)])
    return data.double() * x._scale_inv.double()


def delayed(dtype: torch.dtype, scale: float) -> fp8.Quantizer:
    made = fp8.Quantizer(dtype)
    made.set_scale(torch.tensor([scale]))
    return made


KINDS: dict[str, Any] = {
    "delayed": delayed,
    "foreign": Foreign,
    "current": lambda dtype, scale: fp8.CurrentQuantizer(dtype),
}
CASES = {
    "delayed": Case(mask="causal", shape=SHAPE, softmax="learnable"),
    "foreign": Case("thd_thd_thd", "padding_causal", shape=SHAPE, gaps=True),
    "current": Case("sbhd_sbhd_sbhd", "causal_bottom_right", (3, 0), shape=SHAPE),
}


def both(case: Case, qkv: Any, d_o: Any, *, dtype: Any, of_forward: Any, of_backward: Any) -> Any:
    """Output and gradients by the fused functions; quantizers by their names."""
    axes = layouts.parse(case.layout).q_format
    shared: dict[str, Any] = dict(
        max_seqlen_q=6, max_seqlen_kv=9, fake_dtype=dtype, fused_attention_backend=1,
        qkv_layout=case.layout, o_format=axes, attn_mask_type=case.mask,
        softmax_type=case.softmax, window_size=case.window,
        **dict(zip("qkv", qkv, strict=True)),
    )  # fmt: skip
    for name, lengths in zip(("q", "kv"), case.lengths(), strict=True):
        shared[f"cu_seqlens_{name}"] = te_kit.cumulative(lengths)
        if case.gaps:
            shared[f"cu_seqlens_{name}_padded"] = te_kit.cumulative([n + 2 for n in lengths])
    offset = te_kit.offset_of(case)
    o, aux = te.fused_attn_fwd(True, softmax_offset=offset, **shared, **of_forward)
    found = te.fused_attn_bwd(
        o=o, d_o=d_o, aux_ctx_tensors=aux, do_format=axes, dqkv_layout=case.layout, **shared,
        **of_backward,
    )  # fmt: skip
    return o, *found


def compared(case: Case, make: Any, dqkv: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Results in 8 bits and in float64 of what the operands stand for, and the quantizers."""
    tensors = te_kit.operands(case, gap=2 * case.gaps, dtype=torch.bfloat16)
    store, store_d_o = fp8.CurrentQuantizer(E4M3), fp8.CurrentQuantizer(E5M2)
    qkv = [store(x.nan_to_num()) for x in tensors]
    q, _, _ = qkv
    d_o = store_d_o(te_kit.randn(*q.shape, seed=8, dtype=torch.bfloat16))
    made = {"s": make(E4M3, 256.0), "o": make(E4M3, 64.0), "dp": delayed(E5M2, 512.0)}
    made["dqkv"] = dqkv
    found = both(
        case, qkv, d_o, dtype=torch.bfloat16,
        of_forward={f"{name}_quantizer": made[name] for name in ("s", "o")},
        of_backward={f"{name}_quantizer": made[name] for name in ("s", "dp", "dqkv")},
    )  # fmt: skip
    wide = [numbers(x) for x in qkv]
    wanted = both(case, wide, numbers(d_o), dtype=torch.float64, of_forward={}, of_backward={})
    return found, wanted, made


@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_fp8_tensors_are_near_float64(kind: str) -> None:
    case, make = CASES[kind], KINDS[kind]
    found, wanted, made = compared(case, make, make(E5M2, 64.0))
    for got, expected in zip(found, wanted, strict=True):
        if expected is None:
            assert got is None
            continue
        error = (numbers(got) - expected).norm() / expected.norm()
        assert error < 0.15, error
    o, dq, *_ = found
    in_8_bits = kind != "current"
    assert isinstance(o, fp8.Float8Tensor) == isinstance(dq, fp8.Float8Tensor) == in_8_bits
    assert o.dtype == dq.dtype == torch.bfloat16
    amax = wanted[0].abs().max()
    assert (made["o"].amax - amax).abs() < 0.1 * amax and made["s"].amax == 1
    assert made["dp"].amax > 0
    largest = max(float(numbers(x).abs().max()) for x in found[1:4])
    assert abs(float(made["dqkv"].amax) - largest) < 0.13 * largest


def test_packed_gradients_are_views_of_one_buffer() -> None:
    case = Case("bs3hd", "causal", shape=SHAPE.self_attention)
    found, wanted, _ = compared(case, delayed, delayed(E5M2, 64.0))
    _, dq, dk, dv, *_ = found
    assert dq._data.untyped_storage().data_ptr() == dv._data.untyped_storage().data_ptr()
    assert dk._data.stride() == wanted[2].stride()


def test_tensors_of_pytorch_have_scales_of_one() -> None:
    case = Case(shape=SHAPE)
    tensors = te_kit.operands(case, dtype=torch.bfloat16)
    q, k, v = (x.to(E4M3) for x in tensors)
    ends = [te_kit.cumulative(x) for x in case.lengths()]
    o, aux = te.fused_attn_fwd(
        False, 6, 9, *ends, q, k, v, torch.float16, FP8, qkv_layout=case.layout, o_format="bshd",
        attn_mask_type="no_mask",
    )  # fmt: skip
    expected, by_products = reference.attention(q, k, v, out_dtype=torch.float16)
    assert torch.equal(o, expected) and torch.equal(aux[0].squeeze(-1), by_products.lse)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dp_quantizer": None}, "dp_quantizer is None"),
        ({"dp_quantizer": SimpleNamespace(dtype=E4M3)}, "dP has d_o's"),
        ({"d_o": torch.ones(3, 6, 4, 16)}, "d_o needs an FP8 tensor"),
        ({"k": torch.ones(3, 9, 2, 16)}, "k needs an FP8 tensor"),
    ],
    ids=["dp", "dtype", "d_o", "k"],
)
def test_backward_names_what_is_not_in_fp8(given: dict[str, Any], message: str) -> None:
    case = Case(shape=SHAPE)
    q, k, v = (x.to(E4M3) for x in te_kit.operands(case, dtype=torch.bfloat16))
    ends = [te_kit.cumulative(x) for x in case.lengths()]
    arguments: dict[str, Any] = {
        "max_seqlen_q": 6, "max_seqlen_kv": 9, "cu_seqlens_q": ends[0], "cu_seqlens_kv": ends[1],
        "q": q, "k": k, "v": v, "o": q, "d_o": q.to(E5M2), "fake_dtype": torch.bfloat16,
        "aux_ctx_tensors": [torch.zeros(3, 4, 6, 1), torch.zeros(2)],
        "fused_attention_backend": FP8, "qkv_layout": case.layout, "o_format": "bshd",
        "do_format": "bshd", "dqkv_layout": case.layout, "attn_mask_type": "no_mask",
        "dp_quantizer": delayed(E5M2, 1.0),
    }  # fmt: skip
    with pytest.raises(SpecError, match=message):
        te.fused_attn_bwd(**arguments | given)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("QKV_quantizer", [True, True, True], [False] * 3),
        ("S_quantizer", [True, False, False], [False] * 3),
        ("O_quantizer", [True, False, False], [False] * 3),
        ("dO_quantizer", [False] * 3, [True, False, False]),
        ("dP_quantizer", [False] * 3, [True, False, False]),
        ("dQKV_quantizer", [False] * 3, [True, True, True]),
    ],
)
def test_emulation_rounds_what_a_quantizer_names(
    name: str, forward: list[bool], backward: list[bool]
) -> None:
    tensors = [te_kit.randn(2, n, 5, seed=n, dtype=torch.bfloat16) for n in (3, 4, 4)]
    leaves = [x.clone().requires_grad_() for x in tensors]
    store = fp8.CurrentQuantizer(E4M3)
    found = te.FP8EmulationFunc.apply(*leaves, store, name, "bshd_bshd_bshd")
    gradients = torch.autograd.grad(found, leaves, tensors)
    joined = torch.cat([x.flatten() for x in tensors])
    of_all = store(joined).dequantize().split([x.numel() for x in tensors])
    for results, rounded in ((found, forward), (gradients, backward)):
        for got, given, part, changed in zip(results, tensors, of_all, rounded, strict=True):
            expected = part.view(given.shape) if all(rounded) else store(given).dequantize()
            assert torch.equal(got, expected if changed else given)


@pytest.mark.parametrize("kind", ["delayed", "current", "16 bits"])
def test_function_of_autograd_stores_by_its_quantizers(kind: str, monkeypatch: Any) -> None:
    case = Case("bs3hd", "causal", shape=SHAPE.self_attention, softmax="learnable")
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", str(int(kind != "16 bits")))
    make = KINDS["current" if kind == "current" else "delayed"]
    forward, backward = [None] * 9, [None] * 6
    forward[te.META_QKV], forward[te.META_O] = make(E4M3, 64.0), make(E4M3, 64.0)
    forward[te.META_S] = delayed(E4M3, 256.0)
    backward[te.META_DQKV], backward[te.META_DO] = make(E5M2, 64.0), make(E5M2, 64.0)
    backward[te.META_DP] = delayed(E5M2, 512.0)
    quantizers = {"scaling_fwd": forward, "scaling_bwd": backward}
    packed = torch.stack(te_kit.operands(case, dtype=torch.bfloat16), -3).requires_grad_()
    offset = te_kit.offset_of(case)
    assert offset is not None
    leaves = packed, offset.requires_grad_()
    results = []
    for fp8_output in (False, True, None):
        full = te_kit.cumulative([6] * case.shape.batch)
        views = packed.detach().unbind(-3)
        given = [
            True, 6, 6, full, full, None, None, None, None, *views, None, None, 0.0, True,
            case.layout, "no_bias", case.mask, case.softmax, (-1, 0), None, None, 1, False,
            fp8_output is not None, {}, quantizers, False, offset, bool(fp8_output), False, 1,
            False, packed, None,
        ]  # fmt: skip
        out = te.FusedAttnFunc.apply(*given)
        assert isinstance(out, fp8.Float8Tensor) == bool(fp8_output)
        d_o = te_kit.randn(*out.shape, seed=8, dtype=torch.bfloat16)
        plain = out.dequantize() if fp8_output else out
        results.append([plain.detach(), *torch.autograd.grad(plain, leaves, d_o)])
    for got in results[:2]:
        for found, wanted in zip(got, results[2], strict=True):
            assert (found - wanted).norm() < 0.2 * wanted.norm() and found.dtype == wanted.dtype
    assert forward[te.META_QKV].amax == packed.detach().abs().max()
    assert (backward[te.META_DP].amax > 0) == (kind != "16 bits")

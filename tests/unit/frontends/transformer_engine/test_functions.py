"""`te.fused_attn_fwd` and `te.fused_attn_bwd`, against a definition written out, in float64."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen import SpecError, te
from attngen.spec import layouts
from tests.support import te_kit
from tests.support.te_kit import Case, Shape, close

LAYOUTS = [name for name in te.QKVLayouts if not name.startswith("paged")]
BACKEND = te.FusedAttnBackend["F16_arbitrary_seqlen"]
MIXED = ("sbhd_bshd_bshd", "bshd_sbhd_sbhd", "thd_bshd_bshd", "thd_sbhd_sbhd")


def cases() -> list[Case]:
    """Each layout with each mask; what else they have goes round."""
    extras = cycle(
        [
            {},
            {"bias_type": "post_scale_bias"},
            {"softmax": "learnable", "window": (2, 0)},
            {"bias_type": "alibi", "dropout": 0.3},
            {"softmax": "off-by-one", "bias_type": "pre_scale_bias", "bias_shape": "bhss"},
            {"window": (3, 0), "dropout": 0.25, "bias_type": "post_scale_bias"},
            {"softmax": "learnable", "dropout": 0.5, "bias_type": "post_scale_bias"},
        ]
    )
    found = []
    for layout in LAYOUTS:
        packed = layouts.parse(layout).one_length
        shape = Shape().self_attention if packed else Shape()
        for mask in te.AttnMaskType:
            if "thd" in layout and "padding" not in mask:
                continue
            more: dict[str, Any] = next(extras)
            if "window" in more and "causal" not in mask:
                more = more | {"window": (2, 1), "bottom_right": True}
            gaps = "thd" in layout and layout not in MIXED and len(found) % 2 == 0
            found.append(Case(layout, mask, shape=shape, gaps=gaps, **more))
    return found


def words(case: Case) -> dict[str, Any]:
    """Arguments of both functions that name what a case asks for."""
    q_axes = layouts.parse(case.layout).q_format
    return {
        "qkv_layout": case.layout,
        "o_format": q_axes,
        "attn_bias_type": case.bias_type,
        "attn_mask_type": case.mask,
        "softmax_type": case.softmax,
        "window_size": case.window,
        "bottom_right_diagonal": case.bottom_right,
        "dropout": case.dropout,
    }


def lengths(case: Case) -> dict[str, Tensor]:
    """Cumulative lengths by their names, and where sequences with gaps begin."""
    found = {}
    for side, each in zip(("q", "kv"), case.lengths(), strict=True):
        found[f"cu_seqlens_{side}"] = te_kit.cumulative(each)
        if case.gaps:
            starts = te_kit.cumulative([n + 2 for n in each])
            found[f"cu_seqlens_{side}_padded"] = starts
    return found


def forward(case: Case, qkv: te_kit.Bhsd, **more: Any) -> tuple[Any, ...]:
    q, k, v = qkv
    s = case.shape
    given = {
        "is_training": True, "max_seqlen_q": s.queries, "max_seqlen_kv": s.keys, **lengths(case),
        "q": q, "k": k, "v": v, "fake_dtype": q.dtype, "fused_attention_backend": BACKEND,
        "attn_bias": te_kit.bias_of(case, q.dtype), "softmax_offset": te_kit.offset_of(case),
        **words(case), **more,
    }  # fmt: skip
    return te.fused_attn_fwd(**given)


def backward(case: Case, qkv: te_kit.Bhsd, o: Tensor, d_o: Tensor, aux: Any, **more: Any) -> Any:
    q, k, v = qkv
    s = case.shape
    given = words(case) | {"do_format": words(case)["o_format"], "dqkv_layout": case.layout}
    return te.fused_attn_bwd(
        max_seqlen_q=s.queries, max_seqlen_kv=s.keys, **lengths(case), q=q, k=k, v=v, o=o, d_o=d_o,
        fake_dtype=q.dtype, aux_ctx_tensors=aux, fused_attention_backend=BACKEND, **given | more,
    )  # fmt: skip


@pytest.mark.parametrize("case", cases(), ids=str)
def test_forward_and_backward(case: Case) -> None:
    gap = 2 if case.gaps else 0
    parsed = layouts.parse(case.layout)
    qkv = te_kit.operands(case, gap)
    o, aux = forward(case, qkv)
    q_lengths, kv_lengths = case.lengths()
    queries, keys = case.shape.queries, case.shape.keys

    leaves = [x.requires_grad_() for x in te_kit.dense(case)]
    bias, offset = te_kit.bias_of(case), te_kit.offset_of(case)
    learned = [x.requires_grad_() for x in (bias, offset) if x is not None]
    expected, lse, _ = te_kit.truth(case, tuple(leaves), bias, offset, aux[1])
    close(te_kit.restored(o, parsed.q_format, q_lengths, queries, gap), expected.detach())
    stats = aux[0].squeeze(-1)
    if parsed.q_format == "thd":
        rows = te_kit.restored(aux[0], "thd", q_lengths, queries) if not gap else None
        assert aux[0].shape == (qkv[0].shape[0], case.shape.heads, 1)
        if rows is not None:
            seen = lse > -math.inf
            close(rows.squeeze(-1)[seen], lse.detach()[seen])
    else:
        close(stats, lse.detach())
    assert len(aux) == 2 + len(learned)
    assert aux[1].shape == (2,) and aux[1].dtype == torch.int64

    d_o = te_kit.randn(*expected.shape, seed=9)
    d_o = d_o * (torch.arange(queries) < torch.tensor(q_lengths)[:, None])[:, None, :, None]
    expected.backward(d_o)
    laid = te_kit.laid_out(d_o, parsed.q_format, q_lengths, gap).nan_to_num()
    dq, dk, dv, dbias, doffset = backward(case, qkv, o, laid, aux)
    found = te_kit.restored(dq, parsed.q_format, q_lengths, queries, gap)
    close(found, leaves[0].grad)
    for gradient, leaf in zip((dk, dv), leaves[1:], strict=True):
        close(te_kit.restored(gradient, parsed.kv_format, kv_lengths, keys, gap), leaf.grad)
    assert (dbias is None) == (bias is None) and (doffset is None) == (offset is None)
    if bias is not None:
        close(dbias, bias.grad)
    if offset is not None:
        assert doffset.shape == offset.shape and doffset.dtype == torch.float32
        torch.testing.assert_close(doffset, offset.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", ["bhss", "1hss", "b1ss", "11ss", "111s"])
@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("mask", ["padding", "causal_bottom_right"])
def test_gradient_of_every_shape_of_a_bias(mask: str, kind: str, shape: str) -> None:
    test_forward_and_backward(Case(mask=mask, bias_type=kind, bias_shape=shape, dropout=0.2))


def base_of(case: Case, parts: list[Tensor]) -> Tensor:
    """The tensor that packs these, rebuilt from the first one's storage."""
    first = parts[0]
    flat = torch.empty(0, dtype=first.dtype).set_(first.untyped_storage())
    axis = -3 if case.layout.endswith("hd") and "h3d" not in case.layout else -2
    axis = -2 if "h2d" in case.layout or "h3d" in case.layout else -3
    shape = list(first.shape)
    shape.insert(len(shape) + 1 + axis, len(parts))
    return flat.view(shape).unbind(axis)  # type: ignore[return-value]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    "layout", [name for name in LAYOUTS if layouts.parse(name).packing != "none"]
)
def test_packed_gradients_are_views_of_one_buffer(layout: str, together: bool) -> None:
    """Whether q, k and v lie in one tensor, or are three of their own."""
    parsed = layouts.parse(layout)
    mask = "padding" if "thd" in parsed.formats else "causal"
    shape = Shape().self_attention if parsed.one_length else Shape()
    case = Case(layout, mask, shape=shape)
    qkv = te_kit.operands(case)
    if not together:
        qkv = tuple(x.clone() for x in qkv)
    o, aux = forward(case, qkv)
    dq, dk, dv, *_ = backward(case, qkv, o, te_kit.randn(*o.shape, seed=8), aux)
    parts = [dq, dk, dv] if parsed.one_length else [dk, dv]
    rebuilt = base_of(case, parts)
    assert all(torch.equal(x, y) for x, y in zip(rebuilt, parts, strict=True))
    assert all(x.stride() == y.stride() for x, y in zip(rebuilt, parts, strict=True))


def test_formats_of_outputs_differ_by_strides_alone() -> None:
    case = Case("bshd_bshd_bshd", "causal")
    qkv = te_kit.operands(case)
    o, aux = forward(case, qkv)
    for axes in ("sbhd", "bhsd"):
        other, _ = forward(case, qkv, o_format=axes)
        order = ["bshd".index(axis) for axis in axes]
        assert torch.equal(other, o.permute(order))
        d_o = te_kit.randn(*o.shape, seed=8)
        given = {"o_format": axes, "do_format": axes, "dqkv_layout": "sbhd_sbhd_sbhd"}
        turned = backward(case, qkv, other, d_o.permute(order), aux, **given)
        for found, expected in zip(turned[:3], backward(case, qkv, o, d_o, aux)[:3], strict=True):
            assert torch.equal(found, expected.transpose(0, 1))


@pytest.mark.parametrize("mask", ["no_mask", "padding_causal"])
def test_largest_logit_of_each_head(mask: str) -> None:
    case = Case(mask=mask, bias_type="post_scale_bias", softmax="learnable")
    qkv = te_kit.operands(case)
    *_, max_logit = forward(case, qkv, return_max_logit=True)
    *_, expected = te_kit.truth(case, te_kit.dense(case), te_kit.bias_of(case))
    close(max_logit, expected)
    half = tuple(x.half() for x in qkv)
    assert forward(case, half, return_max_logit=True)[2].dtype == torch.float16


def test_inference_has_aux_tensors_and_no_dropout() -> None:
    case = Case(mask="causal")
    qkv = te_kit.operands(case)
    o, aux = forward(case, qkv)
    again, others = forward(case, qkv, is_training=False, dropout=0.5)
    assert torch.equal(o, again) and torch.equal(aux[0], others[0])
    assert not aux[1].any() and aux[1].dtype == torch.int64


def test_generator_of_a_call_decides_its_dropout() -> None:
    case = Case(mask="causal", dropout=0.5)
    qkv = te_kit.operands(case)
    torch.manual_seed(0)
    states = [
        forward(case, qkv, rng_gen=torch.Generator().manual_seed(seed))[1][1] for seed in (3, 3, 4)
    ]
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])
    torch.manual_seed(0)
    first = forward(case, qkv)[1][1]
    assert not torch.equal(first, forward(case, qkv)[1][1])


def test_off_by_one_makes_its_own_offset() -> None:
    case = Case(mask="causal", softmax="off-by-one")
    qkv = te_kit.operands(case)
    o, aux = forward(case, qkv, softmax_offset=None)
    given, others = forward(case, qkv)
    assert torch.equal(o, given)
    assert [x.shape for x in aux] == [x.shape for x in others]


def test_pages() -> None:
    case = Case("bshd_bshd_bshd", "padding_causal_bottom_right")
    q, k, v = te_kit.operands(case)
    o, _ = forward(case, (q, k, v), is_training=False)
    order = torch.tensor([4, 2, 0, 8, 1, 3, 6, 7, 5])
    table = torch.empty(9, dtype=torch.int32)
    table[order] = torch.arange(9, dtype=torch.int32)
    pages = [x.reshape(9, 3, *x.shape[2:])[order] for x in (k, v)]
    table = table.view(3, 3)
    found, _ = forward(
        case, (q, *pages), is_training=False, qkv_layout="paged_kv_bshd_bshd_bshd",
        page_table_k=table, page_table_v=table,
    )  # fmt: skip
    close(found, o)


def test_older_spellings() -> None:
    case = Case(mask="causal")
    q, k, v = te_kit.operands(case)
    ends = lengths(case).values()
    o, _ = te.fused_attn_fwd(
        True, 6, 9, *ends, Q=q, K=k, V=v, qkv_dtype=q.dtype, fused_attention_backend=BACKEND,
        qkv_layout=case.layout, o_format="bshd", attn_mask_type="causal",
    )  # fmt: skip
    assert torch.equal(o, forward(case, (q, k, v))[0])


def test_signatures() -> None:
    names = list(inspect.signature(te.fused_attn_fwd).parameters.values())
    assert [x.name for x in names if x.default is x.empty] == [
        *("is_training", "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv"),
        *("q", "k", "v", "fake_dtype", "fused_attention_backend"),
    ]
    defaults = {x.name: x.default for x in names if x.default not in (x.empty, None)}
    assert defaults == {
        "dropout": 0.0, "fast_zero_fill": True, "qkv_layout": "sbh3d", "o_format": "sbhd",
        "attn_bias_type": "no_bias", "attn_mask_type": "padding", "softmax_type": "vanilla",
        "window_size": (-1, -1), "return_max_logit": False, "cuda_graph": False,
    }  # fmt: skip
    names = list(inspect.signature(te.fused_attn_bwd).parameters)
    assert names[7:12] == ["o", "d_o", "fake_dtype", "aux_ctx_tensors", "fused_attention_backend"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"fused_attention_backend": te.FusedAttnBackend.No_Backend}, ValueError, "No_Backend"),
        ({"fused_attention_backend": te.FusedAttnBackend.FP8}, SpecError, "FP8"),
        ({"s_quantizer": SimpleNamespace()}, SpecError, "quantizers"),
        ({"qkv_layout": "bssd"}, KeyError, "bssd"),
        ({"attn_mask_type": "arbitrary"}, KeyError, "arbitrary"),
        ({"attn_bias_type": "some"}, KeyError, "some"),
        ({"softmax_type": "hard"}, KeyError, "hard"),
        ({"o_format": "dhsb"}, KeyError, "dhsb"),
        ({"attn_bias_type": "post_scale_bias"}, ValueError, "attn_bias is None"),
        ({"softmax_type": "learnable"}, ValueError, "softmax_offset is None"),
        ({"attn_mask_type": "padding", "cu_seqlens_q": None}, ValueError, "cu_seqlens_q"),
        ({"nothing": 1}, TypeError, "unexpected keyword argument 'nothing'"),
    ],
    ids=str,
)
def test_refusals(given: dict[str, Any], error: type[Exception], message: str) -> None:
    case = Case()
    q, k, v = te_kit.operands(case)
    arguments = {
        "is_training": True, "max_seqlen_q": 6, "max_seqlen_kv": 9, **lengths(case), "q": q, "k": k,
        "v": v, "fake_dtype": q.dtype, "fused_attention_backend": BACKEND, **words(case), **given,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        te.fused_attn_fwd(**arguments)


def test_bias_of_another_dtype_and_too_few_aux_tensors_are_refused() -> None:
    case = Case(bias_type="post_scale_bias")
    qkv = te_kit.operands(case)
    with pytest.raises(ValueError, match=r"torch\.float64; got torch\.float32"):
        forward(case, qkv, attn_bias=te_kit.bias_of(case, torch.float32))
    o, aux = forward(case, qkv)
    with pytest.raises(ValueError, match="needs 3 tensors"):
        backward(case, qkv, o, o, aux[:2])


def test_backends_of_other_enumerations_are_taken_by_their_number() -> None:
    case = replace(Case(), mask="causal")
    qkv = te_kit.operands(case)
    expected, _ = forward(case, qkv)
    for backend in (1, te.FusedAttnBackend.F16_max512):
        assert torch.equal(forward(case, qkv, fused_attention_backend=backend)[0], expected)


@pytest.mark.parametrize("mask", ["no_mask", "causal", "padding_causal"])
@pytest.mark.parametrize("o_format", ["bshd", "sbhd"])
@pytest.mark.parametrize("learns", [False, True])
def test_arguments_by_position_are_those_by_name(mask: str, o_format: str, learns: bool) -> None:
    q, k, v = torch.randn(3, 2, 8, 2, 16, generator=torch.Generator().manual_seed(1)).unbind()
    q.requires_grad_(learns)
    ends = te_kit.cumulative([8, 5])
    named = {"attn_mask_type": mask, "o_format": o_format, "qkv_layout": "bshd_bshd_bshd"}
    given = (False, 8, 8, ends, ends, q, k, v, q.dtype, BACKEND)
    names = [*inspect.signature(te.fused_attn_fwd).parameters][: len(given)]
    by_name = te.fused_attn_fwd(**dict(zip(names, given, strict=True)), **named)
    for _ in range(2):
        found = te.fused_attn_fwd(*given, **named)
        assert not found[0].requires_grad
        assert torch.equal(found[0], by_name[0]) and found[0].shape == by_name[0].shape
        assert all(torch.equal(a, b) for a, b in zip(found[1], by_name[1], strict=True))
    with pytest.raises(TypeError, match=r"fused_attn_fwd\(\).*'mask'"):
        te.fused_attn_fwd(*given, mask="causal")

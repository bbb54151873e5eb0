"""`te.DotProductAttention` and its backends, against a definition written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import attngen
from attngen import SpecError, te
from attngen.frontends.transformer_engine.core import Words, plan_of
from attngen.spec import layouts
from tests.support import te_kit
from tests.support.te_kit import Case, Shape, arguments, close, module_of, of_module, rows_of

BACKENDS = te_kit.SWITCHES


def cases() -> list[Case]:
    found = []
    for axes in ("bshd", "sbhd", "thd"):
        layout = "_".join([axes] * 3)
        padded = [
            Case(layout, "padding", (2, 1), bias_type="post_scale_bias", bias_shape="111s"),
            Case(layout, "padding", (3, 2), bottom_right=False, bias_type="alibi"),
            Case(layout, "padding_causal", (2, 0), softmax="learnable", gaps=axes == "thd"),
            Case(layout, "padding_causal_bottom_right", softmax="off-by-one", dropout=0.3),
            Case(layout, "padding_causal", bias_type="pre_scale_bias", bias_shape="bhss"),
        ]
        dense = [
            Case(layout, "no_mask"),
            Case(layout, "no_mask", (3, 2), bias_type="alibi", dropout=0.2),
            Case(layout, "causal", bias_type="post_scale_bias", softmax="learnable"),
            Case(layout, "causal_bottom_right", (4, 0), dropout=0.5),
        ]
        found += padded + (dense if axes != "thd" else [])
    shape = Shape(dim=8, dim_v=5, queries=9, keys=6, q_lengths=(9, 2, 7), kv_lengths=(6, 4, 0))
    found += [replace(case, shape=shape) for case in found[::3]]
    return [of_module(case) for case in found]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_output_and_gradients(case: Case) -> None:
    """In float64, which the definition computes."""
    gap = 2 if case.gaps else 0
    module, bias = module_of(case), te_kit.bias_of(case)
    q, k, v = (x.detach().requires_grad_() for x in te_kit.operands(case, gap))
    added = None if bias is None else bias.clone().requires_grad_()
    torch.manual_seed(7)
    out = module(q, k, v, core_attention_bias=added, **arguments(case))
    torch.manual_seed(7)
    state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64)  # as attngen draws it

    leaves = tuple(x.requires_grad_() for x in te_kit.dense(case))
    offset = te_kit.offset_of(case)
    learned = [x.requires_grad_() for x in (bias, offset) if x is not None]
    expected, _, _ = te_kit.truth(case, leaves, bias, offset, state)
    close(rows_of(case, out, gap), expected)
    d_o = te_kit.randn(*expected.shape, seed=9)
    grads = torch.autograd.grad(expected, [*leaves, *learned], d_o, allow_unused=True)
    axes = layouts.parse(case.layout).q_format
    rows = te_kit.laid_out(d_o, axes, case.lengths()[0], gap).nan_to_num().flatten(-2)
    out.backward(rows)
    q_lengths, kv_lengths = case.lengths()
    for x, lengths, gradient in zip((q, k, v), (q_lengths, *[kv_lengths] * 2), grads, strict=False):
        found = te_kit.restored(x.grad, axes, lengths, gradient.shape[2], gap)
        close(found, gradient)
    if bias is not None:
        close(added.grad, grads[3])
    if case.softmax == "learnable":
        close(module.softmax_offset.grad, grads[-1].flatten(), 1e-5)


@pytest.mark.parametrize("switch", BACKENDS)
def test_backends_agree_in_16_bits(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    """Dropout and the bias's gradient included."""
    case = of_module(
        Case(mask="padding", dropout=0.25, bias_type="post_scale_bias", softmax="learnable")
    )
    case = replace(case, bias_type="no_bias", softmax="vanilla") if "FLASH" in switch else case
    for name in te_kit.SWITCHES:
        monkeypatch.setenv(name, str(int(name == switch)))
    module, bias = module_of(case), te_kit.bias_of(case, torch.bfloat16)
    q, k, v = te_kit.operands(case, dtype=torch.bfloat16)
    if bias is not None:
        bias.requires_grad_()
    torch.manual_seed(7)
    out = module(q, k, v, core_attention_bias=bias, **arguments(case))
    torch.manual_seed(7)
    state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64)
    wide = None if bias is None else bias.detach().double().requires_grad_()
    dense = tuple(x.double() for x in te_kit.dense(case, torch.bfloat16))
    expected, _, _ = te_kit.truth(case, dense, wide, te_kit.offset_of(case), state)
    close(rows_of(case, out), expected, 2e-2)
    if bias is not None:
        out.float().square().sum().backward()
        expected.square().sum().backward()
        close(bias.grad, wide.grad, 4e-2)
    chosen = te._attention_backends
    assert chosen["use_fused_attention"] == ("FUSED_ATTN" in switch and "UN" not in switch)
    assert chosen["use_unfused_attention"] == ("UNFUSED" in switch)
    assert chosen["use_flash_attention"] == ("FLASH" in switch)


def test_no_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in te_kit.SWITCHES:
        monkeypatch.setenv(name, "0")
    case = Case(mask="causal")
    with pytest.raises(ValueError, match="NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2"):
        module_of(case)(*te_kit.operands(case))


def test_choice_is_kept_until_an_update_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(mask="causal")
    module, qkv = module_of(case), te_kit.operands(case, dtype=torch.bfloat16)
    module(*qkv)
    assert te._attention_backends["use_fused_attention"]
    assert te._attention_backends["fused_attention_backend"] == 1
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    module(*qkv)
    assert te._attention_backends["use_fused_attention"]
    te._attention_backends["backend_selection_requires_update"] = True
    module(*qkv)
    assert te._attention_backends["use_flash_attention"]


@pytest.mark.parametrize("place", [-3, -2])
@pytest.mark.parametrize("axes", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("what", ["qkv_layer", "kv_layer"])
def test_packed_tensors_get_the_gradient(what: str, axes: str, place: int) -> None:
    shape = Shape().self_attention if what == "qkv_layer" else Shape()
    case = of_module(Case("_".join([axes] * 3), "padding", shape=shape))
    module = module_of(case)
    parts = [x.detach().requires_grad_() for x in te_kit.operands(case)]
    q, k, v = parts
    expected = module(q, k, v, **arguments(case))
    expected.square().sum().backward()
    together = parts if what == "qkv_layer" else parts[1:]
    packed = torch.stack([x.detach() for x in together], place).requires_grad_()
    given = {what: packed} | ({} if what == "qkv_layer" else {"query_layer": q.detach()})
    found = module(**given, qkv_interleave_dim=place, **arguments(case))
    close(found, expected)
    found.square().sum().backward()
    close(packed.grad, torch.stack([x.grad for x in together], place))


@pytest.mark.parametrize("axes", ["bshd", "sbhd"])
@pytest.mark.parametrize("mask", ["padding", "padding,causal", "causal,padding"])
def test_padding_masks_say_the_lengths(mask: str, axes: str) -> None:
    name = "padding" if mask == "padding" else "padding_causal"
    case = of_module(Case("_".join([axes] * 3), name))
    module, qkv = module_of(case, attn_mask_type=mask), te_kit.operands(case)
    expected = module(*qkv, **arguments(case))
    sizes = (case.shape.queries, case.shape.keys)
    masks = tuple(
        (torch.arange(most) >= torch.tensor(lengths)[:, None])[:, None, None]
        for most, lengths in zip(sizes, case.lengths(), strict=True)
    )
    assert torch.equal(module(*qkv, masks), expected)
    q, _, _ = qkv
    both = module(q, q[..., :2, :], q[..., :2, :], masks[:1][0])
    pair = (masks[:1][0],) * 2
    assert torch.equal(both, module(q, q[..., :2, :], q[..., :2, :], pair))


def test_arbitrary_masks_hide_where_they_are_true() -> None:
    case = of_module(Case(mask="no_mask", bias_type="post_scale_bias"))
    hidden = te_kit.randn(case.shape.batch, 1, 6, 9, seed=3) > 0.4
    module = module_of(case, attn_mask_type="arbitrary")
    bias, qkv = te_kit.bias_of(case), te_kit.operands(case)
    found = module(*qkv, hidden, core_attention_bias=bias, **arguments(case))
    expected, _, _ = te_kit.truth(case, te_kit.dense(case), bias, hidden=hidden)
    close(rows_of(case, found), expected)


def test_own_slopes() -> None:
    case = Case(mask="causal", bias_type="alibi")
    module, qkv = module_of(case), te_kit.operands(case)
    own = te_kit.slopes_of(4).float()
    assert torch.equal(module(*qkv, alibi_slopes=own, **arguments(case)),
                       module(*qkv, **arguments(case)))  # fmt: skip
    by_batch = module(*qkv, alibi_slopes=torch.stack([own, own, own * 2]), **arguments(case))
    twice = module(*qkv, alibi_slopes=own * 2, **arguments(case))
    assert torch.equal(by_batch[2], twice[2]) and not torch.equal(by_batch[0], twice[0])


def test_largest_logits() -> None:
    case = of_module(Case(mask="padding", bias_type="post_scale_bias"))
    out, logits = module_of(case, return_max_logit=True)(
        *te_kit.operands(case), core_attention_bias=te_kit.bias_of(case), **arguments(case)
    )
    expected, _, most = te_kit.truth(case, te_kit.dense(case), te_kit.bias_of(case))
    close(rows_of(case, out), expected)
    close(logits, most)


@pytest.mark.parametrize(
    ("case", "num_splits", "asked"),
    [
        (Case(mask="causal"), 4, 4),
        (Case(mask="causal"), 1, None),
        (Case(mask="causal"), 0, None),
        (Case(mask="padding", softmax="learnable"), 4, 4),
        (Case("thd_thd_thd", "padding"), 4, None),
        (Case(mask="causal", bias_type="post_scale_bias"), 4, None),
    ],
    ids=str,
)
def test_splits_are_asked_for_where_kernels_split(
    monkeypatch: pytest.MonkeyPatch, case: Case, num_splits: int, asked: int | None
) -> None:
    given: dict[str, Any] = {}

    def attention(*tensors: Tensor, **arguments: Any) -> Any:
        given.update(arguments)
        return attngen.attention(*tensors, **arguments)

    monkeypatch.setattr("attngen.frontends.transformer_engine.core.attention", attention)
    module, bias = module_of(of_module(case)).eval(), te_kit.bias_of(case)
    qkv, words = te_kit.operands(case), arguments(of_module(case))
    out = module(*qkv, core_attention_bias=bias, num_splits=num_splits, **words)
    assert given.get("num_splits") == asked
    assert torch.equal(out, module(*qkv, core_attention_bias=bias, **words))


def test_evaluation_has_no_dropout() -> None:
    case = Case(mask="causal", dropout=0.5)
    module, qkv = module_of(case), te_kit.operands(case)
    plain = module_of(replace(case, dropout=0.0))(*qkv)
    assert torch.equal(module.eval()(*qkv), plain)
    assert not torch.equal(module.train()(*qkv), plain)


def test_output_of_kernels_without_a_backward_refuses_its_gradient() -> None:
    module = te.DotProductAttention(2, 8, qkv_format="bshd").eval()
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in "qkv")
    how = replace(module.fused_attention.how(1), forward_alone=True)
    words = Words("bshd_bshd_bshd", "causal", (-1, 0), False, "vanilla", "no_bias", None, 0.0)
    out = plan_of(words, how, 1, set())((q, k, v), None, {})
    torch.testing.assert_close(out, module(q, k, v))
    with pytest.raises(SpecError, match="has no gradient"):
        out.sum().backward()


def test_operands_of_other_axes_are_refused_by_their_shapes() -> None:
    x = torch.zeros(5, 1, 16)  # heads and columns in one
    with pytest.raises(SpecError, match=r"needs q of shape \[s, b, h, d\]; got \[5, 1, 16\]"):
        te.DotProductAttention(2, 8)(x, x, x)


def test_calls_of_one_form_share_a_plan_whoever_names_their_arguments() -> None:
    module = te.DotProductAttention(2, 8, qkv_format="thd")
    with mock.patch.object(module, "_plan_of", wraps=module._plan_of) as planned:
        for tokens in (5, 7):
            ends = torch.tensor([0, 3, tokens], dtype=torch.int32)
            given = (torch.randn(tokens, 2, 8) for _ in "qkv")
            module(*given, attn_mask_type="padding_causal", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        assert planned.call_count == 1
        for ends in (torch.tensor([0, 6]).int(), torch.tensor([0, 1, 4, 6]).int()):
            most = int(ends.diff().amax())
            module(
                *(torch.randn(6, 2, 8) for _ in "qkv"),
                attn_mask_type="padding_causal",
                cu_seqlens_q=ends,
                cu_seqlens_kv=ends,
                max_seqlen_q=most,
                max_seqlen_kv=most,
            )
    assert planned.call_count == 1

"""TransformerEngine's interface on the kernels: functions and module, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen import te
from attngen.spec import layouts
from tests.support import te_kit
from tests.support.te_kit import Case, Shape, close, rows_of

from . import oracle

pytestmark = pytest.mark.gpu
SHAPE = Shape(
    batch=2, heads=4, groups=2, queries=70, keys=90, dim=64, dim_v=64, q_lengths=(70, 33),
    kv_lengths=(90, 41),
)  # fmt: skip
BACKEND = te.FusedAttnBackend.F16_arbitrary_seqlen
CASES = [
    Case("bshd_bshd_bshd", "padding", bias_type="post_scale_bias", dropout=0.25),
    Case("sbhd_sbhd_sbhd", "causal", softmax="learnable", bias_type="alibi"),
    Case("thd_thd_thd", "padding_causal_bottom_right", (20, 0), softmax="off-by-one"),
    Case("bshd_bs2hd", "no_mask", (9, 4), bottom_right=True, bias_type="pre_scale_bias"),
]
CASES = [replace(case, shape=SHAPE) for case in CASES]
CASES += [
    Case("bs3hd", "causal", shape=SHAPE.self_attention),
    Case("th3d", "padding_causal", shape=SHAPE.self_attention, dropout=0.5),
]


def on_device(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(oracle.DEVICE)


def packed_on_device(case: Case) -> list[Tensor]:
    """Q, K and V as the layout has them, views where its name says so."""
    parsed = layouts.parse(case.layout)
    q, k, v = te_kit.operands(case, dtype=torch.bfloat16)
    axis = -2 if "3d" in case.layout or "2d" in case.layout else -3
    if parsed.one_length:
        return [*torch.stack([q, k, v], axis).to(oracle.DEVICE).unbind(axis)]
    if parsed.packing != "none":
        return [on_device(q), *torch.stack([k, v], axis).to(oracle.DEVICE).unbind(axis)]
    return [on_device(x) for x in (q, k, v)]


def words(case: Case) -> dict[str, Any]:
    found: dict[str, Any] = dict(
        max_seqlen_q=case.shape.queries, max_seqlen_kv=case.shape.keys, fake_dtype=torch.bfloat16,
        fused_attention_backend=BACKEND, qkv_layout=case.layout, dropout=case.dropout,
        o_format=layouts.parse(case.layout).q_format, attn_bias_type=case.bias_type,
        attn_mask_type=case.mask, softmax_type=case.softmax, window_size=case.window,
        bottom_right_diagonal=case.bottom_right,
    )  # fmt: skip
    for side, each in zip(("q", "kv"), case.lengths(), strict=True):
        found[f"cu_seqlens_{side}"] = te_kit.cumulative(each, oracle.DEVICE)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_functions_launch_kernels_whose_results_are_right(case: Case) -> None:
    parsed, s = layouts.parse(case.layout), case.shape
    q, k, v = packed_on_device(case)
    bias, offset = te_kit.bias_of(case, torch.bfloat16), te_kit.offset_of(case)
    with attngen.trace() as trace:
        o, aux = te.fused_attn_fwd(
            is_training=True, q=q, k=k, v=v, attn_bias=on_device(bias),
            softmax_offset=on_device(offset), **words(case),
        )  # fmt: skip
        d_o = te_kit.randn(*te_kit.dense(case)[0].shape[:-1], s.dim_v, seed=9).bfloat16()
        laid = te_kit.laid_out(d_o, parsed.q_format, case.lengths()[0]).to(oracle.DEVICE)
        found = te.fused_attn_bwd(
            q=q, k=k, v=v, o=o, d_o=laid, aux_ctx_tensors=aux, dqkv_layout=case.layout,
            do_format=parsed.q_format, **words(case),
        )  # fmt: skip
    assert {problem.direction for problem, _ in trace.variants} == {"fwd", "bwd"}

    wide = [x.double().requires_grad_() for x in te_kit.dense(case, torch.bfloat16)]
    learned = [None if x is None else x.double().requires_grad_() for x in (bias, offset)]
    out, _, _ = te_kit.truth(case, tuple(wide), *learned, aux[1].cpu())
    rows = torch.arange(s.queries) < torch.tensor(case.lengths()[0])[:, None]
    out.backward(d_o.double() * rows[:, None, :, None])
    q_lengths, kv_lengths = case.lengths()
    close(te_kit.restored(o.cpu(), parsed.q_format, q_lengths, s.queries), out, 2e-2)
    sides = zip(found, wide, (parsed.q_format, *[parsed.kv_format] * 2), strict=False)
    for place, (gradient, leaf, axes) in enumerate(sides):
        lengths = kv_lengths if place else q_lengths
        within(te_kit.restored(gradient.cpu(), axes, lengths, leaf.shape[2]), leaf.grad)
    *_, dbias, doffset = found
    for gradient, leaf in zip((dbias, doffset), learned, strict=True):
        assert (gradient is None) == (leaf is None)
        if leaf is not None:
            within(gradient.cpu(), leaf.grad)
    if parsed.packing != "none":
        parts = found[3 - len(parsed.packed_operands) : 3]
        assert len({x.untyped_storage().data_ptr() for x in parts}) == 1


def within(found: Tensor, expected: Tensor) -> None:
    """Assert that 16-bit gradients are right, by their largest magnitude."""
    error = (found.double() - expected).abs().max()
    assert error <= 2e-2 * expected.abs().max(), f"{error} of {expected.abs().max()}"


@pytest.mark.parametrize("axes", ["bshd", "thd"])
def test_module_launches_kernels(axes: str) -> None:
    shape = SHAPE.self_attention
    layout = "_".join([axes] * 3)
    case = Case(layout, "padding_causal", (30, 0), shape=shape, softmax="learnable")
    module = te_kit.module_of(case).to(oracle.DEVICE)
    packed = torch.stack(te_kit.operands(case, dtype=torch.bfloat16), -3)
    packed = packed.to(oracle.DEVICE).requires_grad_()
    ends = te_kit.cumulative(case.lengths()[0], oracle.DEVICE)
    with attngen.trace() as trace:
        out = module(
            qkv_layer=packed, cu_seqlens_q=ends, cu_seqlens_kv=ends, window_size=case.window
        )
        out.float().square().sum().backward()
    assert {problem.direction for problem, _ in trace.variants} == {"fwd", "bwd"}
    wide = [x.double().requires_grad_() for x in te_kit.dense(case, torch.bfloat16)]
    offset = te_kit.offset_of(case).double().requires_grad_()
    expected, _, _ = te_kit.truth(case, tuple(wide), None, offset)
    close(rows_of(case, out.detach().cpu()), expected, 2e-2)
    expected.square().sum().backward()
    q_lengths, _ = case.lengths()
    for gradient, leaf in zip(packed.grad.cpu().unbind(-3), wide, strict=True):
        within(te_kit.restored(gradient, axes, q_lengths, shape.queries), leaf.grad)
    within(module.softmax_offset.grad.cpu(), offset.grad.flatten())


@pytest.mark.device
@pytest.mark.parametrize("switch", te_kit.SWITCHES)
def test_backends_agree_on_the_gpu(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    for name in te_kit.SWITCHES:
        monkeypatch.setenv(name, str(int(name == switch)))
    te._attention_backends["backend_selection_requires_update"] = True
    case = Case("sbhd_sbhd_sbhd", "causal", shape=SHAPE, dropout=0.25)
    module = te_kit.module_of(case)
    q, k, v = (on_device(x).requires_grad_() for x in te_kit.operands(case, dtype=torch.bfloat16))
    torch.manual_seed(7)
    out = module(q, k, v)
    torch.manual_seed(7)
    state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=oracle.DEVICE)
    wide = tuple(x.double() for x in te_kit.dense(case, torch.bfloat16))
    expected, _, _ = te_kit.truth(case, wide, None, None, state.cpu())
    close(rows_of(case, out.detach().cpu()), expected, 2e-2)


@pytest.mark.device
def test_training_step_is_captured() -> None:
    case = Case("bshd_bshd_bshd", "causal", shape=SHAPE)
    module = te_kit.module_of(case)
    qkv = [on_device(x).requires_grad_() for x in te_kit.operands(case, dtype=torch.bfloat16)]
    graphed = torch.cuda.make_graphed_callables(module, tuple(qkv))
    fresh = [torch.randn_like(x).requires_grad_() for x in qkv]
    out = graphed(*fresh)
    out.float().square().sum().backward()
    expected = module.__class__.forward(module, *(x.detach() for x in fresh))
    assert torch.equal(out, expected)


@pytest.mark.device
def test_compiled_module_agrees() -> None:
    case = Case("bshd_bshd_bshd", "causal", shape=SHAPE)
    module = te_kit.module_of(case)
    qkv = [on_device(x).requires_grad_() for x in te_kit.operands(case, dtype=torch.bfloat16)]
    traced = torch.compile(module, fullgraph=True)
    assert torch.equal(traced(*qkv), module(*qkv))

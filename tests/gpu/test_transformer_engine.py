"""TransformerEngine's interface on the kernels: functions and module, against float64."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen import SpecError, fp8, te
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


STEPS: list[dict[int, int]] = [{7: 9, 3: 2}, {7: 1, 3: 1, 9: 5}, {3: 1, 9: 1, 5: 3}, {3: 1, 9: 1}]


def tokens(sequence: int, part: slice) -> list[Tensor]:
    """Q, K and V of a sequence, [s, h, d]."""
    shapes = ((20, 4, 64), (20, 2, 64), (20, 2, 64))
    found = (te_kit.randn(*shape, seed=9 * sequence + n) for n, shape in enumerate(shapes))
    return [on_device(x.bfloat16()[part]) for x in found]


def cache_of(paged: bool) -> Any:
    pages = {"is_paged": True, "page_size": 16, "total_num_pages": 6} if paged else {}
    cache = te.InferenceParams(3, 32, 2, 64, torch.bfloat16, **pages)
    for each in ("cu_seqlens_q", "cu_seqlens_kv"):  # where emulated kernels read them
        setattr(cache, each, getattr(cache, each).to(oracle.DEVICE))
    cache.allocate_memory(1)
    return cache


@pytest.mark.parametrize("paged", [False, True])
def test_steps_of_a_cache_launch_kernels(paged: bool) -> None:
    """While sequences end and others begin, each equals attention over the whole sequence."""
    module = te.DotProductAttention(
        4, 64, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="padding_causal"
    ).eval()
    cache, lengths = cache_of(paged), dict[int, int]()
    for steps in STEPS:
        lengths = {each: lengths.get(each, 0) for each in steps}
        most = max(steps.values())
        parts = [
            [torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])]) for x in each]
            for each in (
                tokens(each, slice(lengths[each], lengths[each] + n)) for each, n in steps.items()
            )
        ]
        cache.pre_step(OrderedDict(steps))
        with attngen.trace() as trace, torch.no_grad():
            out = module(*map(torch.stack, zip(*parts, strict=True)), inference_params=cache)
        assert trace.variants
        for row, (each, count) in enumerate(steps.items()):
            end = lengths[each] + count
            q, k, v = (x.cpu().double()[None].transpose(1, 2) for x in tokens(each, slice(end)))
            shape = Shape(1, 4, 2, end, end, 64, 64, (end,), (end,))
            whole, _, _ = te_kit.truth(Case(mask="causal", shape=shape), (q, k, v))
            expected = whole[0].transpose(0, 1)[-count:].flatten(-2)
            close(out[row, :count].cpu(), expected, 2e-2)
        lengths = {each: lengths[each] + count for each, count in steps.items()}


@pytest.mark.device
@pytest.mark.parametrize("paged", [False, True])
def test_captured_steps_follow_the_sequences(paged: bool) -> None:
    module = te.DotProductAttention(
        4, 64, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="padding_causal"
    ).eval()
    steps = [{7: 1, 3: 1, 9: 1}, {3: 1, 9: 1, 5: 1}, {9: 1, 5: 1}]
    eager, captured = cache_of(paged), cache_of(paged)
    static = [x.new_zeros(3, *x.shape) for x in tokens(1, slice(1))]
    captured.pre_step(OrderedDict({1: 1, 2: 1, 3: 1}))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        module(*static, inference_params=captured)
        with torch.cuda.graph(graph):
            out = module(*static, inference_params=captured)
    captured.reset()
    for number, step in enumerate(steps):
        fresh = [torch.stack(x) for x in zip(
            *(tokens(each, slice(number, number + 1)) for each in step), strict=True
        )]  # fmt: skip
        for buffer, x in zip(static, fresh, strict=True):
            buffer[: len(x)].copy_(x)
        for cache in (eager, captured):
            cache.pre_step(OrderedDict(step))
        graph.replay()
        with torch.no_grad():
            expected = module(*fresh, inference_params=eager)
        close(out[: len(step)], expected, 1e-2)


@pytest.mark.parametrize("switch", te_kit.SWITCHES)
def test_backends_draw_one_mask_and_agree(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    for name in te_kit.SWITCHES:
        monkeypatch.setenv(name, str(int(name == switch)))
    te._attention_backends["backend_selection_requires_update"] = True
    case = Case("sbhd_sbhd_sbhd", "causal", shape=SHAPE, dropout=0.25)
    module = te_kit.module_of(case)
    q, k, v = (on_device(x).requires_grad_() for x in te_kit.operands(case, dtype=torch.bfloat16))
    torch.manual_seed(7)
    with attngen.trace() as trace:
        out = module(q, k, v)
    assert bool(trace.variants) == ("UNFUSED" not in switch)
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
def test_captured_dropout_draws_from_the_tracker() -> None:
    """Replays draw what as many eager calls would, and leave the generator as it was. Leaves whose
    gradients are captured have no other graph, which would be of another stream."""
    case = Case("bshd_bshd_bshd", "causal", shape=SHAPE, dropout=0.25)
    qkv = [on_device(x).requires_grad_() for x in te_kit.operands(case, dtype=torch.bfloat16)]
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    module = te_kit.module_of(case, get_rng_state_tracker=lambda: tracker)
    start = tracker.get_states()
    eager = [module(*(x.detach().requires_grad_() for x in qkv)) for _ in range(2)]
    te.make_graphed_callables(module, tuple(qkv))
    tracker.set_states(start)
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    for expected in eager:
        found = module(*(x.detach().requires_grad_() for x in qkv))
        assert torch.equal(found, expected) and found.requires_grad
    assert not torch.equal(*eager) and torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.device
@pytest.mark.parametrize("paged", [False, True])
def test_graphed_callables_serve_steps_of_a_cache(paged: bool) -> None:
    module = te.DotProductAttention(
        4, 64, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="padding_causal"
    ).eval()
    steps, plain = [{7: 1, 3: 1, 9: 1}, {3: 1, 9: 1, 5: 1}, {9: 1, 5: 1}], cache_of(paged)
    captured = cache_of(paged)
    static = tuple(x.new_zeros(3, *x.shape) for x in tokens(1, slice(1)))
    captured.pre_step(OrderedDict({1: 1, 2: 1, 3: 1}))
    given = {"inference_params": captured}
    eager = module.forward
    te.make_graphed_callables(module, static, sample_kwargs=given)
    captured.reset()
    for number, step in enumerate(steps):
        fresh = [torch.stack(x) for x in zip(
            *(tokens(each, slice(number, number + 1)) for each in step), strict=True
        )]  # fmt: skip
        whole = [torch.cat([x, x.new_zeros(3 - len(x), *x.shape[1:])]) for x in fresh]
        for cache in (plain, captured):
            cache.pre_step(OrderedDict(step))
        expected = eager(*fresh, inference_params=plain)
        close(module(*whole, inference_params=captured)[: len(step)], expected, 1e-2)


@pytest.mark.device
def test_compiled_module_agrees() -> None:
    case = Case("bshd_bshd_bshd", "causal", shape=SHAPE)
    module = te_kit.module_of(case)
    qkv = [on_device(x).requires_grad_() for x in te_kit.operands(case, dtype=torch.bfloat16)]
    traced = torch.compile(module, fullgraph=True)
    assert torch.equal(traced(*qkv), module(*qkv))


@pytest.mark.device  # where a tensor is says who computes it
def test_evaluation_of_the_widest_heads_is_fused_and_its_gradient_refused():
    module = te.DotProductAttention(4, (576, 512), qkv_format="bshd").eval()
    q, k, v = (
        oracle.randn(2, 40, 4, d, seed=n).bfloat16().requires_grad_()
        for n, d in enumerate((576, 576, 512))
    )
    out = module(q, k, v, window_size=(20, 0))
    want = attngen.attention(
        *(x.detach() for x in (q, k, v)), mask="causal", window=(20, 0), backend="reference"
    )
    close(out.double(), want.flatten(-2).double(), 0.02)
    with pytest.raises(SpecError, match="has no gradient"):
        out.sum().backward()


FP8_CASES = [
    Case("bshd_bshd_bshd", "causal", softmax="learnable", shape=SHAPE),
    Case("thd_thd_thd", "padding_causal", shape=SHAPE),
]


@pytest.mark.parametrize("case", FP8_CASES, ids=str)
def test_functions_of_fp8_tensors_launch_kernels(case: Case, caplog: Any) -> None:
    """Gradients are no further from those of 16 bits than the definition's."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    made = {n: fp8.Quantizer(t, oracle.DEVICE) for n, t in (("s", e4m3), ("o", e4m3), ("dp", e5m2))}
    for name, scale in (("s", 256.0), ("o", 64.0), ("dp", 512.0)):
        made[name].set_scale(torch.tensor([scale], device=oracle.DEVICE))
    store, store_d_o = (fp8.CurrentQuantizer(t, oracle.DEVICE) for t in (e4m3, e5m2))
    q, k, v = (store(x) for x in packed_on_device(case))
    d_o = store_d_o(oracle.randn(*q.shape).bfloat16())
    shared = words(case)
    offset, axes = on_device(te_kit.offset_of(case)), shared["o_format"]
    del shared["dropout"]
    o, aux = te.fused_attn_fwd(
        True, q=q, k=k, v=v, softmax_offset=offset, s_quantizer=made["s"],
        o_quantizer=made["o"], **shared,
    )  # fmt: skip
    found = te.fused_attn_bwd(
        q=q, k=k, v=v, o=o, d_o=d_o, aux_ctx_tensors=aux, do_format=axes, dqkv_layout=case.layout,
        s_quantizer=made["s"], dp_quantizer=made["dp"], **shared,
    )  # fmt: skip
    assert "reference" not in caplog.text
    wide = dict(zip("qkv", [x.widened().double() for x in (q, k, v)], strict=True))
    shared["fake_dtype"] = torch.float64
    exact, aux = te.fused_attn_fwd(True, softmax_offset=offset, **wide, **shared)
    wanted = te.fused_attn_bwd(
        **wide, o=exact, d_o=d_o.widened().double(), aux_ctx_tensors=aux, do_format=axes,
        dqkv_layout=case.layout, **shared,
    )  # fmt: skip
    for got, expected in zip((o, *found), (exact, *wanted), strict=True):
        if expected is not None:
            got = got.widened() if isinstance(got, fp8.Float8Tensor) else got
            assert (got.double() - expected).norm() < 0.12 * expected.norm()
    assert (made["dp"].amax > 0).all() and (made["s"].amax == 1).all()

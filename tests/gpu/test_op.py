"""The torch operation: schema, fake tensors, torch.compile, gradients, devices."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.export import Dim, export

import attngen
from attngen.call import kernel_choice
from attngen.runtime import load
from tests.support.caches import FORWARD, forget, held

from . import cases, oracle

pytestmark = pytest.mark.gpu
KERNELS = [
    *cases.core_specs(64, 128),
    cases.spec(72, 40, mask="causal"),
    cases.spec(128, partial=True, mask="causal"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("partial", [False, True])
def test_op_passes_opcheck(layout, partial):
    q, k, v = oracle.operands(2, 4, 2, 70, 90, 128, layout=layout)
    torch.library.opcheck(
        torch.ops.attngen.forward,
        (q, k, v),
        {"layout": layout, "mask": "causal", "out_dtype": "float32" if partial else None},
    )


@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 5, 0), (0, 5, 5), (1, 1, 1)], ids=str)
def test_op_passes_opcheck_with_nothing_to_compute(sizes):
    batch, s_q, s_kv = sizes
    q, k, v = oracle.operands(batch, 2, 2, s_q, s_kv, 64)
    torch.library.opcheck(
        torch.ops.attngen.forward,
        (q, k, v),
        {"window_left": 5, "window_right": 5, "bottom_right": True},
    )


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("partial", [False, True])
def test_op_fake_result_has_the_real_ones_shape_and_strides(layout, partial):
    whole = oracle.operands(2, 4, 4, 70, 70, 128, layout=layout)
    h = layout.index("h")
    q, k, v = (x.narrow(h, 1, 2) for x in whole)
    out_dtype = "float32" if partial else None
    arguments = {"layout": layout, "mask": "causal", "out_dtype": out_dtype}
    real = torch.ops.attngen.forward(q, k, v, **arguments)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.ops.attngen.forward(*(mode.from_tensor(x) for x in (q, k, v)), **arguments)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def model(q, k, v, mask="causal", window=(-1, -1)):
    """Something around the call for the compiler to chew on."""
    out, aux = attngen.attention(
        q * 1, k, v + 0, mask=mask, window=window, backend="cuda", return_lse=True
    )
    return out.float().sin() + aux.lse.transpose(1, 2)[..., None]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("mask, window", [("causal", (-1, -1)), ("none", (20, 10))])
def test_op_compiled_whole_gives_the_eager_result(backend, mask, window):
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    q, k, v = oracle.operands(2, 4, 2, 130, 130, 64)
    got = compiled(q, k, v, mask, window)
    torch.testing.assert_close(got, model(q, k, v, mask, window), atol=1e-4, rtol=1e-4)


def test_op_compiled_dynamic_serves_many_shapes_with_one_graph():
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    # In the first call no two sizes are equal, which the tracer would take for a rule.
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number, (batch, s_q, s_kv) in enumerate([(3, 70, 90), (2, 131, 65), (5, 257, 300)]):
            q, k, v = oracle.operands(batch, 4, 2, s_q, s_kv, 64, seed=number)
            assert torch.equal(compiled(q, k, v), model(q, k, v))


def test_op_compiled_without_dynamic_follows_changed_shapes():
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for number, s in enumerate([64, 65, 128, 300]):
        q, k, v = oracle.operands(1, 2, 2, s, s, 64, seed=number)
        assert torch.equal(compiled(q, k, v), model(q, k, v))


@pytest.mark.device
def test_op_compiled_to_cuda_graphs_is_right_and_leaves_eager_calls_right():
    """Warm-up, capture and replay share one memory pool, in which nothing must outlive its call."""

    def calm(q, k, v):
        return attngen.attention(q * 1, k, v, mask="causal", backend="cuda") * 1

    shapes = [(2, 4, 2, 500, 500, 64), (1, 8, 8, 900, 900, 128), (3, 2, 1, 257, 300, 64)]
    inputs = [oracle.operands(*shape) for shape in shapes]
    wanted = [calm(*tensors) for tensors in inputs]
    compiled = [
        torch.compile(calm, fullgraph=True, dynamic=False, mode="reduce-overhead") for _ in shapes
    ]
    for _ in range(5):
        for function, tensors, want in zip(compiled, inputs, wanted, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                assert torch.equal(function(*tensors), want)
            assert torch.equal(calm(*tensors), want)


@pytest.mark.device
@pytest.mark.parametrize("few_queries", [False, True])
def test_op_first_call_captured_loads_its_kernels(few_queries, monkeypatch):
    """Nothing has been called or loaded yet."""
    for place, name in ((load, "_libraries"), (kernel_choice, "_kernels")):
        monkeypatch.setattr(place, name, {})
    forget(monkeypatch, *FORWARD)
    pages = {
        "layout": "paged_kv_bshd_bshd_bshd",
        "page_table": torch.arange(12, dtype=torch.int32, device=oracle.DEVICE).view(2, 6),
        "seqused_kv": torch.tensor([700, 765], dtype=torch.int32, device=oracle.DEVICE),
    }
    q, k, v = oracle.operands(2, 4, 2, 1 if few_queries else 200, 768, 64)
    if few_queries:
        k, v = (x.view(12, 128, 2, 64) for x in (k, v))
    call = partial(attngen.attention, q, k, v, **(pages if few_queries else {}), backend="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    assert torch.equal(out, call())


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_op_gradient_switched_off_runs(guard):
    q, k, v = oracle.operands(1, 2, 2, 64, 64, 64)
    expected = attngen.attention(q, k, v, mask="causal", backend="cuda")
    with guard():
        out = attngen.attention(q.clone().requires_grad_(), k, v, mask="causal", backend="cuda")
    assert torch.equal(out, expected) and not out.requires_grad


@pytest.mark.parametrize("backend", ["cuda", "auto"])
def test_op_backend_auto_takes_the_kernel(backend, caplog):
    q, k, v = oracle.operands(1, 2, 2, 64, 64, 64)
    out = attngen.attention(q, k, v, backend=backend)
    direct, *_ = torch.ops.attngen.forward(q, k, v)
    assert torch.equal(out, direct)
    assert not caplog.records


@pytest.mark.parametrize("window", [(None, None), (None, 5), (5, None), (-1, -1), [3, 4]], ids=str)
def test_op_every_way_to_write_a_window_is_right(window):
    q, k, v = oracle.operands(1, 2, 2, 100, 100, 64)
    oracle.check_call(q, k, v, window=window)


def test_op_second_device_runs_whichever_is_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    here = oracle.operands(2, 4, 2, 300, 300, 64)
    expected = attngen.attention(*here, mask="causal", backend="cuda")
    there = [x.to("cuda:1") for x in here]
    for current in (0, 1):
        with torch.cuda.device(current):
            out = attngen.attention(*there, mask="causal", backend="cuda")
            again = attngen.attention(*here, mask="causal", backend="cuda")
        assert out.device.index == 1 and again.device.index == 0
        assert torch.equal(out.cpu(), expected.cpu()) and torch.equal(again, expected)
    with pytest.raises(attngen.SpecError, match="cuda:1"):
        attngen.attention(here[0], *there[1:], backend="cuda")


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore")  # of the tracer, deprecated yet in use, and the profiler
def test_op_is_what_modes_profilers_and_traces_see_of_a_call():
    """A call that was made before takes a shorter way, but not where someone looks on."""
    q, k, v = oracle.operands(1, 2, 2, 64, 64, 64)

    def call(q):
        return attngen.attention(q, k, v, mask="causal", backend="cuda")

    expected = [call(q), call(q)]
    with Seen() as seen:
        expected.append(call(q))
    assert "attngen.forward.default" in seen.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        expected.append(call(q))
    assert "attngen::forward" in [event.name for event in profile.events()]
    assert "attngen::forward" in str(torch.jit.trace(call, q, check_trace=False).graph)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call(mode.from_tensor(q))
    assert fake.shape == q.shape and isinstance(fake, torch._subclasses.FakeTensor)
    assert all(torch.equal(out, expected[0]) for out in expected)


def test_op_lazily_negated_operand_is_negated():
    q, k, v = oracle.operands(1, 2, 2, 64, 64, 64)
    call = {"mask": "causal", "backend": "cuda"}
    expected = attngen.attention(-q, k, v, **call)
    assert torch.equal(attngen.attention(torch._neg_view(q), k, v, **call), expected)


def test_op_scale_in_a_tensor_is_read_each_time():
    q, k, v = oracle.operands(1, 2, 2, 64, 64, 64)
    scale = torch.tensor(0.125)
    for value in (0.125, 0.5):
        scale.fill_(value)
        out = attngen.attention(q, k, v, softmax_scale=scale, backend="cuda")
        assert torch.equal(out, attngen.attention(q, k, v, softmax_scale=value, backend="cuda"))


class Layer(torch.nn.Module):
    def forward(self, q, k):
        return attngen.attention(q, k, k, mask="causal", backend="cuda")


@pytest.mark.parametrize("strict", [False, True])
def test_op_exported_runs_at_other_sizes_with_the_kernels_for_these(strict):
    """Kernels for few queries are among them, of which a trace knows nothing."""
    dims = {0: Dim("b", min=1, max=64), 1: Dim("s", min=1, max=4096)}

    def tensors(b, s):
        q, k, _ = oracle.operands(b, 4, 2, s, s, 64, seed=s)
        return q, k

    program = export(Layer(), tensors(2, 133), strict=strict, dynamic_shapes=(dims, dims)).module()
    for b, s in ((3, 50), (5, 7), (1, 1), (1, 300), (2, 1024)):
        given = tensors(b, s)
        assert torch.equal(program(*given), Layer()(*given))


@pytest.mark.device
def test_op_longest_length_in_a_fresh_tensor_waits_for_nothing_and_is_found_again():
    q, k, v = (x[0] for x in oracle.operands(1, 4, 4, 300, 300, 64))
    ends = torch.tensor([0, 100, 300], dtype=torch.int32, device=q.device)
    call = partial(
        attngen.attention, q, k, v, layout="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends,
        mask="padding_causal", backend="cuda",
    )  # fmt: skip
    numbers = [torch.tensor(200, dtype=torch.int32, device=q.device) for _ in range(20)]
    expected = call(max_seqlen_q=200, max_seqlen_kv=200)
    call(max_seqlen_q=numbers[0], max_seqlen_kv=numbers[1])
    call(max_seqlen_q=numbers[0], max_seqlen_kv=numbers[1])
    sizes = [len(each) for each in held(*FORWARD)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = [call(max_seqlen_q=x, max_seqlen_kv=x) for x in numbers]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(each) for each in held(*FORWARD)] == sizes
    assert all(torch.equal(out, expected) for out in outs)

"""Calls that torch traces: sizes stay symbols, whatever serves the call, and another run of the
trace, at other sizes, is right."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx

import attngen
from attngen import SpecError
from tests.support.autograd_kit import OnReference

SIZES = [(3, 50), (5, 7), (1, 6), (4, 1), (1, 1)]  # of a batch, and of queries


@pytest.fixture(params=["kernels", "reference"])
def served(request, monkeypatch):
    """Which operation a trace is to have."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        if request.param == "reference":
            yield "attngen.reference.default"
            return
        stand_in = OnReference(monkeypatch)
        yield "attngen.forward.default"
        stand_in.library._destroy()


class Layer(torch.nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.arguments = arguments

    def forward(self, q, k, named):
        result = attngen.attention(q, k, k, **named, **self.arguments)
        return (result[0], result[1].lse) if isinstance(result, tuple) else result


def new(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


def dense(b, s):
    """Operands whose sizes are in no ratio to each other; s of queries, one more of keys."""
    return new(b, s, 4, 16), new(b, s + 1, 2, 16)


# Tensors that a call may have beside q, k and v, of b sequences of s queries and s + 1 keys, which
# of their axes are those, and what else the call says.
BESIDE = {
    "nothing": (lambda b, s: {}, {}, {}),
    "bias": (
        lambda b, s: {"bias": new(b, 4, s, s + 1)},
        {"bias": {0: "b", 2: "s", 3: "t"}},
        {"bias_type": "pre_scale"},
    ),
    "row of bias": (lambda b, s: {"bias": new(1, s + 1)}, {"bias": {1: "t"}}, {}),
    "attn_mask": (
        lambda b, s: {"attn_mask": torch.rand(b, 1, s, s + 1) > 0.3},
        {"attn_mask": {0: "b", 2: "s", 3: "t"}},
        {},
    ),
    "lengths": (
        lambda b, s: {"seqused_kv": torch.full((b,), s, dtype=torch.int32)},
        {"seqused_kv": {0: "b"}},
        {"mask": "padding_causal_bottom_right", "alibi_slopes": True},
    ),
    "sink": (
        lambda b, s: {"sink": torch.ones(4)},
        {"sink": {}},
        {"softmax": "learnable", "window": (5, 2), "return_lse": True},
    ),
    "scores": (lambda b, s: {}, {}, {"mask": "causal", "softcap": 5.0, "return_max_logit": True}),
}


def dimensions(beside):
    """Dimensions of operands, as torch.export is told of them."""
    dims = {axis: Dim(axis, min=1, max=4096) for axis in "bst"}
    named = {n: {place: dims[axis] for place, axis in of.items()} for n, of in beside.items()}
    return {0: dims["b"], 1: dims["s"]}, {0: dims["b"], 1: dims["t"]}, named


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
@pytest.mark.parametrize("name", BESIDE)
def test_exported_call_is_one_operation_that_runs_at_other_sizes(served, name, strict):
    make, axes, arguments = BESIDE[name]
    layer = Layer(**arguments)
    program = export(
        layer, (*dense(2, 33), make(2, 33)), strict=strict, dynamic_shapes=dimensions(axes)
    )
    (call,) = (node for node in program.graph.nodes if str(node.target) == served)
    assert [type(size) for size in call.meta["val"][0].shape[:2]] == [torch.SymInt] * 2
    module = program.module()
    for b, s in SIZES:
        given = (*dense(b, s), make(b, s))
        torch.testing.assert_close(module(*given), layer(*given))


def packed(tokens, *ends):
    x = new(tokens, 2, 16)
    lengths = torch.tensor([0, *ends], dtype=torch.int32)
    names = ("cu_seqlens_q", "cu_seqlens_kv")
    return x, x, dict.fromkeys(names, lengths)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_exported_call_of_packed_tokens_takes_other_numbers_of_them(served, strict):
    layer = Layer(layout="thd", mask="padding_causal")
    tokens, sequences = Dim("t", min=1, max=999), Dim("n", min=2, max=99)
    dims = (
        {0: tokens},
        {0: tokens},
        dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), {0: sequences}),
    )
    program = export(layer, packed(12, 4, 9), strict=strict, dynamic_shapes=dims).module()
    for given in (packed(30, 5, 6, 30), packed(7, 7), packed(9, 0, 9)):
        torch.testing.assert_close(program(*given), layer(*given))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["nothing", "attn_mask", "lengths"])
def test_compiled_call_serves_many_sizes_with_one_graph(served, name):
    make, _, arguments = BESIDE[name]
    layer = Layer(**arguments)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for b, s in ((7, 33), (3, 50), (5, 7), (9, 2)):  # of which none is a number of heads
            given = (*dense(b, s), make(b, s))
            torch.testing.assert_close(compiled(*given), layer(*given))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BESIDE)
def test_symbolic_make_fx_keeps_its_symbols(served, name):
    make, _, arguments = BESIDE[name]
    layer = Layer(**arguments)
    graph = make_fx(layer, tracing_mode="symbolic")(*dense(2, 33), make(2, 33))
    (q, *_) = (node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder")
    assert [size.node.maybe_as_int() for size in q.shape[:2]] == [None, None]
    for b, s in ((3, 50), (5, 7)):
        given = (*dense(b, s), make(b, s))
        torch.testing.assert_close(graph(*given), layer(*given))


class Kept(torch.nn.Module):
    """Sequences, tokens or keys that depend on data; nothing says that what is kept of q and of k
    is as many."""

    def __init__(self, **arguments):
        super().__init__()
        self.arguments = arguments

    def forward(self, q, k, keep, keep_k, named):
        named = {n: x[keep] if n in ("bias", "seqused_kv") else x for n, x in named.items()}
        return attngen.attention(q[keep], k[keep_k], k[keep_k], **named, **self.arguments)


KEEP, USED = torch.tensor([True, False, True, True]), torch.tensor([3, 4, 5, 6]).int()
X, PLACES = new(4, 9, 2, 16), torch.arange(12)
KEPT = {
    "sequences": ((X, X, KEEP, KEEP.clone(), {}), {"mask": "causal"}),
    "tokens": (
        (*packed(12, 4, 9)[:2], PLACES % 4 != 0, PLACES % 4 != 1, packed(1, 4, 9)[2]),
        {"layout": "thd", "mask": "padding_causal"},
    ),
    "lengths": (
        (X, X, KEEP, KEEP.clone(), {"seqused_kv": USED}),
        {"mask": "padding"},
    ),
    "bias": (
        (X, X, KEEP, KEEP.clone(), {"bias": new(4, 1, 9, 9)}),
        {},
    ),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["compile", "export", "export strictly"])
@pytest.mark.parametrize("name", KEPT)
def test_sizes_that_depend_on_data_are_traced_whole(served, name, way):
    given, arguments = KEPT[name]
    layer = Kept(**arguments)
    if way == "compile":
        traced = torch.compile(layer, fullgraph=True, backend="aot_eager")
    else:
        traced = export(layer, given, strict=way != "export").module()
    torch.testing.assert_close(traced(*given), layer(*given))


def test_size_that_turns_out_wrong_is_refused_by_the_run(served):
    given, arguments = KEPT["lengths"]
    layer = Kept(**arguments)
    traced = export(layer, given, strict=False).module()
    q, k, keep, _, named = given
    with pytest.raises((SpecError, RuntimeError)):
        traced(q, k, keep, ~keep, named)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BESIDE)
def test_compiled_step_has_the_gradients_of_an_eager_one(served, name, dynamic):
    make, _, arguments = BESIDE[name]
    layer = Layer(**arguments)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for b, s in ((2, 6), (3, 5)):
        q, k = dense(b, s)
        named = make(b, s)
        leaves = [x.requires_grad_() for x in (q, k, *named.values()) if x.is_floating_point()]
        found, wanted = (each(q, k, named) for each in (compiled, layer))
        results = [x if isinstance(x, tuple) else (x,) for x in (found, wanted)]
        losses = [sum(x.float().sin().sum() for x in of) for of in results]
        gradients = [torch.autograd.grad(loss, leaves) for loss in losses]
        torch.testing.assert_close(*gradients)


def test_reference_takes_slopes_that_learn_and_float64_in_a_trace():
    q, k = (x.double() for x in dense(2, 6))
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)

    def step(q, k, slopes):
        return attngen.attention(q, k, k, alibi_slopes=slopes, mask="causal").sin().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(each(q, k, slopes), slopes) for each in (compiled, step))
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_traced_reference_keeps_what_only_python_can_follow():
    """Functions, and transforms, second derivatives among them."""
    q, k = (x.float() for x in dense(2, 6))
    scale = torch.tensor(0.5, requires_grad=True)

    def step(q, k, scale):
        return attngen.attention(q, k, k, score_mod=lambda s, *_: s * scale).sin().sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    gradients = (torch.autograd.grad(each(q, k, scale), scale) for each in (compiled, step))
    torch.testing.assert_close(*gradients)
    twice = torch.func.grad(torch.func.grad(lambda s: attngen.attention(q * s, k, k).sum()))
    one = torch.ones(())
    torch.testing.assert_close(make_fx(twice)(one)(one), twice(one))

    def of_queries(q):
        return attngen.attention(q, k, k, mask="causal").sin().sum()

    compiled = torch.compile(torch.func.grad(of_queries), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), torch.func.grad(of_queries)(q))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize("symbols", [False, True], ids=["numbers", "symbols"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["auto", "cuda", "reference"])
def test_fake_cuda_tensors_have_shapes_without_a_gpu(backend, dtype, symbols):
    if symbols:
        trace = make_fx(partial(call_on_fake_gpu, backend, dtype), tracing_mode="symbolic")
        trace(*dense(2, 33))
        return
    with FakeTensorMode() as mode:
        call_on_fake_gpu(backend, dtype, *map(mode.from_tensor, dense(2, 33)))


def call_on_fake_gpu(backend, dtype, *like):
    q, k = (torch.empty(x.shape, dtype=dtype, device="cuda") for x in like)
    call = {"mask": "causal", "alibi_slopes": True, "dropout_p": 0.1, "backend": backend}
    if (backend, dtype) == ("cuda", torch.float32):
        with pytest.raises(SpecError, match="fp32"):
            attngen.attention(q, k, k, **call)
        return q
    out, aux = attngen.attention(q, k, k, **call, return_lse=True)
    # A build of torch for the CPU aborts where autograd meets such a device.
    if dtype == torch.bfloat16:
        gradients = torch.ops.attngen.backward(out, None, q, k, k, out, aux.lse)
    else:
        gradients = torch.ops.attngen.reference_backward(out, None, q, k, k)
    tensors = (out, aux.lse, *gradients[:3])
    for x, shape in zip(tensors, (q.shape, (2, 4, 33), q.shape, k.shape, k.shape), strict=True):
        assert isinstance(x, FakeTensor) and x.device.type == "cuda"
        assert tuple(map(int, x.shape)) == tuple(map(int, shape))
    return out

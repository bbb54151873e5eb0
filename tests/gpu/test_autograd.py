"""Gradients through `attngen.attention` on the kernels, by the rule of gradients.py: whatever
autograd, torch.compile, CUDA graphs and streams do to a call."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attngen
from attngen.spec.problem import Problem

from . import cases, gradients, oracle
from .cases import Case

pytestmark = pytest.mark.gpu
DIMS = (64, 128, 256)
PLAIN = [Case(d, d, mask="causal", heads=(2, 8, 2), lengths=(513, 700)) for d in DIMS]
LONE = Case(128, 128, mask="causal", heads=(1, 4, 2), lengths=(300, 300), layout="sbhd")

PAIRS = ((8, 8), (40, 72), (64, 64), (72, 40), (128, 64), (128, 128), (24, 200), (192, 128),
         (256, 256))  # fmt: skip
LENGTHS = ((1, 77), (65, 127), (200, 333), (333, 130), (257, 257))


def matrix() -> list[Case]:
    """Head-dim pairs, each with every kind of mask; dtypes, heads, lengths and layouts turn."""
    turns = itertools.product(PAIRS, cases.KINDS)
    return [
        cases._case(n, *pair, ("bf16", "fp16")[n // 3 % 2], kind, lengths=LENGTHS[n % len(LENGTHS)])
        for n, (pair, kind) in enumerate(turns)
    ]


def subsets() -> list[tuple[Case, tuple[bool, ...], bool]]:
    """Which inputs want a gradient, and whether the LSE has one; dims of both sets of kernels."""
    dims = ((8, 8), (40, 72), (128, 16), (64, 64), (128, 128), (256, 256), (192, 128))
    wants = [want for want in itertools.product((True, False), repeat=3) if any(want)]
    # From the fifth on: where a query sees one key alone, dQ without a gradient of the LSE is 0 but
    # for rounding, and so is the rule's limit.
    return [
        (cases._case(n + 4, *pair, "bf16", cases.KINDS[m % 4]), want, bool(n % 2))
        for m, pair in enumerate(dims)
        for n, want in enumerate(wants)
    ]


def problems() -> list[Problem]:
    """Backwards that tests launch."""
    every = [*matrix(), *PLAIN, LONE, *(case for case, *_ in subsets())]
    return [each for case in every for each in gradients.backwards_of(case.spec)]


@pytest.fixture
def poisoned():
    """Whatever PyTorch allocates, workspaces included, is NaN until someone writes it."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # what fills memory; calls say theirs
    try:
        with oracle.nan_filled_allocations():
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def leaves(case: Case, wanted=(True, True, True), seed=0, dtype=None):
    """q, k, v of a case."""
    given = (x if dtype is None else x.to(dtype) for x in case.operands(seed))
    return [x.detach().requires_grad_(want) for x, want in zip(given, wanted, strict=True)]


def attend(q, k, v, case: Case, deterministic=False):
    """Output and LSE."""
    out, aux = attngen.attention(
        *(q, k, v), **case.arguments, deterministic=deterministic, return_lse=True, backend="cuda"
    )
    return out, aux.lse


def incoming(out, lse, seed=100):
    """Gradients of both."""
    d_o = oracle.randn(*out.shape, dtype=out.dtype, seed=seed)
    return d_o, oracle.randn(*lse.shape, dtype=torch.float32, seed=seed + 1)


def step(q, k, v, d_o, dlse, case: Case, deterministic=False):
    """A loss whose gradients for output and LSE are d_o and dlse."""
    out, lse = attend(q, k, v, case, deterministic)
    return (out.float() * d_o).sum() + torch.where(lse.isfinite(), lse * dlse, 0).sum()


def given(case: Case, seed=0):
    """Leaves, and gradients for a step with them."""
    tensors = leaves(case, seed=seed)
    with torch.no_grad():
        return tensors, incoming(*attend(*tensors, case), seed=seed + 100)


def assert_right(found, tensors, d_o, dlse, case: Case):
    values = [x.detach() for x in tensors]
    gradients.check(found, (*values, d_o), dlse, **case.arguments)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", matrix(), ids=str)
def test_autograd_on_poisoned_memory_is_right(case, deterministic, poisoned):
    tensors = leaves(case)
    out, lse = attend(*tensors, case, deterministic)
    d_o, dlse = incoming(out.detach(), lse.detach())
    found = torch.autograd.grad((out, lse), tensors, (d_o, dlse))
    torch.use_deterministic_algorithms(False)
    assert_right(found, tensors, d_o, dlse, case)


@pytest.mark.parametrize("sizes", [(0, 70), (70, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("d", DIMS)
def test_autograd_with_nothing_to_see_is_zero(d, sizes, poisoned):
    case = Case(d, d, lengths=sizes)
    tensors = leaves(case)
    found = torch.autograd.grad(attend(*tensors, case)[0].float().sum(), tensors)
    assert all(x.shape == y.shape and not y.any() for x, y in zip(tensors, found, strict=True))


@pytest.mark.parametrize(("case", "wanted", "with_lse"), subsets(), ids=str)
def test_autograd_for_a_subset_of_the_inputs_is_right(case, wanted, with_lse, poisoned):
    tensors = leaves(case, wanted)
    out, lse = attend(*tensors, case)
    d_o, dlse = incoming(out.detach(), lse.detach())
    some = [x for x in tensors if x.requires_grad]
    results, seeds = ((out, lse), (d_o, dlse)) if with_lse else ((out,), (d_o,))
    found = iter(torch.autograd.grad(results, some, seeds))
    torch.use_deterministic_algorithms(False)
    every = [next(found) if want else None for want in wanted]
    values = [x.detach() for x in tensors]
    gradients.check(every, (*values, d_o), dlse if with_lse else None, **case.arguments)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_autograd_through_the_lse_alone_is_right(case):
    tensors, (d_o, dlse) = given(case)
    (_, lse) = attend(*tensors, case)
    found = torch.autograd.grad(lse, tensors, dlse, materialize_grads=True)
    assert_right(found, tensors, torch.zeros_like(d_o), dlse, case)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (1, 2), (3,), (0, 1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("case", [*PLAIN, LONE], ids=str)
def test_autograd_of_a_sum_over_any_axes_is_right(case, axes):
    """The gradient that comes in is expanded: every stride of its tensor can be 0."""
    tensors = leaves(case)
    out = attend(*tensors, case)[0]
    seed = oracle.randn(*out.sum(axes).shape, seed=100)
    (d_o,) = torch.autograd.grad(out.sum(axes), out, seed, retain_graph=True)
    found = torch.autograd.grad(out.sum(axes), tensors, seed)
    values = [x.detach() for x in tensors]
    gradients.check(found, (*values, d_o.contiguous()), None, **case.arguments)


def saved_on_cpu(function, *arguments):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return function(*arguments)


def checkpointed(function, *arguments):
    return checkpoint(function, *arguments, use_reentrant=False)


@pytest.mark.parametrize(
    "way", [checkpointed, pytest.param(saved_on_cpu, marks=pytest.mark.device)]
)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_autograd_checkpointed_or_saved_on_the_cpu_has_the_same_bits(case, way):
    tensors, seeds = given(case)
    expected = torch.autograd.grad(step(*tensors, *seeds, case, True), tensors)
    found = torch.autograd.grad(way(step, *tensors, *seeds, case, True), tensors)
    assert oracle.same(found, expected)
    assert_right(found, tensors, *seeds, case)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_autograd_training_step_compiled_whole_is_right(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for number, lengths in enumerate([(513, 700), (300, 411)]):
        case = dataclasses.replace(PLAIN[1], lengths=lengths)
        tensors, seeds = given(case, number)
        found = torch.autograd.grad(compiled(*tensors, *seeds, case), tensors)
        assert_right(found, tensors, *seeds, case)
    torch._dynamo.reset()


@pytest.mark.device
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_autograd_captured_in_a_graph_follows_changed_inputs(case):
    """Forward and backward in one graph, replayed."""
    tensors, seeds = given(case)
    static = [*tensors, *seeds]

    def run():
        return torch.autograd.grad(step(*static, case, True), tensors)

    graph, found = oracle.capture(run)
    for number in range(1, 5):
        fresh, fresh_seeds = given(case, number)
        with torch.no_grad():
            for held, new in zip(static, (*fresh, *fresh_seeds), strict=True):
                held.copy_(new)
        graph.replay()
        assert oracle.same(found, run())
        assert_right(found, fresh, *fresh_seeds, case)


@pytest.mark.device
def test_autograd_in_graphed_callables_is_right():
    case = PLAIN[1]

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v, case)[0]

    layer = torch.cuda.make_graphed_callables(Layer(), tuple(leaves(case, seed=9)))
    for number in range(3):
        tensors, (d_o, _) = given(case, number)
        found = torch.autograd.grad(layer(*tensors), tensors, d_o)
        gradients.check(found, (*(x.detach() for x in tensors), d_o), None, **case.arguments)


@pytest.mark.slow
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_autograd_under_autocast_gives_float32_gradients(case):
    tensors, seeds = given(case)
    wide = [x.detach().float().requires_grad_() for x in tensors]
    with torch.autocast(oracle.DEVICE.type, torch.bfloat16):
        loss = step(*wide, *seeds, case, True)
    found = torch.autograd.grad(loss, wide)
    expected = torch.autograd.grad(step(*tensors, *seeds, case, True), tensors)
    assert all(x.dtype == torch.float32 for x in found)
    assert oracle.same(found, [x.float() for x in expected])


@contextlib.contextmanager
def busy():
    """Matrix products on another stream, enough for some tens of milliseconds."""
    stream, size = torch.cuda.Stream(), 4096
    a = torch.randn(size, size, device=oracle.DEVICE, dtype=torch.bfloat16)
    with torch.cuda.stream(stream):
        for _ in range(100):
            a @ a
    yield
    stream.synchronize()


@pytest.mark.device
@pytest.mark.parametrize("d", DIMS)
def test_autograd_deterministic_gives_the_same_bits_in_20_runs_under_load(d):
    case = Case(d, d, mask="causal", heads=(2, 8, 2), lengths=(2000, 2000))
    tensors, seeds = given(case)
    torch.use_deterministic_algorithms(True, warn_only=True)  # the load's products would fail
    try:
        first = torch.autograd.grad(step(*tensors, *seeds, case, None), tensors)
        for _ in range(20):
            with busy():
                found = torch.autograd.grad(step(*tensors, *seeds, case, None), tensors)
                assert oracle.same(found, first)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_right(first, tensors, *seeds, case)


@pytest.mark.device
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_autograd_backward_called_on_another_stream_is_right(case):
    tensors, seeds = given(case)
    expected = torch.autograd.grad(step(*tensors, *seeds, case, True), tensors)
    loss = step(*tensors, *seeds, case, True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = torch.autograd.grad(loss, tensors)
    stream.synchronize()
    assert oracle.same(found, expected)


@pytest.mark.device
def test_autograd_of_tensors_past_two_to_the_31_elements_is_right():
    """Chunks of a windowed call, whose gradients depend on their neighbourhood alone."""
    length, heads, left = 1 << 20, 33, 128
    q, k, v = (x.requires_grad_() for x in oracle.operands(1, heads, 1, length, length, 64))
    assert q.numel() > 1 << 31
    out = attngen.attention(q, k, v, window=(left, 0), backend="cuda")
    d_o = oracle.randn(*out.shape, seed=5)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_o)
    del out
    for start in (0, 400_001, length - 400):
        end = start + 400
        low, sure = max(0, start - left), length if end == length else end - left
        some = [*(x.detach()[:, low:end] for x in (k, v)), d_o[:, start:end]]
        arguments = {"window": (left, 0), "bottom_right": True}
        given = (q.detach()[:, start:end], *some)
        first = start if start else 0
        whole = gradients.reference_gradients(given, None, torch.float64, **arguments)[2]
        keys = slice(first - low, sure - low)
        found = (dq[:, start:end], dk[:, first:sure], dv[:, first:sure])
        rounded = gradients.reference_gradients(given, None, q.dtype, **arguments)[2]
        cut = [(x[0], x[1][:, keys], x[2][:, keys]) for x in (whole, rounded)]
        gradients.check_against(found, *cut)

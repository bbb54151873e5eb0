"""Calls that are differentiated and launched with no operation between: what autograd asks of the
dispatcher's calls holds for them, and what is known of one call is not taken for another's."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import attngen
from attngen import SpecError
from attngen.frontends.pytorch import autograd

from . import cases, gradients, oracle

pytestmark = pytest.mark.gpu
KERNELS = cases.core_specs(64, kinds=("causal",))
D = 64
ENDS = (0, 50, 130)
PARTS = ("forward", "backward")


class Looking(TorchDispatchMode):
    """Sees what is dispatched, and so makes calls go through the operations."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def leaves(seed=0, length=130, heads=2):
    q, k, v = oracle.operands(1, heads, heads, length, length, D, seed=seed)
    return [x.requires_grad_() for x in (q, k, v)]


def attend(q, k, v, **arguments):
    arguments = {"mask": "causal", "deterministic": True, **arguments}
    return attngen.attention(q, k, v, **arguments, backend="cuda")


def check(found, tensors, d_o, **arguments):
    values = [x.detach() for x in tensors]
    gradients.check(found, (*values, d_o.contiguous()), None, mask="causal", **arguments)


@pytest.fixture
def dispatched(monkeypatch):
    """Names of the operations that were called."""
    names = []
    for name in PARTS:
        operation = getattr(torch.ops.attngen, name)

        def call(*arguments, _name=name, _operation=operation, **flags):
            names.append(_name)
            return _operation(*arguments, **flags)

        monkeypatch.setattr(torch.ops.attngen, name, call)
    return names


def packed_lengths():
    ends = torch.tensor(ENDS, dtype=torch.int32, device=oracle.DEVICE)
    return {"layout": "thd", "mask": "padding_causal", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}


@pytest.mark.parametrize("looking", [(), ("forward",), ("backward",), ("forward", "backward")])
def test_call_that_is_looked_at_has_the_same_bits(looking):
    tensors, d_o = leaves(), oracle.randn(1, 130, 2, D, seed=9)
    expected = torch.autograd.grad(attend(*tensors), tensors, d_o)
    for _ in range(2):
        modes = {part: Looking() if part in looking else contextlib.nullcontext() for part in PARTS}
        with modes["forward"]:
            out = attend(*tensors)
        with modes["backward"]:
            found = torch.autograd.grad(out, tensors, d_o)
        assert oracle.same(found, expected)
        for part in looking:
            assert f"attngen.{part}.default" in modes[part].seen
    check(found, tensors, d_o)


def test_calls_of_equal_formats_get_their_own_gradients(dispatched):
    for seed in range(3):
        tensors, d_o = leaves(seed), oracle.randn(1, 130, 2, D, seed=seed + 50)
        check(torch.autograd.grad(attend(*tensors), tensors, d_o), tensors, d_o)
    assert not dispatched


def test_packed_calls_with_one_tensor_of_lengths_or_two_are_right(dispatched):
    q, k, v = (x.detach()[0].requires_grad_() for x in leaves())
    d_o, given = oracle.randn(130, 2, D, seed=9), packed_lengths()
    found = []
    for copies in (False, True, False):
        if copies:
            given = {**given, "cu_seqlens_kv": given["cu_seqlens_kv"].clone()}
        found.append(torch.autograd.grad(attend(q, k, v, **given), (q, k, v), d_o))
    assert not dispatched and oracle.same(found[0], found[1]) and oracle.same(found[0], found[2])
    for start, end in zip(ENDS, ENDS[1:], strict=False):
        part = [x[None, start:end] for x in (q, k, v)]
        some = [x[None, start:end] for x in found[0]]
        check(some, part, d_o[None, start:end])


def test_deterministic_is_what_torch_does_when_it_is_called(monkeypatch):
    seen, differentiate = [], autograd.differentiate
    note = lambda call, *rest: seen.append(call.arguments.deterministic)  # noqa: E731
    monkeypatch.setattr(autograd, "differentiate", lambda *x: note(*x) or differentiate(*x))
    tensors, wanted = leaves(), [False, True] * 3
    for on in wanted:
        torch.use_deterministic_algorithms(on, warn_only=True)
        try:
            out = attend(*tensors, deterministic=None)
        finally:
            torch.use_deterministic_algorithms(False)
        torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert seen == wanted


def gradients_that_come_in(shape):
    """Make gradients of one shape in the strides in which autograd may hand them over."""
    whole = oracle.randn(*shape, seed=5)
    yield whole
    yield torch.ones((), dtype=whole.dtype, device=whole.device).expand(shape)
    yield oracle.randn(shape[0], shape[2], shape[1], shape[3], seed=6).transpose(1, 2)
    shifted = torch.empty(whole.numel() + 1, dtype=whole.dtype, device=whole.device)[1:]
    yield shifted.view(shape).copy_(whole)
    yield whole


def test_incoming_gradients_of_any_strides_and_addresses_are_read_right(dispatched):
    tensors = leaves()
    for d_o in gradients_that_come_in((1, 130, 2, D)):
        check(torch.autograd.grad(attend(*tensors), tensors, d_o), tensors, d_o)
    assert not dispatched


def test_several_incoming_gradients_at_once_are_read_right():
    tensors = leaves()
    d_o = torch.stack([oracle.randn(1, 130, 2, D, seed=seed) for seed in (5, 6)])
    for _ in range(2):
        found = torch.autograd.grad(attend(*tensors), tensors, d_o, is_grads_batched=True)
        for place in range(2):
            expected = torch.autograd.grad(attend(*tensors), tensors, d_o[place])
            assert oracle.same([x[place] for x in found], expected)


def test_incoming_gradients_that_lie_nowhere_are_read_right():
    tensors, d_o = leaves(), oracle.randn(1, 130, 2, D, seed=9)
    minus = torch.autograd.grad(attend(*tensors), tensors, torch._neg_view(d_o))
    assert oracle.same([-x for x in minus], torch.autograd.grad(attend(*tensors), tensors, d_o))
    nothing = torch._efficientzerotensor(d_o.shape, dtype=d_o.dtype, device=d_o.device)
    assert not any(x.any() for x in torch.autograd.grad(attend(*tensors), tensors, nothing))


class Named(torch.Tensor):
    """A tensor of a type of its own that is read as any other."""


class Weight(torch.nn.Parameter):
    pass


@pytest.mark.parametrize("named", [(0,), (3,), (0, 1, 2, 3)], ids=str)
def test_tensors_of_a_type_of_their_own_are_read_right(named):
    values = [*(x.detach() for x in leaves()), oracle.randn(1, 130, 2, D, seed=9)]
    given = [x.as_subclass(Named) if n in named else x.clone() for n, x in enumerate(values)]
    tensors = [x.requires_grad_() for x in given[:3]]
    for _ in range(2):
        check(torch.autograd.grad(attend(*tensors), tensors, given[3]), values[:3], values[3])


def test_parameter_of_a_type_of_its_own_has_its_gradient():
    tensors, d_o = leaves(), oracle.randn(1, 130, 2, D, seed=9)
    found = []
    for kind in (Weight, torch.nn.Parameter):
        sink = kind(torch.zeros(2, device=oracle.DEVICE))
        out = attend(*tensors, softmax="learnable", sink=sink)
        found.append(torch.autograd.grad(out, (*tensors, sink), d_o))
    assert oracle.same(*found)


def test_operands_that_come_back_with_other_strides_are_read_right():
    """`save_on_cpu` brings back tensors with other strides."""
    tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in leaves()]
    tensors = [x.requires_grad_() for x in tensors]
    d_o = oracle.randn(1, 130, 2, D, seed=9)
    expected = torch.autograd.grad(attend(*tensors), tensors, d_o)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.contiguous()):
        found = torch.autograd.grad(attend(*tensors), tensors, d_o)
    assert oracle.same(found, expected)
    check(found, tensors, d_o)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_gradients_of_a_subset_are_known_apart(wanted):
    tensors = [x.detach() for x in leaves()]
    d_o = oracle.randn(1, 130, 2, D, seed=9)
    every = [x.clone().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(attend(*every), every, d_o)
    for place in wanted:
        tensors[place].requires_grad_()
    some = [tensors[place] for place in wanted]
    found = torch.autograd.grad(attend(*tensors), some, d_o)
    assert oracle.same(found, [expected[place] for place in wanted])


def test_one_tensor_as_keys_and_values_gets_both_gradients(dispatched):
    q, k, v = leaves()
    d_o = oracle.randn(1, 130, 2, D, seed=9)
    same = k.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(attend(q, same, same), (same,), d_o)
    two = [x.detach().clone().requires_grad_() for x in (same, same)]
    dk, dv = torch.autograd.grad(attend(q, *two), two, d_o)
    assert not dispatched and oracle.same([found], [dk + dv])


def test_no_gradient_is_kept_of_calls_without_and_none_missed_of_calls_with():
    tensors = leaves()
    for _ in range(3):
        assert attend(*tensors).requires_grad
        with torch.no_grad():
            assert not attend(*tensors).requires_grad
        assert not attend(*(x.detach() for x in tensors)).requires_grad


def test_retained_graph_gives_the_same_bits_and_a_freed_one_is_refused():
    tensors, d_o = leaves(), oracle.randn(1, 130, 2, D, seed=9)
    out = attend(*tensors)
    first = torch.autograd.grad(out, tensors, d_o, retain_graph=True)
    assert oracle.same(torch.autograd.grad(out, tensors, d_o), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, tensors, d_o)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_checkpointed_again_and_again_have_all_their_gradients(reentrant):
    """A first pass under no_grad and a second one with gradients, of calls that are alike."""
    tensors, d_o = leaves(), oracle.randn(1, 130, 2, D, seed=9)

    def layer(q, k, v):
        return attend(attend(q, k, v) + q, k, v) + q

    expected = torch.autograd.grad(layer(*tensors), tensors, d_o)
    for _ in range(3):
        fresh = [x.detach().requires_grad_() for x in tensors]
        checkpoint(layer, *fresh, use_reentrant=reentrant).backward(d_o)
        assert oracle.same([x.grad for x in fresh], expected)


@pytest.mark.filterwarnings("ignore:Error detected in Attention")
def test_anomalies_are_found():
    tensors = leaves()
    with torch.autograd.set_detect_anomaly(True):
        out = attend(*tensors)
        with pytest.raises(RuntimeError, match="nan values in its 0th output"):
            torch.autograd.grad(out, tensors, torch.full_like(out, torch.nan))


def test_traced_step_has_both_operations():
    def step(*tensors):
        some = [x.detach().requires_grad_() for x in tensors]
        return torch.autograd.grad(attend(*some).sum(), some)

    tensors = [x.detach() for x in leaves()]
    traced = make_fx(step)(*tensors)
    names = [str(node.target) for node in traced.graph.nodes]
    assert all(f"attngen.{part}.default" in names for part in PARTS)
    other = [x.detach() for x in leaves(1)]
    assert oracle.same(traced(*other), step(*other))


def test_steps_in_several_threads_are_right():
    failed = []

    def run(seed):
        try:
            for _ in range(2):
                tensors, d_o = leaves(seed), oracle.randn(1, 130, 2, D, seed=seed + 50)
                check(torch.autograd.grad(attend(*tensors), tensors, d_o), tensors, d_o)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed


@pytest.mark.parametrize("which", ["q", "out"])
def test_tensor_changed_after_the_call_is_noticed(which):
    q, k, v = leaves()
    held = q * 1
    out = attend(held, k, v)
    (held if which == "q" else out).add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def test_second_derivative_is_refused():
    tensors = leaves()
    first = torch.autograd.grad(attend(*tensors).float().sum(), tensors, create_graph=True)
    with pytest.raises(SpecError, match="no second derivative"):
        first[0].sum().backward()


def test_gradient_of_an_operand_that_has_none_is_refused():
    tensors = leaves()
    attend(*tensors, alibi_slopes=torch.ones(2, device=oracle.DEVICE))
    slopes = torch.ones(2, device=oracle.DEVICE, requires_grad=True)
    with pytest.raises(SpecError, match="alibi_slopes has no gradient"):
        attend(*tensors, alibi_slopes=slopes)


def test_parameters_are_no_other_than_tensors(dispatched):
    q, k, v = leaves()
    sink = torch.nn.Parameter(torch.zeros(2, device=oracle.DEVICE))
    out = attend(q, k, v, softmax="learnable", sink=sink)
    found = torch.autograd.grad(out, (q, k, v, sink), torch.ones_like(out))
    assert not dispatched and found[3].shape == (2,) and bool(found[3].any())


@pytest.mark.device
def test_step_captured_in_a_graph_follows_changed_inputs():
    tensors, d_o = leaves(), oracle.randn(1, 130, 2, D, seed=9)
    graph, found = oracle.capture(lambda: torch.autograd.grad(attend(*tensors), tensors, d_o))
    for seed in (1, 2):
        with torch.no_grad():
            for held, new in zip(tensors, leaves(seed), strict=True):
                held.copy_(new)
        graph.replay()
        assert oracle.same(found, torch.autograd.grad(attend(*tensors), tensors, d_o))
        check(found, tensors, d_o)

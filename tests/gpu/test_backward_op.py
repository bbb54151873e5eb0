"""The operation `attngen::backward`: forward and backward kernels together, graphs, streams."""

from __future__ import annotations

import pytest
import torch

import attngen
import attngen.frontends.pytorch.backward  # noqa: F401  # defines the operation

from . import cases, gradients, oracle

pytestmark = pytest.mark.gpu
KERNELS = cases.core_specs(64, 128, 256, kinds=("none", "causal"))


def operands(d, heads=(2, 8, 2), lengths=(513, 700), layout="bshd", dtype=torch.bfloat16, seed=0):
    """q, k, v and d_o."""
    q, k, v = oracle.operands(*heads, *lengths, d, None, dtype, layout, seed)
    return q, k, v, oracle.randn(*q.shape, dtype=dtype, seed=seed + 50)


def results(tensors, mask="causal", layout="bshd", dlse=None, deterministic=False, left=-1):
    """dq, dk, dv by the kernels, forward included."""
    q, k, v, d_o = tensors
    given = {"mask": mask, "layout": layout, "window": (left, -1)}
    out, aux = attngen.attention(q, k, v, **given, backend="cuda", return_lse=True)
    arguments = {"layout": layout, "mask": mask, "deterministic": deterministic}
    arguments["window_left"] = left
    return torch.ops.attngen.backward(d_o, dlse, q, k, v, out, aux.lse, **arguments)[:3]


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_op_on_the_kernels_own_output_is_right(d, mask, layout):
    tensors = operands(d, layout=layout)
    dlse = oracle.randn(2, 8, 513, dtype=torch.float32, seed=3)
    with oracle.nan_filled_allocations():
        found = results(tensors, mask, layout, dlse)
    gradients.check(found, tensors, dlse, mask=mask, layout=layout)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_op_gradient_expanded_from_one_number_is_read_right(d):
    q, k, v, d_o = operands(d)
    one = torch.ones((), dtype=q.dtype, device=oracle.DEVICE).expand(d_o.shape)
    gradients.check(results((q, k, v, one)), (q, k, v, one.contiguous()), None, mask="causal")


@pytest.mark.parametrize("keys", [256, 257])
def test_op_with_the_widest_narrow_window_or_a_wider_one_is_right(keys):
    """Either has kernels of its own; a trace notes what was asked for, which is no order."""
    q, k, v, d_o = operands(32, heads=(1, 2, 2), lengths=(400, 400))
    arguments = {"mask": "causal", "window": (keys, 0)}
    sides = {"window_left": keys, "window_right": 0, "mask": "causal"}
    out, aux = attngen.attention(q, k, v, **arguments, backend="cuda", return_lse=True)
    with oracle.nan_filled_allocations(), attngen.trace() as trace:
        found = torch.ops.attngen.backward(d_o, None, q, k, v, out, aux.lse, **sides)[:3]
    gradients.check(found, (q, k, v, d_o), None, **arguments)
    ((problem, _),) = trace.variants
    assert problem.direction == "bwd" and not problem.deterministic


@pytest.mark.device
@pytest.mark.parametrize("d", [64, 128, 256])
def test_op_deterministic_gives_the_same_bits_on_every_stream(d):
    tensors = operands(d, lengths=(1500, 1500))
    first = results(tensors, deterministic=True)
    torch.cuda.synchronize()
    for _ in range(5):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = results(tensors, deterministic=True)
        stream.synchronize()
        assert oracle.same(found, first)


@pytest.mark.device
@pytest.mark.parametrize(("d", "left"), [(64, -1), (256, -1), (128, -1), (128, 150), (72, 0)])
def test_op_graph_replay_follows_changed_inputs(d, left):
    """Under narrow windows the main kernel waits for D that its other CTAs make."""
    tensors = operands(d)
    graph, found = oracle.capture(lambda: results(tensors, deterministic=True, left=left))
    for number in range(5):
        for tensor, fresh in zip(tensors, operands(d, seed=number + 1), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        assert oracle.same(found, results(tensors, deterministic=True, left=left))


@pytest.mark.device
def test_op_several_streams_at_once_do_not_meet():
    given = [
        (operands(d, seed=d), left) for d, left in ((64, -1), (128, -1), (256, -1), (128, 150))
    ]
    wanted = [results(each, deterministic=True, left=left) for each, left in given]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in given]
    for _ in range(5):
        found = []
        for (each, left), stream in zip(given, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(results(each, deterministic=True, left=left))
        torch.cuda.synchronize()
        assert all(oracle.same(a, b) for a, b in zip(found, wanted, strict=True))


def test_op_without_keys_is_zero():
    q, k, v, d_o = operands(64, lengths=(100, 0))
    lse = torch.full((2, 8, 100), float("-inf"), device=oracle.DEVICE)
    dq, dk, dv, *_ = torch.ops.attngen.backward(d_o, None, q, k, v, torch.zeros_like(q), lse)
    assert not dq.any() and dk.numel() == dv.numel() == 0

"""ALiBi, softcap, sinks and max_logit, alone and together, forward and backward."""

from __future__ import annotations

import pytest
import torch

import attngen
from attngen.spec.problem import Problem

from . import oracle, variants
from .cases import Case
from .variants import Variant

pytestmark = pytest.mark.gpu
VARIANTS = variants.every_kind()
EIGHT_BIT = variants.eight_bit()
PLAIN = Case(128, 128, mask="causal", lengths=(300, 300), heads=(2, 4, 2))
KERNELS = [variant.spec for variant in (*VARIANTS, *EIGHT_BIT)]
EACH = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def problems() -> list[Problem]:
    """Backwards that tests launch."""
    return [each for variant in VARIANTS for each in variant.backward.orders()]


@EACH
def test_forward_is_right(variant):
    variants.check_forward(variant)


@EACH
def test_backward_is_right(variant):
    variants.check_backward(variant)


@pytest.mark.parametrize("variant", EIGHT_BIT, ids=str)
def test_forward_of_8_bits_is_right(variant):
    variants.check_forward(variant)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (300, 1), (257, 64)], ids=str)
@pytest.mark.parametrize("number", [7, 12])
def test_lengths_at_the_edges_are_right(number, lengths):
    given = VARIANTS[number]
    for mask in ("none", "causal_bottom_right"):
        case = Case(128, 128, mask=mask, lengths=lengths, heads=(2, 4, 1))
        variant = Variant(case, given.alibi, given.softmax, given.softcap, given.max_logit)
        variants.check_forward(variant)
        variants.check_backward(variant)


def test_sink_alone_is_the_lse_of_rows_that_see_no_key():
    q, k, v = Case(128, 128, lengths=(200, 100), heads=(1, 3, 3)).operands()
    sink = torch.tensor([-2.0, 0.0, 5.0], device=oracle.DEVICE)
    arguments = {"mask": "causal_bottom_right", "softmax": "learnable", "sink": sink}
    out, aux = attngen.attention(
        *(q, k, v), **arguments, backend="cuda", return_lse=True, return_max_logit=True
    )
    assert not out[:, :100].any()
    assert torch.equal(aux.lse[0, :, :100], sink[:, None].expand(3, 100))


def test_sink_without_keys_is_the_lse_and_takes_its_gradient():
    q, k, v = (x.requires_grad_() for x in Case(64, 64, lengths=(9, 0), heads=(2, 3, 3)).operands())
    sink = torch.tensor([-2.0, 0.0, 5.0], device=oracle.DEVICE, requires_grad=True)
    for softmax, given in (("learnable", sink), ("off_by_one", None)):
        out, aux = attngen.attention(
            q, k, v, softmax=softmax, sink=given, backend="cuda", return_lse=True
        )
        wanted = torch.zeros(3, device=oracle.DEVICE) if given is None else given.detach()
        assert not out.any() and torch.equal(aux.lse, wanted[:, None].expand(2, 3, 9))
        if given is not None:
            dlse = oracle.randn(2, 3, 9, dtype=torch.float32)
            (found,) = torch.autograd.grad([aux.lse], [sink], [dlse])
            torch.testing.assert_close(found, dlse.sum((0, 2)))


def test_gradient_of_the_sink_alone_is_that_beside_the_others():
    q, k, v = PLAIN.operands()
    sink = torch.linspace(-1, 3, 4, device=oracle.DEVICE, requires_grad=True)
    arguments = {"mask": "causal", "softmax": "learnable", "sink": sink, "backend": "cuda"}
    d_o = oracle.randn(*q.shape, seed=5)
    (alone,) = torch.autograd.grad(attngen.attention(q, k, v, **arguments), [sink], [d_o])
    out = attngen.attention(q.requires_grad_(), k, v, **arguments)
    _, beside = torch.autograd.grad(out, [q, sink], [d_o])
    assert torch.equal(alone, beside) and alone.abs().min() > 0


def test_sink_of_any_size_leaves_no_nan():
    q, k, v = PLAIN.operands()
    for value in (-float("inf"), -1e30, -200.0, 200.0, 1e30):
        sink = torch.full((4,), value, device=oracle.DEVICE)
        out, aux = attngen.attention(
            *(q, k, v), mask="causal", softmax="learnable", sink=sink, backend="cuda",
            return_lse=True,
        )  # fmt: skip
        plain, plain_aux = attngen.attention(
            q, k, v, mask="causal", backend="cuda", return_lse=True
        )
        if value < -100:
            assert torch.equal(out, plain)
            torch.testing.assert_close(aux.lse, plain_aux.lse, rtol=1e-6, atol=1e-6)
        else:
            assert out.abs().max() < 1e-30 and torch.equal(aux.lse, sink[0].expand_as(aux.lse))


def test_max_logit_below_zero_is_found():
    q, k, v = PLAIN.operands()
    q, k = q.abs(), -k.abs()
    _, aux = attngen.attention(q, k, v, mask="causal", backend="cuda", return_max_logit=True)
    assert (aux.max_logit < 0).all()
    variants.check_max_logit(aux.max_logit, q, k, v, {"mask": "causal"}, False)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_max_logit_of_no_heads_is_empty(layout):
    shape = (2, 5, 0, 64) if layout == "bshd" else (10, 0, 64)
    q = torch.empty(shape, dtype=torch.bfloat16, device=oracle.DEVICE)
    k = torch.zeros(*shape[:-2], 1, 64, dtype=torch.bfloat16, device=oracle.DEVICE)
    ends = torch.tensor([0, 5, 10], dtype=torch.int32, device=oracle.DEVICE)
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ends) if layout == "thd" else {}
    _, aux = attngen.attention(
        q, k, k, layout=layout, **lengths, backend="cuda", return_max_logit=True
    )
    assert aux.max_logit.shape == (0,) and aux.max_logit.dtype == torch.float32


def test_gradient_of_slopes_is_refused():
    q, k, v = (x.requires_grad_() for x in PLAIN.operands())
    slopes = torch.ones(4, device=oracle.DEVICE, requires_grad=True)
    with pytest.raises(attngen.SpecError, match="alibi_slopes has no gradient"):
        attngen.attention(q, k, v, mask="causal", alibi_slopes=slopes, backend="cuda")


def test_calls_with_other_slopes_and_sinks_follow_them():
    """A call's shapes are remembered, never its values."""
    q, k, v = PLAIN.operands()
    for seed in range(3):
        given = {
            "alibi_slopes": oracle.randn(4, dtype=torch.float32, seed=seed).abs(),
            "sink": oracle.randn(4, dtype=torch.float32, seed=seed + 9),
            "softmax": "learnable",
            "mask": "causal",
        }
        out, aux = attngen.attention(q, k, v, **given, backend="cuda", return_lse=True)
        oracle.check(out, aux.lse, oracle.truth(q, k, v, **given))


@pytest.mark.device
def test_default_slopes_first_used_in_a_capture_are_the_graphs_own():
    """Later calls must not read what exists only once the graph was replayed."""
    case = Case(128, 128, mask="causal", lengths=(300, 300), heads=(1, 7, 7))
    q, k, v = case.operands()
    arguments = {"mask": "causal", "alibi_slopes": True, "backend": "cuda"}
    attngen.attention(q[:, :, :4], k[:, :, :4], v[:, :, :4], **arguments)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attngen.attention(q, k, v, **arguments)
    eager = attngen.attention(q, k, v, **arguments)
    graph.replay()
    assert torch.equal(captured, eager)
    oracle.check(eager, None, oracle.truth(q, k, v, mask="causal", alibi_slopes=True))


def test_default_slopes_are_the_same_on_every_device():
    for heads in (1, 2, 6, 7, 12, 16, 48, 71, 128):
        slopes = attngen.reference.default_alibi_slopes
        assert torch.equal(slopes(heads, oracle.DEVICE).cpu(), slopes(heads))

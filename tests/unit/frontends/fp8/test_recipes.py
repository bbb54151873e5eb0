"""Recipes, quantizers and the FP8 tensor: which scales follow from which numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attngen
from attngen import SpecError, fp8
from attngen.reference.fp8_scales import largest, power_of_two_below, scale_of, stored

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class NoWait(TorchDispatchMode):
    """Raises where a value of a tensor comes to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "it waits for the device"
        return func(*args, **(kwargs or {}))


def randn(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_formats_have_the_dtypes_of_both_directions():
    assert (fp8.Format.HYBRID.forward, fp8.Format.HYBRID.backward) == (E4M3, E5M2)
    assert (fp8.Format.E4M3.forward, fp8.Format.E4M3.backward) == (E4M3, E4M3)


WRONG = [
    (lambda: fp8.DelayedScaling(margin=0.5, fp8_format="HYBRID", amax_history_len=0,
                                amax_compute_algo="mean"),
     ["fp8_format", "margin", "amax_history_len", "amax_compute_algo"]),
    (lambda: fp8.Float8CurrentScaling(fp8_format=E4M3, amax_epsilon=-1),
     ["fp8_format", "amax_epsilon"]),
    (lambda: fp8.Float8CurrentScaling(amax_epsilon=math.nan), ["amax_epsilon"]),
    (lambda: fp8.autocast(recipe="delayed"), ["recipe needs"]),
    (lambda: fp8.Quantizer(torch.bfloat16), ["dtype needs"]),
    (lambda: fp8.Float8Tensor(torch.zeros(2), torch.zeros(3), torch.int8),
     ["stored needs", "scale_inv needs", "dtype needs"]),
    (lambda: fp8.Float8Tensor(torch.zeros(2).to(E4M3), torch.zeros(1, device="meta")),
     ["scale_inv needs device cpu"]),
]  # fmt: skip


@pytest.mark.parametrize("made", range(len(WRONG)))
def test_wrong_arguments_are_refused_together(made):
    make, words = WRONG[made]
    with pytest.raises(SpecError) as caught:
        make()
    assert len(caught.value.reasons) == len(words)
    for word, reason in zip(words, caught.value.reasons, strict=True):
        assert word in reason


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scale_fills_the_format_and_margin_leaves_binades(dtype):
    amax = torch.tensor([1.0, 3.0, 1e-3])
    largest = torch.finfo(dtype).max
    torch.testing.assert_close(scale_of(amax, dtype, 1.0) * amax, torch.full((3,), largest))
    assert torch.equal(scale_of(amax, dtype, 1.0, 2) * 4, scale_of(amax, dtype, 1.0))


def test_scale_of_what_is_no_magnitude_is_the_one_before():
    amax = torch.tensor([0.0, math.inf, math.nan])
    assert scale_of(amax, E4M3, torch.tensor([7.0, 8.0, 9.0])).tolist() == [7, 8, 9]
    tiny = scale_of(torch.tensor([1e-45, 3e38]), E4M3, 1.0)
    assert tiny.isfinite().all() and tiny.reciprocal().isfinite().all() and (tiny > 0).all()


def test_power_of_two_below_is_exact():
    x = torch.tensor([1.0, 1.9999999, 2.0, 448.0, 2.0**-126, 3e38])
    assert power_of_two_below(x).tolist() == [2.0 ** math.floor(math.log2(v)) for v in x.tolist()]


def test_algorithms_read_the_history():
    history = torch.tensor([[1.0, 5.0], [4.0, 2.0], [3.0, 3.0]])
    assert fp8.DelayedScaling().amax_of(history).tolist() == [4, 5]
    recent = fp8.DelayedScaling(amax_compute_algo="most_recent")
    assert recent.amax_of(history).tolist() == [1, 5]
    own = fp8.DelayedScaling(amax_compute_algo=lambda h: h.mean(0))
    torch.testing.assert_close(own.amax_of(history), history.mean(0))


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_powers_of_two_store_the_same_without_wider_copies(dtype, size):
    x = (randn(4000, dtype=torch.float32) * size).to(dtype)
    scale = fp8.Float8CurrentScaling().scale(largest(x), E4M3)
    narrow, wide = stored(x, E4M3, scale, True), stored(x, E4M3, scale)
    assert torch.equal(narrow.view(torch.uint8), wide.view(torch.uint8))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_current_quantizer_stores_by_each_tensors_magnitude(dtype):
    quantizer = fp8.CurrentQuantizer(dtype)
    for size in (1.0, 1e-4):
        x = randn(40, 16) * size
        with NoWait():
            stored = quantizer(x)
        top = stored._data.float().abs().max().item()
        assert torch.finfo(dtype).max / 2.3 < top <= torch.finfo(dtype).max
        assert math.frexp(quantizer.scale.item())[0] == 0.5
        assert quantizer.scale_inv.item() == 1 / quantizer.scale.item()
        step = 2.0 ** -(4 if dtype == E4M3 else 3)
        error = (stored.dequantize(torch.float32) - x.float()).abs()
        assert (error <= step * x.float().abs() + 1e-3 * size).all()
    assert quantizer.amax.item() == randn(40, 16).abs().max().item(), "the largest of both"


def test_delayed_quantizer_starts_from_the_tensor_and_follows_its_history():
    quantizer = fp8.DelayedQuantizer(E4M3, recipe=fp8.DelayedScaling(amax_history_len=2))
    scales = []
    for amax in (2.0, 8.0, 1.0, 0.0, 0.0, 1.0):
        with NoWait():
            quantizer(torch.tensor([amax, -amax / 2]))
            scales.append(quantizer.scale.clone())
            quantizer.update()
    # Of the step's own magnitude, then of the two before it; of none the scale stays.
    assert [448 / x.item() for x in scales] == pytest.approx([2, 2, 8, 8, 1, 1])
    assert quantizer.amax.item() == 0


def test_plain_quantizer_takes_the_scale_that_it_is_given():
    quantizer = fp8.Quantizer(E5M2)
    assert [x.shape for x in (quantizer.scale, quantizer.scale_inv, quantizer.amax)] == [(1,)] * 3
    quantizer.set_scale(torch.tensor([4.0]))
    stored = quantizer(torch.tensor([1.0, 1e9, -1e9]))
    assert stored._data.float().tolist() == [4.0, 57344.0, -57344.0]
    assert stored._scale_inv.tolist() == [0.25] and quantizer.amax.tolist() == [1e9]


def test_quantizer_of_nothing_keeps_scales_usable():
    assert fp8.CurrentQuantizer(E4M3)(torch.zeros(0, 4)).shape == (0, 4)
    zeros = fp8.CurrentQuantizer(E4M3)(torch.zeros(3))
    assert zeros._scale_inv.tolist() == [1.0] and not zeros.dequantize().any()


def test_tensor_moves_without_being_widened_and_widens_for_arithmetic():
    x = fp8.CurrentQuantizer(E4M3)(randn(2, 6, 4))
    moved = [
        x.transpose(1, 2), x.view(12, 4), x[:1], x.unsqueeze(0), x.permute(2, 0, 1), x.detach(),
        x.clone(), *x.unbind(0),
    ]  # fmt: skip
    for each in moved:
        assert isinstance(each, fp8.Float8Tensor) and each._data.shape == each.shape
        assert each._data.dtype == E4M3 and each.dtype == torch.bfloat16
    assert torch.equal(x.transpose(1, 2).dequantize(), x.dequantize().transpose(1, 2))
    total = x + 1
    assert type(total) is torch.Tensor and torch.equal(total, x.dequantize() + 1)
    assert "float8_e4m3fn [2, 6, 4]" in repr(x)


def test_tensor_of_torchs_own_float8_and_scale():
    stored, scale = randn(4, 8).to(E5M2), torch.tensor([0.125])
    x = fp8.Float8Tensor(stored, scale, torch.float16)
    assert x.dtype == torch.float16
    assert torch.equal(x.dequantize(), (stored.float() * 0.125).half())


def test_gradients_pass_a_quantizer_as_they_are():
    x = randn(4, 8).requires_grad_()
    fp8.CurrentQuantizer(E4M3)(x).dequantize().square().sum().backward()
    stored = fp8.CurrentQuantizer(E4M3)(x.detach()).dequantize()
    assert x.grad.dtype == torch.bfloat16 and torch.equal(x.grad, 2 * stored)


def attend_stored(q, k, v, **arguments):
    make = fp8.CurrentQuantizer(E4M3)
    return attngen.attention(make(q), make(k), make(v), **arguments)


@pytest.mark.slow
def test_attention_of_stored_tensors_is_that_of_a_recipe():
    tensors = [randn(2, 12, h, 16, seed=n).requires_grad_() for n, h in enumerate((4, 2, 2))]
    results = []
    compiled = torch.compile(attend_stored, fullgraph=True, backend="aot_eager")
    for attend in (attngen.attention, attend_stored, compiled):
        with fp8.autocast(enabled=attend is not compiled):
            out = attend(*tensors, mask="causal")
        gradients = torch.autograd.grad(out.float().square().sum(), tensors)
        assert out.dtype == torch.bfloat16 and all(x.dtype == out.dtype for x in gradients)
        results.append((out, *gradients))
    with torch.no_grad():
        results.append((attend_stored(*tensors, mask="causal"), *results[0][1:]))
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


def test_attention_refuses_stored_tensors_among_others():
    x = randn(1, 4, 2, 16)
    stored = fp8.CurrentQuantizer(E4M3)(x)
    with pytest.raises(SpecError) as caught:
        attngen.attention(stored, x, x, descale_q=torch.ones(1))
    assert len(caught.value.reasons) == 3

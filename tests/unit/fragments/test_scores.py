"""Score and softmax fragments: the very code of the kernels, against the reference."""

from __future__ import annotations

import ctypes
import itertools
import math

import numpy as np
import pytest
import torch

from attngen import reference
from attngen.call.table import AttentionCall
from attngen.fragments import features
from attngen.io import files
from attngen.kernels.fill import emit_fragment
from attngen.reference import core

HEADERS = """
#include "attngen/context.cuh"
#include "attngen/softmax/row.cuh"
namespace attngen {
"""
# Rows of `width` keys in lines of `line`, as a kernel with rows of queries goes through them; with
# `transposed` lines of queries, as one with rows of keys does.
ALIBI = """
}  // namespace attngen
using namespace attngen;
template <class At>
static void fill(float slope, int rows, int width, int line, int delta, int transposed,
                 float* out) {
  const AlibiScore alibi = {slope};
  const Context ctx = {0, 0, rows, width, delta};
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < width; ++j) {
      const int step = (transposed ? i : j) % line;
      const int first = transposed ? j - (i - step) : (j - step) - i;
      const float signed_step = static_cast<float>(transposed ? -step : step);
      const At at = {i, j, static_cast<float>(first - delta), signed_step};
      out[i * width + j] = alibi.apply(ctx, 0.f, at);
    }
  }
}
extern "C" void general(float slope, int rows, int width, int line, int delta, int t, float* out) {
  fill<Place<false>>(slope, rows, width, line, delta, t, out);
}
extern "C" void past(float slope, int rows, int width, int line, int delta, int t, float* out) {
  fill<Place<true>>(slope, rows, width, line, delta, t, out);
}
extern "C" float rate(float slope) { return AlibiScore{slope}.rate(); }
"""
SOFTCAP = """
}  // namespace attngen
using namespace attngen;
extern "C" void softcap(float cap, int n, const float* x, float* y, float* grad, float* small,
                        float* scaled) {
  const SoftcapScore score = {cap, 1.f / cap};
  const Place<false> at = {0, 0, 0.f, 0.f};
  const Context ctx = {0, 0, 1, 1, 0};
  for (int i = 0; i < n; ++i) {
    y[i] = score.apply(ctx, x[i], at);
    grad[i] = score.grad(ctx, x[i], y[i], at);
    small[i] = x[i] * score.small_factor(x[i], 1.f);
    scaled[i] = x[i] * score.small_factor(x[i], 3.f);
  }
}
extern "C" float limit(float cap) { return SoftcapScore{cap, 1.f / cap}.small_limit(); }
extern "C" float small(float cap, float unit, int n, const float* x, float* y) {
  const SoftcapScore score = {cap, 1.f / cap};
  for (int i = 0; i < n; ++i) y[i] = x[i] * score.small_factor(x[i], unit);
  return score.small_limit();
}
extern "C" float low(float cap, float unit, int n, const float* x, float* y) {
  const SoftcapScore::Low low = SoftcapScore{cap, 1.f / cap}.low(unit);
  for (int i = 0; i < n; ++i) y[i] = x[i] * low.factor(x[i]);
  return low.limit;
}
extern "C" float low_log2(float cap, float unit) {
  return SoftcapScore{cap, 1.f / cap}.low_log2(unit);
}
extern "C" float middle(float cap, float unit, int n, const float* x, float* y) {
  const SoftcapScore::Middle middle = SoftcapScore{cap, 1.f / cap}.middle(unit);
  for (int i = 0; i < n; ++i) y[i] = x[i] * middle.factor(x[i]);
  return middle.limit_log2;
}
"""
SINK = """
}  // namespace attngen
using namespace attngen;
extern "C" void finalize(float largest, float sum, float sink, float* out) {
  const Context ctx = {0, 0, 1, 1, 0};
  const SoftmaxRow row = LearnableSoftmax{sink}.finalize(ctx, largest, sum);
  const SoftmaxRow one = OffByOneSoftmax{}.finalize(ctx, largest, sum);
  out[0] = row.normalizer, out[1] = row.lse, out[2] = one.normalizer, out[3] = one.lse;
}
"""


def library(compile_cpp, harness: str, *named: tuple[str, str]) -> ctypes.CDLL:
    known = features.scan()
    structs = [emit_fragment(files.templates_dir(), known[axis][name]) for axis, name in named]
    return ctypes.CDLL(str(compile_cpp(HEADERS + "\n".join(structs) + harness)))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.fixture(scope="module")
def alibi(compile_cpp):
    return library(compile_cpp, ALIBI, ("score", "alibi"))


@pytest.mark.parametrize("bottom_right", [False, True])
def test_alibi_small_sizes_are_the_reference_in_both_orientations(alibi, bottom_right) -> None:
    sizes = (1, 2, 5, 9)
    for rows, width, slope in itertools.product(sizes, sizes, (0.5, 0.0, -0.7, 3.0)):
        delta = (width - rows) * bottom_right
        call = AttentionCall(
            q=torch.zeros(1), alibi_slopes=torch.tensor([slope]), bottom_right=bottom_right
        )
        wanted = core.alibi(call, 0, torch.zeros(1, rows, width, dtype=torch.float64))[0].numpy()
        seen = np.tril(np.ones((rows, width), bool), delta)
        for line, transposed in itertools.product((1, 3, 16), (0, 1)):
            found = np.zeros((rows, width), np.float32)
            common = (ctypes.c_float(slope), rows, width, line, delta, transposed, pointer(found))
            alibi.general(*common)
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
            alibi.past(*common)
            np.testing.assert_allclose(found[seen], wanted[seen], rtol=1e-6, atol=1e-6)


def test_alibi_rate_is_the_change_of_a_score_along_a_line(alibi) -> None:
    """A kernel adds the rate where a line lies on one side of the diagonal."""
    alibi.rate.restype = ctypes.c_float
    for slope in (0.25, -1.5):
        rate = alibi.rate(ctypes.c_float(slope))
        found = np.zeros((1, 9), np.float32)
        for delta, sign in ((8, 1), (0, -1)):  # all keys before the diagonal, all behind it
            alibi.general(ctypes.c_float(slope), 1, 9, 16, delta, 0, pointer(found))
            distance = np.arange(9) - delta
            np.testing.assert_allclose(found[0], sign * rate * distance, rtol=1e-6)


@pytest.mark.parametrize("cap", [0.5, 20.0, 50.0])
def test_softcap_is_the_tanh_its_derivative_and_its_polynomial(compile_cpp, cap) -> None:
    code = library(compile_cpp, SOFTCAP, ("score", "softcap"))
    code.limit.restype = ctypes.c_float
    limit = code.limit(ctypes.c_float(cap))
    assert limit == pytest.approx(0.8 * cap)
    x = np.concatenate([np.linspace(-8 * cap, 8 * cap, 4001), np.geomspace(1e-20, 1e4, 400), [0]])
    x = x.astype(np.float32)
    y, grad, small, scaled = (np.empty_like(x) for _ in range(4))
    code.softcap(ctypes.c_float(cap), len(x), *map(pointer, (x, y, grad, small, scaled)))
    tanh = np.tanh(x.astype(np.float64) / cap)
    assert np.abs(y - cap * tanh).max() <= 2**-21 * cap
    assert np.abs(grad - (1 - tanh**2)).max() <= 2**-19
    near = np.abs(x) <= limit
    error = np.abs(small - cap * tanh)[near]
    assert (error <= 1.8e-5 * np.abs(cap * tanh)[near]).all() and near.sum() > 300
    np.testing.assert_allclose(scaled[near], 3 * small[near], rtol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 6e-5, 4e-5, 1e-9])
def test_softcap_of_small_scores_is_close_at_every_scale(compile_cpp, scale) -> None:
    """A cap of 50 in units that float32 holds coefficients of, or not: no score is small then."""
    code = library(compile_cpp, SOFTCAP, ("score", "softcap"))
    code.small.restype = code.low.restype = ctypes.c_float
    x = np.linspace(-40 / scale, 40 / scale, 4001).astype(np.float32)
    y = np.empty_like(x)
    arguments = (
        ctypes.c_float(50 / scale), ctypes.c_float(scale), len(x), pointer(x), pointer(y)
    )  # fmt: skip
    limit = code.small(*arguments)
    wanted = 50 * np.tanh(x.astype(np.float64) * scale / 50)
    assert limit == (pytest.approx(40 / scale) if scale > 5e-5 else 0)
    if limit:
        assert (np.abs(y - wanted) <= 2e-5 * np.abs(wanted)).all()
    assert code.low(*arguments) == (pytest.approx(22.5 / scale) if limit else 0)


@pytest.mark.parametrize("unit", [1.4426950408889634, 0.1275])
@pytest.mark.parametrize("cap", [12.0, 24.0, 26.0, 50.0, 300.0])
def test_softcap_of_low_scores_is_close_and_below_falls_faster(compile_cpp, cap, unit) -> None:
    """The cap is in the units of weights, scores are so many `unit`s of log2."""
    code = library(compile_cpp, SOFTCAP, ("score", "softcap"))
    code.low.restype = ctypes.c_float
    scale = unit / 1.4426950408889634
    x = np.linspace(-40 * cap / scale, 0.45 * cap / scale, 40001).astype(np.float32)
    y = np.empty_like(x)
    limit = code.low(
        ctypes.c_float(cap / scale), ctypes.c_float(unit), len(x), pointer(x), pointer(y)
    )
    if cap < 25:
        assert limit == 0 and np.signbit(limit), "as an integer less than that of any score"
        return
    assert limit == pytest.approx(0.45 * cap / scale)
    wanted = cap * np.tanh(x.astype(np.float64) * scale / cap)
    found = y * np.log(2)
    near = x >= -limit
    assert (np.abs(found - wanted)[near] <= 1.26e-5 * np.abs(wanted)[near]).all()
    assert (np.exp(wanted[~near]) < 3e-5).all() and (np.diff(found) >= 0).all()
    assert np.abs(np.exp(found) - np.exp(wanted))[~near].max() < 1.5e-8


@pytest.mark.parametrize("unit", [1.4426950408889634, 0.1275])
@pytest.mark.parametrize("cap", [12.0, 19.0, 20.5, 50.0, 300.0, 2e4])
def test_softcap_up_to_the_cap_is_close_and_beyond_rises_and_falls(compile_cpp, cap, unit) -> None:
    code = library(compile_cpp, SOFTCAP, ("score", "softcap"))
    code.middle.restype = ctypes.c_float
    scale = unit / 1.4426950408889634
    x = np.linspace(-40 * cap / scale, 40 * cap / scale, 80001).astype(np.float32)
    y = np.empty_like(x)
    limit = code.middle(
        ctypes.c_float(cap / scale), ctypes.c_float(unit), len(x), pointer(x), pointer(y)
    )
    if cap < 20 or cap / scale > 1e4:
        assert limit == -np.inf
        return
    wanted = cap * np.tanh(x.astype(np.float64) * scale / cap)
    found = y * np.log(2)
    near, below = np.abs(x) * scale <= cap, x * scale < -cap
    assert (np.abs(found - wanted)[near] <= 7.3e-6 * np.abs(wanted)[near]).all()
    assert (np.diff(found) >= 0).all()
    assert np.abs(np.exp(found[below]) - np.exp(wanted[below])).max() < 1.5e-8
    assert (y[x * scale > cap] >= limit).all() and limit == pytest.approx(y[near][-1], rel=1e-3)


@pytest.mark.parametrize("cap", [12.0, 26.0, 50.0, 300.0])
def test_softcap_above_low_scores_no_weight_is_as_small(compile_cpp, cap) -> None:
    code = library(compile_cpp, SOFTCAP, ("score", "softcap"))
    code.low_log2.restype = ctypes.c_float
    limit = code.low_log2(ctypes.c_float(cap), ctypes.c_float(1.4427))
    x = np.linspace(0.45 * cap, 40 * cap, 40001).astype(np.float32)
    y = np.empty_like(x)
    code.low(ctypes.c_float(cap), ctypes.c_float(1.4427), len(x), pointer(x), pointer(y))
    assert limit == -np.inf if cap < 25 else (y >= limit).all() and limit > 0.999 * y[0]


def test_softcap_infinite_scores_reach_the_cap(compile_cpp) -> None:
    code = library(compile_cpp, SOFTCAP, ("score", "softcap"))
    x = np.array([-np.inf, -1e38, 1e38, np.inf], np.float32)
    y, *others = (np.empty_like(x) for _ in range(4))
    code.softcap(ctypes.c_float(30), 4, *map(pointer, (x, y, *others)))
    assert y.tolist() == [-30, -30, 30, 30] and not others[0].any()


def test_sink_any_rows_are_the_reference(compile_cpp) -> None:
    code = library(compile_cpp, SINK, ("softmax", "learnable"), ("softmax", "off_by_one"))
    draw = np.random.default_rng(0)
    out = np.empty(4, np.float32)
    for spread, sink in itertools.product((0.1, 10.0, 200.0), (-300.0, -2.0, 0.0, 5.0, 300.0)):
        scores = torch.tensor(draw.normal(0, spread, 7)).reshape(1, 1, 7)
        top = float(scores.max())
        total = float(torch.exp(scores - top).sum())
        code.finalize(*map(ctypes.c_float, (top, total, sink)), pointer(out))
        for given, (normalizer, lse) in zip((sink, 0.0), out.reshape(2, 2).tolist(), strict=True):
            weights, wanted = core.softmax(scores, torch.full((1, 1, 1), given, dtype=torch.double))
            assert lse == pytest.approx(wanted.item(), rel=1e-6, abs=1e-5)
            # The row's largest score has a weight of 1 before that.
            assert normalizer == pytest.approx(weights.max().item(), rel=1e-4, abs=1e-30)


@pytest.mark.parametrize("largest", [-math.inf, 0.0])
def test_sink_alone_is_the_lse_of_a_row_that_sees_nothing(compile_cpp, largest) -> None:
    code = library(compile_cpp, SINK, ("softmax", "learnable"), ("softmax", "off_by_one"))
    out = np.empty(4, np.float32)
    code.finalize(*map(ctypes.c_float, (largest, 0.0, 2.5)), pointer(out))
    assert out.tolist() == [0.0, 2.5, 0.0, 0.0]
    _, wanted = core.softmax(torch.full((1, 1, 3), -math.inf), torch.tensor([[[2.5]]]))
    assert wanted.item() == 2.5


def test_default_slopes_are_halved_from_head_to_head() -> None:
    assert reference.default_alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]

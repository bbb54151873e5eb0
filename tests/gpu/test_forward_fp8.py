"""The FP8 forward against float64: head dims, masks, dtypes, scales, maxima, lengths, memory."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

import attngen
from attngen.frontends.pytorch import operation
from attngen.kernels.selection import name_of
from tests.support.caches import FORWARD, forget

from . import cases, cases_fp8, oracle, oracle_fp8, tensor_core
from .cases_fp8 import Fp8Case
from .oracle_fp8 import DTYPES

pytestmark = pytest.mark.gpu
E4M3, E5M2 = DTYPES["e4m3"], DTYPES["e5m2"]
DIMS = (64, 128, 256)
KERNELS = [
    *(
        cases_fp8.spec(d, None, *cases.MASKS[kind][0][:2])
        for d in DIMS
        for kind in ("none", "causal", "window")
    ),
    *(cases_fp8.spec(128, dtypes=("e4m3", "e4m3", out)) for out in ("fp16", "e4m3", "e5m2")),
    cases_fp8.spec(64, None, "causal", dtypes=("e4m3", "e4m3", "e4m3")),
    cases_fp8.spec(16),
]


@pytest.mark.parametrize("case", cases_fp8.every_head_dim(), ids=str)
def test_fp8_every_head_dim_is_right(case):
    oracle_fp8.check_call(*case.operands(), **case.arguments)


@pytest.mark.parametrize("case", cases_fp8.unequal_head_dims(), ids=str)
def test_fp8_unequal_head_dims_is_right(case):
    oracle_fp8.check_call(*case.operands(), **case.arguments)


@pytest.mark.parametrize("case", cases_fp8.every_mask(), ids=str)
def test_fp8_every_mask_is_right(case):
    oracle_fp8.check_call(*case.operands(), **case.arguments)


@pytest.mark.parametrize("case", cases_fp8.every_dtype(), ids=str)
def test_fp8_every_combination_of_dtypes_is_right(case):
    oracle_fp8.check_call(*case.operands(), **case.arguments)


def check_counts(s_q, s_kv, d, **arguments):
    """Equal scores make the LSE the logarithm of how many keys a row sees, and the output the
    mean of their values: one key too many or too few shows, which rounding could hide."""
    q, k, v = oracle_fp8.operands(2, 4, 2, s_q, s_kv, d)
    q.zero_()
    v = v.float().round().clamp(-4, 4).to(v.dtype)
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(q, k, v, **arguments, backend="cuda", return_lse=True)
        alone = attngen.attention(q, k, v, **arguments, backend="cuda")
    assert torch.equal(alone, out), "equal weights sum up to the same as they are stored"
    want, want_aux = attngen.attention(
        *(x.double() for x in (q, k, v)), **arguments, backend="reference", return_lse=True
    )
    # The logarithm of the sum of stored weights, 256 each, is good to 2^-22 of itself.
    torch.testing.assert_close(aux.lse.double(), want_aux.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=2**-9)


@pytest.mark.slow
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_fp8_every_mask_shows_the_right_keys(d, kind):
    for mask, window, bottom_right in cases.MASKS[kind]:
        for s_q, s_kv in cases.LENGTHS:
            check_counts(s_q, s_kv, d, mask=mask, window=window, bottom_right=bottom_right)


@pytest.mark.parametrize("s_q", [1, 63, 64, 65, 191, 192, 193, 255, 257, 384, 449])
@pytest.mark.parametrize("kind", ["causal", "window"])
def test_fp8_rows_at_ends_of_tiles_see_the_right_keys(kind, s_q):
    """Tiles of 192 rows end with the last 64; their warpgroups see different blocks of 96 keys."""
    masks = {"causal": ((-1, -1),), "window": ((5, 5), (0, 200), (70, 0))}[kind]
    for window, bottom_right in itertools.product(masks, (False, True)):
        for s_kv in (s_q, s_q + 100, max(1, s_q - 70)):
            mask = "causal" if kind == "causal" else "none"
            check_counts(s_q, s_kv, 128, mask=mask, window=window, bottom_right=bottom_right)


@pytest.mark.parametrize("d", [16, *DIMS])
@pytest.mark.parametrize("s_q", [1, 64, 127, 129, 257])
def test_fp8_every_number_of_keys_is_counted(d, s_q):
    for s_kv in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 127, 128, 129, 160, 191, 193):
        check_counts(s_q, s_kv, d)


@pytest.mark.parametrize("lengths", [(1, 4000), (4000, 1), (500, 3), (3, 500)], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "causal_bottom_right"])
def test_fp8_very_unequal_lengths_is_right(lengths, mask):
    oracle_fp8.check_call(*oracle_fp8.operands(2, 2, 1, *lengths, 128), mask=mask)


@pytest.mark.parametrize("heads", [(2, 2, 1), (1, 6, 3), (2, 12, 4), (1, 71, 1)], ids=str)
def test_fp8_head_ratio_reads_the_right_group_and_scales(heads):
    case = Fp8Case(64, 64, heads=heads, lengths=(150, 170), scaled=True)
    oracle_fp8.check_call(*case.operands(), **case.arguments)


@pytest.mark.device
@pytest.mark.parametrize("d", DIMS)
def test_fp8_many_tiles_for_each_multiprocessor_is_right(d):
    for s_q, s_kv in ((1300, 1300), (1300, 77), (60, 500)):
        q, k, v = oracle_fp8.operands(20, 12, 4, s_q, s_kv, d)
        oracle_fp8.check_call(q, k, v, mask="causal")


@pytest.mark.wgmma
@pytest.mark.device
@pytest.mark.parametrize("d", [16, *DIMS])
@pytest.mark.parametrize("kv", ["e4m3", "e5m2"])
@pytest.mark.parametrize("factor", [0.01, 1.0, 30.0])
def test_fp8_scores_are_summed_as_the_oracle_says(d, kv, factor):
    """One key: the LSE is its score."""
    q, k, v = oracle_fp8.operands(2, 4, 4, 500, 1, d, kv_dtype=kv, factor=factor)
    scale = d**-0.5 / factor**2
    _, aux = attngen.attention(q, k, v, softmax_scale=scale, return_lse=True, backend="cuda")
    wanted = tensor_core.sums(q.transpose(1, 2), k.transpose(1, 2))[..., 0] * scale
    torch.testing.assert_close(aux.lse, wanted, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("factor", [1e-2, 1.0, 10.0, 100.0])
def test_fp8_scaled_inputs_are_right(d, factor):
    q, k, v = oracle_fp8.operands(2, 2, 1, 200, 260, d, factor=factor)
    # Scores as of standard normal numbers: float8 cannot tell scores of 10^4 apart.
    oracle_fp8.check_call(q, k, v, softmax_scale=d**-0.5 / factor**2)
    descale = torch.tensor([1 / factor], device=q.device)
    oracle_fp8.check_call(q, k, v, descale_q=descale, descale_k=descale, descale_v=descale)


@pytest.mark.parametrize("d", DIMS)
def test_fp8_outliers_are_right(d):
    q, k, v = (x.float() for x in oracle_fp8.operands(2, 4, 2, 300, 700, d))
    for x in (q, k, v):
        generator = torch.Generator(x.device).manual_seed(0)
        x *= 1 + 9 * (torch.rand(x.shape, generator=generator, device=x.device) < 1e-3)
    oracle_fp8.check_call(*(x.to(E4M3) for x in (q, k, v)))


@pytest.mark.slow
@pytest.mark.parametrize("d", DIMS)
def test_fp8_64k_keys_are_right(d):
    """Sums of 2000 steps: what each step loses must not add up."""
    q, k, v = oracle_fp8.operands(1, 2, 1, 64, 65536, d)
    oracle_fp8.check_call(q, k, v)
    positive = v.float().abs().to(E4M3)  # so that a loss in each step cannot cancel
    oracle_fp8.check_call(q, k, positive)
    oracle_fp8.check_call(q, k, positive, out_dtype=E4M3)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("step", [1.25, 1.5, 6.0])
@pytest.mark.parametrize("scale_s", [None, 448.0])
def test_fp8_maximum_growing_near_the_lazy_limit_is_right(d, step, scale_s):
    """Rows whose maxima grow by 1.8 to 8.7 in log2 units every 96 keys: they may by 2 before they
    are raised, and not at all where a scale is given."""
    q, k, v = oracle_fp8.operands(1, 1, 1, 128, 672, d)
    q, k = torch.zeros_like(q.float()), torch.zeros_like(k.float())
    q[..., 0] = 1.0
    q[:, ::2, :, 0] = 0.25  # neighbouring rows that need no rescale
    k[..., 0] = (step * (7 - torch.arange(672, device=q.device) // 96))[None, :, None]
    q, k = q.to(E4M3), k.to(E4M3)
    scale = None if scale_s is None else torch.tensor([scale_s], device=v.device)
    arguments = {} if scale is None else {"scale_s": scale, "descale_s": 1 / scale}
    oracle_fp8.check_call(q, k, v, softmax_scale=1.0, **arguments)
    flipped = k.float().flip(1).to(E4M3)
    oracle_fp8.check_call(q, flipped, v, softmax_scale=1.0, mask="causal_bottom_right", **arguments)


@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("mask", ["none", "causal_bottom_right"])
def test_fp8_maximum_growing_beyond_float32_is_right(d, mask):
    """Weights relative to what a row saw before may be more than float32 holds: they grow by 2^92
    in half of the rows, 2^369 in others, every 96 keys, and where steep scores have any sign."""
    q, k, v = oracle_fp8.operands(2, 4, 2, 128, 672, d)
    oracle_fp8.check_call(q, k, v, softmax_scale=30.0, mask=mask)
    q, k = torch.zeros_like(q.float()), torch.zeros_like(k.float())
    q[..., 0] = 1.0
    q[:, ::2, :, 0] = 0.25
    k[..., 0] = (64.0 * (7 - torch.arange(672, device=q.device) // 96))[None, :, None]
    oracle_fp8.check_call(q.to(E4M3), k.to(E4M3), v, softmax_scale=4.0, mask=mask)


@pytest.mark.parametrize("name", ["descale_q", "descale_k", "descale_v"])
@pytest.mark.parametrize("kind", ["one", "heads", "transposed", "expanded"])
def test_fp8_descale_is_read_through_its_strides(name, kind):
    q, k, v = oracle_fp8.operands(3, 4, 2, 130, 200, 64)
    numbers = torch.tensor([[0.5, 1.0], [1.5, 0.25], [0.75, 2.0]], device=q.device)
    descale = {
        "one": numbers[0, :1],
        "heads": numbers,
        "transposed": numbers.T.contiguous().T,
        "expanded": numbers[:1].expand(3, 2),
    }[kind]
    oracle_fp8.check_call(q, k, v, **{name: descale})


@pytest.mark.parametrize("scale_s", [1.0, 100.0, 256.0, 448.0])
def test_fp8_scale_of_weights_is_right(scale_s):
    q, k, v = oracle_fp8.operands(2, 4, 2, 200, 300, 128)
    scale = torch.tensor([scale_s], device=q.device)
    oracle_fp8.check_call(q, k, v, scale_s=scale, descale_s=1 / scale)
    oracle_fp8.check_call(q, k, v, scale_s=scale, descale_s=2 / scale, descale_v=scale / scale / 2)


def test_fp8_weights_that_saturate_are_cut():
    """One key: its weight of 1 is stored as 448 of the 1000 that it should be."""
    q, k, v = oracle_fp8.operands(2, 4, 2, 70, 1, 128)
    scale = torch.tensor([1000.0], device=q.device)
    out = attngen.attention(q, k, v, scale_s=scale, descale_s=1 / scale, backend="cuda")
    want = 0.448 * v.double().repeat_interleave(2, dim=2).expand_as(out)
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("out", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0, 1e6, 1e30])
def test_fp8_output_is_scaled_and_saturates(out, scale):
    q, k, v = oracle_fp8.operands(2, 4, 2, 130, 30, 128)
    scale_o = torch.tensor([scale], device=q.device)
    arguments = {"out_dtype": DTYPES[out], "scale_o": scale_o, "return_amax": True}
    got, aux = attngen.attention(q, k, v, **arguments, backend="cuda")
    plain, _ = attngen.attention(q, k, v, return_amax=True, backend="cuda")
    largest, smallest = torch.finfo(DTYPES[out]).max, torch.finfo(DTYPES[out]).smallest_normal
    want = (plain.double() * scale).clamp(-largest, largest)
    step = 2.0 ** -(4 if out == "e4m3" else 3)  # half a unit, beside the rounding of bfloat16
    torch.testing.assert_close(got.double(), want, rtol=step + 2**-7, atol=smallest / 2)
    assert abs(aux.amax_o.item() - plain.abs().max().item()) <= 2**-8 * aux.amax_o.item()


@pytest.mark.parametrize("out", ["bf16", "e5m2"])
@pytest.mark.parametrize("kv", [E4M3, E5M2])
def test_fp8_largest_finite_numbers_give_no_nan(kv, out):
    q, k, v = oracle_fp8.operands(1, 2, 2, 130, 300, 64)
    q, k, v = (
        (x.float().sign() * torch.finfo(dtype).max).to(dtype)
        for x, dtype in ((q, E4M3), (k, kv), (v, kv))
    )
    arguments = {"out_dtype": DTYPES[out], "softmax_scale": 1e-6}
    got = attngen.attention(q, k, v, **arguments, backend="cuda")
    assert got.double().isfinite().all()


@pytest.mark.parametrize("d", [128, 256])
def test_fp8_largest_values_of_many_keys_stay_finite(d):
    """Their mean is the largest number, and small weights are stored too large."""
    q, k, v = (x.float() for x in oracle_fp8.operands(1, 2, 2, 130, 2300, d))
    largest = torch.finfo(E5M2).max
    q, k, v = q.to(E4M3), k.to(E5M2), torch.full_like(v, largest).to(E5M2)
    out = attngen.attention(q, k, v, softmax_scale=2 * d**-0.5, backend="cuda")
    assert ((out.double() / largest - 1).abs() < 2**-4).all()


def test_fp8_maxima_are_of_each_call_alone():
    q, k, v = oracle_fp8.operands(2, 4, 2, 300, 500, 128)
    large = (v.float() * 8).to(E4M3)
    found = []
    for values in (large, v, large, v):
        _, aux = attngen.attention(q, k, values, return_amax=True, backend="cuda")
        found.append(aux.amax_o)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    expected = [oracle_fp8.truth(q, k, values) for values in (large, v)]
    for amax, each in zip(found, expected, strict=False):
        oracle_fp8.check_maxima(torch.ones_like(amax), amax, each)


def test_fp8_maxima_change_nothing_else():
    q, k, v = oracle_fp8.operands(2, 4, 2, 300, 500, 128)
    plain, aux = attngen.attention(q, k, v, return_lse=True, backend="cuda")
    out, with_maxima = attngen.attention(q, k, v, return_amax=True, backend="cuda")
    assert aux.amax_s is None and aux.amax_o is None
    assert torch.equal(out, plain) and torch.equal(aux.lse, with_maxima.lse)


def test_fp8_maxima_where_only_some_rows_see_a_key():
    for s_q, s_kv, window in ((300, 20, (5, 5)), (300, 1, (0, 0))):
        q, k, v = oracle_fp8.operands(1, 2, 2, s_q, s_kv, 64)
        oracle_fp8.check_call(q, k, v, window=window)


@pytest.mark.parametrize("d", DIMS)
def test_fp8_largest_weight_is_that_beside_no_sink(d):
    """Weights are relative to the largest score of their row, however far above it the sink is."""
    q, k, v = oracle_fp8.operands(2, 2, 2, 70, 90, d)
    more = {"softmax": "learnable", "return_amax": True, "backend": "cuda"}
    for value in (0.0, 100.0, 1e4):
        sink = torch.full((2,), value, device=q.device)
        for keys in (0, 90):
            used = torch.tensor([0, keys], dtype=torch.int32, device=q.device)
            _, aux = attngen.attention(q, k, v, mask="padding", seqused_kv=used, sink=sink, **more)
            assert aux.amax_s.item() == float(keys > 0)


ALONE = ("sm90_fwd_alone",)  # the kernels of a call that wants the output alone
USUAL = ("sm90_fwd",)


@pytest.fixture
def launched(monkeypatch):
    """Families of the kernels that calls launch, each call's in a list; each is worked out anew."""
    found = []

    def note(ready, *rest):
        found.append(tuple(name_of(each.loaded.kernel) for each in ready.launches))
        return start(ready, *rest)

    start = operation.start
    monkeypatch.setattr(operation, "start", note)
    forget(monkeypatch, *FORWARD)
    return found


@pytest.mark.wgmma
@pytest.mark.parametrize("kv", ["e4m3", "e5m2"])
@pytest.mark.parametrize("softmax", ["vanilla", "off_by_one", "learnable"])
@pytest.mark.parametrize("lengths", [(200, 97), (65, 96), (1, 1), (130, 420)], ids=str)
def test_fp8_sums_of_stored_weights_are_right_beside_sinks_and_scales(
    launched, kv, softmax, lengths
):
    q, k, v = oracle_fp8.operands(2, 4, 2, *lengths, 128, 112, kv_dtype=kv)
    more = {"descale_v": torch.tensor([[0.5, 2.0], [1.5, 0.25]], device=q.device)}
    if softmax == "learnable":
        more["sink"] = torch.tensor([-3.0, 0.0, 6.0, 30.0], device=q.device)
    oracle_fp8.check_call(q, k, v, softmax=softmax, **more)
    assert launched == [USUAL, ALONE]


@pytest.mark.wgmma
def test_fp8_calls_that_want_more_than_the_output_reach_the_usual_kernel(launched):
    q, k, v = oracle_fp8.operands(2, 4, 2, 200, 260, 128)
    call = functools.partial(attngen.attention, q, k, v, backend="cuda")
    scale = torch.tensor([64.0], device=q.device)
    wanted = {name: {name: True} for name in ("return_lse", "return_amax", "return_max_logit")}
    wanted |= {"scales": {"scale_s": scale, "descale_s": 1 / scale}, "mask": {"mask": "causal"}}
    for more in wanted.values():
        call(**more)
    torch.ops.attngen.forward(q, k, v)
    assert launched == [USUAL] * 6
    outputs = [call() for _ in range(3)]  # the third is a recent call
    assert launched[6:] == [ALONE] * 3
    assert all(torch.equal(outputs[0], each) for each in outputs)


@pytest.mark.wgmma
@pytest.mark.device
def test_fp8_first_call_captured_has_the_bits_of_the_next_ones(launched):
    q, k, v = oracle_fp8.operands(2, 4, 2, 200, 260, 128)
    call = functools.partial(attngen.attention, q, k, v, backend="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    assert torch.equal(out, call()) and launched == [ALONE] * 2


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 5, 0), (0, 5, 5)], ids=str)
@pytest.mark.parametrize("out", ["bf16", "e4m3"])
def test_fp8_nothing_to_see_returns_zeros(layout, sizes, out):
    batch, s_q, s_kv = sizes
    q, k, v = oracle_fp8.operands(batch, 4, 2, s_q, s_kv, 64, 128, layout=layout)
    with oracle.nan_filled_allocations():
        got, aux = attngen.attention(
            *(q, k, v), layout=layout, out_dtype=DTYPES[out], return_amax=True, backend="cuda"
        )
    assert got.shape == (*q.shape[:-1], 128) and not got.float().any()
    assert aux.lse.shape == (batch, 4, s_q) and (aux.lse == -math.inf).all()
    assert aux.amax_s.tolist() == aux.amax_o.tolist() == [0.0]

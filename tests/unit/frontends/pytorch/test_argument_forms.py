"""Arguments in other forms mean what their plain ones do: NumPy's numbers, None, other dtypes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import attngen
from attngen import AttentionSpec, SpecError
from attngen.frontends.pytorch import checked_call
from attngen.reference.conversions import saturated

BACKENDS = ("reference", "cuda")
BATCH, QUERIES, KEYS, HEADS, DIM = 2, 6, 9, 4, 16
INF = math.inf


def operands(dtype=torch.bfloat16):
    make = torch.Generator().manual_seed(0)
    shapes = (BATCH, QUERIES, HEADS, DIM), (BATCH, KEYS, HEADS, DIM), (BATCH, KEYS, HEADS, DIM)
    return [torch.randn(shape, generator=make).to(dtype) for shape in shapes]


def output(*tensors, **arguments):
    found = attngen.attention(*tensors, **arguments)
    return found[0] if isinstance(found, tuple) else found


# Arguments in another form, and the plain one.
FORMS = [
    ({"window": None}, {}),
    ({"window": [3, 0]}, {"window": (3, 0)}),
    ({"window": [3, None]}, {"window": (3, -1)}),
    ({"window": (np.int64(3), np.int32(0))}, {"window": (3, 0)}),
    ({"window": tuple(np.array([3, 0]))}, {"window": (3, 0)}),
    ({"window": np.array([3, 0])}, {"window": (3, 0)}),
    ({"window": (np.array(3), None)}, {"window": (3, -1)}),
    ({"mask": None}, {}),
    ({"mask": None, "window": None, "softcap": None}, {}),
    ({"mask": np.str_("causal")}, {"mask": "causal"}),
    ({"softcap": None}, {}),
    ({"softcap": np.float32(0.5)}, {"softcap": 0.5}),
    ({"softcap": np.array(2)}, {"softcap": 2.0}),
    ({"softcap": torch.tensor(2)}, {"softcap": 2.0}),
    ({"softmax_scale": np.float64(0.3)}, {"softmax_scale": 0.3}),
    ({"softmax_scale": np.array(0.5, dtype=np.float16)}, {"softmax_scale": 0.5}),
    ({"softmax_scale": np.longdouble(0.5)}, {"softmax_scale": 0.5}),
    ({"dropout_p": np.int64(0)}, {}),
    ({"max_seqlen_q": np.int16(QUERIES), "max_seqlen_kv": np.array(KEYS)}, {}),
    ({"bottom_right": np.True_, "mask": "causal"}, {"bottom_right": True, "mask": "causal"}),
    ({"alibi_slopes": np.True_}, {"alibi_slopes": True}),
    ({"alibi_slopes": np.False_}, {}),
    ({"num_splits": np.int64(1), "deterministic": np.False_}, {"num_splits": 1}),
    ({"return_lse": np.True_}, {"return_lse": True}),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given, plain", FORMS, ids=lambda x: str(x))
def test_argument_in_another_form_means_the_plain_one(kernels, given, plain, backend) -> None:
    tensors = operands()
    wanted = output(*tensors, **plain, backend=backend)
    for _ in range(2):
        assert torch.equal(output(*tensors, **given, backend=backend), wanted)
    called = {*kernels.names}
    assert called == ({"forward"} if backend == "cuda" else set())
    assert len({arguments for _, arguments in kernels.calls}) == len(called)  # plain values, all


@pytest.mark.parametrize("given, plain", FORMS, ids=lambda x: str(x))
def test_spec_of_a_call_in_another_form_is_that_of_the_plain_one(given, plain) -> None:
    tensors = operands()
    assert AttentionSpec.from_call(*tensors, **given) == AttentionSpec.from_call(*tensors, **plain)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [(1.5, 0), (np.float32(3), 0), (True, 0), (np.True_, 0), "30"])
def test_window_of_no_integers_is_refused(kernels, window, backend) -> None:
    with pytest.raises(SpecError, match="^window needs"):
        attngen.attention(*operands(), window=window, backend=backend)


# ---- dtypes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["sink", "alibi_slopes"])
def test_float_of_another_width_is_cast_and_has_its_gradient(kernels, name, dtype, backend) -> None:
    tensors = operands()
    given = torch.linspace(-1, 1, HEADS).to(dtype)
    options = {"softmax": "learnable"} if name == "sink" else {}
    wanted = output(*tensors, **options, **{name: given.float()}, backend=backend)
    for _ in range(2):
        assert torch.equal(output(*tensors, **options, **{name: given}, backend=backend), wanted)
    if name == "sink":
        leaves = [given.requires_grad_(), given.detach().float().requires_grad_()]
        outs = [output(*tensors, **options, **{name: leaf}, backend=backend) for leaf in leaves]
        (own,), (of_float,) = (
            torch.autograd.grad(out.float().sum(), leaf)
            for out, leaf in zip(outs, leaves, strict=True)
        )
        assert own.dtype == dtype and torch.equal(own, of_float.to(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(QUERIES, KEYS), (HEADS, 1, KEYS), (BATCH, 1, QUERIES, 1)])
def test_bias_of_another_float_is_cast_and_has_its_gradient(kernels, shape, dtype, backend) -> None:
    tensors = operands()
    given = torch.linspace(-3, 3, math.prod(shape)).view(shape).to(dtype)
    wanted = output(*tensors, bias=given.bfloat16(), backend=backend)
    for _ in range(2):
        assert torch.equal(output(*tensors, bias=given, backend=backend), wanted)
    if shape[-1] == 1:
        return  # of which kernels have no gradient
    leaves = [given.requires_grad_(), given.detach().bfloat16().requires_grad_()]
    outs = [output(*tensors, bias=leaf, backend=backend) for leaf in leaves]
    (own,), (narrow,) = (
        torch.autograd.grad(out.float().square().sum(), leaf)
        for out, leaf in zip(outs, leaves, strict=True)
    )
    assert own.dtype == dtype and torch.equal(own, narrow.to(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q_dtype", [torch.float16, torch.bfloat16])
def test_bias_out_of_range_hides_no_row_as_a_whole(kernels, q_dtype, backend) -> None:
    """A bias of the lowest float32 number leaves the weights of a row that it masks whole."""
    tensors = operands(q_dtype)
    bias = torch.zeros(QUERIES, KEYS)
    bias[0], bias[1, 3:] = torch.finfo(torch.float32).min, -INF
    found, aux = attngen.attention(*tensors, bias=bias, return_lse=True, backend=backend)
    hidden = torch.zeros(QUERIES, KEYS, dtype=torch.bool)
    hidden[1, 3:] = True
    bounded = bias.clamp(torch.finfo(q_dtype).min).masked_fill(hidden, -INF).to(q_dtype)
    wanted, expected = attngen.attention(*tensors, bias=bounded, return_lse=True, backend=backend)
    assert torch.equal(found, wanted) and torch.equal(aux.lse, expected.lse)
    assert aux.lse.isfinite().all() and found.isfinite().all()


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32])
def test_cast_saturates_and_keeps_minus_infinity(source, target) -> None:
    lowest = torch.finfo(source).min
    given = torch.tensor([-INF, lowest, -1.5, 0, 1.5, -lowest, INF, math.nan], dtype=source)
    most = min(torch.finfo(target).max, torch.finfo(source).max)
    found = saturated(given, target)
    wanted = torch.tensor([-INF, -most, -1.5, 0, 1.5, most, most, math.nan], dtype=torch.float64)
    wider = torch.finfo(target).max >= torch.finfo(source).max
    wanted[6] = INF if wider else most
    assert found.dtype == target
    assert torch.equal(found[:7].double(), wanted[:7]) and found[7].isnan()


def test_cast_makes_what_is_broadcast_once() -> None:
    found = saturated(torch.randn(1, 1, 4, 5).expand(8, 16, 4, 5), torch.float16)
    assert found.shape == (8, 16, 4, 5) and found.untyped_storage().nbytes() == 2 * 4 * 5


def test_float32_bias_under_autocast_saturates(kernels) -> None:
    q, k, v = operands(torch.float32)
    bias = torch.zeros(QUERIES, KEYS)
    bias[0] = -1e30
    with torch.autocast("cpu", torch.float16):
        out = attngen.attention(q, k, v, bias=bias, backend="cuda")
    halves = [x.half() for x in (q, k, v)]
    wanted = attngen.attention(*halves, bias=bias.clamp(-65504).half(), backend="cuda")
    assert torch.equal(out, wanted) and out[:, 0].abs().min() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name, dtype",
    [
        *[
            (name, dtype)
            for name in ("sink", "alibi_slopes")
            for dtype in (torch.int32, torch.bool)
        ],
        *[("bias", dtype) for dtype in (torch.int64, torch.bool, torch.complex64)],
        *[("seqused_kv", dtype) for dtype in (torch.int16, torch.uint8, torch.float32)],
    ],
)
def test_dtype_of_another_kind_is_refused(kernels, name, dtype, backend) -> None:
    shape = {"bias": (QUERIES, KEYS), "seqused_kv": (BATCH,)}.get(name, (HEADS,))
    options = {"softmax": "learnable"} if name == "sink" else {}
    with pytest.raises(SpecError, match=f"{name} "):
        attngen.attention(
            *operands(), **options, **{name: torch.ones(shape).to(dtype)}, backend=backend
        )
    assert not kernels.calls


# ---- integers


KINDS = ["seqused", "dense cu_seqlens", "packed", "gaps", "pages"]
PAGED = "paged_kv_bshd_bshd_bshd"


def with_lengths(kind: str, dtype: torch.dtype, apart: bool = False) -> dict:
    """A call with integers of that dtype; `apart`: they do not follow each other in memory."""

    def integers(*numbers: int) -> torch.Tensor:
        held = torch.tensor(numbers, dtype=dtype)
        return held.repeat_interleave(2)[::2] if apart else held

    q, k, v = operands()
    call: dict = {"q": q, "k": k, "v": v}
    if kind == "seqused":
        return call | {"seqused_q": integers(5, 2), "seqused_kv": integers(9, 0)}
    if kind == "dense cu_seqlens":
        return call | {"cu_seqlens_kv": integers(0, 3, 11)}
    if kind == "pages":
        k = k.reshape(6, 3, HEADS, DIM)
        table = torch.stack([integers(2, 0, 5), integers(1, 3, 4)])
        call |= {"k": k, "v": -k, "layout": PAGED, "page_table": table}
        return call | {"seqused_kv": integers(8, 4)}
    call = {name: x.flatten(0, 1) for name, x in call.items()} | {"layout": "thd"}
    call |= {"cu_seqlens_q": integers(0, 4, 12), "cu_seqlens_kv": integers(0, 9, 15)}
    return call | ({"cu_seqlens_kv_padded": integers(0, 10, 18)} if kind == "gaps" else {})


@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_reference_takes_int64_lengths_and_tables(kind, apart) -> None:
    wanted = attngen.attention(**with_lengths(kind, torch.int32), backend="reference")
    given = with_lengths(kind, torch.int64, apart)
    assert torch.equal(attngen.attention(**given, backend="reference"), wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_operations_get_int32_lengths_and_tables(kernels, kind, apart, dtype, monkeypatch) -> None:
    reached: list[list[torch.Tensor]] = []

    def take(*inputs):
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        reached.append([x for x in tensors if not x.is_floating_point()])
        return inputs[:1] * 5

    monkeypatch.setattr(checked_call, "dispatched", take)
    for given in (with_lengths(kind, dtype, apart),) * 2 + (with_lengths(kind, torch.int32),):
        attngen.attention(**given, backend="cuda")
    for found in reached[:2]:
        for x, plain in zip(found, reached[2], strict=True):
            assert torch.equal(x, plain) and (x.dtype, x.is_contiguous()) == (torch.int32, True)


def test_schedule_serves_calls_with_int64_lengths(kernels) -> None:
    given, schedule = with_lengths("packed", torch.int64), attngen.Schedule()
    wanted = attngen.attention(**given, backend="cuda")
    for _ in range(2):
        assert torch.equal(attngen.attention(**given, schedule=schedule, backend="cuda"), wanted)
    with pytest.raises(SpecError, match="made for other lengths"):
        other = with_lengths("packed", torch.int64)
        attngen.attention(**other, schedule=schedule, backend="cuda")

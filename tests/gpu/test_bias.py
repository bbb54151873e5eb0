"""Biases on the kernels: outputs and gradients against float64, any broadcast, stride, length."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen import AttentionSpec, reference
from attngen.frontends.pytorch.backward import backwards
from attngen.kernels.selection import name_of
from tests.support.caches import BACKWARD, held

from . import directions, oracle, varlen
from .cases import DTYPES, Case

pytestmark = pytest.mark.gpu
SHAPES = ("bhss", "1hss", "b1ss", "11ss", "111s")


@dataclass(frozen=True)
class BiasCase:
    """A call with a bias. `place`: how its rows begin: `packed` side by side, `padded` to 16 bytes,
    `odd` one element behind that, `turned` with columns apart."""

    case: Case
    shape: str = "1hss"
    kind: str = "post_scale"
    place: str = "packed"
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        more = "-".join(f"{name}{value}" for name, value in self.more.items())
        return f"{self.case}-{self.shape}-{self.kind}-{self.place}-{more}".rstrip("-")

    __hash__ = object.__hash__

    def spec(self, direction: str = "fwd", deterministic: bool = False) -> AttentionSpec:
        return replace(
            self.case.spec, directions=(direction,), deterministic=deterministic, bias=self.kind,
            alibi=bool(self.more.get("alibi_slopes")), softcap="softcap" in self.more,
            softmax=self.more.get("softmax", "vanilla"), dropout="dropout_p" in self.more,
            attn_mask="attn_mask" in self.more,
        )  # fmt: skip

    def bias(self, seed: int = 50) -> Tensor:
        """Random; larger before the scale."""
        batch, heads, _ = self.case.heads
        sizes = sizes_of(self.shape, (batch, heads, *self.case.lengths))
        dtype = DTYPES[self.case.dtype]
        factor = math.sqrt(self.case.d) if self.kind == "pre_scale" else 1.0
        x = (oracle.randn(*sizes, dtype=torch.float32, seed=seed) * factor).to(dtype)
        return placed(x, self.place)

    def given(self) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """q, k, v and the keyword arguments, the bias among them."""
        arguments = {**self.case.arguments, **self.more}
        arguments |= {"bias": self.bias(), "bias_type": self.kind}
        batch, heads, _ = self.case.heads
        if "dropout_p" in self.more:
            arguments["rng_state"] = torch.tensor([3, 9], device=oracle.DEVICE)
        if self.more.get("softmax") == "learnable":
            arguments["sink"] = oracle.randn(heads, dtype=torch.float32, seed=8)
        if "attn_mask" in self.more:
            s_q, s_kv = self.case.lengths
            arguments["attn_mask"] = oracle.randn(batch, 1, s_q, s_kv, seed=4) > -0.5
        return self.case.operands(), arguments


def sizes_of(shape: str, full: tuple[int, int, int, int]) -> list[int]:
    """Sizes of a bias: `1hss` has the heads, queries and keys of `full`."""
    return [1 if letter == "1" else n for letter, n in zip(shape, full, strict=True)]


def placed(x: Tensor, place: str) -> Tensor:
    """Copy a tensor elsewhere in memory, with NaN around it."""
    if place == "packed":
        return x
    if place == "turned":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    first = 8 + (place == "odd")
    room = x.new_full((*x.shape[:3], -(-x.shape[3] // 8) * 8 + 16), math.nan)
    view = room[..., first : first + x.shape[3]]
    return view.copy_(x)


def _case(
    d, d_v, lengths, heads=(2, 4, 2), dtype="bf16", mask="none", window=(-1, -1), layout="bshd"
):
    return Case(d, d_v, dtype, mask, window, None, heads, lengths, layout)


# Rows of whole 16 bytes, whose gradient the kernel of dK and dV adds.
ADDED = [
    BiasCase(_case(128, 128, (264, 392), (3, 4, 2), mask="causal"), "1hss"),
    BiasCase(_case(128, 128, (392, 264), (4, 2, 2), mask="causal"), "1hss", "pre_scale"),
    BiasCase(_case(96, 128, (136, 520), mask="causal_bottom_right", dtype="fp16"), "bhss"),
    BiasCase(_case(80, 80, (520, 392), (3, 4, 4), window=(100, 30)), "1hss", "pre_scale",
             more={"alibi_slopes": True}),
    # Queries that see nothing, and blocks of them; keys that nobody sees; blocks that end early.
    BiasCase(_case(128, 128, (392, 136), (2, 4, 2), mask="causal_bottom_right"), "1hss"),
    BiasCase(_case(128, 128, (520, 136), (2, 2, 1), window=(20, 0)), "1hss", "pre_scale",
             more={"softmax": "learnable"}),
    BiasCase(_case(128, 128, (136, 648), (5, 2, 1), window=(40, 10)), "1hss", place="padded"),
    BiasCase(_case(128, 128, (1, 264), (8, 1, 1)), "1hss"),
    BiasCase(_case(96, 80, (72, 8), (8, 4, 1), mask="causal"), "1hss", "pre_scale", "odd"),
    BiasCase(_case(128, 128, (130, 264), (1, 3, 1), mask="causal", layout="sbhd"), "1hss"),
]  # fmt: skip
# One row for all queries, whose gradient the kernel of dK and dV sums by keys.
SUMMED = [
    BiasCase(_case(128, 128, (264, 392), (3, 4, 2), mask="causal"), "111s"),
    BiasCase(_case(128, 128, (200, 333), (2, 4, 1), dtype="fp16"), "bh1s", "pre_scale", "odd"),
    BiasCase(_case(64, 64, (513, 300), (2, 6, 2), mask="causal"), "1h1s"),
    BiasCase(_case(64, 64, (300, 258), window=(40, 20)), "b11s", "pre_scale", "padded"),
    BiasCase(_case(96, 128, (136, 520), mask="causal_bottom_right"), "1h1s", place="turned"),
    BiasCase(_case(40, 40, (130, 77), layout="sbhd"), "bh1s", more={"softmax": "learnable"}),
    # Queries that see nothing, and blocks of them; keys that nobody sees.
    BiasCase(_case(128, 128, (392, 136), mask="causal_bottom_right"), "1h1s"),
    BiasCase(_case(80, 80, (136, 648), (2, 2, 1), window=(40, 10)), "111s",
             more={"alibi_slopes": True}),
]  # fmt: skip
NOT_ADDED = [
    BiasCase(_case(128, 128, (72, 136), (9, 2, 1)), "1hss"),
    BiasCase(_case(128, 128, (72, 136), (2, 2, 1)), "11ss"),
    BiasCase(_case(128, 128, (72, 135), (2, 2, 1)), "1hss"),
]
CASES = [
    BiasCase(_case(128, 128, (200, 333), mask="causal"), "1hss"),
    BiasCase(_case(128, 128, (256, 384)), "bhss", place="padded"),
    BiasCase(_case(128, 128, (333, 200), mask="causal", layout="sbhd"), "b1ss", "pre_scale"),
    BiasCase(_case(128, 128, (300, 258), window=(40, 20), dtype="fp16"), "11ss"),
    BiasCase(_case(128, 128, (130, 513), mask="causal_bottom_right"), "111s", "pre_scale"),
    BiasCase(_case(128, 128, (200, 320), mask="causal"), "1hss", "pre_scale", "padded",
             {"softcap": 2.0}),
    BiasCase(_case(128, 128, (257, 200), mask="causal"), "bhss", "post_scale", "odd",
             {"softcap": 30.0, "alibi_slopes": True}),
    BiasCase(_case(128, 128, (200, 200)), "1hss", "post_scale", "turned",
             {"softmax": "learnable"}),
    BiasCase(_case(64, 64, (513, 704), mask="causal", heads=(2, 6, 2)), "1hss"),
    BiasCase(_case(64, 64, (257, 257), layout="bhsd"), "b1ss", "pre_scale"),
    BiasCase(_case(64, 64, (200, 334), mask="causal", window=(60, 0)), "bhss", "post_scale",
             "packed", {"softmax": "off_by_one"}),
    BiasCase(_case(64, 64, (130, 200), dtype="fp16"), "111s", "post_scale", "odd",
             {"alibi_slopes": True}),
    BiasCase(_case(256, 256, (257, 300), mask="causal"), "1hss"),
    BiasCase(_case(256, 256, (130, 200), layout="sbhd"), "b1ss", "pre_scale", "padded",
             {"softcap": 5.0, "softmax": "learnable"}),
    BiasCase(_case(192, 128, (333, 333), mask="causal", heads=(2, 4, 1)), "11ss"),
    BiasCase(_case(80, 80, (1, 300)), "111s"),
    BiasCase(_case(40, 24, (300, 77), dtype="fp16"), "bhss", "pre_scale"),
    BiasCase(_case(8, 8, (300, 129), mask="causal"), "1hss"),
    BiasCase(_case(128, 128, (130, 200), mask="causal"), "bhss", more={"dropout_p": 0.2}),
    BiasCase(_case(64, 64, (257, 130)), "1hss", "pre_scale", more={"dropout_p": 0.1}),
    BiasCase(_case(256, 256, (130, 200)), "11ss", more={"dropout_p": 0.3}),
    BiasCase(_case(128, 128, (200, 264)), "b1ss", more={"attn_mask": True}),
    BiasCase(_case(64, 64, (130, 200), mask="causal"), "111s", "pre_scale",
             more={"attn_mask": True}),
    BiasCase(_case(256, 256, (200, 136)), "1hss", more={"attn_mask": True}),
    *ADDED,
    *SUMMED,
    *NOT_ADDED,
]  # fmt: skip
EACH = pytest.mark.parametrize("case", CASES, ids=str)
PACKED = varlen.Call("thd", (200, 1, 0, 333, 77), (130, 64, 5, 333, 0), heads=(4, 2), gaps=True)
LENGTHS = [
    replace(PACKED, d=128, mask="padding_causal"),
    replace(PACKED, d=64, window=(60, 10), bottom_right=True, mask="padding"),
    replace(PACKED, d=256, mask="padding_causal_bottom_right"),
    varlen.Call("bshd", (200, 1, 0, 130), (77, 200, 64, 130), room=(200, 264), d=128,
                mask="padding_causal", heads=(4, 4)),
    varlen.Call("sbhd", (33, 257), (257, 100), room=(257, 300), d=64, mask="padding"),
    varlen.Call("bhsd", (130, 200), (200, 7), room=(201, 203), d=192, d_v=128,
                mask="padding_causal_bottom_right", dtype="fp16"),
]  # fmt: skip
EACH_LENGTHS = pytest.mark.parametrize("number", range(len(LENGTHS)), ids=map(str, LENGTHS))


def length_spec(number: int, direction: str) -> AttentionSpec:
    kind = ("post_scale", "pre_scale")[number % 2]
    return replace(LENGTHS[number].spec, directions=(direction,), bias=kind)


KERNELS = [
    *(case.spec(direction) for case in CASES for direction in ("fwd", "bwd")),
    *(CASES[n].spec("bwd", True) for n in (0, 8, 12)),
    *(case.spec("bwd", True) for case in SUMMED),
    *(length_spec(n, direction) for n in range(len(LENGTHS)) for direction in ("fwd", "bwd")),
]


@EACH
def test_forward_with_a_bias_is_right(case):
    tensors, arguments = case.given()
    oracle.check_call(*tensors, **arguments)


def length_bias(number: int) -> tuple[Tensor, str]:
    """A bias that reaches further than the longest sequence; NaN where no sequence reaches."""
    call, shape = LENGTHS[number], SHAPES[number % 5]
    q_lens, kv_lens = call.lengths
    room = call.room or (max(q_lens) + 3, max(kv_lens) + 7)
    sizes = sizes_of(shape, (len(q_lens), call.heads[0], *room))
    bias = oracle.randn(*sizes, dtype=DTYPES[call.dtype], seed=60)
    bias[..., max(kv_lens) :] = math.nan
    if sizes[2] > 1:
        bias[:, :, max(q_lens) :] = math.nan
    if sizes[0] > 1:
        for b, (n_q, n_kv) in enumerate(zip(q_lens, kv_lens, strict=True)):
            bias[b, :, :, n_kv:] = math.nan
            bias[b, :, n_q:] = math.nan if sizes[2] > 1 else bias[b, :, n_q:]
    return bias, ("post_scale", "pre_scale")[number % 2]


@EACH_LENGTHS
def test_forward_with_lengths_and_a_bias_is_right(number):
    call = LENGTHS[number]
    operands, arguments = call.operands(), call.arguments()
    bias, kind = length_bias(number)
    arguments |= {"bias": bias, "bias_type": kind}
    with directions.poisoned_memory():
        out, aux = attngen.attention(*operands, **arguments, backend="cuda", return_lse=True)
    expected = oracle.truth(*operands, **arguments)
    oracle.check(out, aux.lse, expected, call.layout)


@EACH
def test_gradients_with_a_bias_are_those_of_float64(case):
    check_gradients(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[n] for n in (0, 8, 12)], ids=str)
def test_gradients_with_a_bias_deterministic_repeat_bit_for_bit(case):
    first = check_gradients(case, deterministic=True)
    for _ in range(3):
        assert oracle.same(check_gradients(case, deterministic=True), first)


@pytest.mark.parametrize("case", [*ADDED, *SUMMED], ids=str)
def test_gradient_of_a_bias_beside_others_repeats_bit_for_bit(case):
    """In any order of additions to dQ, sequences, or a tile's blocks, have theirs to the bias's."""
    first = check_gradients(case)[3]
    for _ in range(3):
        assert oracle.same(check_gradients(case)[3], first)


@pytest.mark.wgmma
@pytest.mark.parametrize("case", SUMMED, ids=str)
def test_gradient_of_a_bias_of_keys_in_an_order_is_that_of_float64(case):
    check_gradients(case, deterministic=True)


@pytest.mark.wgmma
@pytest.mark.parametrize("case", [*ADDED, *SUMMED, *NOT_ADDED], ids=str)
def test_gradient_of_a_bias_is_added_where_the_copy_engine_can_and_terms_are_few(case):
    for known in held(*BACKWARD):
        known.clear()
    check_gradients(case)
    launches = [each for made in backwards.by_format.values() for each in made.launches]
    families = [name_of(each.loaded.kernel) for each in launches]
    beside = {"sm90_bwd_with_dbias"} if case in ADDED else {"sm90_bwd_with_bias_sums"}
    main = {"sm90_bwd", "sm90_bwd_dbias"} if case in NOT_ADDED else beside
    assert sorted(families) == sorted(main | {"bwd_prepare", "bwd_row_sums", "bwd_convert"})


@pytest.mark.parametrize("case", ADDED[:2], ids=str)
def test_gradient_of_a_bias_is_the_same_beside_any_others(case):
    """A kernel that makes others gives equal bits; its own kernel may differ in the last sums."""
    tensors, arguments = case.given()
    bias = arguments.pop("bias")
    every = [x.requires_grad_() for x in (*tensors, bias)]
    out = attngen.attention(*every[:3], bias=bias, **arguments, backend="cuda")
    d_o = oracle.randn(*out.shape, dtype=out.dtype, seed=100)

    def gradients_of(*places):
        given = [x if n in places else x.detach() for n, x in enumerate(every)]
        out = attngen.attention(*given[:3], bias=given[3], **arguments, backend="cuda")
        return torch.autograd.grad(out, [given[n] for n in places], d_o)

    all_four = gradients_of(0, 1, 2, 3)
    for places in ((0, 3), (1, 3), (2, 3), (1, 2, 3)):
        assert oracle.same(gradients_of(*places)[-1:], all_four[3:])
    (alone,) = gradients_of(3)
    torch.testing.assert_close(alone, all_four[3], rtol=0.02, atol=0.05)  # sums of 3 and 4 terms
    for found, expected in zip(gradients_of(1, 2), all_four[1:3], strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def check_gradients(case, **more):
    """Gradients by autograd, of output and LSE, held to the rule."""
    tensors, arguments = case.given()
    return check_call_gradients(tensors, arguments, arguments.get("layout", "bshd"), **more)


def check_call_gradients(tensors, arguments, layout, **more):
    out, aux = attngen.attention(*tensors, **arguments, backend="cuda", return_lse=True)
    d_o = oracle.randn(*out.shape, dtype=out.dtype, seed=100)
    dlse = oracle.randn(*aux.lse.shape, dtype=torch.float32, seed=7)
    dlse = torch.where(aux.lse.isfinite(), dlse, 0)
    bias = arguments.pop("bias")
    found = differentiate(attngen.attention, tensors, bias, (d_o, dlse), **arguments, **more,
                          backend="cuda")  # fmt: skip
    rounded = differentiate(reference.attention, tensors, bias, (d_o, dlse), **arguments)
    wide = [None if x is None else x.double() for x in tensors]
    truth = differentiate(
        reference.attention, wide, bias.double(), (d_o.double(), dlse.double()), **arguments
    )
    present = [n for n, x in enumerate(tensors) if x is not None]
    for place in (*present, 3):
        hold(("dq", "dk", "dv", "dbias")[place], found[place], truth[place], rounded[place])
    return [x for x in found if x is not None]


def differentiate(attention, tensors, bias, incoming, **arguments):
    """Gradients of q, k, v and the bias; None of what is not there."""
    given = [None if x is None else x.detach().requires_grad_() for x in (*tensors, bias)]
    on_kernels = arguments.get("backend") == "cuda"
    with directions.poisoned_memory() if on_kernels else contextlib.nullcontext():
        if on_kernels:
            arguments = {"deterministic": False, **arguments, "return_lse": True}
        out, aux = attention(*given[:3], **arguments, bias=given[3])
        present = [x for x in given if x is not None]
        results = torch.autograd.grad(
            [out, aux.lse], present, [incoming[0], incoming[1].to(aux.lse.dtype)]
        )
    found = iter(results)
    return [None if x is None else next(found) for x in given]


def hold(name, found, truth, rounded):
    """Asserts the rule of gradients.py for one of them; where nothing reaches it is 0."""
    assert found.shape == truth.shape and found.dtype == rounded.dtype
    assert not found.isnan().any(), f"{name}: {int(found.isnan().sum())} NaN"
    truth = truth.nan_to_num()
    error = oracle.largest((found.double() - truth).abs())
    torch_error = oracle.largest((rounded.double().nan_to_num() - truth).abs())
    largest = oracle.largest(truth.abs())
    limit = 4 * torch_error + torch.finfo(found.dtype).eps / 2 * largest
    assert error <= limit, f"{name}: error {error:.3e} > {limit:.3e}, of {largest:.3e}"


@EACH_LENGTHS
def test_gradients_with_lengths_and_a_bias_are_those_of_float64(number):
    call = LENGTHS[number]
    bias, kind = length_bias(number)
    arguments = {**call.arguments(), "bias": bias, "bias_type": kind}
    check_call_gradients(call.operands(), arguments, call.layout)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 8, 12])
def test_gradient_of_the_bias_alone_is_the_same(number):
    """The other kernels are left out, or all but it are."""
    case = CASES[number]
    tensors, arguments = case.given()
    bias = arguments.pop("bias")
    every = [x.requires_grad_() for x in (*tensors, bias)]

    def gradients_of(*wanted):
        out = attngen.attention(
            *every[:3], bias=every[3], **arguments, backend="cuda", deterministic=True
        )
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(out.float().square().sum(), wanted)

    all_four = gradients_of(*every)
    assert oracle.same(gradients_of(bias), all_four[3:])
    assert oracle.same(gradients_of(every[0]), all_four[:1])

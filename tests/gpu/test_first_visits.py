"""Blocks of queries whose D and LSE the tile makes that visits them first: gradients in an order of
additions under a window, whatever a tile sees, however many blocks it is the first to visit, and
wherever these end."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen.spec.problem import Problem

from . import cases, gradients, oracle, variants
from .cases import Case

pytestmark = pytest.mark.gpu

ONES, LARGE = 0xFF, 0x7F  # bytes of NaN and -1; of 3e38, and of counts beyond any
# Head dims of one box of values and two, full or not; every dim has a kernel for each kind of mask.
DIMS = ((128, 128, "bf16"), (128, 80, "fp16"), (96, 128, "bf16"), (72, 72, "bf16"),
        (104, 104, "fp16"), (80, 40, "bf16"))  # fmt: skip
HEADS = ((1, 2, 2), (2, 4, 2), (1, 4, 1), (2, 1, 1))
LOW = "causal_bottom_right"
# Mask, window, corner; pairs of lengths.
CALLS: tuple[tuple[str, tuple[int, int], bool | None, tuple[tuple[int, int], ...]], ...] = (
    ("none", (40, 25), None, ((129, 129), (64, 700), (700, 64))),
    ("none", (40, 25), True, ((65, 513), (513, 65), (1, 300))),
    ("none", (200, 70), None, ((577, 449), (449, 577))),
    ("none", (-1, 30), None, ((300, 1), (191, 300))),
    ("none", (-1, 30), True, ((257, 129), (127, 255))),
    ("none", (30, -1), None, ((63, 65), (300, 257))),
    ("none", (0, -1), True, ((193, 321), (321, 193))),
    ("none", (0, 0), None, ((64, 63), (385, 385))),
    ("none", (0, 0), True, ((1, 1), (127, 383))),
    ("none", (5000, 5000), None, ((127, 640), (640, 127))),
    ("causal", (70, 0), None, ((641, 641), (129, 385), (385, 129))),
    ("causal", (0, 0), None, ((65, 1), (319, 320))),
    ("causal", (17, -1), None, ((1, 1), (255, 257))),
    ("causal", (260, 9), True, ((65, 577), (577, 65))),
    ("causal", (-1, 0), None, ((63, 63), (193, 256))),
    (LOW, (70, 0), None, ((1, 129), (640, 511), (511, 640))),
    (LOW, (17, -1), None, ((64, 64), (700, 1))),
    (LOW, (0, 0), None, ((127, 129), (193, 127))),
    (LOW, (5000, 0), None, ((320, 130), (130, 320))),
)


def matrix() -> list[Case]:
    """Every call; head dims, heads and layouts turn."""
    shapes = [(*call, lengths) for *call, every in CALLS for lengths in every]
    found = []
    for n, (mask, window, bottom_right, lengths) in enumerate(shapes):
        what: dict[str, Any] = {"mask": mask, "window": window, "bottom_right": bottom_right}
        what |= {"heads": HEADS[n % 4], "layout": cases.LAYOUTS[n % 3], "lengths": lengths}
        found.append(Case(*DIMS[n * 7 // 3 % len(DIMS)], **what))
    return found


def windowed(
    d: int, d_v: int, dtype: str, window: tuple[int, int] = (150, 40), **others: Any
) -> Case:
    """Make a case of a window and no other mask."""
    return Case(d, d_v, dtype, window=window, **others)


# More tiles than multiprocessors, so that most follow another: of the same head, or of the next.
CROWDS = [
    windowed(128, 128, "bf16", heads=(2, 4, 2), lengths=(700, 650)),
    windowed(72, 72, "bf16", (0, 70), heads=(2, 4, 4), lengths=(321, 400), bottom_right=True),
    Case(128, 80, "fp16", LOW, (130, 0), heads=(2, 4, 1), lengths=(500, 300), layout="sbhd"),
    Case(96, 128, "bf16", "causal", (64, 0), heads=(1, 4, 2), lengths=(640, 640), layout="bhsd"),
    # Tiles that see no query among those that do: their heads begin or end with them.
    windowed(128, 128, "bf16", (20, 20), heads=(2, 4, 4), lengths=(100, 500)),
    windowed(128, 128, "bf16", (20, 20), heads=(2, 4, 4), lengths=(100, 500), bottom_right=True),
]
SOME = [CROWDS[0], dataclasses.replace(CROWDS[2], lengths=(300, 300)), CROWDS[3]]
SINKS = [
    windowed(128, 128, "bf16", heads=(2, 4, 2), lengths=(321, 257)),
    Case(72, 72, "bf16", "causal", (64, 0), heads=(1, 4, 1), lengths=(300, 300), layout="sbhd"),
    Case(128, 128, "bf16", LOW, (40, 0), heads=(1, 4, 4), lengths=(511, 383)),
]
SCORES = [
    variants.Variant(CROWDS[0], softcap=2.0, deterministic=True),
    variants.Variant(CROWDS[3], alibi="bh", softmax="off_by_one", deterministic=True),
]
KERNELS = [
    *(dataclasses.replace(case.spec, softmax="learnable", directions=("fwd",)) for case in SINKS),
    *(dataclasses.replace(variant.spec, directions=("fwd",)) for variant in SCORES),
]


def problems() -> list[Problem]:
    """Backwards that tests launch."""
    every = [case.spec for case in (*matrix(), *CROWDS)]
    every += [dataclasses.replace(case.spec, softmax="learnable") for case in SINKS]
    found = [each for spec in every for each in gradients.backwards_of(spec)]
    return [*found, *(variant.backward for variant in SCORES)]


def incoming(case: Case, seed: int = 100) -> tuple[Tensor, Tensor]:
    """Gradients of output and LSE."""
    q = case.operands()[0]
    batch, heads, _ = case.heads
    d_o = oracle.randn(*q.shape[:-1], case.d_v, dtype=q.dtype, seed=seed)
    return d_o, oracle.randn(batch, heads, case.lengths[0], dtype=torch.float32, seed=seed + 1)


def differentiate(
    tensors: tuple[Tensor, ...],
    d_o: Tensor,
    dlse: Tensor | None,
    case: Case,
    wanted: tuple[bool, ...] = (True, True, True),
    **more: Any,
) -> list[Tensor | None]:
    """Gradients of q, k and v, those that are wanted, from kernels on memory full of NaN."""
    more = {"deterministic": True, **more}
    leaves = [x.clone().requires_grad_(want) for x, want in zip(tensors, wanted, strict=True)]
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(
            *leaves, **case.arguments, **more, return_lse=True, backend="cuda"
        )
        results = [(out, d_o)]
        if dlse is not None:  # NaN comes in for rows that see no key where they are joined
            results.append((aux.lse, dlse.masked_fill(aux.lse == -math.inf, math.nan)))
        torch.autograd.backward(*zip(*results, strict=True))
    return [x.grad for x in leaves]


@pytest.mark.parametrize("case", matrix(), ids=str)
def test_gradients_of_any_window_and_lengths_are_right(case):
    (d_o, dlse), tensors = incoming(case), case.operands()
    found = differentiate(tensors, d_o, dlse, case)
    gradients.check(found, (*tensors, d_o), dlse, **case.arguments)


@pytest.mark.parametrize("case", CROWDS, ids=str)
def test_tiles_that_follow_others_are_right_and_have_equal_bits(case):
    """Without a gradient of the LSE; a second call finds what the first has left."""
    (d_o, _), tensors = incoming(case), case.operands()
    found = differentiate(tensors, d_o, None, case)
    gradients.check(found, (*tensors, d_o), None, **case.arguments)
    assert oracle.same(differentiate(tensors, d_o, None, case), found)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_narrow_window_in_an_order_that_nobody_asked_for_is_right(case):
    (d_o, dlse), tensors = incoming(case), case.operands()
    with oracle.narrow_windows(True):
        found = differentiate(tensors, d_o, dlse, case, deterministic=False)
    gradients.check(found, (*tensors, d_o), dlse, **case.arguments)


@pytest.mark.parametrize("byte", [ONES, LARGE])
@pytest.mark.parametrize("case", [CROWDS[0], CROWDS[3]], ids=str)
def test_gradients_do_not_depend_on_what_memory_holds(case, byte):
    """Neither as D or an LSE that nobody has made yet, nor as a count that says it is there."""
    (d_o, dlse), tensors = incoming(case), case.operands()
    expected = differentiate(tensors, d_o, dlse, case)
    leaves = [x.clone().requires_grad_() for x in tensors]
    arguments = {**case.arguments, "deterministic": True, "return_lse": True}
    for _ in range(2):
        with oracle.filled_allocations(byte):
            out, aux = attngen.attention(*leaves, **arguments, backend="cuda")
            found = torch.autograd.grad((out, aux.lse), leaves, (d_o, dlse))
        assert oracle.same(found, expected)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_large_rows_beside_zeros_are_right(case, with_lse):
    """A row's D would be larger with its neighbours' values, or other columns', than all of it."""
    (d_o, dlse), (q, k, v) = incoming(case), case.operands()
    size = 2.0**12 if case.dtype == "bf16" else 8.0
    axis = case.layout.index("s")

    def rows(x: Tensor, period: int) -> Tensor:
        place = torch.arange(x.shape[axis], device=x.device) % period == 1
        return place.view([-1 if n == axis else 1 for n in range(4)])

    v = torch.where(rows(v, 5), size * v, v)
    columns = torch.arange(case.d_v, device=v.device) % 11 == 3
    d_o = torch.where(rows(d_o, 3), size * d_o, torch.where(columns, d_o, 0))
    d_o = torch.where(rows(d_o, 7), 0, d_o)
    tensors, of_lse = (q, k, v), size * dlse if with_lse else None
    found = differentiate(tensors, d_o, of_lse, case)
    gradients.check(found, (*tensors, d_o), of_lse, **case.arguments)


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, True), (False, False, True)], ids=str
)
@pytest.mark.parametrize("case", [CROWDS[1], CROWDS[3]], ids=str)
def test_gradients_of_some_inputs_are_right(case, wanted):
    (d_o, dlse), tensors = incoming(case), case.operands()
    found = differentiate(tensors, d_o, dlse, case, wanted)
    assert [x is not None for x in found] == list(wanted)
    gradients.check(found, (*tensors, d_o), dlse, **case.arguments)


@pytest.mark.parametrize("case", [CROWDS[0], CROWDS[2]], ids=str)
def test_gradient_of_a_sum_is_right(case):
    """The incoming gradient is one number, expanded; the output lies where it did."""
    tensors, d_o = case.operands(), torch.ones_like(incoming(case)[0])
    number = d_o.new_ones(()).expand(d_o.shape)
    found = differentiate(tensors, number, None, case)
    gradients.check(found, (*tensors, d_o), None, **case.arguments)


@pytest.mark.parametrize("alone", [False, True], ids=["all", "sink-alone"])
@pytest.mark.parametrize("case", SINKS, ids=str)
def test_gradient_of_a_sink_is_right(case, alone):
    """It is made of D and LSE of all rows, by whomever they were; also where nothing else is."""
    (d_o, dlse), tensors = incoming(case), case.operands()
    sink = torch.linspace(-3, 6, case.heads[1], device=oracle.DEVICE)
    arguments = {**case.arguments, "softmax": "learnable", "sink": sink}
    leaf = sink.clone().requires_grad_()
    leaves = [x.clone().requires_grad_(not alone) for x in tensors]
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(
            *leaves, **{**arguments, "sink": leaf}, deterministic=True, return_lse=True,
            backend="cuda",
        )  # fmt: skip
        torch.autograd.backward((out, aux.lse), (d_o, dlse))
    if not alone:
        gradients.check([x.grad for x in leaves], (*tensors, d_o), dlse, **arguments)
    assert leaf.grad is not None
    variants.check_sink_gradient_of(tensors, leaf.grad, arguments, d_o, dlse)


@pytest.mark.parametrize("variant", SCORES, ids=str)
def test_gradients_of_scores_that_more_is_done_to_are_right(variant):
    variants.check_backward(variant)

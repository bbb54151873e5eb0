"""Blocks of queries whose D and LSE the tile makes that visits them first, where lengths vary:
gradients in an order of additions under a window, wherever sequences begin and end, whichever are
empty, and whatever lies between them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import attngen
from attngen import features, resolve
from attngen.arch.sm90_bwd import MADE_BLOCKS, BackwardPlan
from attngen.ops import operation
from attngen.plan import plans

from . import gradients, oracle, variants, varlen
from .varlen import Call, Features

pytestmark = [pytest.mark.gpu]

ONES, LARGE = 0xFF, 0x7F  # bytes of NaN and -1; of 3e38, and of counts beyond any
ALL = (True, True, True)


@dataclasses.dataclass(frozen=True)
class Apart(Call):
    """Packed sequences behind a lead of many tokens, and with gaps of unlike lengths; these begin
    and end inside blocks or where blocks do."""

    lead: int = 200
    gaps: bool = True

    def offsets(self, lens: Sequence[int]) -> list[int]:
        gaps = itertools.cycle((1, 128, 0, 63, 64, 300))
        found = [self.lead]
        for length in lens:
            found.append(found[-1] + length + next(gaps))
        return found

    def __str__(self) -> str:
        return f"{super().__str__()}-lead{self.lead}"


# Lengths of queries and keys, one after the other.
EDGES = ((0, 1, 63, 64, 65, 127, 128, 129, 0), ())
UNLIKE = ((129, 0, 64, 1, 200, 65, 0, 63), (64, 70, 0, 300, 65, 129, 0, 1))
KEYLESS = ((130, 1, 64, 0, 65), (0, 0, 200, 0, 0))
ONE = ((0, 0, 0, 257, 0), ())
OUTER = ((0, 130, 0, 0, 70, 0), (7, 200, 0, 65, 0, 0))
TALL = ((300, 129, 250), (64, 1, 130))
BROAD = ((64, 1, 130), (300, 129, 250))
CROWD = ((130, 257, 64, 129), (190, 257, 140, 128))  # tiles of 4 heads on more than each processor
TINY = (tuple(1 + n * 5 % 17 for n in range(13)), ())
MANY = (7 * (1, 0, 65, 0, 17), 7 * (4, 3, 60, 0, 30))  # more than a CTA sorts: a kernel does

# Head dims of one box of values and two, full or not.
DIMS: tuple[dict[str, Any], ...] = (
    {"d": 128}, {"d": 96, "d_v": 128, "dtype": "fp16"}, {"d": 128, "d_v": 80},
    {"d": 72, "dtype": "fp16"},
)  # fmt: skip
HEADS = ((2, 2), (4, 1), (4, 2), (1, 1))
PACKED: tuple[dict[str, Any], ...] = ({"layout": "thd"}, {"layout": "thd", "gaps": True})
WINDOWS: tuple[tuple[tuple[int, int], bool | None], ...] = (
    ((40, 0), None), ((0, 0), True), ((200, 70), None), ((0, 100), True), ((30, -1), None),
    ((-1, 30), True), ((40, 0), True), ((0, 0), None), ((200, 70), True), ((0, 100), None),
    ((30, -1), True), ((-1, 30), None),
)  # fmt: skip
CAUSAL, LOW = ({"mask": f"causal{end}", "window": (40, 0)} for end in ("", "_bottom_right"))


def matrix() -> list[Call]:
    """All lengths, packed and padded; windows, corners, head dims and heads turn."""
    packed = (EDGES, UNLIKE, KEYLESS, ONE, OUTER, TALL, BROAD, TINY, MANY)
    turns = [(lengths, PACKED[n % 2]) for n, lengths in enumerate((*packed, *packed))]
    # Room that ends with the longest sequence, and that does not.
    for n, (q_lens, kv_lens) in enumerate((EDGES, UNLIKE, KEYLESS, ONE, OUTER, TALL, BROAD, TINY)):
        room = max(q_lens) + n % 2 * 67, max(kv_lens or q_lens) + n % 3 * 50
        padded = {"layout": ("bshd", "sbhd", "bhsd")[n % 3], "room": room}
        turns.append(((q_lens, kv_lens), padded))
    found = []
    for n, ((q_lens, kv_lens), where) in enumerate(turns):
        window, bottom_right = WINDOWS[n * 5 % 12]
        what = {"window": window, "bottom_right": bottom_right, "heads": HEADS[n % 4]}
        what |= DIMS[n * 3 % 4 if n < 18 else (n // 2) % 4]
        found.append(Call(q_lens=q_lens, kv_lens=kv_lens, **what, **where))
    return found


def of(layout: str, lengths: tuple[tuple[int, ...], tuple[int, ...]], **others: Any) -> Call:
    return Call(layout, *lengths, **{"d": 128, "window": (40, 0), **others})


CROWDS = [
    of("thd", CROWD, gaps=True, heads=(4, 2), window=(150, 40)),
    of("thd", CROWD, heads=(4, 1), **CAUSAL | {"window": (64, 0)}),
    of("bshd", CROWD, room=(330, 300), heads=(4, 2), **LOW),
    of("sbhd", CROWD, room=(400, 310), heads=(4, 4), d=72, dtype="fp16", window=(20, 20)),
]
LAYOUTS = [
    *(Apart("thd", *lengths, d=128, window=window, bottom_right=low, lead=lead)
      for lengths, window, low, lead in ((EDGES, (40, 0), None, 200), (OUTER, (0, 100), True, 64),
                                         (UNLIKE, (30, -1), None, 640), (ONE, (0, 0), True, 1))),
    of("t3hd", EDGES, gaps=True), of("thd_th2d", UNLIKE, gaps=True, heads=(4, 2)),
    of("thd_bshd_bshd", UNLIKE, room=(200, 310), gaps=True),
    of("bshd_bs2hd", UNLIKE, room=(256, 384), cumulative=True),
    of("thd", ((0, 0), (0, 5)), gaps=True), of("thd", ((70, 1), (0, 0))),
    of("bshd", ((0, 0), (140, 0)), room=(130, 140)),
]  # fmt: skip
SOME = [of("thd", UNLIKE, gaps=True, heads=(4, 2)), of("sbhd", EDGES, room=(140, 130), d_v=80)]
SCORES = [
    of("thd", UNLIKE, gaps=True, heads=(4, 2), more=Features(softcap=2.0, softmax="off_by_one")),
    of("bshd", EDGES, room=(150, 129), more=Features(alibi="bh")),
]
SINK = Features(softmax="learnable")
SINKS = [
    of("thd", UNLIKE, gaps=True, heads=(4, 2), more=SINK), of("thd", MANY, more=SINK),
    of("bshd", OUTER, room=(150, 210), heads=(4, 1), more=SINK, d=72, dtype="fp16"),
]  # fmt: skip
EVERY = [*matrix(), *CROWDS, *LAYOUTS, *SOME, *SCORES, *SINKS]
KERNELS = list(dict.fromkeys(dataclasses.replace(c.spec, directions=("fwd",)) for c in EVERY))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Every backward's kernels built before the first test, in parallel."""
    gradients.compile_all([each for spec in KERNELS for each in gradients.backwards_of(spec)])


def differentiate(
    call: Call,
    operands: Sequence[Tensor | None],
    d_o: Tensor,
    dlse: Tensor | None,
    wanted: Sequence[bool] = ALL,
    **more: Any,
) -> list[Tensor]:
    """Gradients of the operands that are wanted and of the sink, by the kernels in question: twice,
    on memory full of NaN and of large numbers, which must give the same bits."""
    arguments = {**call.arguments(), "deterministic": True, **more}
    given = [None if x is None else x.clone() for x in operands]
    leaves = [x.requires_grad_() for x, want in zip(given, wanted, strict=True)
              if x is not None and want]  # fmt: skip
    if "sink" in arguments:
        arguments["sink"] = arguments["sink"].clone().requires_grad_()
        leaves.append(arguments["sink"])
    with varlen.poisoned_memory():
        out, aux = attngen.attention(*given, **arguments, backend="cuda", return_lse=True)
    results = [(out, d_o)]
    if dlse is not None:  # NaN comes in for rows of no sequence, and for those that see no key
        results.append((aux.lse, dlse.masked_fill(aux.lse == -math.inf, math.nan)))
    found = []
    for byte in (ONES, LARGE):
        with (
            oracle.filled_allocations(byte),
            mock.patch.object(operation, "launch", wraps=operation.launch) as launch,
        ):
            outputs, incoming = zip(*results, strict=True)
            found.append(torch.autograd.grad(outputs, leaves, incoming, retain_graph=True))
        launched = [each.args[0].loaded.kernel for each in launch.call_args_list]
        # Nothing is launched where there is no key at all.
        assert not launched or any(kernel.cta_blocks == MADE_BLOCKS for kernel in launched)
    assert launched or not all(x is None or x.numel() for x in operands)
    assert oracle.same(*found)
    return list(found[0])


def check(
    call: Call, with_lse: bool = True, wanted: Sequence[bool] = ALL, seed: int = 0, **more: Any
) -> None:
    """Asserts the rules for gradients of what is wanted, and of a sink."""
    operands, arguments = call.operands(seed), call.arguments()
    d_o = call.tensor("q", call.heads[0], call.d_v or call.d, 3 * seed + 7)
    truth = oracle.truth(*operands, **arguments)
    dlse = oracle.randn(*truth.lse.shape, dtype=torch.float32, seed=seed + 9)
    dlse *= with_lse
    found = differentiate(call, operands, d_o, dlse if with_lse else None, wanted, **more)
    exact = varlen.expected(operands, d_o, dlse, torch.float64, **arguments)
    rounded = varlen.expected(operands, d_o, dlse, d_o.dtype, **arguments)
    if "sink" in arguments:
        variants.check_sink_gradient(found.pop(), exact.pop(), truth, arguments, d_o, dlse)
        rounded.pop()
    present = [want for x, want in zip(operands, wanted, strict=True) if x is not None]
    made = iter(found)
    every = [next(made) if want else x.contiguous()
             for want, x in zip(present, rounded, strict=True)]  # fmt: skip
    if with_lse:
        varlen.check_gradients(call, operands, every, exact, rounded)
        return
    # A key that is seen alone has no gradient of its score, but what rounding the output leaves.
    gradients.check_against(every, exact, rounded)
    formats = (call.parsed.q_format, *[call.parsed.kv_format] * 2)
    for x, axes, lens in zip(every, formats, (*call.lengths, call.lengths[1]), strict=True):
        assert not x[~call.members(axes, lens, x)].any()


@pytest.mark.parametrize("call", EVERY, ids=str)
def test_consumers_make_d(call):
    """In every kernel that the other tests here launch."""
    spec = dataclasses.replace(call.spec, directions=("bwd",), deterministic=True)
    (problem,) = resolve.resolve(spec, features.scan())
    (main,) = (each for each in plans(problem, "sm_90a") if isinstance(each, BackwardPlan))
    assert main.makes_d and problem.varlen


@pytest.mark.parametrize("call", matrix(), ids=str)
def test_gradients_of_any_lengths_and_window_are_right(call):
    check(call)


@pytest.mark.parametrize("call", CROWDS, ids=str)
def test_tiles_that_follow_those_of_other_sequences_are_right(call):
    """Without a gradient of the LSE."""
    check(call, with_lse=False)


@pytest.mark.parametrize("call", LAYOUTS, ids=str)
def test_sequences_that_lie_anywhere_are_right(call):
    check(call)


@pytest.mark.parametrize("call", SOME, ids=str)
def test_narrow_window_in_an_order_that_nobody_asked_for_is_right(call):
    with oracle.narrow_windows(True):
        check(call, deterministic=False)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, False, True)], ids=str)
@pytest.mark.parametrize("call", SOME, ids=str)
def test_gradients_of_some_inputs_are_right(call, wanted):
    check(call, wanted=wanted)


@pytest.mark.parametrize("call", SCORES, ids=str)
def test_gradients_of_scores_that_more_is_done_to_are_right(call):
    check(call)


@pytest.mark.parametrize("alone", [False, True], ids=["all", "sink-alone"])
@pytest.mark.parametrize("call", SINKS, ids=str)
def test_gradient_of_a_sink_is_right(call, alone):
    """It is made of D and LSE of all rows, by whomever they were; also where nothing else is."""
    check(call, wanted=[not alone] * 3)

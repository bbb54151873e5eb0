"""The backward's kernels against float64: every family, mask and dtype, odd shapes, bit for bit."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cuda.bindings import driver
from torch import Tensor

import attngen
from attngen.compiler.compile import run_nvrtc
from attngen.runtime.load import checked, multiprocessors
from attngen.spec.problem import Problem

from . import gradients, oracle
from .cases import DTYPES

pytestmark = pytest.mark.gpu
WINDOW = (100, 30)
# CTAs beside which an SM has no room for one of a backward, until somebody says so, or for a
# million looks, some seconds: looks, not time, since kernels of other processes may stop both.
HOLD = """
extern "C" __global__ void hold(const volatile int* released) {
  __shared__ volatile char room[48 << 10];
  room[threadIdx.x] = 0;
  for (int looks = 0; looks < 1000000 && !*released; ++looks) __nanosleep(1000);
}
"""


@dataclass(frozen=True)
class Kernels:
    """Head dims, masks and dtypes that one set of kernels serves."""

    d: int
    d_v: int
    masks: tuple[str, ...] = ()
    dtype: str = "bf16"
    deterministic: bool = False

    def __str__(self) -> str:
        return self.problem.label

    @property
    def problem(self) -> Problem:
        return Problem(
            direction="bwd",
            dtype_q=self.dtype,
            dtype_kv=self.dtype,
            dtype_o=self.dtype,
            head_dim_qk=self.d,
            head_dim_v=self.d_v,
            masks=self.masks,
            scores=(),
            softmax="vanilla",
            q_seq="dense",
            kv_seq="dense",
            kv_fetch="tma",
            kv_iter="range",
            deterministic=self.deterministic,
        )


@dataclass(frozen=True)
class Call:
    """One call of them. `surrounded`: every tensor lies in NaN; `lse`: a gradient of the LSE."""

    heads: tuple[int, int, int]  # batch, h_q, h_kv
    lengths: tuple[int, int]
    bottom_right: bool = False
    lse: bool = False
    surrounded: bool = False
    layout: str = "bshd"

    def __str__(self) -> str:
        heads, lengths = ("x".join(map(str, each)) for each in (self.heads, self.lengths))
        marks = ("low", self.bottom_right), ("lse", self.lse), ("nan", self.surrounded)
        return "-".join([f"b{heads}-s{lengths}-{self.layout}", *(m for m, on in marks if on)])


CAUSAL, BOTH = ("causal",), ("causal", "window")
SETS = [
    *(Kernels(d, d, masks, deterministic=order)
      for d, masks, order in itertools.product((64, 128), ((), CAUSAL), (False, True))),
    *(Kernels(*pair, masks) for pair, masks in itertools.product(
        ((256, 256), (192, 128)), ((), CAUSAL))),
    *(Kernels(*pair, BOTH) for pair in (
        *((8, 8), (40, 40), (48, 48), (56, 56), (24, 40), (72, 104), (104, 72), (64, 128)),
        *((136, 8), (8, 256), (256, 8), (200, 168)))),
    Kernels(128, 128, CAUSAL, "fp16"),
    Kernels(64, 64, ("window",), "fp16"),
    Kernels(256, 256, ("window",), "fp16"),
    *(Kernels(d, d, BOTH, deterministic=True) for d in (8, 32, 48, 64, 72, 96, 128)),
    Kernels(24, 40, CAUSAL, deterministic=True),
]  # fmt: skip
CALLS = [
    Call((2, 4, 2), (200, 333), layout="sbhd"),
    Call((1, 4, 1), (333, 200), bottom_right=True, lse=True, surrounded=True),
    Call((1, 2, 2), (1, 77), bottom_right=True),
    Call((1, 2, 1), (513, 1029), lse=True, layout="bhsd"),
    Call((3, 6, 3), (65, 2), surrounded=True),
    Call((1, 8, 2), (1500, 1500)),
    Call((2, 40, 20), (900, 700), bottom_right=True),  # more tiles than a chip has SMs
]


def problems() -> list[Problem]:
    """Backwards that tests launch."""
    return [kernels.problem for kernels in SETS]


@dataclass(frozen=True)
class Given:
    """Operands of a call, its keyword arguments for the reference, and the kernels made ready."""

    operands: tuple[Tensor, ...]  # q, k, v, d_o
    dlse: Tensor | None
    lse: Tensor
    arguments: dict[str, Any]
    backward: gradients.Backward
    memory: gradients.Surrounded | None

    def run(self) -> tuple[Tensor, ...]:
        """dq, dk, dv, filled with NaN before."""
        results = tuple(self.backward.tensors[name] for name in gradients.NAMES)
        for result in results:
            result.fill_(float("nan"))
        self.backward(self.lse, self.dlse)
        return tuple(result.clone() for result in results)


def given(kernels: Kernels, call: Call, seed: int = 0) -> Given:
    dtype = DTYPES[kernels.dtype]
    (batch, heads_q, _), (s_q, s_kv) = call.heads, call.lengths
    shape = (*call.heads, s_q, s_kv, kernels.d, kernels.d_v)
    q, k, v = oracle.operands(*shape, dtype, call.layout, seed)
    sizes = {"b": batch, "s": s_q, "h": heads_q, "d": kernels.d_v}
    d_o = oracle.randn(*(sizes[axis] for axis in call.layout), dtype=dtype, seed=seed + 100)
    dlse = oracle.randn(batch, heads_q, s_q, dtype=torch.float32, seed=7) if call.lse else None
    window = WINDOW if "window" in kernels.masks else (-1, -1)
    arguments = {
        "mask": "causal" if "causal" in kernels.masks else "none",
        "window": window,
        "bottom_right": call.bottom_right,
        "layout": call.layout,
    }
    out, lse, _ = gradients.reference_gradients((q, k, v, d_o), dlse, dtype, **arguments)
    tensors = {"q": q, "k": k, "v": v, "o": out, "d_o": d_o}
    tensors |= {f"d{name}": torch.empty_like(tensors[name]) for name in "qkv"}
    memory = gradients.Surrounded(tensors) if call.surrounded else None
    backward = gradients.Backward(
        kernels.problem,
        memory.views if memory else tensors,
        call.layout,
        window,
        call.bottom_right,
    )
    return Given((q, k, v, d_o), dlse, lse, arguments, backward, memory)


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("kernels", SETS, ids=str)
def test_backward_gradients_are_those_of_float64(kernels, call):
    case = given(kernels, call)
    found = case.run()
    if case.memory:
        case.memory.assert_untouched()
    gradients.check(found, case.operands, case.dlse, **case.arguments)


def always_repeat(sets: list[Kernels]) -> Iterator[Any]:
    """Sets whose gradients are the same bits each time: those that are asked to be, and on Hopper
    those of dims above 128, whose dQ has a kernel of its own."""
    for each in sets:
        if each.deterministic:
            yield each
        elif max(each.d, each.d_v) > 128:
            yield pytest.param(each, marks=pytest.mark.wgmma)


@pytest.mark.slow
@pytest.mark.parametrize("call", [CALLS[0], CALLS[1], CALLS[5], Call((2, 8, 1), (700, 900))],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("kernels", list(always_repeat(SETS)), ids=str)
def test_backward_that_is_deterministic_repeats_bit_for_bit(kernels, call):
    case = given(kernels, call)
    first = case.run()
    for _ in range(5):
        assert oracle.same(case.run(), first)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_backward_rows_that_see_no_key_add_nothing(d):
    """Bottom-right causal with more queries than keys: the first rows see none. Where the LSEs of
    two such rows were joined, NaN comes in for each."""
    call = Call((1, 2, 2), (300, 77), bottom_right=True, lse=True)
    case = given(Kernels(d, d, CAUSAL), call)
    assert torch.isneginf(case.lse[:, :, : 300 - 77]).all() and case.dlse is not None
    wanted = case.run()
    case.dlse[:, :, : 300 - 77] = torch.nan
    dq, *_ = found = case.run()
    assert not dq[:, : 300 - 77].any()
    assert oracle.same(found, wanted)


@pytest.mark.parametrize("d", [8, 48, 128])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_backward_blocks_behind_a_window_get_zeros(d, layout):
    """More queries than keys: blocks of the last ones are visited by no tile of keys."""
    call = Call((2, 4, 2), (700, 77), lse=True, surrounded=True, layout=layout)
    case = given(Kernels(d, d, BOTH, deterministic=True), call)
    dq, *_ = found = case.run()
    assert case.memory is not None
    case.memory.assert_untouched()
    first = 77 + WINDOW[0]
    unseen = dq[:, first:] if layout == "bshd" else dq[:, :, first:]
    assert not unseen.any()
    gradients.check(found, case.operands, case.dlse, **case.arguments)


@pytest.mark.parametrize("kernels", [Kernels(128, 128, CAUSAL), Kernels(256, 256, CAUSAL)], ids=str)
def test_backward_far_apart_scores_stay_finite(kernels):
    """Scores of some hundreds: most weights are 0 and one a row is 1."""
    case = given(kernels, CALLS[0])
    q = case.operands[0].mul_(30)
    arguments = case.arguments
    out, lse, _ = gradients.reference_gradients(case.operands, None, q.dtype, **arguments)
    case.backward.tensors["o"].copy_(out)
    case.lse.copy_(lse)
    gradients.check(case.run(), case.operands, None, **arguments)


@pytest.mark.device
@pytest.mark.parametrize("named", [{}, {"window": (2047, 0)}], ids=str)
def test_backward_in_an_order_waits_for_no_cta_without_an_sm(named):
    """Another kernel has half of the SMs: what runs of a backward does all of its work."""
    module = checked("module", driver.cuModuleLoadData(run_nvrtc(HOLD, "hold.cu", "sm_90a").cubin))
    hold = checked("kernel", driver.cuModuleGetFunction(module, b"hold"))
    released = torch.zeros(1, dtype=torch.int32).pin_memory()
    argument = ((released.data_ptr(),), (ctypes.c_void_p,))
    ctas = multiprocessors(torch.cuda.current_device()) // 2
    holding, held, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream()):
        q, k, v = (x.requires_grad_() for x in oracle.operands(1, 8, 8, 4096, 4096, 128))
        d_o = oracle.randn(*q.shape, seed=1)
        out = attngen.attention(q, k, v, mask="causal", deterministic=True, backend="cuda", **named)

        def call():
            return torch.autograd.grad(out, (q, k, v), d_o, retain_graph=True)

        found, wanted = call(), call()
        del found  # leaves memory for the next ones
        torch.cuda.synchronize()
        stream = holding.cuda_stream
        checked("hold", driver.cuLaunchKernel(hold, ctas, 1, 1, 32, 1, 1, 0, stream, argument, 0))
        held.record(holding)
        found = call()
        done.record()
    while not (done.query() or held.query()):
        time.sleep(0.01)
    finished = not held.query()
    released.fill_(1)
    torch.cuda.synchronize()
    assert finished and oracle.same(found, wanted)

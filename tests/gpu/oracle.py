"""The float64 rule: when what a kernel returns counts as right.

Output. With O64 the result in float64 of the same 16-bit inputs, and e_torch the largest error
against it of the reference in the inputs' dtype (float32 scores, softmax and accumulation, output
rounded to 16 bits):  max |O - O64|  <=  2 e_torch + 1e-3 max |O64|.
A kernel rounds the softmax weights to 16 bits as well, which errs about as much as rounding the
output does: hence the 2. It holds for float32 (partial) outputs too, since they come from the
same rounded weights.

LSE. |L - L64| <= 2 e_torch + 1e-4 max(1, |L64|), e_torch being the largest error of the float32
reference. A kernel rounds scale * log2(e) and each scaled maximum to float32 (2^-24 |L| each),
takes a logarithm good to 2^-22, and sums scores in tensor cores that truncate instead of rounding
(some 2^-22 of the sum of |q_c k_c|): about 1e-6 of the scores' size, which the last term covers
until that size is 100 times the LSE's.

A row that sees no key has O = 0 and LSE = -inf exactly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

import attngen
from attngen import reference
from attngen.frontends.pytorch import (
    operation,
)
from attngen.kernels.wgmma.backward import cost as backward_cost
from attngen.kernels.wgmma.forward import cost as forward_cost
from attngen.spec import layouts
from attngen.spec.attention_spec import SHORT_HEAD_DIM
from tests.support.caches import BACKWARD, FORWARD, held

Result = TypeVar("Result")
DEVICE = torch.device("cuda")
TO_BHSD = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}
TO_BHSD |= {"thd": (1, 0, 2)}  # of packed tokens there is no b


@dataclass(frozen=True)
class Truth:
    """Results in float64, O in Q's format, LSE [b, h, s] or [h, t]; errors of the reference."""

    out: Tensor
    lse: Tensor
    out_error: float
    lse_error: float


def truth(q: Tensor, k: Tensor | None, v: Tensor | None, **arguments: Any) -> Truth:
    """Compute `attention(q, k, v, **arguments)` in float64, and how far PyTorch is off."""
    doubles = (None if x is None else x.double() for x in (k, v))
    bias = arguments.get("bias")  # of q's dtype
    wide = {} if bias is None else {"bias": bias.double()}
    out64, aux64 = reference.attention(q.double(), *doubles, **{**arguments, **wide})
    out, aux = reference.attention(q, k, v, **arguments)
    assert aux.lse is not None and aux64.lse is not None
    seen = aux64.lse.isfinite()
    return Truth(
        out64,
        aux64.lse,
        largest((out.double() - out64).abs()),
        largest((aux.lse.double() - aux64.lse)[seen].abs()),
    )


def largest(tensor: Tensor) -> float:
    """The largest element; 0 of an empty tensor."""
    return tensor.max().item() if tensor.numel() else 0.0


def check(out: Tensor, lse: Tensor | None, expected: Truth, layout: str = "bshd") -> None:
    """Asserts the rule for an output and, where given, its LSE."""
    assert out.shape == expected.out.shape
    assert not out.isnan().any(), f"{int(out.isnan().sum())} of {out.numel()} outputs are NaN"
    error = (out.double() - expected.out).abs()
    limit = 2 * expected.out_error + 1e-3 * largest(expected.out.abs())
    assert largest(error) <= limit, f"output: {_worst(error)} > {limit:.3e}"
    seen = expected.lse.isfinite()
    rows = out.permute(TO_BHSD[layouts.parse(layout).q_format])
    assert not rows[~seen].any(), "rows that see no key must be 0"
    if lse is None:
        return
    assert lse.shape == expected.lse.shape and lse.dtype == torch.float32
    assert (lse[~seen] == float("-inf")).all(), "the LSE of rows that see no key must be -inf"
    assert lse[seen].isfinite().all(), f"{int((~lse[seen].isfinite()).sum())} LSE are not finite"
    error = torch.where(seen, lse.double() - expected.lse, 0).abs()
    limits = 2 * expected.lse_error + 1e-4 * expected.lse.abs().clamp(min=1)
    assert (error <= limits).all(), f"LSE: {_worst(error)} against {expected.lse_error:.3e}"


def _worst(error: Tensor) -> str:
    index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return f"error {float(error[index]):.3e} at {index} of {tuple(error.shape)}"


def check_call(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> None:
    """Runs the kernel on memory full of NaN and asserts the rule; the one for short calls and the
    other, where there are both."""
    expected = truth(q, k, v, **arguments)
    for small in (False, True)[: 1 + (max(q.shape[-1], v.shape[-1]) <= SHORT_HEAD_DIM)]:
        with small_tiles(small), nan_filled_allocations():
            out, aux = attngen.attention(q, k, v, **arguments, backend="cuda", return_lse=True)
        assert out.dtype == q.dtype
        check(out, aux.lse, expected, arguments.get("layout", "bshd"))


@contextlib.contextmanager
def small_tiles(wanted: bool) -> Iterator[None]:
    """Calls launch the kernels for short calls, where there are some, or never do."""
    known = held(*FORWARD)
    with mock.patch.object(forward_cost, "is_short", lambda *_: wanted):
        for each in known:
            each.clear()
        try:
            yield
        finally:
            for each in known:
                each.clear()


@contextlib.contextmanager
def narrow_windows(wanted: bool) -> Iterator[None]:
    """Backwards launch the kernels for narrow windows, where there are some, or never do."""
    known = held(*BACKWARD)
    with mock.patch.object(backward_cost, "is_narrow", lambda *_: wanted):
        for each in known:
            each.clear()
        try:
            yield
        finally:
            for each in known:
                each.clear()


@contextlib.contextmanager
def folded_grids() -> Iterator[None]:
    """Axes of grids but the first have two places: CTAs of backwards that want more are all in the
    first, as beyond 65,535 heads or sequences."""
    known = held(*BACKWARD)
    with mock.patch("attngen.runtime.launch.GRID_LIMIT", 2):
        for each in known:
            each.clear()
        try:
            yield
        finally:
            for each in known:
                each.clear()


@contextlib.contextmanager
def heads_apart(wanted: bool) -> Iterator[mock.Mock]:
    """Backwards give each query head key tiles of its own, where kernels can sum what these make,
    or never do. Yields what was asked about every call whose kernels can."""
    known = held(*BACKWARD)
    with mock.patch.object(backward_cost, "is_faster", return_value=wanted) as asked:
        for each in known:
            each.clear()
        try:
            yield asked
        finally:
            for each in known:
                each.clear()


def run(tensors: tuple[Tensor, ...], mask: str = "causal") -> tuple[Tensor, Tensor]:
    """Output and LSE of one plain call on the kernels."""
    out, aux = attngen.attention(*tensors, mask=mask, backend="cuda", return_lse=True)
    return out, aux.lse


def same(results: Iterable[Tensor], wanted: Iterable[Tensor]) -> bool:
    """Whether all tensors agree bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


def capture(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of what a call launches, and what it returned, which replays write anew. Before, it
    runs once on a stream aside, as PyTorch wants it where gradients are captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


@contextlib.contextmanager
def filled_allocations(byte: int) -> Iterator[None]:
    """Whatever an operation allocates, workspaces included, holds the byte everywhere."""
    allocate = operation._empty_strided_cuda

    def allocate_filled(*arguments: Any) -> Tensor:
        tensor = allocate(*arguments)
        tensor.view(torch.uint8).fill_(byte)
        return tensor

    with mock.patch.object(operation, "_empty_strided_cuda", allocate_filled):
        yield


def nan_filled_allocations() -> contextlib.AbstractContextManager[None]:
    """Makes what an operation allocates NaN, so that an element nobody writes shows up."""
    return filled_allocations(0xFF)  # NaN in every floating dtype


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Standard normal numbers, the same for the same seed."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)


def operands(
    batch: int,
    heads_q: int,
    heads_kv: int,
    s_q: int,
    s_kv: int,
    d: int,
    d_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "bshd",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v in the axis order of the layout."""

    def make(heads: int, seq: int, dim: int, number: int) -> Tensor:
        sizes = {"b": batch, "s": seq, "h": heads, "d": dim}
        return randn(*(sizes[axis] for axis in layout), dtype=dtype, seed=3 * seed + number)

    return make(heads_q, s_q, d, 0), make(heads_kv, s_kv, d, 1), make(heads_kv, s_kv, d_v or d, 2)


def check_rows(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    *,
    left: int | None,
    right: int | None,
) -> None:
    """Asserts the rule on some rows of a bshd call too long for the reference as a whole.

    rows: positions i; query i sees keys i - left .. i + right, None for no bound. Each row is
    held to its own largest value, since those that see many keys are far smaller than the first.
    """
    j = torch.arange(k.shape[1], device=k.device)
    seen = torch.ones(len(rows), k.shape[1], dtype=torch.bool, device=k.device)
    if left is not None:
        seen &= j >= rows[:, None] - left
    if right is not None:
        seen &= j <= rows[:, None] + right
    for n in range(len(rows)):
        row = slice(n, n + 1)
        keys = seen[n].nonzero()[:, 0]
        expected = truth(q[:, rows[row]], k[:, keys], v[:, keys])
        check(out[:, rows[row]], lse[:, :, rows[row]], expected)

"""The float64 rule of FP8 calls: when what a kernel returns counts as right.

Output. With O64 the result in float64 of the numbers that the operands stand for, and e the largest
error against it of the reference's emulation (weights stored as e4m3, output in its dtype):

    |O - O64|  <=  2 e + 1e-3 max |O64| + (2 s + t) P|V|        for each element.

A kernel stores weights relative to the largest score so far, the emulation to the largest of all,
so both round alike, but not the same way. e is the largest of three emulations that place the
weights at different points of e4m3's steps (scale_s and 2^(1/3) and 2^(2/3) times less), for small
outputs could be lucky in one.

s is how far the tensor cores are off in the worst score of a row, found by summing as they do
(`tensor_core.py`): scores that are wrong by s change weights by 2 s at most of each, once
normalised. t is what they lose in summing the output. A product is cut below 2^-13 of the running
sum, so it loses half of that on average, and the running sum is half of the whole on average: N
products of one sign lose N 2^-13 / 4 of their sum. A kernel sums N = 1024 keys so, and then these
sums without loss that counts.

LSE. |L - L64| <= 2 e + 1e-4 max(1, |L64|) + s, e being the largest error of the emulation's.
Maxima. amax_s is 1 where any query sees a key, else 0; amax_o is max |O64| within the rule for O.

A row that sees no key has O = 0 and LSE = -inf exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attngen
from attngen import reference
from attngen.call.table import SCALES
from attngen.reference import fp8

from . import oracle, tensor_core

DTYPES = {
    **{"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2},
    **{"fp16": torch.float16, "bf16": torch.bfloat16},
}
SUMMED_KEYS = 1024  # whose products tensor cores sum before a kernel takes the sum from them
PLACES = (1.0, 2 ** (-1 / 3), 2 ** (-2 / 3))


@dataclass(frozen=True)
class Truth:
    """Results in float64, and their limits: O in the call's layout, LSE [b, h, s]."""

    out: Tensor
    lse: Tensor
    out_limit: Tensor
    lse_limit: Tensor

    def last(self, batch: int) -> Truth:
        """Narrow it to the last sequence. batch: the output's axis of sequences."""
        out, limit = (x.narrow(batch, -1, 1) for x in (self.out, self.out_limit))
        return Truth(out, self.lse[-1:], limit, self.lse_limit[-1:])


def operands(
    *shape: int,
    layout: str = "bshd",
    dtype: str = "e4m3",
    kv_dtype: str | None = None,
    seed: int = 0,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v: normal numbers times `factor`, in 8 bits. shape: as `oracle.operands`'."""
    sizes = shape if len(shape) == 7 else (*shape, shape[-1])
    made = oracle.operands(*sizes, torch.float32, layout, seed)
    dtypes = (DTYPES[dtype], *(DTYPES[kv_dtype or dtype],) * 2)
    q, k, v = (fp8.quantise(x, d, factor) for x, d in zip(made, dtypes, strict=True))
    return q, k, v


def exact(x: Tensor, descale: Tensor | None, layout: str, heads: int) -> Tensor:
    """The numbers that an operand of so many heads stands for, in float64."""
    if descale is None:
        return x.double()
    if descale.ndim == 3:  # one a token and head
        order = ["bhsd".index(axis) for axis in layout[:4]]
        return x.double() * descale[..., None].permute(order).double()
    if descale.ndim == 2:
        per_head = descale.repeat_interleave(heads // descale.shape[1], dim=1)
        sizes = {"b": per_head.shape[0], "h": heads}
        descale = per_head.reshape([sizes.get(axis, 1) for axis in layout[:4]])
    return x.double() * descale.double()


def truth(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Truth:
    """Compute `attention(q, k, v, **arguments)` in float64, and how far off it may be."""
    layout = arguments.get("layout", "bshd")
    scales = {name: arguments.get(name) for name in SCALES}
    plain = {n: x for n, x in arguments.items() if n not in (*scales, "out_dtype")}
    q64, k64, v64 = (
        exact(x, scales[f"descale_{name}"], layout, x.shape[layout.index("h")])
        for name, x in (("q", q), ("k", k), ("v", v))
    )
    out64, aux64 = reference.attention(q64, k64, v64, **plain)
    weighed, _ = reference.attention(q64, k64, v64.abs(), **plain)
    out_error, lse_error = _emulate(q, k, v, arguments, out64, aux64.lse)
    core = score_error(q, k, scales, layout, plain.get("softmax_scale"))
    back = [oracle.TO_BHSD[layout[:4]].index(axis) for axis in range(4)]
    keys = min(SUMMED_KEYS, k.shape[layout.index("s")])
    slack = (2 * core[..., None].permute(back) + keys * 2.0**-15) * weighed
    return Truth(
        out64,
        aux64.lse,
        2 * out_error + 1e-3 * oracle.largest(out64.abs()) + slack,
        2 * lse_error + 1e-4 * aux64.lse.abs().clamp(min=1) + core,
    )


def _emulate(
    q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], out64: Tensor, lse64: Tensor
) -> tuple[float, float]:
    """The largest errors of the emulation, in the output and in the LSE."""
    scale, descale = arguments.get("scale_s"), arguments.get("descale_s")
    if scale is None:
        scale = torch.tensor([fp8.DEFAULT_SCALE_S], device=q.device)
        descale = 1 / scale
    scale_o = arguments.get("scale_o")
    seen = lse64.isfinite()
    out_errors, lse_errors = [], []
    for place in PLACES:
        placed = {"scale_s": scale * place, "descale_s": descale / place}
        out, aux = reference.attention(q, k, v, **{**arguments, **placed})
        found = out.double() / (1 if scale_o is None else scale_o.double())
        out_errors.append(oracle.largest((found - out64).abs()))
        lse_errors.append(oracle.largest((aux.lse.double() - lse64)[seen].abs()))
    return max(out_errors), max(lse_errors)


def score_error(
    q: Tensor, k: Tensor, scales: dict[str, Tensor | None], layout: str, scale: float | None
) -> Tensor:
    """How far off tensor cores are in the worst score of each row, float64 [b, h, s_q]."""
    q, k = (x.permute(oracle.TO_BHSD[layout[:4]]) for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    found = tensor_core.largest_errors(q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    for name in ("descale_q", "descale_k"):
        scale_of = scales.get(name)
        if scale_of is not None and scale_of.ndim == 3 and name == "descale_k":
            scale_of = scale_of.amax(-1)
        ones = q.new_ones(q.shape[0], q.shape[1], 1, 1, dtype=torch.float64)
        found = found * exact(ones, scale_of, "bhsd", q.shape[1])[..., 0]
    return found


def check(
    out: Tensor, lse: Tensor, expected: Truth, layout: str = "bshd", scale_o: Tensor | None = None
) -> None:
    """Asserts the rule for an output and its LSE."""
    check_output(out, expected, layout, scale_o)
    seen = expected.lse.isfinite()
    assert lse.shape == expected.lse.shape and lse.dtype == torch.float32
    assert (lse[~seen] == -math.inf).all(), "the LSE of rows that see no key must be -inf"
    assert lse[seen].isfinite().all(), f"{int((~lse[seen].isfinite()).sum())} LSE are not finite"
    _assert_near(lse.double()[seen], expected.lse[seen], expected.lse_limit[seen], "LSE")


def check_output(out: Tensor, expected: Truth, layout: str, scale_o: Tensor | None) -> None:
    """Asserts the rule for an output."""
    assert out.shape == expected.out.shape
    found = out.double()
    assert not found.isnan().any(), f"{int(found.isnan().sum())} of {out.numel()} outputs are NaN"
    found = found / (1 if scale_o is None else scale_o.double())
    _assert_near(found, expected.out, expected.out_limit, "output")
    rows = found.permute(oracle.TO_BHSD[layout[:4]])
    assert not rows[~expected.lse.isfinite()].any(), "rows that see no key must be 0"


def check_call(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> None:
    """Runs the kernel on memory full of NaN and asserts the rule, also for the maxima; without a
    mask once more for the output alone."""
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(
            q, k, v, **arguments, backend="cuda", return_lse=True, return_amax=True
        )
    assert out.dtype == (arguments.get("out_dtype") or torch.bfloat16)
    expected = truth(q, k, v, **arguments)
    layout = arguments.get("layout", "bshd")
    check(out, aux.lse, expected, layout, arguments.get("scale_o"))
    check_maxima(aux.amax_s, aux.amax_o, expected)
    if arguments.get("mask", "none") == "none":  # which may sum weights otherwise without an LSE
        with oracle.nan_filled_allocations():
            out = attngen.attention(q, k, v, **arguments, backend="cuda")
        check_output(out, expected, layout, arguments.get("scale_o"))


def check_maxima(amax_s: Tensor, amax_o: Tensor, expected: Truth) -> None:
    """Asserts the rule for the maxima."""
    assert amax_s.shape == amax_o.shape == (1,)
    assert amax_s.item() == float(bool(expected.lse.isfinite().any()))
    limit = oracle.largest(expected.out_limit)
    assert abs(amax_o.item() - oracle.largest(expected.out.abs())) <= limit


def _assert_near(found: Tensor, wanted: Tensor, limit: Tensor, what: str) -> None:
    excess = (found - wanted).abs() - limit
    if excess.numel() and not bool((excess <= 0).all()):
        at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{what}: {float(found[at]):.5g} instead of {float(wanted[at]):.5g} at {at} of "
            f"{tuple(found.shape)}, the limit being {float(limit[at]):.3g}"
        )

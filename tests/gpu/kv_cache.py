"""Calls whose keys and values are FP8 beside 16-bit queries, and the float64 rule for them.

The rule is `oracle`'s: O64 and LSE are of the numbers that K and V stand for, and the error that a
kernel may double is that of the reference, which widens them to float32 and rounds its output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import attngen
from attngen import reference
from attngen.spec import layouts

from . import oracle
from .oracle_fp8 import DTYPES
from .test_decode import PAGED, cache
from .variants import Variant
from .varlen import Call

NAN = 0x7F  # in both formats


class Pages(NamedTuple):
    """Pages of K and V in 8 bits, and where sequences find them: as in `test_decode.Cache`.
    scales: arguments of the call."""

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    scales: dict[str, Tensor]


def pages(
    lengths: list[int],
    heads: int,
    d: int,
    page: int = 64,
    d_v: int | None = None,
    kv_dtype: str = "e4m3",
    scales: str = "",
) -> Pages:
    """Random pages, NaN where no sequence reads. scales: `one` for each tensor, or a `head`."""
    wide = cache(lengths, heads, d, page, d_v, torch.float32)
    k, v = (narrow(x, kv_dtype) for x in (wide.k, wide.v))
    return Pages(k, v, wide.table, wide.lengths, make_scales(scales, len(lengths), heads))


def narrow(x: Tensor, kv_dtype: str) -> Tensor:
    """Numbers, or NaN, in 8 bits."""
    found = x.nan_to_num(0).to(DTYPES[kv_dtype])
    found.view(torch.uint8)[x.isnan()] = NAN
    return found


def make_scales(kind: str, batch: int, heads: int) -> dict[str, Tensor]:
    """Descales of K and V between 1/4 and 2."""
    if not kind:
        return {}
    generator = torch.Generator().manual_seed(batch * heads)
    shape = (1,) if kind == "one" else (batch, heads)
    names = ("descale_k", "descale_v")
    found = {name: 0.25 + 1.75 * torch.rand(shape, generator=generator) for name in names}
    return {name: x.to(oracle.DEVICE) for name, x in found.items()}


def dense_of(x: Tensor, table: Tensor, axes: str) -> Tensor:
    """The sequences [b, s, h, d] of pages in a format."""
    rows = x if axes == "bshd" else x.transpose(0, 1)
    return rows[table.clamp(max=rows.shape[0] - 1).long()].flatten(1, 2)


def check_pages(q: Tensor, given: Pages, layout: str = PAGED, **arguments: Any) -> None:
    """The rule for a call over pages, whose queries are not packed."""
    parsed = layouts.parse(layout)
    k, v = given.k, given.v
    if parsed.kv_format == "sbhd":
        k, v = (x.transpose(0, 1).contiguous() for x in (k, v))
    if parsed.q_format == "sbhd":
        q = q.transpose(0, 1).contiguous()
    named = {"seqused_kv": given.lengths, **given.scales, **arguments}
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(
            q, k, v, layout=layout, page_table=given.table, **named, backend="cuda", return_lse=True
        )
    named.pop("num_splits", None)
    dense = (dense_of(x, given.table, parsed.kv_format) for x in (k, v))
    check(out, aux.lse, q, *dense, layout=f"{parsed.q_format}_bshd_bshd", **named)


def check_call(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> None:
    """The rule for a call on tensors."""
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(q, k, v, **arguments, backend="cuda", return_lse=True)
    arguments.pop("num_splits", None)
    check(out, aux.lse, q, k, v, **arguments)


def check_narrowed(call: Variant | Call, max_logit: bool, splits: int | None) -> None:
    """The rule for a 16-bit call whose keys and values are made 8 bits."""
    q, k, v = call.case.operands() if isinstance(call, Variant) else call.operands()
    given = call.arguments if isinstance(call, Variant) else call.arguments()
    assert k is not None and v is not None
    k, v = narrow(k, "e4m3"), narrow(v, "e4m3")
    given = {**given, **make_scales("one", 1, 1)}
    check_call(q, k, v, **given, num_splits=splits)
    if not max_logit:
        return
    named = {**given, "return_max_logit": True}
    _, aux = attngen.attention(q, k, v, **named, num_splits=splits, backend="cuda")
    _, wanted = reference.attention(q, k, v, **named)
    torch.testing.assert_close(aux.max_logit, wanted.max_logit, rtol=1e-4, atol=1e-4)


def check(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> None:
    """The rule for what a call gave. q, k, v: of no pages."""
    assert out.dtype == q.dtype
    layout = arguments.get("layout", "bshd")
    oracle.check(out, lse, truth(q, k, v, **arguments), layout)


def truth(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> oracle.Truth:
    """Compute a call in float64, and how far off the reference is."""
    axes = layouts.parse(arguments.get("layout", "bshd")).kv_format
    plain = {name: x for name, x in arguments.items() if name not in ("descale_k", "descale_v")}
    stands_for = (
        x.double() * spread(arguments.get(f"descale_{name}"), axes, arguments)
        for name, x in (("k", k), ("v", v))
    )
    out64, aux64 = reference.attention(q.double(), *stands_for, **plain)
    out, aux = reference.attention(q, k, v, **arguments)
    seen = aux64.lse.isfinite()
    return oracle.Truth(
        out64,
        aux64.lse,
        oracle.largest((out.double() - out64).abs()),
        oracle.largest((aux.lse.double() - aux64.lse)[seen].abs()),
    )


def spread(descale: Tensor | None, axes: str, arguments: dict[str, Any]) -> Tensor | float:
    """A descale, of a tensor or of its sequences and heads, beside a tensor of these axes; packed
    tokens lie without gaps."""
    if descale is None or descale.ndim == 1:
        return 1.0 if descale is None else descale.double()
    if axes == "thd":
        counts = arguments["cu_seqlens_kv"].diff().long()
        return descale.double().repeat_interleave(counts, 0)[..., None]
    sizes = {"b": descale.shape[0], "h": descale.shape[1]}
    order = descale.T if axes.index("h") < axes.index("b") else descale
    return order.double().reshape([sizes.get(axis, 1) for axis in axes])

"""Whether the lengths of a call are said once, where they are needed, and fit its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import eq
from typing import Any

from ..spec.layouts import Layout, parse
from ..spec.masks import masks_of
from .fp8_checks import Agree, agree_all
from .numbers import Arguments
from .table import LENGTHS, PAGE_TABLES, AttentionCall, Side
from .tensors import Described, dtype_name, named

INTEGERS = ("int32", "int64")  # of lengths, offsets and pages; kernels take the first


def length_violations(
    call: AttentionCall,
    layout: Layout,
    batch: int,
    integers: Sequence[str] = INTEGERS,
    agree: Agree = eq,
) -> Iterator[str]:
    """Violations that shapes and dtypes of the length arguments show. batch: sequences of the call;
    integers: the dtypes that they may have; agree: compares sizes."""
    yield from _side_violations(call, layout, batch, "q", integers, agree)
    yield from _side_violations(call, layout, batch, "kv", integers, agree)
    yield from _paging_violations(call, layout, batch, integers, agree)
    lengths = call.lengths("kv", layout)
    given = lengths.cu_seqlens is not None or lengths.seqused is not None
    padding = isinstance(call.mask, str) and masks_of(call.mask).padding
    if padding and not given:
        yield (
            f"mask={call.mask!r} needs the lengths of k and v; got none. Pass seqused_kv "
            f"int32 [b], or cu_seqlens_kv int32 [b+1]."
        )


def _side_violations(
    call: AttentionCall,
    layout: Layout,
    batch: int,
    side: Side,
    integers: Sequence[str],
    agree: Agree,
) -> Iterator[str]:
    """Dtypes, shapes and presence of cu_seqlens, its padded form and seqused of Q or K/V."""
    lengths = call.lengths(side, layout)
    fmt = layout.q_format if side == "q" else layout.kv_format
    expected = {
        f"cu_seqlens_{side}": (lengths.cu_seqlens, "[b+1]", batch + 1),
        f"cu_seqlens_{side}_padded": (lengths.padded, "[b+1]", batch + 1),
        f"seqused_{side}": (lengths.seqused, "[b]", batch),
    }
    for name, (tensor, shape, count) in expected.items():
        if tensor is None:
            continue
        fits = agree_all(tensor.shape, (count,), agree)
        if not fits or dtype_name(tensor) not in integers:
            advice = "Pass one entry a sequence, and one more in cu_seqlens."
            yield (
                f"{name} needs int32 {shape} with b={batch}; got {named(tensor)}. "
                f"{'Cast it to torch.int32.' if fits else advice}"
            )
    if fmt == "thd" and lengths.cu_seqlens is None:
        yield (
            f"layout={layout.name!r} needs cu_seqlens_{side} int32 [b+1]; got None. "
            f"Pass the cumulative lengths of the sequences."
        )
    if fmt == "thd" and lengths.seqused is not None:
        yield (
            f"layout={layout.name!r} takes its lengths from cu_seqlens_{side}; got "
            f"seqused_{side} too. Leave it out; cu_seqlens_{side}_padded says where gaps are."
        )
    if fmt != "thd" and lengths.padded is not None:
        yield (
            f"cu_seqlens_{side}_padded belongs to thd; {side} of layout={layout.name!r} is "
            f"{fmt}. Leave it out."
        )
    if fmt != "thd" and lengths.cu_seqlens is not None and lengths.seqused is not None:
        yield f"cu_seqlens_{side} and seqused_{side} both say the lengths. Pass one of them."


def _paging_violations(
    call: AttentionCall, layout: Layout, batch: int, integers: Sequence[str], agree: Agree
) -> Iterator[str]:
    """Paged K/V have tables and seqused_kv; other layouts have no table."""
    name, tables = layout.name, call.page_tables
    if not layout.paged:
        if tables:
            yield (
                f"page_table belongs to paged layouts; got it with layout={name!r}. "
                f"Use layout='paged_kv_…', or leave it out."
            )
        return
    fit = len(tables) == 2 and all(t.ndim == 2 and agree(t.shape[0], batch) for t in tables)
    if not fit or any(dtype_name(t) not in integers for t in tables):
        got = ", ".join(map(named, dict.fromkeys(tables))) or "None"
        yield (
            f"layout={name!r} needs page_table int32 [b={batch}, max_pages], one or "
            f"(for K, for V); got {got}. {'Cast it to torch.int32.' if fit else 'Pass it.'}"
        )
    if call.seqused_kv is None or call.cu_seqlens_kv is not None:
        yield (
            f"layout={name!r} needs the lengths of k and v in seqused_kv int32 [b], and in no "
            f"other argument. Pass it, and leave cu_seqlens_kv out."
        )


def violations(
    carriers: Mapping[str, Described],
    optional: Mapping[str, Described | None],
    arguments: Arguments,
    sequences: int,
) -> Iterator[str]:
    """Find what is wrong with the lengths of an operation. carriers: q, k and v as views."""
    parsed, lengths = parse(arguments.layout), {name: optional[name] for name in LENGTHS}
    known: dict[str, Any] = {"layout": arguments.layout, "mask": arguments.mask, **lengths}
    known |= {name: carriers[name] for name in "qkv"}
    tables = tuple(x for name in PAGE_TABLES if (x := optional[name]) is not None)
    call = AttentionCall(**known, page_table=tables or None)  # type: ignore[arg-type]
    yield from length_violations(call, parsed, sequences, ("int32",))
    for side, axes in (("q", parsed.q_format), ("kv", parsed.kv_format)):
        if axes != "thd" and lengths[f"cu_seqlens_{side}"] is not None:
            yield f"cu_seqlens_{side} belongs to thd here; pass seqused_{side}, its differences"
    for name, tensor in lengths.items():
        if tensor is None or tensor.ndim != 1 or tensor.numel() < 2:
            continue
        (step,) = tensor.stride()
        if step != 1:
            yield f"{name} has stride {step}; kernels need 1, so make it contiguous"

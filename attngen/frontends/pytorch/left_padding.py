"""Left padding: dense sequences that begin behind the first row become packed tokens with gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...call.decode import OWN_NUMBER
from ...call.routing import spec_of_call
from ...call.table import AttentionCall, given_by
from ...errors import SpecError
from ...spec.call_arguments import DESCALES, TOKEN_AXES
from ...spec.layouts import Layout, parse

DENSE = "bshd"
_SIDES = ("q", "kv")
_REPLACED = (  # by cumulative lengths
    *("seqstart_q", "seqstart_kv", "seqused_q", "seqused_kv", "max_seqlen_q", "max_seqlen_kv"),
)
_SCORES = ("bias", "attn_mask", "block_mask")  # whose rows and columns count from a tensor's first


def is_given(call: AttentionCall) -> bool:
    """Whether a call says where its sequences begin."""
    return call.seqstart_q is not None or call.seqstart_kv is not None


def attend(attention: Callable[..., Any], call: AttentionCall) -> Any:
    """`attention` of a call of dense sequences that begin behind the first row: it gets their rows
    as packed tokens, and its output and LSE become dense again, 0 and −∞ beside the sequences.

    Positions count from a sequence's first row; a length of the call, `seqused` or cumulative, ends
    it, counted from the tensor's first row. Tensors of bshd are read where they are, others copied.
    Keys are split where they are for tensors that begin with their sequences.

    Raises: SpecError where a layout or another argument does not go with it.
    """
    layout = parse(call.layout)
    if reasons := [*_violations(call, layout)]:
        raise SpecError(reasons)
    assert call.k is not None and call.v is not None  # of a layout of three tensors
    axes = layout.q_format
    b, s_q = (call.q.shape[axes.index(axis)] for axis in "bs")
    made: dict[str, Any] = {
        "q": _packed(call.q, axes),
        "k": _packed(call.k, layout.kv_format),
        "v": _packed(call.v, layout.kv_format),
    }
    room = {"q": s_q, "kv": call.k.shape[layout.kv_format.index("s")]}
    for side in _SIDES:
        made |= _lengths(call, layout, side, b, room[side])
    made |= dict.fromkeys(_REPLACED)
    for name in DESCALES:
        scales = getattr(call, name)
        if len(getattr(scales, "shape", ())) == TOKEN_AXES:
            made[name] = _packed_scales(scales)
    if call.num_splits is None and _splits(call):
        made["num_splits"] = OWN_NUMBER
    found = attention(**given_by(replace(call, layout="thd", **made)))
    if not isinstance(found, tuple):
        return _dense(found, axes, b, s_q)
    out, aux = found
    if aux.lse is not None:
        aux = replace(aux, lse=aux.lse.unflatten(1, (b, s_q)).transpose(0, 1).contiguous())
    return _dense(out, axes, b, s_q), aux


def _splits(call: AttentionCall) -> bool:
    """Whether a call reaches kernels that split keys where sequences begin with the tensors."""
    return spec_of_call(replace(call, seqstart_q=None, seqstart_kv=None)).decode


def _packed(x: Tensor, axes: str) -> Tensor:
    """A dense tensor as tokens [b · s, h, d]: a view where its strides allow."""
    return x.permute([axes.index(axis) for axis in DENSE]).flatten(0, 1)


def _packed_scales(x: Tensor) -> Tensor:
    """Scales [b, h, s] as those of tokens, [1, h, b · s]."""
    return x.transpose(0, 1).flatten(1)[None]


def _dense(out: Tensor, axes: str, b: int, s: int) -> Tensor:
    """Tokens [b · s, h, d] as a tensor of these axes."""
    whole: Tensor = out.unflatten(0, (b, s))
    return whole.permute([DENSE.index(axis) for axis in axes]).contiguous()


def _lengths(
    call: AttentionCall, layout: Layout, side: str, b: int, room: int
) -> dict[str, Tensor | None]:
    """Cumulative lengths of one side's sequences and where these begin, int32 [b + 1], made on the
    device. room: rows of a sequence in the tensor."""
    given = call.lengths("q" if side == "q" else "kv", layout)
    start = call.seqstart_q if side == "q" else call.seqstart_kv
    begin = _zeros(call, b) if start is None else start.to(torch.int32).clamp(0, room)
    end: Tensor = torch.full_like(begin, room)
    if given.seqused is not None:
        end = given.seqused.to(torch.int32).clamp(0, room)
    elif given.cu_seqlens is not None:
        end = given.cu_seqlens.to(torch.int32).diff().clamp(0, room)
    counts = (end - begin).clamp(min=0)
    cumulative = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    rows = torch.arange(0, (b + 1) * room, room, dtype=torch.int32, device=begin.device)
    starts = rows + torch.nn.functional.pad(begin, (0, 1))
    return {f"cu_seqlens_{side}": cumulative, f"cu_seqlens_{side}_padded": starts}


def _zeros(call: AttentionCall, b: int) -> Tensor:
    return torch.zeros(b, dtype=torch.int32, device=call.q.device)


def _violations(call: AttentionCall, layout: Layout) -> Iterator[str]:
    dense = not layout.paged and "thd" not in layout.formats and layout.packing == "none"
    if not dense:
        yield (
            f"layout={layout.name!r}: seqstart_q and seqstart_kv belong to three dense tensors; "
            "packed tokens begin at cu_seqlens_*_padded"
        )
        return
    axes = layout.q_format
    b = call.q.shape[axes.index("b")] if call.q.ndim == len(axes) else None
    for side in _SIDES:
        x = getattr(call, f"seqstart_{side}")
        if x is not None and not _are_integers(x, b):
            got = f"{x.dtype} {[*x.shape]}" if isinstance(x, Tensor) else type(x).__name__
            yield f"seqstart_{side} needs int32 or int64 [b={b}]; got {got}"
        if getattr(call, f"cu_seqlens_{side}_padded") is not None:
            yield f"cu_seqlens_{side}_padded belongs to packed tokens; seqstart_{side} says it here"
    for name in _SCORES:
        if getattr(call, name) is not None:
            yield f"{name} has a row for each row of the tensors; with left padding give none"
    if call.schedule is not None:
        yield "schedule: lengths are made anew in each call with left padding; leave it out"


def _are_integers(x: Any, b: int | None) -> bool:
    integers = isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64)
    return integers and tuple(x.shape) == (b,)

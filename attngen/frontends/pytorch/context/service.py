"""Whether kernels compute the parts of calls over a group: judged once for calls alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call.kept import Kept
from ....call.table import AttentionCall
from ....spec.attention_spec import MAX_HEAD_DIM
from ..routing import can_join, refusals
from .parts import Stored

MOST = 256  # kinds of calls, before all are forgotten


class Service(NamedTuple):
    """Whether kernels compute all parts of a call, forward and backward: why not, where they do
    not; joins: whether they join a part's output with that of the parts before."""

    serves: bool
    joins: bool
    reasons: tuple[str, ...] = ()


NO_KERNELS = Service(serves=False, joins=False)
_known: Kept[Service] = Kept(MOST)


def service_of(part: Mapping[str, Any], stored: Stored | None, *, learns: bool) -> Service:
    """Judge a call. part: arguments that all its parts have in common; stored: its operands in 8
    bits; learns: whether gradients are enabled."""
    if torch.compiler.is_compiling():  # sizes may be symbols
        return _judged(part, stored)
    numbers = None if stored is None else (stored.dtype, stored.wide)
    form = (learns, numbers, *((name, _form_of(x)) for name, x in part.items()))
    return _known.find(form, _judged, part, stored)


def _form_of(x: Any) -> Any:
    """An argument but for numbers in its tensor."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.device, x.requires_grad
    return x


def _judged(part: Mapping[str, Any], stored: Stored | None) -> Service:
    if reasons := [*_against_kernels(part, stored)]:
        return Service(serves=False, joins=False, reasons=tuple(reasons))
    joins = stored is None and can_join(AttentionCall(**part, out_dtype=torch.float32))
    return Service(serves=True, joins=joins)


def _against_kernels(part: Mapping[str, Any], stored: Stored | None) -> Iterator[str]:
    """Why kernels do not compute parts of a call, whatever sizes these have."""
    yield from refusals(AttentionCall(**part, out_dtype=torch.float32))
    if stored is not None:
        q, k, v = map(stored.numbers, stored.carriers)
        if part.get("layout") == "thd":
            q, k, v = (x.squeeze(0) for x in (q, k, v))
        carriers = {"q": q, "k": k, "v": v, "out_dtype": stored.wide}
        yield from refusals(AttentionCall(**{**part, **stored.descales, **carriers}))
    widest = max(part[name].shape[-1] for name in "qv")
    if widest > MAX_HEAD_DIM:
        yield f"head dims above {MAX_HEAD_DIM} have no kernels over a group; got {widest}"

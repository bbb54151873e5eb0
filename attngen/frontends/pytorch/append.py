"""`append_kv`, and the operation `attngen::append` behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.append import TENSORS, AppendCall, refusals, spec_of, violations
from ...call.backend import asked, check_backend
from ...call.cache import CallCache
from ...call.prepare.append import PreparedAppend, prepare_append
from ...call.routing import no_kernels
from ...call.served import unserved
from ...call.taking import taking
from ...errors import SpecError
from ...reference import append as definition
from .descriptions import described, device_arch, device_of
from .operation import format_of, start_on_its_device, unobserved
from .registry import operator
from .routing import leave_kernels
from .torch_private import guard

_OPTIONAL = TENSORS[4:]
library = operator(
    "append",
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
    f"{', '.join(f'Tensor? {name}' for name in _OPTIONAL)}, Tensor(c!)? o, str layout, "
    "bool rotary_interleaved, bool rotary_at_start) -> ()",
)
prepared_appends: CallCache[PreparedAppend] = CallCache(guard)
checked_appends: CallCache[Checked] = CallCache(guard)


@taking(AppendCall)
def append_kv(call: AppendCall) -> Tensor | None:
    """Write new keys and values to their places in a cache; return the queries, rotated, if any.

    k_cache, v_cache: [pages, page_size, h, d] and [.., d_v], of any strides but the last; without a
    page_table a page is the row of one sequence, [b, s, h, d]. k, v: new tokens in `layout`, bshd,
    sbhd, bhsd, or thd of packed ones. lengths: tokens of each sequence that are in the cache
    already, int32 [b], behind which new ones go; or cu_seqlens_all: cumulative numbers of all with
    the new ones, int32 [b + 1]. cu_seqlens: cumulative numbers of new tokens, int32 [b + 1]; of
    dense layouts None where all rows are tokens. page_table: int32 [b, n], pages of each sequence;
    what is looked up nowhere else, such as flash-attn's cache_batch_idx, is a table of one column.

    rotary_cos, rotary_sin: [positions, w / 2], in float32 or k's dtype; they turn the first w
    columns of keys, and of q [.., h_q, d], which lies as k does, by each token's position: columns
    half of w apart, or side by side with rotary_interleaved. rotary_at_start: queries turn by the
    position of their sequence's first new token. scale_k, scale_v: float32 [1] or [b, h], by which
    caches in float8_e4m3fn or float8_e5m2 are multiplied when they are stored; None for 1.
    backend: as of `attngen.attention`.

    A position without a place in the table or cache is left out; those behind the last row of
    rotary_cos turn as that row does. What is returned for rows that are no tokens may be anything.
    Nothing waits for the device, so that calls can be captured; no gradients.

    Raises: SpecError with every violation; CompileError, LaunchError.
    """
    given = [*call.tensors.values()]
    switches = call.layout, call.rotary_interleaved, call.rotary_at_start
    with torch.no_grad():
        if not _served(call, (asked(call.backend), *switches), given):
            return definition.append(call)
        turned = None if call.q is None else torch.empty_like(call.q)
        run = append if unobserved((*given, turned)) else torch.ops.attngen.append
        run(*given, turned, *switches)
        _count_change(call)
        return turned


def _count_change(call: AppendCall) -> None:
    """Tell autograd that caches have changed, which a call may have saved: operations of
    torch.library leave that to their callers, and graphs of torch.compile know it."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version((call.k_cache, call.v_cache))


class Checked(NamedTuple):
    """Calls of equal formats that are checked: whether kernels serve them."""

    on_kernels: bool


def _served(call: AppendCall, facts: tuple[Any, ...], given: Sequence[Any]) -> bool:
    """Whether kernels serve a call, which is checked once for its formats, or where torch.compile
    traces it. facts: beside formats; given: its tensors."""
    if torch.compiler.is_compiling():
        return _checked(call).on_kernels
    key = (*facts, *map(format_of, given))
    return checked_appends.remember(key, lambda: _checked(call)).on_kernels


def _checked(call: AppendCall) -> Checked:
    """Check a call. Raises: SpecError with every violation."""
    check_backend(call.backend)
    if reasons := violations(call) or _apart(call):
        raise SpecError(reasons)
    return Checked(_on_kernels(call))


def _apart(call: AppendCall) -> list[str]:
    devices = {name: str(x.device) for name, x in call.present.items()}
    return [f"one device for all tensors; got {devices}"] if len({*devices.values()}) > 1 else []


def _on_kernels(call: AppendCall) -> bool:
    """Whether kernels serve a call. Raises: SpecError where it asks for them, and they do not."""
    backend = asked(call.backend)
    if backend == "reference":
        return False
    reasons, arch = refusals(call), device_arch(call.k.device)
    if arch is None:
        reasons = [no_kernels(str(call.k.device)), *reasons]
    elif not reasons:
        reasons = unserved(spec_of(call), arch)
    if reasons:
        leave_kernels(SpecError(reasons), backend)
    return not reasons


def append(*given: Any) -> None:
    """Run the kernel. given: tensors of `TENSORS`, the turned queries, and what the schema names.

    Raises: CompileError, LaunchError.
    """
    *tensors, layout, interleaved, at_start = given
    key = (layout, interleaved, at_start, *map(format_of, tensors))
    prepared = prepared_appends.remember(key, lambda: _prepare(tensors, *given[-3:]))
    if not prepared.launches:
        return
    pointers = [x.data_ptr() for x in tensors if x is not None]
    start_on_its_device(prepared, pointers)


def _prepare(
    tensors: list[Tensor | None], layout: str, interleaved: bool, at_start: bool
) -> PreparedAppend:
    names = (*TENSORS, "o")
    found = {name: described(x) for name, x in zip(names, tensors, strict=True) if x is not None}
    given: dict[str, Any] = {name: found.get(name) for name in TENSORS}
    call = AppendCall(
        **given, layout=layout, rotary_interleaved=interleaved, rotary_at_start=at_start
    )
    cache, *_ = tensors
    assert cache is not None  # the operation's schema
    if reasons := violations(call) or refusals(call):
        raise SpecError(reasons)
    return prepare_append(found, call, device_of(cache.device))


library.impl("append", append, "CUDA")
torch.library.register_fake("attngen::append", lambda *given: None, lib=library)

"""Casts of backwards in 8 bits by kernels: dO with the scale of dS, and the end of a step of what a
layer remembers; for calls that nobody looks on at."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.cache import CallCache
from ...call.prepare.cast import UNITS, PreparedCast
from ...call.prepare.d_o import (
    BYTES,
    OPTIONAL,
    RESULTS,
    DOForm,
    PreparedStep,
    prepare_d_o,
    prepare_step,
)
from ...call.recipe import CastRule, StepRule
from ...call.tensors import name_of
from ...reference import fp8_scales as definition
from .descriptions import device_of
from .narrow import SIXTEEN_BITS, bytes_of, is_dense, stores_8_bits
from .operation import current, empty, format_of, is_current, start, start_on_its_device
from .registry import operator
from .signature import dtype_of
from .torch_private import guard, is_plain, undisturbed

library = operator(
    "end_step",
    "(Tensor(a!) scale, Tensor(b!) history, str dtype, int own, bool of_all, int margin, "
    "bool power_of_two) -> ()",
)
prepared_d_o: CallCache[PreparedCast | None] = CallCache(guard)
prepared_steps: CallCache[PreparedStep] = CallCache(guard)


class Given(NamedTuple):
    """Operands of a cast of dO, and of the scale of dS.

    d_o: float16 or bfloat16; v: the carrier of V, FP8. used_0, used_v: where their numbers count, a
    broadcast of each, None for everywhere. descale_v: float32 [1], None for 1; of_lse: the largest
    magnitude of the LSE's gradient, float32 [1]. known: scales of dO and dS, float32 [2], of which
    those count that are above 0; noted: magnitudes, [2], the first of which learns of dO's.
    """

    d_o: Tensor
    v: Tensor
    used_0: Tensor | None
    used_v: Tensor | None
    descale_v: Tensor | None
    of_lse: Tensor | None
    known: Tensor | None
    noted: Tensor | None


class StoredDO(NamedTuple):
    """dO in 8 bits, and numbers, float32 [1]: its descale, the scale of dS, and that's."""

    d_o: Tensor
    descale: Tensor
    scale_dp: Tensor
    descale_dp: Tensor


def stored_d_o(given: Given, rule: CastRule, ds_bound: float, of_softmax: float) -> StoredDO | None:
    """dO in 8 bits by kernels; None where these do not serve it, as of `narrow.by_kernels`.

    ds_bound, of_softmax: as of `DOForm`. Nothing waits for the device.
    Raises: CompileError, CacheError, LaunchError.
    """
    if torch.compiler.is_compiling() or not undisturbed():
        return None
    tensors = [x for x in given if x is not None]
    key = rule, ds_bound, of_softmax, *[x is None for x in given]
    prepared = prepared_d_o.find(key, tensors)
    if prepared is None:
        if not all(map(is_plain, tensors)):
            return None
        formats = (*key, *map(format_of, given))
        if formats not in prepared_d_o.by_format:
            prepared_d_o.keep(formats, _prepare(given, rule, ds_bound, of_softmax))
        prepared = prepared_d_o.by_format[formats]
        if prepared is None:
            return None
        prepared_d_o.note(key, tensors, prepared)
    return _run(prepared, given, dtype_of(rule.dtype))


def _prepare(
    given: Given, rule: CastRule, ds_bound: float, of_softmax: float
) -> PreparedCast | None:
    """The launches, None where kernels do not serve the tensors. Raises: CompileError,
    CacheError, LaunchError."""
    d_o, v, *others = given
    if d_o.dtype not in SIXTEEN_BITS or not stores_8_bits(d_o.device) or v.device != d_o.device:
        return None
    sides = (d_o, given.used_0, UNITS), (v, given.used_v, BYTES)
    for x, used, units in sides:
        whole = is_dense(x) if used is None else x.is_contiguous()
        if not whole or x.numel() % units or (used is not None and x.shape[-1] % units):
            return None
    if given.descale_v is not None and given.descale_v.numel() != 1:
        return None
    row, row_v = (0 if used is None else x.shape[-1] for x, used, _ in sides)
    form = DOForm(
        dtypes=(name_of(d_o.dtype), name_of(v.dtype)),
        counts=(d_o.numel(), v.numel()),
        rows=(row, row_v),
        ds_bound=ds_bound,
        of_softmax=of_softmax,
        given=tuple([name for name, x in zip(OPTIONAL, others, strict=True) if x is not None]),
    )
    return prepare_d_o(form, rule, device_of(d_o.device))


def _run(prepared: PreparedCast, given: Given, dtype: torch.dtype) -> StoredDO | None:
    """Raises: LaunchError."""
    d_o, v, used_0, used_v, *others = given
    if d_o.data_ptr() % 16 or v.data_ptr() % 16:
        return None  # copies of them would cost more
    if not is_current(prepared.device):
        with current(prepared.device):
            return _run(prepared, given, dtype)
    made, count = empty(d_o.shape, d_o.stride(), dtype), len(RESULTS)
    numbers = empty((count, 1), (1, 1), torch.float32)
    parts = empty((prepared.parts,), (1,), torch.int32)
    rows = [bytes_of(x, used) for x, used in ((d_o, used_0), (v, used_v)) if used is not None]
    address = numbers.data_ptr()
    pointers = [d_o.data_ptr(), v.data_ptr(), made.data_ptr(), parts.data_ptr()]
    pointers += [address + 4 * place for place in range(count)]
    pointers += [x.data_ptr() for x in (*rows, *others) if x is not None]
    start(prepared, pointers)
    _, _, descale, scale_dp, descale_dp = numbers.unbind()
    return StoredDO(made, descale, scale_dp, descale_dp)


def end_step(
    scale: Tensor,
    history: Tensor,
    *rule: Any,
) -> None:
    """End a step: `reference.fp8_scales.end_step`, of the fields of a `StepRule`, by a kernel where
    one serves the tensors. Nothing waits for the device. Autograd does not count it as a change.

    Raises: CompileError, CacheError, LaunchError.
    """
    made = StepRule(*rule)
    tensors = scale, history
    prepared = prepared_steps.find(made, tensors)
    if prepared is None:
        if not stores_8_bits(scale.device) or not all([_serves(x, scale) for x in tensors]):
            return definition.end_step(scale.data, history.data, made)
        (steps, columns), device = history.shape, device_of(scale.device)
        formats = made, steps, columns, scale.device
        prepared = prepared_steps.remember(
            formats, lambda: prepare_step(steps, columns, made, device)
        )
        prepared_steps.note(made, tensors, prepared)
    pointers = [x.data_ptr() for x in tensors]
    start_on_its_device(prepared, pointers)
    return None


def _serves(x: Tensor, like: Tensor) -> bool:
    """Whether the kernel reads it. like: on whose device."""
    wide = x.dtype == torch.float32 and x.is_contiguous() and x.device == like.device
    return wide and is_plain(x)


library.impl("end_step", end_step, "CompositeExplicitAutograd")
torch.library.register_fake("attngen::end_step", lambda *_: None, lib=library)

"""Tensors in 8 bits: by a cast's kernels, for calls that nobody looks on at, else as defined."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...call.cache import CallCache
from ...call.prepare.cast import UNITS, CastForm, PreparedCast, prepare_cast
from ...call.recipe import CastRule, Narrowed
from ...call.tensors import name_of
from ...kernels.support.cast import MOST_NUMBERS, TENSORS
from ...reference import fp8_scales as definition
from ...targets.target import TARGETS
from .descriptions import device_arch, device_of
from .operation import current, empty, format_of, is_current, start
from .signature import dtype_of
from .torch_private import guard, is_plain, undisturbed

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
prepared_casts: CallCache[PreparedCast | None] = CallCache(guard)


def narrowed(
    tensors: Sequence[Tensor],
    used: Sequence[Tensor | None],
    rule: CastRule,
    known: Tensor | None = None,
) -> Narrowed:
    """The tensors in 8 bits, by kernels or else by PyTorch's operations, with the same bits.
    Arguments and errors as of `by_kernels`."""
    found = by_kernels(tensors, used, rule, known)
    return definition.narrowed(tensors, used, rule, known) if found is None else found


def by_kernels(
    tensors: Sequence[Tensor],
    used: Sequence[Tensor | None],
    rule: CastRule,
    known: Tensor | None = None,
) -> Narrowed | None:
    """The tensors in 8 bits by kernels; None where these do not serve them: tensors that somebody
    looks on at, of other devices, with gaps between their numbers.

    tensors: up to three of one dtype, float16 or bfloat16. used: where their numbers count, a
    broadcast of each, None for everywhere. known: scales, float32 [n], of which those count that
    are above 0. Nothing waits for the device.

    Raises: CompileError, CacheError, LaunchError.
    """
    if torch.compiler.is_compiling() or not undisturbed():
        return None
    if rule.by_token:  # of which a row that no sequence uses changes nothing
        used, known = [None] * len(tensors), None
    operands = (*tensors, *used, known)
    given = [x for x in operands if x is not None]
    key = rule, len(tensors), *[x is None for x in operands]
    prepared = prepared_casts.find(key, given)
    if prepared is None:
        if not all(map(is_plain, given)):
            return None
        formats = (rule, known is None, *map(format_of, (*tensors, *used)))
        if formats not in prepared_casts.by_format:
            prepared_casts.keep(formats, _prepare(tensors, used, rule, known is not None))
        prepared = prepared_casts.by_format[formats]
        if prepared is None:
            return None
        prepared_casts.note(key, given, prepared)
    return _run(prepared, tensors, used, rule, known)


def _prepare(
    tensors: Sequence[Tensor], used: Sequence[Tensor | None], rule: CastRule, known: bool
) -> PreparedCast | None:
    """The launches, None where kernels do not serve the tensors. Raises: CompileError,
    CacheError, LaunchError."""
    first, *_ = tensors
    if first.dtype not in SIXTEEN_BITS or not stores_8_bits(first.device):
        return None
    if len(tensors) > TENSORS or any([x.dtype != first.dtype for x in tensors]):
        return None
    for x, each in zip(tensors, used, strict=True):
        whole = is_dense(x) if each is None else x.is_contiguous()
        if not whole or x.shape[-1] % UNITS or x.device != first.device:
            return None
    counts = tuple([x.numel() for x in tensors])
    pairs = zip(tensors, used, strict=True)
    rows = tuple([x.shape[-1] if each is not None or rule.by_token else 0 for x, each in pairs])
    if rule.by_token and any([not is_row(x) for x in tensors]):
        return None
    form = CastForm(name_of(first.dtype), counts, rows, known)
    return prepare_cast(form, rule, device_of(first.device))


def stores_8_bits(device: torch.device) -> bool:
    """Whether kernels run on this device, and convert to 8 bits."""
    arch = device_arch(device)
    return arch is not None and TARGETS[arch].fp8


def is_row(tensor: Tensor) -> bool:
    """Whether numbers of the last axis follow each other, no more than a warp has lanes for."""
    return tensor.stride(-1) == 1 and tensor.shape[-1] <= MOST_NUMBERS


def is_dense(tensor: Tensor) -> bool:
    """Whether its numbers lie side by side, in any order of its axes."""
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    expected = 1
    for step, size in sorted([(step, size) for step, size in axes if size > 1]):
        if step != expected:
            return False
        expected *= size
    return True


def _run(
    prepared: PreparedCast,
    tensors: Sequence[Tensor],
    used: Sequence[Tensor | None],
    rule: CastRule,
    known: Tensor | None,
) -> Narrowed | None:
    """Raises: LaunchError."""
    if any([x.data_ptr() % 16 for x in tensors]):
        return None  # copies of them would cost more
    if not is_current(prepared.device):
        with current(prepared.device):
            return _run(prepared, tensors, used, rule, known)
    dtype, n = dtype_of(rule.dtype), len(tensors)
    stored = tuple([empty(x.shape, x.stride(), dtype) for x in tensors])
    rows = [bytes_of(x, each) for x, each in zip(tensors, used, strict=True) if each is not None]
    if rule.by_token:
        return _run_by_token(prepared, tensors, stored)
    parts = empty((prepared.parts,), (1,), torch.int32)
    numbers = empty((3, n, 1), (n, 1, 1), torch.float32)
    address = numbers.data_ptr()
    pointers = [x.data_ptr() for x in (*tensors, *stored, *rows, parts)]
    pointers += [address + 4 * n * place for place in range(3)]
    pointers += [] if known is None else [known.data_ptr()]
    start(prepared, pointers)
    return Narrowed(stored, numbers)


def _run_by_token(
    prepared: PreparedCast, tensors: Sequence[Tensor], stored: tuple[Tensor, ...]
) -> Narrowed:
    """Raises: LaunchError."""
    rows = [x.numel() // x.shape[-1] for x in tensors]
    total = sum(rows)
    numbers = empty((3, total), (total, 1), torch.float32)
    pointers = [x.data_ptr() for x in (*tensors, *stored)]
    pointers += [numbers.data_ptr() + 4 * total * place for place in range(3)]
    start(prepared, pointers)
    by_row = []
    for x, part in zip(tensors, numbers.select(0, 2).split(rows), strict=True):
        *shape, width = x.shape
        by_row.append(part.as_strided(shape, [step // width for step in x.stride()[:-1]]))
    return Narrowed(stored, numbers, tuple(by_row))


def bytes_of(tensor: Tensor, used: Tensor) -> Tensor:
    """A byte for each row of a tensor: whether its numbers count."""
    shape = (*tensor.shape[:-1], 1)
    return used.expand(shape).to(torch.uint8).contiguous()

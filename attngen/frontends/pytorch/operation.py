"""Runs of prepared calls, which the operations of torch share: allocations, and launches on the
current stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...call.kernel_choice import Device
from ...call.prepared import Launches, Output, PreparedCall
from ...runtime import counters, load
from ...runtime.launch import launch, relaunch
from .descriptions import DTYPES
from .lengths import rows_of_none
from .signature import Operands
from .torch_private import (
    PLAIN,
    current_device,
    current_stream,
    is_capturing,
    is_plain,
    undisturbed,
)
from .torch_private import empty_strided_cuda as _empty_strided_cuda


def format_of(operand: object) -> object:
    """All of a tensor that a launch depends on, but for its address; of anything else its type."""
    if type(operand) in PLAIN:
        return operand.shape, operand.stride(), operand.dtype, operand.device  # type: ignore[attr-defined]
    if not isinstance(operand, Tensor):
        return type(operand)
    return type(operand), operand.shape, operand.stride(), operand.dtype, operand.device


def run(prepared: PreparedCall, operands: Operands) -> list[Tensor]:
    """The outputs for operands that `prepared` was made for. Raises: SpecError, LaunchError."""
    if not is_current(prepared.device):
        with current(prepared.device):
            return run(prepared, operands)
    pointers, results = [], []  # in loops, which enter no functions
    for place, _ in prepared.operands:
        operand = operands[place]
        assert operand is not None  # absent ones have no place here
        pointers.append(operand.data_ptr())
    if prepared.unaligned is not None:
        beginnings = prepared.shift
        for pointer in pointers[: prepared.carriers]:
            beginnings |= pointer
        if beginnings % 16:
            return run(prepared.unaligned(operands), operands)
    for output in prepared.outputs:
        tensor = _empty_strided_cuda(output.sizes, output.strides, DTYPES[output.dtype])
        pointers.append(tensor.data_ptr())
        results.append(tensor)
    if prepared.fills:
        named = {name: operands[place] for place, name in prepared.operands}
        for output, tensor in zip(prepared.outputs, results, strict=True):
            if output.preset or not prepared.launches:
                _fill(tensor, output, named)
    if prepared.launches:
        start(prepared, pointers)
    return results


def new_tensor(output: Output) -> Tensor:
    """One on the current device."""
    return _empty_strided_cuda(output.sizes, output.strides, DTYPES[output.dtype])


def empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the current device."""
    return _empty_strided_cuda(tuple(sizes), strides, dtype)  # older torch takes no torch.Size


def is_current(device: Device) -> bool:
    """Whether launches go to this device. Torch's idea of the current device and the driver's
    differ in a thread without a context."""
    return bool(current_device() == device.index == load.current_device())


@contextmanager
def current(device: Device) -> Iterator[None]:
    """Makes it so."""
    with torch.cuda.device(device.index):
        load.ensure_context(device.index)
        yield


def start(
    prepared: Launches, pointers: list[int], before: Callable[[Tensor], object] | None = None
) -> Tensor | None:
    """Launch the kernels on the current stream; their workspace is returned, None where they have
    none. pointers: addresses of operands and results; before: gets the workspace first.

    Raises: LaunchError.
    """
    stream = current_stream(prepared.device.index)
    workspace = None
    if prepared.workspace_bytes:
        # Freed before the kernels end, and safely so: it is handed out on this stream only.
        workspace = _empty_strided_cuda((prepared.workspace_bytes,), (1,), torch.uint8)
        pointers.append(workspace.data_ptr())
        if before is not None:
            before(workspace)
    if prepared.counts_tiles:  # last: under capture its memory is free for the next allocation
        pointers.append(tile_counter(prepared.device.index, stream))
    key = tuple(pointers)
    known = prepared.kept.get(key)
    if known is not None:
        for each, parameters in known:
            relaunch(each, parameters, stream)
        return workspace
    addresses = prepared.addresses(key)
    launched = [(each, launch(each, addresses, stream)) for each in prepared.launches]
    prepared.keep(key, launched)
    return workspace


def start_on_its_device(prepared: Launches, pointers: list[int]) -> None:
    """Launch kernels that have no results of their own, whichever device is current.

    pointers: addresses of what they read and write. Raises: LaunchError.
    """
    if is_current(prepared.device):
        start(prepared, pointers)
        return
    with current(prepared.device):
        start(prepared, pointers)


def _fill(tensor: Tensor, output: Output, operands: dict[str, Tensor | None]) -> None:
    if isinstance(output.rest, str):
        per_head = operands[output.rest]
        assert per_head is not None  # checked with the call
        tensor.copy_(per_head[:, None])
    else:
        tensor.fill_(output.rest)
    if output.name == "lse" and (spare := rows_of_none(tensor, operands)) is not None:
        tensor.masked_fill_(spare, -math.inf)


def unobserved(operands: Operands) -> bool:
    """Whether an operation on these tensors would reach its kernel with nothing before it: no
    subclass, mode, transform, trace or profiler, nothing lazy. `run` may then stand for the
    operation, whose dispatch takes 4 µs (H200 machine, torch 2.11)."""
    return undisturbed() and all([is_plain(x) for x in operands if x is not None])


def unread_memory(device: Device) -> int | None:
    """Address on this device of memory that nobody reads, whichever device and context the thread
    has; None under capture, in which the driver allocates nothing."""
    if torch.cuda.is_current_stream_capturing():
        return None
    with load.on_device(device.index):
        return counters.unread(device.index)


def tile_counter(device: int, stream: int) -> int:
    """Address of one zeroed int32 that no concurrent launch shares.

    Launches on one stream follow each other and leave it at zero, so a stream keeps its own. A
    captured launch may be replayed on any stream, so it gets one that lives in the graph.
    """
    if is_capturing():
        return torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}").data_ptr()
    return counters.address(device, stream, is_torchs_own)


def is_torchs_own(device: int, stream: int) -> bool:
    """Whether the current stream of the device, of this handle, is from torch's pools, whose
    streams are never destroyed. Of others the handle is torch's identity, too."""
    load.ensure_context(device)  # asked once of torch's, before the driver is of others
    return torch.cuda.current_stream(device).stream_id != stream

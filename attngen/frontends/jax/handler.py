"""The handler of XLA's calls: from a frame to launches on the stream that it names.

Whatever a program says is worked out when XLA instantiates it, outside any capture; a call then
looks up its launches by addresses. While a graph is recorded, tile counters lie in the program's
own scratch, since nodes of a graph may run at once.
"""

from __future__ import annotations

import atexit
import math
import os
import struct
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ...call import kept_ds
from ...call.kernel_choice import Device
from ...call.prepare.backward import PreparedBackward
from ...call.prepared import PreparedCall, refuse_addresses
from ...errors import LaunchError
from ...runtime import counters, load
from ...runtime.launch import launch, relaunch
from ...runtime.load import checked, driver
from . import ffi
from .program import COUNTER_BYTES, TARGET, Program, scratch_of

ALIGNMENT = 16  # bytes at whose multiples the copy engine reads


@dataclass(frozen=True, eq=False)
class Site:
    """A program on a device: its launch, and what must be so before it.

    read: places among the addresses of what the copy engine reads. presets: words that fill
    results, by their place, and how many; resets: words that fill parts of the workspace, by their
    offsets in bytes, and how many.
    """

    prepared: PreparedCall | PreparedBackward
    has_scratch: bool
    read: tuple[int, ...]
    presets: tuple[tuple[int, int, int], ...]
    resets: tuple[tuple[int, int, int], ...]


_sites: dict[tuple[bytes, int], Site] = {}


def _make_site(text: bytes, device: int) -> Site:
    """Raises: LaunchError where the program is for another device; SpecError, CompileError."""
    program = Program.parse(text)
    prepared = program.prepared(Device(f"cuda:{device}", device, program.arch))
    if scratch_of(prepared) != program.scratch:
        raise LaunchError(
            f"a program with {program.scratch} bytes of scratch needs {scratch_of(prepared)} on "
            f"device {device}: it was made for one with other multiprocessors, or under another "
            f"{kept_ds.VARIABLE}. Trace it where and as it runs"
        )
    read: tuple[int, ...] = ()
    if isinstance(prepared, PreparedBackward):
        read = () if prepared.gathers else prepared.read
    elif prepared.unaligned is not None:
        read = tuple(range(prepared.carriers))
    first = len(program.operands)
    presets = tuple(
        (first + place, _word(float(output.rest)), output.bytes // 4)
        for place, output in enumerate(prepared.outputs)
        if output.preset
    )
    return Site(prepared, program.scratch > 0, read, presets, tuple(_resets_of(prepared)))


def _word(number: float) -> int:
    """The bits of a float32."""
    (word,) = struct.unpack("<I", struct.pack("<f", number))
    return int(word)


def _resets_of(prepared: PreparedCall | PreparedBackward) -> list[tuple[int, int, int]]:
    """Parts of the workspace that kernels need filled."""
    if not isinstance(prepared, PreparedBackward):
        return []
    found = []
    if prepared.counts:
        begin, end = prepared.counts
        found.append((begin, 0, (end - begin) // 4))
    if prepared.resets_rows and prepared.rows:
        size = math.prod(prepared.rows.shape)
        found += [(prepared.rows.lse_log2, _word(math.inf), size), (prepared.rows.d, 0, size)]
    return found


def find_site(text: bytes, device: int) -> Site:
    """The site of a program, made where there is none."""
    site = _sites.get((text, device))
    if site is None:
        if not _sites:
            atexit.register(_finish, os.getpid())
        with load.on_device(device):
            site = _sites[text, device] = _make_site(text, device)
    return site


def instantiate(words: ffi.Words) -> None:
    """Find or build the kernels of a program, and load them on every device that may run it: in a
    call, which may be recorded the first time, it would be too late."""
    text = ffi.text_of(words)
    for device in _devices():
        find_site(text, device)


def _devices() -> tuple[int, ...]:
    """The driver's numbers of XLA's devices."""
    try:
        found = jax.local_devices(backend="cuda")
    except RuntimeError:
        return (0,)
    return tuple([each.local_hardware_id or 0 for each in found])


def execute(words: ffi.Words) -> None:
    """Launch the kernels of a call. Raises: LaunchError, SpecError."""
    device, stream = ffi.device_of(words), ffi.stream_of(words)
    text = ffi.text_of(words)
    site = _sites.get((text, device)) or find_site(text, device)
    addresses = ffi.addresses_of(words)
    if load.current_device() != device:
        with load.on_device(device):
            start(site, addresses, device, stream)
    else:
        start(site, addresses, device, stream)


def start(site: Site, addresses: list[int], device: int, stream: int) -> None:
    """Launch on a stream of the current device. addresses: of operands and results, then of the
    scratch. Raises: LaunchError, SpecError."""
    prepared = site.prepared
    beginnings = 0
    for place in site.read:
        beginnings |= addresses[place]
    if beginnings % ALIGNMENT:
        refuse_addresses(addresses)
    for place, word, count in site.presets:
        _fill(addresses[place], word, count, stream)
    if site.has_scratch:
        scratch = addresses.pop()
        workspace = scratch + COUNTER_BYTES
        for offset, word, count in site.resets:
            _fill(workspace + offset, word, count, stream)
        if prepared.workspace_bytes:
            addresses.append(workspace)
        if prepared.counts_tiles:
            addresses.append(_counter(scratch, device, stream))
    key = tuple(addresses)
    known = prepared.kept.get(key)
    if known is not None:
        for each, parameters in known:
            relaunch(each, parameters, stream)
        return
    named = prepared.addresses(key)
    prepared.keep(key, [(each, launch(each, named, stream)) for each in prepared.launches])


def _counter(scratch: int, device: int, stream: int) -> int:
    """Address of a zeroed counter: the stream's, or, of a graph, the program's own."""
    status = driver().cuStreamIsCapturing(stream)
    if int(checked("cuStreamIsCapturing", status)):
        _fill(scratch, 0, 1, stream)
        return scratch
    return counters.address(device, stream, _lasts)


def _lasts(device: int, stream: int) -> bool:
    """Whether a stream may be told by its handle: XLA's live as long as its client, which waits for
    them before it ends."""
    return True


def _fill(address: int, word: int, count: int, stream: int) -> None:
    if count:
        checked("cuMemsetD32Async", driver().cuMemsetD32Async(address, word, count, stream))


def _finish(process: int) -> None:
    """Wait for calls that are pending when the interpreter ends: a thread of XLA's would wait for
    an interpreter that is gone."""
    if os.getpid() != process:
        return
    for device in jax.local_devices():
        (jax.device_put(jnp.zeros(()), device) + 1).block_until_ready()


def register(platform: str) -> None:
    """Tell XLA of the handler on one of its platforms, once a process."""
    stages: dict[str, ffi.Stage] = {"instantiate": instantiate, "execute": execute}
    ffi.register(TARGET, "CUDA" if platform == "cuda" else platform, stages, ffi.CAPTURED)

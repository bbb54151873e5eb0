"""What the torch operations share: from operands to a launch that is worked out once, and run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...call.operands import Source
from ...compiler.builder import find_kernels
from ...errors import SpecError
from ...fragments import features
from ...kernels.family import Choice
from ...runtime import counters, load
from ...runtime.launch import Prepared, launch
from ...runtime.run_time import Extent, Scalars, workspace_bytes
from ...spec import resolve
from ...spec.attention_spec import AttentionSpec
from ...targets.target import DEFAULT, names, of_capability
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


@dataclass(frozen=True)
class Output:
    """A tensor that a call returns, and that the kernel's parameter `name` addresses.

    rest: what it holds where nothing is launched; of an LSE [b, h, s] an operand [h], by its name.
    preset: the kernel must find it so, too.
    """

    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    rest: float | str
    preset: bool = False

    @classmethod
    def like(cls, name: str, tensor: Tensor, rest: float | str, preset: bool = False) -> Output:
        """One of the size, strides and dtype of `tensor`."""
        return cls(name, tuple(tensor.shape), tensor.stride(), tensor.dtype, rest, preset)


@dataclass(frozen=True, eq=False)
class Launches:
    """What calls of equal shapes, strides and arguments launch, in order.

    sources: addresses that point into an operand. offsets: where each workspace but the counter
    lies in one allocation of so many bytes; counts_tiles: whether that counter is needed.
    """

    device: torch.device
    sources: tuple[Source, ...] = ()
    launches: tuple[Prepared, ...] = ()
    offsets: dict[str, int] = field(default_factory=dict)
    workspace_bytes: int = 0
    counts_tiles: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedCall(Launches):
    """What such calls share beside their launches, which are none where no query sees a key.

    operands: places of those that are there, and the parameters that hold their addresses;
    outputs: in their order; fixed: addresses that are the same for all, 0 for what the kernels have
    and the call does without; unaligned: what serves such calls whose operands begin where the copy
    engine does not read; None where these do.
    """

    operands: tuple[tuple[int, str], ...]
    outputs: tuple[Output, ...]
    fixed: dict[str, int]
    unaligned: Callable[[Operands], PreparedCall] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what it returns, in their order."""
        return tuple([output.name for output in self.outputs])

    def first_alone(self) -> PreparedCall:
        """The same for calls that want the first output alone. Some kernels write no LSE; where the
        others are small, so that the host is what takes time, they are written where nobody
        reads, but not under capture, in which the driver allocates nothing."""
        if not self.launches:
            return self
        first, *others = self.outputs
        fixed = self.fixed.copy()
        if any(each.loaded.kernel.no_lse for each in self.launches):
            fixed["lse"] = 0
            others = [each for each in others if each.name != "lse"]
        sizes = [math.prod(each.sizes) * each.dtype.itemsize for each in others]
        small = max(sizes, default=0) <= counters.UNREAD_BYTES
        if others and small and not torch.cuda.is_current_stream_capturing():
            fixed |= dict.fromkeys((x.name for x in others), unread_memory(self.device))
            others = []
        return replace(self, outputs=(first, *others), fixed=fixed)

    def placed(self, homes: Sequence[int | None]) -> PreparedCall:
        """The same for a list of tensors alone. homes: of each operand, its place among these."""
        known = {name: homes[place] for place, name in self.operands}
        known |= {name: known[source] for name, source, offset in self.sources if not offset}
        unaligned = self.unaligned

        def elsewhere(tensors: Operands) -> PreparedCall:
            assert unaligned is not None  # else nobody asks
            operands = tuple(None if home is None else tensors[home] for home in homes)
            return unaligned(operands).placed(homes)

        return replace(
            self,
            operands=tuple((home, name) for name, home in known.items() if home is not None),
            sources=tuple(source for source in self.sources if source[2]),
            unaligned=None if unaligned is None else elsewhere,
        )


WORKSPACE_ALIGNMENT = 256  # bytes; kernels need 16
_kernels: dict[tuple[AttentionSpec, int, int, str | None], tuple[load.LoadedKernel, ...]] = {}


def format_of(operand: object) -> object:
    """What a launch depends on in a tensor, but for its address; of anything else its type."""
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
    results = []
    addresses = prepared.fixed.copy()
    for place, name in prepared.operands:
        operand = operands[place]
        assert operand is not None  # absent ones have no place here
        addresses[name] = operand.data_ptr()
    locate(prepared, addresses)
    if (addresses["q"] | addresses["k"] | addresses["v"]) % 16 and prepared.unaligned:
        return run(prepared.unaligned(operands), operands)
    for output in prepared.outputs:
        tensor = new_tensor(output.sizes, output.strides, output.dtype)
        if output.preset or not prepared.launches:
            _fill(tensor, output, {name: operands[place] for place, name in prepared.operands})
        addresses[output.name] = tensor.data_ptr()
        results.append(tensor)
    if prepared.launches:
        start(prepared, addresses)
    return results


def new_tensor(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One on the current device."""
    return _empty_strided_cuda(sizes, strides, dtype)


def is_current(device: torch.device) -> bool:
    """Whether launches go to this device. Torch's idea of the current device and the driver's
    differ in a thread without a context."""
    return bool(current_device() == device.index == load.current_device())


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Makes it so."""
    with torch.cuda.device(device):
        load.ensure_context(device.index)
        yield


def locate(prepared: Launches, addresses: dict[str, int]) -> None:
    """Adds the addresses that point into an operand."""
    for name, source, offset in prepared.sources:
        addresses[name] = addresses[source] + offset


def start(
    prepared: Launches, addresses: dict[str, int], before: Callable[[Tensor], object] | None = None
) -> Tensor | None:
    """Launches the kernels on the current stream; returns their workspace, None where they have
    none. addresses: by parameter; before: gets the workspace first.

    Raises: LaunchError.
    """
    stream = current_stream(prepared.device.index)
    workspace = None
    if prepared.workspace_bytes:
        # Freed before the kernels end, and safely so: it is handed out on this stream only.
        workspace = _empty_strided_cuda((prepared.workspace_bytes,), (1,), torch.uint8)
        first = workspace.data_ptr()
        for name, offset in prepared.offsets.items():
            addresses[name] = first + offset
        if before is not None:
            before(workspace)
    if prepared.counts_tiles:  # last: under capture its memory is free for the next allocation
        addresses["tile_counter"] = tile_counter(prepared.device, stream)
    for each in prepared.launches:
        launch(each, addresses, stream)
    return workspace


def lay_out_workspaces(
    kernels: Sequence[load.LoadedKernel],
    q: Extent,
    scalars: Scalars,
    splits: int = 1,
    elsewhere: Collection[str] = (),
) -> tuple[dict[str, int], int]:
    """Offsets of the kernels' workspaces in one allocation, and its size in bytes. The counter is
    not among them, since it must be zero, nor is what lies elsewhere."""
    sizes: dict[str, int] = {}
    for each in kernels:
        sizes |= workspace_bytes(each.kernel, q, scalars.sequences, splits, scalars.numbers)
    offsets, end = {}, 0
    for name, size in sizes.items():
        if name == "tile_counter" or name in elsewhere:
            continue
        offsets[name] = end
        end += -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return offsets, end


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


def device_arch(device: torch.device) -> str | None:
    """The architecture whose kernels run on this device; None where there are none."""
    if device.type != "cuda":
        return None
    if not torch.cuda.is_available():  # fake tensors, traced here for another machine
        return DEFAULT.name
    target = of_capability(torch.cuda.get_device_capability(device))
    return None if target is None else target.name


def kernels_of(
    spec: AttentionSpec, device: torch.device, choice: Choice
) -> tuple[load.LoadedKernel, ...]:
    """The kernels of a spec of one direction on this device, in the order of launch, found or built
    and loaded once. choice: how the call is computed, which may be by another problem than the
    spec's first; a trace notes what the spec names itself.

    Raises: SpecError where the device or the spec has no kernels; BundleError, CompileError,
    LaunchError.
    """
    key = (spec, device.index, choice.place, choice.kernel)
    if key not in _kernels:
        arch = device_arch(device)
        if arch is None:
            raise SpecError(f"no kernels for {device}; available: {[*names()]}")
        problems = resolve.resolve(spec, features.scan())
        problem = problems[choice.place]
        with torch.cuda.device(device):
            found = tuple(
                load.load(binary, cubin, device.index)
                for binary, cubin in find_kernels(problem, arch, choice.kernel)
            )
        if choice.place:
            found = tuple(replace(each, variant=(problems[0], arch)) for each in found)
        _kernels[key] = found
    return _kernels[key]


def unread_memory(device: torch.device) -> int:
    """Address on this device of what nobody reads, whichever device and context the thread has."""
    with torch.cuda.device(device):
        load.ensure_context(device.index)
        return counters.unread(device.index)


def tile_counter(device: torch.device, stream: int) -> int:
    """Address of one zeroed int32 that no concurrent launch shares.

    Launches on one stream follow each other and leave it at zero, so a stream keeps its own. A
    captured launch may be replayed on any stream, so it gets one that lives in the graph.
    """
    if is_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device).data_ptr()
    return counters.address(device.index, stream, is_torchs_own)


def is_torchs_own(device: int, stream: int) -> bool:
    """Whether the current stream of the device, of this handle, is from torch's pools, whose
    streams are never destroyed. Of others the handle is torch's identity, too."""
    load.ensure_context(device)  # asked once of torch's, before the driver is of others
    return torch.cuda.current_stream(device).stream_id != stream

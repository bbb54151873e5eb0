"""Calls that are prepared: everything about their launches but addresses, for any library."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import SpecError
from ..runtime import counters
from ..runtime.launch import Parameters, Prepared
from ..runtime.load import LoadedKernel
from ..runtime.run_time import Extent, Scalars, workspace_bytes
from .kernel_choice import Device
from .operands import Source
from .table import CARRIERS
from .tensors import BYTES, Described, dtype_name

WORKSPACE_ALIGNMENT = 256  # bytes; kernels need 16
LAUNCHES_KEPT = 128  # of a call's addresses
Launched = tuple[Prepared, Parameters]


@dataclass(frozen=True)
class Output:
    """A tensor that a call returns, and that the kernel's parameter `name` addresses.

    dtype: its name, as in `tensors.BYTES`. rest: its value where nothing is launched; of an LSE
    [b, h, s] an operand [h], by its name. preset: the kernel must find it so, too.
    """

    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    rest: float | str
    preset: bool = False

    @classmethod
    def like(cls, name: str, tensor: Described, rest: float | str, preset: bool = False) -> Output:
        """One of the size, strides and dtype of `tensor`."""
        sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
        return cls(name, sizes, strides, dtype_name(tensor), rest, preset)

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.sizes) * BYTES[self.dtype]


@dataclass(frozen=True, eq=False)
class Launches:
    """Launches of calls of equal shapes, strides and arguments, in order.

    fixed: addresses that are the same for all; sources: addresses that point into an operand.
    offsets: where each workspace but the counter lies in one allocation of so many bytes;
    counts_tiles: whether that counter is needed. pointed: parameters whose addresses a launch is
    given, in their order: those of operands and results, then `workspace`, the first of its bytes,
    and `tile_counter` where these are. kept: launches with their parameters, by these addresses,
    since allocators hand out the same ones again and again.
    """

    device: Device
    fixed: dict[str, int] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    launches: tuple[Prepared, ...] = ()
    offsets: dict[str, int] = field(default_factory=dict)
    workspace_bytes: int = 0
    counts_tiles: bool = False
    pointed: tuple[str, ...] = field(init=False)
    kept: dict[tuple[int, ...], Sequence[Launched]] = field(default_factory=dict, init=False)

    def _point(self, names: Sequence[str], **others: object) -> None:
        """Work out what a frozen dataclass holds beside what it is made of. names: parameters of
        operands and results."""
        own = {"workspace": self.workspace_bytes > 0, "tile_counter": self.counts_tiles}
        pointed = (*names, *[name for name, there in own.items() if there])
        for name, value in {"pointed": pointed, **others}.items():
            object.__setattr__(self, name, value)

    def addresses(self, pointers: Sequence[int]) -> dict[str, int]:
        """All addresses by parameter. pointers: of `pointed`, in its order."""
        found = self.fixed.copy()
        found.update(zip(self.pointed, pointers, strict=True))
        if self.workspace_bytes:
            for name, offset in self.offsets.items():
                found[name] = found["workspace"] + offset
        for name, source, offset in self.sources:
            found[name] = found[source] + offset
        return found

    def keep(self, pointers: tuple[int, ...], launched: Sequence[Launched]) -> None:
        """Make `kept` have the launches of these pointers."""
        if len(self.kept) >= LAUNCHES_KEPT:
            self.kept.clear()
        self.kept[pointers] = launched


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedCall(Launches):
    """A forward for all that differ from it in addresses alone, beside its launches, which are none
    where no query sees a key.

    operands: places of those that are there, q, k and v first, and the parameters that hold their
    addresses; outputs: in their order; fixed is 0 for what the kernels have and the call does
    without. unaligned: takes the operands, and gives what serves such calls where these begin where
    the copy engine does not read; None where it does not matter. carriers: how many operands q, k
    and v are, and shift: bits of the bytes from where they begin to where q, k and v begin. fills:
    whether outputs must be filled.
    """

    operands: tuple[tuple[int, str], ...]
    outputs: tuple[Output, ...]
    unaligned: Callable[[Sequence[Any]], PreparedCall] | None = None
    carriers: int = field(init=False)
    shift: int = field(init=False)
    fills: bool = field(init=False)

    def __post_init__(self) -> None:
        shift = 0
        for name, _, offset in self.sources:
            shift |= offset if name in CARRIERS else 0
        operands = [name for _, name in self.operands]
        carriers = len([name for name in operands[: len(CARRIERS)] if name in CARRIERS])
        fills = not self.launches or any([output.preset for output in self.outputs])
        self._point((*operands, *self.names), carriers=carriers, shift=shift, fills=fills)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what it returns, in their order."""
        return tuple([output.name for output in self.outputs])

    def first_alone(self, unread: Callable[[Device], int | None]) -> PreparedCall:
        """The call for those that want the output alone, which may be an operand. Some kernels
        write no LSE; where the others are small, so that the host is what takes time, they are
        written where nobody reads.

        unread: gives the address of `counters.UNREAD_BYTES` of a device, None where there are none.
        """
        if not self.launches:
            return self
        first = [each for each in self.outputs if each.name == "o"]
        others = [each for each in self.outputs if each.name != "o"]
        fixed = self.fixed.copy()
        if any(each.loaded.kernel.no_lse for each in self.launches):
            fixed["lse"] = 0
            others = [each for each in others if each.name != "lse"]
        small = all([each.bytes <= counters.UNREAD_BYTES for each in others])
        if others and small and (address := unread(self.device)) is not None:
            fixed |= dict.fromkeys((x.name for x in others), address)
            others = []
        return replace(self, outputs=(*first, *others), fixed=fixed)

    def placed(self, homes: Sequence[int | None]) -> PreparedCall:
        """The call for a list of tensors alone. homes: of each operand, its place among these."""
        known = {name: homes[place] for place, name in self.operands}
        known |= {name: known[source] for name, source, offset in self.sources if not offset}
        unaligned = self.unaligned

        def elsewhere(tensors: Sequence[Any]) -> PreparedCall:
            assert unaligned is not None  # else nobody asks
            operands = tuple(None if home is None else tensors[home] for home in homes)
            return unaligned(operands).placed(homes)

        return replace(
            self,
            operands=tuple((home, name) for name, home in known.items() if home is not None),
            sources=tuple((name, source, n) for name, source, n in self.sources if n),
            unaligned=None if unaligned is None else elsewhere,
        )


def refuse_addresses(_: Sequence[Any]) -> PreparedCall:
    """Raises: SpecError, of operands that begin where the copy engine does not read."""
    raise SpecError(
        "FP8 operands and pages must start at a multiple of 16 bytes; clone what does not"
    )


def lay_out_workspaces(
    kernels: Sequence[LoadedKernel],
    q: Extent,
    scalars: Scalars,
    splits: int = 1,
    elsewhere: Collection[str] = (),
) -> tuple[dict[str, int], int]:
    """Offsets of the kernels' workspaces in one allocation, and its size in bytes. The counter is
    not among them, since it must be zero, nor is what lies elsewhere."""
    sizes: dict[str, int] = {}
    for each in kernels:
        own = workspace_bytes(each.kernel, q, scalars.sequences, splits, scalars.numbers)
        sizes |= {name: max(size, sizes.get(name, 0)) for name, size in own.items()}
    offsets, end = {}, 0
    for name, size in sizes.items():
        if name == "tile_counter" or name in elsewhere:
            continue
        offsets[name] = end
        end += -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return offsets, end

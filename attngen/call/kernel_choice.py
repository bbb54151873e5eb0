"""Which kernels serve a call: what their family says is fastest, and what they make."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ..compiler.builder import find_kernels
from ..errors import SpecError
from ..fragments import features
from ..kernels.family import Choice, Facts, serving
from ..kernels.selection import made_by, select
from ..runtime import load
from ..runtime.load import LoadedKernel, multiprocessors
from ..runtime.run_time import FEW_SEQUENCES, Extent, Scalars
from ..spec.attention_spec import AttentionSpec
from ..spec.resolve import resolve
from ..targets.target import TARGETS, names

SCHEDULES = ("q_schedule", "kv_schedule")
_kernels: dict[tuple[AttentionSpec, int, int, int, str | None], tuple[LoadedKernel, ...]] = {}


@dataclass(frozen=True)
class Device:
    """A device that a call runs on.

    name: as its library says it; index: the driver's number of it; arch: the architecture whose
    kernels it runs, None where there are none for it. planned: its multiprocessors, of a device
    that launches are only planned for: kernels are found or built, and not loaded; 0 else.
    """

    name: str
    index: int
    arch: str | None
    planned: int = 0

    @property
    def known_arch(self) -> str:
        """The architecture. Raises: SpecError where there are no kernels for it."""
        if self.arch is None:
            raise SpecError(f"no kernels for {self.name}; available: {[*names()]}")
        return self.arch


def choose(
    spec: AttentionSpec,
    device: Device,
    extents: Mapping[str, Extent],
    scalars: Scalars,
    wants: Collection[str],
    *,
    splits: int = 0,
    scheduled: bool = False,
) -> Choice:
    """How the spec's family computes a call on this device; other arguments as of `Facts`.

    spec: of one direction. Raises: SpecError, PlanError, LaunchError.
    """
    target, problems = TARGETS[device.known_arch], resolve(spec, features.scan())
    first, *_ = problems
    chip = device.planned or multiprocessors(device.index)
    facts = Facts(extents, scalars, chip, frozenset(wants), splits, scheduled)
    return serving(first, target).choose(problems, target, facts)


def kernels_of(spec: AttentionSpec, device: Device, choice: Choice) -> tuple[LoadedKernel, ...]:
    """The kernels of a spec of one direction on this device, in the order of launch, found or built
    and loaded once. choice: how the call is computed, which may be by another problem than the
    spec's first; a trace notes what the spec names itself.

    Raises: SpecError where the device or the spec has no kernels; BundleError, CompileError,
    LaunchError.
    """
    key = (spec, device.index, device.planned, choice.place, choice.kernel)
    if key not in _kernels:
        arch, problems = device.known_arch, resolve(spec, features.scan())
        first, problem = next(iter(problems)), problems[choice.place]
        made = find_kernels(problem, arch, choice.kernel)
        if device.planned:
            found = tuple(
                LoadedKernel(None, binary.kernel, device.index, device.planned)
                for binary, _ in made
            )
        else:
            with load.on_device(device.index):
                found = tuple(load.load(binary, cubin, device.index) for binary, cubin in made)
        if choice.place:
            found = tuple(replace(each, variant=(first, arch)) for each in found)
        _kernels[key] = found
    return _kernels[key]


def launched(
    kernels: Sequence[LoadedKernel], wants: Collection[str], sequences: int | None
) -> tuple[tuple[LoadedKernel, ...], tuple[str, ...]]:
    """The kernels that make what a call wants, in the order of launch, and the schedules that
    nobody writes: of few sequences kernels find the order themselves."""
    few = sequences is not None and sequences <= FEW_SEQUENCES
    given = SCHEDULES if few and any(each.kernel.orders_few for each in kernels) else ()
    found = select(kernels, wants, given)
    left_out = chain.from_iterable(made_by(x.kernel) for x in kernels if x not in found)
    unwritten = {*given} & {*left_out}
    return found, tuple(name for name in given if name in unwritten)

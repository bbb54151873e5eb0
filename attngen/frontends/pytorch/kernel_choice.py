"""Which kernels serve a call: what their family says is fastest, and what they make."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import torch

from ...fragments import features
from ...kernels.family import Choice, Facts, serving
from ...kernels.selection import made_by, select
from ...runtime.load import LoadedKernel, multiprocessors
from ...runtime.run_time import FEW_SEQUENCES, Extent, Scalars
from ...spec.attention_spec import AttentionSpec
from ...spec.resolve import resolve
from ...targets.target import TARGETS

SCHEDULES = ("q_schedule", "kv_schedule")


def choose(
    spec: AttentionSpec,
    device: torch.device,
    extents: Mapping[str, Extent],
    scalars: Scalars,
    wants: Collection[str],
    *,
    splits: int = 0,
    scheduled: bool = False,
) -> Choice:
    """How the spec's family computes a call on this device; other arguments as of `Facts`.

    spec: of one direction and architecture. Raises: SpecError, PlanError, LaunchError.
    """
    problems, (arch, *_) = resolve(spec, features.scan()), spec.arch
    first, *_ = problems
    chip = multiprocessors(device.index)
    facts = Facts(extents, scalars, chip, frozenset(wants), splits, scheduled)
    target = TARGETS[arch]
    return serving(first, target).choose(problems, target, facts)


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

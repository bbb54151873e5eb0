"""Served: which specs an architecture has kernels for, of those that some architecture has."""

from __future__ import annotations

from dataclasses import replace

from ..errors import PlanError, SpecError
from ..fragments import features
from ..kernels.family import serving
from ..spec.attention_spec import AttentionSpec
from ..spec.resolve import resolve
from ..targets.target import DEFAULT, TARGETS

_FEATURES = features.scan()  # here, not in a call: torch.compile cannot trace file access


def unserved(spec: AttentionSpec, arch: str) -> list[str]:
    """Why the architecture has no kernels for a spec that is not refused whatever the architecture;
    empty where it has. Those of the default serve every such spec."""
    if arch == DEFAULT.name:
        return []
    reasons: list[str] = []
    try:
        problems = resolve(replace(spec, arch=(arch,)), _FEATURES)
    except SpecError as error:
        return [*error.reasons]
    for problem in problems:
        try:
            serving(problem, TARGETS[arch])
        except PlanError as error:
            reasons += error.reasons
    return [*dict.fromkeys(reasons)]


def without_splits(spec: AttentionSpec, arch: str) -> AttentionSpec:
    """The spec, of few queries the one whose kernels do not split keys where the architecture has
    none that do."""
    return replace(spec, decode=False) if spec.decode and unserved(spec, arch) else spec

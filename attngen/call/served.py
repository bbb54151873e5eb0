"""Served: which specs an architecture has kernels for, of those that some architecture has."""

from __future__ import annotations

from dataclasses import replace

from ..fragments import features
from ..kernels.family import families, named_refusals, serving_or_reasons
from ..spec.attention_spec import AttentionSpec
from ..spec.resolve import find_violations, resolve
from ..targets.target import DEFAULT, TARGETS

# Here, not in a call: torch.compile cannot trace file access.
_FEATURES, _FAMILIES = features.scan(), families()


def unserved(spec: AttentionSpec, arch: str) -> list[str]:
    """Why the architecture has no kernels for a spec that is not refused whatever the architecture;
    empty where it has. Those of the default serve every such spec."""
    if arch == DEFAULT.name:
        return []
    target, there = TARGETS[arch], replace(spec, arch=(arch,))
    if violations := find_violations(there, _FEATURES):
        return [violation.reason for violation in violations]
    reasons: list[str] = []
    for problem in resolve(there, _FEATURES):
        family, refused = serving_or_reasons(problem, target, _FAMILIES)
        if family is None:
            reasons += named_refusals(problem, refused)
    return [*dict.fromkeys(reasons)]


def of_backward(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the backward of a forward of 16 bits: gradients are float32 where its output is,
    and no keys are split."""
    if spec.out_dtype == "fp32":
        spec = replace(spec, out_dtype=None, grad_dtype="fp32")
    return replace(spec, directions=("bwd",), decode=False)


def without_splits(spec: AttentionSpec, arch: str) -> AttentionSpec:
    """The spec, of few queries the one whose kernels do not split keys where the architecture has
    none that do."""
    return replace(spec, decode=False) if spec.decode and unserved(spec, arch) else spec

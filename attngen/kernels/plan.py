"""Plan: the mapping of a problem onto an architecture."""

from __future__ import annotations

from typing import Any

from ..errors import PlanError
from ..io.values import from_data
from ..spec.problem import Problem
from . import tuned
from .base import Plan
from .support import mask_pack as sm90_mask
from .support import order as sm90_varlen
from .wgmma.backward import plans as sm90_bwd
from .wgmma.decode import plans as sm90_decode
from .wgmma.forward import alone as sm90_alone
from .wgmma.forward import plans as sm90
from .wgmma.forward import short as sm90_short

ARCHITECTURES = {sm90.ARCH: sm90}
BACKWARDS = {sm90.ARCH: sm90_bwd}
DECODES = {sm90.ARCH: sm90_decode}
SHORTS = {sm90.ARCH: sm90_short}
ALONES = {sm90.ARCH: sm90_alone}
KernelPlan = (
    Plan
    | sm90_bwd.KernelPlan
    | sm90_mask.MaskPlan
    | sm90_varlen.VarlenPlan
    | sm90_decode.KernelPlan
)
_CLASSES: dict[str, type[KernelPlan]] = {
    "sm90_fwd": Plan,
    sm90_short.FAMILY: Plan,
    sm90_alone.FAMILY: Plan,
    "bwd_prepare": sm90_bwd.PreparePlan,
    **dict.fromkeys(sm90_bwd.FUSED, sm90_bwd.BackwardPlan),
    "sm90_bwd_dkv": sm90_bwd.BackwardPlan,
    "sm90_bwd_dq": sm90_bwd.BackwardPlan,
    "bwd_convert": sm90_bwd.ConvertPlan,
    "bwd_row_sums": sm90_bwd.RowSumsPlan,
    "sm90_bwd_dbias": sm90_bwd.BiasPlan,
    "mask_pack": sm90_mask.MaskPlan,
    "varlen_prepare": sm90_varlen.VarlenPlan,
    "sm90_decode": sm90_decode.DecodePlan,
    "combine": sm90_decode.CombinePlan,
}
# Family → its template under templates/kernels.
TEMPLATES = {
    "sm90_fwd": "wgmma/forward/forward",
    sm90_short.FAMILY: "wgmma/forward/short",
    sm90_alone.FAMILY: "wgmma/forward/alone",
    "sm90_bwd": "wgmma/backward/fused",
    "sm90_bwd_with_dbias": "wgmma/backward/fused",
    "sm90_bwd_dkv": "wgmma/backward/dkv",
    "sm90_bwd_dq": "wgmma/backward/dq",
    "sm90_bwd_dbias": "wgmma/backward/dbias",
    "sm90_decode": "wgmma/decode/decode",
    "bwd_prepare": "support/prepare",
    "bwd_convert": "support/convert",
    "bwd_row_sums": "support/row_sums",
    "mask_pack": "support/mask_pack",
    "varlen_prepare": "support/order",
    "combine": "support/combine",
}


def template_of(plan: KernelPlan) -> str:
    """The template that is filled for a plan, by its name under the templates' root."""
    return f"kernels/{TEMPLATES[plan.family]}.cu.j2"


def plans(problem: Problem, arch: str) -> tuple[KernelPlan, ...]:
    """The preferred plan of each kernel of the problem, in the order of their launches: one for a
    forward, several for a backward, and one more before them where lengths vary, or where a mask's
    bits are packed; two for a decode. Many a forward has a second one, for short calls, or those
    that want the output alone, which launch it instead.
    Raises: as `plan`."""
    _check_known(arch)
    _check_together(problem)
    found: tuple[KernelPlan, ...]
    if problem.decode:
        found = DECODES[arch].plans(problem)
    elif problem.direction == "fwd":
        others = SHORTS[arch].plans(problem) or ALONES[arch].plans(problem)
        found = (plan(problem, arch), *others)
    else:
        found = BACKWARDS[arch].plans(problem)
    if not found:
        what = "decode" if problem.decode else "backward"
        raise PlanError(f"{problem.label}: {arch} has no {what} for its head dims or dtypes")
    if problem.attn_mask:
        found = sm90_mask.with_mask(found)
    if problem.varlen and not problem.decode:
        return (sm90_varlen.plan(found), *found)
    return found


def plans_of_call(problem: Problem, arch: str, second: bool) -> tuple[KernelPlan, ...]:
    """Those of them that a call of a forward launches. second: whether the second kernel, where
    there are two. Raises: as `plan`."""
    found = plans(problem, arch)
    forwards = [each for each in found if isinstance(each, Plan)]
    return (forwards[second],) if len(forwards) > 1 else found


def read_plan(data: dict[str, Any]) -> KernelPlan:
    """The plan of one kernel from its JSON data, which name its family. Raises: ValueError."""
    family = data.get("family")
    if family not in _CLASSES:
        raise ValueError(f"family {family!r} is unknown; known: {[*_CLASSES]}")
    return from_data(_CLASSES[family], data)


def plan(problem: Problem, arch: str) -> Plan:
    """The preferred plan of a forward.

    Raises: PlanError where the architecture is unknown or nothing fits it.
    """
    return candidates(problem, arch)[0]


def candidates(problem: Problem, arch: str) -> tuple[Plan, ...]:
    """Every feasible plan, the preferred first: what measured fastest, where the problem was
    tuned, else what the heuristics say."""
    return tuned.prefer(feasible(problem, arch), tuned.entry_of(problem, arch))


def feasible(problem: Problem, arch: str) -> tuple[Plan, ...]:
    """Every feasible plan, in the order of the heuristics. Raises: as `plan`."""
    _check_known(arch)
    _check_together(problem)
    if problem.direction != "fwd":
        raise PlanError(f"{problem.label}: a backward has several kernels; plans() has them all")
    found = tuple(ARCHITECTURES[arch].feasible(problem))
    if not found:
        raise PlanError(f"{problem.label}: no tile fits {arch}'s registers and shared memory")
    return found


def _check_together(problem: Problem) -> None:
    """Raises: PlanError where a template would leave out a part of the problem. Specs of this kind
    are refused by `resolve`, but a trace may have such problems, too."""
    hidden = problem.dropout or problem.attn_mask
    beside = problem.decode or problem.eight_bit or problem.widens
    if (hidden or problem.bias) and beside:
        raise PlanError(f"{problem.label}: no kernel does all of this together yet")


def _check_known(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise PlanError(f"architecture {arch!r} is unknown; available: {[*ARCHITECTURES]}")

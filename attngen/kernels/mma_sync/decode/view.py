"""View, decode by products of warps: what the template of the kernel that splits the keys reads."""

from __future__ import annotations

from dataclasses import dataclass

from ....spec.problem import DTYPE_BYTES, Problem
from ....targets.target import TARGETS
from ...base import SmemRegion
from ...uses import FragmentUse
from ...view import (
    CPP_ELEMENTS,
    FragmentView,
    KernelView,
    MaskListView,
    ScoreListView,
    fragment_view,
    mask_list_view,
    score_list_view,
)
from ..operands import Operand, operand_of
from .plan import DecodePlan


@dataclass(frozen=True)
class MmaDecodeView:
    """Values of templates/kernels/mma_sync/decode/decode.cu.j2.

    headers: what it includes, in order. fragments: C++ of the structs that are used; masks to
    softmax: the same by role, scores None where there are none. operands: what is copied.

    head_dim_qk, head_dim_v: columns. element: C++ type of queries and the output; kv_element: of
    keys and values, each of element_bytes; weight_element: of weights. packed: whether sequences
    of queries lie behind each other; ragged: whether those of queries differ in length. max_logit:
    whether each head's largest score is kept.

    row_tiles: of 16 rows, which the warps of a CTA divide. shares_keys: whether there are several,
    for which keys are there once; member: C++, the warp's number among those of the same rows;
    sync_keys: C++, what waits for all that have the warp's keys. warps: of a CTA; warp_keys: a
    block's, of each; stages: buffers of these. divides_columns: whether warps divide the output's
    columns, not keys alone; columns: C++, of a warp. smem: regions of shared memory. threads: of a
    CTA; ctas: of an SM. starts_next: whether the kernel behind may be there before this one ends.

    What output stores have in common with others': scale_log2: C++, what makes log2 units of a
    product of Q and K; part_scale: C++, what a part of the output is multiplied by; widens: whether
    keys and values of 8 bits are widened to 16, keys to the queries' format, values to float16;
    last_box_may_miss: whether columns of the last warp may lie past the end; first_columns: C++,
    whether the warp has the first columns of its rows.
    """

    kernel: KernelView
    headers: tuple[str, ...]
    fragments: tuple[str, ...]
    masks: MaskListView
    scores: ScoreListView | None
    q_seq: FragmentView
    kv_seq: FragmentView
    kv_iter: FragmentView
    softmax: FragmentView
    operands: tuple[Operand, ...]
    head_dim_qk: int
    head_dim_v: int
    element: str
    kv_element: str
    element_bytes: int
    weight_element: str
    packed: bool
    ragged: bool
    max_logit: bool
    row_tiles: int
    shares_keys: bool
    member: str
    sync_keys: str
    warps: int
    warp_keys: int
    stages: int
    divides_columns: bool
    columns: str
    smem: tuple[SmemRegion, ...]
    threads: int
    ctas: int
    starts_next: bool
    scale_log2: str
    part_scale: str
    widens: bool
    last_box_may_miss: bool
    first_columns: str


def decode_view(
    problem: Problem,
    plan: DecodePlan,
    kernel: KernelView,
    uses: dict[str, list[FragmentUse]],
    fragments: tuple[str, ...],
) -> MmaDecodeView:
    """The view of the kernel that reads the keys of `problem` as its plan says."""
    unit, of_unit = (16, "kVSteps") if plan.divides_columns else (8, "kOutputTiles")
    if plan.divides_columns and problem.widens:  # bytes of two steps are turned at once
        unit, of_unit = 32, "ceil_div(kVSteps, 2)"
    shares = plan.row_tiles > 1
    member = "member()" if shares else "warp"
    several = ("mask", "asked", "score")
    single = {role: fragment_view(uses[role][0]) for role in uses if role not in several}
    return MmaDecodeView(
        kernel=kernel,
        headers=headers_of(problem),
        fragments=fragments,
        masks=mask_list_view(uses["mask"]),
        scores=score_list_view(uses["score"], uses["mask"]),
        q_seq=single["q_seq"],
        kv_seq=single["kv_seq"],
        kv_iter=single["kv_iter"],
        softmax=single["softmax"],
        operands=tuple(operand_of(problem, name, uses) for name in "kv"),
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        element=CPP_ELEMENTS[problem.dtype_q],
        kv_element=CPP_ELEMENTS[problem.dtype_kv],
        element_bytes=DTYPE_BYTES[problem.dtype_kv],
        weight_element="Fp16" if problem.widens else "Element",
        packed=problem.q_seq == "packed",
        ragged=problem.q_seq != "dense",
        max_logit=problem.max_logit,
        row_tiles=plan.row_tiles,
        shares_keys=shares,
        member=member,
        sync_keys="__syncthreads()" if shares else "__syncwarp()",
        warps=plan.warps,
        warp_keys=plan.warp_keys,
        stages=plan.stages,
        divides_columns=plan.divides_columns,
        columns=f"ceil_div({of_unit}, kRowWarps) * {unit}",
        smem=plan.smem,
        threads=plan.threads,
        ctas=plan.ctas,
        starts_next="griddepcontrol" in TARGETS[plan.arch].instructions,
        scale_log2="scale_log2" if problem.widens else "p.scale_log2",
        part_scale="output_scale" if problem.widens else "1.f",
        widens=problem.widens,
        last_box_may_miss=problem.head_dim_v % (unit * plan.row_warps) != 0,
        first_columns=f"{member} == 0",
    )


def headers_of(problem: Problem) -> tuple[str, ...]:
    """Headers that the kernel includes, in their order."""
    wanted = {
        "context.cuh": True,
        "copy/warp_rows.cuh": True,
        "maximum.cuh": problem.max_logit,
        "mma/atoms.cuh": True,
        "mma/fragment.cuh": True,
        "ptx/barrier.cuh": True,
        "ptx/global.cuh": True,
        "ptx/math.cuh": True,
        "ptx/matrix_move.cuh": True,
        "ptx/tma.cuh": True,  # the type of maps, of which it has none
        "scale.cuh": problem.widens,
        "scheduler/kv_blocks.cuh": True,
        "scheduler/packed_tiles.cuh": problem.q_seq == "packed",
        "scheduler/splits.cuh": True,
        "softmax/online.cuh": True,
        "softmax/row.cuh": True,
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)

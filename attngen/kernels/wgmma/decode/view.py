"""View, decode: what the template of the kernel that splits the keys reads."""

from __future__ import annotations

from dataclasses import dataclass

from ....spec.problem import Problem
from ...base import SmemRegion
from ...uses import FragmentUse
from ...view import (
    CPP_ELEMENTS,
    MMA_ELEMENTS,
    FragmentView,
    KernelView,
    MaskListView,
    ScoreListView,
    fragment_view,
    mask_list_view,
    score_list_view,
)
from .plan import DecodePlan

MMA_DEPTH = 16  # of a product's reduction, in 16-bit elements
LONGEST_CHAIN, SHORT_CHAIN = 16, 4  # products in one statement; of longer ones, in several
USED_STAGES = 2  # enough on the way where two CTAs share an SM


@dataclass(frozen=True)
class CopyLoop:
    """A loop that copies blocks of keys and values to shared memory.

    paced: whether it counts what it reads and waits for CTAs that are behind. waits_together:
    whether, where SMs have unequal numbers of CTAs, it waits for room for a block's keys and
    values before it copies either. stages: C++, how many stages it uses, empty for all.
    """

    paced: bool
    waits_together: bool
    stages: str


@dataclass(frozen=True)
class DecodeView:
    """Values of templates/kernels/wgmma/decode/decode.cu.j2.

    headers: names under attngen/, without ending, in the order in which they are included.
    fragments: C++ of the structs that are used; masks to softmax: the same by role, scores None
    where there are none.

    head_dim_qk, head_dim_v: columns. element: C++ type of queries and the output; kv_element: of
    keys and values as they lie; weight_element: of weights. widens: whether keys and values of 8
    bits are widened to 16 under the product before theirs, keys to the queries' format, values to
    float16, beside which weights are the more exact. paged: whether they lie in pages. packed:
    whether sequences of queries lie behind each other, kv_packed: those of keys and values; ragged:
    whether those of queries differ in length.
    max_logit: whether each head's largest score is kept.

    block_keys: keys a block; stages: buffers; smem: regions of shared memory. consumers:
    warpgroups that compute; columns: of the output, of each; last_box_may_miss: whether the last
    one's may lie past the end. threads: of a CTA; ctas: of an SM. gives_registers: whether the
    loader, then a warpgroup, keeps loader_registers, and consumers have consumer_registers.

    qk_mma_element, pv_mma_element: elements of the two products, as PTX names them; qk_chains,
    pv_chains: how many products of their sums stand in one statement. scale_log2: C++, what makes
    log2 units of a product of Q and K; part_scale: C++, what a part of the output is multiplied by.
    key_boxes: C++, boxes of a block of keys as loaded.

    first_columns: C++, whether the warp has the first columns of its rows.

    spares_stages: whether a CTA that shares its SM leaves stages unused. evens_loads: whether
    loaders ask whether SMs have unequal numbers of CTAs. free_loop: the loop of a loader whom
    nobody waits for; paced_loop: of one that may wait for others, None where none does.
    """

    kernel: KernelView
    headers: tuple[str, ...]
    fragments: tuple[str, ...]
    masks: MaskListView
    scores: ScoreListView | None
    q_seq: FragmentView
    kv_seq: FragmentView
    kv_fetch: FragmentView
    v_fetch: FragmentView
    kv_iter: FragmentView
    softmax: FragmentView
    head_dim_qk: int
    head_dim_v: int
    element: str
    kv_element: str
    weight_element: str
    widens: bool
    paged: bool
    packed: bool
    kv_packed: bool
    ragged: bool
    max_logit: bool
    block_keys: int
    stages: int
    smem: tuple[SmemRegion, ...]
    consumers: int
    columns: int
    last_box_may_miss: bool
    threads: int
    ctas: int
    gives_registers: bool
    loader_registers: int
    consumer_registers: int
    qk_mma_element: str
    pv_mma_element: str
    qk_chains: tuple[int, ...]
    pv_chains: tuple[int, ...]
    scale_log2: str
    part_scale: str
    first_columns: str
    key_boxes: str
    spares_stages: bool
    evens_loads: bool
    free_loop: CopyLoop
    paced_loop: CopyLoop | None


def decode_view(
    problem: Problem,
    plan: DecodePlan,
    kernel: KernelView,
    uses: dict[str, list[FragmentUse]],
    fragments: tuple[str, ...],
) -> DecodeView:
    """The view of the kernel that reads the keys of `problem` as its plan says."""
    widens = problem.widens
    several = ("mask", "asked", "score")
    single = {role: fragment_view(uses[role][0]) for role in uses if role not in several}
    return DecodeView(
        kernel=kernel,
        headers=headers_of(problem, plan),
        fragments=fragments,
        masks=mask_list_view(uses["mask"]),
        scores=score_list_view(uses["score"], uses["mask"]),
        q_seq=single["q_seq"],
        kv_seq=single["kv_seq"],
        kv_fetch=single["kv_fetch"],
        v_fetch=single["v_fetch"],
        kv_iter=single["kv_iter"],
        softmax=single["softmax"],
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        element=CPP_ELEMENTS[problem.dtype_q],
        kv_element=CPP_ELEMENTS[problem.dtype_kv],
        weight_element="WeightElement" if widens else "Element",
        widens=widens,
        paged=problem.paged,
        packed=problem.q_seq == "packed",
        kv_packed=problem.kv_seq == "packed",
        ragged=problem.q_seq != "dense",
        max_logit=problem.max_logit,
        block_keys=plan.tile.n,
        stages=plan.stages,
        smem=plan.smem,
        consumers=plan.consumers,
        columns=plan.columns,
        last_box_may_miss=plan.consumers * plan.columns > problem.head_dim_v,
        threads=plan.threads,
        ctas=plan.ctas,
        gives_registers=plan.consumers > 1,
        loader_registers=plan.loader_registers,
        consumer_registers=plan.consumer_registers,
        qk_mma_element=MMA_ELEMENTS[problem.dtype_q],
        pv_mma_element="f16" if widens else MMA_ELEMENTS[problem.dtype_q],
        qk_chains=chains_of(problem.head_dim_qk),
        pv_chains=(plan.tile.n // MMA_DEPTH,),
        scale_log2="scale_log2" if widens else "p.scale_log2",
        part_scale="output_scale" if widens else "1.f",
        first_columns="warp < 4",
        key_boxes="kKBoxes" if widens else "kQkBoxes",
        spares_stages=spares_stages(problem, plan),
        evens_loads=evens_loads(problem, plan),
        free_loop=copy_loop(problem, plan, paced=False),
        paced_loop=copy_loop(problem, plan, paced=True) if paces(plan) else None,
    )


def spares_stages(problem: Problem, plan: DecodePlan) -> bool:
    """Whether two CTAs that share an SM have enough on the way with two of their stages each."""
    return plan.ctas > 1 and plan.stages > USED_STAGES and not problem.widens


def evens_loads(problem: Problem, plan: DecodePlan) -> bool:
    """Whether loaders ask if some SMs have two CTAs and others one. These take less of the memory
    from those where all wait for room for a block's keys and values before they copy either."""
    return plan.ctas > 1 and not problem.widens


def paces(plan: DecodePlan) -> bool:
    """Whether CTAs with an SM each may wait for those that have read less."""
    return any(region.name == "Pace" for region in plan.smem)


def copy_loop(problem: Problem, plan: DecodePlan, *, paced: bool) -> CopyLoop:
    """The loop of loaders that wait for others, where CTAs have an SM each, or of all others."""
    return CopyLoop(
        paced=paced,
        waits_together=evens_loads(problem, plan) and not paced,
        stages="stages" if spares_stages(problem, plan) and not paced else "",
    )


def chains_of(head_dim: int) -> tuple[int, ...]:
    """Lengths of the chains of products, by one for each that differs, along `head_dim` columns.
    One statement has a short sum whole, of a long one a few products, or what is left of it."""
    steps = -(-head_dim // MMA_DEPTH)
    if steps <= LONGEST_CHAIN:
        return (steps,)
    return (SHORT_CHAIN, steps % SHORT_CHAIN or SHORT_CHAIN)


def headers_of(problem: Problem, plan: DecodePlan) -> tuple[str, ...]:
    """The headers that the kernel includes, in their order."""
    used = {
        "context": True,
        "copy/paged_blocks": problem.paged,
        "maximum": problem.max_logit,
        "mma/fragment": True,
        "mma/gemm": True,
        "mma/widen": problem.widens,
        "ptx/barrier": True,
        "ptx/global": True,
        "ptx/math": True,
        "ptx/matrix_move": True,
        "ptx/tma": True,
        "scale": problem.widens,
        "scheduler/kv_blocks": True,
        "scheduler/pace": paces(plan),
        "scheduler/packed_tiles": problem.q_seq == "packed",
        "scheduler/splits": True,
        "softmax/online": True,
        "softmax/row": True,
    }
    return tuple(name for name, wanted in used.items() if wanted)

"""Problems and plans of a forward, from which tests of its view depart by one fact each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attngen.fragments import features
from attngen.kernels.base import Schedule, SmemRegion, Tile
from attngen.kernels.uses import FragmentUse, uses_of
from attngen.kernels.wgmma.forward.plan import Pipeline, Plan, SoftmaxOrder
from attngen.spec.problem import Problem

DENSE = Problem(
    direction="fwd",
    dtype_q="bf16",
    dtype_kv="bf16",
    dtype_o="bf16",
    head_dim_qk=128,
    head_dim_v=128,
    masks=(),
    scores=(),
    softmax="vanilla",
    q_seq="dense",
    kv_seq="dense",
    kv_fetch="tma",
    kv_iter="range",
)
FP8 = replace(DENSE, dtype_q="e4m3", dtype_kv="e4m3")
WIDENED = replace(DENSE, dtype_kv="e5m2")
GATHER = replace(DENSE, kv_fetch="gather")
PAGED = replace(DENSE, kv_fetch="page_tma")
PACKED = replace(DENSE, q_seq="packed", kv_seq="packed")
WINDOW = replace(DENSE, masks=("window",))
CAUSAL = replace(DENSE, masks=("causal",))
ALIBI = replace(CAUSAL, scores=("alibi",))
CAPPED = replace(DENSE, scores=("softcap",))
BIAS = replace(DENSE, scores=("post_scale_bias",))
MASKED = replace(DENSE, attn_mask=True)
PLAN = Plan(
    arch="sm_90a",
    family="sm90_fwd",
    tile=Tile(128, 64),
    pipeline=Pipeline(
        consumers=2,
        k_stages=3,
        v_stages=2,
        raw_stages=0,
        raw_keys=0,
        producer_registers=40,
        consumer_registers=232,
        take_turns=False,
        q_in_registers=False,
        output_over_q=False,
    ),
    schedule=Schedule(
        dynamic=True, longest_first=True, kv_group_bytes=1 << 20, group_heads=8, tail_share=4
    ),
    softmax=SoftmaxOrder(8, rescale_first=False, pair_sums=True, quarters_ahead=1),
    promote_blocks=0,
    smem=(SmemRegion("O", 0, 1024), SmemRegion("Job", 1024, 24)),
    smem_bytes=1048,
    threads=384,
    operand_registers=0,
    why=(),
)
ORDER = SmemRegion("Order", 1048, 64)


def with_pipeline(plan: Plan = PLAN, **changes: Any) -> Plan:
    return replace(plan, pipeline=replace(plan.pipeline, **changes))


def with_softmax(plan: Plan = PLAN, **changes: Any) -> Plan:
    return replace(plan, softmax=replace(plan.softmax, **changes))


THREE = replace(with_pipeline(consumers=3, raw_stages=2, raw_keys=64), promote_blocks=30)
THREE = with_softmax(THREE, quarters_ahead=0, parts=1)
EVEN = replace(THREE, schedule=replace(PLAN.schedule, longest_first=False))
TURNS = with_pipeline(take_turns=True)
FEW = replace(PLAN, smem=(*PLAN.smem, ORDER))
ROWS = replace(PLAN, smem=PLAN.smem[1:])
EAGER = with_softmax(lazy_rescale_log2=0, quarters_ahead=0)


def uses_in(problem: Problem) -> dict[str, list[FragmentUse]]:
    return uses_of(problem, features.scan())

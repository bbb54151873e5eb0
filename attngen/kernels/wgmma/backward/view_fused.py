"""View, backward: values of the template of the kernel that makes all three gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...mask_view import pair_mask_view
from ...support.view_parts import Uses, included
from ...uses import hides_past
from .bias_gradient import sums_keys
from .feasible import fused_lines
from .plan import BackwardPlan
from .view import KeyTilesView, key_tiles_fields, own_dv
from .view_main import MMA_DEPTH, Product, main_fields, main_headers, score_product


@dataclass(frozen=True)
class AwaitedRows:
    """Rows of a block that a consumer awaits. full: C++, the barrier of the first stage; ring: the
    consumer's place among stages."""

    full: str
    ring: str


@dataclass(frozen=True)
class FusedArrivals:
    """How often barriers of the fused kernel are arrived at, beside bytes.

    kept: at those of a tile's keys and values; queries, output_gradients: of a block of these, C++;
    freed_output_gradients: of each consumer at those of stages that are free; dq: of a consumer's
    part of dQ that is there; loaders: by loaders and reducers, at that of a job that has been read.
    """

    kept: int
    queries: int
    output_gradients: str
    freed_output_gradients: int
    dq: int
    loaders: int


@dataclass(frozen=True, kw_only=True)
class FusedView(KeyTilesView):
    """Values of fused.cu.j2. Strings are C++.

    q_stages, do_stages, ds_stages: buffers for blocks of queries, output gradients and dS.
    splits_rows: whether consumers divide dQ's rows, else its columns. one_sum: whether dK and dV
    have as many columns. held_steps: of 16 columns of keys that consumers have in registers.

    completes: whether the last tile of a block stores its dQ. joins_last: whether a tile hands over
    its last part of dQ after all else. deterministic: whether tiles add to dQ in an order, which
    begins with the last keys if descending. starts_early: whether reducers await the kernel before.
    own_dv: whether dV is staged in a place of its own. adds_bias: whether dS is added to the
    gradient of a bias; scales_ds: whether it is scaled, as that of a bias before the scale is.
    sums_bias: whether sums of dS by keys are that gradient; bias_factor: what they are multiplied
    by; bias_by_block: whether they are left after each block, else after each head, as registers
    are few; sums_by_key: whether consumers have such sums, for that or for what a score learns.

    skips: whether a consumer leaves blocks alone whose queries see none of its keys. with_d: rows
    with which D comes, awaited first; without_d: the others. LSE of blocks of which consumers make
    D is there when output gradients are, too: whoever needs it awaits both. draws_early,
    draws_late: whether dropped weights are drawn under the products of scores, or behind them where
    registers are fewer. packs_weights: whether weights are packed before their gradients come.
    heads_matter: whether anything changes from one query head to the next. learned: the name of a
    score that learns by sums of keys, else empty; key_sums: C++, the type of what adds these.
    lined: the name of a score that has lines of queries or distances, else empty; lines: C++, their
    type.

    prefetched: parameters that map tensors. dk_factor, dv_factor: what sums are multiplied by.
    """

    q_stages: int
    do_stages: int
    ds_stages: int
    splits_rows: bool
    dq_product: Product
    one_sum: bool
    held_steps: int
    completes: bool
    joins_last: bool
    deterministic: bool
    descending: bool
    starts_early: bool
    own_dv: bool
    adds_bias: bool
    scales_ds: bool
    sums_bias: bool
    bias_factor: str
    bias_by_block: bool
    sums_by_key: bool
    skips: bool
    with_d: AwaitedRows
    without_d: AwaitedRows
    draws_early: bool
    draws_late: bool
    packs_weights: bool
    heads_matter: bool
    learned: str
    key_sums: str
    lined: str
    lines: str
    prefetched: tuple[str, ...]
    arrivals: FusedArrivals
    dk_factor: str
    dv_factor: str


def fused_view(
    problem: Problem, plan: BackwardPlan, kernel: KernelEntry, uses: Uses, root: Path
) -> FusedView:
    """Decide what fused.cu.j2 renders. uses: its fragments by role."""
    fields = main_fields(problem, plan, kernel, uses, root)
    rows = (AwaitedRows("kQFull", "q_ring"), AwaitedRows("kDoFull", "do_ring"))
    with_d, without_d = rows if plan.frees_early else rows[::-1]
    large_blocks = _large_blocks(plan)
    before_scale = "pre_scale_bias" in problem.scores
    scales_ds = plan.adds_bias and before_scale
    steps = (plan.tile.m // MMA_DEPTH,)
    traced = next((x.fragment.name for x in uses["score"] if x.fragment.program), "")
    learns, lines = sums_keys(problem), fused_lines(problem)
    if lines:
        numbers = ", ".join(map(str, lines))
        place = f"TurnedPlace<{hides_past(uses['mask'])}, {numbers}>"
        fields["scores"] = replace(
            fields["scores"], list=replace(fields["scores"].list, place=place)
        )
    return FusedView(
        **fields,
        **key_tiles_fields(problem, plan, boxed_scores=True),
        headers=_headers(problem, plan),
        pair_mask=pair_mask_view(problem, uses, of_keys=True),
        score_product=score_product(problem, plan.tile.m, plan.held_steps),
        dk_product=Product(plan.dk_columns, steps),
        dv_product=Product(plan.dv_columns, steps),
        dq_product=Product(plan.dq_columns, (plan.tile.n // MMA_DEPTH,)),
        q_stages=plan.q_stages,
        do_stages=plan.do_stages,
        ds_stages=plan.ds_stages,
        splits_rows=plan.dq_split == "rows",
        one_sum=plan.dk_columns == plan.dv_columns,
        held_steps=plan.held_steps,
        completes=plan.completes,
        joins_last=joins_last(problem, plan),
        deterministic=plan.deterministic,
        descending=plan.descending,
        starts_early=plan.starts_early,
        own_dv=own_dv(plan),
        adds_bias=plan.adds_bias,
        scales_ds=scales_ds,
        sums_bias=plan.sums_bias,
        bias_factor=_product_of("p.scale" if before_scale else ""),
        bias_by_block=plan.sums_bias and large_blocks,
        sums_by_key=learns or plan.sums_bias,
        skips=skips_blocks(problem, plan),
        with_d=with_d,
        without_d=without_d,
        draws_early=problem.dropout and not large_blocks,
        draws_late=problem.dropout and large_blocks,
        packs_weights=not (problem.dropout or fields["scores"].bend),
        heads_matter=bool(problem.scores) or problem.dropout or problem.attn_mask,
        learned=traced if learns else "",
        key_sums=f"LineSums<{str(problem.deterministic).lower()}>",
        lined=traced if lines else "",
        lines=f"ScoreLines<kTileM, {numbers}, true>" if lines else "",
        prefetched=_prefetched(problem, plan),
        arrivals=arrivals_of(problem, plan),
        dk_factor=_product_of("" if scales_ds else "p.scale", "p.keep_scale" * problem.dropout),
        dv_factor=_product_of("p.keep_scale" * problem.dropout),
    )


def _headers(problem: Problem, plan: BackwardPlan) -> str:
    """Lines that include the headers of what the kernel does."""
    headers = main_headers(problem, keys_as_rows=True, makes_d=plan.makes_d)
    learns, lines = sums_keys(problem), bool(fused_lines(problem))
    more = included(("learned_sums.cuh", learns), ("score_lines.cuh", lines))
    return "\n".join(filter(None, [headers, more]))


def joins_last(problem: Problem, plan: BackwardPlan) -> bool:
    """Whether a tile hands over its last part of dQ after all else: the sums that join it come
    meanwhile, and the next tile's keys. Lengths and scores leave no registers for that beside
    blocks of 128 queries."""
    crowded = problem.varlen and bool(problem.scores) and _large_blocks(plan)
    return plan.completes and not crowded


def skips_blocks(problem: Problem, plan: BackwardPlan) -> bool:
    """Whether a warpgroup leaves blocks alone whose queries see none of its keys, two of ten under
    a window of 512 keys; beside what needs registers it computes zeros."""
    crowded = problem.scores or problem.attn_mask or problem.dropout or problem.gather
    return plan.completes or ("window" in problem.masks and not crowded)


def arrivals_of(problem: Problem, plan: BackwardPlan) -> FusedArrivals:
    """How often barriers are arrived at: where warps copy rows by all their threads."""
    made_here = "1 + kFirstThreads" if plan.makes_d else "1"
    return FusedArrivals(
        kept=32 if problem.gather else 1,
        queries=33 if problem.gather else 1,
        output_gradients="33" if problem.gather else made_here,
        freed_output_gradients=4 if plan.frees_early else 128,
        dq=128 if plan.completes else 4,
        loaders=34 if problem.gather else 3,
    )


def _large_blocks(plan: BackwardPlan) -> bool:
    """Whether blocks of queries leave few registers."""
    return plan.tile.m > 64


def _prefetched(problem: Problem, plan: BackwardPlan) -> tuple[str, ...]:
    if problem.gather:
        return ()
    tensors = ["q", "k", "v", "d_o", *(() if problem.wide_gradients else ("dk", "dv"))]
    tensors += ["o"] if plan.makes_d else []
    tensors += ["dq"] if plan.completes else []
    return tuple(f"map_{tensor}" for tensor in tensors)


def _product_of(*factors: str) -> str:
    """The product of these factors but empty ones, C++."""
    return " * ".join(factor for factor in factors if factor) or "1.f"

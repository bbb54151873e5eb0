"""View, backward: values of the templates of the kernels that make dQ, dK and dV."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...mask_view import pair_mask_view
from ...support.view_parts import Uses
from ...view import TensorView, tensor_view
from .plan import OF_KEYS, BackwardPlan
from .view_jobs import Gap, JobsView, VisitsView, gaps_of, jobs_view, visits_view
from .view_main import (
    MMA_DEPTH,
    MainView,
    Product,
    main_fields,
    main_headers,
    score_product,
)
from .wide import AHEAD_BLOCKS, cta_columns, forgets_rows


@dataclass(frozen=True)
class Fetch:
    """How rows of operands come. queries, keys: C++, the struct that fetches these. halves: whether
    a CTA has half of the columns, and adds what the other of a pair makes of its own; ahead:
    whether they send this a block ahead; forgets: whether what follows from a row's number is
    worked out with each block. lane, thread: C++, the thread's number in its warp and warpgroup,
    read anew where there is no register to keep it in."""

    queries: str
    keys: str
    halves: bool
    ahead: bool
    forgets: bool
    lane: str = "lane"
    thread: str = "(warp * 32 + lane)"


WHOLE = Fetch("TmaFetch", "KvFetch", halves=False, ahead=False, forgets=False)
ANEW = "lane_id()", "(threadIdx.x % 128)"


@dataclass(frozen=True)
class DqArrivals:
    """How often barriers of the dQ kernel are arrived at, beside bytes.

    queries: at that of a tile's queries and output gradients; block: of a block of keys or values;
    loaders: by those who load, at that of a job that has been read.
    """

    queries: int
    block: int
    loaders: int


@dataclass(frozen=True, kw_only=True)
class DqView(MainView):
    """Values of dq.cu.j2. Strings are C++.

    varlen: whether lengths vary. k_stages, v_stages: buffers for blocks of keys and of values.
    stores_rows: whether the gradient goes to memory from registers. gaps: gradients of which rows
    of no sequence are filled. fetch: how rows come. dq_steps: of the product that adds a block to
    dQ. dq: the gradient. dq_factor: what its sums are multiplied by. first_key_block,
    next_key_block: the first block of keys that a tile visits, and from one to the next;
    begin_of_keys: the first where it is known. drops_by_bits: whether bits say what is dropped, as
    signs do not.
    """

    varlen: bool
    drops_by_bits: bool
    jobs: JobsView
    stores_rows: bool
    gaps: tuple[Gap, ...]
    k_stages: int
    v_stages: int
    dq_product: Product
    arrivals: DqArrivals
    dq: TensorView
    dq_factor: str
    first_key_block: str
    next_key_block: str
    begin_of_keys: str
    fetch: Fetch


@dataclass(frozen=True)
class KeptOperand:
    """An operand of a tile of keys that stays in shared memory for all blocks that it visits.

    name: C++, in names of constants (`kSmemK`, `kKFull`); map: the parameter that maps it; boxes:
    C++, how many of 64 columns it has.
    """

    name: str
    map: str
    boxes: str


@dataclass(frozen=True, kw_only=True)
class KeyTilesView(MainView):
    """Values of templates of kernels whose CTAs own tiles of keys. Strings are C++.

    varlen: whether lengths vary. stores_rows: whether gradients go to memory from registers. gaps:
    gradients of which rows of no sequence are filled. kept: operands of a tile, in the order in
    which they are loaded. makes_d: whether consumers make D and LSE of a tile's first blocks.
    splits_heads: whether query heads of a group may have tiles of their own. frees_early: whether
    output gradients are freed before queries, with which D comes then. loads_score_tiles: whether
    the copy engine brings what scores read. awaits_at_start: whether the loader of queries waits
    for the kernel before, once. tells_visits: whether it tells consumers which block comes next, of
    those that a mask made before shows. dk, dv: the gradients. fetch: how rows come.
    """

    varlen: bool
    jobs: JobsView
    stores_rows: bool
    gaps: tuple[Gap, ...]
    visits: VisitsView
    kept: tuple[KeptOperand, ...]
    makes_d: bool
    splits_heads: bool
    frees_early: bool
    loads_score_tiles: bool
    awaits_at_start: bool
    tells_visits: bool
    dk: TensorView
    dv: TensorView
    dk_product: Product
    dv_product: Product
    fetch: Fetch


@dataclass(frozen=True)
class DkvArrivals:
    """How often barriers of the dK and dV kernel are arrived at, beside bytes.

    kept: at those of a tile's keys and values; block: of a block of queries or output gradients;
    loader: by the one who loads blocks, at that of a job that has been read.
    """

    kept: int
    block: int
    loader: int


@dataclass(frozen=True, kw_only=True)
class DkvView(KeyTilesView):
    """Values of dkv.cu.j2. Strings are C++.

    stages: buffers for blocks of queries, and as many for output gradients. one_consumer: whether
    one code serves both warpgroups, since head dims agree. slopes_type: of the slopes that are
    handed over, where scores bend. marks_slopes: whether these say which weights are dropped.
    follows_heads: whether a consumer keeps the query head at hand; heads_matter: whether anything
    changes from one to the next. kept_rows: rows of a tile of dQ that is made of what this kernel
    leaves in memory of dS, 0 where it cannot. held_steps: of 16 columns of a tile's keys, or
    values, that a consumer has in registers, too.
    """

    stages: int
    one_consumer: bool
    slopes_type: str
    marks_slopes: bool
    follows_heads: bool
    heads_matter: bool
    arrivals: DkvArrivals
    kept_rows: int
    held_steps: int


def fetch_of(plan: BackwardPlan, problem: Problem) -> Fetch:
    if not plan.pairs:
        return WHOLE
    forgets, ahead = forgets_rows(problem), plan.sends_ahead
    found = Fetch("HalfFetch", "HalfFetch", halves=True, ahead=ahead, forgets=forgets)
    if plan.family == OF_KEYS and ahead and problem.varlen and plan.tile.m == AHEAD_BLOCKS[0][0]:
        lane, thread = ANEW
        return replace(found, lane=lane, thread=thread)
    return found


def dq_view(
    problem: Problem, plan: BackwardPlan, kernel: KernelEntry, uses: Uses, root: Path
) -> DqView:
    """Decide what dq.cu.j2 renders. uses: its fragments by role."""
    ahead = "from<kTileN>"
    fields = main_fields(problem, plan, kernel, uses, root)
    return DqView(
        **fields,
        headers=main_headers(problem, pairs=plan.pairs),
        pair_mask=pair_mask_view(problem, uses),
        score_product=score_product(problem, plan.tile.n),
        fetch=fetch_of(plan, problem),
        varlen=problem.varlen,
        drops_by_bits=problem.dropout and fields["scores"].signed,
        jobs=jobs_view(problem, plan, "QueryLoader{p, smem}", idle_warp=1),
        stores_rows=problem.gather or problem.wide_gradients,
        gaps=gaps_of(problem, plan),
        k_stages=plan.q_stages,
        v_stages=plan.do_stages,
        dq_product=Product(cta_columns(problem)[0], (plan.tile.n // MMA_DEPTH,)),
        arrivals=DqArrivals(64, 32, 96) if problem.gather else DqArrivals(1, 1, 2),
        dq=tensor_view(problem, "dq"),
        dq_factor="p.scale * p.keep_scale" if problem.dropout else "p.scale",
        first_key_block=f"seen.{ahead}(job.block_begin)" if problem.listed else "job.block_begin",
        next_key_block=f"block = seen.{ahead}(block + 1)" if problem.listed else "++block",
        begin_of_keys="first_block" if problem.listed else "job.block_begin",
    )


KEYS = KeptOperand("K", "map_k", "kQkBoxes")
VALUES = KeptOperand("V", "map_v", "kVBoxes")


def key_tiles_fields(problem: Problem, plan: BackwardPlan, *, boxed_scores: bool) -> dict[str, Any]:
    """The fields of `KeyTilesView` beside those of `MainView` and products of gradients.

    boxed_scores: whether the copy engine brings what scores read, else consumers do.
    """
    loads_score_tiles = problem.bias and boxed_scores
    return {
        "fetch": fetch_of(plan, problem),
        "varlen": problem.varlen,
        "jobs": jobs_view(problem, plan, "KvLoader{p, smem}", idle_warp=3),
        "stores_rows": problem.gather or problem.wide_gradients,
        "gaps": gaps_of(problem, plan),
        "visits": visits_view(plan, looks_ahead=problem.bias and not boxed_scores),
        "kept": (VALUES, KEYS) if own_dv(plan) else (KEYS, VALUES),
        "makes_d": plan.makes_d,
        "splits_heads": plan.splits_heads,
        "frees_early": plan.frees_early,
        "loads_score_tiles": loads_score_tiles,
        "awaits_at_start": plan.starts_early and not plan.makes_d,
        "tells_visits": any(region.name == "Visits" for region in plan.smem),
        "dk": tensor_view(problem, "dk"),
        "dv": tensor_view(problem, "dv"),
    }


def own_dv(plan: BackwardPlan) -> bool:
    """Whether dV is staged in a place of its own, so that the next tile's values may come early."""
    return any(region.name == "Dv" for region in plan.smem)


def dkv_view(
    problem: Problem, plan: BackwardPlan, kernel: KernelEntry, uses: Uses, root: Path
) -> DkvView:
    """Decide what dkv.cu.j2 renders. uses: its fragments by role."""
    fields = main_fields(problem, plan, kernel, uses, root)
    bend, signed = fields["scores"].bend, fields["scores"].signed
    follows_heads = problem.dropout or problem.attn_mask or plan.kept_rows > 0
    steps = (plan.tile.m // MMA_DEPTH,)
    columns, columns_v = cta_columns(problem)
    return DkvView(
        **fields,
        **key_tiles_fields(problem, plan, boxed_scores=False),
        headers=main_headers(problem, keys_as_rows=True, pairs=plan.pairs),
        pair_mask=pair_mask_view(problem, uses, of_keys=True),
        score_product=score_product(problem, plan.tile.m, plan.held_steps, plan.held_steps),
        dk_product=Product(columns, steps),
        dv_product=Product(columns_v, steps),
        stages=plan.q_stages,
        one_consumer=columns == columns_v,
        slopes_type="Packed&" if problem.dropout else "const Packed&",
        marks_slopes=problem.dropout and bend and not signed,
        follows_heads=follows_heads,
        heads_matter=follows_heads or bool(problem.scores),
        arrivals=DkvArrivals(32, 33, 32) if problem.gather else DkvArrivals(1, 1, 1),
        kept_rows=plan.kept_rows,
        held_steps=plan.held_steps,
    )

"""View, backward: values of the template of the kernel that makes dQ of dS in memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...support.view_parts import Alias, ScoresView, SequenceView, Uses
from ...view import KernelView, MaskListView
from .kept import FIRST_COLUMNS, MOST_COLUMNS, dq_parts
from .plan import BackwardPlan
from .view_jobs import Gap, JobsView, gaps_of, jobs_view
from .view_main import BOX_COLUMNS, MMA_DEPTH, Constant, Product, main_fields, main_headers


@dataclass(frozen=True, kw_only=True)
class KeptView:
    """Values of dq_kept.cu.j2. Strings are C++.

    Fields up to `kv_alias` as of `MainView`; varlen, jobs, gaps as of `DqView`. in_parts: whether a
    tile has a part of dQ's columns, `head_dim_qk` of `all_columns`. stages: buffers for blocks of
    keys with their dS. first_product: what adds a block to dQ; rest_product: the same of the
    columns behind, if an instruction cannot have all. dq_factor: what dQ's sums are multiplied by.
    """

    kernel: KernelView
    threads: int
    headers: str
    structs: str
    element: str
    mma_element: str
    head_dim_qk: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    consumers: int
    producer_registers: int
    consumer_registers: int
    smem: tuple[Constant, ...]
    masks: MaskListView
    scores: ScoresView
    queries: SequenceView
    keys: SequenceView
    kv_alias: Alias
    varlen: bool
    jobs: JobsView
    gaps: tuple[Gap, ...]
    in_parts: bool
    all_columns: int
    stages: int
    first_product: Product
    rest_product: Product | None
    dq_factor: str
    depth: int = MMA_DEPTH
    box_columns: int = BOX_COLUMNS


def kept_view(
    problem: Problem, plan: BackwardPlan, kernel: KernelEntry, uses: Uses, root: Path
) -> KeptView:
    """Decide what dq_kept.cu.j2 renders. uses: its fragments by role, without scores'."""
    steps = (plan.tile.n // MMA_DEPTH,)
    parts, columns = dq_parts(problem)
    first = columns if columns <= MOST_COLUMNS else FIRST_COLUMNS
    names = {field.name for field in dataclasses.fields(KeptView)}
    fields = main_fields(problem, plan, kernel, uses, root) | {"head_dim_qk": columns}
    return KeptView(
        **{name: value for name, value in fields.items() if name in names},
        headers=main_headers(problem, stores=True),
        varlen=problem.varlen,
        jobs=jobs_view(problem, plan, "[](const Job&) {}", halves=parts > 1),
        gaps=gaps_of(problem, plan),
        in_parts=parts > 1,
        all_columns=problem.head_dim_qk,
        stages=plan.q_stages,
        first_product=Product(first, steps),
        rest_product=Product(columns - first, steps) if columns > first else None,
        dq_factor="p.scale * p.keep_scale" if problem.dropout else "p.scale",
    )

"""View, backward: what the templates of the kernels read that make dQ, dK and dV."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...view import TensorView, tensor_view
from .plans import BackwardPlan
from .view_jobs import Gap, JobsView, gaps_of, jobs_view
from .view_main import MainView, Product, main_fields, main_headers, score_product
from .view_parts import Uses


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
    """What dq.cu.j2 reads. Strings are C++.

    k_stages, v_stages: buffers for blocks of keys and of values. gaps: gradients of which rows of
    no sequence are filled. dq_steps: of the product that adds a block to dQ. dq: the gradient.
    dq_factor: what its sums are multiplied by.
    """

    jobs: JobsView
    gaps: tuple[Gap, ...]
    k_stages: int
    v_stages: int
    dq_product: Product
    arrivals: DqArrivals
    dq: TensorView
    dq_factor: str


def dq_view(
    problem: Problem, plan: BackwardPlan, kernel: KernelEntry, uses: Uses, root: Path
) -> DqView:
    """What dq.cu.j2 reads. uses: fragments of the backward. root: the templates' directory."""
    return DqView(
        **main_fields(problem, plan, kernel, uses, root),
        headers=main_headers(problem),
        mask_tensor="mask_rows" if problem.attn_mask else "",
        score_product=score_product(problem, plan.tile.n),
        jobs=jobs_view(problem, plan, "QueryLoader{p, smem}", idle_warp=1),
        gaps=gaps_of(problem, plan),
        k_stages=plan.q_stages,
        v_stages=plan.do_stages,
        dq_product=Product(problem.head_dim_qk, (plan.tile.n // 16,)),
        arrivals=DqArrivals(64, 32, 96) if problem.gather else DqArrivals(1, 1, 2),
        dq=tensor_view(problem, "dq"),
        dq_factor="p.scale * p.keep_scale" if problem.dropout else "p.scale",
    )

"""View, backward: values of the template of the kernel that makes the gradient of a bias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ....runtime.program import KernelEntry
from ....spec.problem import Problem
from ...mask_view import pair_mask_view
from ...params import BOX_BYTES
from ...support.view_parts import Uses, included
from ...view import CPP_ELEMENTS
from .fp8_choices import STEP, steps_of
from .fp8_view import PtxTypes, eight_bit_scores, own_scale_s
from .plan import BiasGradientPlan
from .view_main import MainView, Product, main_fields, main_headers, whole_score_product

COPYING_ARRIVALS = 65  # two copies by a warp, and what its first lane announces


@dataclass(frozen=True, kw_only=True)
class BiasGradientView(MainView):
    """Values of dbias.cu.j2. Strings are C++.

    stages: buffers for queries with keys, and for output gradients with values, in turn.
    stage_arrivals: arrivals at the barrier of a stage, beside bytes. sloped: whether weights are
    times derivatives of scores: a bias inside a score that bends has dS times the derivatives of
    what comes after it for its gradient, one that is added last dS itself. drops_by_bits: whether
    bits say what is dropped, as signs of such weights do not. factor: what sums are multiplied by.
    ptx: types of operands in 8 bits, None of others. gradient_product: of output gradients and
    values; gradient: what it is for dP, at index `i`. unit: what makes scaled scores of products.
    boxes: arguments of a load of boxes.
    """

    stages: int
    stage_arrivals: int
    sloped: bool
    drops_by_bits: bool
    factor: str
    ptx: PtxTypes | None
    gradient_product: str
    gradient: str
    unit: str
    boxes: str


def bias_gradient_view(
    problem: Problem, plan: BiasGradientPlan, kernel: KernelEntry, uses: Uses, root: Path
) -> BiasGradientView:
    """Decide what dbias.cu.j2 renders. uses: its fragments by role."""
    fields = main_fields(problem, plan, kernel, uses, root)
    before_scale = "pre_scale_bias" in problem.scores
    scale = "p.scale" if before_scale else "1.f"
    made = BiasGradientView(
        **fields,
        headers=main_headers(problem),
        pair_mask=pair_mask_view(problem, uses),
        score_product=whole_score_product(problem, plan.tile.n),
        stages=plan.stages,
        stage_arrivals=COPYING_ARRIVALS if problem.gather else 1,
        sloped=before_scale and fields["scores"].bend,
        drops_by_bits=problem.dropout and before_scale and fields["scores"].signed,
        factor=f"{scale} * p.keep_scale" if problem.dropout else scale,
        ptx=None,
        gradient_product="ScoreMma",
        gradient="gradients[i]",
        unit="p.scale",
        boxes="kBoxes",
    )
    return _of_8_bits(problem, plan, uses, made) if problem.eight_bit else made


def _of_8_bits(
    problem: Problem, plan: BiasGradientPlan, uses: Uses, view: BiasGradientView
) -> BiasGradientView:
    """The view for operands in 8 bits: the kernel before has left weights scaled as they are
    stored, and rows whose LSE shows no sum have none of their own."""
    headers = ("dropout_bytes.cuh", problem.dropout), ("scale_gradients.cuh", True)
    steps = steps_of(problem.head_dim_qk), steps_of(problem.head_dim_v)
    return replace(
        view,
        headers="\n".join([view.headers, included(*headers)]),
        element=CPP_ELEMENTS[problem.dtype_bias],
        scores=eight_bit_scores(uses),
        score_product=Product(plan.tile.n, steps),
        depth=STEP,
        box_columns=BOX_BYTES,
        factor=f"1.f / scale_of_weights(p.scale_s, {own_scale_s(problem)})",
        ptx=PtxTypes(problem.dtype_q, problem.dtype_kv, problem.dtype_of("d_o")),
        gradient_product="GradientMma",
        gradient="gradients[i] * of_gradients",
        unit="scale_log2 * kLn2",
        boxes=f"kBoxes, {BOX_BYTES}",
    )

"""Problems of a backward, from which tests of its views depart by one fact each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attngen.fragments import features
from attngen.io import files
from attngen.kernels.plan import plans
from attngen.kernels.support import render_around
from attngen.kernels.support.family import AROUND
from attngen.kernels.wgmma.backward import render
from attngen.spec.problem import Problem
from attngen.targets.target import DEFAULT

DENSE = Problem(
    direction="bwd",
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
SMALL = replace(DENSE, head_dim_qk=64, head_dim_v=64)
LARGE = replace(DENSE, head_dim_qk=256, head_dim_v=256)
UNLIKE = replace(DENSE, head_dim_qk=192, head_dim_v=128)
CAUSAL = replace(DENSE, masks=("causal",))
WINDOW = replace(DENSE, masks=("window",))
ORDERED = replace(DENSE, deterministic=True)
ORDERED_WINDOW = replace(WINDOW, deterministic=True)
PACKED = replace(DENSE, q_seq="packed", kv_seq="packed")
USED = replace(DENSE, kv_seq="used", kv_iter="range")
GATHER = replace(DENSE, kv_fetch="gather")
DROPOUT = replace(DENSE, dropout=True)
MASKED = replace(DENSE, attn_mask=True)
BIAS = replace(DENSE, scores=("post_scale_bias",))
SCALED_BIAS = replace(DENSE, scores=("pre_scale_bias",))
CAPPED = replace(DENSE, scores=("softcap",))
CAPPED_BIAS = replace(LARGE, scores=("pre_scale_bias", "softcap"))
LARGE_BIAS = replace(LARGE, scores=("post_scale_bias",))


def view_in(problem: Problem, family: str) -> Any:
    """The view of the problem's kernel of this family."""
    (plan,) = (plan for plan in plans(problem, DEFAULT.name) if plan.family == family)
    module: Any = render_around if family in AROUND else render
    view, _ = module.view_of(problem, plan, features.scan(), files.templates_dir())
    return view


def names_in(view: Any, *candidates: str) -> set[str]:
    """The fields among these that are set."""
    return {name for name in candidates if getattr(view, name)}


def headers_of(view: Any) -> list[str]:
    return [line.split('"')[1].removeprefix("attngen/") for line in view.headers.splitlines()]

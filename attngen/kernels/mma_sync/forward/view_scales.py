"""View: where a forward by products of warps finds scales of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ....spec.problem import Problem


@dataclass(frozen=True)
class ScalePlaces:
    """Scales of tokens. Strings are C++.

    q, k, v: where those of a tile's sequence begin; product: what a place says of its product,
    behind an element of a tile where there is one. All are empty where tokens have none.
    """

    q: str = ""
    k: str = ""
    v: str = ""
    product: str = ""


def scale_places_of(problem: Problem) -> ScalePlaces:
    """Where scales of tokens lie, and how a place says what its product is multiplied by."""
    if not problem.token_scales:
        return ScalePlaces()
    before = "" if problem.bias else ", 0.f"
    q, k, v = (_first_of(problem, name) for name in "qkv")
    return ScalePlaces(
        *(q, k, v),
        product=f"{before}, query_scale[m][half] * (i % 2 ? key_scale.y : key_scale.x)",
    )


def _first_of(problem: Problem, name: str) -> str:
    """C++: where the scales of a sequence begin."""
    side, kind = ("q", problem.q_seq) if name == "q" else ("kv", problem.kv_seq)
    if kind == "packed":
        return f"{side}_sequence(p).first_token(ctx.batch) * p.descale_{name}_stride_row"
    return f"ctx.batch * p.descale_{name}_stride_batch"

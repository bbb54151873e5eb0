"""View, rest: columns of the output that a second warpgroup has of a consumer's rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....spec.problem import Problem
from .plan import Plan
from .traits import rest_columns
from .view_consumer import Output, output_of

# Columns of an output that is there, which are read at once: all would spill beside 256.
JOINED = "32"


@dataclass(frozen=True)
class Rest:
    """Columns of the output that a second warpgroup has of the same rows. columns: how many, behind
    the first warpgroup's; output: how they leave."""

    columns: int
    output: Output


def rest_of(problem: Problem, plan: Plan) -> Rest | None:
    """Columns that a second warpgroup has of the output; None where there is none."""
    if not (columns := rest_columns(problem, plan)):
        return None
    leaves = replace(
        output_of(problem, plan),
        columns="kRestColumns",
        first_column="kOwnColumns",
        joined=JOINED,
        in_parts=True,
    )
    return Rest(columns, leaves)

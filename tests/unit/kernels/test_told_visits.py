"""Kernels that visit blocks of a made mask: who says which comes next, and where there is room."""

from __future__ import annotations

from typing import Any

import pytest

from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.kernels.plan import plans
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.problem import LISTED
from attngen.spec.resolve import resolve


def kernel_of(direction: str, family: str, **fields: Any) -> tuple[Any, str]:
    """The plan of a listed problem's kernel, and its source."""
    spec = AttentionSpec(head_dim=128, mask_mod=LISTED, directions=(direction,), **fields)
    problem, *_ = resolve(spec, features.scan())
    plan = next(each for each in plans(problem, "sm_90a") if each.family == family)
    return plan, render_problem(problem, plan).text


def regions_of(plan: Any) -> set[str]:
    return {region.name for region in plan.smem}


@pytest.mark.parametrize("fields", [{}, {"mask": "causal"}, {"layout": "thd_thd_thd"}])
def test_loaders_of_keys_tell_consumers_which_block_comes_next(fields) -> None:
    plan, text = kernel_of("fwd", "sm90_fwd", **fields)
    assert "Visits" in regions_of(plan)
    consumer = text.split("struct Consumer")[1]
    assert "take_next();" in consumer and "seen_keys(" not in consumer
    assert plan.softmax.lazy_rescale_log2 > 0  # as of plain calls: whole blocks have no bits


def test_consumers_find_blocks_where_threads_copy_rows() -> None:
    _, text = kernel_of("fwd", "sm90_fwd", gather=True)
    assert "find_next(ctx, row, block);" in text and "take_next();" not in text


def test_loaders_of_queries_tell_visits_where_consumers_have_registers_for_them() -> None:
    plan, text = kernel_of("bwd", "sm90_bwd")
    assert {"Visits", "Dv"} <= regions_of(plan)
    assert "for_each_block_ahead(p, job" in text.split("struct Consumer")[1]
    for fields in ({"window": True}, {"softcap": True}):
        plan, text = kernel_of("bwd", "sm90_bwd", **fields)
        assert not {"Visits", "Dv"} & regions_of(plan)
        assert "NextVisit" not in text

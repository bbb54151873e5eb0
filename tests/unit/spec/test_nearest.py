"""The nearest legal spec of any other."""

from __future__ import annotations

import pytest
from hypothesis import given

from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.resolve import find_violations, nearest, resolve
from tests.unit.spec.test_resolve import KNOWN, SPECS


@given(SPECS)
def test_nearest_any_spec_is_legal(spec: AttentionSpec) -> None:
    legal = nearest(spec, KNOWN)
    assert find_violations(legal, KNOWN) == []
    problems = resolve(legal, KNOWN)
    assert len(problems) >= 1 and legal.arch
    for problem in problems:
        assert len(set(problem.masks)) == len(problem.masks)


@pytest.mark.parametrize("dtype", ("int8", "fp64"))
@pytest.mark.parametrize("field", ("kv_dtype", "out_dtype"))
def test_nearest_dtype_without_kernels_changes_in_all_operands(dtype: str, field: str) -> None:
    spec = AttentionSpec(**{"head_dim": 64, "dtype": dtype, field: dtype})
    assert find_violations(nearest(spec, KNOWN), KNOWN) == []


@given(SPECS)
def test_nearest_fields_that_are_not_violated_stay(spec: AttentionSpec) -> None:
    violated = {violation.field for violation in find_violations(spec, KNOWN)}
    legal = nearest(spec, KNOWN)
    for field in vars(spec):
        if field not in violated and field not in ("kv_dtype", "out_dtype"):  # follow dtype
            assert getattr(legal, field) == getattr(spec, field)
    if not violated:
        assert resolve(spec, KNOWN)

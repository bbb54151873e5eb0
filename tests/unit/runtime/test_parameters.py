"""Parameters: each number that some kernel reads has one source, and each source is read."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import chain
from typing import get_args

import pytest

from attngen.call.append import TENSORS as OF_APPENDS
from attngen.call.fp8_checks import BACKWARD_SCALES
from attngen.call.fp8_gradients import MAXIMA
from attngen.call.fragment_values import PLACED
from attngen.call.ongoing import NAMES as OF_JOINS
from attngen.call.prepare.cast import POINTERS as OF_CASTS
from attngen.call.prepare.d_o import POINTERS as OF_BACKWARD_CASTS
from attngen.call.table import INPUTS
from attngen.compiler.builder import render_problem
from attngen.errors import PlanError
from attngen.fragments import features
from attngen.fragments.features import register_program
from attngen.fragments.program_text import parse_program
from attngen.io import files
from attngen.kernels.base import KernelPlan
from attngen.kernels.fill import Source
from attngen.kernels.plan import plans
from attngen.kernels.uses import uses_of
from attngen.runtime.parameters import GIVEN, SOURCES, STRIDES, values_of
from attngen.runtime.program import Workspace
from attngen.runtime.run_time import Extent, Scalars
from attngen.spec import coverage
from attngen.spec.attention_spec import AttentionSpec, load_specs
from attngen.spec.mask_checks import spec_of_mask
from attngen.spec.problem import LISTED, Problem
from attngen.spec.resolve import resolve
from attngen.targets.target import DEFAULT, TARGETS
from tests.support.paths import ROOT
from tools.corpus import flatten

KNOWN = features.scan()
OTHER = TARGETS["sm_80"]  # whose kernels are of another family
NUMBERS = ("i32", "f32", "i64")
RESULTS = {*OF_JOINS, "max_logit", "amax_s", "amax_o"}
MASK = "capture int32 1 i\nload i 0 i\nload i 0 j\neq b v0 v1\nvalue v2\nslope f:0.0"  # documents
PARTS_OF_MASKS = {"mask_row_map", "mask_column_map", "mask_blocks", "mask_shown", "mask_state"}
RESULTS |= {"dq", "dk", "dv", "dbias", "dlearned", *MAXIMA}
GRADIENTS = {"d_o", "dlse", *BACKWARD_SCALES}  # that a backward is given


@cache
def problems() -> tuple[Problem, ...]:
    """Problems of the examples, and of a part of those in which every pair of choices meets."""
    files = sorted((ROOT / "examples" / "specs").glob("*.toml"))
    specs = chain.from_iterable(map(load_specs, files))
    found = chain.from_iterable(resolve(spec, KNOWN) for spec in specs)
    members = chain.from_iterable(each.problems(KNOWN) for each in coverage.members(KNOWN))
    rare = (
        AttentionSpec(128, window=True, directions=("bwd",)),
        AttentionSpec(64, dtype="e4m3", out_dtype="e4m3"),
        AttentionSpec(128, out_dtype="fp32", continues=True),
        AttentionSpec(64, layout="thd", out_dtype="fp32", continues=True),
        AttentionSpec(64, dtype="e4m3", scaling="token"),
        AttentionSpec(128, mask_mod=LISTED, directions=("fwd", "bwd")),
        spec_of_mask(register_program(parse_program(MASK)).name),
    )
    others = chain.from_iterable(resolve(spec, KNOWN) for spec in rare)
    return tuple(dict.fromkeys((*found, *members, *others)))


def plans_elsewhere(problem: Problem) -> tuple[KernelPlan, ...]:
    """The plans of the problem's kernels on the other target; none where no family has any."""
    try:
        return plans(problem, OTHER.name)
    except PlanError:
        return ()


@cache
def sources() -> tuple[tuple[Problem, Source], ...]:
    """Their kernels, one of each set of parameters."""
    found: dict[tuple[str, ...], tuple[Problem, Source]] = {}
    for problem in problems():
        for plan in (*plans(problem, DEFAULT.name), *plans_elsewhere(problem)):
            source = render_problem(problem, plan)
            names = (field.name for field in source.kernel.fields)
            key = (plan.family, problem.dtype_o, *names)
            found.setdefault(key, (problem, source))
    return tuple(found.values())


def of_fragments(problem: Problem) -> set[str]:
    """Names of the parameters that headers of the problem's fragments declare."""
    groups = uses_of(problem, KNOWN).values()
    return {name for group in groups for use in group for name, _ in use.parameters}


def test_every_number_has_one_source() -> None:
    given = [*chain.from_iterable(GIVEN.values())]
    assert len(given) == len({*given}) and not SOURCES.keys() & {*given}
    assert not STRIDES.keys() & ({*given} | SOURCES.keys())
    for problem, source in sources():
        declared = of_fragments(problem)
        for field in source.kernel.fields:
            if field.type in NUMBERS:
                name = field.name
                own = (name in SOURCES) + (name in STRIDES) + (name in given)
                assert own + (not own and name in declared) == 1, (name, problem.label)


def test_every_address_is_one_of_a_tensor_or_a_workspace() -> None:
    own = {*OF_APPENDS, *OF_CASTS, *OF_BACKWARD_CASTS, PLACED}
    tensors = {*INPUTS, *own, *RESULTS, *GRADIENTS, *get_args(Workspace), *PARTS_OF_MASKS}
    for problem, source in sources():
        mapped = {recipe.field for recipe in source.kernel.tensor_maps}
        for field in source.kernel.fields:
            if field.type not in NUMBERS:
                assert field.name in mapped | tensors | of_fragments(problem), field.name


def test_every_source_fills_a_parameter_of_some_kernel() -> None:
    read = {field.name for _, source in sources() for field in source.kernel.fields}
    declared = SOURCES.keys() | STRIDES.keys() | {*chain.from_iterable(GIVEN.values())}
    assert declared - read == {"dk_stride_column", "dq_stride_column", "dv_stride_column"}


def test_every_parameter_is_read_by_a_kernel_or_a_header_of_it() -> None:
    """Beside the struct that declares it; some kernels of several that share a list have more."""
    named, read = set(), set()
    for _, source in sources():
        words = Counter(re.findall(r"\w+", flatten(source.text, files.headers())))
        names = {field.name for field in source.kernel.fields}
        named |= names
        read |= {name for name in names if words[name] > 1}
    assert named == read


def test_a_parameter_has_one_type_in_all_kernels() -> None:
    types: dict[str, set[str]] = {}
    for _, source in sources():
        for field in source.kernel.fields:
            if field.type in NUMBERS:
                types.setdefault(field.name, set()).add(field.type)
    assert {name: found for name, found in types.items() if len(found) > 1} == {}


@pytest.mark.parametrize("name", ["tiles", "scale_log2", "q_stride_row"])
def test_a_call_cannot_give_what_follows_from_its_launch(name: str) -> None:
    extent = Extent(1, 64, 2, 64, 64 * 128, 128, 64)
    extents = dict.fromkeys(("q", "k", "v", "o"), extent)
    _, source = next(each for each in sources() if each[1].kernel.grid == "persistent_tiles")
    plain, other = (
        values_of(source.kernel, extents, Scalars(0.125, numbers=numbers))[name]
        for numbers in ({}, {name: 99})
    )
    assert plain == other != 99


def test_a_tensor_that_a_call_has_not_has_no_strides() -> None:
    extents = dict.fromkeys(("q", "k", "v"), Extent(1, 64, 2, 64, 64 * 128, 128, 64))
    _, source = sources()[0]
    values = values_of(source.kernel, extents, Scalars(1.0))
    assert "q_stride_row" in values and "dq_stride_row" not in values

"""Programs of callables: their very C++, and its derivative, against the callables themselves."""

from __future__ import annotations

import ctypes
from itertools import compress
from typing import Any

import pytest
import torch

import attngen
from attngen.compiler.builder import render_problem
from attngen.compiler.compile import compile_source
from attngen.fragments import features
from attngen.fragments.lowering import fragment_of
from attngen.fragments.program import TYPES
from attngen.frontends.pytorch.callables.program import Traced, score_program
from attngen.frontends.pytorch.callables.trace import trace
from attngen.io import files
from attngen.kernels.fill import emit_fragment
from attngen.kernels.plan import plans
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.resolve import find_violations, resolve
from tests.support.callables_kit import SCORES, S, ScoreMod, normal, positions
from tests.support.own_fragments import kept

CPU = torch.device("cpu")
COUNT = 60
LINED = ("-Wno-missing-field-initializers",)  # of places, whose lines are filled in
HEADERS = ("context", "score_lines", "special")
HEAD = "".join(f'#include "attngen/{each}.cuh"\n' for each in HEADERS) + "namespace attngen {\n"
# Scores come as multiples of 4, as products do whose scale is 1 / 4.
HARNESS = """
extern "C" void {name}(void** c, long long* n, float* x, int count, float* s, int* at,
                       float* out) {{
  using namespace attngen;
  const {struct} score = {{{values}}};
  for (int k = 0; k < count; ++k, at += 4) {{
    const Context ctx = {{at[0], at[1], {s}, {s}, 0}};
    const Place<false> place = {{at[2], at[3], 0.f, 0.f}};
    out[4 * k] = score.apply(ctx, s[k] * 4.f, place) / 4.f;
    out[4 * k + 1] = score.grad(ctx, s[k] * 4.f, 0.f, place);
    LinedPlace<false, {lines}> lined = {{at[2], at[3], 0.f, 0.f}};
    TurnedPlace<false, {turned}> turned = {{at[2], at[3], 0.f, 0.f}};
    {makes}
    out[4 * k + 2] = score.apply(ctx, s[k] * 4.f, lined) / 4.f;
    out[4 * k + 3] = score.apply(ctx, s[k] * 4.f, turned) / 4.f;
  }}
}}
"""
# What makes the lines that a place has, by the number of these.
MAKES = (
    "score.make_column(ctx, at[3], lined.columns);",
    "score.make_distance(ctx, at[3] - at[2], lined.distances);",
    "score.make_row(ctx, at[2], turned.rows);",
    "score.make_distance(ctx, at[3] - at[2], turned.distances);",
)


def traced(mod: Any) -> Traced:
    return score_program(trace("score_mod", mod, CPU), CPU)


@pytest.fixture(scope="module")
def mods() -> dict[str, ScoreMod]:
    return {name: make() for name, make in SCORES.items()}


@pytest.fixture(scope="module")
def found(mods) -> dict[str, Traced]:
    return {name: traced(mod) for name, mod in mods.items()}


@pytest.fixture(scope="module")
def library(compile_cpp, found) -> ctypes.CDLL:
    """Every example's struct, each with a function of its own."""
    text = HEAD
    for each in found.values():
        text += emit_fragment(files.templates_dir(), fragment_of(each.program)) + "\n"
    text += "}  // namespace attngen\n"
    for name, each in found.items():
        facts, values = 0, []
        for place, (_, rank, type_) in enumerate(each.program.captures):
            values.append(f"c[{place}]")
            for _ in range(rank):
                stride = f"static_cast<{TYPES[type_]}>(n[{facts}])"
                values += [stride, f"static_cast<int>(n[{facts + 1}])"]
                facts += 2
        values += [f"static_cast<{TYPES[t]}>(x[{k}])" for k, t in enumerate(each.program.numbers)]
        fragment = fragment_of(each.program)
        struct, filled = f"attngen::{fragment.struct}", ", ".join([*values, "0.25f", "4.f"])
        kept = (*fragment.lines, *fragment.turned_lines)
        lines, turned = (", ".join(map(str, x)) for x in (kept[:2], kept[2:]))
        facts = {"lines": lines, "turned": turned, "makes": " ".join(compress(MAKES, kept))}
        text += HARNESS.format(name=name, struct=struct, values=filled, s=S, **facts)
    return ctypes.CDLL(str(compile_cpp(text, "-Wno-unused-parameter", *LINED)))


@pytest.mark.parametrize("name", SCORES)
def test_lowered_scores_and_their_slopes_are_those_of_the_callable(
    library, mods, found, name
) -> None:
    each = found[name]
    places, scores = positions(COUNT), normal(COUNT, scale=1.5)
    axes = [pair for x in each.captures for pair in zip(x.stride(), x.shape, strict=True)]
    out = torch.empty(COUNT, 4)
    getattr(library, name)(
        (ctypes.c_void_p * 8)(*[x.data_ptr() for x in each.captures]),
        (ctypes.c_longlong * 32)(*[number for pair in axes for number in pair]),
        (ctypes.c_float * 32)(*each.numbers),
        COUNT,
        *(ctypes.c_void_p(x.data_ptr()) for x in (scores, places, out)),
    )
    leaves = scores.clone().requires_grad_()
    wanted = torch.vmap(mods[name])(leaves, *places.unbind(1)).float()
    slopes = torch.zeros(COUNT)
    if wanted.requires_grad:
        (slopes,) = torch.autograd.grad(wanted.sum(), leaves)
    assert torch.allclose(out[:, 0], wanted.detach(), rtol=2e-5, atol=2e-5)
    assert torch.allclose(out[:, 1], slopes, rtol=2e-5, atol=2e-5)
    for lined in out[:, 2:].T:  # what is at hand of keys and distances, or queries and these
        assert torch.equal(lined, out[:, 0])


def test_equal_code_is_one_program_whatever_its_numbers_and_tensors() -> None:
    def capped(cap: float, table: torch.Tensor) -> ScoreMod:
        return lambda s, b, h, i, j: cap * torch.tanh(s / cap) + table[b, h]

    one, other = traced(capped(30.0, normal(2, 4))), traced(capped(50.0, normal(3, 8).T))
    assert one.program == other.program and one.program.name == other.program.name
    assert one.numbers != other.numbers
    more = traced(lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0))
    assert more.program.name != one.program.name
    assert traced(capped(1.0, normal(2, 4))).program.name != one.program.name, "1 is kept"


def test_programs_know_whether_they_only_add(found) -> None:
    additive = {name for name, each in found.items() if each.program.additive}
    assert additive == {
        *("relative_table", "log_distance", "season", "segment_pairs", "rank_two", "weekday"),
        *("gaussian", "log_gates", "narrow"),
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["tanh_cap", "relative_table", "mish", "weekday"])
def test_kernels_of_programs_compile_without_spills(found, name) -> None:
    d = 64 if name in ("mish", "relative_table") else 128
    with kept():
        fragment = features.register_program(found[name].program)
        spec = AttentionSpec(head_dim=d, score_mod=fragment.name, directions=("fwd", "bwd"))
        for problem in resolve(spec, features.scan()):
            for plan in plans(problem, "sm_90a"):
                if plan.family in ("sm90_fwd", "sm90_bwd", "sm90_bwd_dkv", "sm90_bwd_dq"):
                    source = render_problem(problem, plan)
                    binary, _ = compile_source(source, problem, "sm_90a")
                    assert binary.resources.spill_bytes == 0, plan.family


def test_kernels_that_split_keys_have_no_programs(found) -> None:
    with kept():
        fragment = features.register_program(found["weekday"].program)
        spec = AttentionSpec(head_dim=64, score_mod=fragment.name, decode=True)
        (violation,) = find_violations(spec, features.scan())
    assert violation.field == "score_mod" and violation.nearest is False


DATA = normal(4, 4)


def branches(s, b, h, i, j):
    return s if i > j else s * 2


def asks(s, b, h, i, j):
    return s + float(s)


def draws(s, b, h, i, j):
    return s + torch.rand(())


def changes(s, b, h, i, j):
    return s + DATA.add_(1)[h, h]


def unknown(s, b, h, i, j):
    return torch.special.bessel_j0(s)


def reads_a_row(s, b, h, i, j):
    return s + DATA[h].sum()


def has_no_slope(s, b, h, i, j):
    return s + torch.heaviside(s, 0 * s)


def takes(s, b, h, i, j):
    return s + torch.take(DATA, j.long())


def returns_a_bool(s, b, h, i, j):
    return s > 0


def lacks_arguments(s, b, h, i):
    return s


REFUSED = {
    branches: r"branches on a tensor at test_programs.py:\d+, `return s if i > j.*torch.where",
    asks: r"reads a number out of a tensor .* at test_programs.py:\d+.*Compute with tensors",
    draws: r"draws random numbers at test_programs.py:\d+, `return s \+ torch.rand.*dropout_p",
    changes: r"changes a tensor in place that it must not at test_programs.py:\d+.*Return a new",
    unknown: r"kernels lack, special_bessel_j0.*,? at test_programs.py:\d+, .*backend='reference'",
    reads_a_row: r".* at test_programs.py:\d+, `return s \+ DATA",
    has_no_slope: r"has no derivative that is traced .*heaviside.*backend='reference'",
    takes: r"has no derivative that is traced .*backend='reference'",
    returns_a_bool: r"needs to return a score, a real number; got torch.bool",
    lacks_arguments: r"is called as score_mod\(score, b, h, i, j\)",
}


@pytest.mark.parametrize("mod", REFUSED, ids=lambda mod: mod.__name__)
def test_refusals_name_the_argument_the_line_and_the_way_out(mod) -> None:
    before = DATA.clone()
    with pytest.raises(attngen.SpecError, match=f"^score_mod .*{REFUSED[mod]}") as caught:
        traced(mod)
    assert len(caught.value.reasons) == 1
    assert torch.equal(DATA, before)

"""Programs of masks: their very C++, against the callables themselves."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from attngen.compiler.builder import render_problem
from attngen.errors import SpecError
from attngen.fragments import features
from attngen.fragments.features import register_program
from attngen.fragments.mask_lowering import mask_fragment_of
from attngen.fragments.names import CAPTURED
from attngen.fragments.program import MASK_PREFIX, TYPES
from attngen.frontends.pytorch.callables.program import Traced, mask_program
from attngen.frontends.pytorch.callables.trace import trace
from attngen.io import files
from attngen.kernels.fill import emit_fragment
from attngen.kernels.plan import plans
from attngen.runtime.program_check import mistakes_of
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.problem import LISTED
from attngen.spec.resolve import resolve
from attngen.spec.variants import find_faults
from tests.support.cache_kit import make_binary
from tests.support.callables_kit import MASKS, B, H, S, ScoreMod, positions
from tests.support.own_fragments import kept

CPU = torch.device("cpu")
COUNT = 400
SIDE = 16  # of spans of queries and keys
HEAD = """
#include "attngen/bounds.cuh"
#include "attngen/context.cuh"
#include "attngen/special.cuh"
namespace attngen {
struct Pair { int i; int j; };
struct Spread {
  template <class Read>
  auto operator()(Bounds<int> span, Read read) const {
    auto found = exactly(read(span.lo));
    for (int at = span.lo; at <= span.hi; ++at) found = hull(found, exactly(read(at)));
    return found;
  }
};
"""
HARNESS = """
extern "C" void {name}(void** c, long long* n, double* x, int count, int* at, char* out) {{
  using namespace attngen;
  const {struct} mask = {{{values}}};
  for (int k = 0; k < count; ++k, at += 4) {{
    const Context ctx = {{at[0], at[1], {s}, {s}, 0}};
    out[k] = mask.sees(ctx, Pair{{at[2], at[3]}});
  }}
}}
// Of spans of `side` queries and keys: 0 where no pair takes part, 1 where all do, 2 where nobody
// knows.
extern "C" void bound_{name}(void** c, long long* n, double* x, int side, int count, int* at,
                             char* out) {{
  using namespace attngen;
  const {struct} mask = {{{values}}};
  for (int k = 0; k < count; ++k, at += 4) {{
    const Context ctx = {{at[0], at[1], {s}, {s}, 0}};
    const Bounds<int> i = {{at[2], at[2] + side - 1}};
    const Bounds<int> j = {{at[3], at[3] + side - 1}};
    const Bounds<bool> found = mask.bound(ctx, i, j, Spread());
    out[k] = found.lo ? 1 : found.hi ? 2 : 0;
  }}
}}
"""
# Masks with as many spans, of those tried, of which bounds tell all.
DECIDED = {"chunks": 0.5, "documents": 0.3, "tree": 0.5, "near": 0.3}


def traced(mod: Any) -> Traced:
    return mask_program(trace("mask_mod", mod, CPU))


@pytest.fixture(scope="module")
def mods() -> dict[str, ScoreMod]:
    def rounded(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return (i * 0.1 + 0.3 - j * 0.1 - 0.3).abs() <= 0.1

    ends = torch.arange(S, dtype=torch.int32) // 7 * 7 + 9

    def tree(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return (j <= i) & (i < ends[j])

    def near(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return ((i - j).abs() * 0.5 < 7.25) | (torch.minimum(i, j) < 3)

    spoilt = torch.arange(S) / 7.0
    spoilt[37] = torch.nan

    def spoilt_by_nan(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return (spoilt[j].clamp(-9, 99) >= -9) & (torch.where(j > 70, torch.nan, i * 1.0) >= 0)

    step = torch.tensor([49.0, 41.0, 37.0, 55.0, 47.0, 61.0])

    def stepped(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        near = torch.floor(i / step[h]) == torch.floor(j / step[h])
        return near | (i.float().sqrt() > j * 0.1)

    own = {"stepped": stepped, "rounded": rounded, "tree": tree, "near": near}
    own["spoilt_by_nan"] = spoilt_by_nan
    return {**{name: make() for name, make in MASKS.items()}, **own}


@pytest.fixture(scope="module")
def found(mods) -> dict[str, Traced]:
    return {name: traced(mod) for name, mod in mods.items()}


@pytest.fixture(scope="module")
def library(compile_cpp, found) -> ctypes.CDLL:
    """Every example's struct, each with a function of its own."""
    text = HEAD
    for each in {x.program.name: x for x in found.values()}.values():
        text += emit_fragment(files.templates_dir(), mask_fragment_of(each.program)) + "\n"
    text += "}  // namespace attngen\n"
    for name, each in found.items():
        facts, values = 0, []
        for place, (_, rank, type_) in enumerate(each.program.captures):
            values.append(f"c[{place}]")
            for _ in range(rank):
                values += [f"static_cast<{TYPES[type_]}>(n[{facts}])"]
                values += [f"static_cast<int>(n[{facts + 1}])"]
                facts += 2
        values += [f"static_cast<{TYPES[t]}>(x[{k}])" for k, t in enumerate(each.program.numbers)]
        struct = f"attngen::{mask_fragment_of(each.program).struct}"
        text += HARNESS.format(name=name, struct=struct, values=", ".join(values), s=S)
    return ctypes.CDLL(str(compile_cpp(text, "-Wno-unused-parameter")))


NAMES = [*MASKS, "stepped", "rounded", "tree", "near", "spoilt_by_nan"]


def given_to(each: Traced) -> tuple[Any, Any, Any]:
    """Arguments of a struct's functions: addresses, strides and sizes, and numbers."""
    facts = [
        n for x in each.captures for pair in zip(x.stride(), x.shape, strict=True) for n in pair
    ]
    addresses = (ctypes.c_void_p * max(1, len(each.captures)))(
        *[x.data_ptr() for x in each.captures]
    )
    strides = (ctypes.c_longlong * max(1, len(facts)))(*facts)
    numbers = (ctypes.c_double * max(1, len(each.numbers)))(*each.numbers)
    return addresses, strides, numbers


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_those_of_the_callable(name, library, mods, found) -> None:
    places = positions(COUNT).contiguous()
    out = (ctypes.c_char * COUNT)()
    at = ctypes.c_void_p(places.data_ptr())
    getattr(library, name)(*given_to(found[name]), COUNT, at, out)
    wanted = torch.vmap(mods[name])(*places.unbind(1))
    assert [bool(x) for x in out.raw] == wanted.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_bounds_are_true_of_all_pairs_of_spans(name, library, mods, found) -> None:
    spans = torch.cartesian_prod(*[torch.arange(n) for n in (B, H, S // SIDE, S // SIDE)]).int()
    spans[:, 2:] *= SIDE
    out = (ctypes.c_char * len(spans))()
    at = ctypes.c_void_p(spans.data_ptr())
    getattr(library, f"bound_{name}")(*given_to(found[name]), SIDE, len(spans), at, out)
    steps = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).int()
    places = spans.repeat_interleave(len(steps), 0)
    places[:, 2:] += steps.repeat(len(spans), 1)
    seen = torch.vmap(mods[name])(*places.unbind(1)).view(len(spans), -1)
    told = torch.tensor([*out.raw])
    assert not seen[told == 0].any() and seen[told == 1].all()
    assert (told != 2).float().mean() >= DECIDED.get(name, 0.0)


@kept()
def test_masks_have_a_problem_of_their_own_which_traces_name(found) -> None:
    program = found["documents"].program
    assert program.is_mask and program.name.startswith(MASK_PREFIX)
    fragment = register_program(program)
    assert [each.name for each in fragment.operands][0] == f"{CAPTURED}0"
    known = features.scan()
    (problem,) = resolve(AttentionSpec(16, mask=program.name, directions=("mask",)), known)
    assert problem.fragment_digests == (program.text,)
    assert find_faults(problem, "sm_90a", known) == []
    both = AttentionSpec(128, mask_mod=LISTED, directions=("fwd", "bwd"))
    for each in (problem, *resolve(both, known)):
        for plan in plans(each, "sm_90a"):
            kernel = render_problem(each, plan).kernel
            assert not mistakes_of(replace(make_binary(), problem=each, kernel=kernel))
    with pytest.raises(SpecError, match="of a callable, which has directions=.'mask',. alone"):
        resolve(AttentionSpec(128, mask=program.name), known)
    with pytest.raises(SpecError, match="directions 'mask' is for the mask of a callable"):
        resolve(AttentionSpec(128, mask="causal", directions=("mask",)), known)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_90"])
@kept()
def test_kernels_that_ask_a_mask_name_its_program(found, arch) -> None:
    program = found["documents"].program
    known = features.scan()
    name = register_program(program).name
    spec = AttentionSpec(128, mask=f"causal+{name}", mask_mod=LISTED, directions=("fwd", "bwd"))
    for problem in resolve(spec, known):
        assert problem.asks_mask and program.text in problem.fragment_digests
        assert find_faults(problem, arch, known) == []
        for plan in plans(problem, arch):
            source = render_problem(problem, plan)
            assert not mistakes_of(
                replace(make_binary(), problem=problem, kernel=source.kernel, arch=arch)
            )
            asks = "ask_mask<kN>" in source.text and "asked_mask.cuh" in source.text
            names = {each.name for each in source.kernel.fields}
            assert asks == bool(names & {"mask_rows", "mask_columns"})
            whole = re.search(r"seen_(keys|queries)\(.*is_full<k|next\.?_?whole", source.text)
            assert bool(whole) == asks, "blocks that are shown whole are asked, too"
            assert not any(each.startswith("arg_") for each in names), (
                "no call passes what it reads"
            )
    for beside in ({"bias": "post_scale"}, {"mask_mod": False}, {"dtype": "e4m3"}):
        with pytest.raises(SpecError, match="is of a callable"):
            resolve(replace(spec, **beside), known)

"""Programs of masks: their very C++, against the callables themselves."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from attngen.errors import SpecError
from attngen.fragments import features
from attngen.fragments.features import register_program
from attngen.fragments.lowering import CAPTURED
from attngen.fragments.mask_lowering import mask_fragment_of
from attngen.fragments.program import MASK_PREFIX, TYPES
from attngen.frontends.pytorch.callable_program import Traced, mask_program
from attngen.frontends.pytorch.callable_trace import trace
from attngen.io import files
from attngen.kernels.fill import emit_fragment
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.resolve import resolve
from attngen.spec.variants import find_faults
from tests.support.callables_kit import MASKS, S, ScoreMod, positions
from tests.support.own_fragments import kept

CPU = torch.device("cpu")
COUNT = 400
HEAD = """
#include "attngen/context.cuh"
#include "attngen/special.cuh"
namespace attngen {
struct Pair { int i; int j; };
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
"""


def traced(mod: Any) -> Traced:
    return mask_program(trace("mask_mod", mod, CPU))


@pytest.fixture(scope="module")
def mods() -> dict[str, ScoreMod]:
    def rounded(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return (i * 0.1 + 0.3 - j * 0.1 - 0.3).abs() <= 0.1

    return {**{name: make() for name, make in MASKS.items()}, "rounded": rounded}


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
    return ctypes.CDLL(str(compile_cpp(text, "-Wno-unused-parameter", "-Wno-unused-variable")))


@pytest.mark.parametrize("name", [*MASKS, "rounded"])
def test_pairs_are_those_of_the_callable(name, library, mods, found) -> None:
    each = found[name]
    places = positions(COUNT).contiguous()
    facts = [
        n for x in each.captures for pair in zip(x.stride(), x.shape, strict=True) for n in pair
    ]
    addresses = (ctypes.c_void_p * max(1, len(each.captures)))(
        *[x.data_ptr() for x in each.captures]
    )
    strides = (ctypes.c_longlong * max(1, len(facts)))(*facts)
    numbers = (ctypes.c_double * max(1, len(each.numbers)))(*each.numbers)
    out = (ctypes.c_char * COUNT)()
    call = getattr(library, name)
    call(addresses, strides, numbers, COUNT, ctypes.c_void_p(places.data_ptr()), out)
    wanted = torch.vmap(mods[name])(*places.unbind(1))
    assert [bool(x) for x in out.raw] == wanted.tolist()


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
    with pytest.raises(SpecError, match="of a callable, which has directions=.'mask',. alone"):
        resolve(AttentionSpec(128, mask=program.name), known)
    with pytest.raises(SpecError, match="directions 'mask' is for the mask of a callable"):
        resolve(AttentionSpec(128, mask="causal", directions=("mask",)), known)

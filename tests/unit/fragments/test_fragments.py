"""Fragments: each stands alone, knows nothing of its neighbours, and says what it needs."""

from __future__ import annotations

import ctypes
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import meta

from attngen.compiler.compile import run_nvrtc
from attngen.fragments import features
from attngen.fragments.features import Fragment
from attngen.io import files
from attngen.kernels.fill import emit_fragment, environment

FRAGMENTS = [fragment for axis in features.scan().values() for fragment in axis.values()]
EACH = pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda f: f"{f.axis}-{f.name}")
DEVICE_AXES = ("fetch",)  # these issue copies; all other axes are plain scalar code
DEVICE_HEADERS = ("ptx/tma", "copy/gathered_rows")
HEADERS = """
#include "attngen/context.cuh"
#include "attngen/scheduler/kv_blocks.cuh"
#include "attngen/softmax/row.cuh"
"""
C_TYPES = {"i32": "int", "f32": "float", "i64": "long long", "ptr": "const void*"}
FINALIZE = """
}  // namespace attngen
extern "C" void finalize(float largest, float sum, float* out) {
  const attngen::Context ctx = {0, 0, 1, 1, 0};
  const attngen::SoftmaxRow row = attngen::VanillaSoftmax{}.finalize(ctx, largest, sum);
  out[0] = row.normalizer, out[1] = row.lse;
}
"""


def source_of(fragment: Fragment) -> str:
    return (files.templates_dir() / fragment.template).read_text()


def test_fragments_every_axis_but_scores_has_one() -> None:
    assert {fragment.axis for fragment in FRAGMENTS} >= set(features.AXES) - {"score"}


@EACH
def test_fragment_alone_has_no_undeclared_variables(fragment: Fragment) -> None:
    tree = environment(files.templates_dir()).parse(source_of(fragment))
    assert meta.find_undeclared_variables(tree) == set()


@EACH
def test_fragment_alone_has_one_macro_and_no_other_output(fragment: Fragment) -> None:
    module = environment(files.templates_dir()).get_template(fragment.template).module
    assert str(module).strip() == ""
    assert [name for name in vars(module) if not name.startswith("_")] == ["emit"]


@EACH
def test_fragment_alone_emits_the_one_struct_of_its_header(fragment: Fragment) -> None:
    text = emit_fragment(files.templates_dir(), fragment)
    assert re.findall(r"^(?:struct|class|union|namespace) (\w+)", text, re.M) == [fragment.struct]
    assert text.startswith(f"struct {fragment.struct} {{") and text.endswith("};")
    assert "#include" not in text and "asm" not in text


@pytest.mark.parametrize("axis", features.AXES)
def test_fragments_structs_and_names_are_distinct(axis: str) -> None:
    structs = [fragment.struct for fragment in FRAGMENTS]
    assert len(set(structs)) == len(structs)
    assert all(fragment.name == name for name, fragment in features.scan()[axis].items())


@EACH
def test_fragment_alone_compiles_where_its_axis_runs(fragment: Fragment, compile_cpp) -> None:
    struct = emit_fragment(files.templates_dir(), fragment)
    if fragment.axis in DEVICE_AXES:
        copies = "".join(f'#include "attngen/{name}.cuh"\n' for name in DEVICE_HEADERS)
        run_nvrtc(f"{copies}{HEADERS}namespace attngen {{\n{struct}\n}}", "alone.cu", "sm_90a")
    else:
        compile_cpp(f"{HEADERS}namespace attngen {{\n{struct}\n}}\n")


@pytest.mark.parametrize(
    "fragment",
    [fragment for fragment in FRAGMENTS if fragment.axis not in DEVICE_AXES],
    ids=lambda f: f"{f.axis}-{f.name}",
)
def test_fragment_members_are_its_operands_in_order(fragment: Fragment, compile_cpp) -> None:
    """Kernels fill the struct by position, and read nothing that the header does not declare; what
    a tile has comes with the place of each score."""
    operands = [operand for operand in fragment.operands if operand.domain != "tile"]
    numbers = [
        "nullptr" if operand.dtype == "ptr" else str(k + 1) for k, operand in enumerate(operands)
    ]
    values = ", ".join(numbers)
    types = [C_TYPES[operand.dtype] for operand in operands]
    pairs = [*zip(types, operands, strict=True)]
    members = "".join(f"  {kind} {o.name};\n" for kind, o in pairs)
    checks = "".join(
        f"static_assert(made.{operand.name} == {number});\n"
        f"static_assert(is_same<decltype(made.{operand.name}), {kind}>);\n"
        for number, (kind, operand) in zip(numbers, pairs, strict=True)
    )
    compile_cpp(
        f"{HEADERS}namespace attngen {{\n"
        "template <class A, class B> constexpr bool is_same = false;\n"
        "template <class A> constexpr bool is_same<A, A> = true;\n"
        f"{emit_fragment(files.templates_dir(), fragment)}\n"
        f"struct Expected {{\n{members}}};\n"
        f"constexpr {fragment.struct} made{{{values}}};\n{checks}"
        f"static_assert(sizeof({fragment.struct}) == sizeof(Expected));\n"
        f"inline int use() {{ return sizeof(made); }}\n}}\n"
    )


@pytest.fixture(scope="module")
def finalize(compile_cpp):
    """`finalize(largest, sum)` → (normalizer, lse) of the vanilla softmax."""
    struct = emit_fragment(files.templates_dir(), features.scan()["softmax"]["vanilla"])
    library = ctypes.CDLL(str(compile_cpp(f"{HEADERS}namespace attngen {{\n{struct}{FINALIZE}")))

    def call(largest: float, total: float) -> tuple[float, float]:
        out = (ctypes.c_float * 2)()
        library.finalize(ctypes.c_float(largest), ctypes.c_float(total), out)
        return out[0], out[1]

    return call


@settings(deadline=None)
@given(st.lists(st.floats(-3e4, 3e4), min_size=1, max_size=30))
def test_softmax_finalize_any_scores_is_the_log_sum_exp(finalize, scores) -> None:
    given = np.float32(np.array(scores)).astype(np.float64)
    top = given.max()
    total = np.float32(np.exp(given - top).sum())
    normalizer, lse = finalize(float(top), float(total))
    expected = top + math.log(float(total))
    assert normalizer == pytest.approx(1 / float(total), rel=2e-7)
    # float32 of the maximum, of the logarithm and of their sum each round once.
    assert abs(lse - expected) <= 4 * 2**-24 * max(abs(expected), abs(top), 1.0)


@pytest.mark.parametrize("largest", (-math.inf, 0.0, -1e30))
def test_softmax_finalize_dead_row_is_zero_and_minus_infinity(finalize, largest) -> None:
    assert finalize(largest, 0.0) == (0.0, -math.inf)


@pytest.mark.parametrize("largest", (1e30, -1e30, 3.4e38, -3.4e38))
def test_softmax_finalize_huge_maximum_stays_finite(finalize, largest) -> None:
    normalizer, lse = finalize(largest, 4.0)
    assert normalizer == 0.25
    assert lse == pytest.approx(largest, rel=1e-6)


def test_softmax_finalize_many_keys_of_equal_weight_counts_them(finalize) -> None:
    normalizer, lse = finalize(0.0, float(1 << 24))
    assert normalizer == 2.0**-24
    assert lse == pytest.approx(24 * math.log(2), rel=1e-6)

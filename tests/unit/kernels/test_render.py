"""Rendering: the same source every time, one parameter struct on both sides, new fragments."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from attngen.compiler.compile import compile_source
from attngen.io import files
from attngen.kernels.params import entry_name
from attngen.kernels.plan import candidates, plan
from attngen.runtime.program import FIELD_BYTES, Field
from tests.support.sass import count_instructions
from tests.unit.conftest import EXCERPT

ARCH = "sm_90a"
CASES = {
    "full": {},
    "causal": {"masks": ("causal",)},
    "window": {"masks": ("window",), "dtype": "fp16"},
    "causal+window": {"masks": ("causal", "window"), "head_dim": 256},
    "partial": {"out": "fp32"},
    "dropout": {"dropout": True, "head_dim": 128},
    "causal arbitrary": {"masks": ("causal",), "attn_mask": True},
    "window arbitrary dropout": {"masks": ("window",), "attn_mask": True, "dropout": True},
    "causal partial": {"masks": ("causal",), "out": "fp32", "head_dim": 128},
    "window partial": {"masks": ("window",), "out": "fp32", "head_dim": 72, "head_dim_v": 40},
}
PARAMS = re.compile(r"^struct Params \{\n.*?^\};\n", re.M | re.S)
C_TYPES = {
    "i32": ctypes.c_int,
    "f32": ctypes.c_float,
    "i64": ctypes.c_longlong,
    "ptr": ctypes.c_void_p,
    "tensor_map": ctypes.c_ubyte * 128,
}
PREFIX_MASK = """<#
name = "prefix"
doc = "Keys before the prefix are seen by all, the others as under a causal mask."
struct = "PrefixMask"
bounds = ["right"]

[[operand]]
name = "prefix"
domain = "scalar"
dtype = "i32"
doc = "Length of the prefix in keys."
#>
<% macro emit() %>
struct PrefixMask {
  int prefix;

  ATTNGEN_HD Range row_range(const Context& ctx, int i) const {
    return {0, max_of(prefix, i + ctx.delta + 1)};
  }
  ATTNGEN_HD Range col_range(const Context& ctx, int j) const {
    return {j < prefix ? 0 : j - ctx.delta, ctx.q_len};
  }
};
<% endmacro %>
"""
# Operands of every type, in an order that needs padding between and after them.
MIXED_SCORE = """<#
name = "mixed"
doc = "Scores unchanged, with operands of every size."
struct = "MixedScore"
operand = [
  { name = "mixed_a", domain = "scalar", dtype = "i64", doc = "" },
  { name = "mixed_b", domain = "scalar", dtype = "f32", doc = "" },
  { name = "mixed_c", domain = "scalar", dtype = "i32", doc = "" },
  { name = "mixed_d", domain = "scalar", dtype = "i32", doc = "" },
  { name = "mixed_e", domain = "scalar", dtype = "i64", doc = "" },
  { name = "mixed_f", domain = "scalar", dtype = "f32", doc = "" },
]
#>
<% macro emit() %>
struct MixedScore {
  long long mixed_a;
  float mixed_b;
  int mixed_c, mixed_d;
  long long mixed_e;
  float mixed_f;

  template <class At>
  ATTNGEN_HD float apply(const Context&, float score, At) const { return score; }
};
<% endmacro %>
"""
HALVE_SCORE = """<#
name = "halve"
doc = "Halves every score, and adds an offset."
struct = "HalveScore"

[[operand]]
name = "score_offset"
domain = "scalar"
dtype = "f32"
doc = "Added to the half."
#>
<% macro emit() %>
struct HalveScore {
  float score_offset;

  template <class At>
  ATTNGEN_HD float apply(const Context&, float score, At) const {
    return score * 0.5f + score_offset;
  }
};
<% endmacro %>
"""


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    """A copy of the shipped templates, to add to."""
    copy = Path(shutil.copytree(files.templates_dir(), tmp_path / "templates"))
    (copy / "score").mkdir(exist_ok=True)  # no score ships yet, and git keeps no empty folder
    return copy


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_render_twice_and_in_a_fresh_process_gives_the_same_text(
    case, make_problem, render
) -> None:
    problem = make_problem(**CASES[case])
    source = render(problem)
    assert render(problem) == source
    script = (
        "from attngen.compiler.builder import render_problem;"
        "from attngen.kernels.plan import plan;"
        f"from attngen.spec.problem import Problem; problem = {problem!r};"
        f"print(render_problem(problem, plan(problem, {ARCH!r})).sha256)"
    )
    for seed in ("1", "2") if case == "causal+window" else ("1",):
        command = [sys.executable, "-c", script]
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(files.include_dir().parents[2])}
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, cwd="/"
        )
        assert done.stdout.strip() == source.sha256


def test_render_any_problem_leaves_no_tag_and_no_path(make_problem, render) -> None:
    for case in CASES.values():
        text = render(make_problem(**case)).text
        assert not re.search(r"<%|%>|@\{|\}@|<#|#>", text)
        assert str(files.templates_dir()) not in text


@pytest.mark.slow
def test_entry_name_every_plan_of_every_problem_is_another_symbol(make_problem) -> None:
    masks = ((), ("causal",), ("window",), ("causal", "window"), ("window", "causal"))
    dims = (8, 64, 72, 128, 192, 256)
    names = [
        entry_name(problem, chosen)
        for d, d_v, mask, (dtype, out) in itertools.product(
            dims, dims, masks, (("bf16", None), ("fp16", None), ("bf16", "fp32"))
        )
        for problem in [make_problem(d, d_v, mask, dtype, out)]
        for chosen in candidates(problem, ARCH)
    ]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) for name in names)


@pytest.mark.parametrize("case", CASES)
def test_render_kernel_entry_is_the_symbol_and_the_plan(case, make_problem, render) -> None:
    problem = make_problem(**CASES[case])
    chosen = plan(problem, ARCH)
    source = render(problem, chosen)
    kernel = source.kernel
    symbols = re.findall(r'extern "C" __global__ [^{;]*?(\w+)\(const', source.text)
    assert symbols == [kernel.entry]
    assert kernel.entry.startswith(f"sm90_fwd__{problem.label}__")
    assert (kernel.threads, kernel.smem_bytes) == (chosen.threads, chosen.smem_bytes)
    assert kernel.tile_rows == chosen.tile.m
    counter = ("tile_counter",) if chosen.schedule.dynamic else ()
    assert kernel.workspace == (*counter, *(("mask_rows",) if problem.attn_mask else ()))


@pytest.mark.parametrize("case", CASES)
def test_render_tensor_maps_fill_every_map_field_in_boxes_of_the_tile(
    case, make_problem, render
) -> None:
    problem = make_problem(**CASES[case])
    chosen = plan(problem, ARCH)
    kernel = render(problem, chosen).kernel
    maps = {recipe.field: recipe for recipe in kernel.tensor_maps}
    assert [*maps] == [field.name for field in kernel.fields if field.type == "tensor_map"]
    assert {name: recipe.tensor for name, recipe in maps.items()} == {n: n[-1] for n in maps}
    assert all(recipe.box_cols * 2 == 128 for recipe in maps.values())
    assert maps["map_k"].box_rows == maps["map_v"].box_rows == chosen.tile.n
    assert maps["map_q"].box_rows == 64
    assert ("map_o" in maps) != chosen.stores_rows
    assert {recipe.dtype for recipe in maps.values()} == {problem.dtype_q}


def offsets_in_cpp(text: str, fields: tuple[Field, ...], compile_cpp) -> list[int]:
    """offsetof every field, then sizeof, of the struct as it stands in the kernel."""
    (struct,) = PARAMS.findall(text)
    values = ", ".join(f"offsetof(Params, {field.name})" for field in fields)
    source = (
        "#include <cstddef>\nstruct alignas(64) TensorMap { unsigned char bytes[128]; };\n"
        f"{struct}"
        f'extern "C" const unsigned long long offsets[] = {{{values}, sizeof(Params)}};\n'
    )
    library = ctypes.CDLL(str(compile_cpp(source)))
    return [*(ctypes.c_ulonglong * (len(fields) + 1)).in_dll(library, "offsets")]


@pytest.mark.parametrize("case", CASES)
def test_params_offsets_are_those_of_the_struct_in_the_kernel(
    case, make_problem, render, compile_cpp
) -> None:
    source = render(make_problem(**CASES[case]))
    kernel = source.kernel
    expected = [*(field.offset for field in kernel.fields), kernel.params_bytes]
    assert offsets_in_cpp(source.text, kernel.fields, compile_cpp) == expected
    members = PARAMS.findall(source.text)[0].count(";") - 1
    assert members == len(kernel.fields)
    assert f"sizeof(Params) == {kernel.params_bytes}" in source.text


@pytest.mark.parametrize("case", CASES)
def test_params_offsets_are_those_of_ctypes_and_names_are_distinct(
    case, make_problem, render
) -> None:
    fields = render(make_problem(**CASES[case])).kernel.fields
    members = [(field.name, C_TYPES[field.type]) for field in fields]
    struct = type("Params", (ctypes.Structure,), {"_fields_": members})
    assert [getattr(struct, field.name).offset for field in fields] == [
        field.offset for field in fields
    ]
    assert len({field.name for field in fields}) == len(fields)
    assert all(field.offset % FIELD_BYTES[field.type][1] == 0 for field in fields)


@pytest.mark.parametrize("masks", ((), ("causal",), ("window",)), ids=str)
def test_params_offsets_operands_that_need_padding_are_those_of_the_struct(
    masks, make_problem, render, templates, compile_cpp
) -> None:
    (templates / "score" / "mixed.cuh.j2").write_text(MIXED_SCORE)
    source = render(make_problem(64, masks=masks, scores=("mixed",)), root=templates)
    kernel = source.kernel
    expected = [*(field.offset for field in kernel.fields), kernel.params_bytes]
    assert offsets_in_cpp(source.text, kernel.fields, compile_cpp) == expected


SLOPED_SCORE = """<#
name = "sloped"
doc = "Adds a term of the sequence and head, and one of the head."
struct = "SlopedScore"
operand = [
  { name = "both", domain = "batch_head", dtype = "f32", doc = "", score_power = 1 },
  { name = "level", domain = "scalar", dtype = "f32", doc = "", score_power = -1 },
  { name = "one", domain = "head", dtype = "f32", doc = "" },
]
#>
<% macro emit() %>
struct SlopedScore {
  float both, level, one;

  template <class At>
  ATTNGEN_HD float apply(const Context&, float score, At) const { return score + both; }
};
<% endmacro %>
"""
READ_LIST = """
}  // namespace attngen
extern "C" void read_list(const float* both, const float* one, int batch, int head, float* out) {
  attngen::Params p{};
  p.arg_both = const_cast<float*>(both), p.arg_one = const_cast<float*>(one), p.arg_level = 0.5f;
  p.arg_both_stride_batch = 7, p.arg_both_stride_head = 2, p.arg_one_stride_head = 3;
  const attngen::ScoreList list = attngen::score_list(p, {batch, head, 1, 1, 0}, 0.25f);
  out[0] = list.sloped.both, out[1] = list.sloped.level, out[2] = list.sloped.one;
}
"""


def test_operands_of_tensors_are_read_through_strides_in_units_of_scores(
    make_problem, host_code, templates, compile_cpp
) -> None:
    (templates / "score" / "sloped.cuh.j2").write_text(SLOPED_SCORE)
    code = host_code(make_problem(64, scores=("sloped",)), templates) + READ_LIST
    library = ctypes.CDLL(str(compile_cpp(code, *EXCERPT)))
    floats = ctypes.c_float * 64
    numbers, out = floats(*range(64)), (ctypes.c_float * 3)()
    for batch, head in itertools.product(range(3), range(4)):
        library.read_list(numbers, numbers, batch, head, out)
        assert [*out] == [4 * (7 * batch + 2 * head), 0.125, 3 * head]


@pytest.mark.parametrize("root_given", (True, False))
def test_render_unknown_fragment_is_refused(root_given, make_problem, render, templates) -> None:
    with pytest.raises(KeyError, match="suffix"):
        render(make_problem(64, masks=("suffix",)), root=templates if root_given else None)


def test_render_mistake_in_a_template_is_an_error_not_an_empty_word(
    make_problem, render, templates
) -> None:
    kernel = templates / "kernels" / "wgmma" / "forward" / "forward.cu.j2"
    kernel.write_text(kernel.read_text() + "@{ not_defined }@\n")
    with pytest.raises(jinja2.UndefinedError, match="not_defined"):
        render(make_problem(64), root=templates)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("masks", "scores"),
    [
        (("prefix",), ()),
        ((), ("halve",)),
        (("prefix", "window"), ("halve",)),
    ],
    ids=("mask", "score", "both"),
)
def test_new_fragment_one_file_makes_a_fast_kernel(
    masks, scores, make_problem, render, templates
) -> None:
    (templates / "mask" / "prefix.cuh.j2").write_text(PREFIX_MASK)
    (templates / "score" / "halve.cuh.j2").write_text(HALVE_SCORE)
    problem = make_problem(128, masks=masks, scores=scores)
    source = render(problem, root=templates)
    binary, cubin = compile_source(source, problem, ARCH)
    assert (binary.resources.spill_bytes, binary.resources.stack_bytes) == (0, 0)
    assert count_instructions(cubin)["HGMMA"] > 0
    names = {field.name for field in source.kernel.fields}
    assert ("arg_prefix" in names) == ("prefix" in masks)
    assert ("arg_score_offset" in names) == ("halve" in scores)
    assert ("scale" in names) != ("scale_log2" in names)

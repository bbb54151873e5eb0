"""The worked example of docs/adding-a-fragment.md: its files compile and do what they say."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from attngen import features, files
from attngen.builder import render_problem
from attngen.compile import compile_source
from attngen.plan import plans
from attngen.resolve import resolve
from attngen.spec import AttentionSpec
from tests.cpu.conftest import EXCERPT, HOST_HEAD

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-fragment.md"
FILES = dict(re.findall(r"^```jinja templates/(\S+)\n(.*?)^```$", PAGE.read_text(), re.M | re.S))
HARNESS = """
extern "C" int sees(int prefix, int i, int j, int q_len, int kv_len, int delta) {
  const Context ctx = {0, 0, q_len, kv_len, delta};
  const PrefixMask mask = {prefix};
  const Range row = mask.row_range(ctx, i), column = mask.col_range(ctx, j);
  const bool by_row = row.lo <= j && j < row.hi, by_column = column.lo <= i && i < column.hi;
  return by_row == by_column ? by_row : -1;
}
extern "C" float apply(float coolness, float score) {
  return TemperatureScore{coolness}.apply(Context{}, score, Place<false>{});
}
extern "C" float grad(float coolness, float score) {
  return TemperatureScore{coolness}.grad(Context{}, score, 0.f, Place<false>{});
}
}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The shipped templates and those of the page."""
    folder = Path(shutil.copytree(files.templates_dir(), tmp_path_factory.mktemp("docs") / "t"))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def code(root, compile_cpp):
    from attngen.render import emit_fragment

    known = features.scan(root)
    structs = [known["mask"]["prefix"], known["score"]["temperature"]]
    text = HOST_HEAD + "\n".join(emit_fragment(root, each) for each in structs) + HARNESS
    return ctypes.CDLL(str(compile_cpp(text, *EXCERPT)))


def test_page_has_a_mask_and_a_score() -> None:
    assert [*FILES] == ["mask/prefix.cuh.j2", "score/temperature.cuh.j2"]


@pytest.mark.parametrize("delta", [0, 3, -2])
def test_mask_sees_the_prefix_and_the_past(code, delta) -> None:
    for prefix in range(6):
        for i, j in np.ndindex(7, 9):
            wanted = j < prefix or j <= i + delta
            assert code.sees(prefix, i, j, 7, 9, delta) == wanted, (prefix, i, j)


def test_score_derivative_is_that_of_its_value(code) -> None:
    code.apply.restype = code.grad.restype = ctypes.c_float
    for coolness, score in ((0.5, 3.0), (2.0, -1.25)):
        given = ctypes.c_float(coolness), ctypes.c_float(score)
        assert code.apply(*given) == coolness * score and code.grad(*given) == coolness


def test_mask_is_named_in_a_spec_and_both_compile_in_both_directions(root, make_problem) -> None:
    known = features.scan(root)
    (named,) = resolve(AttentionSpec(head_dim=128, mask="prefix"), known)
    assert named.masks == ("prefix",)
    forward = make_problem(128, masks=("prefix",), scores=("temperature",))
    for problem in (forward, forward.backward()):
        for plan in plans(problem, "sm_90a"):
            source = render_problem(problem, plan, root)
            binary, _ = compile_source(source, problem, "sm_90a")
            assert binary.resources.spill_bytes == 0
            if plan.family.startswith("sm90"):
                wanted = {"prefix", "coolness", "coolness_stride_head"}
                assert wanted <= {field.name for field in source.kernel.fields}

"""The example of docs/internals/adding-a-fragment.md: its files compile and do what they say, alone
and in kernels."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from attngen.call.operands import extent
from attngen.compiler.builder import render_problem
from attngen.compiler.compile import compile_source
from attngen.fragments import features
from attngen.io import files
from attngen.kernels.plan import plans
from attngen.runtime import launch, run_time
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.resolve import resolve
from tests.emulator import device
from tests.support.paths import ROOT
from tests.unit.conftest import EXCERPT, HOST_HEAD

PAGE = ROOT / "docs" / "internals" / "adding-a-fragment.md"
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
    from attngen.kernels.fill import emit_fragment

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
                wanted = {"arg_prefix", "arg_coolness", "arg_coolness_stride_head"}
                assert wanted <= {field.name for field in source.kernel.fields}


def run(root, folder, problem, tensors, numbers):
    """Runs the kernels of a problem on the host; what they write is among the tensors."""
    extents = {name: extent(x, "bshd") for name, x in tensors.items() if x.ndim == 4}
    scalars = run_time.Scalars(problem.head_dim_qk**-0.5, numbers=numbers)
    emulator = device.Emulator(folder)
    with device.emulated(emulator):
        for plan in plans(problem, "sm_90a"):
            loaded = emulator.load(*emulator.build(problem, plan, "sm_90a", root), 0)
            sizes = run_time.workspace_bytes(loaded.kernel, extents["q"])
            for name in sizes.keys() - tensors.keys():  # kernels share them
                tensors[name] = torch.zeros(sizes[name], dtype=torch.uint8)
            addresses = {name: x.data_ptr() for name, x in tensors.items()} | {"dlse": 0}
            launch.launch(launch.prepare(loaded, extents, scalars), addresses, 0)


@pytest.mark.slow
def test_kernels_of_both_are_right(root, tmp_path, make_problem) -> None:
    length, prefix = 300, 170
    problem = make_problem(64, masks=("prefix",), scores=("temperature",))
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_o = (torch.randn(1, length, 2, 64, generator=generator).bfloat16() for _ in "qkvd")
    coolness = torch.tensor([0.5, 2.0])
    empty = {name: torch.full_like(q, torch.nan) for name in ("o", "dq", "dk", "dv")}
    given = {"q": q, "k": k, "v": v, "arg_coolness": coolness, "lse": torch.empty(1, 2, length)}
    numbers = {"arg_prefix": prefix, "arg_coolness_stride_head": 1}
    run(root, tmp_path, problem, (found := given | {"o": empty["o"]}), numbers)
    run(root, tmp_path, problem.backward(), (back := found | empty | {"d_o": d_o}), numbers)

    exact = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].mT / 8 * coolness[:, None, None]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen[:, :prefix] = True
    out = scores.where(seen, -torch.inf).softmax(-1) @ exact[2]
    gradients = torch.autograd.grad(out, exact, d_o.double().transpose(1, 2))
    for name, wanted in zip(("o", "dq", "dk", "dv"), (out, *gradients), strict=True):
        error = (back[name].transpose(1, 2) - wanted).abs().max()
        assert error < 0.01 * wanted.abs().max(), name

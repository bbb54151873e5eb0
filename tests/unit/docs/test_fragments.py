"""The example of docs/internals/adding-a-fragment.md: its files compile and do what they say, alone
and in calls, on kernels and on the reference."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest
import torch

import attngen
from attngen.compiler.builder import render_problem
from attngen.compiler.compile import compile_source
from attngen.fragments import features
from attngen.io import files
from attngen.kernels.fill import emit_fragment
from attngen.kernels.plan import plans
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.resolve import resolve
from tests.emulator import device
from tests.support.own_fragments import kept
from tests.support.paths import ROOT
from tests.unit.conftest import EXCERPT, HOST_HEAD

PAGE = (ROOT / "docs" / "internals" / "adding-a-fragment.md").read_text()
FILES = dict(re.findall(r"^```jinja templates/(\S+)\n(.*?)^```$", PAGE, re.M | re.S))
CALLS = "".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S))
HARNESS = """
extern "C" int sees(int block, int i, int j, int q_len, int kv_len, int delta) {
  const Context ctx = {0, 0, q_len, kv_len, delta};
  const BlockCausalMask mask = {block};
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


@pytest.fixture(scope="module", autouse=True)
def page_files(tmp_path_factory):
    """The page's fragments, registered as those of one's own."""
    folder = tmp_path_factory.mktemp("docs")
    with kept():
        for name, text in FILES.items():
            path = folder / name
            path.parent.mkdir()
            path.write_text(text)
            attngen.register_fragment(path)
        yield


@pytest.fixture(scope="module")
def code(compile_cpp):
    known = features.scan()
    structs = [known["mask"]["block_causal"], known["score"]["temperature"]]
    emitted = [emit_fragment(files.templates_dir(), each) for each in structs]
    text = HOST_HEAD + "\n".join(emitted) + HARNESS
    return ctypes.CDLL(str(compile_cpp(text, *EXCERPT)))


def test_page_has_a_mask_a_score_and_calls_of_them() -> None:
    assert [*FILES] == ["mask/block_causal.cuh.j2", "score/temperature.cuh.j2"]
    assert CALLS.count("attngen.attention(") == 3


@pytest.mark.parametrize("delta", [0, 3, -2])
def test_mask_sees_its_block_and_those_before(code, delta) -> None:
    for block in range(1, 6):
        for i, j in np.ndindex(7, 9):
            wanted = j // block <= (i + delta) // block
            assert code.sees(block, i, j, 7, 9, delta) == wanted, (block, i, j)


def test_score_derivative_is_that_of_its_value(code) -> None:
    code.apply.restype = code.grad.restype = ctypes.c_float
    for coolness, score in ((0.5, 3.0), (2.0, -1.25)):
        given = ctypes.c_float(coolness), ctypes.c_float(score)
        assert code.apply(*given) == coolness * score and code.grad(*given) == coolness


@pytest.mark.slow
def test_both_are_named_in_a_spec_and_compile_in_both_directions() -> None:
    spec = AttentionSpec(
        head_dim=128,
        mask="block_causal+chunked",
        score_mod="temperature",
        directions=("fwd", "bwd"),
    )
    for problem in resolve(spec, features.scan()):
        assert problem.masks == ("block_causal", "chunked")
        for plan in plans(problem, "sm_90a"):
            source = render_problem(problem, plan)
            binary, _ = compile_source(source, problem, "sm_90a")
            assert binary.resources.spill_bytes == 0
            if plan.family.startswith("sm90"):
                wanted = {"arg_block", "arg_chunked", "arg_coolness", "arg_coolness_stride_head"}
                assert wanted <= {field.name for field in source.kernel.fields}


def test_calls_of_the_page_are_those_of_the_reference() -> None:
    q, k, v = (torch.randn(1, 300, 2, 16) for _ in "qkv")
    found: dict = {"attngen": attngen, "q": q, "k": k, "v": v, "coolness": torch.tensor([0.5, 2])}
    for line in CALLS.strip().splitlines():
        exec(line, found)
        assert found["out"].shape == q.shape and not found["out"].isnan().any()


@pytest.mark.slow
def test_kernels_of_both_are_right(tmp_path) -> None:
    length, block = 300, 128
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, length, 2, 64, generator=generator).bfloat16() for _ in "qkvo"]
    *leaves, d_o = [x.requires_grad_() for x in tensors]
    coolness = torch.tensor([0.5, 2.0])
    with device.emulated(device.Emulator(tmp_path)):
        out = attngen.attention(
            *leaves, mask="block_causal", block=block, score_mod="temperature",
            coolness=coolness, backend="cuda",
        )  # fmt: skip
        found = (out, *torch.autograd.grad(out, leaves, d_o.detach()))

    exact = [x.detach().double().transpose(1, 2).requires_grad_() for x in leaves]
    scores = exact[0] @ exact[1].mT / 8 * coolness[:, None, None]
    blocks = torch.arange(length) // block
    seen = blocks[:, None] >= blocks
    wanted = scores.where(seen, -torch.inf).softmax(-1) @ exact[2]
    gradients = torch.autograd.grad(wanted, exact, d_o.detach().double().transpose(1, 2))
    for name, one, other in zip(("o", "dq", "dk", "dv"), found, (wanted, *gradients), strict=True):
        error = (one.transpose(1, 2) - other).abs().max()
        assert error < 0.01 * other.abs().max(), name

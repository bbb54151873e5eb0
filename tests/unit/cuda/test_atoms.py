"""Instructions by CUTLASS's wrappers: those of warpgroups, which measure our own statements."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from attngen.compiler import compile as compiler
from attngen.compiler import cutlass
from attngen.compiler.builder import render_problem
from attngen.compiler.compile import read_resources, run_nvrtc
from attngen.io import files
from attngen.kernels.plan import plans
from attngen.spec.problem import Problem
from attngen.targets.target import DEFAULT
from tests.support.forward_kit import CAUSAL
from tests.support.paths import ROOT
from tests.support.sass import count_instructions

NARROW = replace(CAUSAL, head_dim_qk=64, head_dim_v=64)
# Products, and what moves their operands and results.
COMPARED = (
    *("HGMMA", "HMMA", "LDSM", "STSM", "LDS", "STS", "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP"),
    *("MOV", "UMOV", "R2UR", "S2R", "LDL", "STL", "PRMT", "F2FP"),
)
WRAPPERS = "cute/arch/mma_sm90_gmma.hpp"
# A log of synchronisation that is never on, and a type that no other wrapper names.
STAND_IN = b"""#pragma once
#define SYNCLOG(event) \\
  template <class... Any> __device__ __forceinline__ void synclog_emit_##event(Any...) {}
namespace cute { using int32_t = int; }
namespace cutlass::arch {
SYNCLOG(warpgroup_arrive)
SYNCLOG(warpgroup_commit_batch)
SYNCLOG(warpgroup_wait)
SYNCLOG(wgmma_reg_smem)
SYNCLOG(wgmma_smem_smem)
}  // namespace cutlass::arch
"""


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Templates whose products of warpgroups are CUTLASS's."""
    root = tmp_path_factory.mktemp("wrapped") / "templates"
    shutil.copytree(files.templates_dir(), root)
    shutil.copyfile(ROOT / "tests/support/cutlass_wgmma.cuh.j2", root / "mma/wgmma.cuh.j2")
    return root


def compile_counted(text: str) -> tuple[Counter[str], int]:
    """Counts of the instructions compared, and registers."""
    made = run_nvrtc(text, "kernel.cu", DEFAULT.name)
    found = count_instructions(made.cubin)
    resources = read_resources(made.log, len(made.cubin))
    return Counter({name: found[name] for name in COMPARED}), resources.registers


@pytest.mark.parametrize(
    ("problem", "kernel"),
    [
        pytest.param(NARROW, "sm90_fwd", id="forward-64"),
        pytest.param(CAUSAL, "sm90_fwd", id="forward-128", marks=pytest.mark.slow),
        pytest.param(CAUSAL.backward(), "sm90_bwd", id="backward-128", marks=pytest.mark.slow),
    ],
)
def test_our_products_of_warpgroups_compile_to_what_cutlass_wrappers_do(
    problem: Problem, kernel: str, templates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = next(each for each in plans(problem, DEFAULT.name) if each.family == kernel)
    own, registers = compile_counted(render_problem(problem, plan).text)
    wrapped = render_problem(problem, plan, templates).text
    package = importlib.metadata.distribution(cutlass.PACKAGE)
    text = Path(str(package.locate_file(f"cutlass_library/source/include/{WRAPPERS}"))).read_bytes()
    headers = {WRAPPERS: text, "cutlass/arch/synclog.hpp": STAND_IN}
    monkeypatch.setattr(compiler.cutlass, "supply", lambda _: headers)
    theirs, their_registers = compile_counted(f"#include <{WRAPPERS}>\n{wrapped}")
    assert "wgmma.mma_async" not in wrapped and own["HGMMA"] >= 8
    assert own == theirs and abs(registers - their_registers) <= 4

"""Every kernel of the example specs compiles into one that may ship."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen import load_specs
from attngen.compiler import batch
from attngen.compiler.cache import Cache
from tests.support.paths import ROOT
from tests.support.sass import count_instructions
from tools import sweep

SPECS = sorted((ROOT / "examples" / "specs").glob("*.toml"))
QUICK = "llama3-8b"
# Loads and stores of local memory in kernels by products of warps, of which spills are taken that
# are named; around their blocks, 8 bytes.
LOCAL_ACCESSES = {("mma_bwd__full_packed_d64_bf16", "sm_80"): 8}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "path",
    [pytest.param(x, id=x.stem, marks=[pytest.mark.slow] * (x.stem != QUICK)) for x in SPECS],
)
def test_every_kernel_is_a_fast_one(path: Path, tmp_path: Path) -> None:
    jobs, refused = batch.jobs_of(load_specs(path), None)
    assert jobs and not refused
    cache = Cache(tmp_path)
    for outcome in batch.run(jobs, cache):
        label = outcome.job.name
        assert outcome.error is None and outcome.binary is not None, f"{label}: {outcome.error}"
        entry = batch.find_cached(outcome.job, cache)
        assert entry is not None and entry.binary == outcome.binary
        found = count_instructions(entry.cubin)
        product = "QGMMA" if outcome.job.problem.dtype_q in ("e4m3", "e5m2") else "HGMMA"
        of_tiles = outcome.job.plan.family.startswith("sm90")
        assert bool(found[product]) == bool(found["UTMALDG"]) == of_tiles, label
        allowed = LOCAL_ACCESSES.get((label, outcome.job.arch), 0)
        assert found["STL"] + found["LDL"] <= allowed, label
        assert outcome.binary.resources.spill_bytes <= allowed, label
        assert sweep.packed_bytes(entry.cubin) <= sweep.MOST_BYTES, label

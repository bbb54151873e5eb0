"""Several processes: maxima that a group shares, and FSDP2."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

RANKS = 2


@pytest.mark.slow
def test_ranks_share_maxima_and_shards_change_nothing(tmp_path):
    command = [sys.executable, "-m", "tests.support.fp8_ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(tmp_path / "store")],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=200)[1] for process in processes]
        assert not any(process.returncode for process in processes), "\n".join(said)
    finally:
        for process in processes:
            process.kill()

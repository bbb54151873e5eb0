"""The pool of processes of a group: faults of a case end its processes, and no other case."""

from __future__ import annotations

import argparse
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tools import context_parallel
from tools.context_pool import Outcome, Pool


def work(case: str) -> float:
    """A sum over all ranks; or rank 1 raises, ends, at once or behind its reply, or never comes."""
    if dist.get_rank() == 1:
        if case == "raises":
            raise ValueError("of this rank alone")
        if case == "ends":
            os._exit(3)
        if case == "hangs":
            time.sleep(600)
        if case == "leaves":
            threading.Timer(2.0, os._exit, (3,)).start()
    total = torch.tensor(float(len(case)) + dist.get_rank())
    dist.all_reduce(total)
    return float(total)


@pytest.mark.slow
def test_a_fault_costs_one_case_and_a_start() -> None:
    pool = Pool(2, "gloo", work, limit=10.0)
    try:
        assert pool.run("one").results == pool.run("two").results == (7.0, 7.0)
        assert pool.starts == 1
        for case, words in (("raises", "of this rank alone"), ("ends", "its process ended")):
            found = pool.run(case)
            assert not found.results and "rank 1: " in found.fault and words in found.fault
            assert pool.run("next").results == (9.0, 9.0)
        pool.limit = 2.0
        assert "no reply within 2 s" in pool.run("hangs").fault
        pool.limit = 10.0
        assert pool.run("last").results == (9.0, 9.0)
        assert pool.starts == 4
        assert pool.run("leaves").results == (13.0, 13.0)
        for process in pool._processes[1:]:
            process.join()
        assert pool.run("last").results == (9.0, 9.0)
        assert pool.starts == 5
    finally:
        pool.close()


class Known:
    """A pool of two ranks whose first case ends a process, and whose second one is wrong on one."""

    def __init__(self, *_: object) -> None:
        self.asked = 0

    def run(self, asked: tuple[str, object]) -> Outcome:
        self.asked += 1
        if self.asked == 1:
            return Outcome((), "rank 0: its process ended")
        _, case = asked
        ranks = [{"case": str(case), "right": right} for right in (True, self.asked != 2)]
        return Outcome(tuple(ranks))

    def close(self) -> None:
        pass


def test_cases_without_results_and_of_one_wrong_rank_are_wrong(monkeypatch, tmp_path) -> None:
    written: list[object] = []
    monkeypatch.setattr(context_parallel, "Pool", Known)
    monkeypatch.setattr(context_parallel, "write", lambda *given: written.append(given))
    options = argparse.Namespace(
        what="check", gpus=2, device="cuda", limit=1.0, output=tmp_path / "found"
    )
    assert context_parallel.in_pool(options) == 2
    _, name, lines = written.pop()  # type: ignore[misc]
    first, second, *others = lines
    assert name == "check, 2 GPUs" and "process ended" in first["fault"]
    assert not (first["right"] or second["right"]) and all(x["right"] for x in others)

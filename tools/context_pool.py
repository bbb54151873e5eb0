"""A pool of processes that are one group of torch.distributed: cases one after another.

A case that raises, crashes or takes longer than its limit is one fault, whose processes end; the
next case has new ones.
"""

from __future__ import annotations

import datetime
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Work = Callable[[Any], Any]
READY = "ready"
START_SECONDS = 120.0  # that processes have to find each other


class Outcome(NamedTuple):
    """The results of a case by rank, or why there are none."""

    results: tuple[Any, ...]
    fault: str = ""


class Reply(NamedTuple):
    """A worker's result, or the text of what it raised."""

    result: Any
    raised: str = ""


def _serve(rank: int, ranks: int, backend: str, folder: str, work: Work, pipe: Connection) -> None:
    """One process: it joins the group, and replies to each case until there is no more."""
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", socket.if_nameindex()[0][1])
    place = f"file://{Path(folder, 'store')}"
    limit = datetime.timedelta(seconds=START_SECONDS)
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=ranks, timeout=limit)
    pipe.send(Reply(READY))
    while (case := pipe.recv()) is not None:
        try:
            pipe.send(Reply(work(case)))
        except Exception:  # whatever it is, the parent says it
            pipe.send(Reply(None, traceback.format_exc()))
    dist.destroy_process_group()


@dataclass
class Pool:
    """Processes of one group, started when a case needs them.

    ranks: how many; backend: `nccl`, a GPU each, or `gloo`; work: what each does with a case, a
    function of a module; limit: seconds of a case. starts: how often processes were started.
    """

    ranks: int
    backend: str
    work: Work
    limit: float
    starts: int = 0
    _processes: list[Any] = field(default_factory=list)
    _pipes: list[Connection] = field(default_factory=list)
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, case: Any) -> Outcome:
        """Have all ranks do a case."""
        if not all(process.is_alive() for process in self._processes):  # behind their last case
            self._stop()
        if not self._processes and (fault := self._start()):
            return Outcome((), fault)
        found = self._sent(case) or self._replies(self.limit)
        if found.fault:
            self._stop()
        return found

    def close(self) -> None:
        """End the processes, which have nothing left to do."""
        self._sent(None)
        for process in self._processes:
            process.join(START_SECONDS)
        self._stop()

    def _sent(self, case: Any) -> Outcome | None:
        """Give all ranks a case; the fault where the process of one has ended."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(case)
            except OSError:
                return Outcome((), f"rank {rank}: its process ended")
        return None

    def _start(self) -> str:
        """Start processes; why they do not find each other, empty where they do."""
        self.starts += 1
        self._folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        for rank in range(self.ranks):
            here, there = context.Pipe()
            given = (rank, self.ranks, self.backend, self._folder.name, self.work, there)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        found = self._replies(START_SECONDS)
        if found.fault:
            self._stop()
        return found.fault

    def _replies(self, seconds: float) -> Outcome:
        """Wait for the replies of all ranks, so many seconds."""
        end, found = time.monotonic() + seconds, dict[int, Any]()
        waited = {id(pipe): rank for rank, pipe in enumerate(self._pipes)}
        while len(found) < self.ranks:
            pending = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
            ready = wait(pending, max(0.0, end - time.monotonic()))
            if not ready:
                missing = sorted({*range(self.ranks)} - {*found})
                return Outcome((), f"ranks {missing}: no reply within {seconds:.0f} s")
            for pipe in ready:
                rank = waited[id(pipe)]
                try:
                    reply = self._pipes[rank].recv()
                except (EOFError, OSError):
                    return Outcome((), f"rank {rank}: its process ended")
                if reply.raised:
                    return Outcome((), f"rank {rank}: {reply.raised}")
                found[rank] = reply.result
        return Outcome(tuple(found[rank] for rank in range(self.ranks)))

    def _stop(self) -> None:
        """End the processes at once, and forget them."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

"""Batch: many specs built at once, each kernel once, every failure collected."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from ..errors import AttngenError, CacheError, CompilerMissing, SpecError
from ..fragments import features
from ..io.values import to_data, to_json
from ..kernels.base import KernelPlan
from ..kernels.plan import plans
from ..runtime.program import Binary
from ..ship.bundle import BundledKernel, Program
from ..spec import resolve
from ..spec.attention_spec import AttentionSpec, Placed
from ..spec.problem import Problem, Variant
from ..spec.variants import find_faults
from .builder import Built, build_plan
from .cache import Cache, Entry
from .digest import cache_key, digest_text


@dataclass(frozen=True)
class Job:
    """One kernel to build, one of several where the problem is a backward, and the titles of the
    specs that ask for it."""

    problem: Problem
    plan: KernelPlan
    arch: str
    titles: tuple[str, ...]

    @property
    def name(self) -> str:
        """The kernel and what it computes, as its symbol has them; of kernels that prepare either
        direction those of a backward say so."""
        name = f"{self.plan.family}__{self.problem.label}"
        prepares = self.problem.direction == "bwd" and "bwd" not in self.plan.family
        return f"{name}_backward" if prepares else name


@dataclass(frozen=True)
class Outcome:
    """The end of a job: its launch program, and whether the cache had it; the `error` that
    stopped it or kept it from being stored; seconds of wall time. The cubin is in the cache."""

    job: Job
    binary: Binary | None
    cached: bool
    error: AttngenError | OSError | None
    seconds: float


def jobs_of(
    specs: Iterable[AttentionSpec | Placed], arch: str | None
) -> tuple[list[Job], list[AttngenError]]:
    """The distinct kernels of the specs, in their order, and what was refused, with its place in a
    file where that is known.

    arch: replaces the architectures that the specs name, of several with commas between them; None
    keeps them.
    """
    titles: dict[tuple[Problem, KernelPlan, str], list[str]] = {}
    refused: list[AttngenError] = []
    for each in specs:
        spec, place = (each.spec, each.place) if isinstance(each, Placed) else (each, None)
        asked = spec if arch is None else dataclasses.replace(spec, arch=tuple(arch.split(",")))
        try:
            problems = resolve.resolve(asked, features.scan(), place)
        except AttngenError as error:
            refused.append(error)
            continue
        for problem, name in itertools.product(problems, asked.arch):
            try:
                found = plans(problem, name)
            except AttngenError as error:
                refused.append(error)
                continue
            for chosen in found:
                titles.setdefault((problem, chosen, name), []).append(spec.title)
    jobs = [Job(*key, tuple(dict.fromkeys(names))) for key, names in titles.items()]
    return jobs, refused


def jobs_for(
    variants: Iterable[Variant],
    title: str,
    arch: str | None = None,
    places: Mapping[Variant, str] | None = None,
) -> tuple[list[Job], list[AttngenError]]:
    """The kernels of problems that a trace names, for windows of any size, and what was refused,
    by the rules for specs.

    places: where each variant was read, for those that are refused; arch: as in `jobs_of`.
    """
    jobs: list[Job] = []
    refused: list[AttngenError] = []
    named: dict[Variant, None] = {}
    for problem, name in variants:
        for wanted in (arch or name).split(","):
            if faults := find_faults(problem, wanted, features.scan()):
                where = (places or {}).get((problem, name), title)
                refused.append(SpecError([f"{where}: {fault}" for fault in faults]))
            else:
                named |= dict.fromkeys((each, wanted) for each in problem.orders())
    for problem, name in named:
        try:
            jobs += [Job(problem, each, name, (title,)) for each in plans(problem, name)]
        except AttngenError as error:
            refused.append(error)
    return jobs, refused


def join(jobs: Iterable[Job]) -> list[Job]:
    """The jobs, those for one kernel made one with the titles of all."""
    titles: dict[tuple[Problem, KernelPlan, str], dict[str, None]] = {}
    for job in jobs:
        key = (job.problem, job.plan, job.arch)
        titles.setdefault(key, {}).update(dict.fromkeys(job.titles))
    return [Job(*key, tuple(names)) for key, names in titles.items()]


def shard(jobs: Iterable[Job], index: int, count: int) -> list[Job]:
    """The jobs of one of `count` machines, counted from 1: decided by each problem's digest alone,
    so that a problem's kernels stay together, and a new spec moves none of the others."""
    return [
        job
        for job in jobs
        if int(digest_text(f"{job.arch} {to_json(job.problem)}"), 16) % count == index - 1
    ]


def programs_of(outcomes: Iterable[Outcome]) -> list[Program]:
    """Programs for a bundle, of jobs that all went well: the kernels of each problem together."""
    found: dict[Variant, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault((outcome.job.problem, outcome.job.arch), []).append(outcome)
    return [_program(*key, of_problem) for key, of_problem in found.items()]


def _program(problem: Problem, arch: str, outcomes: list[Outcome]) -> Program:
    binaries = {outcome.job.plan: outcome.binary for outcome in outcomes}
    titles = {title: None for outcome in outcomes for title in outcome.job.titles}
    kernels = tuple(
        BundledKernel(binary, to_data(each), cache_key(problem, each, arch).digest)
        for each in plans(problem, arch)
        if (binary := binaries[each]) is not None
    )
    return Program(problem, arch, tuple(titles), kernels)


def find_cached(job: Job, cache: Cache) -> Entry | None:
    """The job's kernel where the cache has it; nothing is built."""
    return cache.get(cache_key(job.problem, job.plan, job.arch))


def cubins_of(outcomes: Iterable[Outcome], cache: Cache) -> Callable[[Binary], bytes]:
    """Reads the cubins of jobs that all went well, one at a time, from the cache that has them.

    Raises: CacheError where it no longer does.
    """
    jobs = {outcome.binary: outcome.job for outcome in outcomes}

    def read(binary: Binary) -> bytes:
        entry = find_cached(jobs[binary], cache)
        if entry is None or entry.binary != binary:
            raise CacheError(f"{jobs[binary].name}: {cache.root} has lost it: build again")
        return entry.cubin

    return read


def run(jobs: list[Job], cache: Cache, workers: int | None = None) -> Iterator[Outcome]:
    """Build the jobs in threads (NVRTC releases the GIL); yields each outcome as it comes.

    workers: threads, None for one a core that this process may use.
    Raises: CompilerMissing, since then no job that compiles can succeed.
    """
    count = workers or len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(max_workers=max(1, min(count, len(jobs))))
    try:
        for done in as_completed([pool.submit(_build, job, cache) for job in jobs]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _build(job: Job, cache: Cache) -> Outcome:
    start = time.perf_counter()
    built: Built | None = None
    failure: AttngenError | OSError | None = None
    try:
        built = build_plan(job.problem, job.plan, job.arch, cache=cache)
        if not built.from_cache and find_cached(job, cache) is None:
            failure = CacheError(f"compiled, but {cache.root} cannot keep it")
    except CompilerMissing:
        raise  # it is every job's
    except (AttngenError, OSError) as error:
        failure = error
    binary, cached = (built.binary, built.from_cache) if built else (None, False)
    return Outcome(job, binary, cached, failure, time.perf_counter() - start)

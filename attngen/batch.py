"""Batch: many specs built at once, each kernel once, every failure collected."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from . import features, resolve
from .builder import Built, build_plan
from .bundle import BundledKernel, Program
from .cache import Cache
from .digest import cache_key
from .errors import AttngenError, CacheError
from .plan import KernelPlan, plans
from .problem import Problem
from .spec import AttentionSpec
from .values import to_data


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
        """What it is and computes: `sm90_bwd_dq__full_d256_bf16`."""
        return f"{self.plan.family}__{self.problem.label}"


@dataclass(frozen=True)
class Outcome:
    """What became of a job: `built`, and the `error` that stopped it or kept it from being stored;
    seconds of wall time."""

    job: Job
    built: Built | None
    error: AttngenError | OSError | None
    seconds: float


def jobs_of(
    specs: Iterable[AttentionSpec], arch: str | None
) -> tuple[list[Job], list[AttngenError]]:
    """The distinct kernels of the specs, in their order, and what was refused.

    arch: replaces the architectures that the specs name; None keeps them.
    """
    titles: dict[tuple[Problem, KernelPlan, str], list[str]] = {}
    refused: list[AttngenError] = []
    for spec in specs:
        asked = spec if arch is None else dataclasses.replace(spec, arch=(arch,))
        try:
            found = [
                (problem, each, name)
                for problem in resolve.resolve(asked, features.scan())
                for name in asked.arch
                for each in plans(problem, name)
            ]
        except AttngenError as error:
            refused.append(error)
            continue
        for key in found:
            titles.setdefault(key, []).append(spec.title)
    jobs = [Job(*key, tuple(dict.fromkeys(names))) for key, names in titles.items()]
    return jobs, refused


def jobs_for(variants: Iterable[tuple[Problem, str]], title: str) -> list[Job]:
    """The kernels of problems that a trace names. Raises: PlanError."""
    return [
        Job(problem, each, arch, (title,))
        for problem, arch in variants
        for each in plans(problem, arch)
    ]


def join(jobs: Iterable[Job]) -> list[Job]:
    """The jobs, those for one kernel made one with the titles of all."""
    titles: dict[tuple[Problem, KernelPlan, str], dict[str, None]] = {}
    for job in jobs:
        key = (job.problem, job.plan, job.arch)
        titles.setdefault(key, {}).update(dict.fromkeys(job.titles))
    return [Job(*key, tuple(names)) for key, names in titles.items()]


def programs_of(outcomes: Iterable[Outcome]) -> list[Program]:
    """What a bundle keeps of jobs that all went well: the kernels of each problem together."""
    found: dict[tuple[Problem, str], dict[KernelPlan, Outcome]] = {}
    for outcome in outcomes:
        key = (outcome.job.problem, outcome.job.arch)
        found.setdefault(key, {})[outcome.job.plan] = outcome
    return [_program(*key, of_plans) for key, of_plans in found.items()]


def _program(problem: Problem, arch: str, of_plans: dict[KernelPlan, Outcome]) -> Program:
    ordered = [of_plans[each] for each in plans(problem, arch)]
    built = [outcome.built for outcome in ordered if outcome.built is not None]
    titles = {title: None for outcome in ordered for title in outcome.job.titles}
    kernels = tuple(
        BundledKernel(each.binary, to_data(each.plan), cache_key(problem, each.plan, arch).digest)
        for each in built
    )
    return Program(problem, arch, tuple(titles), kernels, tuple(each.cubin for each in built))


def run(jobs: list[Job], cache: Cache, workers: int | None = None) -> Iterator[Outcome]:
    """Build the jobs in threads (NVRTC releases the GIL); yields each outcome as it comes.

    workers: threads, None for one a core that this process may use.
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
        if not built.from_cache and cache.get(cache_key(job.problem, job.plan, job.arch)) is None:
            failure = CacheError(f"compiled, but {cache.root} cannot keep it")
    except (AttngenError, OSError) as error:
        failure = error
    return Outcome(job, built, failure, time.perf_counter() - start)

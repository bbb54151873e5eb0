"""Build: the one composer of the stages, from a spec to launch programs, cached."""

from __future__ import annotations

import dataclasses
import functools
import logging
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CacheError, CompilerMissing
from ..fragments import features
from ..io import files
from ..kernels.base import KernelPlan
from ..kernels.family import family_of
from ..kernels.plan import plans
from ..kernels.selection import of_call
from ..runtime.program import Binary
from ..ship import lookup as mounts
from ..spec import resolve
from ..spec.attention_spec import AttentionSpec, checked
from ..spec.problem import Problem
from . import digest
from .cache import Cache, jit_disabled

if TYPE_CHECKING:
    from ..kernels.fill import Source

log = logging.getLogger("attngen")


@dataclass(frozen=True)
class Built:
    """A launch program with its cubin, the plan behind it, and whether the cache held it."""

    problem: Problem
    plan: KernelPlan
    binary: Binary
    cubin: bytes = field(repr=False)
    from_cache: bool


def build(
    spec: AttentionSpec, arch: str | None = None, *, cache: Cache | None = None
) -> tuple[Built, ...]:
    """Compile every kernel of the spec that the cache lacks; nothing is run and no driver used.

    arch: an architecture's name, or None for those that the spec names. cache: the default cache
    where None. Returns one `Built` for each kernel of each architecture and direction.
    Raises: SpecError, PlanError, CompileError (CompilerMissing where Jinja or NVRTC is not
    installed); CacheError where ATTNGEN_DISABLE_JIT forbids it.
    """
    spec = checked(spec)
    problems = resolve.resolve(spec, features.scan())
    arches = spec.arch if arch is None else (arch,)
    return tuple(
        built
        for name in arches
        for problem in problems
        for built in build_problem(problem, name, cache=cache)
    )


def build_problem(
    problem: Problem, arch: str, *, cache: Cache | None = None, kernel: str | None = None
) -> tuple[Built, ...]:
    """The problem's kernels in the order of `plan.plans`, each from the cache or compiled and put
    there. kernel: the name of the one to take of several that make the same, None for all.

    Raises: CacheError with all that are missing, where ATTNGEN_DISABLE_JIT forbids to build them.
    """
    built: list[Built] = []
    missing: dict[str, None] = {}
    wanted = of_call(plans(problem, arch), lambda plan: plan.family, kernel)
    for each in wanted:
        try:
            built.append(build_plan(problem, each, arch, cache=cache))
        except CacheError as error:
            missing |= dict.fromkeys(error.reasons)
    if missing:
        raise CacheError(missing)
    return tuple(built)


def find_kernels(
    problem: Problem, arch: str, kernel: str | None = None
) -> tuple[tuple[Binary, bytes], ...]:
    """Launch programs and cubins of a problem, as a call needs them: from a mounted bundle, else
    from the cache, else compiled. kernel: as `build_problem` has it. Raises: as that; BundleError.
    """
    if found := mounts.find(problem, arch, kernel):
        return found
    try:
        made = build_problem(problem, arch, kernel=kernel)
        return tuple((built.binary, built.cubin) for built in made)
    except CacheError as error:
        raise CacheError([*mounts.explain_absence(problem, arch), *error.reasons]) from error


def build_plan(
    problem: Problem, chosen: KernelPlan, arch: str, *, cache: Cache | None = None
) -> Built:
    """The kernel of one plan, preferred or not."""
    key = digest.cache_key(problem, chosen, arch)
    try:
        store = cache or Cache.default()
    except CacheError as error:
        if jit_disabled():
            raise
        _say_not_stored(str(error))
        return Built(problem, chosen, *_compile(problem, chosen, arch), from_cache=False)
    entry = store.get(key)
    if entry is None:
        if not jit_disabled():
            from . import compile as compiler  # only a miss needs the compiler and the templates

            key = dataclasses.replace(key, toolchain=compiler.load_toolchain())
        try:
            entry = store.get_or_build(key, lambda: _compile_unchanged(problem, chosen, arch))
        except _Unkeyed as changed:
            return Built(problem, chosen, *changed.made, from_cache=False)
    return Built(problem, chosen, entry.binary, entry.cubin, entry.hit)


class _Unkeyed(Exception):
    """A kernel was made that its key may not describe."""

    def __init__(self, made: tuple[Binary, bytes]) -> None:
        super().__init__()
        self.made = made


def _compile_unchanged(problem: Problem, chosen: KernelPlan, arch: str) -> tuple[Binary, bytes]:
    """Compile, unless the kernel may not be what its key says: then it is not to be stored.

    Raises: as `_compile`; _Unkeyed where attngen was changed under this process.
    """
    made = _compile(problem, chosen, arch)
    if digest.have_changed(chosen.atoms):
        _say_not_stored("attngen's files have changed since this process read them: start it anew")
        raise _Unkeyed(made)
    return made


def _compile(problem: Problem, chosen: KernelPlan, arch: str) -> tuple[Binary, bytes]:
    from . import compile as compiler

    try:
        import_module("jinja2")  # else threads see halves of renderers that another fails to import
        source = render_problem(problem, chosen)
    except ModuleNotFoundError as error:
        raise CompilerMissing(str(error.name)) from error
    return compiler.compile_source(source, problem, arch)


@functools.cache  # said once
def _say_not_stored(why: str) -> None:
    log.warning("%s; kernels are not stored and compile anew in each process", why)


def render_problem(problem: Problem, plan: KernelPlan, root: Path | None = None) -> Source:
    """The source of one kernel; `root` is a templates directory other than the shipped one."""
    known, folder = features.scan(root), root or files.templates_dir()
    return family_of(plan.family).render(problem, plan, known, folder)

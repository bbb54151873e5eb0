"""Explain: the value of each stage as text, or every reason why a spec has no kernel."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import SpecError
from ..fragments import features
from ..fragments.features import Features
from ..fragments.program_text import facts_of, programs_in
from ..io.files import templates_dir
from ..io.text import printable
from ..io.values import to_data
from ..kernels import tuned
from ..kernels.base import KernelPlan
from ..kernels.family import family_of
from ..kernels.plan import candidates, plans, template_of
from ..spec import resolve
from ..spec.attention_spec import AttentionSpec
from ..spec.problem import Problem
from ..spec.tables import Place
from ..targets.target import TARGETS
from .builder import build_plan, render_problem
from .cache import Cache

INDENT = "  "


def explain(
    spec: AttentionSpec,
    cache: Cache | None,
    *,
    compiled: bool = True,
    place: Place | None = None,
) -> Iterator[str]:
    """The lines that explain a spec: each stage's value in turn.

    cache: where the binary is looked up and kept, None for the default one. compiled: whether to
    go on to the compiler. place: the table that the spec is from.
    Raises: AttngenError where a later stage fails; SpecError of `explain_refusal` where the spec
    has no kernel.
    """
    known = features.scan()
    try:
        problems = resolve.resolve(spec, known)
    except SpecError as error:
        raise explain_refusal(spec, known, place) from error
    yield f"spec {spec.title}"
    yield from _indented(_settings(spec))
    for arch in spec.arch:
        for problem in problems:
            yield ""
            yield f"problem {problem.direction} {problem.label}"
            yield from _indented(describe(problem))
            yield from _explain_programs(problem)
            for chosen in plans(problem, arch):
                yield from _explain_kernel(problem, chosen, arch, cache, compiled)


def explain_refusal(spec: AttentionSpec, known: Features, place: Place | None = None) -> SpecError:
    """Every reason why the spec has no kernel, and the nearest spec that has, ready to paste."""
    violations = resolve.find_violations(spec, known)
    reasons = [f"{spec.title} has no kernel:"]
    for each in violations:
        reasons.append(f"{INDENT}- {f'{place.at(each.field)}: ' if place else ''}{each.reason}")
    reasons += ["nearest legal spec:", *_indented(to_toml(resolve.nearest(spec, known)))]
    return SpecError(reasons)


def to_toml(spec: AttentionSpec) -> Iterator[str]:
    """The spec as the table of a spec file; what has its default is left out."""
    yield "[[kernel]]"
    for name, value in _differing(spec):
        text = list(value) if isinstance(value, tuple) else value
        written = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML escapes it
        yield f"{name} = {written}"


def _explain_kernel(
    problem: Problem, chosen: KernelPlan, arch: str, cache: Cache | None, compiled: bool
) -> Iterator[str]:
    yield ""
    is_tuned = family_of(chosen.family).is_tuned(chosen)
    how = _choice(problem, arch) if is_tuned else "the heuristics' choice"
    yield f"plan {arch} {chosen.family}, {how}"
    yield from _indented(describe(chosen))
    yield ""
    yield "roofline"
    yield from _indented(aim(problem, chosen))
    source = render_problem(problem, chosen)
    yield ""
    yield f"source {source.kernel.entry}.cu"
    yield f"{INDENT}{source.text.count(chr(10))} lines, sha256 {source.sha256}"
    yield f"{INDENT}skeleton {templates_dir() / template_of(chosen)}"
    yield f"{INDENT}`attngen render` prints it"
    if not compiled:
        return
    built = build_plan(problem, chosen, arch, cache=cache)
    yield ""
    yield f"binary {built.binary.toolchain}, {'cached' if built.from_cache else 'compiled now'}"
    yield from _indented(describe(built.binary.resources))
    if chosen.moves_registers:
        yield f"{INDENT}the registers are those at launch; the plan moves them to each role"


def _explain_programs(problem: Problem) -> Iterator[str]:
    """Lines about the scores of a problem that come from callables, and their programs."""
    for program in programs_in(problem.fragment_digests):
        first, *others = facts_of(program)
        yield ""
        yield first
        yield from _indented(others)
        yield from _indented(program.text.split("\n"))


def _choice(problem: Problem, arch: str) -> str:
    """Who chose a forward's plan: a measurement, or the heuristics."""
    entry, fitting = tuned.entry_of(problem, arch), candidates(problem, arch)
    if entry is None:
        return f"the heuristics' choice of {len(fitting)} that fit"
    timed = [candidate.settings for _, candidate in entry.ranked()]
    if tuned.settings(fitting[0]) not in timed:
        return (
            f"the heuristics' choice of {len(fitting)} that fit; what was tuned is not among them"
        )
    return f"tuned: the fastest of {len(timed)} timed on {entry.date}, of {len(fitting)} that fit"


def describe(value: Any) -> Iterator[str]:
    """The fields of a frozen dataclass, one a line; a field of many values takes a line each."""
    data = to_data(value)
    width = max(len(name) for name in data) + 2
    for name, item in data.items():
        lines = [_inline(each) for each in item] if _is_table(item) else [_inline(item)]
        for number, line in enumerate(lines or ["–"]):
            yield f"{name if number == 0 else '':<{width}}{line}"


def aim(problem: Problem, chosen: KernelPlan) -> Iterator[str]:
    """The roofline of a full block: what bounds its time, and how often a loaded byte is used."""
    return family_of(chosen.family).aim(problem, chosen, TARGETS[chosen.arch])


def _settings(spec: AttentionSpec) -> Iterator[str]:
    for name, value in _differing(spec):
        yield f"{name:<10} {_inline(to_data(value))}"
    yield "everything else has its default"


def _differing(spec: AttentionSpec) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.default is dataclasses.MISSING or value != field.default:
            yield field.name, value


def _is_table(item: Any) -> bool:
    """Whether each element deserves a line: it has fields, or is a sentence."""
    return isinstance(item, list) and any(
        isinstance(each, dict) or " " in str(each) for each in item
    )


def _inline(item: Any) -> str:
    if isinstance(item, dict):
        return ", ".join(f"{name} {_inline(each)}" for name, each in item.items())
    if isinstance(item, list):
        return " ".join(_inline(each) for each in item) or "–"
    if isinstance(item, bool):
        return "yes" if item else "no"
    return "–" if item is None else printable(str(item))


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (INDENT + line for line in lines)

"""Explain: the value of each stage as text, or every reason why a spec has no kernel."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import SpecError
from ..fragments import features
from ..fragments.features import Features
from ..io.files import templates_dir
from ..io.text import printable
from ..io.values import to_data
from ..kernels import tuned
from ..kernels.base import Plan
from ..kernels.plan import KernelPlan, candidates, plans, template_of
from ..kernels.wgmma.backward.plans import FUSED, BackwardPlan
from ..kernels.wgmma.decode.plans import DecodePlan
from ..spec import resolve
from ..spec.attention_spec import AttentionSpec
from ..spec.problem import DTYPE_BYTES, Problem
from ..spec.tables import Place
from ..targets.target import TARGETS
from .builder import build_plan, render_problem
from .cache import Cache

INDENT = "  "
# Products of a block over Q's head dim, and over V's: S, dQ, dK; O or dP, dV.
PRODUCTS = {  # else one each
    **dict.fromkeys(FUSED, (3, 2)),
    **{"sm90_bwd_dkv": (2, 2), "sm90_bwd_dq": (2, 1)},
}


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
    tuned_too = chosen.family == "sm90_fwd"
    how = _choice(problem, arch) if tuned_too else "the heuristics' choice"
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
    if isinstance(chosen, Plan | BackwardPlan):
        yield f"{INDENT}the registers are those at launch; the plan moves them to each role"


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
    """The roofline of a full block: cycles of the tensor cores and of the exponentials, and how
    often a loaded byte of the operands that come block by block is used."""
    if isinstance(chosen, DecodePlan):
        rows, size = chosen.tile.m, DTYPE_BYTES[problem.dtype_kv]
        yield (
            f"aims at the memory: {2 * rows // size} FLOPs for each byte of K and V with all "
            f"{rows} rows in use; {chosen.ctas} CTA{'s' if chosen.ctas > 1 else ''} an SM"
        )
        return
    if not isinstance(chosen, Plan | BackwardPlan):
        yield "aims at the memory: no products, each operand read and each result written once"
        return
    d, d_v = problem.head_dim_qk, problem.head_dim_v
    of_qk, of_v = PRODUCTS.get(chosen.family, (1, 1))
    pairs = chosen.tile.m * chosen.tile.n
    flops, size = 2 * pairs * (of_qk * d + of_v * d_v), DTYPE_BYTES[problem.dtype_kv]
    target = TARGETS[chosen.arch]
    mma = flops * size / target.mma_flops
    exponentials = pairs / target.exponentials
    binding = "tensor cores" if mma > exponentials else "exponentials"
    ctas = chosen.ctas if isinstance(chosen, Plan) else 1
    keys_come = isinstance(chosen, Plan) or chosen.family == "sm90_bwd_dq"
    reuse = flops / ((chosen.tile.n if keys_come else chosen.tile.m) * (d + d_v) * size)
    yield (
        f"aims at the {binding}: {max(mma, exponentials):.0f} cycles a block "
        f"({mma:.0f} of products, {exponentials:.0f} of exponentials)"
    )
    yield (
        f"{reuse:.0f} FLOPs for each byte of {'K and V' if keys_come else 'Q and dO'} that an SM "
        f"loads; {ctas} persistent CTA{'s' if ctas > 1 else ''} an SM"
    )


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

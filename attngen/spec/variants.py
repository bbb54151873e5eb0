"""Variants that come from outside, as in a trace: held against the spec that would name them.

A template takes a problem's fields as they are, so that only those of a spec with kernels may reach
one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..fragments.features import Features, register_programs
from ..io.text import quoted, suggestion
from .attention_spec import AttentionSpec
from .masks import JOINT, joined
from .mixed import MIXED
from .problem import LISTED, Problem
from .resolve import (
    DEFAULT_D_O_DTYPE,
    DEFAULT_GRAD_DTYPE,
    default_out_dtype,
    find_violations,
    resolve,
)

# Fields of a problem that name fragments → the axis of these.
_FRAGMENTS = {
    "masks": "mask",
    "scores": "score",
    "softmax": "softmax",
    "q_seq": "sequence",
    "kv_seq": "sequence",
    "kv_fetch": "fetch",
    "kv_iter": "iteration",
}
# (q_seq, kv_seq) → the layout of a spec: of keys and values in one tensor, and in pages.
_LAYOUTS = {
    ("dense", "dense"): ("bshd", None),
    ("used", "used"): ("bshd", "paged_kv_bshd_bshd_bshd"),
    ("packed", "packed"): ("thd", None),
    ("packed", "dense"): ("thd_bshd_bshd", None),
    ("packed", "used"): ("thd_bshd_bshd", "paged_kv_thd_bshd_bshd"),
}


def spec_of(problem: Problem, arch: str, known: Features) -> AttentionSpec:
    """The spec whose kernels these are, as far as there is one. known: with all its fragments."""
    layouts = _LAYOUTS.get((problem.q_seq, problem.kv_seq), ("bshd", None))
    masks = [known["mask"][name] for name in problem.masks]
    scores = [known["score"][name] for name in problem.scores]
    switches: dict[str, Any] = {
        each.selected_by: each.switch for each in (*masks, *scores) if not each.called
    }
    d, d_v, dtype = problem.head_dim_qk, problem.head_dim_v, problem.dtype_q
    return AttentionSpec(
        head_dim=d,
        head_dim_v=None if d_v == d else d_v,
        dtype=dtype,
        kv_dtype=None if problem.dtype_kv == dtype else problem.dtype_kv,
        out_dtype=None if problem.dtype_o == default_out_dtype(dtype) else problem.dtype_o,
        grad_dtype=_unless(problem.dtype_grad, DEFAULT_GRAD_DTYPE),
        d_o_dtype=_unless(problem.dtype_d_o, DEFAULT_D_O_DTYPE),
        backward=MIXED if problem.mixed else None,
        layout=(problem.paged and layouts[1]) or layouts[0],
        mask=joined([each.name for each in masks if each.called]),
        attn_mask=problem.packs_mask,
        mask_mod=LISTED if problem.made else False,
        score_mod=JOINT.join(each.name for each in scores if each.called) or False,
        softmax=problem.softmax,
        seqused="used" in (problem.q_seq, problem.kv_seq) and not problem.paged,
        decode=problem.decode,
        gather=problem.gather,
        dropout=problem.dropout,
        positions=problem.positions,
        continues=problem.continues,
        return_max_logit=problem.max_logit,
        deterministic=problem.deterministic,
        directions=(problem.direction,),
        arch=(arch,),
        **switches,
    )


def _unless(dtype: str | None, default: str) -> str | None:
    """The dtype as a spec says it: None where it is the default."""
    return None if dtype == default else dtype


def find_faults(problem: Problem, arch: str, known: Features) -> list[str]:
    """Every reason why no spec names the problem; empty where one does. known: all fragments, to
    which programs of the problem's own are added."""
    try:
        register_programs(problem.fragment_digests)
    except ValueError as error:
        return [f"fragment_digests: {error}"]
    if faults := _unknown_fragments(problem, known):
        return faults
    spec = spec_of(problem, arch, known)
    if violations := find_violations(spec, known):
        return [violation.reason for violation in violations]
    named = resolve(spec, known)
    if problem in named:
        return []
    differing = [
        f"{field.name}: {quoted(getattr(problem, field.name))}, where the nearest spec has "
        f"{quoted(getattr(named[0], field.name))}"
        for field in dataclasses.fields(Problem)
        if getattr(problem, field.name) != getattr(named[0], field.name)
    ]
    return [f"no spec names this problem: {'; '.join(differing)}"]


def _unknown_fragments(problem: Problem, known: Features) -> list[str]:
    """Names of fragments that there are none of."""
    faults = []
    for field, axis in _FRAGMENTS.items():
        value = getattr(problem, field)
        for name in dict.fromkeys(value if isinstance(value, tuple) else (value,)):
            if name not in known[axis]:
                meant = suggestion(name, known[axis])
                faults.append(f"{field}: {quoted(name)} is unknown; known: {[*known[axis]]}{meant}")
    return faults

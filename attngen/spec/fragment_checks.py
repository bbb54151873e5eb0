"""Masks and scores that a spec asks for: which there are, and which go together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from ..fragments.features import Features, Fragment
from ..fragments.program import has_program
from ..io.text import closest, suggestion
from . import layouts
from .attention_spec import DTYPES_8BIT, AttentionSpec
from .call_arguments import call_arguments
from .masks import BOTTOM_RIGHT, JOINT, PADDING_MASKS, PLAIN_MASKS, joined, masks_of
from .violations import Violation

_OPERANDS = ("q", "k", "v")
MOST_TENSORS = 4  # that the fragments of a call may read


def mask_names(features: Features) -> list[str]:
    """Names that a spec's mask may have, each also with `_bottom_right` behind it."""
    named = [name for name, mask in features["mask"].items() if mask.called]
    return ["none", *named, *PADDING_MASKS, "arbitrary"]


def score_names(features: Features) -> list[str]:
    """Names that a spec's score_mod may have, beside a function."""
    scores = features["score"].items()
    return [name for name, score in scores if score.called and not score.traced]


def score_words(spec: AttentionSpec) -> tuple[str, ...]:
    """The scores that a spec names, in their order."""
    return tuple(spec.score_mod.split(JOINT)) if isinstance(spec.score_mod, str) else ()


def called_fragments(spec: AttentionSpec, features: Features) -> tuple[Fragment, ...]:
    """The masks and scores that a spec names, in the order in which kernels have them.

    Names that no fragment has are left out.
    """
    named = [("mask", name) for name in masks_of(spec.mask).fragments]
    named += [("score", name) for name in score_words(spec)]
    found = []
    for axis, name in named:
        fragment = features[axis].get(name)
        if fragment is not None and fragment.called:
            # What kernels of attention ask lies in memory, and no call passes it.
            is_asked = axis == "mask" and fragment.traced and spec.directions != ("mask",)
            found.append(replace(fragment, operands=()) if is_asked else fragment)
    return tuple(found)


def switched(spec: AttentionSpec, features: Features, axis: str) -> tuple[Fragment, ...]:
    """The fragments of an axis that fields of a spec ask for without their names, in order."""
    found = [
        each
        for each in features[axis].values()
        if each.selected_by != axis and getattr(spec, each.selected_by) == (each.choice or True)
    ]
    return tuple(sorted(found, key=attrgetter("order", "name")))


def scores_of(spec: AttentionSpec, features: Features) -> tuple[str, ...]:
    """The score fragments of a spec, in the order of application, which their headers say."""
    own, named = switched(spec, features, "score"), score_words(spec)
    before = [each.name for each in own if each.order < 0]
    return (*before, *named, *[each.name for each in own[len(before) :]])


def check_fragments(spec: AttentionSpec, features: Features) -> list[Violation]:
    """Every fault of the masks and scores that a spec names."""
    if spec.mask in PLAIN_MASKS and not isinstance(spec.score_mod, str):
        return []
    return [*_check_masks(spec, features), *_check_scores(spec, features),
            *_check_operands(spec, features)]  # fmt: skip


def _check_masks(spec: AttentionSpec, features: Features) -> Iterator[Violation]:
    known = mask_names(features)
    words = masks_of(spec.mask).fragments
    for word in words:
        if word in known:
            continue
        whole = spec.mask if JOINT not in spec.mask else word
        reason = f"mask {whole!r} is unknown; available: {known}, and with _bottom_right "
        reason += "behind the name for a diagonal that ends there"
        reason += suggestion(whole, [*known, *(f"{each}{BOTTOM_RIGHT}" for each in known)])
        if word in features["mask"]:
            reason = f"mask {whole!r} is a switch of its own: {word} = true"
        legal = [name for name in known if name != "arbitrary"]  # of all kernels
        default = "causal" if "causal" in word else "none"
        meant = closest(whole, legal) or default
        others = [each for each in words if each != word and each in known]
        yield Violation("mask", reason, joined([*others, meant]) if others else meant)
    if len(words) > 1:
        for word in words:
            if word in features["mask"] and features["mask"][word].alone:
                reason = f"mask {word!r} is used alone; got {masks_of(spec.mask).name!r}"
                yield Violation("mask", reason, word)


def _check_scores(spec: AttentionSpec, features: Features) -> Iterator[Violation]:
    known = score_names(features)
    words = score_words(spec)
    for word in words:
        if word in known or ((x := features["score"].get(word)) is not None and x.traced):
            continue
        reason = f"score_mod {word!r} is unknown; available: {known}{suggestion(word, known)}"
        if not known:
            reason = f"score_mod {word!r} is unknown, as no fragment is there that is called; pass "
            reason += "a function, in spec files by its place, as python:mods.py:name"
        if (fragment := features["score"].get(word)) is not None:
            reason = f"score_mod {word!r} is asked for by a field of its own: "
            reason += fragment.selected_by
        yield Violation("score_mod", reason, closest(word, known) or False)
    if spec.decode and has_program(words):
        reason = "score_mod: kernels that split keys have no scores of callables"
        yield Violation("score_mod", reason, False)
    if len(set(words)) < len(words):
        reason = f"score_mod {spec.score_mod!r} names a score twice"
        yield Violation("score_mod", reason, JOINT.join(dict.fromkeys(words)))


def _check_operands(spec: AttentionSpec, features: Features) -> Iterator[Violation]:
    """Operands that a call could not tell apart."""
    own = (*_OPERANDS, *call_arguments(features))
    taken: dict[str, str] = dict.fromkeys(own, "attention itself")
    tensors = 0
    for fragment in called_fragments(spec, features):
        field, nearest = ("mask", "none") if fragment.axis == "mask" else ("score_mod", False)
        for name in names_of(fragment):
            if name in taken:
                reason = f"{fragment.axis} {fragment.name!r} has an operand {name!r}, and so has "
                yield Violation(field, reason + taken[name], nearest)
            taken[name] = f"{fragment.axis} {fragment.name!r}"
        tensors += sum(bool(operand.axes) for operand in fragment.operands)
        if tensors > MOST_TENSORS:
            reason = f"the fragments of a call read at most {MOST_TENSORS} tensors"
            yield Violation(field, reason, nearest)


def names_of(fragment: Fragment) -> Sequence[str]:
    """The arguments by which a call passes a fragment's operands."""
    return [operand.name for operand in fragment.operands]


def check_positions(spec: AttentionSpec) -> list[Violation]:
    """Find what kernels lack that are told where queries and keys stand."""
    named = [each for each in masks_of(spec.mask).fragments if each != "causal"]
    beside = {
        "operands of 8 bits": spec.dtype in DTYPES_8BIT or spec.widens,
        "pages": layouts.parse(spec.layout).paged,
        "masks of fragments": bool(named),
        "scores of fragments": isinstance(spec.score_mod, str),
    }
    return [
        Violation("positions", f"positions beside {name} have no kernels", False)
        for name, there in beside.items()
        if there
    ]


def check_continues(spec: AttentionSpec) -> list[Violation]:
    """Find what kernels lack that join an output and an LSE."""
    layout = layouts.parse(spec.layout)
    beside = {
        "an output in other dtypes than float32": spec.out_dtype != "fp32",
        "operands of 8 bits": spec.dtype in DTYPES_8BIT or spec.widens,
        "lengths of dense sequences": spec.seqused
        or (masks_of(spec.mask).padding and "thd" not in layout.formats),
        "pages": layout.paged,
        "split keys": spec.decode,
        "sinks": spec.softmax != "vanilla",
        "max_logit": spec.return_max_logit,
        "other directions": spec.directions != ("fwd",),
    }  # fmt: skip
    return [
        Violation("continues", f"continues beside {name} has no kernels", False)
        for name, there in beside.items()
        if there
    ]

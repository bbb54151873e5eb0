"""Masks of specs: one name, or several that intersect."""

from __future__ import annotations

import itertools

import pytest

from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.masks import Masks, joined, masks_of
from attngen.spec.resolve import find_violations, nearest, resolve
from tests.unit.spec.test_resolve import KNOWN


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", Masks(())),
        ("causal", Masks(("causal",))),
        ("causal_bottom_right", Masks(("causal",), bottom_right=True)),
        ("padding", Masks((), padding=True)),
        ("padding_causal", Masks(("causal",), padding=True)),
        ("padding_causal_bottom_right", Masks(("causal",), padding=True, bottom_right=True)),
        ("arbitrary", Masks((), arbitrary=True)),
        ("causal+chunked", Masks(("causal", "chunked"))),
        ("chunked+padding_causal", Masks(("causal", "chunked"), padding=True)),
        ("chunked+causal_bottom_right", Masks(("causal", "chunked"), bottom_right=True)),
    ],
)
def test_masks_of_a_name_are_fragments_lengths_and_alignment(name: str, expected: Masks) -> None:
    assert masks_of(name) == expected
    assert masks_of(expected.name) == expected


def test_masks_of_a_list_have_one_name_in_any_order() -> None:
    given = ("causal", "chunked", "padding", "none", "causal")
    assert {joined(each) for each in itertools.permutations(given)} == {"chunked+padding_causal"}
    assert joined(["chunked", "causal_bottom_right"]) == "causal+chunked_bottom_right"
    assert joined(["padding", "causal"]) == "padding_causal" and joined([]) == "none"


def test_resolve_masks_of_several_names_are_one_problem_in_any_order() -> None:
    one, other = (
        resolve(AttentionSpec(head_dim=64, mask=name, window=True), KNOWN)
        for name in ("causal+chunked", "chunked+causal_bottom_right")
    )
    assert one == other and one[0].masks == ("causal", "chunked", "window")


@pytest.mark.parametrize(
    ("mask", "reason", "legal"),
    [
        ("causal+chunkd", "did you mean 'chunked'", "causal+chunked"),
        ("causal+window", "switch of its own: window = true", "causal"),
        ("prefix+causal", "'prefix' is used alone; got 'causal+prefix'", "prefix"),
    ],
)
def test_resolve_masks_that_do_not_go_together_are_refused(mask, reason, legal) -> None:
    spec = AttentionSpec(head_dim=64, mask=mask)
    (violation,) = find_violations(spec, KNOWN)
    assert violation.field == "mask" and reason in violation.reason
    assert nearest(spec, KNOWN).mask == legal
    assert not find_violations(nearest(spec, KNOWN), KNOWN)


def test_resolve_score_that_is_no_fragment_is_refused() -> None:
    for name, reason in (("softcap", "field of its own: softcap"), ("bend", "is unknown")):
        (violation,) = find_violations(AttentionSpec(head_dim=64, score_mod=name), KNOWN)
        assert violation.field == "score_mod" and reason in violation.reason

"""Callables that say what attngen has built in: what stands for them, and that it is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attngen import reference
from attngen.frontends.pytorch.callables import builtins as callable_builtins
from attngen.frontends.pytorch.callables import calls as callables

B, H, ROWS, KEYS = SIZES = 2, 4, 9, 14
Q = torch.empty(B, ROWS, H, 8, dtype=torch.bfloat16)
PREFIXES = torch.tensor([3, 7], dtype=torch.int32)
SLOPES = torch.linspace(0.1, 0.7, H)
OF_SEQUENCES = torch.linspace(0.1, 0.9, B * H).view(B, H)
Mod = Callable[..., torch.Tensor]

MASKS: dict[str, tuple[Mod, dict[str, Any]]] = {
    "causal": (lambda b, h, i, j: i >= j, {"mask": "causal"}),
    "causal, turned": (lambda b, h, i, j: j <= i, {"mask": "causal"}),
    "behind": (lambda b, h, i, j: (j <= i) & (i - j < 4), {"mask": "causal", "window": (3, 0)}),
    "up to": (lambda b, h, i, j: (i - j <= 4) & (i >= j), {"mask": "causal", "window": (4, 0)}),
    "around": (lambda b, h, i, j: (j - i).abs() <= 2, {"window": (2, 2)}),
    "prefix": (lambda b, h, i, j: (j < 5) | (j <= i), {"mask": "prefix", "prefix": 5}),
    "prefixes": (
        lambda b, h, i, j: (i >= j) | (j < PREFIXES[b]),
        {"mask": "prefix", "prefix": PREFIXES},
    ),
    "chunks": (lambda b, h, i, j: i // 4 == j // 4, {"mask": "chunked", "chunked": 4}),
    "causal chunks": (
        lambda b, h, i, j: (j <= i) & (j // 4 == i // 4),
        {"mask": "causal+chunked", "chunked": 4},
    ),
    "all": (lambda b, h, i, j: b.new_ones((), dtype=torch.bool), {}),
}
SCORES: dict[str, tuple[Mod, dict[str, Any]]] = {
    "cap": (lambda s, b, h, i, j: 3 * torch.tanh(s / 3), {"softcap": 3.0}),
    "cap of 1": (lambda s, b, h, i, j: torch.tanh(s), {"softcap": 1.0}),
    "off": (lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(), {"alibi_slopes": SLOPES}),
    "on": (lambda s, b, h, i, j: -(i - j).abs() * SLOPES[h] + s, {"alibi_slopes": SLOPES}),
    "of sequences": (
        lambda s, b, h, i, j: s - (j - i).abs() * OF_SEQUENCES[b, h],
        {"alibi_slopes": OF_SEQUENCES},
    ),
}
BELOW: dict[str, Mod] = {  # ALiBi where keys behind the query are hidden
    "forwards": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "backwards": lambda s, b, h, i, j: s - (i - j) * SLOPES[h],
}
TABLES = {
    "of pairs": (torch.randn(ROWS, KEYS), lambda t: lambda s, b, h, i, j: s + t[i, j]),
    "of heads": (torch.randn(H, ROWS, KEYS), lambda t: lambda s, b, h, i, j: t[h, i, j] + s),
    "of keys": (torch.randn(B, H, KEYS), lambda t: lambda s, b, h, i, j: s + t[b, h, j]),
    "of all": (torch.randn(B, H, ROWS, KEYS), lambda t: lambda s, b, h, i, j: s + t[b, h, i, j]),
}
OTHERS: dict[str, Mod] = {
    "another cap": lambda s, b, h, i, j: 3 * torch.tanh(s / 4),
    "a negative cap": lambda s, b, h, i, j: -3 * torch.tanh(s / -3),
    "towards far keys": lambda s, b, h, i, j: s + SLOPES[h] * (i - j).abs(),
    "by the query": lambda s, b, h, i, j: s - SLOPES[h] * i,
    "few slopes": lambda s, b, h, i, j: s - SLOPES[:2][h] * (i - j).abs(),
    "twice": lambda s, b, h, i, j: s + s - SLOPES[h] * (i - j).abs(),
}


def traced(name: str, mod: Mod) -> Any:
    return callables._traced(name, mod, torch.device("cpu"))


def mask_arguments(made: Any, given: dict[str, Any]) -> Any:
    own = callable_builtins.built_in_of(made, is_mask=True)
    return None if own is None else callable_builtins.mask_arguments(own, made.captures, given, B)


def score_arguments(made: Any, given: dict[str, Any], sizes: callable_builtins.Sizes) -> Any:
    own = callable_builtins.built_in_of(made, is_mask=False)
    if own is None:
        return None
    return callable_builtins.score_arguments(own, made.sources, {"q": Q, **given}, sizes)


def same(own: dict[str, Any], **given: Any) -> None:
    make = torch.Generator().manual_seed(4)
    shapes = (B, ROWS, H, 8), (B, KEYS, H, 8), (B, KEYS, H, 8)
    q, k, v = (3 * torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes)
    beside = {"mask": given.pop("mask")} if "mask" in given else {}
    found, _ = reference.attention(q, k, v, **own, **beside)
    wanted, _ = reference.attention(q, k, v, **given, **beside)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # slopes are float32


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_ranges_are_known(name) -> None:
    mod, wanted = MASKS[name]
    found = mask_arguments(traced("mask_mod", mod), {"mask": "none", "window": (-1, -1)})
    assert found is not None and found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] is value or found[key] == value
    same(found, mask_mod=mod)


def test_masks_beside_others_and_those_of_no_range_are_not_known() -> None:
    causal = traced("mask_mod", MASKS["causal"][0])
    for beside in (
        {"mask": "causal"},
        {"window": (3, 3)},
        {"bottom_right": True},
        {"positions": (0, 4)},
    ):
        assert mask_arguments(causal, beside) is None
    for mod in (
        lambda b, h, i, j: i > j,
        lambda b, h, i, j: (i >= j) | (i - j < 4),
        lambda b, h, i, j: (i - j < -2) & (i >= j),
        lambda b, h, i, j: (i >= h) & (i - j < 4),
        lambda b, h, i, j: i // 4 == j // 5,
        lambda b, h, i, j: (i >= j) | (j < PREFIXES.long()[b]),
        lambda b, h, i, j: (i >= j) | (j < PREFIXES[:1][b]),
    ):
        assert mask_arguments(traced("mask_mod", mod), {}) is None


@pytest.mark.parametrize("name", SCORES)
def test_caps_and_slopes_are_known(name) -> None:
    mod, wanted = SCORES[name]
    found = score_arguments(traced("score_mod", mod), {"softcap": 0.0, "mask": "none"}, SIZES)
    assert found is not None and found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value))
    same(found, score_mod=mod)


@pytest.mark.parametrize("name", BELOW)
def test_slopes_of_distances_with_a_sign_are_known_under_a_causal_mask(name) -> None:
    made = traced("score_mod", BELOW[name])
    assert score_arguments(made, {}, SIZES) is None
    found = score_arguments(made, {"mask": "causal"}, SIZES)
    assert found is not None
    same(found, score_mod=BELOW[name], mask="causal")
    assert score_arguments(made, {"mask": "causal", "bottom_right": True}, SIZES) is None


@pytest.mark.parametrize("name", OTHERS)
def test_other_scores_stay_programs(name) -> None:
    assert score_arguments(traced("score_mod", OTHERS[name]), {"mask": "causal"}, SIZES) is None


def test_scores_beside_others_of_their_kind_and_learned_slopes_stay_programs() -> None:
    cap, slopes = (traced("score_mod", SCORES[name][0]) for name in ("cap", "off"))
    assert score_arguments(cap, {"softcap": 5.0}, SIZES) is None
    assert score_arguments(slopes, {"alibi_slopes": SLOPES}, SIZES) is None
    learned = SLOPES.clone().requires_grad_()
    made = traced("score_mod", lambda s, b, h, i, j: s - learned[h] * (i - j).abs())
    assert score_arguments(made, {}, SIZES) is None


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_tables_of_pairs_are_biases(name, learned) -> None:
    drawn, make = TABLES[name]
    table = drawn.bfloat16().requires_grad_(learned)
    found = score_arguments(traced("score_mod", make(table)), {}, SIZES)
    assert found is not None and found["bias"].requires_grad is learned
    with torch.no_grad():
        same(found, score_mod=make(table))


def test_tables_that_are_no_biases_stay_programs() -> None:
    table = torch.randn(H, ROWS, KEYS).bfloat16()
    made = traced("score_mod", lambda s, b, h, i, j: s + table[h, i, j])
    bits, shown = torch.zeros(1, dtype=torch.int32), torch.ones(ROWS, KEYS, dtype=torch.bool)
    for beside in (
        {"bias": table},
        {"mask_mod": lambda b, h, i, j: i > j},
        {"attn_mask": bits},
        {"positions": (0, 4)},
        {"q": Q.half()},
    ):
        assert score_arguments(made, beside, SIZES) is None
    assert score_arguments(made, {}, (B, H, ROWS, KEYS + 1)) is None
    assert score_arguments(made, {"attn_mask": shown}, SIZES) is not None
    for mod in (
        lambda s, b, h, i, j: s - table[h, i, j],
        lambda s, b, h, i, j: s + table[h, j, i],
        lambda s, b, h, i, j: s + table[h, i, i],
        lambda s, b, h, i, j: s + s + table[h, i, j],
        lambda s, b, h, i, j: s + table[h, 0, 1],
    ):
        assert score_arguments(traced("score_mod", mod), {}, SIZES) is None

"""Lines of programs: what scores of a key, of a query or of a distance have in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attngen.fragments.affine import affine_of
from attngen.fragments.lowering import fragment_of, learns_at_keys, learns_at_queries
from attngen.fragments.program import Program
from attngen.fragments.score_lines import is_light, scaled_line
from attngen.frontends.pytorch.callables import calls as callables

BIAS, ROW = torch.randn(4, 80).requires_grad_(), torch.randn(80)
KINDS, PAIRS = torch.arange(80).int() % 3, torch.randn(3, 3).requires_grad_()
# By name: a score; lines of keys and distances, and of queries and distances; whether it is light.
SCORES: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, int], tuple[int, int], bool]] = {
    "key": (lambda s, b, h, i, j: s + BIAS[h, j], (1, 0), (0, 0), True),
    "query": (lambda s, b, h, i, j: s * BIAS[h, i], (0, 0), (1, 0), True),
    "distance": (lambda s, b, h, i, j: s + BIAS[h, j - i + 40], (0, 1), (0, 1), True),
    "all": (
        lambda s, b, h, i, j: (s - ROW[j]) * ROW[i] / ROW[(i - j).abs()],
        (1, 1),
        (1, 1),
        True,
    ),
    "number": (lambda s, b, h, i, j: s * 3 + 2, (0, 0), (0, 0), True),
    "pairs": (lambda s, b, h, i, j: s + PAIRS[KINDS[i], KINDS[j]], (1, 0), (1, 0), False),
    "shifted": (lambda s, b, h, i, j: s + ROW[(i + j) % 80], (0, 0), (0, 0), False),
    "bent": (lambda s, b, h, i, j: torch.tanh(s) * ROW[j], (1, 0), (0, 0), False),
}


def program_of(mod: Callable[..., torch.Tensor]) -> Program:
    return callables._traced("score_mod", mod, torch.device("cpu")).program


@pytest.mark.parametrize("name", SCORES)
def test_programs_know_their_lines(name) -> None:
    mod, lines, turned, light = SCORES[name]
    program = program_of(mod)
    fragment = fragment_of(program)
    assert (fragment.lines, fragment.turned_lines) == (lines, turned)
    assert is_light(program) == light


def test_more_lines_than_there_is_room_for_are_none() -> None:
    def many(s, b, h, i, j):
        return s + sum(ROW[j] ** n * ROW[i - j] ** n * ROW[(i + j) % 80] for n in range(2, 5))

    assert fragment_of(program_of(many)).lines == (0, 0)


def test_affine_programs_have_a_factor_and_a_term() -> None:
    found = affine_of(program_of(lambda s, b, h, i, j: (2 - s) * ROW[i] + s), str)
    assert found is not None and found.factor and found.term
    assert found.of("score", "per_unit") == f"score * {found.factor} + {found.term} * per_unit"
    assert affine_of(program_of(lambda s, b, h, i, j: s * s), str) is None
    assert affine_of(program_of(lambda s, b, h, i, j: ROW[i] / s), str) is None
    constant = affine_of(program_of(lambda s, b, h, i, j: s * 0 + ROW[i]), str)
    assert constant is None or constant.factor


def test_sums_of_keys_serve_what_neither_queries_nor_scores_change() -> None:
    assert learns_at_keys(program_of(lambda s, b, h, i, j: s + BIAS[h, j] * ROW[j]))
    for mod in (
        lambda s, b, h, i, j: s + BIAS[h, j] * ROW[i],
        lambda s, b, h, i, j: s * 2 + BIAS[h, j],
        lambda s, b, h, i, j: s + BIAS[h, i],
        lambda s, b, h, i, j: s + ROW[j],
    ):
        assert not learns_at_keys(program_of(mod))


def test_products_with_queries_serve_what_scores_are_multiplied_by() -> None:
    assert learns_at_queries(program_of(lambda s, b, h, i, j: s * BIAS[h, i] + ROW[j]))
    for mod in (
        lambda s, b, h, i, j: s * BIAS[h, j],
        lambda s, b, h, i, j: s * BIAS[h, 0],  # whose sum over queries would show rounded dS
        lambda s, b, h, i, j: s * BIAS[h, i % 4],
        lambda s, b, h, i, j: s * BIAS[h, i // 64],
        lambda s, b, h, i, j: s * torch.sigmoid(BIAS[h, i].log()),
        lambda s, b, h, i, j: torch.tanh(s * BIAS[h, i]),
        lambda s, b, h, i, j: s + BIAS[h, i],
        lambda s, b, h, i, j: s * ROW[i],
    ):
        assert not learns_at_queries(program_of(mod))


def test_lines_that_are_only_added_are_kept_in_units_of_scores() -> None:
    added = program_of(lambda s, b, h, i, j: s + BIAS[h, j])
    assert scaled_line(added)
    text = fragment_of(added).text
    assert text is not None
    assert "lines[0] = v0 * score_per_unit;" in text and "score + v0 : score;" in text
    for mod in (
        lambda s, b, h, i, j: s * BIAS[h, j],
        lambda s, b, h, i, j: s * ROW[j] + ROW[j],
        lambda s, b, h, i, j: s + BIAS[h, j] * BIAS[h, j],  # a derivative of which is the line
        lambda s, b, h, i, j: s + ROW[i],
        lambda s, b, h, i, j: torch.tanh(s) + ROW[j],
    ):
        program = program_of(mod)
        line = scaled_line(program)
        ends = [program.slope, *(derivative for _, derivative in program.learned)]
        assert line not in ends or not line


def test_quotients_by_a_score_have_one_reciprocal_and_three_operations() -> None:
    text = fragment_of(program_of(lambda s, b, h, i, j: 12.0 * s / (12.0 + s.abs()))).text
    assert text is not None
    short = text.split("At::kDerived")[1].split("else")[1].split("return live ? ")[1].split(";")[0]
    assert short.count("reciprocal_of") == 1 and "quotient_of" not in short
    other = fragment_of(program_of(lambda s, b, h, i, j: s / (2.0 + s * s))).text
    assert other is not None and "At::kDerived" not in other

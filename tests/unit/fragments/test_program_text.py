"""Texts of programs: read back as they are, refused where a word is of none, and said in short."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.fragments.program import Operation, Program
from attngen.fragments.program_text import facts_of, is_program, parse_program
from attngen.frontends.pytorch.callables import calls as callables
from attngen.io.values import from_json, to_json
from attngen.kernels.plan import plans
from attngen.spec.attention_spec import AttentionSpec
from attngen.spec.problem import Problem
from attngen.spec.resolve import resolve
from attngen.spec.variants import find_faults
from tests.support.callables_kit import SCORES
from tests.support.own_fragments import kept

TABLE = torch.ones(33, 4, requires_grad=True)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    with kept():
        yield


def relative(s, b, h, i, j):
    return s * torch.sigmoid(s) + 0.5 * TABLE[(j - i).clamp(-16, 16) + 16, h]


def program_of(mod) -> Program:
    return callables._traced("score_mod", mod, torch.device("cpu")).program


def test_programs_are_what_their_texts_say() -> None:
    for make in SCORES.values():
        program = program_of(make())
        assert is_program(program.text) and parse_program(program.text) == program
    learned = program_of(relative)
    assert learned.learned and parse_program(learned.text) == learned


@pytest.mark.parametrize(
    "change",
    [
        ("add f v", "system f v"),
        ("add f v", "add q v"),
        ("f:1.0", "f:1.0f); evil("),
        ("number f", "number x"),
        ("capture float32 2 i", "capture float32 9 i"),
        ("capture float32 2 i", "capture double 2 i"),
        ("load f 0", "load f 1"),
        ("load f 0 v", "load f 0 v1 v"),
        ("value v", "value w"),
        ("value v", "value v99"),
        ("learned v", "learned b"),
        ("sub i j i", "sub i j v7"),
        ("sub i j i", "sub i j"),
        ("sub i j i", "sub i j i j"),
        ("slope", "\nslope"),
    ],
    ids=lambda change: change[1].strip(),
)
def test_other_words_are_refused(change) -> None:
    text = program_of(relative).text
    assert change[0] in text
    with pytest.raises(ValueError, match="of no program|does not read"):
        parse_program(text.replace(*change, 1))


def test_what_is_learned_is_read() -> None:
    program = Program(
        (("float32", 1, "i"),), (), (Operation("add", "f", ("s", "s")),), "v0", "f:1.0",
        (("v0", "f:1.0"),),
    )  # fmt: skip
    with pytest.raises(ValueError, match="does not read"):
        parse_program(program.text)


def test_facts_say_cost_slope_and_loads() -> None:
    first, load = facts_of(program_of(relative))
    assert ", 1 of them special functions; slope real; numbers of the call: 5" in first
    assert load == "reads captured_0, float32, by h, i, j, with its gradient"
    (first,) = facts_of(program_of(lambda s, b, h, i, j: s + i))
    assert "slope 1" in first


def test_problems_have_all_that_their_kernels_need(monkeypatch) -> None:
    program = program_of(relative)
    name = features.register_program(program).name
    spec = AttentionSpec(head_dim=64, score_mod=name, directions=("bwd",))
    (problem,) = resolve(spec, features.scan())
    assert problem.fragment_digests == (program.text,)
    *_, plan = plans(problem, "sm_90a")
    source = render_problem(problem, plan).text
    known = features.scan()["score"]
    for use in (
        lambda read: render_problem(read, plan).text == source,
        lambda read: not find_faults(read, "sm_90a", features.scan()),
    ):
        monkeypatch.delitem(known, name)  # as in another process
        assert use(from_json(Problem, to_json(problem)))
        assert name in known
    odd = dataclasses.replace(problem, fragment_digests=(program.text.replace("h", "x"),))
    (fault,) = find_faults(odd, "sm_90a", features.scan())
    assert "of no program" in fault

"""Functions recalled at once: by their code and what they close over, work on whole tensors too."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch

from attngen.frontends.pytorch.callables import calls as callables
from attngen.frontends.pytorch.callables import recall as callable_recall

WINDOW = 3


@pytest.fixture(autouse=True)
def no_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callable_recall, "_memories", {})


def traced(mod: Any) -> Any:
    return callables._traced("score_mod", mod, torch.device("cpu"))


def shifted(by: Any, table: torch.Tensor) -> Any:
    return lambda s, b, h, i, j: torch.where(i - j < WINDOW, s + by, table[h])


class Layer:
    """An object with a method."""

    def mod(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + h


def test_work_on_whole_tensors_is_done_again_for_others() -> None:
    def doubled(table: torch.Tensor) -> Any:
        return lambda s, b, h, i, j: (
            s + (2 * table.detach().abs() + table)[h] * table.view(2, 2)[h, 0]
        )

    with mock.patch.object(callables, "_known", {}):
        assert len(traced(doubled(torch.ones(4))).captures) == 2
        (known,) = callables._known.values()
        known.is_served = True
        table = torch.tensor([1.0, -2.0, 3.0, -4.0])
        for _ in range(2):  # by its fingerprint, then recalled
            found, tensors = callables._find("score_mod", doubled(table)) or (None, [])
            assert found is known
            whole, view = known.read(tensors)
            assert torch.equal(whole, 2 * table.abs() + table) and torch.equal(
                view, table.view(2, 2)
            )
        learned = torch.ones(4, requires_grad=True)
        with torch.no_grad():
            assert len(traced(doubled(learned)).program.learned) < 2
        assert len(traced(doubled(learned)).program.learned) == 2
        made = traced(doubled(learned))  # as it was kept, with its key
        callables._known[made.key].is_served = True
        found, tensors = callables._find("score_mod", doubled(learned)) or (None, [])
        arguments: dict[str, Any] = {}
        found.pass_on(tensors, arguments)
        (grad,) = torch.autograd.grad(arguments["learned_captures"], learned, torch.ones(8))
        assert torch.equal(grad, torch.full((4,), 2.0))


def test_functions_are_recalled_by_what_they_close_over(monkeypatch) -> None:
    first = torch.ones(4)
    callable_recall.remember("score_mod", shifted(1.5, first), "known")

    def again(*given: Any, name: str = "score_mod") -> Any:
        return callable_recall.recall(name, shifted(*given))

    other = torch.zeros(4)
    found, tensors = again(1.5, other)
    assert found == "known" and [id(x) for x in tensors] == [id(other)]
    for table in (
        torch.ones(5),
        torch.ones(8)[::2],
        other.double(),
        other.clone().requires_grad_(),
    ):
        assert again(1.5, table) is None
    assert again(2.5, other) is None and again(True, other) is None
    assert again(1.5, other, name="mask_mod") is None
    assert callable_recall.recall("score_mod", functools.partial(shifted(1.5, other))) is None
    monkeypatch.setitem(globals(), "where", 1)  # which the code's `torch.where` might have meant
    assert again(1.5, other) is None
    monkeypatch.delitem(globals(), "where")
    monkeypatch.setitem(globals(), "WINDOW", 4)
    assert again(1.5, other) is None


def test_functions_of_more_than_numbers_and_tensors_are_not_recalled() -> None:
    one, layer = torch.ones(4), Layer()
    for mod in (
        shifted(0.0, one),  # equal to -0.0
        lambda s, b, h, i, j: shifted(1.5, one)(s, b, h, i, j),
        lambda s, b, h, i, j: layer.mod(s, b, h, i, j),
        lambda s, b, h, i, j, by=1.5: s + by,
        functools.partial(shifted(1.5, one)),
    ):
        callable_recall.remember("score_mod", mod, "known")
        assert callable_recall.recall("score_mod", mod) is None

    def pair(x: torch.Tensor, y: torch.Tensor) -> Any:
        return lambda s, b, h, i, j: s + x[h] * y[h]

    callable_recall.remember("score_mod", pair(one, one.clone()), "known")
    assert callable_recall.recall("score_mod", pair(one, one)) is None

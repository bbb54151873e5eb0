"""Conditions of a call's numbers, which may be symbols of a tracer."""

from __future__ import annotations

import pytest
import torch

from attngen.spec import plain
from attngen.spec.attention_spec import AttentionSpec


class Symbol:
    """A number that torch.compile traces: what compares it is a symbol, too, which decides a
    branch, and has no sum with a bool."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return bool(self.value)

    def __gt__(self, other: float) -> Symbol:
        return Symbol(self.value > other)

    def __ge__(self, other: float) -> Symbol:
        return Symbol(self.value >= other)

    def __eq__(self, other: object) -> bool:
        raise TypeError("not allowed in this context")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("value", [0.0, 2.0])
def test_conditions_of_symbols_are_plain(value: float) -> None:
    assert plain.is_on(Symbol(value)) is bool(value)


def test_specs_of_calls_hold_no_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "differing", lambda given: {})
    x = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16)
    given = {"softcap": Symbol(5.0), "dropout_p": Symbol(0.1), "window": (Symbol(3), Symbol(-1))}
    spec = AttentionSpec.of_arguments((x, x, x), given)
    found = spec.softcap, spec.dropout, spec.window
    assert all(each is True for each in found)

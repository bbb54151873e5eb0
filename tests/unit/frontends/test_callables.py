"""Functions seen before: what a fingerprint says, and when a trace is used again."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch

from attngen.call.table import AttentionCall
from attngen.frontends.pytorch import callables
from attngen.frontends.pytorch.callable_fingerprint import fingerprint

WINDOW = 3


def traced(mod: Any) -> Any:
    return callables._traced("score_mod", mod, torch.device("cpu"))


def key_of(function: Any) -> Any:
    key, _ = fingerprint(function)
    return key


def shifted(by: Any, table: torch.Tensor) -> Any:
    return lambda s, b, h, i, j: torch.where(i - j < WINDOW, s + by, table[h])


class Layer(torch.nn.Module):
    """Methods that read parameters, attributes and each other."""

    cap = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.reach = 7

    def near(self, i: Any, j: Any) -> Any:
        return (i - j).clamp(max=self.reach)

    def mod(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * self.cap + self.slope[h] * self.near(i, j)


def test_fingerprints_say_numbers_and_formats_and_not_which_tensors(monkeypatch) -> None:
    one = key_of(shifted(1.5, torch.ones(4)))
    assert one == key_of(shifted(1.5, torch.zeros(4))) and hash(one)
    assert one != key_of(shifted(2.5, torch.ones(4)))
    assert one != key_of(shifted(1, torch.ones(4))) != key_of(shifted(True, torch.ones(4)))
    assert one != key_of(shifted(1.5, torch.ones(5)))
    assert one != key_of(shifted(1.5, torch.ones(4).bfloat16()))
    monkeypatch.setitem(globals(), "WINDOW", 4)
    assert one != key_of(shifted(1.5, torch.ones(4)))
    first, other = (functools.partial(shifted(x, torch.ones(4)), b=0) for x in (1.5, 2.5))
    assert key_of(first) != key_of(other)


def test_fingerprints_follow_the_attributes_of_objects() -> None:
    layer, other = Layer(), Layer()
    assert key_of(layer.mod) == key_of(other.mod) is not None
    other.reach = 8
    assert key_of(layer.mod) != key_of(other.mod)
    (_, tensors) = fingerprint(layer.mod)
    assert tensors == [layer.slope]
    other = Layer()
    other.cap = 3.0
    assert key_of(layer.mod) != key_of(other.mod)
    read = lambda s, b, h, i, j: layer.mod(s, b, h, i, j)  # noqa: E731
    before = key_of(read)
    layer.reach = 9
    assert before != key_of(read)


def test_fingerprints_follow_what_is_called_without_its_name() -> None:
    class Scaled:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return self[s]

        def __getitem__(self, s: Any) -> Any:
            return s * self.by

    assert key_of(Scaled(2.0)) == key_of(Scaled(2.0)) != key_of(Scaled(3.0))
    two, three = Scaled(2.0), Scaled(3.0)
    assert key_of(lambda s, b, h, i, j: two[s]) != key_of(lambda s, b, h, i, j: three[s])

    class Bent(torch.nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by, self.inner = by, torch.nn.Linear(1, 1)

        def forward(self, s: Any) -> Any:
            return s * self.by + self.inner.weight[0, 0]

    one, other = Bent(2.0), Bent(3.0)
    calls = [lambda s, b, h, i, j, each=each: each(s) for each in (one, Bent(2.0), other)]
    first, again, changed = map(key_of, calls)
    assert first == again != changed
    _, tensors = fingerprint(calls[0])
    assert any(x is one.inner.weight for x in tensors)
    one.register_forward_hook(lambda *_: None)
    assert key_of(calls[0]) is None


def test_what_may_change_unseen_has_no_fingerprint() -> None:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            return 1.0

    odd, numbers = Odd(), {"x": 1.0}
    assert key_of(lambda s, b, h, i, j: s * odd.scale) is None
    assert key_of(lambda s, b, h, i, j: s * numbers["x"]) is None
    assert key_of(lambda s, b, h, i, j: s * pytest.approx) is None


def test_functions_are_traced_once_and_read_the_tensors_of_each_call() -> None:
    with (
        mock.patch.object(callables, "_known", {}),
        mock.patch.object(callables, "trace", wraps=callables.trace) as traces,
    ):
        first, second = torch.ones(4), torch.zeros(4)
        one, other = (traced(shifted(1.5, x)) for x in (first, second))
        assert traces.call_count == 1 and one.program is other.program
        assert torch.equal(*other.captures, second) and torch.equal(*one.captures, first)
        traced(shifted(2.5, first))
        assert traces.call_count == 2


@pytest.mark.parametrize("how", ["values", "whole"])
def test_what_a_trace_has_read_or_computed_is_not_kept(how) -> None:
    table, one = torch.full((4,), 0.5), torch.full((), 0.5)
    mods = {
        "values": lambda s, b, h, i, j: s * one.item(),
        "whole": lambda s, b, h, i, j: s * table.exp()[h],
    }
    with mock.patch.object(callables, "_known", {}):
        found = traced(mods[how])
        table += 1
        one += 1
        again = traced(mods[how])
    assert found.program == again.program
    changed = found.numbers != again.numbers
    assert changed or not torch.equal(*found.captures, *again.captures)


def test_functions_that_are_known_become_fragments_before_anything_else() -> None:
    asked = []

    def attend(*carriers: Any, **given: Any) -> str:
        asked.append(given)
        return "served"

    def again(**given: Any) -> Any:
        q = torch.zeros(1, 2, 4, 16, dtype=given.pop("dtype", torch.bfloat16))
        mod = shifted(1.5, torch.full((4,), 7.0))
        return callables.attend_known(attend, (q, q, q), {"score_mod": mod, **given})

    arch = f"{callables.__name__}.descriptions.device_arch"
    with mock.patch.object(callables, "_known", {}), mock.patch(arch, lambda _: "sm_90a"):
        assert again() is None, "not traced yet"
        found = traced(shifted(1.5, torch.ones(4)))
        assert again(window=(3, 0)) == "served"
        for beside in (
            {"backend": "reference"},
            {"mask_mod": lambda b, h, i, j: i > j},
            {"dtype": torch.float8_e4m3fn},
            {"score_mod": "temperature"},
        ):
            assert again(**beside) is None
    (given,) = asked
    assert given["score_mod"] == found.program.name and given["window"] == (3, 0)
    assert torch.equal(given["captured_0"], torch.full((4,), 7.0))
    assert {given["number_0"], given["number_1"]} == {3, 1.5} and given["backend"] == "cuda"


def test_kernels_are_not_asked_where_others_have_to_see_the_call() -> None:
    class Part(torch.Tensor):
        pass

    def may(q: torch.Tensor, **given: Any) -> bool:
        carriers = {"q": q, "k": q, "v": q}
        return callables._may_have_kernels(AttentionCall(**carriers, **given))

    q = torch.zeros(1, 2, 4, 16)
    arch = f"{callables.__name__}.descriptions.device_arch"
    with mock.patch(arch, lambda _: "sm_90a"):
        assert may(q)
        assert not may(q, backend="reference") and not may(q.as_subclass(Part))
        assert not torch.vmap(lambda x: torch.tensor(may(x)))(q).any()
    assert not may(q), "no kernels on a CPU"

"""Functions seen before: what a fingerprint says, and when a trace is used again."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from attngen import SpecError
from attngen.call.table import AttentionCall
from attngen.fragments.features import program_named
from attngen.frontends.pytorch.callables import (
    calls as callables,
)
from attngen.frontends.pytorch.callables import (
    choice as callable_choice,
)
from attngen.frontends.pytorch.callables import (
    recall as callable_recall,
)
from attngen.frontends.pytorch.callables.fingerprint import fingerprint

WINDOW = 3


@pytest.fixture(autouse=True)
def no_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callable_recall, "_memories", {})


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


class Config:
    """An object without methods of its own."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


def scaled_by(config: Config, s: Any, *_: Any) -> Any:
    return s * config.scale


CONFIG = Config(2.0)


def config_in_force() -> Config:
    return CONFIG


class WithDescriptors:
    """Attributes that code computes."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    @functools.cached_property
    def scale(self) -> float:
        return self._scale

    @staticmethod
    def near(i: Any, j: Any) -> Any:
        return (i - j).clamp(max=WINDOW)

    def mod(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + self.near(i, j)


# Ways in which a function gets at an object, which the function itself does not name.
REACHES = {
    "default": lambda x: lambda s, b, h, i, j, x=x: s * x.scale,
    "partial": lambda x: functools.partial(scaled_by, x),
    "argument of another": lambda x: lambda s, b, h, i, j: scaled_by(x, s),
    "name": lambda x: lambda s, b, h, i, j: s * getattr(x, "scale"),  # noqa: B009
    "fields": lambda x: lambda s, b, h, i, j: s * vars(x)["scale"],
}


@pytest.mark.parametrize("way", REACHES)
@pytest.mark.parametrize("kind", [Config, WithDescriptors])
def test_fingerprints_follow_objects_by_whatever_way(way, kind) -> None:
    one, other = (key_of(REACHES[way](kind(scale))) for scale in (2.0, 3.0))
    assert one is None or one != other
    if kind is Config and way not in ("name", "fields"):
        assert one == key_of(REACHES[way](kind(2.0))) is not None


def test_fingerprints_follow_results_static_methods_and_torchs_closures(monkeypatch) -> None:
    read = lambda s, b, h, i, j: s * config_in_force().scale  # noqa: E731
    before = key_of(read)
    monkeypatch.setattr(CONFIG, "scale", 3.0)
    assert before != key_of(read)
    layer = WithDescriptors(1.0)
    before = key_of(layer.mod)
    monkeypatch.setitem(globals(), "WINDOW", 4)
    assert before != key_of(layer.mod)
    causal, near = (lambda b, h, i, j: i >= j), (lambda b, h, i, j: i - j < 3)
    assert key_of(and_masks(causal, near)) != key_of(and_masks(causal, causal)) is not None
    parts = [torch.nn.ModuleList([torch.nn.Identity()]) for _ in range(2)]
    keys = [key_of(lambda s, b, h, i, j, part=part: part[0](s) * 2) for part in parts]
    assert keys == [None, None], "parts without names"


def test_fingerprints_tell_one_thing_twice_from_two_things() -> None:
    def product(x: torch.Tensor, y: torch.Tensor) -> Any:
        return lambda s, b, h, i, j: s + x[h] * y[h]

    one, other = torch.full((4,), 2.0), torch.full((4,), 3.0)
    assert key_of(product(one, one)) == key_of(product(other, other))
    assert key_of(product(one, one)) != key_of(product(one, other))

    def by(number: float) -> Any:
        return lambda s: s * number

    def three(f: Any, g: Any, k: Any) -> Any:
        return lambda s, b, h, i, j: f(s) - g(s) / k(s)

    two, five = by(2.0), by(5.0)
    assert key_of(three(two, five, two)) != key_of(three(two, five, five))
    with mock.patch.object(callables, "_known", {}):
        traced(product(one, one.detach()))
        found = traced(product(one, other))
    assert len(found.captures) == 2 and torch.equal(found.captures[1], other)


def test_what_may_change_unseen_has_no_fingerprint() -> None:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            return 1.0

    odd, numbers = Odd(), {"x": 1.0}
    assert key_of(lambda s, b, h, i, j: s * odd.scale) is None
    assert key_of(lambda s, b, h, i, j: s * numbers["x"]) is None
    assert key_of(lambda s, b, h, i, j: s * pytest.approx) is None
    cached = functools.lru_cache(lambda s: s * 2.0)
    assert key_of(lambda s, b, h, i, j: cached(s)) is None

    def imports(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        from tests.support import callables_kit

        return s * callables_kit.S

    assert key_of(imports) is None
    made: dict[str, Any] = {}
    exec("mod = lambda s, b, h, i, j: s * 2", made)
    assert key_of(made["mod"]) is not None, "of no module"


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


@pytest.mark.parametrize("how", ["values", "whole", "equal"])
def test_what_a_trace_has_read_or_computed_is_not_kept(how) -> None:
    table, one, halves = torch.full((4,), 0.5), torch.full((), 0.5), torch.full((4,), 0.5)
    mods = {
        "values": lambda s, b, h, i, j: s * one.item(),
        "whole": lambda s, b, h, i, j: s * table.exp()[h],
        "equal": lambda s, b, h, i, j: s * (2.5 if torch.equal(table, halves) else 3.5),
    }
    with mock.patch.object(callables, "_known", {}):
        found = traced(mods[how])
        table += 1
        one += 1
        again = traced(mods[how])
    assert found.program == again.program
    changed = found.numbers != again.numbers
    assert changed or not torch.equal(*found.captures, *again.captures)


def test_functions_are_traced_in_threads() -> None:
    def numbers_of(number: float) -> Any:
        return traced(lambda s, b, h, i, j: s * number + torch.tanh(s) * (i - j)).numbers

    wanted = [1.5, 2.5, 3.5, 4.5]
    with mock.patch.object(callables, "_known", {}), ThreadPoolExecutor(len(wanted)) as pool:
        for number, found in zip(wanted, pool.map(numbers_of, wanted), strict=True):
            assert number in found


def test_functions_that_are_known_become_fragments_before_anything_else() -> None:
    asked = []

    def attend(*carriers: Any, **given: Any) -> str:
        asked.append(given)
        return "served"

    def again(**given: Any) -> Any:
        q = torch.zeros(1, 2, 4, 16, dtype=given.pop("dtype", torch.bfloat16))
        mod = shifted(1.5, torch.full((4,), 7.0))
        return callables.attend_known(attend, (q, q, q), {"score_mod": mod, **given})

    arch = f"{callable_choice.__name__}.descriptions.device_arch"
    with mock.patch.object(callables, "_known", {}), mock.patch(arch, lambda _: "sm_90a"):
        assert again() is None, "not traced yet"
        found = traced(shifted(1.5, torch.ones(4)))
        (known,) = callables._known.values()
        assert again() is None, "not checked, nor registered yet"
        known.is_served = True
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


def test_functions_that_ran_as_built_in_are_fragments_where_they_cannot() -> None:
    table = torch.ones(5, 9, dtype=torch.bfloat16)

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[i, j]

    q, k = (torch.zeros(1, n, 2, 16, dtype=torch.bfloat16) for n in table.shape)
    arch = f"{callable_choice.__name__}.descriptions.device_arch"
    with mock.patch.object(callables, "_known", {}), mock.patch(arch, lambda _: "sm_90a"):
        attend = mock.Mock()
        for _ in range(2):  # traced, and known
            callables.attend(attend, AttentionCall(q=q, k=k, v=k, score_mod=mod))
        given = {"score_mod": mod, "bottom_right": True}
        callables.attend_known(attend, (q, k, k), given)
    _, alone, beside = (call.kwargs for call in attend.call_args_list)
    assert "score_mod" not in alone and torch.equal(alone["bias"], table[None, None])
    assert program_named(beside["score_mod"]) is not None
    assert torch.equal(beside["captured_0"], table.float())


@pytest.mark.parametrize("tensors", [[(4,)] * 5, [(0,)]], ids=["many", "empty"])
def test_functions_that_are_refused_are_refused_again(tensors) -> None:
    made = [torch.ones(shape) for shape in tensors]

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + sum(x[h] for x in made)

    q = torch.zeros(1, 4, 2, 16, dtype=torch.bfloat16)
    call = AttentionCall(q=q, k=q, v=q, score_mod=mod)
    arch = f"{callable_choice.__name__}.descriptions.device_arch"
    with mock.patch.object(callables, "_known", {}), mock.patch(arch, lambda _: "sm_90a"):
        for _ in range(3):
            with pytest.raises(SpecError, match="score_mod reads (5 captured|a tensor of sizes)"):
                callables.attend(mock.Mock(), call)
            attend = mock.Mock()
            assert callables.attend_known(attend, (q, q, q), {"score_mod": mod}) is None
            assert not attend.called


def test_kernels_are_not_asked_where_others_have_to_see_the_call() -> None:
    class Part(torch.Tensor):
        pass

    def may(q: torch.Tensor, **given: Any) -> bool:
        carriers = {"q": q, "k": q, "v": q}
        return callable_choice.may_have_kernels(AttentionCall(**carriers, **given))

    q = torch.zeros(1, 2, 4, 16)
    arch = f"{callable_choice.__name__}.descriptions.device_arch"
    with mock.patch(arch, lambda _: "sm_90a"):
        assert may(q)
        assert not may(q, backend="reference") and not may(q.as_subclass(Part))
        assert torch.vmap(lambda x: torch.tensor(may(x)))(q).all()

        def closes(x: torch.Tensor) -> torch.Tensor:  # over what the transform has wrapped
            return torch.tensor(may(x, score_mod=lambda s, b, h, i, j: s + x[0, 0, 0]))

        def holds(x: torch.Tensor) -> torch.Tensor:
            mod = functools.partial(lambda x, s, b, h, i, j: s + x[0, 0, 0], x)
            return torch.tensor(may(x, score_mod=mod))

        assert torch.vmap(closes)(q).all() and not torch.vmap(holds)(q).any()

        def joins(x: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:  # as is what it is beside
            return torch.tensor(may(x, mask_mod=lambda b, h, i, j: i >= j, attn_mask=shown))

        shown = torch.ones(1, 1, 1, 4, dtype=torch.bool)
        assert not torch.vmap(joins)(q, shown).any()
        assert torch.vmap(joins, (0, None))(q, shown[0]).all()
    assert not may(q), "no kernels on a CPU"

"""Callables that replay graphs: arguments, gradients and states, over a stand-in that does the work
of a graph again where it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attngen import SpecError, te
from attngen.frontends.transformer_engine import graphs
from tests.support import te_kit


class Captures:
    """Work that was captured, and the generators that each was told of."""

    def __init__(self) -> None:
        self.generators: list[int] = []

    def __call__(
        self, work: Callable[[], Any], pool: Any, generators: Iterable[torch.Generator]
    ) -> graphs.Captured:
        self.generators.append(len([*generators]))
        results = work()
        owner: Any = work.__self__  # type: ignore[attr-defined]  # which what is captured is of

        def replay() -> None:
            again = pytree.tree_leaves(work())
            for x, fresh in zip(pytree.tree_leaves(results), again, strict=True):
                x.detach().copy_(fresh.detach())
            if work == owner.run:
                owner.outputs = again  # of which the gradients are

        return graphs.Captured(results, replay)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    made = Captures()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(graphs, "capture", made)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return made


def layer_of(tracker: Any = None) -> nn.Module:
    """A projection and attention over it, whose dropout draws from the tracker's state."""
    kit: dict[str, Any] = {"qkv_format": "bshd", "attn_mask_type": "causal"}
    if tracker is not None:
        kit |= {"attention_dropout": 0.5, "get_rng_state_tracker": lambda: tracker}

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 8)
            self.attend = te.DotProductAttention(2, 4, **kit)

        def forward(self, x: Tensor, *, scale: Tensor, count: int) -> dict[str, Tensor]:
            q = self.project(x).unflatten(-1, (2, 4))
            return {"out": self.attend(q, q, q) * scale, "count": torch.tensor(count)}

    return Layer().double()


def sample(seed: int) -> tuple[Tensor, Tensor]:
    return te_kit.randn(2, 5, 8, seed=seed).requires_grad_(), te_kit.randn(8, seed=seed + 1)


def results_of(layer: nn.Module, x: Tensor, scale: Tensor) -> list[Tensor]:
    """The output and gradients of a call."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    found = layer(x, scale=scale, count=3)
    found["out"].square().sum().backward()
    assert found["count"] == 3
    return [found["out"], x.grad, *(p.grad for p in layer.parameters())]


def test_replays_have_the_results_of_calls(captures: Captures) -> None:
    layer, plain = layer_of(), layer_of()
    plain.load_state_dict(layer.state_dict())
    x, scale = sample(1)
    given = {"scale": scale, "count": 3}
    assert te.make_graphed_callables(layer, (x,), sample_kwargs=given) is layer
    assert len(captures.generators) == 2
    for seed in (5, 9):
        pairs = zip(results_of(layer, *sample(seed)), results_of(plain, *sample(seed)), strict=True)
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    kept = [p.grad for p in layer.parameters()]  # of memory of its own
    before = [g.clone() for g in kept]
    layer.zero_grad()
    results_of(layer, *sample(7))
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


def test_evaluation_has_no_gradients_and_training_goes_on_as_it_was(captures: Captures) -> None:
    layer = layer_of().eval()
    x, scale = sample(1)
    te.make_graphed_callables(layer, (x,), sample_kwargs={"scale": scale, "count": 3})
    assert len(captures.generators) == 1
    assert not layer(x, scale=scale, count=3)["out"].requires_grad
    assert layer.train()(x, scale=scale, count=3)["out"].requires_grad


def test_several_callables_and_their_trackers(captures: Captures) -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    tracker.add("other", 6)
    layers, (x, scale) = (layer_of(tracker), layer_of(tracker)), sample(1)
    given = {"scale": scale, "count": 3}
    made = te.make_graphed_callables(layers, ((x,), (x,)), sample_kwargs=(given, given))
    assert made == layers and captures.generators == [2] * 4
    square = te.make_graphed_callables(lambda y: y * y, (x,))
    assert torch.equal(square(x), x * x)


def test_arguments_are_those_of_the_sample(captures: Captures) -> None:
    layer, (x, scale) = layer_of(), sample(1)
    with pytest.raises(SpecError, match="one entry for each of 2 callables; got 1"):
        te.make_graphed_callables((layer, layer), ((x,),))
    with pytest.raises(SpecError, match="a tuple of arguments"):
        te.make_graphed_callables(layer, x)
    te.make_graphed_callables(layer, (x,), sample_kwargs={"scale": scale, "count": 3})
    with pytest.raises(SpecError, match="the arguments that its sample had"):
        layer(x, x, scale=scale)
    with pytest.raises(SpecError, match=r"captured for torch.float64 \[2, 5, 8\]; got .* \[1, 5"):
        layer(x[:1], scale=scale)

"""Calls with dropout return their output alone, and their state where it is asked for."""

from __future__ import annotations

import warnings

import pytest
import torch

import attngen
from attngen.frontends.pytorch import calls

BACKENDS = pytest.mark.parametrize("backend", ["cuda", "reference"])


def operands():
    make = torch.Generator().manual_seed(0)
    return [torch.randn(2, 6, 4, 16, generator=make).bfloat16() for _ in "qkv"]


@BACKENDS
def test_dropout_alone_returns_the_output_and_says_so_once(kernels, monkeypatch, backend) -> None:
    monkeypatch.setattr(calls, "_warned", [])
    with pytest.warns(FutureWarning, match="return_rng_state=True") as found:
        for _ in range(3):
            out = attngen.attention(*operands(), dropout_p=0.5, backend=backend)
            assert isinstance(out, torch.Tensor)
    (warning,) = found
    assert warning.filename == __file__


def test_line_of_a_call_is_named_where_another_one_stands_for_it(kernels, monkeypatch) -> None:
    monkeypatch.setattr(calls, "_warned", [])
    choice = calls.callables.choice
    monkeypatch.setattr(choice.descriptions, "device_arch", lambda _: "sm_90a")
    with pytest.warns(FutureWarning) as found:
        attngen.attention(
            *operands(), dropout_p=0.5, mask_mod=lambda b, h, i, j: i >= j, backend="cuda"
        )
    (warning,) = found
    assert warning.filename == __file__


@BACKENDS
def test_state_is_returned_where_it_is_asked_for(kernels, monkeypatch, backend) -> None:
    monkeypatch.setattr(calls, "_warned", [])
    tensors, state = operands(), torch.tensor([3, 4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            call = {"dropout_p": 0.5, "return_rng_state": True, "backend": backend}
            out, aux = attngen.attention(*tensors, **call)
            assert aux.rng_state.dtype == torch.int64 and aux.rng_state.shape == (2,)
            again, same = attngen.attention(*tensors, **call, rng_state=aux.rng_state)
            assert torch.equal(same.rng_state, aux.rng_state)
            assert backend == "cuda" or torch.equal(out, again)  # the stand-in drops nothing
            _, given = attngen.attention(*tensors, **call, rng_state=state)
            assert torch.equal(given.rng_state, state)
        _, aux = attngen.attention(*tensors, return_rng_state=True, backend=backend)
        assert aux.rng_state is None
        out = attngen.attention(*tensors, backend=backend)
        assert isinstance(out, torch.Tensor)


def test_traced_call_with_dropout_returns_the_output_alone() -> None:
    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return attngen.attention(*tensors, dropout_p=0.5) * 2

    traced = torch.compile(call, backend="eager", fullgraph=True)
    assert traced(*operands()).shape == (2, 6, 4, 16)

"""How many functions a call enters: warm calls few, whatever is asked for, and cold ones not
many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import attngen
from attngen.frontends.pytorch import calls
from tests.support import launch_kit
from tests.support.caches import BACKWARD, FORWARD, forget
from tests.support.paths import ROOT

PACKAGE = str(ROOT / "attngen")
PLAIN, BESIDE, COLD = 12, 20, 1200  # at most


@contextmanager
def counted() -> Iterator[list[str]]:
    """The functions of attngen that are entered meanwhile."""
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            path = frame.f_code.co_filename
            if path.startswith(PACKAGE):
                entered.append(f"{path.removeprefix(PACKAGE)}: {frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(before)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stand_in in launch_kit.stand_ins(mock.Mock()).items():
        monkeypatch.setattr(name, stand_in)
    forget(monkeypatch, *FORWARD, *BACKWARD)


def dense(length: int = 128, **more: Any) -> dict[str, Any]:
    q, k, v = (torch.zeros(2, length, 4, 64, dtype=torch.bfloat16) for _ in "qkv")
    return {"q": q, "k": k, "v": v, "mask": "causal", **more}


def packed(length: int = 300, **more: Any) -> dict[str, Any]:
    q, k, v = (torch.zeros(length, 4, 64, dtype=torch.bfloat16) for _ in "qkv")
    ends = torch.tensor([0, 100, length], dtype=torch.int32)
    named = {"layout": "thd", "mask": "padding_causal", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    return {"q": q, "k": k, "v": v, **named, "max_seqlen_q": 200, "max_seqlen_kv": 200, **more}


def with_lse(length: int = 128) -> dict[str, Any]:
    return dense(length, return_lse=True)


def with_sink(length: int = 128) -> dict[str, Any]:
    return dense(length, softmax="learnable", sink=torch.zeros(4))


def with_defaults(length: int = 128) -> dict[str, Any]:
    return dense(length, softcap=None, window=None, bottom_right=True)


def in_other_words(length: int = 128) -> dict[str, Any]:
    return dense(length) | {"mask": ["causal"], "window": [7, 0], "softmax_scale": np.float32(0.3)}


CALLS: dict[str, tuple[Callable[..., dict[str, Any]], int]] = {
    "plain": (dense, PLAIN),
    "defaults": (with_defaults, PLAIN),
    "other words": (in_other_words, PLAIN),
    "lse": (with_lse, BESIDE),
    "sink": (with_sink, BESIDE),
    "packed": (packed, BESIDE),
}


def launch(call: dict[str, Any]) -> Any:
    return attngen.attention(**call, backend="cuda")


@pytest.mark.parametrize("name", CALLS)
def test_warm_call_enters_few_functions(name: str) -> None:
    make, most = CALLS[name]
    for _ in range(3):
        launch(make())
    call = make()
    with counted() as entered:
        attngen.attention(**call, backend="cuda")
    assert len(entered) <= most, entered


def test_words_without_a_hash_are_read_in_each_call() -> None:
    for scale in (0.3, 0.4):
        out = launch(dense(softmax_scale=np.array(scale)))
        assert out.shape == (2, 128, 4, 64)
    scales = {each.arguments.softmax_scale for each in calls.calls.by_format.values()}
    assert scales == {0.3, 0.4}


@pytest.mark.parametrize("name", ["plain", "defaults", "other words"])
def test_warm_backward_is_found_in_any_words(name: str) -> None:
    make, _ = CALLS[name]
    for _ in range(3):
        given = make()
        carriers = [given.pop(each) for each in "qkv"]
        q, *_ = carriers
        with counted() as entered:
            attngen.attention_backward(
                *(q, *carriers, q, torch.zeros(2, 4, 128)), **given, backend="cuda"
            )
    assert not [each for each in entered if each.endswith(": make_call")]


def test_warm_step_of_training_enters_few_functions() -> None:
    def step() -> tuple[list[str], list[str]]:
        call = dense()
        call["q"].requires_grad_()
        with counted() as forward:
            out = attngen.attention(**call, backend="cuda")
        with counted() as backward:
            torch.autograd.backward(out, out)
        assert call["q"].grad is not None
        return forward, backward

    for _ in range(3):
        step()
    forward, backward = step()
    assert len(forward) <= BESIDE, forward
    assert len(backward) <= BESIDE, backward


@pytest.mark.parametrize("name", CALLS)
def test_cold_call_enters_not_many_functions(name: str) -> None:
    make, _ = CALLS[name]
    launch(make())  # kernels are there
    length = {"packed": 301}.get(name, 136)
    call = make(length)
    with counted() as entered:
        attngen.attention(**call, backend="cuda")
    assert len(entered) <= COLD, len(entered)

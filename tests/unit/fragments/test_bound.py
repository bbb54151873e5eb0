"""Every fragment of the templates is bound by a call: a kernel that the call launches has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import attngen
from attngen.call import kernel_choice
from attngen.fragments import features
from tests.support import launch_kit
from tests.support.caches import FORWARD, forget
from tests.support.own_fragments import kept
from tests.support.paths import ROOT

B, S, H, D = 2, 128, 4, 64
LENGTHS = torch.tensor([S, 100], dtype=torch.int32)
ENDS = torch.tensor([0, 100, B * S], dtype=torch.int32)


def dense(d: int = D, **more: Any) -> dict[str, Any]:
    return {**{x: torch.zeros(B, S, H, d, dtype=torch.bfloat16) for x in "qkv"}, **more}


def packed(**more: Any) -> dict[str, Any]:
    carriers = {x: torch.zeros(B * S, H, D, dtype=torch.bfloat16) for x in "qkv"}
    return {**carriers, "layout": "thd", "cu_seqlens_q": ENDS, "cu_seqlens_kv": ENDS, **more}


def paged() -> dict[str, Any]:
    pages = {x: torch.zeros(B * S // 16, 16, H, D, dtype=torch.bfloat16) for x in "kv"}
    table = torch.arange(B * S // 16, dtype=torch.int32).view(B, -1)
    named = {"layout": "paged_kv_bshd_bshd_bshd", "page_table": table, "seqused_kv": LENGTHS}
    return dense(**pages, **named)


def scaled_by_token() -> dict[str, Any]:
    carriers = {x: torch.zeros(B, S, H, D, dtype=torch.float8_e4m3fn) for x in "qkv"}
    scales = {f"descale_{x}": torch.ones(B, H, S) for x in "qkv"}
    return {**carriers, **scales, "out_dtype": torch.bfloat16}


def odd(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i * j) % 3 != 1


CALLS: dict[tuple[str, str], Callable[[], dict[str, Any]]] = {
    ("mask", "causal"): lambda: dense(mask="causal"),
    ("mask", "window"): lambda: dense(window=(16, 0)),
    ("mask", "chunked"): lambda: dense(mask=["causal", "chunked"], chunked=32),
    ("mask", "prefix"): lambda: dense(mask="prefix", prefix=LENGTHS),
    ("score", "alibi"): lambda: dense(alibi_slopes=True),
    ("score", "softcap"): lambda: dense(softcap=30.0),
    ("score", "post_scale_bias"): lambda: dense(bias=torch.zeros(1, H, S, S)),
    ("score", "pre_scale_bias"): lambda: dense(bias=torch.zeros(1, H, S, S), bias_type="pre_scale"),
    ("score", "token_scales"): scaled_by_token,
    ("softmax", "vanilla"): dense,
    ("softmax", "off_by_one"): lambda: dense(softmax="off_by_one"),
    ("softmax", "learnable"): lambda: dense(softmax="learnable", sink=torch.zeros(H)),
    ("sequence", "dense"): dense,
    ("sequence", "packed"): packed,
    ("sequence", "used"): lambda: dense(seqused_kv=LENGTHS),
    ("fetch", "tma"): dense,
    ("fetch", "gather"): lambda: dense(d=33),
    ("fetch", "page_tma"): paged,
    ("iteration", "range"): dense,
    ("iteration", "listed"): lambda: dense(mask_mod=odd),
    ("iteration", "bits"): lambda: dense(mask_mod=odd, bias=torch.zeros(1, H, S, S)),
}


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """The fragments of the problems whose kernels calls ask for."""
    found: set[tuple[str, str]] = set()

    def find_kernels(problem: Any, arch: str, kernel: str | None = None) -> tuple[Any, ...]:
        found.update(problem.fragments)
        return launch_kit.find_kernels(problem, arch, kernel)

    named = {"attngen.call.kernel_choice.find_kernels": find_kernels}
    for name, stand_in in (launch_kit.stand_ins(mock.Mock()) | named).items():
        monkeypatch.setattr(name, stand_in)
    forget(monkeypatch, *FORWARD)
    monkeypatch.setattr(kernel_choice, "_kernels", {})
    with kept():
        yield found


def test_every_fragment_of_the_templates_has_a_call() -> None:
    files = (each for axis in features.AXES for each in (ROOT / "templates" / axis).glob("*"))
    assert CALLS.keys() == {(x.parent.name, x.name.removesuffix(".cuh.j2")) for x in files}


@pytest.mark.sampled(len(CALLS) - 1)
@pytest.mark.parametrize("fragment", CALLS, ids="-".join)
def test_call_binds_its_fragment(fragment: tuple[str, str], bound: set[tuple[str, str]]) -> None:
    attngen.attention(**CALLS[fragment](), backend="cuda")
    assert fragment in bound

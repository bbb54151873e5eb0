"""The door for PyTorch's own functions computes what these compute on the CPU."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from attngen.integrations import torch as door
from attngen.integrations.torch import replaced_sdpa, sdpa, varlen_attn
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attngen
from attngen import SpecError
from attngen.call.backend import default
from tests.support.paths import ROOT

theirs = functional.scaled_dot_product_attention
REFERENCE: dict[str, Any] = {"backend": "reference"}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some(*shape: int) -> Tensor:
    """A mask that leaves each query the first key."""
    mask = randn(*shape, seed=9) > 0
    mask[..., :1] = True
    return mask


def alike(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


MASKS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool": {"attn_mask": some(2, 1, 5, 7)},
    "bool of pairs": {"attn_mask": some(5, 7)},
    "bool of keys": {"attn_mask": some(2, 1, 1, 7)},
    "floats": {"attn_mask": randn(4, 5, 7, seed=6)},
    "infinities": {"attn_mask": torch.zeros(5, 7).double().masked_fill(~some(5, 7), -torch.inf)},
    "upper left": {"attn_mask": causal_upper_left(5, 7)},
    "lower right": {"attn_mask": causal_lower_right(5, 7)},
}
SHAPES = {  # of query, key and value
    "four axes": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
    "two": ((5, 8), (7, 8), (7, 6)),
    "three": ((4, 5, 8), (4, 7, 8), (4, 7, 6)),
    "five": ((3, 2, 4, 5, 8), (3, 2, 4, 7, 8), (3, 2, 4, 7, 6)),
    "broadcast batch": ((2, 4, 5, 8), (1, 4, 7, 8), (4, 7, 6)),
    "broadcast heads": ((2, 4, 5, 8), (2, 1, 7, 8), (7, 6)),
    "broadcast query": ((5, 8), (3, 2, 4, 7, 8), (2, 4, 7, 6)),
    "no keys": ((2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 6)),
}
GROUPS = {
    "groups": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
    "groups of two sizes": ((4, 5, 8), (2, 7, 8), (1, 7, 8)),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_those_of_pytorch_with_their_gradients(mask: str) -> None:
    shapes = SHAPES["four axes"]
    found, wanted = (
        [randn(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)] for _ in "ab"
    )
    given = [dict(MASKS[mask]) for _ in "ab"]
    if mask == "floats":
        for own, leaves in zip(given, (found, wanted), strict=True):
            leaves.append(own["attn_mask"].clone().requires_grad_())
            own["attn_mask"] = leaves[-1]
    outs = sdpa(*found[:3], **given[0], **REFERENCE), theirs(*wanted[:3], **given[1])
    alike(*outs)
    for out in outs:
        out.backward(randn(*out.shape, seed=5))
    for one, other in zip(found, wanted, strict=True):
        alike(one.grad, other.grad)


@pytest.mark.parametrize("shapes", SHAPES)
def test_axes_broadcast_as_pytorchs_do(shapes: str) -> None:
    operands = [randn(*shape, seed=n) for n, shape in enumerate(SHAPES[shapes])]
    alike(sdpa(*operands, **REFERENCE), theirs(*operands))


@pytest.mark.parametrize("shapes", GROUPS)
def test_groups_of_heads_share_those_of_keys(shapes: str) -> None:
    operands = [randn(*shape, seed=n) for n, shape in enumerate(GROUPS[shapes])]
    given = {"enable_gqa": True, "is_causal": True}
    alike(sdpa(*operands, **given, **REFERENCE), theirs(*operands, **given))
    with pytest.raises(SpecError, match="enable_gqa=True"):
        sdpa(*operands, **REFERENCE)


@pytest.mark.parametrize("mask", [(5, 7), (2, 4, 5, 7), (3, 1, 1, 1, 7), (3, 2, 4, 5, 7)], ids=str)
def test_mask_of_many_axes_broadcasts(mask: tuple[int, ...]) -> None:
    operands = [randn(*shape, seed=n) for n, shape in enumerate(SHAPES["five"])]
    alike(sdpa(*operands, some(*mask), **REFERENCE), theirs(*operands, some(*mask)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats_of_a_mask_have_any_dtype(dtype: torch.dtype) -> None:
    operands = [randn(*shape, seed=n).float() for n, shape in enumerate(SHAPES["four axes"])]
    mask = randn(5, 7).to(dtype)
    alike(sdpa(*operands, mask, **REFERENCE), theirs(*operands, mask.float()))


@pytest.mark.parametrize(("rows", "keys"), [(5, 0), (0, 7)], ids=["no keys", "no queries"])
def test_axes_broadcast_beside_nothing(rows: int, keys: int) -> None:
    q, k, v = randn(1, 4, rows, 8), randn(2, 4, keys, 8), randn(2, 4, keys, 6)
    assert torch.equal(sdpa(q, k, v), torch.zeros(2, 4, rows, 6))


def test_a_row_that_sees_nothing_is_zero() -> None:
    operands = [randn(*shape, seed=n) for n, shape in enumerate(SHAPES["four axes"])]
    mask = some(5, 7)
    mask[2] = False
    found = sdpa(*operands, mask, **REFERENCE)
    assert not found[:, :, 2].any()
    alike(found, theirs(*operands, mask))


@pytest.mark.parametrize("first", ["heads", "rows"])
def test_output_lies_as_the_query_does(first: str, monkeypatch) -> None:
    """Code that joins heads again, by `transpose(1, 2).flatten(2)`, then copies nothing: kernels
    leave an output contiguous in the layout that they are asked for."""
    operands = [randn(2, 4, 5, 8, seed=n) for n in range(3)]
    if first == "rows":
        operands = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands]
    layouts = []

    def attend(*given: Any, **named: Any) -> Any:
        layouts.append((named["layout"], all(x.is_contiguous() for x in given)))
        return attngen.attention(*given, **named)

    monkeypatch.setattr(door, "attention", attend)
    alike(sdpa(*operands, **REFERENCE), theirs(*operands))
    assert layouts == [("bhsd" if first == "heads" else "bshd", True)]


def test_dropout_keeps_a_share_and_returns_the_output_alone() -> None:
    operands = [torch.ones(1, 2, 64, 16) for _ in range(3)]
    found = sdpa(*operands, dropout_p=0.25, **REFERENCE)
    assert 0.9 < found.mean() < 1.1 and found.std() > 0
    assert not sdpa(*operands, dropout_p=1.0, **REFERENCE).any()


def test_nested_operands_have_pytorchs_axes() -> None:
    parts = [randn(n, 4, 8, seed=n) for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    found = sdpa(nested, nested, nested, is_causal=True, **REFERENCE)
    for one, part in zip(found.unbind(), parts, strict=True):
        q = part.transpose(0, 1)
        alike(one, theirs(q, q, q, is_causal=True))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"is_causal": True, "attn_mask": some(5, 7)}, "give one of them"),
        ({"key": randn(3, 4, 7, 8), "value": randn(3, 4, 7, 8)}, "broadcast"),
        ({"key": randn(7)}, "two axes or more"),
        ({"backend": "cuda"}, "cpu has no kernels"),
    ],
    ids=["two masks", "batches", "axes", "backend"],
)
def test_refusals_say_why(given: dict[str, Any], reason: str) -> None:
    q, k, v = (randn(*shape, seed=n) for n, shape in enumerate(SHAPES["four axes"]))
    with pytest.raises(SpecError, match=reason):
        sdpa(**{"query": q, "key": k, "value": v, **given})


# ---- in place of PyTorch's function


def test_modules_that_look_for_pytorchs_function_find_this_one(monkeypatch) -> None:
    """In torch.nn.functional, as nn.MultiheadAttention does, and under a name of their own."""
    module = types.ModuleType("a_model")
    module.scaled_dot_product_attention = theirs  # as `from … import` leaves it
    monkeypatch.setitem(sys.modules, "a_model", module)
    calls = []
    attend = attngen.attention
    monkeypatch.setattr(door, "attention", lambda *x, **y: calls.append(y) or attend(*x, **y))
    layer, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), randn(2, 5, 16).float()
    wanted = layer(x, x, x, need_weights=False)
    with replaced_sdpa("reference"):
        found = layer(x, x, x, need_weights=False)
        module.scaled_dot_product_attention(x, x, x)
    assert [each["backend"] for each in calls] == ["reference"] * 2
    alike(found[0], wanted[0])
    assert theirs is functional.scaled_dot_product_attention is module.scaled_dot_product_attention


@pytest.mark.parametrize("mask", ["nothing", "bool", "upper left", "lower right"])
def test_calls_without_kernels_stay_pytorchs(mask: str, caplog, monkeypatch) -> None:
    monkeypatch.setattr(door, "_said", set())
    operands = [randn(*shape, seed=n) for n, shape in enumerate(SHAPES["four axes"])]
    with replaced_sdpa(), caplog.at_level(logging.WARNING, "attngen"):
        found = [functional.scaled_dot_product_attention(*operands, **MASKS[mask]) for _ in "ab"]
    (logged,) = caplog.records
    assert "cpu has no kernels" in logged.getMessage()
    alike(found[1], sdpa(*operands, **MASKS[mask], **REFERENCE))


def test_pytorchs_function_is_back_after_an_error() -> None:
    with pytest.raises(SpecError), replaced_sdpa("cuda"):
        functional.scaled_dot_product_attention(*[randn(1, 1, 2, 8)] * 3)
    assert functional.scaled_dot_product_attention is theirs


def test_function_in_its_place_takes_the_backend_of_the_process(monkeypatch) -> None:
    x = randn(1, 1, 2, 8)
    with replaced_sdpa():
        monkeypatch.setattr(default, "backend", "cuda")
        with pytest.raises(SpecError, match="cpu has no kernels"):
            functional.scaled_dot_product_attention(x, x, x)
        monkeypatch.setattr(default, "backend", "nonsense")
        with pytest.raises(SpecError, match="ATTNGEN_BACKEND='nonsense'; allowed"):
            functional.scaled_dot_product_attention(x, x, x)
    with pytest.raises(SpecError, match="backend='gpu'; allowed"), replaced_sdpa("gpu"):
        raise AssertionError("a backend that there is none of")


@pytest.mark.slow
def test_torch_compile_follows_the_function() -> None:
    operands = [randn(*shape, seed=n).float() for n, shape in enumerate(GROUPS["groups"])]
    given = {"enable_gqa": True, "attn_mask": some(5, 7)}
    compiled = torch.compile(lambda *x: sdpa(*x, **given), backend="aot_eager", fullgraph=True)
    alike(compiled(*operands), theirs(*operands, **given))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_torch_compile_follows_what_is_in_its_place(backend: str) -> None:
    """In a process that compiles for the first time, too, as dynamo then looks for functions."""
    code = (
        "import torch\n"
        "from torch.nn import functional\n"
        "from attngen.integrations.torch import replaced_sdpa\n"
        "x = torch.randn(1, 2, 4, 8)\n"
        "attend = lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True)\n"
        "wanted = attend(x)\n"
        f"with replaced_sdpa({backend!r}):\n"
        "    found = torch.compile(attend, backend='aot_eager', fullgraph=True)(x)\n"
        "torch.testing.assert_close(found, wanted)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# ---- packed tokens


def test_signatures_are_pytorchs() -> None:
    own, other = (inspect.signature(x) for x in (varlen_attn, varlen.varlen_attn))
    names = [*own.parameters][: len(other.parameters)]  # 2.12 added some at the end
    assert names == [*other.parameters] and [*own.parameters][-1] == "backend"
    assert all(own.parameters[x].kind is other.parameters[x].kind for x in names)
    text, own = theirs.__doc__ or "", inspect.signature(sdpa)
    named = text[text.index("(") + 1 : text.index(")")].replace("\n", " ").split(",")
    wanted = [each.partition("=")[0].strip() for each in named]
    assert [*own.parameters] == [*wanted, "backend"]
    assert door.flex_attention is attngen.flex_attention


def packed_truth(operands, ends, window, used=None) -> Tensor:
    """Each sequence by PyTorch's function under a mask of the window from the bottom right."""
    (ends_q, ends_k), (q, k, v) = ends, operands
    outs = []
    for n, (a, b, c, d) in enumerate(zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)):
        d = c + used[n] if used else d
        shift = torch.arange(d - c)[None] - torch.arange(b - a)[:, None] - (d - c - b + a)
        left, right = window
        mask = ((left < 0) | (shift >= -left)) & ((right < 0) | (shift <= right))
        one = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        outs.append(theirs(*one, mask, enable_gqa=True).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("used", [None, [6, 2]], ids=["whole", "in use"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)], ids=str)
def test_varlen_attn_is_what_pytorch_documents(window, used) -> None:
    operands = randn(10, 4, 8), randn(14, 2, 8, seed=1), randn(14, 2, 8, seed=2)
    ends = [0, 4, 10], [0, 9, 14]
    given = {"seqused_k": torch.tensor(used)} if used else {}
    out, lse = varlen_attn(
        *operands,
        *(torch.tensor(each, dtype=torch.int32) for each in ends),
        *(6, 9),
        return_aux=varlen.AuxRequest(lse=True),
        window_size=window,
        enable_gqa=True,
        **given,
        **REFERENCE,
    )
    assert lse.shape == (4, 10)
    alike(out, packed_truth(operands, ends, window, used))


def test_varlen_attn_reads_pages() -> None:
    q, k, v = randn(3, 4, 8), randn(14, 2, 8, seed=1), randn(14, 2, 8, seed=2)
    pages = [torch.cat([x, x.new_zeros(2, 2, 8)]).reshape(4, 4, 2, 8) for x in (k, v)]
    found = varlen_attn(
        *(q, *pages, torch.tensor([0, 1, 3], dtype=torch.int32), None, 2, 8),
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=torch.tensor([8, 6]),
        block_table=torch.tensor([[0, 1], [2, 3]]),
        **REFERENCE,
    )
    alike(found, packed_truth((q, k, v), ([0, 1, 3], [0, 8, 14]), (-1, 0)))
    with pytest.raises(SpecError, match="enable_gqa"):
        varlen_attn(q, *pages, torch.tensor([0, 3]), None, 3, 8)
    with pytest.raises(SpecError, match="cu_seq_k"):
        varlen_attn(q, q, q, torch.tensor([0, 3]), None, 3, 8)

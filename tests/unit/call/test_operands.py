"""Operands as launches are told of them: descriptions of tensors are as good as torch's own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from attngen.call.numbers import Arguments
from attngen.call.operands import (
    extents_of,
    head_strides,
    keys_of,
    output_dtype,
    scalars_of,
    sources_of,
    spec_of,
    unpacked,
)
from attngen.call.table import OPTIONAL
from attngen.call.tensors import BYTES, TensorDesc
from tests.support.paths import ROOT

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CALLS = {
    "dense": ({n: torch.empty(2, 200, 4, 64, dtype=BF16) for n in "qkv"}, {}, {}),
    "odd strides": (
        {n: torch.empty(2, 200, 4, 70, dtype=BF16)[..., 1:68] for n in "qkv"},
        {"sink": torch.empty(8)[::2]},
        {"softmax": "learnable", "window_left": 7},
    ),
    "packed tensor": (
        {"q": torch.empty(2, 50, 3, 4, 64, dtype=BF16), "k": None, "v": None},
        {"bias": torch.empty(4, 50, 50, dtype=BF16), "alibi_slopes": torch.empty(2, 4)},
        {"layout": "bs3hd", "mask": "causal", "dropout_p": 0.3},
    ),
    "tokens": (
        {n: torch.empty(300, 4, 64, dtype=torch.float16) for n in "qkv"},
        {n: torch.empty(5, dtype=torch.int32) for n in ("cu_seqlens_q", "cu_seqlens_kv")},
        {"layout": "thd", "softcap": 3.0},
    ),
    "pages": (
        {
            "q": torch.empty(3, 1, 4, 64, dtype=BF16),
            **{n: torch.empty(9, 16, 2, 64, dtype=E4M3) for n in "kv"},
        },
        {
            **{n: torch.empty(3, 3, dtype=torch.int32) for n in ("page_table_k", "page_table_v")},
            "seqused_kv": torch.empty(3, dtype=torch.int32),
            "descale_k": torch.empty(3, 2),
            "attn_mask": torch.empty(1, 1, 1, 48, dtype=torch.bool),
        },
        {"layout": "paged_kv_bshd_bshd_bshd"},
    ),
    "FP8": ({n: torch.empty(2, 40, 4, 64).to(E4M3) for n in "qkv"}, {}, {"max_logit": True}),
}


def described(tensor: torch.Tensor | None) -> TensorDesc | None:
    if tensor is None:
        return None
    name = str(tensor.dtype).removeprefix("torch.")
    return TensorDesc(tuple(tensor.shape), tensor.stride(), name, tensor.device, tensor.data_ptr())


def told(carriers, given, arguments):
    """Whatever a launch knows of a call."""
    optional = dict.fromkeys(OPTIONAL) | given
    q, k, v = unpacked(*carriers.values(), arguments.layout)
    extents = extents_of({"q": q, "k": k, "v": v}, arguments.layout)
    return (
        spec_of(q, k, v, optional, arguments),
        scalars_of(q, optional, arguments, extents),
        extents,
        sources_of(carriers, optional, arguments),
        keys_of(extents, optional),
        str(output_dtype(q, arguments)),
    )


@pytest.mark.parametrize("name", CALLS)
def test_description_of_a_call_is_as_good_as_its_tensors(name: str) -> None:
    carriers, given, numbers = CALLS[name]
    arguments = Arguments(**numbers)
    found = told(
        {name: described(x) for name, x in carriers.items()},
        {name: described(x) for name, x in given.items()},
        arguments,
    )
    assert found == told(carriers, given, arguments)


@pytest.mark.parametrize("axis", [0, 1, -2, -1])
def test_parts_of_a_description_lie_where_those_of_a_tensor_do(axis: int) -> None:
    tensor = torch.empty(2, 6, 3, 4, dtype=BF16)[:, ::2]
    whole = described(tensor)
    assert whole is not None and whole.numel() == tensor.numel() and whole.ndim == 4
    assert list(whole.unbind(axis)) == [described(x) for x in tensor.unbind(axis)]


def test_new_description_is_contiguous() -> None:
    assert TensorDesc.contiguous((2, 3, 4), "int64").strides == torch.empty(2, 3, 4).stride()
    for name, size in BYTES.items():
        assert getattr(torch, name).itemsize == size


def test_call_is_known_without_tensor_libraries() -> None:
    names = sorted(path.stem for path in (ROOT / "attngen" / "call").glob("[a-z]*.py"))
    modules = ", ".join(f"attngen.call.{name}" for name in names)
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert not {"torch", "jax", "numpy", "jinja2"} & {*done.stdout.split()}


@pytest.mark.parametrize(
    ("descale", "strides"),
    [
        (None, (0, 0)),
        (torch.ones(1), (0, 0)),
        (torch.ones(3, 2), (2, 1)),
        (torch.ones(2, 3).T, (1, 3)),
        (torch.ones(6)[::2], (0, 2)),
        (torch.ones(1, 2).expand(3, 2), (0, 1)),
        (torch.ones(1, 1).as_strided((1, 1), (1 << 40, 1 << 40)), (0, 0)),
    ],
)
def test_head_strides_of_each_kind(descale: torch.Tensor | None, strides: tuple[int, int]) -> None:
    assert head_strides(descale) == strides


@pytest.mark.parametrize(
    ("mask", "right"), [("causal", 0), ("padding_causal", 0), ("none", 1 << 30)]
)
def test_scalars_have_no_keys_that_a_causal_mask_hides(mask: str, right: int) -> None:
    """So that tiles which follow a window know how wide it is."""
    q = TensorDesc.contiguous((2, 6, 2, 64), "bfloat16")
    extents = extents_of(dict.fromkeys("qkv", q), "bshd")
    for given in (-1, 5):
        arguments = Arguments(mask=mask, window_left=5, window_right=given)
        found = scalars_of(q, dict.fromkeys(OPTIONAL), arguments, extents)
        wanted = right if given < 0 else min(right, given)
        assert (found.window_left, found.window_right) == (5, wanted)

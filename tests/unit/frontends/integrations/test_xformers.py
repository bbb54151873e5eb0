"""The door for xformers computes what its bias classes mean."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attngen.integrations.xformers import memory_efficient_attention
from torch import Tensor

from attngen import SpecError
from attngen.frontends.integrations import xformers as door
from tests.support.paths import ROOT

H, D = 4, 8
HERE: dict[str, Any] = {"backend": "reference"}
ENDS_Q, ENDS_K, USED = [0, 3, 8], [0, 6, 14], [5, 7]  # of two sequences; keys of each in use


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def truth(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float = 0) -> Tensor:
    """Attention of [b, s, h, d] under a bias [.., s_q, s_kv], which may be infinite."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def alike(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def object_of(name: str, **fields: Any) -> Any:
    """An object of a class of that name."""
    return type(name, (SimpleNamespace,), {})(**fields)


def band(s_q: int, s_kv: int, name: str) -> Tensor:
    """The mask of a block of a class, as its documentation has it: windows are 3 keys long, or
    reach 2 back and 1 ahead."""
    causal, bottom_right = door._KNOWN[name]
    shift = s_kv - s_q if bottom_right else 0
    distance = torch.arange(s_q)[:, None] + shift - torch.arange(s_kv)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if "Local" in name:
        seen &= (distance < 3) if causal else (distance <= 2) & (distance >= -1)
    return seen


def window_of(name: str) -> dict[str, int]:
    if "Local" not in name:
        return {}
    causal, _ = door._KNOWN[name]
    return {"_window_size": 3} if causal else {"window_left": 2, "window_right": 1}


def hidden(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)


def operands(s_q: int = 5, s_kv: int = 7) -> list[Tensor]:
    return [randn(2, s, H, D, seed=n) for n, s in enumerate((s_q, s_kv, s_kv))]


@pytest.mark.parametrize("name", door._DENSE)
def test_dense_masks(name: str) -> None:
    numbers = randn(2, H, 5, 7, seed=6)
    fields = {"_bias": numbers} if "Bias" in name else window_of(name)
    bias = hidden(band(5, 7, name)) + (numbers if "Bias" in name else 0)
    found = memory_efficient_attention(*operands(), object_of(name, **fields), scale=0.3, **HERE)
    alike(found, truth(*operands(), bias, 0.3))


@pytest.mark.parametrize("name", [*door._BLOCKS, *door._PAGES])
def test_masks_of_sequences_in_a_row(name: str) -> None:
    parts, paged = "Padded" in name or "Gappy" in name, "Paged" in name
    lengths = USED if parts else [b - a for a, b in zip(ENDS_K, ENDS_K[1:], strict=False)]
    q, k, v = (randn(1, n, H, D, seed=s) for s, n in enumerate((8, 14, 14)))
    fields: dict[str, Any] = dict(window_of(name))
    rows = [range(a, a + n) for a, n in zip(ENDS_K, lengths, strict=False)]
    if paged:  # of two rows each; a sequence's are not in order
        fields |= {"block_tables": torch.tensor([[2, 0, 1, 6], [5, 3, 4, 6]]), "page_size": 2}
        rows = [[4, 5, 0, 1, 2], [10, 11, 6, 7, 8, 9, 12]]
    keys = {"seqstart": torch.tensor(ENDS_K, dtype=torch.int32)}
    if parts:
        keys["seqlen"] = torch.tensor(lengths, dtype=torch.int32)
    mask = object_of(
        name,
        q_seqinfo=SimpleNamespace(seqstart=torch.tensor(ENDS_Q, dtype=torch.int32)),
        k_seqinfo=SimpleNamespace(**keys),
        **fields,
    )
    outs = []
    for a, b, own in zip(ENDS_Q, ENDS_Q[1:], rows, strict=False):
        bias = hidden(band(b - a, len(own), name))
        outs.append(truth(q[:, a:b], k[:, [*own]], v[:, [*own]], bias))
    alike(memory_efficient_attention(q, k, v, mask, **HERE), torch.cat(outs, 1))


@pytest.mark.parametrize("name", door._GATHERED)
def test_sequences_that_begin_anywhere_in_their_pages(name: str) -> None:
    """Keys 1 to 4 and 3 to 7 of pages of two rows, with gradients."""
    starts, ends = [1, 3], [5, 8]
    table = torch.tensor([[2, 0, 1, 6], [5, 3, 4, 6]])
    mask = object_of(
        name,
        q_seqinfo=SimpleNamespace(seqstart=torch.tensor(ENDS_Q, dtype=torch.int32)),
        k_seqinfo=SimpleNamespace(
            seqstart=torch.tensor([*starts, 9], dtype=torch.int32),
            seqlen=torch.tensor(ends, dtype=torch.int32),
            seqstart_py=[*starts, 9],
            seqlen_py=ends,
        ),
        block_tables=table,
        page_size=2,
    )
    own, other = (
        [randn(1, n, H, D, seed=s).requires_grad_() for s, n in enumerate((8, 14, 14))]
        for _ in "ab"
    )
    found = memory_efficient_attention(*own, mask, **HERE)
    q, k, v = other
    outs = []
    for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
        rows = [int(table[b, n // 2]) * 2 + n % 2 for n in range(start, end)]
        queries = q[:, ENDS_Q[b] : ENDS_Q[b + 1]]
        bias = hidden(band(queries.shape[1], len(rows), name))
        outs.append(truth(queries, k[:, rows], v[:, rows], bias))
    alike(found, torch.cat(outs, 1))
    for out in (found, torch.cat(outs, 1)):
        out.backward(randn(*out.shape, seed=8))
    for one, two in zip(own, other, strict=True):
        alike(one.grad, two.grad)


def test_tensor_is_added_and_learns() -> None:
    found, wanted = (randn(2, H, 5, 7, seed=6).requires_grad_() for _ in "ab")
    one = memory_efficient_attention(*operands(), found, **HERE)
    other = truth(*operands(), wanted)
    alike(one, other)
    for out in (one, other):
        out.backward(randn(*out.shape, seed=8))
    alike(found.grad, wanted.grad)


def test_operands_without_heads_and_with_groups() -> None:
    q, k, v = (x[:, :, 0] for x in operands())
    bias = randn(2, 5, 7)
    found = memory_efficient_attention(q, k, v, bias, **HERE)
    wanted = truth(*(x[:, :, :1] for x in operands()), bias[:, None])
    alike(found, wanted[:, :, 0])
    q, k, v = (x.unflatten(2, (2, 2)) for x in operands())
    bias = randn(2, 2, 2, 5, 7)
    whole = truth(*operands(), bias.flatten(1, 2)).unflatten(2, (2, 2))
    alike(memory_efficient_attention(q, k, v, bias, **HERE), whole)
    k, v = (x[:, :, :, :1].expand(-1, -1, -1, 2, -1) for x in (k, v))
    wanted = truth(*(x.flatten(2, 3) for x in (q, k, v))).unflatten(2, (2, 2))
    alike(memory_efficient_attention(q, k, v, **HERE), wanted)


def test_dropout_and_dtype_of_the_output() -> None:
    ones = [torch.ones(1, 64, 2, 16, dtype=torch.bfloat16) for _ in range(3)]
    found = memory_efficient_attention(*ones, p=0.25, output_dtype=torch.float32, **HERE)
    assert found.dtype == torch.float32 and 0.9 < found.mean() < 1.1 and found.std() > 0


def test_classes_without_a_kernel_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match="class MaskOfMine; allowed: a tensor, Low"):
        memory_efficient_attention(*operands(), object_of("MaskOfMine"))


def test_code_of_the_guide_runs() -> None:
    code, _ = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/guide/xformers.md").read_text(), re.DOTALL
    )
    space: dict[str, Any] = {}
    exec(code, space)
    torch.testing.assert_close(space["out"], truth(*(space[x] for x in "qkv")))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [x for x in door._KNOWN if "Paged" not in x])
def test_classes_of_the_library_mean_that(name: str) -> None:
    kinds = pytest.importorskip("xformers.ops.fmha.attn_bias")
    kind, lengths_q, lengths_k = getattr(kinds, name), [3, 5], [6, 8]
    cpu = torch.device("cpu")
    row = dict(zip(("q", "kv"), ([1, 8, H, D], [1, 14, H, D]), strict=True))
    if name in door._DENSE:
        fields = (randn(1, H, 8, 14),) if "Bias" in name else ()
        mask = kind(*fields, **window_of(name))
    elif "Padded" in name:
        make = kinds.BlockDiagonalPaddedKeysMask.from_seqlens
        plain = make(q_seqlen=lengths_q, kv_seqlen=USED, kv_padding=7, device=cpu)
        mask = kind(q_seqinfo=plain.q_seqinfo, k_seqinfo=plain.k_seqinfo, **window_of(name))
    elif "Gappy" in name:
        given = {"kv_seqstarts": ENDS_K, "kv_seqlen": USED, "device": cpu}
        mask = kind.from_seqlens(q_seqlen=lengths_q, **given)
    else:
        plain = kinds.BlockDiagonalMask.from_seqlens(lengths_q, lengths_k, device=cpu)
        mask = kind(q_seqinfo=plain.q_seqinfo, k_seqinfo=plain.k_seqinfo, **window_of(name))
    q, k, v = (randn(*row[side], seed=n) for n, side in enumerate(("q", "kv", "kv")))
    bias = mask.materialize((1, H, 8, 14), dtype=torch.float64)
    alike(memory_efficient_attention(q, k, v, mask, **HERE), truth(q, k, v, bias))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", door._GATHERED)
def test_gappy_pages_of_the_library_mean_that(name: str) -> None:
    kinds = pytest.importorskip("xformers.ops.fmha.attn_bias")
    plain = getattr(kinds, name.removeprefix("Paged")).from_seqlens(
        q_seqlen=[3, 5], kv_seqstarts=[1, 11, 16], kv_seqlen=[4, 5], device=torch.device("cpu")
    )
    table = torch.tensor([[2, 0, 1, 6], [5, 3, 4, 7]], dtype=torch.int32)
    mask = plain.make_paged(table, 2, 8, getattr(kinds, name))
    q, k, v = (randn(1, n, H, D, seed=s) for s, n in enumerate((8, 16, 16)))
    bias = mask.materialize((1, H, 8, 16), dtype=torch.float64)
    alike(memory_efficient_attention(q, k, v, mask, **HERE), truth(q, k, v, bias))

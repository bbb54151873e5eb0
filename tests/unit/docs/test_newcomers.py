"""Pages for those who come from other attentions: their functions compute what these compute."""

from __future__ import annotations

import inspect
import itertools
import math
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import attngen
from tests.support.paths import ROOT

PAGES = ("sdpa", "flex-attention", "flash-attention", "transformer-engine")
B, H, H_KV, S, KEYS, D = 2, 4, 2, 9, 9, 16


def blocks_of(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def space_of(page: str) -> dict:
    """Names that the code of a page defines, run as it stands."""
    space: dict = {}
    with mock.patch.dict(sys.modules):  # of which a page may show how to replace some
        for code in blocks_of(ROOT / "docs" / "guide" / f"{page}.md"):
            exec(code, space)
    return space


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bhsd(queries: int = S, keys: int = KEYS, heads_kv: int = H) -> list[torch.Tensor]:
    shapes = (B, H, queries, D), (B, heads_kv, keys, D), (B, heads_kv, keys, D)
    return [randn(*shape, seed=n) for n, shape in enumerate(shapes)]


# ---- every page


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"], ids=str
)
def test_python_of_a_page_is_run_by_a_test(path: Path) -> None:
    """Pages with code are those that this file and its neighbours run."""
    run = {*(f"{page}.md" for page in PAGES), "serving.md", "shipping.md", "README.md"}
    run |= {"adding-a-fragment.md"}  # by test_fragments.py
    run |= {"fp8-training.md"}  # by test_fp8_training.py
    run |= {"xformers.md"}  # by tests of both in frontends/integrations
    run |= {"transformers.md"}  # by tests/unit/frontends/integrations/test_transformers_models.py
    run |= {"jax.md"}  # by tests/unit/frontends/jax/test_guide.py
    run |= {"context-parallel.md"}  # by test_context_parallel.py
    run |= {"gallery.md"}  # by test_gallery.py
    run |= {"specs.md"}  # by test_specs.py
    assert path.name in run or not blocks_of(path)


@pytest.mark.parametrize("page", PAGES)
def test_page_is_linked_and_names_arguments_that_there_are(page: str) -> None:
    assert f"docs/guide/{page}.md" in (ROOT / "README.md").read_text()
    text = (ROOT / "docs" / "guide" / f"{page}.md").read_text()
    ours = [line.split("|")[2] for line in text.splitlines() if line.count("|") == 3][2:]
    named = {*re.findall(r"`([a-z_]+)=", " ".join(ours))}
    assert named <= {*inspect.signature(attngen.attention).parameters}


def test_call_of_the_readme_runs() -> None:
    (code,) = blocks_of(ROOT / "README.md")
    q, k, v = (randn(1, 20, 2, D, seed=n) for n in range(3))
    space = {"q": q, "k": k, "v": v}
    exec(code, space)
    assert torch.equal(space["out"], attngen.attention(q, k, v, mask="causal"))


def test_call_of_the_shipping_page_is_one_of_load_bundle(monkeypatch) -> None:
    (code,) = blocks_of(ROOT / "docs" / "guide" / "shipping.md")
    signature, calls = inspect.signature(attngen.load_bundle), []
    monkeypatch.setattr(
        attngen, "load_bundle", lambda *x, **y: calls.append(signature.bind(*x, **y))
    )
    exec(code, {"attngen": attngen})
    assert [call.arguments["require"] for call in calls] == ["specs.toml"]


# ---- PyTorch's SDPA


MASKS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": randn(B, 1, S, KEYS, seed=5) > -1},
    "float": {"attn_mask": randn(H, S, KEYS, seed=6)},
    "double": {"attn_mask": randn(S, KEYS, seed=7).double()},
    "upper left": {"attn_mask": causal_upper_left(S, KEYS)},
    "lower right": {"attn_mask": causal_lower_right(S, KEYS)},
}


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("heads_kv", [H, H_KV])
@pytest.mark.parametrize("mask", MASKS)
def test_sdpa_is_that_of_pytorch(mask, heads_kv, scale) -> None:
    tensors, given = bhsd(heads_kv=heads_kv), dict(MASKS[mask])
    options = {"scale": scale, "enable_gqa": heads_kv != H}
    ours = space_of("sdpa")["scaled_dot_product_attention"](*tensors, **given, **options)
    if mask == "double":
        given["attn_mask"] = given["attn_mask"].float()
    theirs = scaled_dot_product_attention(*tensors, **given, **options)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_sdpa_with_dropout_returns_the_output_alone() -> None:
    tensors = bhsd()
    ours = space_of("sdpa")["scaled_dot_product_attention"]
    assert ours(*tensors, dropout_p=0.5).shape == tensors[0].shape
    assert not ours(*tensors, dropout_p=1.0).any()


def test_causal_of_sdpa_begins_top_left() -> None:
    tensors = bhsd(queries=3)
    ours = space_of("sdpa")["scaled_dot_product_attention"](*tensors, is_causal=True)
    theirs = scaled_dot_product_attention(*tensors, is_causal=True)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    lower = attngen.attention(*tensors, layout="bhsd", mask="causal_bottom_right")
    theirs = scaled_dot_product_attention(*tensors, attn_mask=torch.ones(3, KEYS).tril(6).bool())
    torch.testing.assert_close(lower, theirs, atol=1e-5, rtol=1e-5)


# ---- FlexAttention


@pytest.mark.filterwarnings("ignore")  # of flex_attention, which is not compiled here
@pytest.mark.parametrize("scale", [None, 0.3])
def test_flex_attention_is_that_of_pytorch(scale) -> None:
    tensors = bhsd(heads_kv=H_KV)
    table = randn(H, S, KEYS, seed=3)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, KEYS, "cpu")
    given = {
        "score_mod": lambda score, b, h, i, j: score * 2 + table[h, i, j],
        "block_mask": block_mask, "scale": scale, "enable_gqa": True, "return_lse": True,
    }  # fmt: skip
    ours = space_of("flex-attention")["flex_attention"](*tensors, **given)
    theirs = flex_attention(*tensors, **given)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    alone = space_of("flex-attention")["flex_attention"](*tensors, **given | {"return_lse": False})
    assert torch.equal(alone, ours[0])


@pytest.mark.parametrize("name", ["causal", "window", "lengths", "softcap", "ALiBi", "bias"])
def test_arguments_compute_what_callables_say(name) -> None:
    callables, arguments = space_of("flex-attention")["pairs"][name]
    tensors = bhsd()
    one, other = (
        attngen.attention(*tensors, layout="bhsd", **given) for given in (callables, arguments)
    )
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    spec = attngen.AttentionSpec.from_call(*(x.half() for x in tensors), layout="bhsd", **arguments)
    assert not (spec.score_mod or spec.mask_mod)


# ---- flash-attention


def test_names_of_flash_attention_lead_to_the_doors() -> None:
    code = blocks_of(ROOT / "docs" / "guide" / "flash-attention.md")
    with mock.patch.dict(sys.modules):
        for each in code:
            exec(each, {})
        import flash_attn
        import flash_attn_interface
        from flash_attn.flash_attn_interface import flash_attn_func

    assert flash_attn_func is flash_attn.flash_attn_func
    assert flash_attn.__version__ == "2.8"
    assert flash_attn_interface is attngen.integrations.flash_attn_interface
    assert "flash_attn" not in sys.modules


def flash(q, k, v, causal, window, slopes=None, scale=None, softcap=0.0):
    """Output and LSE of operands [s, h, d] of a sequence, as its documentation has them."""
    s_q, s_kv, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    distance = torch.arange(s_q)[:, None] + s_kv - s_q - torch.arange(s_kv)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance.abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros(s_q, s_kv, dtype=torch.bool)
    hidden |= distance > left if left >= 0 else hidden
    hidden |= -distance > right if right >= 0 else hidden
    scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0)
    return torch.einsum("hij,jhd->ihd", weights, v), scores.logsumexp(-1)


def check(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize(
    "causal, window", [*itertools.product((False, True), ((-1, -1), (3, 1), (2, 0), (0, 4)))]
)
def test_flash_attn_func_is_what_flash_attention_documents(causal, window, alibi) -> None:
    q, k, v = randn(B, 5, H, D), randn(B, KEYS, H_KV, D, seed=1), randn(B, KEYS, H_KV, D, seed=2)
    slopes = torch.rand(H) if alibi else None
    options = {"softmax_scale": 0.2, "softcap": 3.0, "causal": causal, "window_size": window}
    found = space_of("flash-attention")["flash_attn_func"](
        q, k, v, alibi_slopes=slopes, return_attn_probs=True, **options
    )
    each = [flash(*x, causal, window, slopes, 0.2, 3.0) for x in zip(q, k, v, strict=True)]
    check(found[:2], [torch.stack(x) for x in zip(*each, strict=True)])
    assert found[2] is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_flash_attn_varlen_func_is_what_flash_attention_documents(dtype) -> None:
    q, k, v = randn(10, H, D), randn(14, H_KV, D, seed=1), randn(14, H_KV, D, seed=2)
    ends_q, ends_k = torch.tensor([0, 4, 10], dtype=dtype), torch.tensor([0, 9, 14], dtype=dtype)
    out, lse, _ = space_of("flash-attention")["flash_attn_varlen_func"](
        q, k, v, ends_q, ends_k, 6, 9, causal=True, return_attn_probs=True
    )
    parts = [
        flash(q[a:b], k[c:d], v[c:d], True, (-1, -1))
        for (a, b), (c, d) in zip(((0, 4), (4, 10)), ((0, 9), (9, 14)), strict=True)
    ]
    check((out, lse), (torch.cat([x for x, _ in parts]), torch.cat([x for _, x in parts], 1)))


@pytest.mark.parametrize("paged", [False, True])
def test_flash_attn_with_kvcache_is_what_flash_attention_documents(paged) -> None:
    q, used = randn(B, 2, H, D), torch.tensor([7, 3])
    k, v = randn(B, 8, H_KV, D, seed=1), randn(B, 8, H_KV, D, seed=2)
    table, pages = None, (k, v)
    if paged:
        table = torch.tensor([[2, 0], [3, 1]])
        order = torch.tensor([1, 3, 0, 2])
        pages = tuple(x.reshape(4, 4, H_KV, D)[order] for x in (k, v))
    out = space_of("flash-attention")["flash_attn_with_kvcache"](
        q, *pages, cache_seqlens=used, block_table=table, causal=True
    )
    each = [flash(q[b], k[b, :n], v[b, :n], True, (-1, -1))[0] for b, n in enumerate(used.tolist())]
    check((out,), (torch.stack(each),))

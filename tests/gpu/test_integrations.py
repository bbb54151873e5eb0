"""Doors for other libraries' calls run on kernels, and agree with what these compute themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attngen.integrations import diffusers, flash_attn, flash_attn_interface
from attngen.integrations import transformers as door
from attngen.integrations.torch import replaced_sdpa, sdpa, varlen_attn
from attngen.integrations.xformers import memory_efficient_attention
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen

import attngen
from attngen.frontends.integrations import left_padded, paged
from attngen.frontends.pytorch.callables import listed as callable_listed
from tests.support import mask_kit

from . import oracle

pytestmark = pytest.mark.gpu
CUDA: dict[str, Any] = {"backend": "cuda"}


def alike(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), atol=2e-2, rtol=2e-2)


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Random bfloat16 tensors that want gradients."""
    return [oracle.randn(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]


# ---- PyTorch


MASKS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": (2, 1, 200, 200)},
    "floats": {"attn_mask": (4, 200, 200)},
}


@pytest.mark.parametrize("axes", ["bhsd", "bshd"])
@pytest.mark.parametrize("mask", MASKS)
def test_sdpa_and_its_gradients_are_those_of_pytorch(mask: str, axes: str) -> None:
    shapes = [(2, heads, 200, 64) for heads in (4, 2, 2)]
    given = dict(MASKS[mask])
    if shape := given.get("attn_mask"):
        numbers = oracle.randn(*shape, seed=7)
        given["attn_mask"] = numbers if mask == "floats" else (numbers > -1)
    results = []
    for attend in (lambda *x, **y: sdpa(*x, **y, **CUDA), functional.scaled_dot_product_attention):
        operands = leaves(*shapes)
        views = operands
        if axes == "bshd":
            views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands]
        out = attend(*views, enable_gqa=True, **given)
        out.backward(oracle.randn(*out.shape, seed=8))
        results.append([out, *(x.grad for x in operands)])
    own, _ = results
    assert own[0].transpose(1, 2).is_contiguous() == (axes == "bshd")
    for found, wanted in zip(*results, strict=True):
        alike(found, wanted)


def test_layers_run_on_kernels_where_pytorchs_function_is_replaced() -> None:
    layer = torch.nn.MultiheadAttention(128, 2, batch_first=True, device=oracle.DEVICE).bfloat16()
    x = oracle.randn(2, 100, 128)
    wanted, _ = layer(x, x, x, need_weights=False)
    with replaced_sdpa("cuda"):
        found, _ = layer(x, x, x, need_weights=False)
    alike(found, wanted)


def test_calls_in_float32_stay_pytorchs() -> None:
    x = oracle.randn(1, 2, 100, 64).float()
    wanted = functional.scaled_dot_product_attention(x, x, x)
    with replaced_sdpa():
        assert torch.equal(functional.scaled_dot_product_attention(x, x, x), wanted)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (30, 0)], ids=str)
def test_varlen_attn_is_that_of_pytorch(window: tuple[int, int]) -> None:
    ends = torch.tensor([0, 70, 71, 300], dtype=torch.int32, device=oracle.DEVICE)
    results = []
    for attend in (lambda *x, **y: varlen_attn(*x, **y, **CUDA), varlen.varlen_attn):
        operands = leaves(*[(300, 4, 64)] * 3)
        aux = varlen.AuxRequest(lse=True)
        out, lse = attend(*operands, ends, ends, 229, 229, return_aux=aux, window_size=window)
        out.backward(oracle.randn(*out.shape, seed=8))
        results.append([out, lse, *(x.grad for x in operands)])
    for found, wanted in zip(*results, strict=True):
        alike(found, wanted)


# ---- flash-attention


def test_dense_flash_attention_and_its_gradients_are_those_of_pytorch() -> None:
    results = []
    for name in ("flash", "sdpa"):
        q, kv = leaves((2, 130, 4, 64), (2, 130, 2, 2, 64))
        if name == "flash":
            out = flash_attn.flash_attn_kvpacked_func(q, kv, causal=True, **CUDA)
        else:
            views = (x.transpose(1, 2) for x in (q, *kv.unbind(2)))
            attend = functional.scaled_dot_product_attention
            out = attend(*views, is_causal=True, enable_gqa=True).transpose(1, 2)
        out.backward(oracle.randn(*out.shape, seed=8))
        results.append([out, q.grad, kv.grad])
    for found, wanted in zip(*results, strict=True):
        alike(found, wanted)


@pytest.mark.parametrize("form", ["rows", "pages"])
def test_cache_takes_new_tokens_by_one_call(form: str) -> None:
    """Kernels leave in the cache, and return, what the definition does."""
    shape = (4, 256, 2, 64) if form == "rows" else (16, 64, 2, 64)
    table = torch.randperm(16, generator=torch.Generator().manual_seed(0)).view(4, 4)
    given: dict[str, Any] = {"block_table": table.int().to(oracle.DEVICE)}
    if form == "rows":
        given = {"cache_batch_idx": torch.tensor([2, 0, 3, 1], device=oracle.DEVICE)}
    used = torch.tensor([3, 130, 64, 200], dtype=torch.int32, device=oracle.DEVICE)
    turn = torch.arange(256)[:, None] * 10000.0 ** -(torch.arange(32) / 32)
    cosines, sines = (x.to(oracle.DEVICE) for x in (turn.cos(), turn.sin()))
    new = [oracle.randn(4, 2, heads, 64, seed=n) for n, heads in ((3, 8), (4, 2), (5, 2))]
    found = []
    for backend in ("cuda", "reference"):
        caches = [oracle.randn(*shape, seed=n) for n in (1, 2)]
        q, k, v = new
        out, lse = flash_attn.flash_attn_with_kvcache(
            *(q, *caches, k, v, cosines, sines, used),
            **given,
            causal=True,
            return_softmax_lse=True,
            backend=backend,
        )
        found.append([out, lse, *caches])
    for one, other in zip(*found, strict=True):
        alike(one, other)


def test_chunks_and_sinks_of_version_three_run_on_kernels() -> None:
    sink = oracle.randn(4, seed=9)
    results = []
    for backend in ("cuda", "reference"):
        operands = leaves((1, 200, 4, 64), (1, 200, 2, 64), (1, 200, 2, 64))
        out = flash_attn_interface.flash_attn_func(
            *operands, causal=True, attention_chunk=48, s_aux=sink, backend=backend
        )
        out.backward(oracle.randn(*out.shape, seed=8))
        results.append([out, *(x.grad for x in operands)])
    for found, wanted in zip(*results, strict=True):
        alike(found, wanted)


@pytest.mark.parametrize("d_v", [64, 512])
def test_second_product_of_version_three_runs_on_kernels(d_v: int) -> None:
    """Over a cache whose values lie before the keys' own columns, as MLA's do."""
    v, k = oracle.randn(2, 300, 1, d_v + 64, seed=1).split([d_v, 64], -1)
    q, qv = (oracle.randn(2, 3, 4, n, seed=n) for n in (64, d_v))
    lengths = torch.tensor([300, 171], dtype=torch.int32, device=oracle.DEVICE)
    found, wanted = (
        flash_attn_interface.flash_attn_with_kvcache(
            q, k, v, qv=qv, cache_seqlens=lengths, causal=True, backend=backend
        )
        for backend in ("cuda", "reference")
    )
    alike(found, wanted)


def test_version_three_agrees_with_the_library() -> None:
    theirs = pytest.importorskip("flash_attn_interface")
    q, k, v = leaves((2, 100, 4, 64), (2, 300, 2, 64), (2, 300, 2, 64))
    given = {"causal": True, "window_size": (100, 0), "return_attn_probs": True}
    found = flash_attn_interface.flash_attn_func(q, k, v, **given, **CUDA)
    for one, other in zip(found, theirs.flash_attn_func(q, k, v, **given), strict=True):
        alike(one, other)


# ---- transformers


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small model with windows, whose calls must all run on kernels."""
    library = pytest.importorskip("transformers", minversion="5")
    door.register(backend="cuda")
    torch.manual_seed(0)
    config = library.MistralConfig(
        **{"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"sliding_window": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
    )
    return library.MistralForCausalLM(config).to(oracle.DEVICE, torch.bfloat16).eval()


IDS = torch.randint(1, 64, (2, 100), generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inputs", ["plain", "left", "left, few", "right", "packed"])
def test_models_of_transformers_run_on_kernels(
    llama: Any, inputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if inputs == "left, few":
        monkeypatch.setattr(left_padded, "TILE", 1 << 10)
        inputs = "left"
    there = torch.ones_like(IDS)
    padding = {"left": slice(0, 30), "right": slice(80, None)}
    there[0, padding.get(inputs, slice(0))] = 0
    given = {"attention_mask": there.to(oracle.DEVICE)}
    if inputs == "packed":
        places = torch.cat([torch.arange(n) for n in (30, 1, 69)])[None].expand(2, -1)
        given = {"position_ids": places.to(oracle.DEVICE), "use_cache": False}
    results = []
    for implementation in ("attngen", "eager"):
        llama.set_attn_implementation(implementation)
        llama.zero_grad()
        logits = llama(input_ids=IDS.to(oracle.DEVICE), **given).logits[there.bool()]
        logits.float().square().mean().backward()
        results.append([logits.detach(), *(x.grad.clone() for x in llama.parameters())])
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).float().norm() <= 2e-2 * wanted.float().norm()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_of_transformers_runs_on_kernels(llama: Any, cache: str) -> None:
    there = torch.ones_like(IDS)
    there[0, :30] = 0
    logits = []
    for implementation in ("attngen", "eager"):
        llama.set_attn_implementation(implementation)
        found = llama.generate(
            IDS.to(oracle.DEVICE),
            attention_mask=there.to(oracle.DEVICE),
            max_new_tokens=2,
            do_sample=False,
            cache_implementation=cache,
            return_dict_in_generate=True,
            output_logits=True,
            disable_compile=True,
        )
        logits.append(torch.stack(found.logits)[0])  # later ones follow from a choice of tokens
    found, wanted = logits
    assert (found - wanted).float().norm() <= 2e-2 * wanted.float().norm()


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 100])
def test_steps_behind_padding_read_a_cache_where_it_lies(window: int | None, sinks: bool) -> None:
    there = torch.arange(300) >= torch.tensor([[0], [130], [299]])
    function = mask_kit.CAUSAL
    if window is not None:
        function = mask_kit.every(mask_kit.window(window), function)
    given = mask_kit.request_of(function, (1, 300, 299, 0), there.to(oracle.DEVICE))
    plan = door.mask_of(**{**given, "batch_size": 3}, device=oracle.DEVICE)
    operands = [oracle.randn(3, heads, s, 64) for heads, s in ((8, 1), (2, 300), (2, 300))]
    sink = oracle.randn(8, seed=9) if sinks else None
    found, wanted = (
        door.attend(None, *operands, plan, s_aux=sink, backend=backend)[0]
        for backend in ("cuda", "reference")
    )
    alike(found, wanted)


@pytest.mark.parametrize("case", ["causal", "window, padded"])
def test_blocks_of_images_are_one_mask_for_all_layers(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that visit the blocks of a mask serve it, which layers share."""
    there = torch.ones(2, 200, dtype=torch.bool)
    ids = torch.full((2, 200), -1)
    ids[0, 5:90], ids[0, 90:130], ids[1, 100:199] = 0, 1, 0
    band = mask_kit.CAUSAL
    if case != "causal":
        there[0, :7], band = False, mask_kit.SLIDING
    function = mask_kit.either(band, mask_kit.blocks(ids.to(oracle.DEVICE)))
    given = mask_kit.request_of(function, (200, 200, 0, 0), there.to(oracle.DEVICE))
    plan = door.mask_of(**given, device=oracle.DEVICE)
    made = []
    own = callable_listed.made_again
    monkeypatch.setattr(callable_listed, "made_again", lambda *x: made.append(own(*x)) or made[-1])
    layers = []
    for backend in ("cuda", "cuda", "cuda", "reference"):
        operands = leaves(*[(2, heads, 200, 64) for heads in (4, 2, 2)])
        out, _ = door.attend(None, *operands, plan, backend=backend)
        layers.append((out, operands))
    results = []
    for out, operands in layers:
        out.backward(oracle.randn(*out.shape, seed=8))
        results.append([out, *(x.grad for x in operands)])
    first, *others, wanted = results
    assert len(made) == 3 and made[1] is made[2]  # the first had its function traced
    assert all(torch.equal(first[0], each[0]) for each in others)
    for found, true in zip(first, wanted, strict=True):
        alike(found, true)


# ---- diffusers


def test_layers_of_diffusers_run_on_kernels() -> None:
    """The backend of the library's dispatcher, with a mask of keys."""
    seen = torch.arange(300, device=oracle.DEVICE) < torch.tensor([[300], [170]]).to(oracle.DEVICE)
    results = []
    for backend in ("cuda", "reference"):
        operands = leaves((2, 100, 4, 64), (2, 300, 4, 64), (2, 300, 4, 64))
        q, k, v = operands
        out = diffusers.attend(query=q, key=k, value=v, attn_mask=seen, backend=backend)
        out.backward(oracle.randn(*out.shape, seed=8))
        results.append([out, *(x.grad for x in operands)])
    for found, wanted in zip(*results, strict=True):
        alike(found, wanted)


# ---- xformers


def test_blocks_of_xformers_run_on_kernels() -> None:
    """Sequences in a row, whose keys are padded apart, are those of the definition."""
    fields = {
        "q_seqinfo": SimpleNamespace(seqstart=torch.tensor([0, 70, 100])),
        "k_seqinfo": SimpleNamespace(
            seqstart=torch.tensor([0, 150, 300]), seqlen=torch.tensor([120, 31])
        ),
    }
    for info in fields.values():
        for name, x in vars(info).items():
            setattr(info, name, x.to(oracle.DEVICE, torch.int32))
    kind = type("BlockDiagonalCausalWithOffsetPaddedKeysMask", (SimpleNamespace,), {})
    results = []
    for backend in ("cuda", "reference"):
        operands = leaves((1, 100, 4, 64), (1, 300, 4, 64), (1, 300, 4, 64))
        out = memory_efficient_attention(*operands, kind(**fields), backend=backend)
        out.backward(oracle.randn(*out.shape, seed=8))
        results.append([out, *(x.grad for x in operands)])
    for found, wanted in zip(*results, strict=True):
        alike(found, wanted)


@pytest.mark.filterwarnings("ignore")
def test_continuous_batching_reads_the_cache_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    takes_others = "paged|sdpa" in transformers.AttentionInterface().valid_keys()
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    calls: list[str] = []

    def note(*given: Any, **named: Any) -> Any:
        calls.append(named["layout"])
        return attngen.attention(*given, **named)

    monkeypatch.setattr(paged, "attention", note)
    config = transformers.LlamaConfig(
        **{"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0},
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(oracle.DEVICE, torch.bfloat16).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    prompts = [[*range(3, 3 + n)] for n in (5, 9, 40)]
    given = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    found = []
    for backend in ("cuda", "reference"):
        name = door.register(f"on_{backend}" if takes_others else "sdpa", backend=backend)
        model.set_attn_implementation(f"{door.PAGED}{name}" if takes_others else name)
        results = model.generate_batch(
            inputs=prompts,
            generation_config=transformers.GenerationConfig(**given),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                **{"num_blocks": 64, "block_size": 32, "use_cuda_graph": False},
                **({} if takes_others else {"auto_switch_to_flash": False}),
            ),
        )
        found.append([x.generated_tokens for x in results.values()])
    assert "paged_kv_thd_bshd_bshd" in calls
    pairs = [pair for two in zip(*found, strict=True) for pair in zip(*two, strict=True)]
    assert len(pairs) == 48 and sum(a == b for a, b in pairs) >= 40  # bf16 may part near ties

"""The door for transformers: models of the library compute what they do with its own attention."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attngen.integrations import transformers as door

from attngen import SpecError
from attngen.frontends.integrations import paged
from tests.support.mask_kit import LEFT, PLACES, RIGHT, operands_of
from tests.support.paths import ROOT


def test_one_line_registers_attention_and_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, dict[str, Any]] = {"AttentionInterface": {}, "AttentionMaskInterface": {}}
    fake = types.ModuleType("transformers")
    for name, held in known.items():
        setattr(fake, name, types.SimpleNamespace(register=held.__setitem__))
    monkeypatch.setitem(sys.modules, "transformers", fake)
    assert door.register() == "attngen" and door.register("other", "reference") == "other"
    assert [*known["AttentionMaskInterface"]] == ["attngen", "other"]
    assert {*known["AttentionInterface"]} == {"attngen", "paged|attngen", "other", "paged|other"}
    q, k, v = operands_of(12, 12)
    found, _ = known["AttentionInterface"]["other"](None, q, k, v, None)
    assert torch.equal(found, door.attend(None, q, k, v, None)[0])
    with pytest.raises(SpecError, match="backend"):
        door.register("third", "neither")
        known["AttentionInterface"]["third"](None, q, k, v, None)


SMALL: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": None},
}
TWO_KINDS = ["sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Gemma2": {"sliding_window": 5},
    "Gemma3": {"sliding_window": 5, "layer_types": TWO_KINDS},
    "GptOss": {
        **{"sliding_window": 5, "layer_types": TWO_KINDS},
        **{"num_local_experts": 2, "num_experts_per_tok": 1},
    },
    "Llama4": {
        **{"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 32},
        **{"layer_types": ["chunked_attention", "full_attention"]},
    },
    "Qwen3": {},
    "Phi3": {"sliding_window": None},
    "DeepseekV3": {
        **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "n_routed_experts": 4, "n_group": 1},
        **{"num_experts_per_tok": 2, "topk_group": 1, "moe_intermediate_size": 16},
        **{"first_k_dense_replace": 1, "head_dim": 8},
    },
}


@pytest.fixture
def transformers() -> Any:
    """The library itself, where it is installed."""
    found = pytest.importorskip("transformers", minversion="5")
    door.register(backend="reference")
    return found


def check_beside_eager(model: Any, outputs: Callable[[], torch.Tensor]) -> None:
    """Compares outputs, and gradients of all parameters, with those of the model's own attention.
    outputs: runs the model."""
    results = []
    for implementation in ("eager", "attngen"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        found = outputs()
        found.square().mean().backward()
        grads = [x.grad.clone() for x in model.parameters() if x.grad is not None]
        results.append([found.detach(), *grads])
    for found, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-3)


def model_of(transformers: Any, name: str) -> Any:
    text = "Text" if name in ("Gemma3", "Llama4") else ""
    config = getattr(transformers, f"{name}{text}Config")(**{**SMALL, **MODELS[name]})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    return model


IDS = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))
INPUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "left padding": {"attention_mask": LEFT.long()},
    "right padding": {"attention_mask": RIGHT.long()},
    "packed": {"position_ids": PLACES[:1].expand(2, -1), "use_cache": False},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", MODELS)
def test_models_and_their_gradients_are_those_of_eager(transformers, name, inputs) -> None:
    model, given = model_of(transformers, name), INPUTS[inputs]
    there = given.get("attention_mask", torch.ones_like(IDS)).bool()
    check_beside_eager(model, lambda: model(input_ids=IDS, **given).logits[there])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inputs", ["plain", "left padding"])
def test_images_in_a_prompt_see_themselves_as_with_eager(transformers, inputs, monkeypatch) -> None:
    config = transformers.Gemma3Config(
        text_config={**SMALL, **MODELS["Gemma3"]},
        vision_config={**IMAGES, "vision_use_head": False},
        mm_tokens_per_image=4,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    asked: list[str] = []
    own = door.attention
    monkeypatch.setattr(door, "attention", lambda *x, **y: asked.extend(y) or own(*x, **y))
    given = INPUTS[inputs]
    kinds = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0]]).expand(2, -1)
    there = given.get("attention_mask", torch.ones_like(IDS)).bool()
    check_beside_eager(
        model, lambda: model(input_ids=IDS, token_type_ids=kinds, **given).logits[there]
    )
    assert asked.count("mask_mod") == 2 and "attn_mask" not in asked


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padding", ["plain", "left padding"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generation_is_that_of_eager(transformers, name, cache, padding) -> None:
    model, found = model_of(transformers, name), []
    given = {"attention_mask": torch.ones_like(IDS)} | INPUTS[padding]
    for implementation in ("eager", "attngen"):
        model.set_attn_implementation(implementation)
        result = model.generate(
            IDS,
            **given,
            max_new_tokens=6,
            do_sample=False,
            cache_implementation=cache,
            return_dict_in_generate=True,
            output_logits=True,
            disable_compile=True,
        )
        found.append(torch.stack(result.logits))
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-3)


IMAGES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "image_size": 32, "patch_size": 8},
}
TEXTS: dict[str, Any] = {
    name: x for name, x in SMALL.items() if name not in ("head_dim", "num_key_value_heads")
}
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SOUND = torch.randn(2, 16, 100, generator=torch.Generator().manual_seed(0))
PADDED = {"attention_mask": RIGHT.long()}
SPEECH: dict[str, Any] = {
    **{"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32},
    **{"decoder_ffn_dim": 32, "max_source_positions": 50, "num_mel_bins": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
ENCODERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "BERT": ("BertConfig", "BertModel", TEXTS, {"input_ids": IDS, **PADDED}),
    "ModernBERT": (
        *("ModernBertConfig", "ModernBertModel"),
        {**TEXTS, "local_attention": 4, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
        {"input_ids": IDS, **PADDED},
    ),
    "ViT": ("ViTConfig", "ViTModel", IMAGES, {"pixel_values": PIXELS}),
    "SigLIP": ("SiglipVisionConfig", "SiglipVisionModel", IMAGES, {"pixel_values": PIXELS}),
    "T5": (
        *("T5Config", "T5ForConditionalGeneration"),
        {
            **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2},
            **{"num_heads": 4, "decoder_start_token_id": 0},
        },
        {"input_ids": IDS, "decoder_input_ids": IDS[:, :7], **PADDED},
    ),
    "Whisper": (
        *("WhisperConfig", "WhisperForConditionalGeneration"),
        SPEECH,
        {"input_features": SOUND, "decoder_input_ids": IDS[:, :7]},
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_and_cross_attention_are_those_of_eager(transformers, name) -> None:
    config, kind, sizes, given = ENCODERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)

    def outputs() -> torch.Tensor:
        out = model(**given)
        found = out.logits if hasattr(out, "logits") else out.last_hidden_state
        # A padding token's own output is 0 in these.
        return found[given["attention_mask"].bool()] if name in ("BERT", "ModernBERT") else found

    check_beside_eager(model, outputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["T5", "Whisper"])
def test_decoders_of_two_kinds_of_attention_generate_as_eager_does(transformers, name) -> None:
    config, kind, sizes, given = ENCODERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    rest = {name: x for name, x in given.items() if name != "decoder_input_ids"}
    found = []
    for implementation in ("eager", "attngen"):
        model.set_attn_implementation(implementation)
        result = model.generate(
            **rest,
            **{"max_new_tokens": 5, "do_sample": False, "eos_token_id": None},
            **{"return_dict_in_generate": True, "output_logits": True, "disable_compile": True},
        )
        found.append(torch.stack(result.logits))
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_continuous_batching_is_generation_one_by_one(transformers, name, monkeypatch) -> None:
    registered = "attngen"
    if "paged|sdpa" not in transformers.AttentionInterface().valid_keys():
        registered = "sdpa"  # the library batches with no attention but its own
    model = model_of(transformers, name)
    if registered == "sdpa" and not model._supports_sdpa:
        pytest.skip("the library does not serve this model under that name")
    model.set_attn_implementation("eager")
    prompts = [[*range(3, 3 + n)] for n in (5, 9, 40)]
    given = {"max_new_tokens": 6, "do_sample": False}
    wanted = [model.generate(torch.tensor([x]), **given)[0, len(x) :].tolist() for x in prompts]
    interfaces = (transformers.AttentionInterface, transformers.AttentionMaskInterface)
    for interface in interfaces:  # which the other tests find as they were
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    layouts: list[str] = []
    own = paged.attention
    monkeypatch.setattr(
        paged, "attention", lambda *x, **y: layouts.append(y["layout"]) or own(*x, **y)
    )
    door.register(registered, backend="reference")
    model.set_attn_implementation("sdpa" if registered == "sdpa" else "paged|attngen")
    batching = transformers.ContinuousBatchingConfig(num_blocks=64, block_size=32)
    config = transformers.GenerationConfig(**given, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=batching
    )
    assert [x.generated_tokens for x in found.values()] == wanted
    in_place = "paged_kv_thd_bshd_bshd" in layouts
    assert in_place is (name != "Mistral")  # whose layers all have a window
    monkeypatch.undo()
    if registered == "sdpa":  # which the library computes again, of keys that it gathers
        found = model.generate_batch(
            inputs=prompts, generation_config=config, continuous_batching_config=batching
        )
        assert [x.generated_tokens for x in found.values()] == wanted


@pytest.mark.slow
def test_code_of_the_guide_runs(transformers) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/guide/transformers.md").read_text(), re.DOTALL
    )
    space: dict[str, Any] = {}
    exec(code, space)
    found, model = space["logits"], space["model"]
    model.set_attn_implementation("eager")
    torch.testing.assert_close(found, model(input_ids=space["ids"]).logits)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_generation_compiles_without_graph_breaks(transformers) -> None:
    """Plans go into compiled code as they are, and later tokens compile nothing."""
    model, graphs, found = model_of(transformers, "Llama"), [], []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = transformers.CompileConfig(backend=keep, fullgraph=True, mode=None)
    compiled._compile_all_devices = True
    for implementation, config in (("eager", None), ("attngen", compiled)):
        torch.compiler.reset()
        model.set_attn_implementation(implementation)
        result = model.generate(
            IDS,
            **INPUTS["left padding"],
            max_new_tokens=6,
            do_sample=False,
            cache_implementation="static",
            return_dict_in_generate=True,
            output_logits=True,
            disable_compile=config is None,
            compile_config=config,
        )
        found.append(torch.stack(result.logits))
    assert 1 <= len(graphs) <= 2
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-3)

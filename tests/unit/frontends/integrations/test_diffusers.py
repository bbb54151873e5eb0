"""The door for diffusers: its layers compute what they do with the library's own attention."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from attngen.integrations import diffusers as door
from torch import Tensor, nn
from torch.nn import functional

from attngen import SpecError
from tests.support.paths import ROOT

GENERATOR = torch.Generator().manual_seed(0)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


MASKS: dict[str, Any] = {
    "nothing": None,
    "keys": numbers(2, 7) > -0.5,
    "bool": numbers(2, 1, 5, 7) > -1,
    "floats": numbers(1, 4, 5, 7),
}


@pytest.mark.parametrize("name", MASKS)
def test_backend_takes_positions_before_heads(name: str) -> None:
    q, k, v = numbers(2, 5, 4, 8), numbers(2, 7, 2, 8), numbers(2, 7, 2, 8)
    mask = MASKS[name]
    found = door.attend(query=q, key=k, value=v, attn_mask=mask, enable_gqa=True, scale=0.3)
    whole = mask[:, None, None] if name == "keys" else mask
    views = (x.transpose(1, 2) for x in (q, k, v))
    attend = functional.scaled_dot_product_attention
    wanted = attend(*views, attn_mask=whole, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, wanted)


class Layer(nn.Module):
    """A layer as processors see it: two heads, a mask of keys [b, s_kv]."""

    heads = 2
    spatial_norm = norm_q = norm_k = None
    norm_cross = True
    residual_connection = True
    rescale_output_factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(2, 8)
        self.to_q, self.to_k, self.to_v = nn.Linear(8, 16), nn.Linear(6, 16), nn.Linear(6, 16)
        self.to_out = nn.ModuleList([nn.Linear(16, 8), nn.Identity()])

    def norm_encoder_hidden_states(self, x: Tensor) -> Tensor:
        return x * 2

    def prepare_attention_mask(self, mask: Tensor, length: int, batch: int) -> Tensor:
        assert mask.shape == (batch, length)
        return mask[:, None].repeat_interleave(self.heads, 0)


def test_processor_computes_a_layer_of_images() -> None:
    torch.manual_seed(0)
    layer, image, text = Layer(), numbers(2, 8, 3, 4), numbers(2, 5, 6)
    mask = torch.zeros(2, 5).masked_fill(numbers(2, 5) > 1, -torch.inf)
    found = door.AttnProcessor("reference")(layer, image, text, attention_mask=mask, temb=None)
    rows = layer.group_norm(image.flatten(2)).transpose(1, 2)
    q, k, v = (
        to(x).view(2, -1, 2, 8).transpose(1, 2)
        for to, x in ((layer.to_q, rows), (layer.to_k, text * 2), (layer.to_v, text * 2))
    )
    heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
    out = layer.to_out[0](heads.transpose(1, 2).reshape(2, 12, 16))
    wanted = (out.transpose(1, 2).reshape(image.shape) + image) / 2
    torch.testing.assert_close(found, wanted)
    assert found.shape == image.shape


def test_layers_with_projections_of_other_states_are_refused() -> None:
    layer = Layer()
    layer.add_k_proj = nn.Linear(6, 16)
    with pytest.raises(SpecError, match="processor of its own.*replaced_sdpa"):
        door.AttnProcessor("reference")(layer, numbers(2, 5, 8), numbers(2, 5, 6))


@pytest.fixture
def diffusers() -> Any:
    """The library itself, where it is installed."""
    return pytest.importorskip("diffusers")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformer_of_the_library_takes_the_backend_by_its_name(diffusers, monkeypatch) -> None:
    assert door.register() == door.register() == "attngen"
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    sizes |= {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, **sizes, axes_dims_rope=(4, 4, 8)
    ).eval()
    given = {
        **{"hidden_states": numbers(1, 16, 4), "encoder_hidden_states": numbers(1, 6, 32)},
        **{"pooled_projections": numbers(1, 32), "timestep": torch.tensor([1.0])},
        **{"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)},
    }
    found, calls = [], []
    own = door.sdpa
    monkeypatch.setattr(door, "sdpa", lambda *x, **y: calls.append(1) or own(*x, **y))
    for name in ("native", "attngen"):
        model.set_attention_backend(name)
        with torch.no_grad():
            found.append(model(**given).sample)
    assert len(calls) == 2
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_unet_of_the_library_takes_the_processor(diffusers) -> None:
    torch.manual_seed(0)
    blocks = {"block_out_channels": (32, 32), "layers_per_block": 1, "norm_num_groups": 8}
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        **blocks,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
    ).eval()
    x, text, mask = numbers(2, 4, 8, 8), numbers(2, 5, 16), torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    found = []
    for processor in (None, door.AttnProcessor()):
        if processor is not None:
            model.set_attn_processor(processor)
        with torch.no_grad():
            found.append(model(x, 1, text, encoder_attention_mask=mask).sample)
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_code_of_the_guide_runs(diffusers) -> None:
    page = (ROOT / "docs/guide/xformers.md").read_text()
    _, code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    space: dict[str, Any] = {"torch": torch}
    torch.manual_seed(0)
    with torch.no_grad():
        exec(code, space)
        model = space["unet"]
        model.set_attn_processor(diffusers.models.attention_processor.AttnProcessor2_0())
        wanted = model(space["image"], 1, space["text"]).sample
    torch.testing.assert_close(space["noise"], wanted, atol=2e-5, rtol=1e-3)

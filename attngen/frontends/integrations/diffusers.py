"""diffusers' models on attngen's kernels: a backend of its dispatcher, and a processor for layers
that have none."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...call.taking import taking
from ...errors import SpecError
from .torch import Sdpa, sdpa

IMAGE_AXES = 4  # [b, c, height, width]
__all__ = ["AttnProcessor", "attend", "register"]


def register(name: str = "attngen") -> str:
    """Let models take `set_attention_backend(name)`, and return the name.

    diffusers knows its backends by an enumeration, which gets one more member. A backend that it
    has by this name is replaced for the process: `native` is that of models that name none.

    Raises: ImportError where diffusers is not installed, or has no dispatcher of attention.
    """
    from diffusers.models.attention_dispatch import (
        AttentionBackendName,
        _AttentionBackendRegistry,
    )

    if name not in {each.value for each in AttentionBackendName}:
        member = str.__new__(AttentionBackendName, name)
        member._name_, member._value_ = name.upper(), name
        AttentionBackendName._member_map_[member._name_] = member
        AttentionBackendName._member_names_.append(member._name_)
        AttentionBackendName._value2member_map_[name] = member
    _AttentionBackendRegistry.register(AttentionBackendName(name))(attend)
    return name


@taking(Sdpa)
def attend(call: Sdpa) -> Tensor:
    """Attention as diffusers' dispatcher calls it.

    Args:
        query: [b, s_q, h, d].
        key, value: [b, s_kv, h_kv, d and d_v].
        attn_mask: bool, True takes part, or floats that are added to the scores: a broadcast of
            [b, h, s_q, s_kv], or [b, s_kv] of keys.
        dropout_p, is_causal, scale, enable_gqa: as of `attngen.integrations.torch.sdpa`.
        backend: as of `attngen.attention`.

    Returns: [b, s_q, h, d_v].

    Raises: SpecError.
    """
    q, k, v = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
    mask = call.attn_mask
    if mask is not None and mask.shape == (k.shape[0], k.shape[2]):
        mask = mask[:, None, None]
    found: Tensor = sdpa(
        *(q, k, v, mask, call.dropout_p, call.is_causal, call.scale, call.enable_gqa),
        backend=call.backend,
    )
    return found.transpose(1, 2)


class AttnProcessor:
    """A processor of diffusers' `Attention` layers, as `unet.set_attn_processor(AttnProcessor())`
    takes it: what its `AttnProcessor2_0` computes.

    backend: as of `attngen.attention`.
    """

    def __init__(self, backend: str = "auto") -> None:
        self.backend = backend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """The layer's output, [b, s, c] or [b, c, height, width] as its input.

        attn: the layer; encoder_hidden_states: [b, s_kv, c_kv], of another sequence;
        attention_mask: as `attn.prepare_attention_mask` takes it; temb: of its spatial norm.
        others: of other processors.

        Raises: SpecError of a layer that projects other states to keys of their own, as
            `attngen.integrations.torch.sdpa` does.
        """
        if getattr(attn, "add_k_proj", None) is not None:
            raise SpecError(
                "a layer with add_k_proj has a processor of its own: leave it, and call the model "
                "in attngen.integrations.torch.replaced_sdpa()"
            )
        residual, image = hidden_states, hidden_states.shape
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        if len(image) == IMAGE_AXES:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        keys = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross:
            keys = attn.norm_encoder_hidden_states(encoder_hidden_states)
        heads = (
            to(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for to, x in ((attn.to_q, hidden_states), (attn.to_k, keys), (attn.to_v, keys))
        )
        q, k, v = heads
        q = q if attn.norm_q is None else attn.norm_q(q)
        k = k if attn.norm_k is None else attn.norm_k(k)
        mask = attention_mask
        if mask is not None:
            batch, length, *_ = keys.shape
            mask = attn.prepare_attention_mask(mask, length, batch)
            mask = mask.view(batch, attn.heads, -1, mask.shape[-1])
        found: Tensor = sdpa(q, k, v, mask, backend=self.backend)
        found = found.transpose(1, 2).flatten(2).to(q.dtype)
        for layer in attn.to_out:
            found = layer(found)
        if found.ndim != len(image):
            found = found.transpose(-1, -2).reshape(image)
        if attn.residual_connection:
            found = found + residual
        return found / attn.rescale_output_factor  # type: ignore[no-any-return]

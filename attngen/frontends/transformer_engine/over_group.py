"""Calls of `DotProductAttention` whose sequences lie over a context-parallel group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...errors import SpecError
from .calls import Call
from .masks import check_set_window_size, ends_at_corner, mask_name
from .recipes import recipe_in_force

if TYPE_CHECKING:
    from .dot_product_attention import DotProductAttention

SOFTMAXES = {"off-by-one": "off_by_one"}  # what attngen calls them


def over_group(module: DotProductAttention, call: Call) -> Tensor:
    """The output […, h · d_v] of this rank's queries, of the module's group.

    Lengths are those of the whole, as TransformerEngine has them; a mask and a bias have the rank's
    own queries. Raises: SpecError for what calls over a group do not take, as
    `attngen.parallel.attention` does.
    """
    from ... import parallel

    if reasons := [*_refusals(module, call)]:
        raise SpecError(reasons)
    q, k, v = call.query_layer, call.key_layer, call.value_layer
    assert q is not None and k is not None and v is not None  # refused
    comm: Any = module.cp_comm_type  # which is judged there
    given = arguments_of(module, call)
    out = parallel.attention(q, k, v, group=module.cp_group, comm=comm, **given)
    assert isinstance(out, Tensor)  # no by-products are asked for
    return out.flatten(-2)


def arguments_of(module: DotProductAttention, call: Call) -> dict[str, Any]:
    """The arguments of `attngen.parallel.attention` beside q, k, v and the group."""
    axes = module.qkv_format if call.qkv_format is None else call.qkv_format
    given = call.attn_mask_type
    mask = module.attn_mask_type if given is None else mask_name(given)
    window = module.window_size if call.window_size is None else call.window_size
    corner = ends_at_corner(mask, call.bottom_right_diagonal, module.bottom_right_diagonal)
    found: dict[str, Any] = {
        "layout": axes,
        "mask": "causal" if "causal" in mask else "none",
        "window": check_set_window_size(mask, window),
        "bottom_right": corner,
        "softmax_scale": module.softmax_scale,
        "softmax": SOFTMAXES.get(module.softmax_type, module.softmax_type),
        "deterministic": module.deterministic,
        "dropout_p": module.attention_dropout if module.training else 0.0,
    }
    if module.softmax_type == "learnable":
        assert module.softmax_offset is not None  # of this softmax
        found["sink"] = module.softmax_offset.flatten()
    if mask == "arbitrary":
        assert isinstance(call.attention_mask, Tensor)  # refused
        found["attn_mask"] = call.attention_mask.logical_not()
    for side in ("q", "kv") if "padding" in mask else ():
        ends = getattr(call, f"cu_seqlens_{side}")
        if axes == "thd":
            found[f"cu_seqlens_{side}"] = ends
            found[f"cu_seqlens_{side}_padded"] = getattr(call, f"cu_seqlens_{side}_padded")
        else:
            found[f"seqused_{side}"] = ends.diff()
    kind = call.core_attention_bias_type
    if kind == "alibi":
        found["alibi_slopes"] = True if call.alibi_slopes is None else call.alibi_slopes
    elif kind in ("post_scale_bias", "pre_scale_bias"):
        found["bias"] = call.core_attention_bias
        found["bias_type"] = kind.removesuffix("_bias")
    return found


def _refusals(module: DotProductAttention, call: Call) -> Iterator[str]:
    """Reasons why a call is not served over a group."""
    there = {
        "qkv_layer and kv_layer": call.query_layer is None
        or call.key_layer is None
        or call.value_layer is None,
        "score_mod": call.score_mod is not None,
        "a KV cache": call.inference_params is not None,
        "return_max_logit": module.return_max_logit,
        "checkpoint_core_attention": call.checkpoint_core_attention,
        "an FP8 recipe": recipe_in_force() is not None or bool(call.fp8_output),
    }
    for name, is_there in there.items():
        if is_there:
            yield f"{name} is not served over a context-parallel group"
    given = call.attn_mask_type
    mask = module.attn_mask_type if given is None else mask_name(given)
    if "padding" in mask and (call.cu_seqlens_q is None or call.cu_seqlens_kv is None):
        yield f"attn_mask_type={mask!r} over a group needs cu_seqlens_q and cu_seqlens_kv"
    if mask == "arbitrary" and not isinstance(call.attention_mask, Tensor):
        yield "attn_mask_type='arbitrary' over a group needs attention_mask, of the rank's queries"

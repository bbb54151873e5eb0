"""Arguments of `attngen.attention` as specs know them: which there are, and what they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..fragments.features import Features

# The arguments of `attngen.attention` beside q, k and v, which this package cannot ask for them; a
# tensor of a score that a switch of its own asks for is found by its fragment, too.
ARGUMENTS = (
    *("layout", "mask", "window", "bottom_right", "positions", "attn_mask"),
    *("softmax_scale", "softcap"),
    *("bias", "bias_type", "alibi_slopes", "softmax", "sink", "dropout_p", "rng_state"),
    *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("max_seqlen_q", "max_seqlen_kv", "seqused_q", "seqused_kv", "seqstart_q"),
    *("seqstart_kv", "page_table", "num_splits"),
    *("schedule", "score_mod", "mask_mod", "block_mask", "descale_q", "descale_k", "descale_v"),
    *("scale_s", "descale_s", "scale_o", "out_dtype", "out", "out_layout", "deterministic"),
    *("return_lse", "return_max_logit", "return_amax", "return_rng_state", "backend", "places"),
)


DESCALES = ("descale_q", "descale_k", "descale_v")
TOKEN_AXES = 3  # of scales a token and head, [b, h, s]


def scaling_of(arguments: Mapping[str, Any]) -> str:
    """The scaling of a call with these scales of q, k and v: by `token`, else by `tensor`."""
    for name in DESCALES:
        if len(getattr(arguments.get(name), "shape", ())) == TOKEN_AXES:
            return "token"
    return "tensor"


def call_arguments(known: Features) -> frozenset[str]:
    """The arguments of `attngen.attention` beside q, k and v, but for those of fragments that calls
    name. known: all fragments."""
    own = (x for axis in ("score", "softmax") for x in known[axis].values() if not x.called)
    return frozenset((*ARGUMENTS, *(x.name for each in own for x in each.operands if x.axes)))


def score_switches(arguments: Mapping[str, Any], known: Features) -> dict[str, Any]:
    """The switches of a spec that a call turns by giving a tensor of their score, each True."""
    return {
        each.selected_by: True
        for each in known["score"].values()
        for operand in each.operands
        if operand.axes and arguments.get(operand.name) is not None
        if not (each.called or each.choice)
    }


def fragment_arguments(known: Features) -> set[str]:
    """The arguments that fragments add to those of `attention`."""
    called = (each for axis in known.values() for each in axis.values() if each.called)
    return {operand.name for each in called for operand in each.operands}

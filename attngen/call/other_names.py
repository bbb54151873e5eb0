"""Names that arguments of attention have in other libraries, and what they are here."""

from __future__ import annotations

from collections.abc import Iterable

from ..io.text import suggestion

_CAUSAL = "mask='causal', or where the last query sees the last key 'causal_bottom_right'"
_SINKS = "sink, with softmax='learnable'"
NAMES = {
    **{"attention_mask": "attn_mask", "attn_bias": "bias", "attention_dropout": "dropout_p"},
    **{"block_table": "page_table", "block_tables": "page_table", "qkv_format": "layout"},
    **{"cache_leftpad": "seqstart_kv", "cache_seqlens": "seqused_kv", "kv_seqlen": "seqused_kv"},
    **{f"{name}_descale": f"descale_{name}" for name in "qkv"},
    **dict.fromkeys(("scale", "scaling", "sm_scale"), "softmax_scale"),
    **dict.fromkeys(("return_attn_probs", "return_softmax_lse"), "return_lse"),
    **dict.fromkeys(("sliding_window", "window_size"), "window"),
}
MORE = {
    **dict.fromkeys(("causal", "is_causal"), f"; pass {_CAUSAL}"),
    **dict.fromkeys(("s_aux", "sinks"), f"; pass {_SINKS}"),
    "enable_gqa": "; leave it out: heads of k and v divide q's",
}


def meant_by(name: str, known: Iterable[str]) -> str:
    """Say what is meant by an argument of an unknown name, as `; did you mean 'window'?`;
    nothing where nobody knows. known: the names that there are."""
    if name in NAMES:
        return f"; did you mean {NAMES[name]!r}?"
    return MORE.get(name) or suggestion(name, known)

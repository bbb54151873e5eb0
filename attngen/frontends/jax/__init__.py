"""`attngen.jax`: the same kernels in JAX, under jit, grad, vmap and shardings.

    from attngen.jax import attention
    out = attention(q, k, v, mask="causal", window=(1024, 0))

No host compiler is needed, and torch is not imported. docs/guide/jax.md is the guide.
`DotProductAttention`, a module of flax, is imported when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from .attention import attention
from .context_parallel import context_attention
from .dot_product_attention import dot_product_attention
from .fp8_attention import fp8_attention
from .fp8_recipes import DelayedScaling, Float8CurrentScaling, Float8Scales
from .fused_attn import fused_attn, is_fused_attn_kernel_available, make_swa_mask
from .load_balancing import inverse_reorder_causal_load_balancing, reorder_causal_load_balancing
from .names import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    CPStrategy,
    QKVFormat,
    QKVLayout,
    ReorderStrategy,
    canonicalize_attn_mask_type,
)
from .sequences import SequenceDescriptor

if TYPE_CHECKING:
    from .flax import DotProductAttention

__all__ = [
    "AttnBiasType",
    "AttnMaskType",
    "AttnSoftmaxType",
    "CPStrategy",
    "DelayedScaling",
    "DotProductAttention",
    "Float8CurrentScaling",
    "Float8Scales",
    "QKVFormat",
    "QKVLayout",
    "ReorderStrategy",
    "SequenceDescriptor",
    "attention",
    "canonicalize_attn_mask_type",
    "context_attention",
    "dot_product_attention",
    "fp8_attention",
    "fused_attn",
    "inverse_reorder_causal_load_balancing",
    "is_fused_attn_kernel_available",
    "make_swa_mask",
    "reorder_causal_load_balancing",
]


def __getattr__(name: str) -> Any:
    if name != "DotProductAttention":
        raise AttributeError(f"module 'attngen.jax' has no attribute {name!r}")
    from .flax import DotProductAttention

    return DotProductAttention

"""`attngen.jax`: the same kernels in JAX, under jit, grad, vmap and shardings.

    from attngen.jax import attention
    out = attention(q, k, v, mask="causal", window=(1024, 0))

No host compiler is needed, and torch is not imported. docs/guide/jax.md is the guide.
"""

from .attention import attention
from .dot_product_attention import dot_product_attention

__all__ = ["attention", "dot_product_attention"]

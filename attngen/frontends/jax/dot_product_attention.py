"""`jax.nn.dot_product_attention` in its own words, on attngen's kernels."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ...call.taking import taking
from .attention import attention

OF_JAX = ("xla", "cudnn")


@dataclass(frozen=True, eq=False)
class DotProduct:
    """Arguments of the function."""

    query: ArrayLike
    key: ArrayLike
    value: ArrayLike
    bias: ArrayLike | None = None
    mask: ArrayLike | None = None
    _: KW_ONLY
    scale: float | None = None
    is_causal: bool = False
    query_seq_lengths: ArrayLike | None = None
    key_value_seq_lengths: ArrayLike | None = None
    local_window_size: int | tuple[int, int] | None = None
    implementation: str | None = None
    return_residual: bool = False


@taking(DotProduct)
def dot_product_attention(call: DotProduct) -> Array | tuple[Array, Array]:
    """Attention with the signature of `jax.nn.dot_product_attention`, and what it means there.

    Two things are as cuDNN has them: a row that sees no key is zero (its residual −∞), and a bias
    is rounded to the dtype of the query.

    Args:
        query: [b, t, n, h] or [t, n, h].
        key, value: [b, s, k, h] or [s, k, h], k a divisor of n; the value's h may differ.
        bias: floats, a broadcast of [b, n, t, s], or of [n, t, s] and so on; it has a gradient.
        mask: bool, a broadcast likewise; True takes part.
        scale: of the scores; None is 1/√h.
        is_causal: the first query sees the first key.
        query_seq_lengths, key_value_seq_lengths: int32 [b], positions in use.
        local_window_size: keys before and behind each position that it sees, or one number of both.
        implementation: None chooses between kernels and the definition, as `backend="auto"` of
            `attention`, whose other backends, `cuda` and `reference`, may be named, too; `xla` and
            `cudnn` hand the call to jax.nn.
        return_residual: asks for the LSE, [b, t, n] or [t, n] in the key's dtype, without gradient.

    Returns: the output, of the query's shape with the value's h; or a pair of it and the residual.

    Raises:
        SpecError: a ValueError, with every violation at once.
    """
    if call.implementation in OF_JAX:
        given = {each.name: getattr(call, each.name) for each in fields(call)}
        return jax.nn.dot_product_attention(**given)  # type: ignore[no-any-return]
    q, k, v = (_with_batch(x) for x in (call.query, call.key, call.value))
    window = call.local_window_size
    found = attention(
        *(q, k, v),
        mask="causal" if call.is_causal else "none",
        window=(window, window) if isinstance(window, int) else window,
        softmax_scale=call.scale,
        bias=None if call.bias is None else _with_batch(call.bias),
        attn_mask=None if call.mask is None else _with_batch(call.mask),
        seqused_q=_lengths(call.query_seq_lengths),
        seqused_kv=_lengths(call.key_value_seq_lengths),
        backend=call.implementation or "auto",
        return_lse=call.return_residual,
    )
    leading = jnp.shape(call.query)[:-1]
    if not isinstance(found, tuple):
        return found.reshape(*leading, -1)
    out, aux = found
    lse: Any = aux.lse
    residual = jax.lax.stop_gradient(lse.transpose(0, 2, 1).astype(k.dtype))
    return out.reshape(*leading, -1), residual.reshape(leading)


def _with_batch(x: ArrayLike) -> Array:
    """An array with four axes, those that are missing in front."""
    made = jnp.asarray(x)
    return made.reshape((1,) * (4 - made.ndim) + made.shape)


def _lengths(lengths: ArrayLike | None) -> Array | None:
    return None if lengths is None else jnp.asarray(lengths)

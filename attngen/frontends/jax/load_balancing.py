"""Orders of tokens that give each device of a causal context-parallel call as much to do."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...errors import SpecError
from .names import ReorderStrategy


def reorder_causal_load_balancing(
    tensor: Array,
    strategy: ReorderStrategy,
    cp_size: int,
    seq_dim: int,
    stripe_size: int | None = None,
) -> Array:
    """The array with the tokens along an axis in the order of a strategy, so that equal parts of it
    are the devices' own.

    cp_size: devices; stripe_size: tokens of a stripe, 1 by default, of Striped alone.

    Raises: SpecError, a ValueError, where the axis does not divide.
    """
    order = _order(tensor.shape[seq_dim], strategy, cp_size, stripe_size)
    return jnp.take(tensor, order, axis=seq_dim)


def inverse_reorder_causal_load_balancing(
    tensor: Array,
    strategy: ReorderStrategy,
    cp_size: int,
    seq_dim: int,
    stripe_size: int | None = None,
) -> Array:
    """The array of before `reorder_causal_load_balancing`. Arguments and errors are that one's."""
    order = _order(tensor.shape[seq_dim], strategy, cp_size, stripe_size)
    return jnp.take(tensor, np.argsort(order), axis=seq_dim)


def _order(
    length: int, strategy: ReorderStrategy, cp_size: int, stripe_size: int | None
) -> Any:
    """The places, int64 [length], of the tokens of the new order in the old one."""
    tokens = np.arange(length)
    if strategy is ReorderStrategy.Striped:
        stripe = 1 if stripe_size is None else stripe_size
        if stripe <= 0 or length % (cp_size * stripe):
            raise SpecError(
                f"{length} tokens are no multiple of {cp_size} devices times stripe_size={stripe}"
            )
        return tokens.reshape(-1, cp_size, stripe).swapaxes(0, 1).reshape(-1)
    if strategy is not ReorderStrategy.DualChunkSwap:
        raise SpecError(f"strategy={strategy!r} is no ReorderStrategy")
    if stripe_size is not None:
        raise SpecError(f"stripe_size={stripe_size} belongs to Striped; leave it out")
    if cp_size == 1:
        return tokens
    if cp_size % 2 or length % (2 * cp_size):
        raise SpecError(f"{length} tokens are no multiple of twice an even cp_size; got {cp_size}")
    chunks = tokens.reshape(2 * cp_size, -1)
    pairs = [(rank, 2 * cp_size - 1 - rank) for rank in range(cp_size)]
    return chunks[np.array(pairs).reshape(-1)].reshape(-1)

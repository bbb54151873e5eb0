"""Orders of tokens that give each device of a causal context-parallel call as much to do, by
TransformerEngine's names of call/context/order.py's."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...call.context.order import Order
from ...errors import SpecError
from .names import ReorderStrategy

Places = np.ndarray[tuple[int], np.dtype[np.int64]]


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
    held = _held(tensor.shape[seq_dim], _order(strategy, cp_size, stripe_size))
    return jnp.take(tensor, held, axis=seq_dim)


def inverse_reorder_causal_load_balancing(
    tensor: Array,
    strategy: ReorderStrategy,
    cp_size: int,
    seq_dim: int,
    stripe_size: int | None = None,
) -> Array:
    """The array of before `reorder_causal_load_balancing`. Arguments and errors are that one's."""
    order = _order(strategy, cp_size, stripe_size)
    return jnp.take(tensor, np.array(order.unshard([tensor.shape[seq_dim]])), axis=seq_dim)


def _held(length: int, order: Order) -> Places:
    """The places of the tokens that devices hold, one device behind the other."""
    return np.array([order.shard(rank, [length]) for rank in range(order.ranks)]).reshape(-1)


def _order(strategy: ReorderStrategy, devices: int, stripe_size: int | None) -> Order:
    """The order of a strategy. Raises: SpecError where it has none such."""
    if strategy is ReorderStrategy.Striped:
        return Order("striped", devices, 1 if stripe_size is None else stripe_size)
    if strategy is not ReorderStrategy.DualChunkSwap:
        raise SpecError(f"strategy={strategy!r} is no ReorderStrategy")
    if stripe_size is not None:
        raise SpecError(f"stripe_size={stripe_size} belongs to Striped; leave it out")
    return Order("dual_chunk", devices)

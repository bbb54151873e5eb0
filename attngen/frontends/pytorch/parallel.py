"""Attention whose sequences lie over the ranks of a process group: `attngen.parallel`.

    q, k, v = (attngen.parallel.shard(x, group, 1) for x in (q, k, v))
    out = attngen.parallel.attention(q, k, v, group=group, comm="p2p", mask="causal")

`ContextParallel` is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...call.context.order import AnyOrder
from .context.choice import Comm
from .context.sdpa import context_parallel
from .context.sharding import positions, shard, shard_batch, unshard
from .context.strategies import attention

if TYPE_CHECKING:
    from .context.style import ContextParallel

__all__ = [
    "AnyOrder",
    "Comm",
    "ContextParallel",
    "attention",
    "context_parallel",
    "positions",
    "shard",
    "shard_batch",
    "unshard",
]


def __getattr__(name: str) -> Any:
    if name != "ContextParallel":
        raise AttributeError(f"module 'attngen.parallel' has no attribute {name!r}")
    from .context.style import ContextParallel

    return ContextParallel

"""Tensors over a group: the part of each that a rank holds, and the whole of what all hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....call.context.order import AnyOrder, order_of
from ....errors import SpecError
from .calls import Ranks
from .messages import gather_into

WHOLE = ("cu_seqlens", "max_seqlen", "seqused")  # beginnings of names that say lengths of the whole


def shard(
    x: Tensor,
    group: Any = None,
    dim: int = 1,
    *,
    order: AnyOrder = "dual_chunk",
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Cut what this rank holds out of a tensor whose axis `dim` has positions, or packed tokens.

    cu_seqlens: int [b + 1], of packed tokens, padding included. Differentiable.
    Raises: SpecError where sequences are no multiples of what the order cuts.
    """
    ranks = Ranks.of(group)
    rooms = _rooms(x.shape[dim], cu_seqlens)
    places = order_of(order, ranks.size).shard(ranks.rank, rooms)
    return x.index_select(dim, torch.tensor(places, dtype=torch.int64, device=x.device))


def unshard(
    x: Tensor,
    group: Any = None,
    dim: int = 1,
    *,
    order: AnyOrder = "dual_chunk",
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """The whole tensor on every rank, of what each holds; without a gradient. Arguments and errors
    as of `shard`; cu_seqlens of the whole."""
    ranks = Ranks.of(group)
    own = x.detach().movedim(dim, 0).contiguous()
    found = own.new_empty(ranks.size, *own.shape)
    gather_into(found, own, ranks.group)
    rooms = _rooms(x.shape[dim] * ranks.size, cu_seqlens)
    places = order_of(order, ranks.size).unshard(rooms)
    joined = found.flatten(0, 1).index_select(
        0, torch.tensor(places, dtype=torch.int64, device=x.device)
    )
    return joined.movedim(0, dim)


def shard_batch(
    batch: Mapping[str, Any],
    group: Any = None,
    *,
    order: AnyOrder = "dual_chunk",
    dims: Mapping[str, int] | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> dict[str, Any]:
    """Cut what this rank holds out of a batch, as Megatron's `get_batch_on_this_cp_rank` does.

    batch: tensors by their names, with positions along axis 1, those of `attention_mask` along
    axis 2, and others where `dims` says so. Lengths (`cu_seqlens…`, `max_seqlen…`, `seqused…`),
    None and what is no tensor stay as they are. Other arguments as of `shard`.

    Raises: SpecError as `shard` does, naming the tensor.
    """
    axes = {"attention_mask": 2, **(dims or {})}
    found = {}
    for name, x in batch.items():
        if not isinstance(x, Tensor) or name.startswith(WHOLE):
            found[name] = x
            continue
        dim = axes.get(name, 1)
        if not -x.ndim <= dim < x.ndim:
            raise SpecError(f"{name} {list(x.shape)} has no axis {dim}; pass dims={{{name!r}: …}}")
        try:
            found[name] = shard(x, group, dim, order=order, cu_seqlens=cu_seqlens)
        except SpecError as error:
            raise SpecError([f"{name}: {reason}" for reason in error.reasons]) from error
    return found


def positions(
    length: int,
    group: Any = None,
    *,
    order: AnyOrder = "dual_chunk",
    cu_seqlens: Sequence[int] | Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The position in its sequence of each token that this rank holds, int64, as rotary embeddings
    take it. length: positions of a sequence, or all packed tokens; others as of `shard`."""
    ranks = Ranks.of(group)
    found = order_of(order, ranks.size).positions(ranks.rank, _rooms(length, cu_seqlens))
    return torch.tensor(found, dtype=torch.int64, device=device)


def _rooms(length: int, cu_seqlens: Sequence[int] | Tensor | None) -> list[int]:
    """Lengths of sequences along an axis."""
    if cu_seqlens is None:
        return [length]
    ends = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else [*cu_seqlens]
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]

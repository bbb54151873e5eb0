"""torch's `scaled_dot_product_attention` over a group, inside contexts that say which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .... import integrations
from ....call.context.order import AnyOrder
from ....errors import SpecError
from .sharding import shard
from .strategies import attention


def _of_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """The operands and arguments of `attention` of torch's `scaled_dot_product_attention`, whose
    attn_mask has the rank's queries and all keys; floats are a bias. Raises: SpecError."""
    heads, groups = query.shape[-3], key.shape[-3]
    if heads != groups and not enable_gqa:
        raise SpecError(f"{heads} query and {groups} key heads need enable_gqa=True")
    name = "attn_mask" if attn_mask is None or attn_mask.dtype == torch.bool else "bias"
    return (query, key, value), {
        "layout": "bhsd",
        "mask": "causal" if is_causal else "none",
        "softmax_scale": scale,
        "dropout_p": dropout_p,
        name: attn_mask,
    }


@contextmanager
def over_group(group: Any, **over: Any) -> Iterator[None]:
    """Have `torch.nn.functional.scaled_dot_product_attention` attend over a group inside. over:
    comm, order and reduce_dtype, as of `attention`."""

    def attend_over(*given: Any, **named: Any) -> Any:
        (q, k, v), arguments = _of_sdpa(*given, **named)
        return attention(q, k, v, group=group, **over, **arguments)

    with integrations.torch.replacing(attend_over):
        yield


@contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: Iterable[Tensor] = (),
    order: AnyOrder = "dual_chunk",
    **over: Any,
) -> Iterator[None]:
    """torch's experimental context manager of that name, by calls over a group.

    Inside, each buffer is what this rank holds of it along its axis of `buffer_seq_dims`, in place,
    and `torch.nn.functional.scaled_dot_product_attention` attends over the mesh, of one axis, or a
    process group. Where it ends, buffers are whole again, but for `no_restore_buffers`. over: comm
    and reduce_dtype, as of `attention`.

    Raises: SpecError where buffers and axes do not belong together, and as `shard`.
    """
    kept = {id(x) for x in no_restore_buffers}
    if len(buffers) != len(buffer_seq_dims) or kept - {id(x) for x in buffers}:
        raise SpecError(
            f"{len(buffers)} buffers need as many buffer_seq_dims, of which there are "
            f"{len(buffer_seq_dims)}, and no_restore_buffers are some of them"
        )
    pairs = zip(buffers, buffer_seq_dims, strict=True)
    own = [shard(x.detach(), mesh, dim, order=order) for x, dim in pairs]
    whole = [None if id(x) in kept else x.detach().clone() for x in buffers]
    _become(buffers, own)
    try:
        with over_group(mesh, order=order, **over):
            yield
    finally:
        _become(buffers, whole)


def _become(buffers: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    """Give buffers other values, sizes included, in place; None leaves one as it is."""
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            if value is not None:
                buffer.resize_(value.shape).copy_(value)

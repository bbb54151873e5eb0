"""Continuous batching of transformers: attention over packed queries and a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import attention

Arguments = dict[str, Any]
PAGES = "attngen_pages"  # among what a layer passes on, with keys that were left in the cache
_LEAVES = "_leaves_keys_in_place"


class Pages(NamedTuple):
    """Keys and values of a layer where they lie, [n, size, h_kv, d], and of each sequence its
    pages, [b, m], and tokens, [b], int32."""

    keys: Tensor
    values: Tensor
    table: Tensor
    used: Tensor


def has_packed_tokens(given: Arguments) -> bool:
    """Whether a layer gets the tokens of several sequences in one row, with their lengths."""
    return given.get("cu_seq_lens_q") is not None and given.get("cu_seq_lens_k") is not None


def is_batched(given: Arguments) -> bool:
    """Whether a layer's tokens are those of continuous batching, whose lengths say what its masks,
    tensors that the library may make beside them, say."""
    return given.get("read_index") is not None


def of_packed_tokens(module: Any, given: Arguments) -> Arguments:
    """Arguments of attention that say where packed sequences lie, and what their queries see: the
    last query's own is the last key.

    given: of a layer: cu_seq_lens_q and cu_seq_lens_k, [b + 1], is_causal, which batches leave to
        their masks, and sliding_window.
    """
    causal = True if is_batched(given) else given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    sliding = given.get("sliding_window") or getattr(module, "sliding_window", None)
    arguments: Arguments = {"cu_seqlens_q": given["cu_seq_lens_q"].to(torch.int32)}
    if causal:
        arguments |= {"mask": "causal", "bottom_right": True}
    if causal and sliding:
        arguments["window"] = (sliding - 1, 0)
    return arguments


def attend_packed(
    module: Any, operands: tuple[Tensor, Tensor, Tensor], arguments: Arguments, given: Arguments
) -> Any:
    """The output [1, t, h, d_v] of packed tokens whose keys are packed, too.

    operands: [1, h, t, d]. arguments: of attention, beside those that say lengths.
    """
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in operands)
    ends = {"cu_seqlens_kv": given["cu_seq_lens_k"].to(torch.int32)}
    packed = of_packed_tokens(module, given) | ends
    return attention(q, k, v, layout="thd", **arguments, **packed)


def attend_cache(
    module: Any, operands: tuple[Tensor, Tensor, Tensor], arguments: Arguments, given: Arguments
) -> Any:
    """The output of packed tokens beside transformers' paged cache, `given["cache"]`, which takes
    their keys and values in.

    Layers of full attention read the cache where it lies, by the blocks of each sequence. Windows,
    whose blocks are overwritten in turn, have their keys gathered by the cache.
    """
    cache, given = given["cache"], dict(given)
    sliding = given["sliding_window"] = _window_of(module, cache, given)
    for name in ("cu_seq_lens_k", "max_seqlen_k"):
        if isinstance(given.get(name), dict):
            kind = "sliding_attention" if sliding else "full_attention"
            given[name] = given[name][kind]
    q, k, v = operands
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    read, write = (given[f"{name}_index"] for name in ("read", "write"))
    if sliding or not read[group].numel():
        whole = cache.update(
            key_states=k,
            value_states=v,
            layer_idx=module.layer_idx,
            read_index=read,
            write_index=write,
        )
        k, v = (x.transpose(0, 1)[None] for x in whole)
        return attend_packed(module, (q, k, v), arguments, given)
    stored = [x.view(-1, cache.block_size, *x.shape[1:]) for x in _layer_of(cache, layer)]
    pages = written(stored, (k, v), (read[group], write[group]), given, given["max_seqlen_k"])
    return attend_pages(module, q, pages, arguments, given)


def _layer_of(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer of transformers' paged cache, [rows, h_kv, d] each."""
    return cache.key_cache[layer], cache.value_cache[layer]


def written(
    stored: Any,
    new: tuple[Tensor, Tensor],
    index: tuple[Tensor, Tensor],
    given: Arguments,
    longest: int,
) -> Pages:
    """Write a layer's new keys and values into its pages, and say where all of them lie.

    stored: both, [n, size, h_kv, d]; new: [1, h_kv, t, d] each; index: rows to read and to write;
    longest: tokens of a sequence at most.
    """
    read, write = index
    for x, pages in zip(new, stored, strict=True):
        pages.flatten(0, 1).index_copy_(0, write, x.transpose(1, 2).flatten(0, 1))
    keys, values = stored
    ends = given["cu_seq_lens_k"].to(torch.int32)
    return Pages(keys, values, block_table(read, ends, keys.shape[1], longest), ends.diff())


def attend_pages(
    module: Any, q: Tensor, pages: Pages, arguments: Arguments, given: Arguments
) -> Any:
    """The output of packed queries [1, h, t, d] over pages. arguments: of attention, beside those
    that say lengths."""
    keys = {"page_table": pages.table, "seqused_kv": pages.used}
    packed = of_packed_tokens(module, given) | keys
    queries = q.transpose(1, 2).flatten(0, 1)
    layout = "paged_kv_thd_bshd_bshd"
    return attention(queries, pages.keys, pages.values, layout=layout, **arguments, **packed)


def leave_in_place(is_ours: Callable[[str], bool]) -> None:
    """Have transformers' paged cache leave keys and values where they lie, in layers without a
    window of models whose attention, by its name, is ours: from 5.23 on it gathers them before a
    layer calls its attention. For other attentions it does so still."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    own = PagedAttentionCache.update
    if not hasattr(own, _LEAVES):
        update = torch.compiler.disable(_updating(own, is_ours))
        setattr(update, _LEAVES, True)
        PagedAttentionCache.update = update


def _updating(own: Callable[..., Any], is_ours: Callable[[str], bool]) -> Callable[..., Any]:
    """The cache's update. own: the library's."""

    def update(
        self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: Arguments
    ) -> Any:
        allocator = self.layer_to_allocator[layer_idx]
        read, write = (kwargs[f"{each}_index"][allocator.index] for each in ("read", "write"))
        reads = allocator.supports_block_table and read.numel() > 0
        if not (reads and is_ours(self.config._attn_implementation)):
            return own(self, key_states, value_states, layer_idx, kwargs)
        for each in ("cu_seq_lens_k", "max_length_k"):
            kwargs[each] = kwargs[each][allocator.layer_type]
        stored, new = allocator.get_cache_for_block_table(layer_idx), (key_states, value_states)
        kwargs[PAGES] = written(stored, new, (read, write), kwargs, kwargs["max_length_k"])
        return new

    return update


def _window_of(module: Any, cache: Any, given: Arguments) -> int | None:
    """Keys that a query of a layer sees, its own among them; None for all. The cache knows it, by
    which it lays blocks out, also of models whose layers take it of their configuration."""
    known = getattr(cache, "sliding_windows", {}).get(module.layer_idx)
    if known is not None:
        return int(known) if known > 1 else None
    return given.get("sliding_window") or getattr(module, "sliding_window", None)


def block_table(read: Tensor, ends: Tensor, size: int, longest: int) -> Tensor:
    """The blocks of each sequence, int32 [b, ⌈longest / size⌉], on the device, never waited for.

    read: where each key lies, in rows of the cache, one sequence behind the other; ends: [b + 1];
    size: rows of a block. What lies behind a sequence's end is no block of its.
    """
    steps = torch.arange(0, longest, size, device=read.device)
    places = (ends[:-1, None] + steps).clamp(max=read.numel() - 1)
    return (read[places] // size).to(torch.int32)

"""Caches of keys and values, in rows or in pages, and the sequences that are in them.

A captured step reads buffers that stay where they are: `pre_step` writes them, on the host and
outside of graphs, and `step` appends on the device.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from ... import append_kv
from ...errors import SpecError

log = logging.getLogger("attngen")
Steps = OrderedDict[int, int]  # tokens of sequences, by their identities, in the batch's order


class KVCacheManager:
    """A cache of keys and values for each layer, and the sequences in it."""

    page_table: Tensor
    num_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: torch.dtype

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.sequences: Steps = OrderedDict()

    def reset(self) -> None:
        """Forget all sequences."""
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int) -> None:
        """Make the cache of a layer."""
        raise NotImplementedError

    def pre_step(self, step_dict: Steps) -> Steps:
        """Take the new tokens of each sequence into account; return the lengths with them."""
        raise NotImplementedError

    def step(self, layer_number: int, *given: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values to a layer's cache; return what attention reads. given: new
        keys, new values, cumulative lengths of the new and of all tokens, the format of the new."""
        raise NotImplementedError

    def _made(self, pages: int, rows: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, zeros."""
        k, v = (
            torch.zeros(pages, rows, self.num_heads, dim, dtype=self.dtype, device=device())
            for dim in (self.head_dim_k, self.head_dim_v)
        )
        return k, v

    def _append(self, layer_number: int, *given: Any) -> tuple[Tensor, Tensor]:
        """Write new tokens to their places, which `page_table` has; return the layer's cache."""
        new_k, new_v, cu_new, cu_all, axes = given
        caches = self.cache[layer_number]
        append_kv(
            *caches,
            new_k,
            new_v,
            layout=axes,
            cu_seqlens=cu_new,
            cu_seqlens_all=cu_all,
            page_table=self.page_table,
        )
        return caches

    def _after(self, step_dict: Steps, most: int, longest: int) -> tuple[list[int], Steps]:
        """Identities of the sequences that have ended, and the lengths of the others with their new
        tokens; nothing changes yet. Raises: SpecError where there is no room for so many or so
        long ones, or the batch's order is another than that of the cache."""
        ended = [each for each in self.sequences if each not in step_dict]
        kept = [each for each in self.sequences if each in step_dict]
        added = [each for each in step_dict if each not in self.sequences]
        if [*step_dict] != kept + added:
            raise SpecError(
                f"sequences keep their order, and new ones come last: {kept + added}; "
                f"got {[*step_dict]}"
            )
        lengths = {each: self.sequences.get(each, 0) + step_dict[each] for each in step_dict}
        reached = max(lengths.values(), default=0)
        if len(lengths) > most or reached > longest:
            raise SpecError(
                f"{len(lengths)} sequences of up to {reached} tokens; the cache has room for "
                f"{most} of {longest}"
            )
        return ended, OrderedDict(lengths)


class NonPagedKVCacheManager(KVCacheManager):
    """Caches of room for each sequence's longest length, [max_batch_size, max_seqlen, h, d].

    A sequence keeps the row that it begins in, so that nothing moves where others end.
    `page_table`, int32 [max_batch_size, 1], has the rows of the batch's sequences: the caches are
    pages of one sequence each. in_order: whether these are the first rows, one after another.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_seqlen: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
    ) -> None:
        super().__init__()
        self.max_batch_size = max_batch_size
        self.max_seqlen = max_seqlen
        self.num_heads = num_heads
        self.head_dim_k = head_dim_k
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.dtype = dtype
        shape = (max_batch_size, 1)
        self.page_table = torch.zeros(shape, dtype=torch.int32, device=device())
        self.reset()

    def reset(self) -> None:
        """Forget all sequences, and free their rows."""
        super().reset()
        self._row_of: dict[int, int] = {}
        self._tell()

    def _tell(self) -> None:
        """Write the rows of the batch's sequences, and behind them the others."""
        used = [self._row_of[each] for each in self.sequences]
        rest = [row for row in range(self.max_batch_size) if row not in used]
        self.in_order = used == [*range(len(used))]
        self.page_table.copy_(torch.tensor(used + rest, dtype=torch.int32)[:, None])

    def allocate_memory(self, layer_number: int) -> None:
        """Make the cache of a layer, of zeros."""
        self.cache[layer_number] = self._made(self.max_batch_size, self.max_seqlen)

    def pre_step(self, step_dict: Steps) -> Steps:
        """Take new tokens into account, and give new sequences rows.

        Raises: SpecError where a sequence has no room, or the order is another.
        """
        ended, self.sequences = self._after(step_dict, self.max_batch_size, self.max_seqlen)
        for each in ended:
            del self._row_of[each]
        used = {*self._row_of.values()}
        free = (row for row in range(self.max_batch_size) if row not in used)
        for each in self.sequences:
            if each not in self._row_of:
                self._row_of[each] = next(free)
        self._tell()
        return self.sequences

    def append(self, layer_number: int, *given: Any) -> tuple[Tensor, Tensor]:
        """Append to a layer's cache, and return it, whose rows `page_table` has."""
        return self._append(layer_number, *given)

    def step(self, layer_number: int, *given: Any) -> tuple[Tensor, Tensor]:
        """Append to a layer's cache; return the rows of the batch, [b, max_seqlen, h, d], copied
        where they are not in order, or may not be when a graph is replayed."""
        new_k, *_, axes = given
        batch = batch_of(new_k, axes, self.max_batch_size)
        caches = self.append(layer_number, *given)
        if self.in_order and not is_capturing():
            k, v = (each[:batch] for each in caches)
        else:
            rows = self.page_table[:batch].flatten()
            k, v = (each.index_select(0, rows) for each in caches)
        return k, v


class PagedKVCacheManager(KVCacheManager):
    """Caches of pages, [total_num_pages, page_size, h, d], and a table of each sequence's pages,
    int32 [max_batch_size, max_seqlen / page_size]."""

    def __init__(
        self,
        total_num_pages: int,
        page_size: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        max_batch_size: int,
        max_seqlen: int,
        head_dim_v: int | None = None,
    ) -> None:
        super().__init__()
        self.total_num_pages = total_num_pages
        self.page_size = page_size
        self.num_heads = num_heads
        self.head_dim_k = head_dim_k
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.dtype = dtype
        self.max_batch_size = max_batch_size
        self.max_seqlen = max_seqlen
        self.max_pages_per_seq = max_seqlen // page_size
        shape = (max_batch_size, self.max_pages_per_seq)
        self.page_table = torch.zeros(shape, dtype=torch.int32, device=device())
        self.reset()

    def reset(self) -> None:
        """Forget all sequences, and free their pages."""
        super().reset()
        self.free_pages = [*range(self.total_num_pages)]
        self.allocated_pages: dict[int, list[int]] = {}
        self.page_table.zero_()

    def allocate_memory(self, layer_number: int) -> None:
        """Make the cache of a layer, of zeros."""
        self.cache[layer_number] = self._made(self.total_num_pages, self.page_size)

    def get_sequence_lengths(self) -> list[int]:
        """Tokens of each sequence, in the batch's order."""
        return [*self.sequences.values()]

    def get_page_list(self, seq: int) -> list[int]:
        """Pages of a sequence, in the order of its tokens."""
        return [*self.allocated_pages.get(seq, ())]

    def print_cache(self) -> None:
        """Log which pages are whose, for debugging."""
        used = self.total_num_pages - len(self.free_pages)
        log.debug("%d of %d pages are used", used, self.total_num_pages)
        for row, (each, length) in enumerate(self.sequences.items()):
            log.debug("%d: sequence %d, %d tokens, %s", row, each, length, self.get_page_list(each))

    def pre_step(self, step_dict: Steps) -> Steps:
        """Take new tokens into account: free the pages of sequences that have ended, and write the
        table with pages for what is new. Raises: RuntimeError where there are no pages left, and
        SpecError where a sequence has no room, or the order is another."""
        ended, lengths = self._after(step_dict, self.max_batch_size, self.max_seqlen)
        free = [*self.free_pages, *(page for each in ended for page in self.allocated_pages[each])]
        pages = {each: self.get_page_list(each) for each in lengths}
        table = torch.zeros(self.page_table.shape, dtype=torch.int32)
        for row, (each, length) in enumerate(lengths.items()):
            missing = -(-length // self.page_size) - len(pages[each])
            if missing > len(free):
                raise RuntimeError(f"the KV cache has no page left for sequence {each}")
            pages[each] += free[:missing]
            del free[:missing]
            table[row, : len(pages[each])] = torch.tensor(pages[each], dtype=torch.int32)
        self.sequences, self.allocated_pages, self.free_pages = lengths, pages, free
        self.page_table.copy_(table)
        return self.sequences

    def step(self, layer_number: int, *given: Any) -> tuple[Tensor, Tensor]:
        """Append to a layer's cache; return its pages."""
        return self._append(layer_number, *given)


def batch_of(new: Tensor, axes: str, most: int) -> int:
    """Sequences of a tensor of new tokens; the most there may be of packed ones."""
    return most if axes == "thd" else new.shape[axes.index("b")]


def device() -> torch.device:
    """The current CUDA device; without one the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def is_capturing() -> bool:
    """Whether launches are captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

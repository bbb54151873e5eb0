"""The door for transformers' continuous batching: packed queries beside a paged cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attngen.integrations import transformers as door
from torch import Tensor

import attngen
from attngen.frontends.integrations.paged import block_table

H, H_KV, D, SIZE, BLOCKS = 4, 2, 8, 4, 9
PAST, NEW = (5, 0, 7), (1, 3, 2)  # tokens of three requests in the cache, and of their queries


class Cache:
    """A layer of the library's cache: blocks in no order, which requests' tokens fill."""

    block_size = SIZE
    layer_index_to_group_indices = ((0, 0),)

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(BLOCKS, generator=generator).tolist()
        self.key_cache, self.value_cache = (
            [torch.randn(BLOCKS * SIZE, H_KV, D, generator=generator)] for _ in range(2)
        )
        self.rows: list[list[int]] = []
        for past, new in zip(PAST, NEW, strict=True):
            blocks = [order.pop() for _ in range(-(-(past + new) // SIZE))]
            self.rows.append([blocks[n // SIZE] * SIZE + n % SIZE for n in range(past + new)])

    def update(self, key_states: Tensor, value_states: Tensor, **others: Any) -> Any:
        """Keys and values of whole requests, as the library gathers them."""
        (read,), (write,) = others["read_index"], others["write_index"]
        found = []
        for new, (stored,) in ((key_states, self.key_cache), (value_states, self.value_cache)):
            stored.index_copy_(0, write, new.transpose(1, 2).squeeze(0))
            found.append(stored[read] if read.numel() else new.transpose(1, 2).squeeze(0))
        return found


def ends_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("sliding", [None, 3], ids=["full", "window"])
@pytest.mark.parametrize("by_kind", [False, True], ids=["one", "by kind"])
@pytest.mark.parametrize("said_by", ["layer", "cache"])  # layers of Mistral's have no windows
def test_requests_see_their_own_tokens_in_the_cache(
    sliding: int | None, by_kind: bool, said_by: str
) -> None:
    cache, generator = Cache(), torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, sum(NEW), D, generator=generator) for h in (H, H_KV, H_KV))
    written = [row for rows, past in zip(cache.rows, PAST, strict=True) for row in rows[past:]]
    whole = [len(rows) for rows in cache.rows]
    kinds = ("full_attention", "sliding_attention")
    ends, longest = ends_of(whole), max(whole)
    module = SimpleNamespace(layer_idx=0)
    if said_by == "layer":
        module.sliding_window = sliding
    else:
        cache.sliding_windows = {0: sliding or 1}
    gathered = []
    update, cache.update = cache.update, lambda **x: gathered.append(x) or update(**x)
    found, _ = door.attend(
        module,
        *(q, k, v, None),
        cache=cache,
        cu_seq_lens_q=ends_of([*NEW]),
        cu_seq_lens_k=dict.fromkeys(kinds, ends) if by_kind else ends,
        max_seqlen_k=dict.fromkeys(kinds, longest) if by_kind else longest,
        read_index=[torch.tensor([row for rows in cache.rows for row in rows])],
        write_index=[torch.tensor(written)],
        backend="reference",
    )
    assert found.shape == (1, sum(NEW), H, D)
    assert len(gathered) == (sliding is not None)  # whose blocks are overwritten in turn
    (keys,), (values,) = cache.key_cache, cache.value_cache
    begin = 0
    for rows, new in zip(cache.rows, NEW, strict=True):
        own = q[:, :, begin : begin + new].transpose(1, 2)
        window = (-1, -1) if sliding is None else (sliding - 1, 0)
        wanted = attngen.attention(
            *(own, keys[rows][None], values[rows][None]),
            mask="causal_bottom_right",
            window=window,
            backend="reference",
        )
        torch.testing.assert_close(found[:, begin : begin + new], wanted)
        begin += new
    torch.testing.assert_close(keys[written], k.squeeze(0).transpose(0, 1))


def test_lengths_of_batches_count_where_the_library_has_made_masks_beside_them() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, 8, D, generator=generator) for h in (H, H_KV, H_KV))
    ends = ends_of([3, 5])
    given: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "backend": "reference"}
    wanted, _ = door.attend(SimpleNamespace(), q, k, v, None, **given)
    mask = torch.full((1, 1, 8, 8), torch.nan)  # nobody reads it
    batch = {"read_index": [torch.arange(8)], "is_causal": False}
    found, _ = door.attend(SimpleNamespace(), q, k, v, mask, **given, **batch)
    torch.testing.assert_close(found, wanted)


def test_prompts_without_a_past_are_packed_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, 8, D, generator=generator) for h in (H, H_KV, H_KV))
    ends = ends_of([3, 5])
    given: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "backend": "reference"}
    plain, _ = door.attend(SimpleNamespace(), q, k, v, None, **given)
    cache, nothing = Cache(), torch.tensor([], dtype=torch.int64)
    index = {"read_index": [nothing], "write_index": [torch.arange(8)], "max_seqlen_k": 5}
    cached, _ = door.attend(
        SimpleNamespace(layer_idx=0), q, k, v, None, **given, **index, cache=cache
    )
    torch.testing.assert_close(plain, cached)
    first = attngen.attention(*(x[:, :, :3] for x in (q, k, v)), layout="bhsd", mask="causal")
    torch.testing.assert_close(plain[:, :3], first.transpose(1, 2))


def test_blocks_of_each_request_are_found_by_where_its_keys_lie() -> None:
    cache = Cache()
    read = torch.tensor([row for rows in cache.rows for row in rows])
    lengths = [len(rows) for rows in cache.rows]
    found = block_table(read, ends_of(lengths), SIZE, max(lengths))
    assert found.shape == (3, 3) and found.dtype == torch.int32
    for blocks, rows in zip(found.tolist(), cache.rows, strict=True):
        own = [row // SIZE for row in rows[::SIZE]]
        assert blocks[: len(own)] == own

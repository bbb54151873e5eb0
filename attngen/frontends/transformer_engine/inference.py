"""`InferenceParams`: what the calls of a model share in inference."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import SpecError
from .arguments import method_taking
from .kv_cache import NonPagedKVCacheManager, PagedKVCacheManager, Steps, device, is_capturing

CACHE_FORMAT = "bshd"


@dataclass(slots=True)
class Settings:
    """Arguments of `InferenceParams`, in TransformerEngine's order."""

    max_batch_size: int
    max_sequence_length: int
    num_heads_kv: int
    head_dim_k: int
    dtype: torch.dtype
    head_dim_v: int | None = None
    is_paged: bool = False
    total_num_pages: int | None = None
    page_size: int | None = None
    max_ctx_len: int | None = None
    qkv_format: str = "bshd"
    custom_cache_manager: Any = None


class Step(NamedTuple):
    """Keys and values of all sequences after a step, and the lengths behind them."""

    k_cache: Tensor
    v_cache: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_kv: int
    qkv_format: str


class InferenceParams:
    """The cache of a model in inference, and the sequences that a step is of.

    `pre_step` says of each sequence how many tokens are new; the calls of the step then pass this
    as `inference_params`. dtype: of keys and values. Pages need page_size, and as many as all
    sequences may have together.

    Raises: SpecError for sizes that do not fit.
    """

    @method_taking(Settings)
    def __init__(self, settings: Settings) -> None:
        self.max_batch_size = settings.max_batch_size
        self.max_sequence_length = settings.max_sequence_length
        self.num_heads_kv, self.head_dim_k = settings.num_heads_kv, settings.head_dim_k
        own_v = settings.head_dim_v
        self.head_dim_v = settings.head_dim_k if own_v is None else own_v
        self.dtype, self.is_paged = settings.dtype, settings.is_paged
        self.page_size, self.total_num_pages = settings.page_size, settings.total_num_pages
        self.max_ctx_len = settings.max_ctx_len
        shared: dict[str, Any] = dict(
            max_batch_size=self.max_batch_size,
            max_seqlen=self.max_sequence_length,
            num_heads=self.num_heads_kv,
            head_dim_k=self.head_dim_k,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
        )
        if self.is_paged:
            self._check_pages()
            shared |= dict(page_size=self.page_size, total_num_pages=self.total_num_pages)
        if settings.qkv_format == "thd" and settings.max_ctx_len is None:
            raise SpecError("qkv_format='thd' needs max_ctx_len")
        own = PagedKVCacheManager if self.is_paged else NonPagedKVCacheManager
        self.cache_manager: Any = (settings.custom_cache_manager or own)(**shared)
        self.cache_qkv_format = CACHE_FORMAT
        self.input_qkv_format = settings.qkv_format
        self.sequences: Steps = OrderedDict()
        self.sequences_pre_step: Steps = OrderedDict()
        self.batch_size = 0
        ends = self.max_batch_size + 1
        self.cu_seqlens_q = torch.zeros(ends, dtype=torch.int32, device=device())
        self.cu_seqlens_kv = torch.zeros(ends, dtype=torch.int32, device=device())
        self.pre_step_seqlens = torch.zeros(self.max_batch_size, dtype=torch.int32, device=device())

    def _check_pages(self) -> None:
        if self.page_size is None or self.total_num_pages is None:
            raise SpecError("a paged cache needs page_size and total_num_pages")
        if self.max_sequence_length % self.page_size:
            raise SpecError(
                f"max_sequence_length {self.max_sequence_length} is no multiple of page_size "
                f"{self.page_size}"
            )

    @property
    def output_qkv_format(self) -> str:
        """Formats of Q, and of K and V, in attention: "thd_2bshd", or one where both are equal."""
        if self.input_qkv_format == self.cache_qkv_format:
            return self.cache_qkv_format
        return f"{self.input_qkv_format}_2{self.cache_qkv_format}"

    def reset(self) -> None:
        """Forget all sequences."""
        self.sequences = OrderedDict()
        self.cache_manager.reset()

    def allocate_memory(self, layer_number: int) -> None:
        """Make the cache of a layer, by the number that its module has."""
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: Steps) -> None:
        """Begin a step: new tokens of each sequence, by its identity, in the order of the batch.
        Sequences that are left out have ended; those that go on keep their order, before new ones.

        Raises: as the cache's manager does.
        """
        self.batch_size = len(step_dict)
        self.sequences = self.cache_manager.pre_step(step_dict)
        before = {each: length - step_dict[each] for each, length in self.sequences.items()}
        self.sequences_pre_step = OrderedDict(before)
        _write(self.pre_step_seqlens, [*before.values()])
        for ends, lengths in ((self.cu_seqlens_q, step_dict), (self.cu_seqlens_kv, self.sequences)):
            _write(ends, _cumulative([*lengths.values()], self.max_batch_size))

    def get_seqlens_pre_step(self) -> Tensor:
        """Lengths before the step's tokens, int32 [max_batch_size], in a buffer that stays."""
        return self.pre_step_seqlens

    @property
    def reads_pages(self) -> bool:
        """Whether a call reads its keys through a table of pages, which of plain caches are rows:
        where these are not in order, or may not be when a graph is replayed."""
        if self.is_paged:
            return True
        in_order = getattr(self.cache_manager, "in_order", None)
        if in_order is None or self.head_dim_k % 8 or self.head_dim_v % 8:
            return False  # of a manager without rows, and of heads that kernels do not page
        return not in_order or is_capturing()

    def append(self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str) -> Step:
        """Append as `step` does, and return keys and values as calls of the module read them."""
        if self.is_paged or not self.reads_pages:
            return self.step(layer_number, new_k, new_v, qkv_format)
        self.input_qkv_format = qkv_format
        lengths = self.cu_seqlens_q, self.cu_seqlens_kv
        with torch.no_grad():
            k_cache, v_cache = self.cache_manager.append(
                layer_number, new_k, new_v, *lengths, qkv_format
            )
        return Step(k_cache, v_cache, *lengths, self.max_sequence_length, self.output_qkv_format)

    def step(self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str) -> Step:
        """Append a layer's new keys and values, in one of bshd, sbhd and thd, of which dense ones
        begin at position 0 of each row; return all, and the lengths."""
        self.input_qkv_format = qkv_format
        lengths = self.cu_seqlens_q, self.cu_seqlens_kv
        with torch.no_grad():
            k_cache, v_cache = self.cache_manager.step(
                layer_number, new_k, new_v, *lengths, qkv_format
            )
        return Step(k_cache, v_cache, *lengths, self.max_sequence_length, self.output_qkv_format)

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Copies of a layer's pages as rows of the batch, [b, max_sequence_length, h, d]."""
        table = self.cache_manager.page_table[: self.batch_size].long()
        k, v = (each[table].flatten(1, 2) for each in self.cache_manager.cache[layer_number])
        return k, v


def _cumulative(lengths: list[int], most: int) -> list[int]:
    """Cumulative lengths of so many sequences, those that are not there of length 0."""
    return [*accumulate([*lengths, *[0] * (most - len(lengths))], initial=0)]


def _write(buffer: Tensor, values: list[int]) -> None:
    """Have the first elements of a buffer be these numbers; waits for the copy."""
    buffer[: len(values)].copy_(torch.tensor(values, dtype=buffer.dtype))

"""Lengths in use of a padded batch, cut for each part: parts of all its sequences are one call.

A bias or a mask has a number for each pair, so that the sequences of a batch cannot be packed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....call.context.steps import Part
from .kept import on_device
from .plans import INDICES_KEPT


@on_device(INDICES_KEPT)
def lengths_within(lengths: tuple[int, ...], begin: int, size: int, device: torch.device) -> Tensor:
    """How many of so many positions from one on each sequence has in use, int32 [b]."""
    within = [min(max(length - begin, 0), size) for length in lengths]
    with torch.inference_mode(False):
        return torch.tensor(within, dtype=torch.int32, device=device)


class Padding(NamedTuple):
    """Lengths in use of each sequence, of queries and of keys, and where calls are computed."""

    of_q: tuple[int, ...]
    of_kv: tuple[int, ...]
    device: torch.device

    @property
    def of_all(self) -> dict[str, Tensor]:
        """The arguments of a call over whole sequences."""
        return self._within(0, max(self.of_q), 0, max(self.of_kv))

    def of_part(self, part: Part) -> dict[str, Tensor]:
        """The arguments of a part, whose positions follow each other."""
        assert part.origin is not None  # the plan was asked for them
        query, key = part.origin
        return self._within(query, len(part.queries), key, len(part.keys))

    def _within(self, query: int, queries: int, key: int, keys: int) -> dict[str, Tensor]:
        return {
            "seqused_q": lengths_within(self.of_q, query, queries, self.device),
            "seqused_kv": lengths_within(self.of_kv, key, keys, self.device),
        }

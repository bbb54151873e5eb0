"""Short: which calls the kernels for short sequences serve."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..load import multiprocessors
from ..run_time import Extent
from ..spec import AttentionSpec, has_short
from .signature import Arguments

QUERIES = 512  # of a head of a sequence, at most
# Rows that an SM takes in a time in which it takes one in larger tiles: of two tiles of 64 at once,
# without masks and with, and of one alone. H200: what the measured times of such calls follow.
SPEEDS, SPEED_ALONE = (0.84, 0.92), 0.6
GAIN = 0.97  # of the time, at most, so that nothing is lost where the estimate is off


def is_short(
    spec: AttentionSpec,
    extents: Mapping[str, Extent],
    arguments: Arguments,
    device: torch.device,
) -> bool:
    """Whether a forward of these operands has a kernel with tiles of 64 query rows, and is faster
    with it. Never where the call says how keys are split, which promises the same bits in batches
    of any size."""
    if not has_short(spec) or arguments.num_splits or extents["q"].seq > QUERIES:
        return False
    masked = spec.window or spec.mask != "none"
    return prefers_short(extents, masked, multiprocessors(device.index))


def prefers_short(extents: Mapping[str, Extent], masked: bool, multiprocessors: int) -> bool:
    """Whether tiles of 64 rows, of which an SM works on two at once, take less time than larger
    ones, which are half empty or too few for the chip: by the rows that the busiest SM takes, all
    of the same cost."""
    q, v = extents["q"], extents["v"]
    heads = q.batch * q.heads
    rows = 192 if max(q.dim, v.dim) <= 96 else 128
    usual = rows * -(-heads * -(-q.seq // rows) // multiprocessors)
    pairs, rest = divmod(heads * -(-q.seq // 64), 2 * multiprocessors)
    alone = 0 < rest <= multiprocessors
    pairs += rest > multiprocessors
    return 128 * pairs / SPEEDS[masked] + 64 * alone / SPEED_ALONE < GAIN * usual

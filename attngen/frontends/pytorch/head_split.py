"""Heads: which backwards give each query head of a group key tiles of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...fragments import features
from ...kernels.plan import plans
from ...kernels.wgmma.backward.plan import BackwardPlan
from ...runtime.load import LoadedKernel, multiprocessors
from ...runtime.run_time import Extent, Scalars, blocks_of, heads_per_group
from ...spec.attention_spec import AttentionSpec
from ...spec.resolve import resolve

# In blocks of queries that a tile visits: what one adds to sums in memory, and the kernel that
# rounds these. Calls by them: `heads apart` in docs/results/experiments.json.
ENDS = 3
ROUNDING = 5
GAIN = 1.05  # at least, for which sums in memory are worth their while
GAIN_NARROW = 1.2  # where kernels in an order, which are that much faster, cannot part heads


@dataclass(frozen=True)
class Apart:
    """Tiles of query heads that share keys, each of which adds to the sums of its key head's dK and
    dV: the numbers of the kernel that makes them and of the one that rounds the sums, and the
    floats of these. None of all that where a tile visits the queries of all heads of a group."""

    main: Mapping[str, int]
    rounding: Mapping[str, int]
    floats: int

    @property
    def numbers(self) -> dict[str, int | float]:
        """What the layout of workspaces knows of it."""
        return {"dkv_floats": self.floats} if self.floats else {}


TOGETHER = Apart({}, {}, 0)


def have_few_tiles(
    spec: AttentionSpec,
    device: torch.device,
    extents: Mapping[str, Extent],
    scalars: Scalars,
    narrow: bool,
) -> bool:
    """Whether key heads of a call have so few tiles that those of query heads are faster, where the
    kernels of its spec can part them; under a `narrow` window they stand in for those in an order.
    Packed sequences count as if they were equally long. Raises: LaunchError."""
    q, k = extents["q"], extents["k"]
    group = q.heads // k.heads
    if group == 1:
        return False
    problem, *in_order = resolve(spec, features.scan())
    made = (x for x in plans(problem, spec.arch[0]) if isinstance(x, BackwardPlan))
    main = next((plan for plan in made if plan.splits_heads), None)
    if main is None:
        return False
    sequences = scalars.sequences or k.batch
    parts = sequences // k.batch  # packed ones are one batch
    rows, row_block, causal = main.tile.n, main.row_block, "causal" in problem.masks
    tiles, blocks = (-(-x.seq // (parts * n)) for x, n in ((k, rows), (q, row_block)))
    seen = min(blocks, -(-(scalars.window_left + scalars.window_right + rows) // row_block))
    if 2 * seen < blocks:  # a window's tiles are alike
        blocks, causal = seen, False
    gain = GAIN_NARROW if narrow and in_order else GAIN
    heads, chip = k.heads * sequences, multiprocessors(device.index)
    return is_faster(tiles, blocks, heads, group, causal, chip, gain)


def apart_of(
    kernels: Sequence[LoadedKernel], extents: Mapping[str, Extent], sequences: int
) -> Apart:
    """How each query head has tiles of its own, by the `kernels` of a backward that can part
    them."""
    main = next(each for each in kernels if each.kernel.dkv_floats)
    q, k = extents["q"], extents["k"]
    tiles = blocks_of(k, main.kernel.tile_rows, main.kernel.kv_seq, sequences)
    alone = {**extents, "k": k._replace(heads=q.heads)}
    numbers = {
        "key_group": q.heads // k.heads,
        "group_size": 1,
        "heads_kv": q.heads,
        "total_heads": q.heads * q.batch,
        "tiles": tiles * q.heads * q.batch,
        "heads_per_group": heads_per_group(main.kernel, alone),
    }
    floats = main.kernel.dkv_floats * tiles * k.heads * k.batch
    return Apart(numbers, {"key_parts": tiles * main.kernel.tile_rows // 64}, floats)


def is_faster(
    tiles: int,
    blocks: int,
    key_heads: int,
    group: int,
    causal: bool,
    multiprocessors: int,
    gain: float = GAIN,
) -> bool:
    """Whether a tile for each of a group's query heads is faster than one for all of them: key
    heads of so many tiles, which visit so many blocks of queries of each head, if `causal` half of
    them in the mean."""

    def taken(heads: int, visits: int) -> float:
        """The time of all tiles, in blocks: that of the longest at least."""
        jobs = tiles * heads
        rounds = -(-jobs // multiprocessors)
        if not causal:
            return rounds * visits
        return max(visits, jobs * visits * (1 + 1 / blocks) / 2 / multiprocessors)

    ends = ENDS * tiles * key_heads * group / multiprocessors
    apart = taken(key_heads * group, blocks) + ends + ROUNDING
    return gain * apart < taken(key_heads, blocks * group)

"""Parameters: every number that a kernel may be told at its launch, with its one source.

A source is a function of the launch (SOURCES), a stride of a tensor (STRIDES), an argument or a
tensor of the call that gives the number under its own name (GIVEN), or an operand of a fragment,
whose header declares it. Addresses
are named after the tensors and workspaces that they lead to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from .program import KernelEntry
from .run_time import (
    LEAST_NORMAL,
    LOG2_E,
    UNBOUNDED,
    Extent,
    Scalars,
    blocks_of,
    heads_per_group,
    row_blocks,
    row_tiles,
)

Number = int | float
AXES = ("batch", "head", "row", "column")


@dataclass(frozen=True)
class LaunchFacts:
    """Facts that decide the numbers of a launch: the kernel's description, shapes and scalars."""

    kernel: KernelEntry
    extents: Mapping[str, Extent]
    scalars: Scalars

    def given(self, name: str, default: Number) -> Number:
        """A number that the call gives by its name; the default where it does not."""
        return self.scalars.numbers.get(name, default)

    @property
    def q(self) -> Extent:
        return self.extents["q"]

    @cached_property
    def counted(self) -> dict[str, Extent]:
        """Sizes with as many heads of keys as have tiles of their own: where query heads that share
        keys have, each stands for one."""
        k = self.extents["k"]
        return {**self.extents, "k": k._replace(heads=k.heads * int(self.given("key_group", 1)))}

    @property
    def k(self) -> Extent:
        return self.counted["k"]

    @cached_property
    def sequences(self) -> int:
        """Sequences of the call, of packed tokens as many as it says."""
        return self.q.batch if self.scalars.sequences is None else self.scalars.sequences

    @cached_property
    def tiles(self) -> int:
        """Tiles along one head, of queries or of keys."""
        kernel = self.kernel
        of_queries = kernel.tile_axis == "q"
        tiled, sequence = (self.q, kernel.q_seq) if of_queries else (self.k, kernel.kv_seq)
        return blocks_of(tiled, kernel.tile_rows, sequence, self.sequences)

    @property
    def total_heads(self) -> int:
        """Heads of all sequences that have tiles."""
        tiled = self.q if self.kernel.tile_axis == "q" else self.k
        return self.of_round("round_heads", tiled.batch * tiled.heads)

    def of_round(self, name: str, default: int) -> int:
        """A number of heads of a launch that has some of them, given in heads of keys."""
        group = self.q.heads // self.k.heads if self.kernel.tile_axis == "q" else 1
        return int(self.given(name, 0)) * group or default

    @property
    def heads_per_group(self) -> int:
        window = self.scalars.window_left + self.scalars.window_right
        return heads_per_group(self.kernel, self.counted, window)

    @property
    def tail_rows(self) -> int:
        share = self.kernel.tail_share
        return self.tiles // share if share else 0

    @property
    def scale(self) -> float:
        """The factor of scores, and of gradients; 1 where the sums of dQ have it already."""
        return 1.0 if self.given("scaled_sums", 0) else self.scalars.softmax_scale


Source = Callable[[LaunchFacts], Number]


def _given(name: str, default: Number) -> Source:
    return lambda launch: launch.given(name, default)


_FIELDS = {  # of an extent, by the axis of a parameter
    "row": "stride_seq",
    "head": "stride_heads",
    "batch": "stride_batch",
    "column": "stride_dim",
}
# Strides of tensors that kernels address themselves → the tensor, and the field of its extent.
STRIDES: dict[str, tuple[str, str]] = {
    f"{tensor}_stride_{axis}": (tensor, field)
    for tensor in ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")
    for axis, field in _FIELDS.items()
}
SOURCES: dict[str, Source] = {
    "sequences": attrgetter("sequences"),
    "q_len": attrgetter("q.seq"),
    "kv_len": lambda launch: launch.given("kv_room", launch.k.seq),
    "tiles": lambda launch: launch.tiles * launch.total_heads * launch.kernel.tile_parts,
    **dict.fromkeys(("tiles_m", "q_tiles", "kv_blocks"), attrgetter("tiles")),
    "row_tiles": lambda launch: row_tiles(launch.kernel, launch.counted, launch.sequences),
    "q_blocks": lambda launch: launch.given(
        "all_q_blocks", row_blocks(launch.kernel, launch.q, launch.sequences)
    ),
    "k_page_count": lambda launch: launch.extents["k"].batch,
    "v_page_count": lambda launch: launch.extents["v"].batch,
    "heads_q": attrgetter("q.heads"),
    "heads_kv": attrgetter("k.heads"),
    "total_heads": attrgetter("total_heads"),
    "total_rows": lambda launch: launch.q.batch * launch.q.heads * launch.q.seq,
    "heads_per_group": attrgetter("heads_per_group"),
    "tail_rows": attrgetter("tail_rows"),
    "group_size": lambda launch: launch.q.heads // launch.k.heads,
    "key_group": _given("key_group", 1),
    "kept_rows": _given("kept_rows", 0),
    "heads_before": lambda launch: launch.of_round("heads_before", 0),
    "key_parts": _given("key_parts", 0),
    "main_follows": _given("main_follows", 1),
    "q_longest": _given("q_longest", UNBOUNDED),
    "kv_longest": _given("kv_longest", UNBOUNDED),
    "dim_qk": attrgetter("q.dim"),
    "dim_v": lambda launch: launch.extents["v"].dim,
    "bottom_right": lambda launch: int(launch.scalars.bottom_right),
    "scale": attrgetter("scale"),
    "scale_log2": lambda launch: max(launch.scalars.softmax_scale * LOG2_E, LEAST_NORMAL),
    "window_left": attrgetter("scalars.window_left"),
    "window_right": attrgetter("scalars.window_right"),
}


def _strides(tensor: str, *axes: str) -> tuple[str, ...]:
    return tuple(f"{tensor}_stride_{axis}" for axis in axes)


# Parts of a call → the numbers that they give under their own names.
GIVEN: dict[str, tuple[str, ...]] = {
    "scales": tuple(
        name for each in "qkv" for name in _strides(f"descale_{each}", "batch", "head", "row")
    ),
    "dropout": ("drop_low", "drop_high", "drop_limit", "keep_scale", "keep_share"),
    "mask": (
        *_strides("attn_mask", *AXES),
        *(f"attn_mask_{part}" for part in ("batches", "heads", "queries", "keys")),
        *_strides("mask_rows", "batch", "head", "row"),
        *_strides("mask_columns", "batch", "head", "row"),
        *_strides("mask_row_map", "batch", "head", "row"),
        *_strides("mask_column_map", "batch", "head", "row"),
        *_strides("mask_blocks", "batch", "head", "row"),
        *_strides("mask_shown", *AXES),
        *("mask_block_queries", "mask_block_keys", "mask_blocks_rows", "mask_blocks_columns"),
    ),
    "gradient of a bias": (
        *(f"dbias_{part}" for part in ("batches", "heads", "rows", "columns", "sums_rows")),
        "dbias_terms",
    ),
    "positions": ("diagonal", *(f"first_{x}" for x in ("query", "key", "head", "sequence"))),
    "output to go on from": ("goes_on", "keeps_sums", "lse_room"),
    "splits": ("splits",),
    "schedule": ("kept",),
    "append": (
        *_strides("k_cache", "row", "head", "batch"),
        *_strides("v_cache", "row", "head", "batch"),
        *_strides("scale_k", "batch", "head"),
        *_strides("scale_v", "batch", "head"),
        *("packed", "page_size", "pages", "table_columns", "table_stride"),
        *("turned_heads", "turned_step"),
        *("rotary_dim", "rotary_rows", "rotary_pairs", "rotary_wide"),
    ),
    "cast": (
        *(f"{number}_{n}" for number in ("count", "row") for n in range(3)),
        *("least", "share", "power_of_two", "tensors"),
        *("count_v", "row_v", "mantissa_v", "ds_bound", "of_softmax"),
        *("steps", "columns", "own", "of_all"),
    ),
}


def values_of(
    kernel: KernelEntry, extents: Mapping[str, Extent], scalars: Scalars
) -> dict[str, Number]:
    """Every number that a parameter of the kernel may name; of tensors that the call does not have
    there are no strides."""
    launch = LaunchFacts(kernel, extents, scalars)
    worked_out = {name: source(launch) for name, source in SOURCES.items()}
    strides = {
        name: getattr(extents[tensor], field)
        for name, (tensor, field) in STRIDES.items()
        if tensor in extents
    }
    return {**scalars.numbers, **strides, **worked_out}

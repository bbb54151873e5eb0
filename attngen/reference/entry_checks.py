"""Which entries of a call's integer tensors are wrong: tensor, index, value, and what it may be."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from torch import Tensor

from ..call.table import AttentionCall, Lengths, Side
from ..spec.layouts import size
from .operands import Operands

MOST_NAMED = 8  # entries of a tensor


def entry_violations(call: AttentionCall, operands: Operands) -> Iterator[str]:
    """Entries of cumulative lengths, offsets, lengths in use and page tables that cannot be right;
    waits for their device."""
    layout = operands.layout
    sides: tuple[tuple[Side, str, int | None, int], ...] = (
        ("q", layout.q_format, operands.dense_s_q, operands.q.shape[0]),
        ("kv", layout.kv_format, operands.dense_s_kv, operands.k.shape[0]),
    )
    for side, axes, room, tokens in sides:
        if side == "kv" and layout.one_length:
            if call.lengths("kv", layout) == call.lengths("q", layout):
                continue
        lengths = call.lengths(side, layout)
        named = _said_by(call, side, layout.one_length, lengths)
        if axes == "thd":
            yield from _packed_violations(lengths, named, tokens)
        elif room is not None:
            yield from _dense_violations(lengths, named, room)
    if layout.paged:
        yield from _page_violations(call, operands)


def _said_by(call: AttentionCall, side: Side, one_length: bool, lengths: Lengths) -> Side:
    """The side whose arguments these lengths are."""
    other: Side = "kv" if side == "q" else "q"
    own = getattr(call, f"cu_seqlens_{side}"), getattr(call, f"seqused_{side}")
    borrowed = one_length and own == (None, None) and not lengths.absent
    return other if borrowed else side


def _packed_violations(lengths: Lengths, side: Side, tokens: int) -> Iterator[str]:
    """Sequences must follow each other inside the tokens."""
    assert lengths.cu_seqlens is not None  # shapes were checked
    name, ends = f"cu_seqlens_{side}", lengths.cu_seqlens.tolist()
    wrong = [*_unordered(name, ends, tokens)]
    yield from few(wrong)
    if lengths.padded is None:
        return
    starts = lengths.padded.tolist()
    sizes = [0] * len(starts) if wrong else [b - a for a, b in zip(ends, ends[1:], strict=False)]
    yield from few(_misplaced(f"{name}_padded", starts[: len(ends) - 1], sizes, tokens))


def _unordered(name: str, ends: Sequence[int], most: int) -> Iterator[str]:
    """Entries that are negative, beyond `most`, or out of order: the fewest whose neighbours are in
    order without them."""
    kept = longest_ascent([(i, x) for i, x in enumerate(ends) if 0 <= x <= most])
    for i, x in enumerate(ends):
        if i not in kept:
            before = max((ends[k] for k in kept if k < i), default=0)
            behind = min((ends[k] for k in kept if k > i), default=most)
            yield f"{name}[{i}]={x}, of {most} tokens; allowed: {before}..{behind}. Correct it."


def _misplaced(
    name: str, starts: Sequence[int], sizes: Sequence[int], tokens: int
) -> Iterator[str]:
    """Offsets of sequences that leave the tokens or lie over others."""
    fits = ((b, x) for b, x in enumerate(starts) if 0 <= x <= tokens - sizes[b])
    kept = sorted(longest_ascent([*fits]))
    overlaps = {b for a, b in zip(kept, kept[1:], strict=False) if starts[a] + sizes[a] > starts[b]}
    kept = [b for b in kept if b not in overlaps]
    for b, x in enumerate(starts):
        if b not in kept:
            before = max((starts[k] + sizes[k] for k in kept if k < b), default=0)
            behind = min((starts[k] for k in kept if k > b), default=tokens) - sizes[b]
            allowed = f"{before}..{behind}" if before <= behind else "none beside the others"
            yield (
                f"{name}[{b}]={x}, of a sequence of {sizes[b]} of {tokens} tokens; allowed: "
                f"{allowed}. Correct it."
            )


def longest_ascent(entries: Sequence[tuple[int, int]]) -> set[int]:
    """The indices of the most entries (index, value) whose values never decrease; of equally many
    those that come first."""
    # From the last on, ascents that go down: of each length the one that ends the highest.
    last: list[int] = []  # minus the values that these end with
    places: list[int] = []  # of them, among the entries
    behind = [-1] * len(entries)
    for place in reversed(range(len(entries))):
        value = -entries[place][1]
        at = bisect.bisect_right(last, value)
        behind[place] = places[at - 1] if at else -1
        last[at : at + 1], places[at : at + 1] = [value], [place]
    found, place = set(), places[-1] if places else -1
    while place >= 0:
        found.add(entries[place][0])
        place = behind[place]
    return found


def _dense_violations(lengths: Lengths, side: Side, room: int) -> Iterator[str]:
    """Lengths in use must fit the room of each sequence."""
    has_room = f"room for {room} positions a sequence"
    if lengths.seqused is not None:
        used = enumerate(lengths.seqused.tolist())
        wrong = ((b, x) for b, x in used if not 0 <= x <= room)
        named = (f"seqused_{side}[{b}]={x}, {has_room}; allowed: 0..{room}." for b, x in wrong)
        yield from few(f"{each} Pass lengths that fit." for each in named)
    if lengths.cu_seqlens is not None:
        ends = lengths.cu_seqlens.tolist()
        steps = enumerate(zip(ends, ends[1:], strict=False))
        wrong = ((b, x) for b, x in steps if not 0 <= x[1] - x[0] <= room)
        yield from few(
            f"cu_seqlens_{side}[{b + 1}]={end}, {has_room}; allowed: {begin}..{begin + room}, "
            f"behind [{b}]={begin}. Pass lengths that fit."
            for b, (begin, end) in wrong
        )


def _page_violations(call: AttentionCall, operands: Operands) -> Iterator[str]:
    """Every position of every sequence must lie on a page that exists."""
    fmt, used = operands.layout.kv_format, _list(call.seqused_kv)
    operand = {"page_table of K": operands.k, "page_table of V": operands.v}
    if isinstance(call.page_table, Tensor) and operands.k.shape[:2] == operands.v.shape[:2]:
        operand = {"page_table": operands.k}
    for (name, x), table in zip(operand.items(), call.page_tables, strict=False):
        pages, page_size = size(x.shape, fmt, "b"), size(x.shape, fmt, "s")
        room, entries = table.shape[1] * page_size, table.tolist()
        yield from few(
            f"seqused_kv[{b}]={length}, {name} has room for {room} positions; "
            f"allowed: 0..{room}. Pass a wider table."
            for b, length in enumerate(used)
            if not 0 <= length <= room
        )
        yield from few(
            f"{name}[{b}, {i}]={page}, of {pages} pages; allowed: 0..{pages - 1}. Correct it."
            for b, length in enumerate(used)
            if 0 <= length <= room and page_size
            for i, page in enumerate(entries[b][: -(-length // page_size)])
            if not 0 <= page < pages
        )


def _list(tensor: Tensor | None) -> list[int]:
    return [] if tensor is None else [int(x) for x in tensor.tolist()]


def few(reasons: Sequence[str] | Iterator[str]) -> Iterator[str]:
    """The first of them, and how many more there are."""
    named = [*reasons]
    yield from named[:MOST_NAMED]
    if (more := len(named) - MOST_NAMED) > 0:
        yield f"{more} more entries like these"

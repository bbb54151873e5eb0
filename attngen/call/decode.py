"""Decode: into how many parts keys are split, and where pages lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import SpecError
from ..kernels.family import Facts, family_of
from ..kernels.selection import name_of
from ..runtime.load import LoadedKernel
from ..runtime.run_time import MAX_SPLITS, Extent, Scalars
from ..spec.layouts import parse
from .made_mask import is_made
from .mask_bits import reach_of
from .numbers import Arguments
from .operands import keys_of
from .tensors import Described

OWN_NUMBER = -1
"""Asks kernels that split keys for as many parts as fill the chip, where None may ask others."""


def splits_of(
    reader: LoadedKernel,
    extents: Mapping[str, Extent],
    optional: Mapping[str, Described | None],
    scalars: Scalars,
    asked: int,
) -> int:
    """Into how many parts the keys of each sequence are split, by the kernel that reads them.

    asked: 0 or OWN_NUMBER for as many as its family finds fastest; of packed keys for sequences of
    their average length.
    """
    if asked not in (0, OWN_NUMBER):
        return asked
    facts = Facts(extents, scalars, reader.multiprocessors, frozenset({"o"}))
    family = family_of(name_of(reader.kernel))
    keys = keys_of(extents, optional)
    if optional["cu_seqlens_kv"] is not None:
        keys = -(-keys // max(1, scalars.sequences or 1))
    return family.splits(reader.kernel, facts, keys)


def results_of(splits: int) -> tuple[str, ...]:
    """Results that kernels make for an output of so many parts, of which a single one is whole."""
    return ("o",) if splits > 1 else ("o_parts",)


def numbers_of(
    extents: Mapping[str, Extent], optional: Mapping[str, Described | None]
) -> dict[str, int | float]:
    """Parameters that say where pages lie; none where there are none."""
    found: dict[str, int | float] = {}
    for name in ("k", "v"):
        table = optional[f"page_table_{name}"]
        if table is not None:
            found[f"{name}_page_table_stride"] = table.stride()[0]
            fields = ("page_size", "page_reciprocal", "page_shift")
            for field, value in zip(fields, page_numbers(extents[name].seq), strict=True):
                found[f"{name}_{field}"] = value
            found["kv_room"] = keys_of(extents, optional)
    mask = optional.get("attn_mask")
    if found and mask is not None and not is_made(mask):
        reach = reach_of(mask).get("kv_longest", found["kv_room"])
        found["kv_room"] = min(found["kv_room"], reach)
    return found


def page_numbers(size: int) -> tuple[int, int, int]:
    """A page's size, and what positions, which are below 2^30, are divided by it with."""
    shift = (size - 1).bit_length()
    return size, -(-(1 << 30 + shift) // size), shift


def check_splits(num_splits: Any) -> None:
    """Raises: SpecError where this is no number of parts for a call's keys."""
    number = isinstance(num_splits, int) and not isinstance(num_splits, bool)
    known = number and (1 <= num_splits <= MAX_SPLITS or num_splits == OWN_NUMBER)
    if not (num_splits is None or known):
        raise SpecError(
            f"num_splits={num_splits!r} is no number of parts; pass 1 to {MAX_SPLITS}, or None for "
            f"as many as fill the chip ({OWN_NUMBER} where keys are packed)"
        )


def unsplit(num_splits: int, served: bool) -> list[str]:
    """Why keys cannot be split. served: whether the kernels that split them take the call."""
    if num_splits <= 1 or served:
        return []
    return [
        f"num_splits={num_splits}: kernels split the keys of plain operands beside 16-bit queries "
        "and outputs, and of pages; leave it out"
    ]


def violations(
    extents: Mapping[str, Extent],
    optional: Mapping[str, Described | None],
    arguments: Arguments,
    served: bool,
) -> Iterator[str]:
    """Whatever is wrong with splits and pages.

    served: whether the kernels that split keys take the call.
    """
    try:
        check_splits(arguments.num_splits or None)
    except SpecError as error:
        yield from error.reasons
    yield from unsplit(arguments.num_splits, served)
    if parse(arguments.layout).paged:
        yield from _page_violations(optional)


def _page_violations(optional: Mapping[str, Described | None]) -> Iterator[str]:
    for name in ("k", "v"):
        table = optional[f"page_table_{name}"]
        if table is not None and table.ndim == 2 and table.shape[1] > 1:
            if (step := table.stride()[1]) != 1:
                yield f"page_table_{name}: a sequence's pages have stride {step}, need 1"

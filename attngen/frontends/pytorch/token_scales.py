"""Scales a token and head, between the order of the rows of carriers and that of arguments."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...call.table import CARRIERS
from ...errors import SpecError
from ...spec import layouts
from ...spec.layouts import order_of_rows


def by_heads(rows: Mapping[str, Tensor | None], layout: str) -> dict[str, Tensor | None]:
    """Scales of q, k and v as calls take them, [b, h, s], or of packed tokens [1, h, t]: views of
    what there is for each row of their carriers.

    Raises: SpecError where the layout has pages.
    """
    parsed = layouts.parse(layout)
    if parsed.paged:
        raise SpecError(
            f"scaling='token' takes keys and values that lie in no pages; got layout={layout!r}. "
            "Take a recipe with scaling='tensor'."
        )
    found: dict[str, Tensor | None] = {}
    for name in CARRIERS:
        carrier, axis, place = parsed.home(name)
        of_rows = rows[f"descale_{name}"]
        assert of_rows is not None  # one of each carrier
        if axis:
            of_rows = of_rows.select(axis + 1, place)  # of axes without the last
        of_rows = of_rows.permute(order_of_rows(parsed, name))
        found[f"descale_{name}"] = of_rows if of_rows.ndim == 3 else of_rows[None]
    return found


def by_rows(scales: Tensor, axes: list[str]) -> Tensor:
    """Scales [b, h, s], or of packed tokens [1, h, t], as they multiply a tensor of these axes,
    one of which may be that of parts packed into it."""
    packed = "t" in axes
    names = "ht" if packed else "bhs"
    own = [each for each in axes if each in names]
    ordered = (scales.squeeze(0) if packed else scales).permute([names.index(each) for each in own])
    sizes = dict(zip(own, ordered.shape, strict=True))
    return ordered.reshape([sizes.get(each, 1) for each in axes])

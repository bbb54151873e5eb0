"""Casts that are prepared: the launches that store tensors of 16 bits in 8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...kernels.family import Choice
from ...kernels.support.cast import TENSORS
from ...runtime.launch import prepare
from ...runtime.run_time import Extent, Scalars
from ...spec.attention_spec import AttentionSpec, dtype_name
from .. import kernel_choice
from ..kernel_choice import Device
from ..prepared import Launches
from ..recipe import CastRule

UNITS = 8  # numbers that a thread reads at a time, of which a tensor and its rows have a multiple
RESULTS = ("parts", "amax", "scale", "descale")
POINTERS = (
    *(f"{name}_{n}" for name in ("from", "to", "used") for n in range(TENSORS)),
    *(*RESULTS, "known"),
)
"""Parameters that hold addresses."""
ONE = dict.fromkeys(("q", "k", "v", "o"), Extent(1, 1, 1, 1, 1, 1, 1))
"""Extents of operands that casts have not."""


class CastForm(NamedTuple):
    """Tensors of a cast but for what they hold.

    dtype: torch's name of theirs; counts: their numbers, multiples of `UNITS`; rows: numbers in a
    row, of which those alone count that a byte says, 0 where all do, or which have a scale of their
    own where the rule says so; known: whether scales may be known before.
    """

    dtype: str
    counts: tuple[int, ...]
    rows: tuple[int, ...]
    known: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedCast(Launches):
    """A cast for all that differ from it in addresses alone. parts: words that the first kernel
    leaves for the second."""

    names: tuple[str, ...]
    parts: int

    def __post_init__(self) -> None:
        self._point(self.names)


def prepare_cast(form: CastForm, rule: CastRule, device: Device) -> PreparedCast:
    """The launches of a cast. Raises: SpecError, CompileError, LaunchError."""
    spec = AttentionSpec(
        head_dim=16,
        dtype=dtype_name(form.dtype),
        kv_dtype=dtype_name(rule.dtype),
        scaling="token" if rule.by_token else "tensor",
        directions=("cast",),
    )
    first, *_ = kernels = kernel_choice.kernels_of(spec, device, Choice())
    absent = (0,) * (TENSORS - len(form.counts))
    numbers: dict[str, int | float] = {
        "least": rule.least,
        "share": 2.0**-rule.margin,
        "power_of_two": int(rule.power_of_two),
        "tensors": len(form.counts),
    }
    numbers |= {f"count_{n}": x for n, x in enumerate((*form.counts, *absent))}
    numbers |= {f"row_{n}": x for n, x in enumerate((*form.rows, *absent))}
    launches = tuple(prepare(x, ONE, Scalars(1.0, numbers=numbers)) for x in kernels)
    places = range(len(form.counts))
    names = [f"{x}_{n}" for x in ("from", "to") for n in places]
    if rule.by_token:
        names += RESULTS[1:]
    else:
        names += [*(f"used_{n}" for n in places if form.rows[n]), *RESULTS]
        names += ["known"] if form.known else []
    return PreparedCast(
        device=device,
        names=tuple(names),
        parts=TENSORS * first.multiprocessors,
        launches=launches,
        fixed=dict.fromkeys([name for name in POINTERS if name not in names], 0),
    )

"""Casts of backwards in 8 bits, prepared: dO with the scale of dS, and the end of a step of the
history that a layer keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...kernels.family import Choice
from ...runtime.launch import prepare
from ...runtime.load import LoadedKernel
from ...runtime.run_time import Scalars
from ...spec.attention_spec import AttentionSpec, dtype_name
from .. import kernel_choice
from ..kernel_choice import Device
from ..prepared import Launches
from ..recipe import CastRule, StepRule
from .cast import ONE, PreparedCast

BYTES = 16  # numbers of V that a thread reads at a time, of which it and its rows have a multiple
RESULTS = ("amax", "scale", "descale", "scale_dp", "descale_dp")
OPTIONAL = ("used_0", "used_v", "descale_v", "of_lse", "known", "noted")
POINTERS = "from_0", "v", "to_0", "parts", *RESULTS, *OPTIONAL, "history"
"""Parameters that hold addresses."""
_MANTISSAS = {"float8_e4m3fn": 3, "float8_e5m2": 2}


class DOForm(NamedTuple):
    """dO, and V in 8 bits, but for what they hold.

    dtypes: torch's names of theirs; counts: their numbers; rows: numbers in a row, of which those
    alone count that a byte says, 0 where all do. ds_bound, of_softmax: by
    what the product of the largest magnitudes is multiplied to bound dP and dS. given: those of
    `OPTIONAL` that there are.
    """

    dtypes: tuple[str, str]
    counts: tuple[int, int]
    rows: tuple[int, int]
    ds_bound: float
    of_softmax: float
    given: tuple[str, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedStep(Launches):
    """The end of a step, of a scale and its history."""

    def __post_init__(self) -> None:
        self._point(("scale", "history"))


def prepare_d_o(form: DOForm, rule: CastRule, device: Device) -> PreparedCast:
    """The launches of a cast of dO. Raises: SpecError, CompileError, LaunchError."""
    d_o, v = form.dtypes
    first, second, _ = _kernels(d_o, rule.dtype, device)
    numbers: dict[str, int | float] = {
        **dict(zip(("count_0", "count_v"), form.counts, strict=True)),
        **dict(zip(("row_0", "row_v"), form.rows, strict=True)),
        "mantissa_v": _MANTISSAS[v],
        **{"ds_bound": form.ds_bound, "of_softmax": form.of_softmax},
        **{"least": rule.least, "share": 2.0**-rule.margin},
        "power_of_two": int(rule.power_of_two),
    }
    return PreparedCast(
        device=device,
        names=("from_0", "v", "to_0", "parts", *RESULTS, *form.given),
        parts=2 * first.multiprocessors,
        launches=tuple(prepare(x, ONE, Scalars(1.0, numbers=numbers)) for x in (first, second)),
        fixed=dict.fromkeys([name for name in OPTIONAL if name not in form.given], 0),
    )


def prepare_step(steps: int, columns: int, rule: StepRule, device: Device) -> PreparedStep:
    """The launch that ends a step of a history, [steps, columns].

    Raises: SpecError, CompileError, LaunchError.
    """
    *_, last = _kernels("bfloat16", rule.dtype, device)
    numbers: dict[str, int | float] = {
        **{"steps": steps, "columns": columns, "own": rule.own},
        **{"of_all": int(rule.of_all), "power_of_two": int(rule.power_of_two)},
        "share": 2.0**-rule.margin,
    }
    launch = prepare(last, ONE, Scalars(1.0, numbers=numbers))
    return PreparedStep(device=device, launches=(launch,))


def _kernels(dtype: str, stored: str, device: Device) -> tuple[LoadedKernel, ...]:
    """The three kernels. Raises: SpecError, CompileError, LaunchError."""
    spec = AttentionSpec(
        head_dim=16,
        dtype=dtype_name(dtype),
        kv_dtype=dtype_name(stored),
        directions=("bwd_cast",),
    )
    return kernel_choice.kernels_of(spec, device, Choice())

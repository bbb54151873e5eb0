"""Which kernels of a backward make which gradients."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import chain, compress

from ..kernels.selection import made_by
from ..runtime.load import LoadedKernel
from .table import LEARNED, WantedGradients

GRADIENTS = ("dq", "dk", "dv")
ROWS = ("lse_log2", "d")  # LSE and D of every row, of which the gradient of a sink is made


def wanted_of_operands(names: Set[str], one_tensor: bool) -> WantedGradients:
    """Gradients that are wanted where these operands need theirs. one_tensor: whether Q, K and V
    are one."""
    of_keys = bool(names & ({"q"} if one_tensor else {"k", "v"}))
    return WantedGradients("q" in names, of_keys, *[each in names for each in LEARNED])


def names_of(wanted: WantedGradients) -> tuple[str, ...]:
    """Gradients of q, k and v that are wanted."""
    return tuple(compress(GRADIENTS, (wanted.dq, wanted.dkv, wanted.dkv)))


def results_of(wanted: WantedGradients) -> tuple[str, ...]:
    """All that kernels are to make for the gradients that are wanted."""
    of_sink = ROWS if wanted.dsink else ()
    return (*names_of(wanted), *(("dbias",) if wanted.dbias else ()), *of_sink)


def adds_bias(each: LoadedKernel) -> bool:
    """Whether a kernel makes the gradient of the bias beside others."""
    return made_by(each.kernel) >= {"dbias", "dk"}


def written_by(kernels: Sequence[LoadedKernel]) -> tuple[str, ...]:
    """Gradients of q, k and v that kernels write, beside rows that they fill."""
    made = {*chain.from_iterable(made_by(each.kernel) for each in kernels)}
    return tuple(name for name in GRADIENTS if name in made)

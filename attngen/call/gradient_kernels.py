"""Which kernels of a backward make which gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import chain, compress

from ..kernels.selection import made_by
from ..runtime.load import LoadedKernel
from .fragments import LEARNED_SLOT
from .table import GRADIENT_OF, LEARNED, WantedGradients

GRADIENTS = ("dq", "dk", "dv")
ROWS = ("lse_log2", "d")  # LSE and D of every row
# Gradients of learned operands → the results of kernels that each is made of, by the front end's
# function of its name. One of GRADIENTS is there for it whether a call wants that one or not.
MADE_OF: dict[str, tuple[str, ...]] = {
    "dsink": ROWS,
    "dbias": ("dbias",),
    "dlearned": ("dlearned",),
}
_LEARNED = (*LEARNED, LEARNED_SLOT)


def wanted_of_operands(names: Set[str], one_tensor: bool) -> WantedGradients:
    """Gradients that are wanted where these operands need theirs. one_tensor: whether Q, K and V
    are one."""
    of_keys = bool(names & ({"q"} if one_tensor else {"k", "v"}))
    return WantedGradients("q" in names, of_keys, *[each in names for each in _LEARNED])


def names_of(wanted: WantedGradients) -> tuple[str, ...]:
    """Gradients of q, k and v that are wanted."""
    return tuple(compress(GRADIENTS, (wanted.dq, wanted.dkv, wanted.dkv)))


def of_given(wanted: WantedGradients, given: Mapping[str, object]) -> WantedGradients:
    """The gradients that are wanted of operands that there are."""
    absent = {GRADIENT_OF[name]: False for name in _LEARNED if given[name] is None}
    return wanted._replace(**absent)


def learned_of(wanted: WantedGradients) -> tuple[str, ...]:
    """Gradients of learned operands that are wanted."""
    return tuple(each for each in MADE_OF if getattr(wanted, each))


def results_of(wanted: WantedGradients) -> tuple[str, ...]:
    """All that kernels are to make for the gradients that are wanted, each once."""
    learned = chain.from_iterable(MADE_OF[each] for each in learned_of(wanted))
    return tuple(dict.fromkeys((*names_of(wanted), *learned)))


def adds_bias(each: LoadedKernel) -> bool:
    """Whether a kernel adds parts of the gradient of the bias up beside others."""
    return any(recipe.tensor == "dbias" for recipe in each.kernel.tensor_maps)


def sums_bias(each: LoadedKernel) -> bool:
    """Whether a kernel sums the gradient of a bias of one row for all queries beside others."""
    return made_by(each.kernel) >= {"dbias", "dk"} and not adds_bias(each)


def written_by(kernels: Sequence[LoadedKernel]) -> tuple[str, ...]:
    """Gradients of q, k and v that kernels write, beside rows that they fill."""
    made = {*chain.from_iterable(made_by(each.kernel) for each in kernels)}
    return tuple(name for name in GRADIENTS if name in made)

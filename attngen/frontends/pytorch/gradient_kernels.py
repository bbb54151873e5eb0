"""Which kernels of a backward make which gradients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, compress

from ...call.table import WantedGradients
from ...runtime.load import LoadedKernel
from ...runtime.program import KernelEntry
from ...runtime.run_time import FEW_SEQUENCES

GRADIENTS = ("dq", "dk", "dv")
ORDERS = "varlen_prepare"  # the family of the kernel that writes schedules
CONVERTS = "bwd_convert"  # the family of the kernel that rounds sums of dQ
PREPARES = "bwd_prepare"  # the family of the kernel that finds LSE and D of every row
# Families of kernels that do without dQ's address, by which they only fill rows that no tile
# visits, or that belong to no sequence.
FILL_DQ = (PREPARES, "sm90_bwd")
# Families of kernels that make gradients of one kind, and nothing that other kernels read.
KIND_OF_FAMILY = {
    **{"sm90_bwd_dq": "dq", CONVERTS: "dq", "sm90_bwd_dkv": "dkv"},
    "sm90_bwd_dbias": "dbias",
}


def names_of(wanted: WantedGradients) -> tuple[str, ...]:
    """Those of the gradients that kernels make."""
    return tuple(compress(GRADIENTS, (wanted.dq, wanted.dkv, wanted.dkv)))


def needed(kernels: tuple[LoadedKernel, ...], wanted: WantedGradients) -> tuple[LoadedKernel, ...]:
    """All but those that make unwanted gradients alone; none where nothing is wanted. The sink's
    needs no more than LSE and D, which that kernel then makes for all rows, the bias's a kernel of
    its own besides."""
    if not (wanted.dq or wanted.dkv):
        families = {PREPARES: wanted.dsink or wanted.dbias}
        families |= dict.fromkeys(("mask_pack", "bwd_row_sums", "sm90_bwd_dbias"), wanted.dbias)
        return tuple(each for each in kernels if families.get(family_of(each)))
    unwanted = {kind for kind, want in wanted._asdict().items() if not want}
    kinds = (KIND_OF_FAMILY.get(family_of(each)) for each in kernels)
    return tuple(compress(kernels, (kind not in unwanted for kind in kinds)))


def adds_bias(each: LoadedKernel) -> bool:
    """Whether it makes the gradient of the bias beside others."""
    return family_of(each) == "sm90_bwd_with_dbias"


def choose_adding(kernels: tuple[LoadedKernel, ...], adding: bool) -> tuple[LoadedKernel, ...]:
    """The kernels without one of two for the same: that which makes the gradient of the bias, too,
    or the other and the bias's own."""
    others = ("sm90_bwd", "sm90_bwd_dbias") if adding else ("sm90_bwd_with_dbias",)
    return tuple(each for each in kernels if family_of(each) not in others)


def unordered(
    kernels: tuple[LoadedKernel, ...], sequences: int | None
) -> tuple[tuple[LoadedKernel, ...], tuple[str, ...]]:
    """The kernels without the one that orders sequences, where these are so few that the others
    find their order themselves, and the schedules that there are then none of."""
    few = sequences is not None and sequences <= FEW_SEQUENCES
    if not few or not any(each.kernel.orders_few for each in kernels):
        return kernels, ()
    written = (each.kernel.workspace for each in kernels if family_of(each) == ORDERS)
    left_out = tuple(chain.from_iterable(written))
    return tuple(each for each in kernels if family_of(each) != ORDERS), left_out


def preparing(kernels: tuple[LoadedKernel, ...]) -> KernelEntry | None:
    """The one of them that finds LSE and D; None where there are none."""
    return next((each.kernel for each in kernels if family_of(each) == PREPARES), None)


def written_by(kernels: tuple[LoadedKernel, ...]) -> Iterator[str]:
    """The gradients that kernels write, beside rows that they fill."""
    names = {recipe.tensor for each in kernels for recipe in each.kernel.tensor_maps}
    for each in kernels:
        filled = {"dq"} if family_of(each) in FILL_DQ else set()
        # Where their sums are in memory, which another kernel has made.
        filled |= {"dk", "dv"} if family_of(each) == CONVERTS else set()
        names |= {field.name for field in each.kernel.fields} - filled
    return (name for name in GRADIENTS if name in names)


def family_of(each: LoadedKernel) -> str:
    """The first part of its name."""
    return each.kernel.entry.partition("__")[0]

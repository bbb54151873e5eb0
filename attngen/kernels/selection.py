"""Selection: the kernels that a call launches, from what it wants and what each reads and makes.

A kernel's launch description names all that it touches; its family says which of these it makes
(`family.Kind`). Whatever else a kernel has for a workspace it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from ..runtime.program import KernelEntry
from .family import is_known, kind_of


class HasEntry(Protocol):
    """A loaded kernel, or anything else with a launch description."""

    @property
    def kernel(self) -> KernelEntry: ...


Kernel = TypeVar("Kernel", bound=HasEntry)
Item = TypeVar("Item")


def name_of(kernel: KernelEntry) -> str:
    """The kernel's name in its family, which its symbol begins with."""
    return kernel.entry.partition("__")[0]


def made_by(kernel: KernelEntry) -> frozenset[str]:
    """Results and workspaces that a kernel makes whole, by the names of their parameters; nothing
    of one that no family knows."""
    if not is_known(name_of(kernel)):
        return frozenset()
    kind = kind_of(name_of(kernel))
    mapped = {recipe.tensor for recipe in kernel.tensor_maps}
    addressed = {field.name for field in kernel.fields} - kind.fills
    return kind.makes & (mapped | addressed | {*kernel.workspace})


def read_by(kernel: KernelEntry) -> frozenset[str]:
    """Workspaces that a kernel reads."""
    return frozenset(kernel.workspace) - made_by(kernel)


def maker_of(value: str, kernels: Iterable[Kernel]) -> Kernel | None:
    """The first of the kernels that makes a value; None where none does."""
    return next((each for each in kernels if value in made_by(each.kernel)), None)


def of_call(found: Sequence[Item], name: Callable[[Item], str], kernel: str | None) -> list[Item]:
    """The kernels of a problem without the others that make the same as one of them.

    found: plans, or programs; name: the name of an item's kernel. kernel: the one to take, for
    which the first of the others stands where it is not among them, as in a bundle of an earlier
    version; None leaves all.
    """
    if kernel is None:
        return [*found]
    makes = kind_of(kernel).makes
    rivals = [
        place
        for place, each in enumerate(found)
        if is_known(name(each)) and kind_of(name(each)).makes & makes
    ]
    named = (place for place in rivals if name(found[place]) == kernel)
    taken = next(named, min(rivals, default=0))
    return [each for place, each in enumerate(found) if place == taken or place not in rivals]


def select(
    kernels: Sequence[Kernel], wanted: Iterable[str], given: Collection[str] = ()
) -> tuple[Kernel, ...]:
    """The cheapest of these kernels that together make what is wanted, in their order.

    wanted: names of results; given: values that need no kernel. What none makes is given, too. A
    kernel that no family knows, of a bundle of another version, is always among them.
    """
    made = [made_by(each.kernel) for each in kernels]
    names = [name_of(each.kernel) for each in kernels]
    known = [is_known(name) for name in names]
    costs = [kind_of(name).cost if is_known(name) else 0.0 for name in names]
    makers: dict[str, list[int]] = {}
    for place, values in enumerate(made):
        for value in values:
            makers.setdefault(value, []).append(place)

    def complete(chosen: frozenset[int], missing: tuple[str, ...]) -> Iterator[frozenset[int]]:
        """Every set of kernels that has the chosen ones and makes what is missing."""
        for number, value in enumerate(missing):
            if value in given or value not in makers or any(value in made[i] for i in chosen):
                continue
            for place in makers[value]:
                needs = (*missing[number + 1 :], *read_by(kernels[place].kernel))
                yield from complete(chosen | {place}, needs)
            return
        yield chosen

    unknown = frozenset(place for place, is_there in enumerate(known) if not is_there)
    found = complete(unknown, tuple(wanted))
    best = min(found, key=lambda places: (sum(costs[i] for i in places), sorted(places)))
    return tuple(kernels[place] for place in sorted(best))

"""Family: what a folder of kernels says of itself, and all families there are.

A family is a folder with a module `family.py`, whose FAMILY is an object of `Family`; no list names
it. It computes problems of one kind on targets that have its instructions, or makes kernels that
others need around them (kernels/support).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PlanError
from ..fragments.features import Features
from ..io.modules import modules_of
from ..runtime.program import KernelEntry
from ..runtime.run_time import Extent, Scalars
from ..spec.problem import Problem
from ..targets.target import Instruction, Target
from .base import KernelPlan, TiledPlan

if TYPE_CHECKING:
    from .fill import Source  # which needs the template engine


@dataclass(frozen=True)
class Kind:
    """One kernel of a family: the class of its plans, and its template under templates/kernels.

    makes: results and workspaces that it writes whole, by the names of their parameters, where its
    launch description has them. fills: results of which it writes rows that no tile visits, or that
    belong to no sequence; where it has their address alone, another kernel makes them, and the
    address may be 0. cost: of its launch beside those of others that make the same.
    """

    plan: type[KernelPlan]
    template: str
    makes: frozenset[str] = frozenset()
    fills: frozenset[str] = frozenset()
    cost: float = 1.0


@dataclass(frozen=True)
class Facts:
    """Facts that a call adds to its problem, by which families choose among kernels.

    extents: of q, k and v at least; scalars: run-time values. multiprocessors: of its device.
    wants: results by the names of their parameters. splits: into how many parts it asks keys to be
    split, 0 for any number. scheduled: whether a table has the order of its sequences.
    """

    extents: Mapping[str, Extent]
    scalars: Scalars
    multiprocessors: int
    wants: frozenset[str]
    splits: int = 0
    scheduled: bool = False

    @property
    def sequences(self) -> int:
        """Sequences of the call, of packed tokens as many as it says."""
        told = self.scalars.sequences
        return self.extents["q"].batch if told is None else told


@dataclass(frozen=True)
class Choice:
    """How a family computes a call.

    place: of the problem, among those that its spec has; kernel: the name of the one to take of
    several that make the same, None for whichever comes first; splits_heads: whether query heads
    that share keys have tiles of keys of their own.
    """

    place: int = 0
    kernel: str | None = None
    splits_heads: bool = False


class Family(ABC):
    """A folder of kernels. kernels: what it has, by the names that their symbols begin with, which
    no other family uses. needs: instructions that a target has to have; avoids: those of targets
    that have faster kernels, for which it is not asked."""

    kernels: Mapping[str, Kind]
    needs: frozenset[Instruction] = frozenset()
    avoids: frozenset[Instruction] = frozenset()

    def computes(self, problem: Problem) -> bool:
        """Whether problems of this kind are its own; what surrounds others' kernels computes
        none."""
        return False

    def is_asked(self, problem: Problem, target: Target) -> bool:
        """Whether problems of this kind are its own on a target that has none faster."""
        return self.computes(problem) and not self.avoids & target.instructions

    def refuses(self, problem: Problem) -> Iterator[str]:
        """Why it has no kernels for a problem that it computes, on any target; nothing where it
        has."""
        yield from ()

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """Every reason why it does not serve the problem on the target; empty where it does."""
        return [*target.lacks(self.needs), *self.refuses(problem)]

    def plans(self, problem: Problem, target: Target) -> tuple[KernelPlan, ...]:
        """The preferred plan of each kernel of a problem that it serves, in the order of launch.

        Raises: PlanError where nothing fits the target.
        """
        raise PlanError(f"{problem.label}: these kernels compute no problem of their own")

    def feasible(self, problem: Problem, target: Target) -> tuple[TiledPlan, ...]:
        """Every plan of the kernel that `attngen tune` may choose for, in the order of the
        heuristics. Raises: PlanError where nothing fits the target, or it has several."""
        raise PlanError(f"{problem.label}: it has several kernels; plans() has them all")

    def is_tuned(self, plan: KernelPlan) -> bool:
        """Whether the plan is one that `feasible` has, of which measurements may choose."""
        return False

    def surround(
        self, problem: Problem, target: Target, found: Sequence[KernelPlan]
    ) -> tuple[KernelPlan, ...]:
        """The plans of a problem's kernels and those of this family that they need around them."""
        return tuple(found)

    def choose(self, problems: Sequence[Problem], target: Target, facts: Facts) -> Choice:
        """How a call is computed fastest. problems: of its spec, in their order, of one direction.

        Raises: PlanError where nothing fits the target.
        """
        return Choice()

    def splits(self, reader: KernelEntry, facts: Facts, keys: int) -> int:
        """Into how many parts keys are split fastest. reader: the kernel that reads them; keys: the
        most of a sequence."""
        return 1

    @abstractmethod
    def render(self, problem: Problem, plan: KernelPlan, features: Features, root: Path) -> Source:
        """The source of the plan's kernel. root: the templates' directory.

        Raises: jinja2.UndefinedError on a template's mistake; ModuleNotFoundError without Jinja.
        """

    def aim(self, problem: Problem, plan: KernelPlan, target: Target) -> Iterator[str]:
        """Say what bounds the kernel's time, a line for each fact."""
        yield "aims at the memory: no products, each operand read and each result written once"


@cache
def families() -> tuple[Family, ...]:
    """All families, in the order of their folders' names."""
    places = (name for name in modules_of("kernels") if name.endswith(".family"))
    modules = (importlib.import_module(f"attngen.{name}") for name in sorted(places))
    return tuple(each.FAMILY for each in modules if each.__name__ != __name__)


@cache
def _owners() -> dict[str, Family]:
    return {name: family for family in families() for name in family.kernels}


def is_known(name: str) -> bool:
    """Whether some family has a kernel of that name."""
    return name in _owners()


def family_of(name: str) -> Family:
    """The family that has the kernel of that name. Raises: ValueError where none has."""
    if name not in _owners():
        raise ValueError(f"family {name!r} is unknown; known: {[*_owners()]}")
    return _owners()[name]


def kind_of(name: str) -> Kind:
    """The kind of the kernel of that name. Raises: ValueError where there is none."""
    return family_of(name).kernels[name]


def serving(problem: Problem, target: Target) -> Family:
    """The family that serves a problem on a target.

    Raises: PlanError with every reason where none does.
    """
    family, reasons = serving_or_reasons(problem, target, families())
    if family is None:
        raise PlanError(named_refusals(problem, reasons))
    return family


def serving_or_reasons(
    problem: Problem, target: Target, among: Sequence[Family]
) -> tuple[Family | None, list[str]]:
    """The family that serves a problem on a target; where none does, why: what refuse those whose
    instructions the target has, else what it lacks. among: all families."""
    reasons: list[str] = []  # of those whose instructions the target has
    beyond: list[str] = []
    for family in among:
        if family.is_asked(problem, target):
            refused = family.refusals(problem, target)
            if not refused:
                return family, []
            (beyond if any(target.lacks(family.needs)) else reasons).extend(refused)
    return None, reasons or beyond or ["no family of kernels computes it"]


def named_refusals(problem: Problem, reasons: Sequence[str]) -> list[str]:
    """Reasons, each once, behind what they are of: a spec may mean several problems."""
    what = f"{problem.label} ({problem.direction})"
    return [f"{what}: {reason}" for reason in dict.fromkeys(reasons)]

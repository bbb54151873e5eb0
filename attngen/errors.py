"""Every error that attngen raises on purpose: what was asked, what is allowed, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def install_command(extra: str | None = None) -> str:
    """How to install attngen, with an extra: there is no package of it on an index."""
    from . import __version__  # the package imports this module

    wanted = f"[{extra}]" if extra else ""
    wheel = f"./attngen-{__version__}-py3-none-any.whl{wanted}"
    return f"pip install '.{wanted}' in a checkout of attngen, or pip install '{wheel}'"


class AttngenError(Exception):
    """Base of all errors; `reasons` lists every violation that was found, not only the first."""

    def __init__(self, reasons: str | Iterable[str]) -> None:
        self.reasons: tuple[str, ...] = (reasons,) if isinstance(reasons, str) else tuple(reasons)
        # torch.compile, which cannot trace super().__init__, then reports the reasons.
        self.args = ("\n".join(self.reasons),)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies as its reasons: what a subclass takes may be no reason yet."""
        return _restore, (type(self), self.reasons), self.__dict__


def _restore(kind: type[AttngenError], reasons: tuple[str, ...]) -> AttngenError:
    error = kind.__new__(kind)
    AttngenError.__init__(error, reasons)
    return error


class SpecError(AttngenError, ValueError):
    """A spec or a call asks for something that is not defined or not available."""


class PlanError(AttngenError, ValueError):
    """No tile of the architecture holds the problem."""


class CompileError(AttngenError, RuntimeError):
    """The compiler refused a source, or produced a kernel that must not ship."""


class CompilerMissing(CompileError):
    """Jinja, NVRTC or CUTLASS, which the extra `compile` installs, is missing here or broken."""

    def __init__(self, missing: str, why: str = "is not installed") -> None:
        super().__init__(f"compiling needs {missing}, which {why}: {install_command('compile')}")


class CacheError(AttngenError, RuntimeError):
    """A binary is missing and may not be built here (ATTNGEN_DISABLE_JIT=1)."""


class BundleError(AttngenError, RuntimeError):
    """A bundle is damaged, foreign, or lacks what it must have."""


class LaunchError(AttngenError, RuntimeError):
    """The driver refused a kernel, or the arguments do not fit the launch program."""


class LimitError(LaunchError):
    """Sizes or strides do not fit a kernel's integers, grid or copy engine: nothing launched."""


class MeasureError(AttngenError, RuntimeError):
    """Nothing can be measured here, or what was measured is not right."""

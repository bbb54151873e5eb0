"""The backend of calls that name none: the process's."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import SpecError

AUTO = "auto"
BACKENDS = (AUTO, "cuda", "reference")


@dataclass
class Default:
    """The backend of calls that name none; an attribute, as torch.compile guards it."""

    backend: str


_VARIABLE = "ATTNGEN_BACKEND"
default = Default(os.environ.get(_VARIABLE) or AUTO)


def set_backend(backend: str) -> None:
    """Choose the backend of all calls of this process that name none, or `auto`.

    backend: cuda, reference, or auto, as `attngen.attention` has them. ATTNGEN_BACKEND chooses it
    when attngen is imported.

    Raises: SpecError where there is no backend of that name.
    """
    check_backend(backend)
    default.backend = backend


def asked(backend: str) -> str:
    """The backend that a call asks for by this name."""
    return default.backend if backend == AUTO else backend


def check_backend(backend: str) -> None:
    """Raises: SpecError where there is no backend of that name."""
    if backend not in BACKENDS:
        # What set_backend has taken exists, so that the environment named another default.
        name = _VARIABLE if backend == default.backend else "backend"
        raise SpecError(f"{name}={backend!r}; allowed: {', '.join(BACKENDS)}")

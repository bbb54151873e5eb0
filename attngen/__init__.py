"""attngen: from a declarative spec of an attention variant to a fused CUDA kernel.

    import attngen
    out = attngen.attention(q, k, v, mask="causal", window=(1024, 0))

Names load on first use, so that importing attngen costs nothing and needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import reference as reference
    from .call.backend import set_backend
    from .compiler.builder import Built, build
    from .errors import (
        AttngenError,
        BundleError,
        CacheError,
        CompileError,
        LaunchError,
        MeasureError,
        PlanError,
        SpecError,
    )
    from .fragments.features import register_fragment
    from .frontends import fp8 as fp8
    from .frontends import integrations as integrations
    from .frontends import jax as jax  # as `__getattr__` finds it
    from .frontends import transformer_engine as te  # noqa: F401  # likewise
    from .frontends import transformer_engine as transformer_engine
    from .frontends.pytorch import parallel as parallel
    from .frontends.pytorch.append import append_kv
    from .frontends.pytorch.attention import attention
    from .frontends.pytorch.attention_backward import attention_backward
    from .frontends.pytorch.flex import flex_attention
    from .frontends.pytorch.merge import merge_states
    from .frontends.pytorch.schedule import Schedule
    from .results import AttentionAux, AttentionGradients
    from .runtime.tracing import Trace, trace
    from .ship.bundle import Bundle
    from .ship.lookup import load_bundle
    from .spec.attention_spec import AttentionSpec, load_specs

__version__ = "0.2.0"

__all__ = [
    "AttentionAux",
    "AttentionGradients",
    "AttentionSpec",
    "AttngenError",
    "Built",
    "Bundle",
    "BundleError",
    "CacheError",
    "CompileError",
    "LaunchError",
    "MeasureError",
    "PlanError",
    "Schedule",
    "SpecError",
    "Trace",
    "append_kv",
    "attention",
    "attention_backward",
    "build",
    "flex_attention",
    "load_bundle",
    "load_specs",
    "merge_states",
    "register_fragment",
    "set_backend",
    "trace",
]

_HOMES = {
    "AttentionAux": "results",
    "AttentionGradients": "results",
    "AttentionSpec": "spec.attention_spec",
    "Built": "compiler.builder",
    "Bundle": "ship.bundle",
    "Schedule": "frontends.pytorch.schedule",
    "Trace": "runtime.tracing",
    "append_kv": "frontends.pytorch.append",
    "attention": "frontends.pytorch.attention",
    "attention_backward": "frontends.pytorch.attention_backward",
    "build": "compiler.builder",
    "flex_attention": "frontends.pytorch.flex",
    "load_bundle": "ship.lookup",
    "load_specs": "spec.attention_spec",
    "merge_states": "frontends.pytorch.merge",
    "register_fragment": "fragments.features",
    "set_backend": "call.backend",
    "trace": "runtime.tracing",
}
# Front ends beside those of `__all__`, as modules.
_FRONT_ENDS = {
    "fp8": "frontends.fp8",
    "integrations": "frontends.integrations",
    "jax": "frontends.jax",
    "parallel": "frontends.pytorch.parallel",
    "te": "frontends.transformer_engine",
    "transformer_engine": "frontends.transformer_engine",
}


def __getattr__(name: str) -> Any:
    if name in _FRONT_ENDS:
        value = globals()[name] = import_module(f".{_FRONT_ENDS[name]}", __name__)
        return value
    if name == "reference":  # a module of its own name
        return import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module 'attngen' has no attribute {name!r}")
    home = _HOMES.get(name, "errors")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


class _FrontEndFinder:
    """Finds front ends by their public names, as `from attngen.te import …` asks for them: each is
    the module of its home, under a second name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a front end, or of a module in it; None of anything else."""
        if not name.startswith(f"{__name__}."):
            return None
        public, _, inner = name.removeprefix(f"{__name__}.").partition(".")
        if public not in _FRONT_ENDS:
            return None
        home = f"{__name__}.{_FRONT_ENDS[public]}" + (f".{inner}" if inner else "")
        return ModuleSpec(name, _SameModule(home))  # type: ignore[arg-type]  # what import asks of it


class _SameModule:
    """Loads a module that has a name already, and leaves it as it is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module of that name, imported if nobody has."""
        found = import_module(self._name)
        self._spec = found.__spec__
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Give the module back the spec that import has replaced."""
        module.__spec__ = self._spec


def _find_front_ends() -> None:
    """Have imports find them, once, however often this package is imported anew."""
    known = [each for each in sys.meta_path if type(each).__name__ != _FrontEndFinder.__name__]
    sys.meta_path[:] = [_FrontEndFinder(), *known]


_find_front_ends()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_FRONT_ENDS, "reference"})

"""attngen: from a declarative spec of an attention variant to a fused CUDA kernel.

    import attngen
    out = attngen.attention(q, k, v, mask="causal", window=(1024, 0))

Names load on first use, so that importing attngen costs nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .builder import Built, build
    from .bundle import Bundle
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
    from .mounts import load_bundle
    from .ops.frontend import attention
    from .ops.merge import merge_states
    from .ops.schedule import Schedule
    from .results import AttentionAux
    from .spec import AttentionSpec, load_specs
    from .tracing import Trace, trace

__version__ = "0.1.0"

__all__ = [
    "AttentionAux",
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
    "attention",
    "build",
    "load_bundle",
    "load_specs",
    "merge_states",
    "trace",
]

_HOMES = {
    "AttentionAux": "results",
    "AttentionSpec": "spec",
    "Built": "builder",
    "Bundle": "bundle",
    "Schedule": "ops.schedule",
    "Trace": "tracing",
    "attention": "ops.frontend",
    "build": "builder",
    "load_bundle": "mounts",
    "load_specs": "spec",
    "merge_states": "ops.merge",
    "trace": "tracing",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'attngen' has no attribute {name!r}")
    home = _HOMES.get(name, "errors")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

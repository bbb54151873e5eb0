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
    from .errors import (
        AttngenError,
        CacheError,
        CompileError,
        LaunchError,
        MeasureError,
        PlanError,
        SpecError,
    )
    from .ops.frontend import attention
    from .results import AttentionAux
    from .spec import AttentionSpec, load_specs

__version__ = "0.1.0"

__all__ = [
    "AttentionAux",
    "AttentionSpec",
    "AttngenError",
    "Built",
    "CacheError",
    "CompileError",
    "LaunchError",
    "MeasureError",
    "PlanError",
    "SpecError",
    "attention",
    "build",
    "load_specs",
]

_HOMES = {
    "AttentionAux": "results",
    "AttentionSpec": "spec",
    "Built": "builder",
    "attention": "ops.frontend",
    "build": "builder",
    "load_specs": "spec",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'attngen' has no attribute {name!r}")
    home = _HOMES.get(name, "errors")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value

"""TransformerEngine's environment variables, read when a backend is chosen or a module is made."""

from __future__ import annotations

import os

SWITCHES = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN")
FLASH_SWITCHES = ("NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4")
NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
FP8_BACKWARD = "NVTE_FP8_DPA_BWD"
DEBUG, DEBUG_LEVEL = "NVTE_DEBUG", "NVTE_DEBUG_LEVEL"


def enabled(switch: str) -> bool:
    """Whether a switch that is on by default is on."""
    return os.environ.get(switch, "1") != "0"


def setting(name: str, default: str) -> str:
    """The text of a variable; the default where it is absent or empty."""
    return os.environ.get(name) or default

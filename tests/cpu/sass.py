"""What a cubin really holds: instruction counts and resource figures, without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from importlib.metadata import files as files_of
from pathlib import Path

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
_WHOLE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;")
_FIGURE = re.compile(r"(\w+(?:\[\d+\])?):(\d+)")


def find_tool(name: str) -> str:
    """The path of nvdisasm or cuobjdump, of the wheel or of a CUDA toolkit on PATH.

    Raises: FileNotFoundError with what to install.
    """
    for file in files_of(f"nvidia-cuda-{name}") or ():
        if file.name == name:
            return str(file.locate())
    if found := shutil.which(name):
        return found
    raise FileNotFoundError(f"{name}: install nvidia-cuda-{name}, part of attngen[dev]")


def count_instructions(cubin: bytes) -> Counter[str]:
    """How often each opcode (its first part: `HGMMA`, `UTMALDG`, `STL`) occurs in the cubin."""
    return Counter(_INSTRUCTION.findall(_run("nvdisasm", cubin, "-c")))


def list_instructions(cubin: bytes) -> list[str]:
    """The cubin's instructions in order, without predicates: `WARPGROUP.DEPBAR.LE gsb0, 0x1`."""
    return _WHOLE.findall(_run("nvdisasm", cubin, "-c"))


def read_usage(cubin: bytes) -> dict[str, int]:
    """The one kernel's resource figures: REG, STACK, SHARED, LOCAL, CONSTANT[0] …"""
    return {name: int(n) for name, n in _FIGURE.findall(_run("cuobjdump", cubin, "-res-usage"))}


def _run(tool: str, cubin: bytes, option: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [find_tool(tool), option, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

"""Kernels' sources compiled by g++, as shared libraries with the runtime in them."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from pathlib import Path

from attngen.compiler import cutlass
from attngen.io.files import headers, replacing

from . import instructions

HERE = Path(__file__).parent
# As NVRTC sees them, but for what cuda.hpp defines. No warnings: of unknown pragmas, most of all.
# Fibers leave frames that a fortified longjmp would miss; each kernel has a runtime of its own.
FLAGS = (
    *("-std=c++17", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-fno-gnu-unique"),
    "-fno-omit-frame-pointer",  # intervals.cpp tells by callers where a thread is
    *("-D__CUDACC__", "-D__CUDACC_RTC__", "-D__CUDACC_VER_MAJOR__=13", "-D__CUDA_ARCH__=800"),
    *("-DCUTE_ARCH_MMA_F32_SM89_ENABLED", "-DCUTE_ARCH_MMA_F16_SM89_ENABLED"),
    f"-I{HERE}",
)
ENTRY = """
extern "C" void emulator_entry(const void* parameters) {{
  {name}(*static_cast<const attngen::Params*>(parameters));
}}
"""


class HostCompiler:
    """Compiles into `folder`, each source once, whichever process asks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def compile(self, source: str) -> Path:
        """The library of a kernel. Raises: KeyError for a statement of PTX that is not known,
        AssertionError with the compiler's errors."""
        name = source.rpartition("(const __grid_constant__")[0].split()[-1]
        text = '#include "cuda.hpp"\n' + instructions.rewrite(source) + ENTRY.format(name=name)
        library = self._headers / f"{_digest(text, *self._runtime)}.so"
        if not library.exists():
            _compile(text, library, "-O1", "-shared", *self._runtime)
        return library

    @functools.cached_property
    def _headers(self) -> Path:
        """Where the headers are, and the kernels that were compiled with them."""
        known = {name: instructions.rewrite(text.decode()) for name, text in headers().items()}
        known |= {
            name: instructions.rewrite_wrappers(text.decode())
            for name, text in cutlass.atoms().items()
        }
        folder = self.folder / _digest((HERE / "cuda.hpp").read_text(), *known.values())
        for name, text in known.items():
            with replacing(folder / name) as file:  # processes beside this one see whole files
                file.write(text.encode())
        return folder

    @functools.cached_property
    def _runtime(self) -> list[str]:
        """The object files of the runtime."""
        texts = {path: path.read_text() for path in sorted(HERE.glob("*.?pp"))}
        folder = self.folder / _digest(*texts.values())
        objects = {path: folder / f"{path.stem}.o" for path in texts if path.suffix == ".cpp"}
        for source, target in objects.items():
            if not target.exists():
                _compile(texts[source], target, "-O3", "-c")
        return [str(target) for target in objects.values()]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join([*FLAGS, *texts]).encode()).hexdigest()[:20]


def _compile(text: str, target: Path, *flags: str) -> None:
    """Compiles with what lies beside the target. Raises: AssertionError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.stem}.{os.getpid()}{target.suffix}")
    source = temporary.with_suffix(".cpp")
    source.write_text(text)
    command = ["g++", *FLAGS, f"-I{target.parent}", "-o", temporary, source, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    source.unlink()
    temporary.replace(target)

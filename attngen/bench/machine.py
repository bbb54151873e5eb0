"""Machine: what a measurement ran on."""

from __future__ import annotations

import platform
import subprocess

from ..compiler import digest
from ..compiler.toolchain import installed_toolchain
from .report import Machine


def describe_machine() -> Machine:
    """Chip, driver and versions; None for what is not there."""
    chip = driver = None
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        chip, driver = (part.strip() for part in done.stdout.splitlines()[0].split(",", 1))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        pass
    torch_version = cuda_version = None
    try:
        import torch
    except ImportError:
        pass
    else:
        torch_version, cuda_version = str(torch.__version__), torch.version.cuda
        if chip is None and torch.cuda.is_available():
            chip = torch.cuda.get_device_name()
    return Machine(
        chip=chip,
        driver=driver,
        torch=torch_version,
        cuda=cuda_version,
        nvrtc=installed_toolchain(),
        python=platform.python_version(),
        sources=digest.source_digests(),
    )

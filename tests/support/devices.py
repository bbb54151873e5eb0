"""Which GPU a process of the tests takes, where several share them."""

from __future__ import annotations

import re
from collections.abc import MutableMapping

VISIBLE, WORKER = "CUDA_VISIBLE_DEVICES", "PYTEST_XDIST_WORKER"


def turn_devices(environment: MutableMapping[str, str]) -> None:
    """Gives processes of pytest-xdist the named GPUs in turn: each sees all, another one first.

    Nothing changes where CUDA_VISIBLE_DEVICES names fewer than two, or the process is none of
    theirs. Only before CUDA starts.
    """
    number = re.fullmatch(r"gw(\d+)", environment.get(WORKER, ""))
    devices = environment.get(VISIBLE, "").split(",")
    if number and len(devices) > 1:
        first = int(number[1]) % len(devices)
        environment[VISIBLE] = ",".join(devices[first:] + devices[:first])

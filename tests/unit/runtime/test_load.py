"""Loading without a GPU: what is refused before the driver gets a byte of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from attngen.errors import LaunchError
from attngen.runtime import load
from tests.support.cache_kit import CUBIN, KERNEL, make_binary


class Driver:
    """A device of some compute capability, and what it was given to load."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="multiprocessors",
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="room",
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="smem")
    CUfunction = int

    def __init__(self, major: int, minor: int) -> None:
        self.attributes = {"major": major, "minor": minor, "multiprocessors": 132}
        self.loaded: list[bytes] = []
        self.parameters: list[int] = [KERNEL.params_bytes]

    def cuDeviceGet(self, device: int) -> tuple[int, int]:
        return 0, device

    def cuDeviceGetAttribute(self, code: str, _: int) -> tuple[int, int]:
        return 0, self.attributes[code]

    def cuLibraryLoadData(self, cubin: bytes, *_: Any) -> tuple[int, str]:
        self.loaded.append(cubin)
        return 0, "library"

    def cuLibraryGetKernel(self, library: str, entry: bytes) -> tuple[int, int]:
        return 0, 7

    def cuCtxGetDevice(self) -> tuple[int, int]:
        return 0, 0

    def cuKernelGetParamInfo(self, kernel: int, index: int) -> tuple[int, int, int]:
        sizes = self.parameters
        return (0, 0, sizes[index]) if index < len(sizes) else (1, 0, 0)

    def cuKernelSetAttribute(self, *_: Any) -> tuple[int]:
        return (0,)


def on_device(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> Driver:
    driver = Driver(major, minor)
    monkeypatch.setattr(load, "driver", lambda: driver)
    monkeypatch.setattr(load, "_libraries", {})
    return driver


def test_load_hands_a_cubin_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = on_device(monkeypatch, 9, 0)
    kernels = [load.load(make_binary(), CUBIN, 0) for _ in range(2)]
    assert driver.loaded == [CUBIN] and kernels[0].multiprocessors == 132


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_load_on_another_architecture_is_refused_unloaded(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = on_device(monkeypatch, *capability)
    with pytest.raises(LaunchError, match="is for sm_90a") as caught:
        load.load(make_binary(), CUBIN, 0)
    assert str(capability) in str(caught.value) and driver.loaded == []


@pytest.mark.parametrize(
    ("capability", "room", "why"),
    [
        ((8, 6), 99 << 10, ""),
        ((8, 9), 1 << 10, "asks for .* has 1024"),
        ((9, 0), 1 << 20, r"\(8, 0\)"),
    ],
)
def test_load_on_a_later_minor_version_asks_for_shared_memory(
    capability: tuple[int, int], room: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = on_device(monkeypatch, *capability)
    driver.attributes["room"] = room
    binary = replace(make_binary(), arch="sm_80", kernel=replace(KERNEL, smem_bytes=2 << 10))
    if not why:
        assert load.load(binary, CUBIN, 0).target.name == "sm_80" and driver.loaded == [CUBIN]
        return
    with pytest.raises(LaunchError, match=f"is for sm_80.*{why}"):
        load.load(binary, CUBIN, 0)
    assert driver.loaded == []


@pytest.mark.parametrize("cubin", [b"", CUBIN[:-1], CUBIN + b"\0", CUBIN[::-1]])
def test_load_another_cubin_is_refused_unloaded(
    cubin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = on_device(monkeypatch, 9, 0)
    with pytest.raises(LaunchError, match="not the one described"):
        load.load(make_binary(), cubin, 0)
    assert driver.loaded == []


@pytest.mark.parametrize(
    "sizes", [[], [KERNEL.params_bytes + 8], [KERNEL.params_bytes - 4], [8, 8]]
)
def test_load_cubin_that_takes_other_parameters_is_refused(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reads from a launch as much as the cubin says."""
    driver = on_device(monkeypatch, 9, 0)
    driver.parameters = sizes
    with pytest.raises(LaunchError, match="its cubin takes parameters of"):
        load.load(make_binary(), CUBIN, 0)


def test_load_unknown_architecture_is_refused_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = on_device(monkeypatch, 9, 0)
    with pytest.raises(LaunchError, match="is for sm_100a; known: sm_90a"):
        load.load(replace(make_binary(), arch="sm_100a"), CUBIN, 0)
    assert driver.loaded == []

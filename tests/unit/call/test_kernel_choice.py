"""Kernels of a call, found or built and loaded once."""

from __future__ import annotations

import pytest

from attngen import AttentionSpec, SpecError
from attngen.call import kernel_choice
from attngen.call.kernel_choice import Device
from attngen.fragments import features
from attngen.kernels.family import Choice
from attngen.runtime.load import LoadedKernel
from attngen.spec import resolve

ARCH = "sm_90a"
DEVICE = Device("cuda:0", 0, ARCH)


def test_kernels_of_a_narrow_window_are_noted_as_those_that_the_spec_names(monkeypatch):
    """So that what is built from a trace serves windows of any size."""
    spec = AttentionSpec(64, dtype="bf16", window=True, directions=("bwd",))
    plain, ordered = resolve.resolve(spec, features.scan())
    found = []

    def find(problem, arch, kernel):
        found.append(problem)
        return [(problem, b"")]

    def load(binary, cubin, device):
        return LoadedKernel("handle", None, device, 132, (binary, ARCH))

    monkeypatch.setattr(kernel_choice, "_kernels", {})
    monkeypatch.setattr(kernel_choice, "find_kernels", find)
    monkeypatch.setattr(kernel_choice.load, "load", load)
    monkeypatch.setattr(kernel_choice.load, "current_device", lambda: 0)
    for place in (0, 1, 0):
        (kernel,) = kernel_choice.kernels_of(spec, DEVICE, Choice(place))
        assert kernel.variant == (plain, ARCH)
    assert found == [plain, ordered]


def test_device_without_kernels_is_refused_by_name():
    with pytest.raises(SpecError, match=r"^no kernels for tpu:3; available: \['sm_90a'"):
        kernel_choice.kernels_of(AttentionSpec(64), Device("tpu:3", 3, None), Choice())

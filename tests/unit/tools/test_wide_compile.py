"""tools/wide_compile.py: which kernels it times, and what a row has."""

from __future__ import annotations

import pytest

from tools import wide_compile


def test_rows_are_of_kernels_by_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(wide_compile, "run_nvrtc", lambda text, *_: compiled.append(text))
    forward = list(wide_compile.measure((512, 512), "fwd", 3))
    backward = list(wide_compile.measure((512, 512), "bwd", 3))
    assert [row["kernel"] for row in forward] == ["sm90_fwd_wide"]
    kernels = ["sm90_bwd_dkv", "sm90_bwd_dq", "sm90_bwd_dq_kept"]
    assert [row["kernel"] for row in backward] == kernels
    assert len(compiled) == 12 and all("wgmma" in text for text in compiled)
    assert all(row["head_dims"] == "512/512" for row in forward + backward)
    assert not list(wide_compile.measure((576, 512), "bwd", 1))

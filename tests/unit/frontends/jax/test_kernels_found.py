"""Kernels of JAX's programs are found as all are: in bundles, the cache, or not at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

jax = pytest.importorskip("jax")

from attngen.jax import attention  # noqa: E402

from attngen import CacheError, SpecError  # noqa: E402
from attngen.ship import lookup  # noqa: E402
from tests.support import launch_kit  # noqa: E402

jnp = jax.numpy
Q = jax.ShapeDtypeStruct((1, 512, 4, 80), jnp.bfloat16)


def lowered(backend: str = "auto") -> Any:
    """A program for CUDA, of which nothing was lowered before."""
    call = jax.jit(lambda q: attention(q, q, q, mask="causal", softcap=7.0, backend=backend))
    return call.trace(Q).lower(lowering_platforms=("cuda",))


def test_program_names_what_is_missing_while_it_is_lowered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ATTNGEN_DISABLE_JIT", "1")
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("attngen.call.kernel_choice._kernels", {})
    with pytest.raises(CacheError, match="ATTNGEN_DISABLE_JIT"):
        lowered()


def test_bundles_are_asked_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def find(problem: Any, arch: str, kernel: str | None) -> Any:
        asked.append((problem.head_dim_qk, arch))
        return launch_kit.find_kernels(problem, arch, kernel)

    monkeypatch.setenv("ATTNGEN_DISABLE_JIT", "1")
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("attngen.call.kernel_choice._kernels", {})
    monkeypatch.setattr(lookup, "find", find)
    assert "custom_call @attngen" in lowered().as_text()
    assert asked == [(80, "sm_90a")]


def test_gpu_without_kernels_runs_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(compute_capability="8.0", local_hardware_id=0)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [other])
    assert "custom_call @attngen" not in lowered().as_text()
    with pytest.raises(SpecError, match="has no kernels; available: sm_90a$"):
        lowered("cuda")

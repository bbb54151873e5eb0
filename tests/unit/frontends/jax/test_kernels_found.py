"""Kernels of JAX's programs are found as all are: in bundles, the cache, or not at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

jax = pytest.importorskip("jax")

from attngen.jax import attention  # noqa: E402

from attngen import CacheError, SpecError  # noqa: E402
from attngen.frontends.jax import operation  # noqa: E402
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


def see(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX sees a GPU of that compute capability."""
    other = SimpleNamespace(compute_capability=capability, local_hardware_id=0)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [other])
    monkeypatch.setattr(operation, "multiprocessors", lambda index: 108)


def test_gpu_without_kernels_runs_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    see("7.5", monkeypatch)
    assert "custom_call @attngen" not in lowered().as_text()
    with pytest.raises(SpecError, match="has no kernels; available: sm_90a, sm_90, sm_80"):
        lowered("cuda")


def test_other_gpus_run_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def find(problem: Any, arch: str, kernel: str | None) -> Any:
        asked.append(arch)
        return launch_kit.find_kernels(problem, arch, kernel)

    see("8.0", monkeypatch)
    monkeypatch.setattr("attngen.call.kernel_choice._kernels", {})
    monkeypatch.setattr(lookup, "find", find)
    assert "custom_call @attngen" in lowered().as_text() and asked == ["sm_80"]


def test_calls_that_an_architecture_has_no_kernels_for_run_their_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    see("8.0", monkeypatch)
    fp8 = jax.ShapeDtypeStruct((1, 512, 4, 64), jnp.float8_e4m3fn)

    def lower(backend: str) -> str:
        call = jax.jit(lambda q: attention(q, q, q, backend=backend))
        return call.trace(fp8).lower(lowering_platforms=("cuda",)).as_text()

    assert "custom_call @attngen" not in lower("auto")
    with pytest.raises(SpecError, match="sm_80"):
        lower("cuda")


def test_gradients_that_have_no_kernels_run_their_definition(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards of wide heads have kernels by mma.sync, and backwards none."""
    see("8.0", monkeypatch)
    wide = jax.ShapeDtypeStruct((1, 900, 4, 320), jnp.bfloat16)
    operation._say_defined.cache_clear()

    def lower(backend: str) -> str:
        def total(q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, backend=backend).astype("float32").sum()

        call = jax.jit(jax.grad(total, (0, 1, 2)))
        return call.trace(wide, wide, wide).lower(lowering_platforms=("cuda",)).as_text()

    assert lower("auto").count("custom_call @attngen") == 1
    assert "head dims above 256" in caplog.text
    with pytest.raises(SpecError, match="head dims above 256"):
        lower("cuda")


def test_refused_gradients_name_what_jax_has() -> None:
    wide, values = (jnp.zeros((1, 9, 4, d), jnp.bfloat16) for d in (576, 512))
    with pytest.raises(SpecError, match="above 512 have none; .*stop_gradient") as refused:
        jax.grad(lambda q: attention(q, wide, values).astype("float32").sum())(wide)
    assert "torch" not in str(refused.value)

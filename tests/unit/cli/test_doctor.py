"""The doctor: a report whatever is missing, and the versions that are really loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from attngen.cli import doctor
from attngen.cli.main import main
from attngen.compiler import digest
from attngen.errors import install_command
from attngen.fragments import features
from attngen.io import files
from attngen.io.values import to_data, to_json
from attngen.kernels import tuned
from attngen.targets import target
from tests.support.paths import ROOT

ITEMS = [
    *("python", "attngen", "torch", "cuda-bindings", "jinja2", "nvrtc", "cutlass"),
    *("driver", "gpu"),
    *("headers", "templates", "tuned", "bundles", "cache", "jit"),
]
# Enough of the driver for the doctor: one device of compute capability 9.0.
STUB_DRIVER = """
#include <string.h>
int cuDriverGetVersion(int *v) { *v = 13010; return 0; }
int cuInit(unsigned flags) { return INIT_RESULT; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, "Stub GPU", n); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : 0; return 0; }
"""


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ATTNGEN_DISABLE_JIT", raising=False)
    return tmp_path / "cache"


def report(python: str, *items: str, **environment: str) -> dict[str, dict[str, str]]:
    """The doctor's JSON findings by item, of all or of some, from a process of its own."""
    done = subprocess.run(
        [python, "-m", "attngen", "doctor", "--json", *items],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    absent = any(finding["status"] == "missing" for finding in findings)
    assert done.returncode == bool(items and absent), done.stderr
    return {finding["item"]: finding for finding in findings}


def stub_driver(folder: Path, init_result: int) -> None:
    """Compile libcuda.so.1 into the folder."""
    source = folder / "driver.c"
    source.write_text(STUB_DRIVER)
    library = folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", f"-DINIT_RESULT={init_result}"]
    subprocess.run(["gcc", *flags, "-o", library, source], check=True)


def test_doctor_on_this_machine_reports_every_item() -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0
    findings = [json.loads(line) for line in result.stdout.splitlines()]
    assert [finding["item"] for finding in findings] == ITEMS
    assert not [finding for finding in findings if finding["status"] == "problem"]


def test_doctor_nvrtc_is_the_file_that_is_loaded() -> None:
    version, _, path = doctor.check_nvrtc().partition(" at ")
    assert version.startswith("13.")
    assert Path(path).is_file() and "libnvrtc" in path


def test_doctor_where_nothing_is_installed_says_what_to_do(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    (packages,) = (tmp_path / "bare" / "lib").glob("python*/site-packages")
    shutil.copytree(Path(click.__file__).parent, packages / "click")
    found = report(str(tmp_path / "bare" / "bin" / "python"), PYTHONPATH="")
    assert list(found) == ITEMS
    for item in ("torch", "cuda-bindings", "jinja2", "nvrtc", "cutlass"):
        assert found[item]["status"] == "missing"
        assert "pip install" in found[item]["advice"]
    assert found["headers"]["status"] == found["templates"]["status"] == "ok"


@pytest.mark.parametrize("removed", [("templates", "cuda"), ("templates",), ("cuda",)])
def test_doctor_of_an_install_without_its_sources_says_that_this_is_fine(
    removed: tuple[str, ...], tmp_path: Path
) -> None:
    """A wheel's files as docs/guide/shipping.md lets a server have them."""
    package = shutil.copytree(ROOT / "attngen", tmp_path / "attngen",
                              ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    shutil.copytree(ROOT / "templates", package / "templates")
    facts = {"features": features.scan(), **to_data(digest.read_shipped())}
    (package / files.SHIPPED).write_text(to_json(facts))
    for name in removed:
        shutil.rmtree(package / name)
    command = [sys.executable, "-P", "-m", "attngen", "doctor", "--json", "headers", "templates"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for line, folder in zip(done.stdout.splitlines(), ("cuda", "templates"), strict=True):
        finding = json.loads(line)
        assert finding["status"] == "ok"
        assert finding["detail"].startswith("removed: ") == (folder in removed)


@pytest.mark.parametrize("item", ["headers", "templates"])
def test_doctor_of_a_broken_install_says_how_to_mend_it(item: str, tmp_path: Path) -> None:
    """One that lacks its sources, and nothing says what they were."""
    shutil.copytree(ROOT / "attngen", tmp_path / "attngen",
                    ignore=shutil.ignore_patterns("__pycache__", "cuda"))  # fmt: skip
    command = [sys.executable, "-P", "-m", "attngen", "doctor", "--json", item]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})  # fmt: skip
    finding = json.loads(done.stdout)
    assert done.returncode == 1 and finding["status"] == "missing"
    assert install_command() in finding["advice"]


def test_doctor_without_driver_says_that_building_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(doctor.ctypes, "CDLL", refuse)
    found = {finding.item: finding for finding in doctor.examine(["driver", "gpu"])}
    for item in ("driver", "gpu"):
        assert found[item].status == "missing"
        assert "libcuda.so.1" in found[item].detail and "build" in found[item].advice


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_doctor_with_driver_names_its_version_and_gpus(tmp_path: Path) -> None:
    stub_driver(tmp_path, init_result=0)
    found = report(sys.executable, "driver", "gpu", LD_LIBRARY_PATH=str(tmp_path))
    assert found["driver"]["detail"] == f"CUDA 13.1 at {tmp_path / 'libcuda.so.1'}"
    assert found["gpu"]["detail"] == "Stub GPU (sm_90)"


@pytest.mark.parametrize(
    ("capability", "named", "said"),
    [
        ((8, 6), "", "sm_86"),
        ((8, 8), "", "sm_88, kernels of sm_86"),
        ((7, 5), "", "sm_75, no kernels"),
        ((9, 0), "sm_90", "sm_90, kernels of sm_90"),
    ],
)
def test_doctor_says_whose_kernels_a_gpu_runs(
    capability: tuple[int, int], named: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "NAMED", named)
    assert doctor._kernels_of(capability) == said
    monkeypatch.setattr(target, "NAMED", "sm_9")
    with pytest.raises(doctor.Missing, match="ATTNGEN_TARGET='sm_9'") as caught:
        doctor._kernels_of(capability)
    assert "unset ATTNGEN_TARGET" in caught.value.advice


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_doctor_driver_that_fails_to_start_is_reported(tmp_path: Path) -> None:
    stub_driver(tmp_path, init_result=999)
    found = report(sys.executable, "driver", "gpu", LD_LIBRARY_PATH=str(tmp_path))
    assert found["driver"]["status"] == "ok"
    assert found["gpu"]["status"] == "missing"
    assert found["gpu"]["detail"] == "cuInit failed: CUresult 999"


def test_doctor_cache_that_cannot_be_made_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (finding,) = doctor.examine(["cache"])
    assert finding.status == "missing" and "ATTNGEN_CACHE_DIR" in finding.advice


def test_doctor_cache_that_is_not_trusted_is_missing(cache_dir: Path) -> None:
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    (finding,) = doctor.examine(["cache"])
    assert finding.status == "missing" and "may be written to by anyone" in finding.detail


def test_doctor_looks_at_the_cache_without_making_it(cache_dir: Path) -> None:
    assert "kernels: 0," in doctor.check_cache()
    assert not cache_dir.exists()


def test_doctor_chip_without_tuned_plans_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.delenv("ATTNGEN_CHIP", raising=False)
    assert doctor.check_tuned() == "none: the heuristics decide"
    monkeypatch.setenv("ATTNGEN_CHIP", "h2000")
    (finding,) = doctor.examine(["tuned"])
    assert finding.status == "missing" and "ATTNGEN_CHIP=h2000" in finding.detail
    assert "unset ATTNGEN_CHIP" in finding.advice


def test_doctor_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> str:
        raise ZeroDivisionError("seven")

    monkeypatch.setattr(doctor, "CHECKS", {"python": explode, "jit": doctor.check_jit})
    broken, sound = doctor.examine()
    assert (broken.status, broken.detail) == ("problem", "ZeroDivisionError: seven")
    assert sound.status == "ok"
    assert "seven" in doctor.format_finding(broken)
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 1


def test_doctor_fails_where_a_named_item_is_not_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def lack() -> str:
        raise doctor.Missing("none", "get one")

    monkeypatch.setattr(doctor, "CHECKS", {"gpu": lack, "jit": doctor.check_jit})
    outcomes = {items: CliRunner().invoke(main, ["doctor", *items])
                for items in ((), ("jit",), ("jit", "gpu"), ("gpus",))}  # fmt: skip
    assert [outcome.exit_code for outcome in outcomes.values()] == [0, 0, 1, 2]
    assert outcomes["jit",].output.count("\n") == 1
    assert "get one" in outcomes["jit", "gpu"].output
    assert "unknown items: gpus; there are: gpu, jit" in outcomes["gpus",].output

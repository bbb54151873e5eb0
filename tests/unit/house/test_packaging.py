"""The wheel: everything that building and launching need, nothing else, and it works alone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

LLAMA = ROOT / "examples" / "specs" / "llama3-8b.toml"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="needs hatchling"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = ["-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("attngen-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for PYTHONPATH that holds what the wheel installs."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def tracked(folder: str, *suffixes: str) -> set[str]:
    found = (path for suffix in suffixes for path in (ROOT / folder).rglob(f"*{suffix}"))
    return {path.relative_to(ROOT).as_posix() for path in found}


def run(code_or_module: list[str], path: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *code_or_module],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(path), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_contents_are_modules_headers_and_templates(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    wanted = tracked("attngen", ".py", ".cuh", ".hpp", ".json", ".toml", "py.typed")
    wanted |= {"attngen/shipped.json"}  # made with the wheel
    wanted |= {f"attngen/{name}" for name in tracked("templates", ".j2")}
    shipped = {name for name in names if ".dist-info/" not in name}
    assert shipped == wanted


def test_wheel_metadata_names_licence_extras_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        entry_points = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
        names = archive.namelist()
    assert "License-Expression: Apache-2.0" in text
    assert {"bench", "compile", "dev", "docs", "jax"} == {
        line.split()[1] for line in text.splitlines() if line.startswith("Provides-Extra:")
    }
    assert "attngen = attngen.cli.main:main" in entry_points
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_twice_from_one_tree_is_the_same(wheel: Path, tmp_path: Path) -> None:
    command = ["-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_installed_wheel_finds_its_own_templates(installed: Path) -> None:
    code = "from attngen.io import files; print(files.templates_dir(), files.include_dir())"
    for found in run(["-c", code], installed).split():
        assert Path(found).is_relative_to(installed)


@pytest.mark.slow
def test_installed_wheel_shares_its_cache_with_a_checkout(installed: Path, tmp_path: Path) -> None:
    command = ["-m", "attngen", "build", str(LLAMA)]
    environment = {"ATTNGEN_CACHE_DIR": str(tmp_path)}
    assert "2 compiled, 0 cached" in run(command, installed, **environment)
    assert "0 compiled, 2 cached" in run(command, ROOT, **environment)


# torch is gigabytes, and nothing that compiles imports it: pip is told that it is there.
TORCH = "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n"
FOUND = """
import importlib.metadata, sys
from cuda.bindings import nvrtc
print(nvrtc.__file__, *map(importlib.metadata.version, ("cuda-python", "cuda-bindings")))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_in_an_empty_environment_brings_what_compiles(
    wheel: Path, tmp_path: Path
) -> None:
    """pip finds versions that fit each other, and what it installs compiles a kernel."""
    environment = tmp_path / "venv"
    python = str(environment / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    (site,) = environment.glob("lib/python3.*/site-packages")
    (site / "torch-2.13.0.dist-info").mkdir()
    (site / "torch-2.13.0.dist-info" / "METADATA").write_text(TORCH)
    (site / "torch-2.13.0.dist-info" / "INSTALLER").write_text("pip\n")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def call(*arguments: str) -> str:
        done = subprocess.run(
            [python, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**clean, "ATTNGEN_CACHE_DIR": str(tmp_path / "cache")},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call("-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), f"{wheel}[compile]")
    call("-m", "pip", "check")
    file, metapackage, bindings = call("-c", FOUND).split()
    assert Path(file).is_relative_to(site)
    assert metapackage.split(".")[:2] == bindings.split(".")[:2]
    call("-m", "attngen", "doctor", "cuda-bindings", "jinja2", "nvrtc", "cutlass")
    assert "2 compiled, 0 cached" in call("-m", "attngen", "build", str(LLAMA))
    forward = tmp_path / "forward.toml"
    forward.write_text('[[kernel]]\nname = "forward"\nhead_dim = 64\ndirections = ["fwd"]\n')
    built = call("-m", "attngen", "build", "--arch", "sm_80", str(forward))
    assert "1 compiled, 0 cached" in built

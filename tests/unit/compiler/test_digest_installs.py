"""Keys of installs without sources, and of ones in a zip."""

from __future__ import annotations

import compileall
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attngen.compiler import digest
from attngen.fragments import features
from tests.unit.compiler.test_digest import (
    DIGESTS,
    PLAN_PROPERTIES,
    checkout,
    replace_text,
    run_in,
)

__all__ = ["checkout"]  # a fixture


def drop_sources(package: Path) -> None:
    """Leave bytecode alone, like bundlers of applications and slim images."""
    compileall.compile_dir(package, legacy=True, quiet=1)
    for path in package.rglob("*.py"):
        path.unlink()


@pytest.mark.slow
def test_key_of_bytecode_is_one_wherever_and_whenever_it_was_compiled(
    checkout: Path, tmp_path: Path
) -> None:
    """Neither places nor times nor the order of a set are in it; code is."""
    other = tmp_path / "other" / "place"
    shutil.copytree(checkout, other)
    edited = tmp_path / "edited"
    shutil.copytree(checkout, edited)
    name, old, new = PLAN_PROPERTIES["CTAs an SM"]
    replace_text(edited / "attngen" / name, old, new)
    for path in (other / "attngen").rglob("*.py"):
        os.utime(path, (1, 1))
    for copy in (checkout, other, edited):
        drop_sources(copy / "attngen")
    found = [
        run_in(copy, DIGESTS, PYTHONHASHSEED=seed)["generator"]
        for copy, seed in ((checkout, "1"), (other, "2"), (edited, "1"))
    ]
    assert found[0] == found[1] != found[2]
    assert found[0] != digest.source_digests()["generator"]


def test_key_of_a_module_with_neither_source_nor_code_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Modules that are compiled to machine code have neither."""

    class Loader:
        def get_code(self, name: str) -> None:
            return None

    spec = importlib.machinery.ModuleSpec("attngen.io.values", Loader(), origin="values.so")  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(
        FileNotFoundError, match=r"attngen\.values has neither .* install attngen's"
    ):
        digest.read_module("values")


def run_from_zip(checkout: Path, tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    archive = shutil.make_archive(str(tmp_path / "app"), "zip", checkout)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": archive, "ATTNGEN_CACHE_DIR": str(tmp_path / "cache")},
        cwd=tmp_path,
    )


def test_install_in_a_zip_has_the_keys_of_a_wheel_and_says_what_building_needs(
    checkout: Path, tmp_path: Path
) -> None:
    """Its wheel says what its templates and headers are; NVRTC cannot read them there."""
    facts = {"features": features.scan(), **digest.to_data(digest.read_shipped())}
    (checkout / "attngen" / "shipped.json").write_text(digest.to_json(facts))
    done = run_from_zip(checkout, tmp_path, DIGESTS)
    assert json.loads(done.stdout) == digest.source_digests(), done.stderr
    code = "import attngen; attngen.build(attngen.AttentionSpec(head_dim=16))"
    done = run_from_zip(checkout, tmp_path, code)
    assert done.returncode and "app.zip, out of which its templates" in done.stderr
    assert "install it with pip" in done.stderr

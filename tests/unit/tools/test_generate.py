"""tools/generate.py: the check notices every way in which generated/ can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import generate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds what the templates give."""
    assert generate.main(["--output", str(tmp_path)]) == 0
    return tmp_path


def check(folder: Path) -> int:
    return generate.main(["--check", "--output", str(folder)])


def test_check_what_was_just_written_passes(folder: Path) -> None:
    assert check(folder) == 0


@pytest.mark.parametrize("suffix", [".cu", ".plan.json", "manifest.json"])
def test_check_edited_file_fails_and_shows_the_line(
    folder: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next(path for path in folder.iterdir() if path.name.endswith(suffix))
    path.write_text("// edited\n" + path.read_text())
    assert check(folder) == 1
    assert f"differs: {path.name}" in (text := capsys.readouterr().out) and "-// edited" in text


def test_check_missing_and_superfluous_files_fail(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "manifest.json").unlink()
    (folder / "old.cu").write_text("")
    assert check(folder) == 1
    text = capsys.readouterr().out
    assert "missing: manifest.json" in text and "superfluous: old.cu" in text


def test_write_removes_what_is_no_longer_generated(folder: Path) -> None:
    (folder / "old.cu").write_text("")
    assert generate.main(["--output", str(folder)]) == 0
    assert not (folder / "old.cu").exists()


def test_manifest_names_every_source_with_its_digest(folder: Path) -> None:
    kernels = json.loads((folder / "manifest.json").read_text())["kernels"]
    assert {f"{name}.cu" for name in kernels} == {path.name for path in folder.glob("*.cu")}
    for name, kernel in kernels.items():
        text = (folder / f"{name}.cu").read_text()
        assert generate._sha256(text) == kernel["source_sha256"]
        assert kernel["entry"] in text


def test_generate_names_what_prepares_a_forward_and_a_backward_apart(tmp_path: Path) -> None:
    spec = tmp_path / "packed.toml"
    spec.write_text(
        """
        [defaults]
        head_dim = 64
        directions = ["fwd", "bwd"]
        [[kernel]]
        layout = "thd"
        [[kernel]]
        attn_mask = true
        """
    )
    names = {name.removesuffix(".cu") for name in generate.generate(spec) if name.endswith(".cu")}
    for prepared in ("varlen_prepare__full_packed_d64_bf16", "mask_pack__arbitrary_d64_bf16"):
        assert {prepared, f"{prepared}_backward"} <= names

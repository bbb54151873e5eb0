"""Packages around bundles: what pip installs is found by its entry point, and its bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attngen.errors import BundleError
from attngen.ship import wheel as bundle_wheel
from attngen.ship.bundle import Bundle
from tests.support.bundle_kit import cubin_for, make_program, write
from tests.support.cache_kit import ROOT

A = make_program(64, "a")


def test_wheel_installed_is_found_by_its_entry_point(tmp_path: Path) -> None:
    bundle = Bundle(write(tmp_path / "x", A))
    wheel = bundle_wheel.make_wheel(bundle, "Acme.Attention-kernels", "1.2", tmp_path / "dist")
    assert wheel.name == "acme_attention_kernels-1.2-py3-none-any.whl"
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", target, wheel], check=True, capture_output=True)
    code = """
from attngen.ship import lookup as mounts
from tests.support.bundle_kit import make_program
(bundle,) = mounts.mounted()
((binary, cubin),) = mounts.find(*make_program(64, "a").key)
print(bundle.path, cubin)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{target}"},
    )
    assert done.returncode == 0, done.stderr
    place = target / "acme_attention_kernels" / "kernels.attn"
    assert done.stdout.split(" ", 1) == [str(place), f"{cubin_for('a')!r}\n"]


def test_wheel_of_one_bundle_has_the_same_bytes_and_a_true_record(tmp_path: Path) -> None:
    bundle = Bundle(write(tmp_path / "x", A))
    one, two = (bundle_wheel.make_wheel(bundle, "acme", "1", tmp_path / n) for n in "12")
    assert one.read_bytes() == two.read_bytes()
    record = bundle_wheel.zipfile.ZipFile(one).read("acme-1.dist-info/RECORD").decode()
    kernels = bundle_wheel._record_digest((tmp_path / "x").read_bytes())
    assert f"acme/kernels.attn,sha256={kernels},{bundle.bytes}\n" in record


@pytest.mark.parametrize(
    ("name", "version", "part"),
    [
        ("", "1", "no name"),
        ("a b", "1", "no name"),
        ("../evil", "1", "no name"),
        ("-a", "1", "no name"),
        ("attngen", "1", "take the place of attngen"),
        ("ATTNGEN", "1", "take the place of attngen"),
        ("a", "", "no version"),
        ("a", "one", "no version"),
        ("a", "1/2", "no version"),
        ("a", "1.0-3", "no version"),
    ],
)
def test_wheel_of_a_name_or_version_that_pip_would_not_take_is_refused(
    name: str, version: str, part: str, tmp_path: Path
) -> None:
    bundle = Bundle(write(tmp_path / "x", A))
    with pytest.raises(BundleError, match=part):
        bundle_wheel.make_wheel(bundle, name, version, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()

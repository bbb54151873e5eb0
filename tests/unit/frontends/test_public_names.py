"""Front ends under their public names: one module each, however it is imported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import attngen

FRONT_ENDS = {
    **{"te": "transformer_engine", "transformer_engine": "transformer_engine", "fp8": "fp8"},
    "integrations": "integrations",
}
if importlib.util.find_spec("jax"):  # an extra
    FRONT_ENDS["jax"] = "jax"


def run(code: str) -> str:
    """Run code in a new process, and return its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("public", "home"), FRONT_ENDS.items())
def test_import_of_a_public_name_gives_the_module_of_its_home(public: str, home: str) -> None:
    code = (
        f"import attngen.{public} as one, attngen.frontends.{home} as other, attngen\n"
        f"print(one is other is attngen.{public}, other.__spec__.name)"
    )
    assert run(code) == f"True attngen.frontends.{home}"


def test_names_come_from_a_front_end_by_its_public_name() -> None:
    code = (
        "from attngen.te import DotProductAttention\n"
        "from attngen.fp8 import autocast\n"
        "from attngen.te.names import QKVLayout\n"
        "from attngen.frontends.transformer_engine import names\n"
        "print(QKVLayout is names.QKVLayout, DotProductAttention.__name__, autocast.__name__)"
    )
    assert run(code) == "True DotProductAttention autocast"


def test_reference_is_there_without_an_import_of_its_own() -> None:
    """Pages name it so."""
    code = "import attngen\nprint('torch' in __import__('sys').modules, attngen.reference.__name__)"
    assert run(code) == "False attngen.reference"


@pytest.mark.slow
def test_doors_import_no_library_that_they_open_to() -> None:
    code = (
        "import sys, attngen\n"
        "doors = [getattr(attngen.integrations, name) for name in attngen.integrations.DOORS]\n"
        "libraries = {'diffusers', 'transformers', 'xformers', 'flash_attn'}\n"
        "print(len(doors), *(libraries & {*sys.modules}))"
    )
    assert run(code) == "6"


def test_modules_that_are_none_are_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match="attngen.tee"):
        __import__("attngen.tee")
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        __import__("attngen.te.nothing")


@pytest.mark.slow
def test_a_second_import_of_the_package_finds_them_once() -> None:
    before = len(sys.meta_path)
    attngen._find_front_ends()
    assert len(sys.meta_path) == before
    assert run(
        "import sys, attngen\n"
        "for name in [x for x in sys.modules if x.partition('.')[0] == 'attngen']:\n"
        "    del sys.modules[name]\n"
        "import attngen.te\n"
        "print(sum(type(x).__name__ == '_FrontEndFinder' for x in sys.meta_path))"
    ) == "1"

"""Backends of calls that name none: those of the process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import attngen
from attngen import SpecError
from attngen.call import backend

X = torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def chosen() -> Iterator[None]:
    before = backend.default.backend
    yield
    backend.default.backend = before


def test_calls_that_name_none_take_the_one_that_is_set(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "attngen"):
        attngen.set_backend("reference")
        found = attngen.attention(X, X, X)
        assert not caplog.records  # nobody asked for kernels
    attngen.set_backend("cuda")
    for named in ({}, {"backend": "auto"}, {"backend": None}):
        with pytest.raises(SpecError, match="cpu has no kernels"):
            attngen.attention(X, X, X, **named)
    assert torch.equal(attngen.attention(X, X, X, backend="reference"), found)
    attngen.set_backend("auto")
    assert torch.equal(attngen.attention(X, X, X), found)


@pytest.mark.slow
def test_backend_that_is_set_is_that_of_compiled_code() -> None:
    attend = torch.compile(lambda: attngen.attention(X, X, X), backend="eager", fullgraph=True)
    attngen.set_backend("reference")
    attend()
    attngen.set_backend("cuda")
    with pytest.raises(Exception, match="cpu has no kernels"):
        attend()


def test_backends_that_do_not_exist_are_refused() -> None:
    with pytest.raises(SpecError, match="backend='tpu'; allowed: auto, cuda, reference"):
        attngen.set_backend("tpu")
    assert backend.default.backend == "auto"


@pytest.mark.slow
@pytest.mark.parametrize("value", ["reference", "nonsense"])
def test_environment_chooses_it(value: str) -> None:
    code = (
        "import torch, attngen\n"
        "x = torch.zeros(1, 4, 2, 8)\n"
        "try: print(attngen.attention(x, x, x).shape)\n"
        "except attngen.SpecError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ATTNGEN_BACKEND": value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("ATTNGEN_BACKEND='nonsense'; allowed: auto" in done.stdout) == (value == "nonsense")
    assert "reference backend" not in done.stderr

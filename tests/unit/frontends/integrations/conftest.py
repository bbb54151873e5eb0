"""Fixtures of tests of doors."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from torch import Tensor

from tests.support.mask_kit import dense_of


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the library's name that makes masks, for tests that import nothing else of it."""

    def sdpa_mask(**given: Any) -> Tensor:
        assert not (given.pop("allow_is_causal_skip") or given.pop("allow_is_bidirectional_skip"))
        assert given.pop("device") == "cpu"
        return dense_of(**given)

    fake = types.ModuleType("transformers.masking_utils")
    fake.sdpa_mask = sdpa_mask
    package = types.ModuleType("transformers")
    package.masking_utils = fake
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", fake)

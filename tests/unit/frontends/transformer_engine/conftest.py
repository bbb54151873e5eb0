"""Each test begins without switches of the environment, and with a choice that is to be made."""

from __future__ import annotations

import pytest

from attngen import te
from tests.support import te_kit


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*te_kit.SWITCHES, "NVTE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    te._attention_backends["backend_selection_requires_update"] = True

"""The backward by products of warps in tiles that chips with other shared memory have."""

from __future__ import annotations

import pytest

from attngen.kernels.mma_sync.backward import choices
from attngen.kernels.mma_sync.backward.choices import Choice
from tests.support.caches import kernels_of

from . import variants
from .cases import Case
from .conftest import any_chip
from .variants import Variant

pytestmark = pytest.mark.gpu
ARCH = any_chip() or "sm_90"
# Those of the target at hand run in test_mma_sync_backward.py.
CHOICES = {
    "weights kept, one stage": Choice(4, 1, 128, 64, 1, 1, parts=2),
    "weights kept, dQ at once": Choice(4, 1, 128, 64, 2, 1, parts=2),
    "weights shared": Choice(4, 2, 128, 64, 2, 1),
    "four warps": Choice(2, 2, 64, 64, 1, 2),
}


@pytest.mark.parametrize("name", CHOICES)
def test_mma_backward_of_other_tiles_is_right(name, monkeypatch):
    monkeypatch.setattr(choices, "CHOICES", (CHOICES[name],))
    case = Case(64, 64, "bf16", "causal", heads=(1, 2, 1), lengths=(130, 150))
    with kernels_of(ARCH) as launched:
        variants.check_backward(Variant(case, deterministic=True))
    assert "mma_bwd" in launched

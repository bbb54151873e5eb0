"""Variants whose kernels, as they stand, have not passed the GPU tests: calls refuse them.

They can be built, and ATTNGEN_UNTESTED=1, read when this module is imported, lets calls reach them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spec import AttentionSpec

VARIABLE = "ATTNGEN_UNTESTED"
allowed = os.environ.get(VARIABLE, "0") not in ("", "0")


def find(spec: AttentionSpec, num_splits: int | None = None) -> list[str]:
    """What a call asks for that waits for the tests; nothing where the user let it through."""
    if allowed:
        return []
    asked = {
        "variable lengths": spec.seqused or "thd" in spec.layout or spec.mask.startswith("padding"),
        "pages": spec.layout.startswith("paged_"),
        f"num_splits={num_splits}": (num_splits or 0) > 1,
        "ALiBi": spec.alibi,
        "softcap": spec.softcap,
        f"softmax {spec.softmax!r}": spec.softmax != "vanilla",
        "max_logit": spec.return_max_logit,
        "dropout": spec.dropout,
        "an arbitrary mask": spec.attn_mask or spec.mask == "arbitrary",
    }
    return [
        f"{name}: its kernels have not passed the GPU tests yet; pass backend='reference', or set "
        f"{VARIABLE}=1 before attngen is imported"
        for name, wanted in asked.items()
        if wanted
    ]

"""The code of the page on context parallelism runs as it stands, in a group of one process."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist

from attngen import reference
from tests.support.paths import ROOT


def test_code_of_the_guide_runs() -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/guide/context-parallel.md").read_text(), re.DOTALL
    )
    q, k, v = torch.randn(3, 1, 8, 2, 16, generator=torch.Generator().manual_seed(0)).unbind()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        space: dict[str, Any] = {"q": q, "k": k, "v": v, "group": dist.group.WORLD}
        exec(code, space)
    finally:
        dist.destroy_process_group()
    wanted, _ = reference.attention(q, k, v, mask="causal")
    assert torch.allclose(space["whole"], wanted, atol=1e-6)

"""`context_service`: parts of calls that are alike are judged once, all others by themselves."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from attngen.call.kept import Kept
from attngen.frontends.pytorch.context import service as context_service
from attngen.frontends.pytorch.context.service import Service, service_of


def part(dtype: torch.dtype = torch.bfloat16, dim: int = 64, **more: Any) -> dict[str, Any]:
    q, k, v = torch.zeros(3, 1, 8, 2, dim, dtype=dtype).unbind()
    return {"q": q, "k": k, "v": v, **more}


OTHERS = [
    part(torch.float16),
    part(dim=32),
    part(softcap=30.0),
    part(bias=torch.zeros(1, 2, 8, 8, dtype=torch.bfloat16)),
    part(bias=torch.zeros(1, 2, 8, 8, dtype=torch.bfloat16, requires_grad=True)),
    part(positions=(0, 0)),
]


def test_calls_alike_are_judged_once() -> None:
    judged = mock.Mock(side_effect=lambda *_: Service(serves=True, joins=True))
    with (
        mock.patch.object(context_service, "_judged", judged),
        mock.patch.object(context_service, "_known", Kept()),
    ):
        for _ in range(2):
            for given in (part(), *OTHERS):
                service_of(given, None, learns=False)
            service_of(part(), None, learns=True)
    assert judged.call_count == len(OTHERS) + 2


def test_reasons_are_those_of_the_device_and_of_wide_heads() -> None:
    for _ in range(2):
        found = service_of(part(dim=320), None, learns=False)
        assert not (found.serves or found.joins)
        assert [reason.split(" ")[0] for reason in found.reasons] == ["cpu", "head"]


def test_what_has_no_hash_is_judged_each_time() -> None:
    judged = mock.Mock(wraps=context_service._judged)
    with mock.patch.object(context_service, "_judged", judged):
        for _ in range(2):
            assert service_of(part(alibi_slopes=[1.0, 2.0]), None, learns=False).reasons
    assert judged.call_count == 2

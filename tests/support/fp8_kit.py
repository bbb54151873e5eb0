"""Small FP8 calls, with one of each scale, for the tests of the call and of the operation."""

from __future__ import annotations

import torch

from attngen.call.numbers import Arguments
from attngen.call.table import OPTIONAL, PAGE_TABLES
from attngen.call.tensors import name_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def operands(dtype=E4M3, kv_dtype=E4M3, s_kv=7):
    make = torch.Generator().manual_seed(0)
    shapes = ((2, 5, 4, 32), (2, s_kv, 2, 32), (2, s_kv, 2, 16))
    dtypes = (dtype, kv_dtype, kv_dtype)
    return [torch.randn(s, generator=make).to(d) for s, d in zip(shapes, dtypes, strict=True)]


def scales():
    """One of each kind, all different."""
    per_head = torch.tensor([[1.0, 2.0], [0.5, 4.0]])
    return {
        "descale_q": per_head,
        "descale_k": torch.tensor([0.75]),
        "descale_v": per_head.T,
        "scale_s": torch.tensor([64.0]),
        "descale_s": torch.tensor([1 / 64]),
        "scale_o": torch.tensor([3.0]),
    }


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def rest_of(out_dtype=torch.bfloat16, amax=False, **given):
    """List what the operation takes after q, k and v: optional tensors, then arguments."""
    arguments = Arguments(softmax_scale=0.25, out_dtype=name_of(out_dtype), amax=amax)
    return *(given.get(name) for name in OPTIONAL), *arguments


def keywords_of(optional):
    """The operation's optional tensors, but fragments', as the reference's arguments."""
    named = dict(zip(OPTIONAL, optional, strict=True))
    named = {name: x for name, x in named.items() if not name.startswith("fragment_")}
    del named["schedule"]  # which changes no result
    tables = tuple(named.pop(name) for name in PAGE_TABLES)
    return named if tables[0] is None else {**named, "page_table": tables}

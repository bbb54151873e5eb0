"""Decodes by products of warps beside those for Hopper, as tools/mma_sync_speed.py times them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

import attngen
from attngen import AttentionSpec
from attngen.bench import checking, decode
from attngen.bench.timing import time_interleaved
from tests.support.caches import kernels_of

ARCH, HOPPER = "sm_90", "sm_90a"
OURS, WGMMA = "attngen mma.sync", "attngen wgmma"
PAGED = "paged_kv_bshd_bshd_bshd"


@dataclass(frozen=True)
class Decode:
    """One query of each sequence, bf16, against `length` keys, dense or in pages of `pages`.

    latent: columns of values, which are the first ones of keys, as latent attention has them; 0:
    values are a tensor of their own, as wide. narrow: whether keys and values are e4m3.
    """

    batch: int
    heads_q: int
    heads_kv: int
    length: int
    head_dim: int
    pages: int  # 0: dense
    latent: int = 0
    narrow: bool = False

    @property
    def name(self) -> str:
        where = f"p{self.pages}" if self.pages else "dense"
        heads = f"h{self.heads_q}/{self.heads_kv}"
        columns = f"{self.head_dim}/{self.latent}" if self.latent else self.head_dim
        kind = "-e4m3" if self.narrow else ""
        return f"b{self.batch}-{heads}-kv{self.length // 1024}k-d{columns}-{where}{kind}"

    @property
    def page(self) -> int:
        """Positions of a page of the operands, which are made in both forms."""
        return self.pages or 64

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, each read once."""
        each = self.batch * self.heads_kv * self.length * self.head_dim
        return each * (1 if self.narrow else 2) * (1 if self.latent else 2)


DECODES = tuple(
    Decode(*shape[:4], head_dim, shape[4])
    for head_dim in (64, 128)
    for shape in (
        *((64, 32, 8, 4096, 64), (64, 32, 8, 4096, 16), (64, 32, 8, 4096, 0)),
        *((8, 32, 8, 32768, 64), (1, 64, 8, 131072, 64), (256, 32, 8, 1024, 64)),
        (32, 16, 16, 4096, 0),
    )
)
LATENT = tuple(
    Decode(batch, heads, 1, length, 576, 64, 512, narrow)
    for narrow in (False, True)
    for batch, heads, length in ((64, 16, 4096), (16, 128, 8192), (1, 128, 32768), (128, 16, 1024))
)


def specs() -> Iterator[tuple[AttentionSpec, str]]:
    """The kernels that are timed, and their targets."""
    every = (*DECODES, *LATENT)
    wanted = {(each.head_dim, each.latent, bool(each.pages), each.narrow) for each in every}
    for d, latent, paged, narrow in sorted(wanted):
        layout, kv_dtype = PAGED if paged else "bshd", "e4m3" if narrow else None
        values = latent or None
        spec = AttentionSpec(d, head_dim_v=values, layout=layout, kv_dtype=kv_dtype, decode=True)
        yield from ((spec, arch) for arch in (ARCH, HOPPER))


def operands_of(case: Decode) -> decode.Operands:
    """Random operands, in both forms."""
    made: Any = case  # has what bench's own cases have
    x = decode.random_operands(made, torch.device("cuda"))
    if not case.latent:
        return x
    pages, k = x.k_pages, x.dense[0]
    if case.narrow:  # what is compared with has the numbers that 8 bits stand for
        pages, k = pages.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn).to(k.dtype)
    values = pages[..., : case.latent]
    return replace(x, k_pages=pages, v_pages=values, dense=(k, k[..., : case.latent]))


def decode_call(case: Decode, x: decode.Operands) -> Callable[[], Any]:
    """A call of `attention`, of whatever kernels calls have now."""
    given, more = (x.q, *x.dense), cast(dict[str, Any], {})
    if case.pages:
        given = (x.q, x.k_pages, x.v_pages)
        more = {"layout": PAGED, "page_table": x.table, "seqused_kv": x.lengths}
    return lambda: attngen.attention(*given, **more, backend="cuda")


def decode_row(case: Decode, rounds: int, budget_ms: float) -> dict[str, Any]:
    """One decode by both families' kernels. Raises: MeasureError on a wrong result."""
    with torch.no_grad():
        made: Any = case
        operands = operands_of(case)
        expected = decode.expect(made, operands)
        graphs = {}
        for name, arch in ((OURS, ARCH), (WGMMA, HOPPER)):
            with kernels_of(arch):
                call = decode_call(case, operands)
                checking.check((call(),), expected)
                graphs[name] = decode.graphed(call)
        ms = time_interleaved(graphs, rounds, budget_ms)
    us = {name: each * 1e3 / decode.GRAPH_CALLS for name, each in ms.items()}
    return {
        "direction": "latent" if case.latent else "decode",
        "case": case.name,
        "us": {name: round(each, 2) for name, each in us.items()},
        "gbps": {name: round(case.bytes / each / 1e3) for name, each in us.items()},
        "ratio": round(us[WGMMA] / us[OURS], 3),
    }

"""Small calls of the curated kernels, one of each kind, for compute-sanitizer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import attngen

from . import kv_cache, oracle
from .cases import Case
from .cases_fp8 import Fp8Case
from .cases_hostile import SOME
from .cases_learned import CASES as LEARNED_CASES
from .cases_made import CASES as MADE_CASES
from .cases_placed import CASES as PLACED_CASES
from .test_append import CASES as APPENDS
from .test_dropout import rng_state
from .test_fp8_backward import CASES as FP8_BACKWARDS
from .test_fp8_bias import CASES as FP8_BIASES
from .test_fp8_bias import bias_of
from .test_fp8_dropout import CASES as FP8_DROPOUTS
from .test_fp8_mixed import CASES as FP8_MIXED
from .test_large_scores import Large
from .test_scale_extremes import whole
from .variants import Variant
from .varlen import Call, Features


@dataclass(frozen=True)
class BackwardCase:
    """The backward of a call. `lse`: with a gradient of the LSE."""

    forward: Case
    deterministic: bool = False
    lse: bool = False

    def __str__(self) -> str:
        marks = (("deterministic", self.deterministic), ("lse", self.lse))
        return "-".join(["bwd", str(self.forward), *(mark for mark, on in marks if on)])

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernels that serve the case."""
        spec = replace(self.forward.spec, directions=("bwd",))
        return replace(spec, deterministic=self.deterministic)


@dataclass(frozen=True)
class PagedCase:
    """Queries of four sequences over pages of so many positions: packed with gaps, or `queries`
    each. `scored`: with ALiBi, a softcap and sinks; no `splits`: as prompts; `kv_dtype`: of pages
    of 8 bits, with a descale a head."""

    d: int
    page: int
    splits: int
    packed: bool = False
    d_v: int | None = None
    scored: bool = False
    queries: int = 2
    kv_dtype: str = ""

    def __str__(self) -> str:
        kind = ("packed" if self.packed else f"dense{self.queries}") + "-scored" * self.scored
        kind += f"-kv-{self.kv_dtype}" if self.kv_dtype else ""
        return f"paged-d{self.d}x{self.d_v or self.d}-page{self.page}-splits{self.splits}-{kind}"

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernels that serve the case."""
        return attngen.AttentionSpec(
            self.d, self.d_v, layout=self.layout, mask="causal", decode=self.splits > 0,
            kv_dtype=self.kv_dtype or None,
            alibi=self.scored, softcap=self.scored,
            softmax="learnable" if self.scored else "vanilla",
        )  # fmt: skip

    @property
    def layout(self) -> str:
        return f"paged_kv_{'thd' if self.packed else 'bshd'}_bshd_bshd"

    def arguments(self) -> dict:
        """Every tensor of the call and its layout and mask; pages of no sequence are NaN."""
        lengths = (300, 0, 1, 2 * self.page + 1)
        width = -(-max(lengths) // self.page)
        k, v = (
            oracle.randn(4 * width + 1, self.page, 2, d, seed=n)
            for n, d in ((1, self.d), (2, self.d_v or self.d))
        )
        k[-1], v[-1] = float("nan"), float("nan")
        if self.kv_dtype:
            k, v = (kv_cache.narrow(x, self.kv_dtype) for x in (k, v))
        table = torch.randperm(4 * width).int().view(4, width)
        shape = (30, 8, self.d) if self.packed else (4, self.queries, 8, self.d)
        found = {"q": oracle.randn(*shape, seed=3), "k": k, "v": v}
        found |= {"seqused_kv": torch.tensor(lengths, dtype=torch.int32), "page_table": table}
        if self.kv_dtype:
            found |= kv_cache.make_scales("head", 4, 2)
        if self.packed:
            ends = torch.tensor([[0, 20, 21, 22, 25], [2, 22, 24, 25, 29]], dtype=torch.int32)
            found |= {"cu_seqlens_q": ends[0], "cu_seqlens_q_padded": ends[1]}
        if self.scored:
            found |= {"alibi_slopes": torch.linspace(0.1, 1, 8), "sink": torch.linspace(-2, 2, 8)}
            found |= {"softcap": 5.0, "softmax": "learnable"}
        return {**found, "layout": self.layout, "mask": "causal_bottom_right"}


@dataclass(frozen=True)
class SoftcapCase:
    """A forward with a softcap, beside which scores are low in some blocks of some warps alone."""

    variant: Variant

    def __str__(self) -> str:
        return f"some-low-{self.variant}"

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernels that serve the case, of usual and of short calls."""
        return self.variant.spec

    def operands(self) -> list[Tensor]:
        """A few large keys, in no two warps' rows the same."""
        q, k, v = self.variant.case.operands()
        k[:, 37::389] *= 12
        return [q, k, v]


@dataclass(frozen=True)
class PartsCase:
    """Keys in two parts: an output that goes on from the first one's, and sums of dQ of both."""

    d: int
    lengths: tuple[int, int]
    cut: int = 70

    def __str__(self) -> str:
        return f"in-parts-d{self.d}-{'x'.join(map(str, self.lengths))}-cut{self.cut}"

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernels of its forward."""
        return attngen.AttentionSpec(head_dim=self.d, out_dtype="fp32", continues=True)

    @property
    def parts(self) -> tuple[slice, slice]:
        """Keys of each part."""
        return slice(0, self.cut), slice(self.cut, None)


@dataclass(frozen=True)
class LargeCase:
    """A call with large numbers in its bias, and its gradients: rows whose LSE shows no sum have
    sums of their own."""

    call: Large
    deterministic: bool = False

    def __str__(self) -> str:
        return f"large-{self.call}-{self.call.lengths[0]}" + "-deterministic" * self.deterministic

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernels that serve the case."""
        return replace(self.call.spec, deterministic=self.deterministic)


@dataclass(frozen=True)
class LargeSplitCase:
    """Few queries whose products are small whole numbers times 2^(2 * power), many of them equal:
    split keys, beside which there is no bias."""

    d: int
    power: int
    splits: int

    def __str__(self) -> str:
        return f"large-products-d{self.d}-power{self.power}-splits{self.splits}"

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernels that serve the case."""
        return attngen.AttentionSpec(self.d, mask="causal", decode=True)

    def operands(self) -> list[Tensor]:
        """q, k, v: four queries and 290 keys of two sequences."""
        q, k = (
            whole(2, rows, heads, self.d, seed=rows).bfloat16() * 2.0**self.power
            for rows, heads in ((4, 8), (290, 2))
        )
        return [q, k, oracle.randn(2, 290, 2, self.d, dtype=torch.bfloat16, seed=3)]


@dataclass(frozen=True)
class FoldedCase:
    """A call by grids whose second and third axis have two places, fewer than it wants."""

    case: Call | LargeCase

    def __str__(self) -> str:
        return f"folded-{self.case}"

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernels that serve the case."""
        return self.case.spec


@dataclass(frozen=True)
class Fp8AddedCase:
    """A forward in 8 bits with dropout, or with a bias of this broadcast behind the scale."""

    case: Fp8Case
    dropout: float = 0.0
    bias: str = ""

    def __str__(self) -> str:
        dropped = f"-dropout{self.dropout}" if self.dropout else ""
        return f"{self.case}{dropped}" + (f"-bias-{self.bias}" if self.bias else "")

    @property
    def spec(self) -> attngen.AttentionSpec:
        """The kernels that serve the case."""
        bias = "post_scale" if self.bias else "none"
        return replace(self.case.spec, dropout=self.dropout > 0, bias=bias)

    def arguments(self) -> dict:
        """Keyword arguments of `attention`."""
        batch, heads, _ = self.case.heads
        found = dict(self.case.arguments)
        if self.dropout:
            found |= {"dropout_p": self.dropout, "rng_state": rng_state("cpu")}
        if self.bias:
            found["bias"] = bias_of(self.bias, (batch, heads, *self.case.lengths))
        return found


SMALL, SHORT = (130, 200), (1, 1)
LOW = Case(128, 128, mask="causal_bottom_right", lengths=(330, 900))
CASES = [
    Case(64, 64, lengths=SMALL),
    Case(64, 64, mask="causal", lengths=SMALL),
    Case(64, 64, mask="causal_bottom_right", lengths=(200, 130)),
    Case(64, 64, window=(50, 20), lengths=SMALL),
    Case(64, 64, mask="causal", window=(40, 0), lengths=SMALL, layout="sbhd"),
    Case(64, 64, "fp16", mask="causal", lengths=SMALL, layout="bhsd"),
    Case(64, 64, mask="causal", lengths=SHORT),
    Case(64, 64, mask="causal", lengths=SMALL, partial=True),
    Case(128, 128, lengths=SMALL),
    Case(128, 128, mask="causal", lengths=SMALL, heads=(2, 6, 2)),
    Case(128, 128, window=(30, -1), lengths=SMALL),
    Case(128, 128, mask="causal", window=(0, 0), lengths=SMALL),
    Case(128, 128, lengths=SHORT),
    Case(128, 128, lengths=SMALL, partial=True),
    Case(128, 128, mask="causal", lengths=(130, 130), heads=(2, 80, 8)),  # 320 tiles
    Case(64, 64, lengths=(130, 130), heads=(2, 80, 8)),
    Case(64, 64, window=(5, 5), lengths=(200, 30), heads=(2, 80, 8)),  # and tiles that see nothing
    Case(128, 128, mask="causal", window=(70, 0), lengths=(200, 200), heads=(2, 80, 8)),
    Case(256, 256, lengths=SMALL),
    Case(256, 256, mask="causal", lengths=SMALL),
    Case(256, 256, "fp16", mask="causal", window=(40, 0), lengths=SMALL),
    Case(192, 128, mask="causal", lengths=SMALL, heads=(2, 8, 1)),
    Case(128, 192, lengths=SMALL),
    Case(72, 40, mask="causal", lengths=SMALL),
    Case(8, 8, lengths=SMALL),
    Case(8, 8, mask="causal", lengths=SHORT),
    Case(8, 256, lengths=(65, 127)),
    Case(512, 512, mask="causal", lengths=SMALL),
    Case(576, 512, lengths=(65, 127)),
    Case(320, 264, mask="causal_bottom_right", lengths=(200, 130)),
    Case(384, 512, lengths=(65, 127), partial=True),
    Case(300, 77, mask="causal", lengths=SMALL),  # threads copy rows, and no CTAs are pairs
    Fp8Case(64, 64, lengths=SMALL),
    Fp8Case(64, 64, mask="causal", lengths=SMALL, out_dtype="e4m3", scaled=True),
    Fp8Case(64, 64, mask="causal", lengths=SHORT, heads=(1, 1, 1)),
    Fp8Case(128, 128, lengths=SMALL, kv_dtype="e5m2", out_dtype="fp16"),
    Fp8Case(128, 128, lengths=(130, 2300), heads=(1, 2, 1)),  # sums join a mean, twice
    Fp8Case(256, 256, mask="causal_bottom_right", lengths=(130, 2300), heads=(1, 2, 1)),
    Fp8Case(128, 128, mask="causal", lengths=SMALL, heads=(2, 6, 2), scaled=True),
    Fp8Case(128, 128, window=(50, 20), lengths=SMALL, out_dtype="e5m2", layout="sbhd"),
    Fp8Case(128, 128, mask="causal", lengths=(130, 130), heads=(2, 80, 8)),  # 320 tiles
    Fp8Case(256, 256, lengths=SMALL, out_dtype="e4m3"),
    Fp8Case(256, 256, mask="causal", window=(40, 0), lengths=SMALL, layout="bhsd"),
    Fp8Case(192, 128, mask="causal", lengths=SMALL),
    Fp8Case(80, 48, mask="causal_bottom_right", lengths=(200, 130)),
    Fp8Case(16, 16, "e5m2", lengths=SMALL),
    Fp8Case(16, 256, lengths=(65, 127)),
    BackwardCase(Case(64, 64, lengths=SMALL)),
    BackwardCase(Case(64, 64, mask="causal", lengths=SMALL, heads=(2, 6, 2)), lse=True),
    BackwardCase(Case(64, 64, "fp16", window=(50, 20), lengths=SMALL, layout="sbhd")),
    BackwardCase(Case(512, 512, mask="causal", lengths=SMALL, heads=(1, 2, 1))),
    BackwardCase(Case(320, 448, "fp16", lengths=(65, 127), heads=(1, 2, 2))),
    BackwardCase(Case(64, 64, lengths=(1, 2))),  # of one key, dQ is zero: no error is allowed
    BackwardCase(Case(64, 64, mask="causal", lengths=(200, 300), heads=(2, 6, 2)), True),
    BackwardCase(Case(128, 128, lengths=SMALL), lse=True),
    BackwardCase(Case(128, 128, mask="causal", lengths=SMALL, heads=(1, 8, 1), layout="bhsd")),
    BackwardCase(Case(128, 128, mask="causal_bottom_right", lengths=(200, 130)), lse=True),
    BackwardCase(Case(128, 128, mask="causal", window=(40, 0), lengths=SMALL)),
    # Up to three tiles of keys a block of queries, whose sums the last one joins.
    BackwardCase(Case(128, 128, mask="causal", window=(200, 0), lengths=(400, 400)), True),
    BackwardCase(Case(128, 128, lengths=(200, 300)), True),
    BackwardCase(Case(128, 128, mask="causal", lengths=(130, 300), heads=(1, 80, 80)), True),
    # 320 tiles of query heads, which add to those of 32 key heads, in an order and in none.
    BackwardCase(Case(64, 64, lengths=(130, 130), heads=(2, 80, 8)), lse=True),
    BackwardCase(Case(128, 128, mask="causal", lengths=(130, 130), heads=(2, 80, 8)), True),
    BackwardCase(Case(256, 256, lengths=SMALL)),
    BackwardCase(Case(256, 256, mask="causal", lengths=SMALL, heads=(2, 4, 2)), lse=True),
    BackwardCase(Case(256, 256, mask="causal_bottom_right", lengths=(200, 70))),
    BackwardCase(Case(192, 128, mask="causal", lengths=SMALL, heads=(1, 8, 2))),
    BackwardCase(Case(72, 40, mask="causal", lengths=(65, 127))),
    BackwardCase(Case(24, 40, mask="causal", lengths=SMALL), True),
    Variant(Case(128, 128, mask="causal", lengths=SMALL, heads=(2, 6, 2)), "bh", max_logit=True),
    Variant(Case(64, 64, lengths=SMALL), "h", "learnable", deterministic=True),
    Variant(Case(128, 128, window=(50, 20), lengths=SMALL), "", "off_by_one", 1.5),
    Variant(Case(256, 256, mask="causal", lengths=SMALL), "default", "learnable", 30.0, True),
    *(SoftcapCase(Variant(replace(LOW, d=d, d_v=d), softcap=30.0)) for d in (64, 128, 256)),
    SoftcapCase(Variant(replace(LOW, window=(700, 0)), softcap=30.0)),
    SoftcapCase(Variant(LOW, "default", softcap=30.0)),
    PagedCase(128, 64, 3),
    PagedCase(128, 16, 1, packed=True),
    PagedCase(64, 8, 5, packed=True),
    PagedCase(256, 128, 2),
    PagedCase(128, 3, 2, scored=True),
    PagedCase(64, 48, 1, packed=True, scored=True),
    PagedCase(576, 64, 3, d_v=512),
    PagedCase(64, 16, 0, queries=130),
    PagedCase(128, 48, 0, queries=130, scored=True),
    PagedCase(64, 16, 1, packed=True, d_v=384, scored=True),
    PagedCase(128, 64, 3, kv_dtype="e4m3"),
    PagedCase(128, 3, 2, scored=True, kv_dtype="e5m2"),
    PagedCase(64, 48, 1, kv_dtype="e4m3"),
    PagedCase(256, 128, 2, kv_dtype="e4m3"),
    PagedCase(576, 64, 3, d_v=512, kv_dtype="e4m3"),
    PagedCase(128, 48, 0, queries=130, kv_dtype="e4m3"),
    PagedCase(64, 16, 0, queries=130, scored=True, kv_dtype="e5m2"),
    PagedCase(256, 64, 0, queries=130, kv_dtype="e4m3"),
    Case(128, 128, lengths=(3, 300), heads=(2, 8, 2)),  # few queries, dense
    Call("thd", (130, 0, 70), (70, 9, 200), gaps=True, d=128, heads=(4, 2), mask="causal"),
    # Tiles of query heads, beside lengths and under a window.
    Call("thd", (130, 0, 70), (200, 9, 130), gaps=True, d=128, heads=(80, 8), mask="causal"),
    Call("bshd", (300,), (400,), d=64, heads=(16, 1), mask="causal", window=(100, 0)),
    Call("thd", (130, 0, 70), gaps=True, d=256, heads=(4, 2), mask="causal_bottom_right"),
    Call("bshd", (0, 130, 64), (7, 70, 200), room=(140, 210), d=64, mask="padding_causal"),
    Call("bhsd", (130,), (200,), d=128, mask="causal", more=Features(dropout=0.2)),
    Call("bhsd", (200,), (130,), d=64, more=Features(seen=0.5)),
    Call("thd", (130, 1), (9, 200), d=256, more=Features("h", 1.5, "learnable", 0.1, 0.5)),
    Call("thd", (130, 1), (9, 200), d=128, more=Features("h", 1.5, "learnable", 0.1, 0.5)),
    Call("bshd", (130,) * 2, (77,) * 2, d=33, d_v=17, heads=(4, 2), mask="causal"),
    Call("sbhd", (130,) * 2, (77,) * 2, d=68, heads=(3, 1), loose="rows2"),
    Call("thd", (130, 0, 7), (70, 9, 200), gaps=True, d=124, d_v=60, mask="causal"),
    Call("bhsd", (70,), (130,), d=128, mask="causal", loose="apart"),
    Call("bsh3d", (130, 64), room=(140, 140), d=128, mask="padding_causal", loose="start4"),
    Call("bshd", (70,) * 2, (201,) * 2, d=255, d_v=130, heads=(2, 1), mask="causal"),
    Call("bshd", (70,), (130,), d=100, mask="causal", loose="start1",
         more=Features(bias="post_scale")),
    *(
        Call(layout, q_lens, kv_lens, room=room, gaps=layout == "thd", d=d, d_v=d_v, heads=(4, 2),
             mask=mask, more=Features(bias=kind, bias_shape=shape, softcap=softcap))
        # Keys end within a chunk of 16 bytes, beside one row for all queries, too.
        for layout, q_lens, kv_lens, room, d, d_v, mask, kind, shape, softcap in (
            ("bshd", (130,) * 2, (200,) * 2, None, 128, 128, "causal", "post_scale", "1hss", 0.0),
            ("sbhd", (130,) * 2, (77,) * 2, None, 128, 72, "none", "pre_scale", "bhss", 0.0),
            ("bshd", (130,) * 2, (136,) * 2, None, 96, 96, "causal", "pre_scale", "bhss", 0.0),
            ("bshd", (70,) * 2, (201,) * 2, None, 64, 64, "causal", "post_scale", "b1ss", 0.0),
            ("bhsd", (200,) * 2, (133,) * 2, None, 256, 256, "causal", "pre_scale", "111s", 1.5),
            ("thd", (130, 0, 7), (70, 9, 200), None, 128, 128, "causal", "post_scale", "11ss", 0.0),
            ("bshd", (0, 130), (7, 200), (140, 213), 64, 64, "padding", "pre_scale", "111s", 0.0),
        )
    ),
    LargeCase(Large(64, "masked", lengths=(70, 100))),
    LargeCase(Large(64, "levels", "pre_scale", lengths=(130, 70)), True),
    LargeCase(Large(128, "masked", lengths=(130, 130), more={"mask": "causal"})),
    LargeCase(Large(128, "bits", "pre_scale", lengths=(70, 200)), True),
    LargeCase(Large(128, "levels", lengths=(3, 200))),  # few queries beside a bias leave keys whole
    LargeCase(Large(256, "masked", lengths=(70, 100))),
    LargeCase(Large(64, "offsets", lengths=(130, 100), packed=True), True),
    LargeCase(Large(128, "masked", lengths=(100, 130), packed=True, more={"mask": "causal"})),
    LargeCase(Large(256, "levels", "pre_scale", lengths=(70, 100), packed=True)),
    LargeSplitCase(128, 12, 3),
    LargeSplitCase(64, 24, 1),
    FoldedCase(Call("thd", (70, 130, 0, 33), d=128, mask="causal", heads=(4, 2), gaps=True)),
    FoldedCase(Call("bshd", (130,) * 3, (90,) * 3, d=256, heads=(3, 1))),
    FoldedCase(LargeCase(Large(64, "masked", lengths=(70, 100), heads=(3, 2, 1)))),
    *APPENDS,
    *FP8_BACKWARDS,
    *FP8_MIXED[:3],
    PartsCase(64, SMALL),
    PartsCase(128, SMALL),
    *PLACED_CASES,
    *LEARNED_CASES,
    *MADE_CASES,
    *(Fp8AddedCase(case, dropout=p) for case, p in FP8_DROPOUTS),
    *(Fp8AddedCase(case, more.get("dropout_p", 0.0), shape) for case, shape, _, more in FP8_BIASES),
    *SOME,
]  # fmt: skip

"""Calls whose lengths, offsets and page tables have entries that are garbage."""

from __future__ import annotations

from .hostile import HIGHEST, LOWEST, Hostile, HostilePages
from .varlen import Call, Features

LENGTHS, OTHER = (70, 0, 130, 33, 64), (40, 90, 65, 0, 150)
TOKENS = sum(LENGTHS)
Q, KV, Q_AT, KV_AT = "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"
# Of one call: entries of cu_seqlens_q and cu_seqlens_kv, each of which tells two sequences.
ENTRIES = [
    ((Q, 2, LOWEST),), ((Q, 2, HIGHEST),), ((KV, 3, HIGHEST),), ((KV, 2, -1),),
    ((Q, 5, TOKENS + 1),), ((Q, 5, HIGHEST),), ((Q, 0, LOWEST),), ((Q, 0, -300),), ((Q, 0, 200),),
    ((Q, 2, 5),), ((Q, 3, 290),), ((KV, 1, 300),),
    ((Q, 1, HIGHEST), (Q, 3, LOWEST), (KV, 2, HIGHEST), (KV, 4, LOWEST)),
    tuple((name, i, HIGHEST - i) for name in (Q, KV) for i in range(6)),
    tuple((name, i, 600 - 120 * i) for name in (Q, KV) for i in range(6)),
]  # fmt: skip
GAPS = [
    ((Q_AT, 2, LOWEST),), ((Q_AT, 2, HIGHEST),), ((KV_AT, 3, -1),), ((Q_AT, 4, TOKENS),),
    ((Q_AT, 2, 250),), ((Q_AT, 3, 0),), ((Q_AT, 0, 330), (Q_AT, 1, 329)),
    ((Q, 2, HIGHEST), (Q_AT, 3, LOWEST), (KV, 5, LOWEST)),
    tuple((name, i, 0) for name in (Q_AT, KV_AT) for i in range(5)),
    tuple((name, i, 400 - 80 * i) for name in (Q_AT, KV_AT) for i in range(5)),
]  # fmt: skip
WORST = ((Q, 2, HIGHEST), (Q, 4, 7), (KV, 1, LOWEST), (KV, 3, 10**6))
USED = [
    (("seqused_q", 1, LOWEST), ("seqused_kv", 0, HIGHEST), ("seqused_kv", 2, -1)),
    (("seqused_q", 0, HIGHEST), ("seqused_q", 2, -5), ("seqused_kv", 3, 1 << 30)),
]


def packed(**changes) -> Call:
    """A call of packed tokens."""
    fields = {"layout": "thd", "q_lens": LENGTHS, "kv_lens": OTHER, "mask": "causal", **changes}
    return Call(**fields)


CALLS = [
    *(Hostile(packed(d=64), faults) for faults in ENTRIES),
    *(Hostile(packed(d=128, gaps=True, heads=(4, 2)), faults) for faults in GAPS),
    Hostile(packed(d=128, mask="none"), WORST),
    Hostile(packed(d=128, window=(30, 0)), WORST),
    Hostile(packed(d=64, window=(30, 10), mask="none", bottom_right=True), WORST),
    Hostile(packed(d=256), WORST),
    Hostile(packed(d=256, gaps=True), GAPS[7]),
    *(Hostile(packed(d=d, gaps=gaps), faults, deterministic=True)
      for d in (64, 128) for gaps, faults in ((False, ENTRIES[-1]), (True, GAPS[-1]))),
    Hostile(packed(d=64, window=(30, 0), gaps=True), GAPS[-2], deterministic=True),
    Hostile(packed(d=128, heads=(4, 1), mask="none"), ENTRIES[-1], deterministic=True),
    Hostile(packed(d=64, q_lens=LENGTHS * 8, kv_lens=OTHER * 8), WORST),
    Hostile(packed(d=64, q_lens=LENGTHS * 8, kv_lens=OTHER * 8, gaps=True),
            ((Q_AT, 7, HIGHEST), (Q_AT, 20, 0), (KV_AT, 33, LOWEST), (KV, 12, LOWEST))),
    Hostile(packed(d=128, dtype="e4m3"), WORST),
    Hostile(packed(d=64, dtype="e4m3", gaps=True), GAPS[7]),
    Hostile(packed(d=72, loose="start1", gaps=True), GAPS[7]),
    *(Hostile(packed(d=64, more=more), WORST) for more in (
        Features(bias="post_scale", bias_shape="bhss"), Features(bias="pre_scale"),
        Features(dropout=0.2), Features(seen=0.7), Features(alibi="bh", softcap=20.0),
        Features(softmax="learnable"), Features(max_logit=True))),
    Hostile(packed(d=128, window=(20, 5), mask="none", more=Features(seen=0.7)), ENTRIES[10]),
    Hostile(packed(layout="t3hd", kv_lens=(), d=64), ((Q, 2, HIGHEST), (Q, 4, 3))),
    Hostile(Call("thd_bshd_bshd", LENGTHS, (90, 0, 128, 5, 70), room=(0, 128), d=128),
            ((Q, 2, LOWEST), ("seqused_kv", 0, HIGHEST), ("seqused_kv", 3, LOWEST))),
    *(Hostile(Call("bshd", (70, 0, 128, 33), (90, 0, 5, 70), room=(128, 100), d=d, mask=mask),
              faults) for d in (64, 128) for mask in ("causal", "none") for faults in USED),
    # Nothing is wrong but that windows of the last queries are behind all keys.
    *(Hostile(Call("bshd", (700, 700), (64, 64), d=d, window=(20, 0), more=Features(seen=0.7)), ())
      for d in (64, 128)),
    Hostile(Call("bshd", (70, 0, 128, 33), (90, 0, 5, 70), room=(128, 100), d=64,
                 more=Features(seen=0.7, bias="post_scale")), USED[0], deterministic=True),
]  # fmt: skip
TABLE = (
    ("page_table", (0, 1), LOWEST),
    ("page_table", (0, 4), HIGHEST),
    ("page_table", (3, 0), -1),
    ("page_table", (3, 1), 20),
    ("page_table", (3, 2), HIGHEST),
    ("page_table", (1, 4), LOWEST),
)
LENGTHS_OF_PAGES = (
    ("seqused_kv", (0,), HIGHEST),
    ("seqused_kv", (2,), LOWEST),
    ("seqused_kv", (3,), 81),
)
BEYOND = (("seqused_kv", (0,), LOWEST), ("seqused_kv", (3,), HIGHEST))
QUERIES = (("cu_seqlens_q", (2,), HIGHEST), ("cu_seqlens_q", (0,), LOWEST))
PAGES = [
    HostilePages(faults, splits, packed, page)
    for faults in (TABLE, LENGTHS_OF_PAGES)
    for splits, packed, page in (
        (0, False, 16),
        (0, True, 16),
        (1, True, 16),
        (3, False, 16),
        (2, True, 5),
    )
]
PAGES += [
    *(HostilePages(BEYOND, 0, packed, 256, reach=70) for packed in (False, True)),
    *(HostilePages(QUERIES, splits, True) for splits in (0, 1, 3)),
    *(
        HostilePages((*TABLE, *LENGTHS_OF_PAGES), splits, True, kv_dtype="e4m3")
        for splits in (0, 2)
    ),
    HostilePages((*TABLE, *LENGTHS_OF_PAGES, *QUERIES), 2, True, 64, d=128),
]
# A few of each kind, for tools that look at every access.
SOME = [*CALLS[1::4], *PAGES[::3]]

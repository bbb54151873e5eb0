"""Rounds of heads whose dS a backward keeps in memory."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from attngen import AttentionSpec
from attngen.call.kept_ds import VARIABLE, considered, in_rounds, kept_by, makes_ds, reads_ds
from attngen.compiler.builder import render_problem
from attngen.errors import SpecError
from attngen.fragments import features
from attngen.kernels.plan import plans
from attngen.kernels.selection import name_of
from attngen.runtime.load import LoadedKernel
from attngen.runtime.run_time import Extent
from attngen.spec.resolve import resolve
from attngen.targets.target import DEFAULT

DQ, KEPT = "sm90_bwd_dq", "sm90_bwd_dq_kept"


def kernels_of(**fields: object) -> tuple[LoadedKernel, ...]:
    spec = AttentionSpec(directions=("bwd",), **fields)  # type: ignore[arg-type]
    problem, *_ = resolve(spec, features.scan())
    found = (render_problem(problem, each).kernel for each in plans(problem, DEFAULT.name))
    return tuple(LoadedKernel("handle", kernel, 0, 132) for kernel in found)


def extents_of(
    length: int, heads: int, heads_kv: int, batch: int = 1, dim: int = 256
) -> dict[str, Extent]:
    def extent(count: int) -> Extent:
        return Extent(batch, length, count, dim, 0, 0, dim)

    return {"q": extent(heads), "k": extent(heads_kv), "v": extent(heads_kv)}


def launched(kernels: tuple[LoadedKernel, ...]) -> tuple[LoadedKernel, ...]:
    """Without the kernel that makes dS anew."""
    return tuple(x for x in kernels if name_of(x.kernel) != DQ)


def names(kernels: tuple[LoadedKernel, ...]) -> list[str]:
    return [name_of(each.kernel) for each in kernels]


@pytest.mark.parametrize(
    ("length", "heads", "heads_kv", "batch", "rounds"),
    [
        (4096, 8, 8, 4, [32]),
        (16384, 8, 8, 1, [2, 2, 2, 2]),
        (16384, 16, 4, 2, None),  # one key head has the dS of four
        (16384, 6, 3, 1, [1, 1, 1]),
        (16384, 5, 5, 1, [2, 2, 1]),
        (25000, 1, 1, 1, [1]),
        (32768, 1, 1, 1, None),
        (1, 1, 1, 1, [1]),
    ],
)
def test_rounds_have_as_many_heads_as_memory_may_hold(
    length, heads, heads_kv, batch, rounds
) -> None:
    extents = extents_of(length, heads, heads_kv, batch)
    found = considered(kernels_of(head_dim=256), extents)
    assert (KEPT in names(found)) == (rounds is not None)
    if rounds is None:
        found = tuple(x for x in found if not reads_ds(x))
    kept = kept_by(launched(found) if rounds else found, extents)
    assert [part.heads for part in kept.rounds] == (rounds or [])
    assert bool(kept.numbers) == bool(rounds)
    if rounds:
        rows = -(-length // 192) * 192
        a_head = heads // heads_kv * rows * 128 * -(-length // 64)
        assert kept.numbers == {"kept_rows": rows, "ds_bytes": max(rounds) * a_head}
        assert [part.before for part in kept.rounds] == [
            sum(rounds[:place]) for place in range(len(rounds))
        ]


def test_each_round_makes_ds_and_then_reads_them() -> None:
    extents = extents_of(16384, 4, 4)
    kernels = launched(kernels_of(head_dim=256))
    found = [*in_rounds(kernels, kept_by(kernels, extents))]
    assert [name_of(each.kernel) for each, _ in found] == [
        "bwd_prepare",
        *["sm90_bwd_dkv", KEPT] * 2,
    ]
    numbers: list[Mapping[str, int]] = [each for _, each in found]
    assert numbers == [
        {},
        *[{"round_heads": 2, "heads_before": 0}] * 2,
        *[{"round_heads": 2, "heads_before": 2}] * 2,
    ]


def test_the_environment_says_how_much_memory_there_is(monkeypatch) -> None:
    extents, kernels = extents_of(4096, 8, 8), launched(kernels_of(head_dim=256))
    assert len(kept_by(kernels, extents).rounds) == 1
    monkeypatch.setenv(VARIABLE, "100")
    assert [part.heads for part in kept_by(kernels, extents).rounds] == [3, 3, 2]
    monkeypatch.setenv(VARIABLE, "0")
    assert KEPT not in names(considered(kernels, extents))
    monkeypatch.setenv(VARIABLE, "1 GB")
    with pytest.raises(SpecError, match="ATTNGEN_KEPT_MEGABYTES=1 GB: expected whole megabytes"):
        considered(kernels, extents)


@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 128},
        {"head_dim": 256, "layout": "thd"},
        {"head_dim": 256, "bias": "post_scale"},
        {"head_dim": 256, "mask": "padding"},
    ],
    ids=str,
)
def test_other_backwards_keep_nothing(fields) -> None:
    kernels = kernels_of(**fields)
    assert not any(makes_ds(each) or reads_ds(each) for each in kernels)
    extents = extents_of(128, 2, 2)
    assert considered(kernels, extents) == kernels
    assert not kept_by(kernels, extents).rounds
    assert [(each, {}) for each in kernels] == [*in_rounds(kernels, kept_by(kernels, extents))]

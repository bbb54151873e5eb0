"""Appends to a cache against loops over tokens; what is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen import SpecError
from attngen.call.append import AppendCall
from attngen.reference import append as definition
from tests.support.te_kit import randn

BEFORE, NEW, HEADS, DIM = [3, 0, 6], [2, 3, 1], 2, 32
ANGLES = [randn(9, 8, seed=seed).float() for seed in (5, 6)]


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ends_of(counts: list[int]) -> Tensor:
    return torch.nn.functional.pad(integers(*counts).cumsum(0), (1, 0)).int()


def tokens(seed: int, dim: int = DIM) -> list[Tensor]:
    return [randn(n, HEADS, dim, seed=seed + n).float() for n in NEW]


def laid_out(parts: list[Tensor], layout: str) -> Tensor:
    if layout == "thd":
        return torch.cat(parts)
    padded = torch.stack([torch.cat([x, x.new_full((3 - len(x), *x.shape[1:]), 9)]) for x in parts])
    return padded.permute(["bshd".index(axis) for axis in layout])


def turned(x: Tensor, position: int, interleaved: bool) -> Tensor:
    """A token [h, d] of which 16 columns turn, a pair at a time."""
    cosines, sines = (each[min(position, 8)] for each in ANGLES)
    out = x.clone()
    for pair in range(8):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 8)
        out[:, a] = x[:, a] * cosines[pair] - x[:, b] * sines[pair]
        out[:, b] = x[:, b] * cosines[pair] + x[:, a] * sines[pair]
    return out


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
@pytest.mark.parametrize("interleaved", [None, False, True])
def test_tokens_go_behind_those_that_are_there(layout: str, interleaved: bool | None) -> None:
    table = integers(6, 1, 4, 2, 0, 5, 3, 7, 8).reshape(3, 3)
    caches = [torch.full((9, 4, HEADS, dim), -1.0) for dim in (DIM, 8)]
    k, v, q = tokens(10), tokens(20, 8), tokens(30)
    rotary: dict[str, Any] = {}
    if interleaved is not None:
        rotary = dict(zip(("rotary_cos", "rotary_sin"), ANGLES, strict=True))
        rotary |= {"rotary_interleaved": interleaved, "q": laid_out(q, layout)}
    expected = [x.clone() for x in caches]
    for b, count in enumerate(NEW):
        for i in range(count):
            page, row = divmod(BEFORE[b] + i, 4)
            at = int(table[b, page]), row
            plain = interleaved is None
            expected[0][at] = k[b][i] if plain else turned(k[b][i], BEFORE[b] + i, interleaved)
            expected[1][at] = v[b][i]
    found = attngen.append_kv(
        *caches, laid_out(k, layout), laid_out(v, layout), integers(*BEFORE), layout=layout,
        cu_seqlens=ends_of(NEW), page_table=table, **rotary,
    )  # fmt: skip
    for got, wanted in zip(caches, expected, strict=True):
        assert torch.equal(got, wanted)
    if interleaved is None:
        assert found is None
        return
    want = [
        torch.stack([turned(x, BEFORE[b] + i, interleaved) for i, x in enumerate(q[b])])
        for b in range(3)
    ]
    at = ["bshd".index(axis) for axis in layout] if layout != "thd" else None
    rows = found.split(NEW) if at is None else found.permute([layout.index(a) for a in "bshd"])
    for got, wanted, n in zip(rows, want, NEW, strict=True):
        assert torch.equal(got[:n], wanted)


def test_narrow_caches_hold_scaled_numbers_of_rows() -> None:
    k, v = (randn(2, 1, HEADS, 16, seed=seed).bfloat16() for seed in (1, 2))
    caches = [torch.zeros(2, 4, HEADS, 16).to(torch.float8_e4m3fn) for _ in "kv"]
    scales = torch.tensor([[1.0, 400.0], [8.0, 0.5]])
    attngen.append_kv(*caches, k, v, integers(1, 3), scale_k=scales, scale_v=scales.view(-1)[2:3])
    for b, row in ((0, 1), (1, 3)):
        wide = (k[b, 0].float() * scales[b][:, None]).clamp(-448, 448)
        assert torch.equal(caches[0][b, row].float(), wide.to(torch.float8_e4m3fn).float())
        assert torch.equal(
            caches[1][b, row].float(), (v[b, 0].float() * 8).to(caches[1].dtype).float()
        )
    assert sum(int(x.float().ne(0).any(-1).any(-1).sum()) for x in caches) == 4


def test_queries_turn_at_the_start_of_their_tokens() -> None:
    q = laid_out(tokens(40), "bshd")
    rotary: dict[str, Any] = dict(zip(("rotary_cos", "rotary_sin"), ANGLES, strict=True))
    caches = [torch.zeros(3, 9, HEADS, DIM) for _ in "kv"]
    found = attngen.append_kv(*caches, q, q, integers(*BEFORE), q=q, rotary_at_start=True, **rotary)
    assert found is not None
    for b, i in ((0, 2), (1, 1), (2, 0)):
        assert torch.equal(found[b, i], turned(q[b, i], BEFORE[b], False))


def test_no_token_and_no_place_change_nothing() -> None:
    caches = [randn(2, 4, HEADS, DIM, seed=seed).float() for seed in (1, 2)]
    before = [x.clone() for x in caches]
    new = randn(2, 3, HEADS, DIM, seed=3).float()
    attngen.append_kv(*caches, new, new, integers(2, 2), cu_seqlens=ends_of([0, 0]))
    attngen.append_kv(*caches, new[:, :0], new[:, :0], integers(2, 2))
    attngen.append_kv(*caches, new, new, integers(4, -9), page_table=integers(7, 0)[:, None])
    assert all(map(torch.equal, caches, before))


def test_padding_before_packed_tokens_is_left_out() -> None:
    caches, new = [torch.zeros(2, 9, HEADS, DIM) for _ in "kv"], torch.ones(3, HEADS, DIM)
    ends = integers(1, 2, 3)
    attngen.append_kv(*caches, new, new, integers(4, 0), layout="thd", cu_seqlens=ends)
    for x in caches:
        assert x.any(-1).any(-1).nonzero().tolist() == [[0, 4], [1, 0]]


ROWS = torch.zeros(2, 4, HEADS, DIM)
NEW_ROWS = torch.zeros(2, 1, HEADS, DIM)
LENGTHS = integers(0, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "tshd"}, "layout 'tshd'; allowed: bshd"),
        ({"k": NEW_ROWS[0]}, "k has 4 axes"),
        ({"lengths": 3}, "lengths needs a tensor; got 3"),
        ({"layout": "thd", "k": NEW_ROWS[0], "v": NEW_ROWS[0]}, "thd' needs cu_seqlens"),
        ({"v": NEW_ROWS[:, :, :1]}, "k and v differ"),
        ({"q": NEW_ROWS[:1], "rotary_cos": ANGLES[0], "rotary_sin": ANGLES[1]}, "q differs from k"),
        ({"v_cache": ROWS[:1]}, "caches differ"),
        ({"k_cache": ROWS[:, :0], "v_cache": ROWS[:, :0]}, "caches need a row"),
        ({"k": NEW_ROWS[..., :8]}, "k_cache needs heads of 2, 8"),
        ({"k_cache": ROWS[:1], "v_cache": ROWS[:1]}, "2 sequences in a cache of 1"),
        ({"lengths": None}, "one of lengths and cu_seqlens_all"),
        ({"lengths": LENGTHS.long()}, "lengths needs int32"),
        ({"lengths": LENGTHS[:1]}, r"lengths needs \[2\] or more"),
        ({"page_table": LENGTHS}, r"page_table needs \[2, n\]"),
        ({"rotary_cos": ANGLES[0]}, "come together"),
        ({"q": NEW_ROWS}, "there is no rotary_cos"),
        ({"rotary_cos": ANGLES[0], "rotary_sin": ANGLES[1][:3]}, "need one shape"),
        ({"rotary_cos": ANGLES[0][:, :3], "rotary_sin": ANGLES[1][:, :3]}, "turns 6 columns"),
        ({"rotary_cos": ANGLES[0].half(), "rotary_sin": ANGLES[1].half()}, "tables need float32"),
        ({"v": NEW_ROWS.half()}, "one dtype for all new tokens"),
        ({"v_cache": ROWS.half()}, "one dtype for both caches"),
        ({"k_cache": ROWS.half(), "v_cache": ROWS.half()}, "has the dtype of its tokens, or FP8"),
        ({"scale_k": torch.ones(1)}, "scale_k belongs to a cache in FP8"),
        ({"backend": "cpu"}, "backend='cpu'"),
        ({"backend": "cuda"}, "cpu has no kernels"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refusals_name_the_argument(changes: dict[str, Any], reason: str) -> None:
    given = {"k_cache": ROWS, "v_cache": ROWS, "k": NEW_ROWS, "v": NEW_ROWS, "lengths": LENGTHS}
    with pytest.raises(SpecError, match=reason):
        attngen.append_kv(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lengths": None}, "one of lengths and cu_seqlens_all"),
        ({"k": NEW_ROWS[..., :8]}, "k_cache needs heads of 2, 8"),
        ({"backend": "cuda"}, "cpu has no kernels"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_compiled_calls_are_checked(changes: dict[str, Any], reason: str) -> None:
    torch._dynamo.reset()
    given = {"k_cache": ROWS, "v_cache": ROWS, "k": NEW_ROWS, "v": NEW_ROWS, "lengths": LENGTHS}
    compiled = torch.compile(attngen.append_kv, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=reason):
        compiled(**{**given, **changes})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_traces_leave_what_kernels_refuse_to_the_definition(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Fake tensors stand for those of a device with kernels."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    defined: list[AppendCall] = []
    monkeypatch.setattr(definition, "append", defined.append)

    class Append(torch.nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            k_cache, v_cache, new, lengths = given
            attngen.append_kv(k_cache, v_cache, new, new, lengths)
            return k_cache

    with FakeTensorMode():
        shapes = ((2, 4, HEADS, DIM), (2, 4, HEADS, DIM), (2, 1, HEADS, DIM))
        given = [torch.empty(*shape, dtype=dtype, device="cuda") for shape in shapes]
        lengths = torch.empty(2, dtype=torch.int32, device="cuda")
        program = torch.export.export(Append(), (*given, lengths))
    parts = program.graph_module.modules()
    graphs = [x.graph for x in parts if isinstance(x, torch.fx.GraphModule)]
    operations = [str(node.target) for graph in graphs for node in graph.nodes]
    on_kernels = dtype is torch.bfloat16
    assert ("attngen.append.default" in operations) == on_kernels == (not defined)


def test_operation_is_traced_with_its_mutations() -> None:
    """Beside kernels, which fake tensors of a device stand for."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        rows, new = (torch.empty(2, 4, HEADS, DIM, device="cuda") for _ in range(2))
        lengths = torch.empty(2, dtype=torch.int32, device="cuda")
        absent = [None] * 8
        torch.ops.attngen.append(rows, rows, new, new, lengths, *absent, None, "bshd", False, False)
    schema = torch.ops.attngen.append.default._schema
    assert [x.name for x in schema.arguments if x.is_write] == ["k_cache", "v_cache", "o"]

"""Caches: each step equals attention over whole sequences, while sequences come, grow and end."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attngen import SpecError, te
from tests.support import te_kit

HEADS, GROUPS, DIM, BATCH, LONGEST = 4, 2, 8, 3, 16
# New tokens of sequences in each step: 7 ends behind the second one, 9 after the third.
STEPS: list[dict[int, int]] = [
    {7: 4, 3: 2},
    {7: 1, 3: 1, 9: 5},
    {3: 1, 9: 1, 5: 3},
    {3: 3, 5: 1},
    {3: 1, 5: 1, 8: 2},
    {8: 1},
]


def token_of(sequence: int, lengths: slice, dim_v: int = 8) -> tuple[Tensor, ...]:
    """Q, K and V of a sequence's tokens, [s, h, d]."""
    q = te_kit.randn(LONGEST, HEADS, DIM, seed=10 + sequence)
    k = te_kit.randn(LONGEST, GROUPS, DIM, seed=30 + sequence)
    v = te_kit.randn(LONGEST, GROUPS, dim_v, seed=50 + sequence)
    return tuple(x[lengths] for x in (q, k, v))


def expected_of(sequence: int, start: int, end: int, left: int, dim_v: int) -> Tensor:
    """Outputs of a sequence's tokens, which see what comes before them, [s, h · d_v]."""
    q, k, v = token_of(sequence, slice(0, end), dim_v)
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(DIM)
    i, j = torch.arange(end)[:, None], torch.arange(end)
    hidden = (j > i) | ((j < i - left) if left >= 0 else False)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v)[start:].flatten(-2)


def batch_of(
    steps: dict[int, int], lengths: dict[int, int], axes: str, most: int, dim_v: int = 8
) -> list[Tensor]:
    """New tokens of a step in a format, with NaN where there are none."""
    parts = []
    for sequence, count in steps.items():
        start = lengths.get(sequence, 0)
        parts.append(token_of(sequence, slice(start, start + count), dim_v))
    found = []
    for each in zip(*parts, strict=True):
        if axes == "thd":
            spare = each[:1][0].new_full((most * BATCH, *each[:1][0].shape[1:]), math.nan)
            found.append(torch.cat([*each, spare])[: most * BATCH])
            continue
        rows = [torch.cat([x, x.new_full((most - len(x), *x.shape[1:]), math.nan)]) for x in each]
        found.append(torch.stack(rows, axes.index("b")))
    return found


def params_of(paged: bool, axes: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    pages = {"is_paged": True, "page_size": 4, "total_num_pages": BATCH * 4} if paged else {}
    return te.InferenceParams(
        BATCH, LONGEST, GROUPS, DIM, dtype, max_ctx_len=8, qkv_format=axes, **pages | more
    )


def module_of(axes: str, layer: int = 1, dim_v: int = 8, **more: Any) -> te.DotProductAttention:
    return te.DotProductAttention(
        HEADS, (DIM, dim_v), num_gqa_groups=GROUPS, qkv_format=axes, layer_number=layer,
        attn_mask_type="padding_causal", **more,
    ).eval()  # fmt: skip


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("window", "dim_v"), [(None, 8), ((3, 0), 16), (None, 5)])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("axes", ["bshd", "sbhd", "thd"])
def test_steps_equal_whole_sequences(
    monkeypatch: Any, axes: str, paged: bool, window: Any, dim_v: int, captured: bool
) -> None:
    """With two layers, whose caches change alike; captured steps trust no order of rows."""
    for module in ("inference", "kv_cache"):
        name = f"attngen.frontends.transformer_engine.{module}.is_capturing"
        monkeypatch.setattr(name, lambda: captured)
    params = params_of(paged, axes, head_dim_v=dim_v)
    modules = [module_of(axes, layer, dim_v, window_size=window) for layer in (1, 2)]
    for layer in (1, 2):
        params.allocate_memory(layer)
    addresses = [x.data_ptr() for x in (params.cu_seqlens_q, params.cu_seqlens_kv)]
    lengths: dict[int, int] = {}
    left = -1 if window is None else window[:1][0]
    for number, steps in enumerate(STEPS):
        most = max(steps.values()) + number % 2
        lengths = {each: lengths.get(each, 0) for each in steps}
        params.pre_step(OrderedDict(steps))
        assert params.get_seqlens_pre_step()[: len(steps)].tolist() == [*lengths.values()]
        for module in modules:
            out = module(*batch_of(steps, lengths, axes, most, dim_v), inference_params=params)
            start = 0
            for row, (sequence, count) in enumerate(steps.items()):
                end = lengths[sequence] + count
                whole = expected_of(sequence, lengths[sequence], end, left, dim_v)
                if axes == "thd":
                    found = out[start : start + count]
                else:
                    found = out.select(axes.index("b"), row)[:count]
                te_kit.close(found, whole)
                start += count
        lengths = {each: lengths[each] + count for each, count in steps.items()}
    assert [x.data_ptr() for x in (params.cu_seqlens_q, params.cu_seqlens_kv)] == addresses


def test_mask_of_a_prompt_without_order() -> None:
    """`padding` lets new tokens see each other."""
    params, module = params_of(False, "bshd"), module_of("bshd")
    params.allocate_memory(1)
    params.pre_step(OrderedDict({1: 3}))
    q, k, v = (x[None] for x in token_of(1, slice(0, 3)))
    found = module(q, k, v, inference_params=params, attn_mask_type="padding")
    expected = module(q, k, v, attn_mask_type="no_mask")
    te_kit.close(found, expected)


def test_reset_forgets_sequences() -> None:
    for paged in (False, True):
        params = params_of(paged, "bshd")
        params.pre_step(OrderedDict({1: 3, 2: 9}))
        params.reset()
        params.pre_step(OrderedDict({2: 4}))
        assert params.sequences == {2: 4} and params.cu_seqlens_kv.tolist() == [0, 4, 4, 4]
        assert params.sequences_pre_step == {2: 0}


def test_pages_are_given_back() -> None:
    params = params_of(True, "bshd", total_num_pages=5)
    params.pre_step(OrderedDict({1: 9, 2: 4}))
    table = params.cache_manager.page_table
    assert table.tolist() == [[0, 1, 2, 0], [3, 0, 0, 0], [0] * 4]
    with pytest.raises(RuntimeError, match="no page left for sequence 3"):
        params.pre_step(OrderedDict({1: 1, 2: 1, 3: 1}))
    assert params.cache_manager.sequences == {1: 9, 2: 4}  # as before
    params.pre_step(OrderedDict({2: 1, 3: 11}))
    assert params.cache_manager.page_table.tolist() == [[3, 4, 0, 0], [0, 1, 2, 0], [0] * 4]
    assert params.cache_manager.page_table is table


def test_cache_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    params = params_of(True, "bshd")
    params.pre_step(OrderedDict({7: 6, 2: 3}))
    with caplog.at_level("DEBUG", "attngen"):
        params.cache_manager.print_cache()
    assert caplog.messages == [
        "3 of 12 pages are used", "0: sequence 7, 6 tokens, [0, 1]", "1: sequence 2, 3 tokens, [2]",
    ]  # fmt: skip
    assert params.cache_manager.get_sequence_lengths() == [6, 3]


def test_pages_as_rows() -> None:
    params = params_of(True, "bshd")
    params.allocate_memory(1)
    params.pre_step(OrderedDict({1: 6, 2: 3}))
    _, k, v = batch_of({1: 6, 2: 3}, {}, "bshd", 6)
    step = params.step(1, k, v, "bshd")
    assert step.qkv_format == "bshd" and step.max_seqlen_kv == LONGEST
    k_rows, v_rows = params.convert_paged_to_nonpaged(1)
    assert k_rows.shape == (2, LONGEST, GROUPS, DIM)
    assert torch.equal(k_rows[0, :6], k[0]) and torch.equal(v_rows[1, :3], v[1, :3])
    assert not k_rows[1, 3].any()  # in the same page


def test_own_manager_is_used() -> None:
    class Own(te.NonPagedKVCacheManager):
        pass

    assert type(params_of(False, "bshd", custom_cache_manager=Own).cache_manager) is Own


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"is_paged": True}, "page_size and total_num_pages"),
        ({"is_paged": True, "page_size": 5, "total_num_pages": 9}, "no multiple of page_size 5"),
        ({"qkv_format": "thd", "max_ctx_len": None}, "max_ctx_len"),
    ],
)
def test_sizes_that_do_not_fit(more: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        te.InferenceParams(BATCH, LONGEST, GROUPS, DIM, torch.float32, **more)


@pytest.mark.parametrize("paged", [False, True])
def test_steps_that_do_not_fit(paged: bool) -> None:
    params = params_of(paged, "bshd")
    params.pre_step(OrderedDict({1: 3, 2: 9}))
    with pytest.raises(SpecError, match=r"keep their order.*\[1, 2, 3\]; got \[3, 1, 2\]"):
        params.pre_step(OrderedDict({3: 1, 1: 1, 2: 1}))
    with pytest.raises(SpecError, match="room for 3 of 16"):
        params.pre_step(OrderedDict({1: 3, 2: 9, 4: 1, 5: 1}))
    with pytest.raises(SpecError, match="up to 17 tokens"):
        params.pre_step(OrderedDict({1: 14, 2: 1}))
    assert params.cache_manager.sequences == {1: 3, 2: 9}  # as before


def test_step_returns_rows_in_the_order_of_the_batch() -> None:
    params = params_of(False, "bshd")
    params.allocate_memory(1)
    lengths: dict[int, int] = {}
    for steps in STEPS[:3]:
        params.pre_step(OrderedDict(steps))
        lengths = {each: lengths.get(each, 0) for each in steps}
        _, k, v = batch_of(steps, lengths, "bshd", 5)
        found = params.step(1, k, v, "bshd")
        lengths = {each: lengths[each] + count for each, count in steps.items()}
    assert not params.cache_manager.in_order
    for row, (sequence, length) in enumerate(lengths.items()):
        _, k, v = token_of(sequence, slice(0, length))
        assert torch.equal(found.k_cache[row, :length], k)
        assert torch.equal(found.v_cache[row, :length], v)


class NoHostReads(TorchDispatchMode):
    """Refuses whatever waits for numbers on the device, which cannot be captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "item"), name
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("axes", ["bshd", "sbhd", "thd"])
def test_step_reads_no_numbers_on_the_host(axes: str, paged: bool) -> None:
    params = params_of(paged, axes)
    params.allocate_memory(1)
    params.pre_step(OrderedDict({1: 3, 2: 2}))
    _, k, v = batch_of({1: 3, 2: 2}, {}, axes, 3)
    with NoHostReads():
        params.append(1, k, v, axes)
        params.step(1, k, v, axes)


def test_packed_tensors_and_caches_do_not_go_together() -> None:
    params, module = params_of(False, "bshd"), module_of("bshd")
    with pytest.raises(SpecError, match="keys and values of their own"):
        module(qkv_layer=torch.zeros(1, 1, 3, 4, 8), inference_params=params)


@pytest.mark.parametrize("paged", [False, True])
def test_steps_of_tensors_that_learn_are_those_of_others_and_have_no_gradient(paged: bool) -> None:
    outputs = []
    for learns in (False, True):
        params, module = params_of(paged, "bshd"), module_of("bshd")
        params.allocate_memory(1)
        params.pre_step(OrderedDict([(0, 3)]))
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, 3, h, d, generator=generator, dtype=torch.float64, requires_grad=learns)
            for h, d in ((HEADS, DIM), (GROUPS, DIM), (GROUPS, 8))
        )
        ends = torch.tensor([0, 3], dtype=torch.int32)
        outputs.append(
            module(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, inference_params=params,
                   max_seqlen_q=3, max_seqlen_kv=LONGEST)
        )  # fmt: skip
    plain, learning = outputs
    torch.testing.assert_close(learning.detach(), plain)
    with pytest.raises(SpecError, match="over a KV cache"):
        learning.sum().backward()

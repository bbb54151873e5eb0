"""Heads of a group with key tiles of their own: which calls have them, what kernels are told."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import attngen
from attngen.call import kernel_choice
from attngen.call.head_split import TOGETHER, split_heads
from attngen.call.kernel_choice import Device
from attngen.call.numbers import Arguments
from attngen.call.prepare.backward import prepare_backward
from attngen.call.table import OPTIONAL, WantedGradients
from attngen.call.tensors import TensorDesc
from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.frontends.pytorch.backward import reset
from attngen.kernels.family import Facts
from attngen.kernels.plan import plans
from attngen.kernels.selection import name_of
from attngen.kernels.wgmma.backward import cost
from attngen.kernels.wgmma.backward.family import FAMILY
from attngen.kernels.wgmma.backward.plan import BackwardPlan
from attngen.runtime import run_time
from attngen.runtime.load import LoadedKernel
from attngen.runtime.parameters import values_of as values_of_kernel
from attngen.runtime.run_time import Extent
from attngen.spec import layouts, resolve
from attngen.targets.target import DEFAULT

ARCH = "sm_90a"
SMS = 132
MASKS = pytest.mark.parametrize("masks", [(), ("causal",)], ids=("full", "causal"))


def load(problem):
    """The kernels of a backward as those of a device."""
    entries = (render_problem(problem, each).kernel for each in plans(problem, ARCH))
    return tuple(LoadedKernel("handle", entry, 0, SMS) for entry in entries)


@pytest.fixture(autouse=True)
def chip(monkeypatch):
    monkeypatch.setattr(kernel_choice, "multiprocessors", lambda device: SMS)


def few_tiles(shapes, masks, window=None, sequences=None, narrow=False, **fields):
    """Whether query heads have tiles of their own in a call of these shapes."""
    left, right = window or (run_time.UNBOUNDED, 0)
    scalars = run_time.Scalars(1.0, left, right, sequences=sequences)
    mask = "causal" if "causal" in masks else "none"
    spec = attngen.AttentionSpec(
        shapes["q"].dim, mask=mask, window="window" in masks, directions=("bwd",), **fields
    )
    problem, *in_order = resolve.resolve(spec, features.scan())
    facts = Facts(shapes, scalars, SMS, frozenset())
    gain = cost.GAIN_NARROW if narrow and in_order else cost.GAIN
    return FAMILY.splits_heads(problem, DEFAULT, facts, gain)


def extents(batch, heads_q, heads_kv, s_q, s_kv, d, d_v):
    """bshd tensors, contiguous."""

    def make(seq, heads, dim):
        return Extent(batch, seq, heads, dim, seq * heads * dim, heads * dim, dim)

    k, v = make(s_kv, heads_kv, d), make(s_kv, heads_kv, d_v)
    return {"q": make(s_q, heads_q, d), "k": k, "v": v}


@MASKS
@pytest.mark.parametrize(
    ("d", "d_v", "floats"), [(128, 128, 256), (96, 80, 176), (64, 64, 128), (64, 40, 128)]
)
def test_apart_tiles_count_query_heads_and_sums_those_of_keys(d, d_v, floats, masks, make_problem):
    """16 tiles of 128 keys, of which the last has fewer than 64; whole accumulators, `floats` a
    key, and a count for each half of a tile."""
    kernels = load(make_problem(d, d_v, masks, direction="bwd"))
    shapes = extents(3, 6, 2, 2000, 2000 - 37, d, d_v)
    main = kernels[1].kernel
    apart = split_heads(kernels, shapes, 3)
    of_queries = {**shapes, "k": shapes["k"]._replace(heads=6)}
    assert apart.main == {"key_group": 3}
    values = values_of_kernel(main, shapes, run_time.Scalars(1.0, numbers=apart.main))
    expected = {
        "key_group": 3,
        "group_size": 1,
        "heads_kv": 6,
        "total_heads": 18,
        "tiles": 16 * 18,
        "heads_per_group": run_time.heads_per_group(main, of_queries),
    }
    assert values.items() >= expected.items()
    assert apart.rounding == {"key_parts": 32}
    assert main.dkv_floats == 128 * floats + 2
    assert apart.floats == 16 * 3 * 2 * main.dkv_floats
    assert apart.numbers == {"dkv_floats": apart.floats}


def test_apart_heads_are_grouped_by_what_each_reads_alone(make_problem):
    """Queries, output gradients and sums of dQ of one head, not of eight: 8192 times 1 KiB."""
    kernels = load(make_problem(128, masks=("causal",), direction="bwd"))
    shapes = extents(1, 16, 2, 8192, 8192, 128, 128)
    assert run_time.heads_per_group(kernels[1].kernel, shapes) == 1
    apart = run_time.Scalars(1.0, numbers=split_heads(kernels, shapes, 1).main)
    assert values_of_kernel(kernels[1].kernel, shapes, apart)["heads_per_group"] == 8


@MASKS
@pytest.mark.parametrize(
    "shape", [(1, 8, 8, 4096, 4096), (1, 1, 1, 4096, 4096), (2, 64, 8, 8192, 8192)], ids=str
)
def test_apart_are_no_heads_that_share_no_keys_or_have_many_tiles(shape, masks):
    assert not few_tiles(extents(*shape, 128, 128), masks)
    assert TOGETHER.numbers == TOGETHER.main == TOGETHER.rounding == {} and not TOGETHER.floats


def test_apart_are_asked_for_with_what_a_call_has(monkeypatch):
    """Tiles and blocks of a head, key heads of all sequences, heads of a group."""
    asked = []
    monkeypatch.setattr(cost, "is_faster", lambda *what: asked.append(what))
    for d in (64, 128):
        for masks in ((), ("causal",)):
            assert not few_tiles(extents(3, 6, 2, 300, 517, d, d), masks)
            assert asked.pop() == (5, 3 if d == 64 else 5, 6, 3, bool(masks), SMS, cost.GAIN)


def test_apart_are_asked_for_with_packed_sequences_as_if_equally_long(monkeypatch):
    asked = []
    monkeypatch.setattr(cost, "is_faster", lambda *what: asked.append(what))
    shapes = extents(1, 6, 2, 3000, 4000, 128, 128)
    few_tiles(shapes, ("causal",), sequences=4, layout="thd")
    assert asked.pop() == (8, 12, 8, 3, True, SMS, cost.GAIN)


@pytest.mark.parametrize(
    ("window", "expected"),
    [((512, 0), (10, False)), ((300, 340), (12, False)), ((1919, 0), (64, True))],
    ids=str,
)
def test_apart_are_asked_for_with_the_blocks_that_a_window_leaves(window, expected, monkeypatch):
    """Where these are fewer than half, all tiles have as many; what has not is not parted."""
    asked = []
    monkeypatch.setattr(cost, "is_faster", lambda *what: asked.append(what))
    shapes = extents(1, 8, 1, 4096, 4096, 128, 128)
    for narrow, gain in ((False, cost.GAIN), (True, cost.GAIN_NARROW)):
        few_tiles(shapes, ("causal", "window"), window, narrow=narrow)
        assert asked.pop() == (32, expected[0], 1, 8, expected[1], SMS, gain)
    # Where no other kernels have an order, what parts heads has nothing to make up for.
    few_tiles(shapes, ("causal", "window"), window, narrow=True, dropout=True)
    assert asked.pop() == (32, expected[0], 1, 8, expected[1], SMS, cost.GAIN)
    few_tiles(shapes, ("causal", "window"), window, alibi=True)
    few_tiles(shapes, ("causal", "window"), window, deterministic=True)
    assert not asked


KINDS = {  # arguments of a problem, beside head dim 128, and its fields; whether its heads may be
    "full": ({}, {}, True),
    "causal": ({"masks": ("causal",)}, {}, True),
    "small": ({"head_dim": 64, "masks": ("causal",)}, {}, True),
    "scores": ({"scores": ("softcap", "alibi")}, {}, True),
    "mask": ({"attn_mask": True, "masks": ("causal",)}, {}, True),
    "dropout": ({"dropout": True}, {}, True),
    "small dropout": ({"head_dim": 64, "dropout": True}, {}, False),
    "deterministic": ({"deterministic": True}, {}, True),
    "small deterministic": ({"head_dim": 64, "deterministic": True}, {}, True),
    "window": ({"masks": ("causal", "window")}, {}, True),
    "window, alibi": ({"masks": ("causal", "window"), "scores": ("alibi",)}, {}, False),
    "window in an order": ({"masks": ("window",), "deterministic": True}, {}, False),
    "packed": ({}, {"q_seq": "packed", "kv_seq": "packed"}, True),
    "packed queries": ({}, {"q_seq": "packed"}, False),
    "used": ({}, {"q_seq": "used", "kv_seq": "used"}, True),
    "used, scores": ({"scores": ("softcap", "alibi")}, {"kv_seq": "used"}, False),
    "gather": ({}, {"kv_fetch": "gather"}, False),
    "bias": ({"scores": ("post_scale_bias",)}, {}, False),
    "two kernels": ({"head_dim": 256}, {}, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_apart_may_be_heads_for_which_there_are_registers(kind, make_problem):
    arguments, fields, can = KINDS[kind]
    problem = make_problem(**{"head_dim": 128, **arguments}, direction="bwd")
    problem = dataclasses.replace(problem, **fields)
    made = [each for each in plans(problem, ARCH) if isinstance(each, BackwardPlan)]
    assert any(each.splits_heads for each in made) == can
    kernels = load(problem)
    sums = ["dkv_acc" in each.kernel.workspace for each in kernels]
    names = [{field.name for field in each.kernel.fields} for each in kernels]
    families = {name_of(each.kernel) for each, has in zip(kernels, sums, strict=True) if has}
    assert families == ({"sm90_bwd", "bwd_convert"} if can else set())
    assert [("dkv_acc" in known) for known in names] == sums


@pytest.fixture
def ready_of(monkeypatch):
    """`ready_of(q, k, v, wanted, **arguments)` → what a call of these shapes launches."""

    def load_spec(spec, device, choice):
        loaded.append(choice.place > 0)
        problems = resolve.resolve(spec, features.scan())
        return load(problems[choice.place])

    loaded = []
    monkeypatch.setattr(kernel_choice, "kernels_of", load_spec)

    def make(q, k, v, wanted=(), **arguments):
        arguments = Arguments(**{"mask": "causal", **arguments})
        axes = layouts.parse(arguments.layout).q_format
        tensors = {
            name: None if shape is None else TensorDesc.contiguous(shape, "bfloat16")
            for name, shape in zip("qkv", (q, k, v), strict=True)
        }
        d_v = (k if v is None else v)[-1]
        o = TensorDesc.contiguous((*q[:-1], d_v), "bfloat16")
        rows = [o.shape[axes.index(axis)] for axis in "bhs"]
        lse = TensorDesc.contiguous(rows, "float32")
        there = {**dict.fromkeys(OPTIONAL), "d_o": o, "o": o, "lse": lse, "dlse": None, **tensors}
        wanted = WantedGradients(*wanted)._replace(dsink=False, dbias=False)
        ready = prepare_backward(there, arguments, wanted, False, Device("cuda:0", 0, ARCH))
        assert len(loaded) == 1, "what is not launched is not loaded"
        loaded.clear()
        return ready

    return make


def values_of(prepared):
    """Parameters by name; 0 where an address decides."""
    fields = prepared.loaded.kernel.fields
    return dict(zip((field.name for field in fields), prepared.values, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal", "causal_bottom_right"])
@pytest.mark.parametrize(("d", "rows"), [(64, 128), (128, 64)])
def test_launch_of_heads_apart_has_tiles_of_each_and_rounds_their_sums(
    d, rows, mask, deterministic, ready_of
):
    q, k = (1, 4096, 16, d), (1, 4000, 2, d)
    ready = ready_of(q, k, k, mask=mask, deterministic=deterministic)
    prepare, main, convert = ready.launches
    families = [name_of(each.loaded.kernel) for each in ready.launches]
    assert families == ["bwd_prepare", "sm90_bwd", "bwd_convert"]
    tiles, blocks = 32, 4096 // rows
    assert prepare.start[1:4] == (blocks, 16, 1)

    assert main.start[1:4] == (SMS, 1, 1)
    expected = {"tiles": tiles * 16, "kv_blocks": tiles, "total_heads": 16, "heads_kv": 16}
    expected |= {"heads_q": 16, "group_size": 1, "key_group": 8, "kv_len": 4000, "q_len": 4096}
    expected |= {"q_blocks": blocks, "scale": d**-0.5}
    assert values_of(main).items() >= expected.items()

    assert convert.start[1:4] == (blocks * 2 + tiles * 2, 16, 1)
    expected = {"key_parts": tiles * 2, "heads_kv": 2, "kv_len": 4000, "q_len": 4096}
    expected |= {"q_blocks": blocks, "heads_q": 16, "scale": d**-0.5}
    for name in ("dk", "dv"):
        strides = {"row": 2 * d, "head": d, "batch": 4000 * 2 * d}
        expected |= {f"{name}_stride_{axis}": stride for axis, stride in strides.items()}
    assert values_of(convert).items() >= expected.items()


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_launch_of_few_tiles_apart_has_no_more_ctas_than_these(mask, ready_of):
    q, k = (2, 300, 8, 128), (2, 130, 1, 128)
    _, main, convert = ready_of(q, k, k, mask=mask).launches
    assert main.start[1:4] == (2 * 2 * 8, 1, 1) and values_of(main)["tiles"] == 32
    assert convert.start[1:4] == (5 * 2 + 2 * 2, 8, 2)


def test_launch_of_heads_apart_in_one_tensor_of_keys_and_values_strides_over_both(ready_of):
    q, kv = (1, 4096, 8, 64), (1, 4096, 2, 1, 64)
    ready = ready_of(q, kv, None, layout="bshd_bs2hd")
    assert [output.name for output in ready.outputs] == ["dq", "dk"]
    assert ("dv", "dk", 64 * 2) in ready.sources
    values = values_of(ready.launches[-1])
    assert values["key_parts"] == 64
    assert values["dk_stride_row"] == values["dv_stride_row"] == 2 * 64


@pytest.mark.parametrize(
    ("shape", "wanted", "arguments"),
    [
        ((2, 8192, 64, 8), (), {}),
        ((1, 4096, 8, 8), (), {}),
        ((1, 4096, 8, 1), (True, False), {}),
        ((1, 4096, 8, 1), (False, True), {}),
        ((1, 4096, 8, 1), (False, True), {"deterministic": True}),
        ((2, 8192, 64, 8), (), {"window_left": 4000}),
    ],
    ids=str,
)
def test_launch_of_heads_together_has_tiles_of_key_heads_and_no_sums(
    shape, wanted, arguments, ready_of
):
    batch, length, heads_q, heads_kv = shape
    q, k = (batch, length, heads_q, 128), (batch, length, heads_kv, 128)
    ready = ready_of(q, k, k, wanted, **arguments)
    assert not ready.resets
    by_family = {name_of(each.loaded.kernel): each for each in ready.launches}
    values = values_of(by_family["sm90_bwd"])
    tiles = batch * heads_kv * length // 128
    assert values["tiles"] == tiles and values["group_size"] == heads_q // heads_kv
    assert values.get("key_group", 1) == 1
    assert ("bwd_convert" in by_family) == (wanted != (False, True))
    for each in [by_family[name] for name in by_family if name == "bwd_convert"]:
        assert each.start[1:4] == (length // 64 * 2, heads_q, batch)
        assert values_of(each).get("key_parts", 0) == 0
    blocks = batch * heads_q * length // 64
    sizes = {"lse_log2": 64 * 4, "d": 64 * 4, "dq_acc": 64 * 128 * 4, "turns": 4}
    assert ready.workspace_bytes == sum(-(-n * blocks // 256) * 256 for n in sizes.values())


def test_launch_under_a_narrow_window_has_heads_apart_or_an_order(ready_of):
    """Kernels in an order cannot part heads."""
    families = []
    for batch, length, heads_q, heads_kv in ((1, 4096, 8, 1), (2, 8192, 64, 8)):
        q, k = ((batch, length, n, 128) for n in (heads_q, heads_kv))
        ready = ready_of(q, k, k, window_left=512)
        families.append([name_of(each.loaded.kernel) for each in ready.launches])
        main = next(x for x in ready.launches if name_of(x.loaded.kernel) == "sm90_bwd")
        assert values_of(main).get("key_group", 1) == (8 if batch == 1 else 1)
    assert families == [["bwd_prepare", "sm90_bwd", "bwd_convert"], ["bwd_prepare", "sm90_bwd"]]


@pytest.mark.parametrize(("d", "d_v"), [(128, 128), (64, 40)])
def test_sums_of_heads_apart_have_a_place_of_their_own_which_is_zeroed(d, d_v, ready_of):
    ready = ready_of((2, 300, 8, d), (2, 200, 1, d), (2, 200, 1, d_v))
    main = ready.launches[1].loaded.kernel
    size = 4 * 2 * 2 * main.dkv_floats  # bytes of sequences' tiles
    first = ready.offsets["dkv_acc"]
    assert ready.counts == (first, first + size) and ready.resets
    ends = sorted([*ready.offsets.values(), ready.workspace_bytes])
    assert ends[ends.index(first) + 1] - first == -(-size // 256) * 256
    workspace = torch.full((ready.workspace_bytes,), 255, dtype=torch.uint8)
    for _ in range(2):
        reset(ready, workspace)
        assert not workspace[first : first + size].any()
        assert (workspace == 255).sum() == ready.workspace_bytes - size
        workspace.fill_(255)

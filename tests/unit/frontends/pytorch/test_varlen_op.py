"""Operations on packed tensors and varying lengths without a GPU: launches, addresses, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import attngen
from attngen import SpecError
from attngen.call import kernel_choice
from attngen.call.numbers import Arguments
from attngen.call.table import LENGTHS, OPTIONAL
from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.frontends.pytorch import backward, descriptions, forward, lengths, operation
from attngen.kernels.plan import plans
from attngen.runtime.load import LoadedKernel
from attngen.spec import layouts
from attngen.spec.resolve import resolve
from tests.support.caches import BACKWARD, FORWARD, forget

BATCH, ROOM, HEADS, DIM = 2, 6, 2, 64
TOKENS = BATCH * ROOM
SIZES = {"b": BATCH, "s": ROOM, "h": HEADS, "d": DIM, "t": TOKENS}
DENSE = [name for name in layouts.NAMES if "t" not in name and "paged" not in name]
PACKED = [name for name in layouts.NAMES if name.startswith("t") and "paged" not in name]


def load(spec, device, choice):
    problem = resolve(spec, features.scan())[choice.place]
    entries = [render_problem(problem, each).kernel for each in plans(problem, "sm_90a")]
    return tuple(LoadedKernel("handle", entry, 0, 132) for entry in entries)


@pytest.fixture
def launches(monkeypatch):
    """Note launches of the kernels that planner and renderer describe, on the CPU."""
    found = []

    def note(prepared, addresses, stream):
        found.append(SimpleNamespace(kernel=prepared.loaded.kernel, addresses=dict(addresses),
                                     prepared=prepared))  # fmt: skip
        return addresses

    monkeypatch.setattr(kernel_choice, "kernels_of", load)
    forget(monkeypatch, *FORWARD, *BACKWARD)
    monkeypatch.setattr(kernel_choice, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(descriptions, "device_arch", lambda device: "sm_90a")
    for name in ("launch", "relaunch"):  # which the addresses serve for parameters
        monkeypatch.setattr(operation, name, note)
    monkeypatch.setattr(operation, "tile_counter", lambda device, stream: 64)
    monkeypatch.setattr(operation, "_empty_strided_cuda", lambda size, stride, dtype:
                        torch.empty_strided(size, stride, dtype=dtype))  # fmt: skip
    monkeypatch.setattr(operation.load, "current_device", lambda: None)
    monkeypatch.setattr(operation, "current_device", lambda: None)
    monkeypatch.setattr(operation, "current_stream", lambda index: 7)
    return found


def carriers(name):
    """q, k, v as the layout has them."""
    layout = layouts.parse(name)
    made = {}
    for operand, axes in zip("qkv", (layout.q_format, *[layout.kv_format] * 2), strict=True):
        made[operand] = torch.zeros([SIZES[axis] for axis in axes], dtype=torch.bfloat16)
    if layout.packed_operands:
        carrier, axis, _ = layout.home(layout.packed_operands[0])
        made[carrier] = torch.stack([made[x] for x in layout.packed_operands], axis)
    return [made[x] if layout.home(x)[0] == x else None for x in "qkv"]


def optional(**given):
    return [given.get(name) for name in OPTIONAL]


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def cumulative():
    return int32(0, 5, TOKENS)


def run_both(name, **given):
    """Carriers, outputs and the gradients' carriers of both operations."""
    q, k, v = carriers(name)
    rest = (*optional(**given), *Arguments(layout=name, mask="causal"))
    out, lse, *_ = forward.forward(q, k, v, *rest)
    found = backward.backward(torch.zeros_like(out), None, q, k, v, out, lse, *rest)
    return (q, k, v), out, lse, found


@pytest.mark.parametrize("name", DENSE)
def test_op_dense_layout_addresses_every_operand_and_gradient_in_place(launches, name):
    (q, k, v), out, lse, gradients = run_both(name)
    found, learned = gradients[:3], gradients[3:]
    assert not any(x.numel() for x in learned)
    layout = layouts.parse(name)
    wanted = dict(zip("qkv", layouts.unpack(layout, q, k, v), strict=True))
    assert out.shape == wanted["q"].shape and lse.shape == (BATCH, HEADS, ROOM)
    present = [x is not None for x in (q, k, v)]
    for given, gradient in zip((q, k, v), found, strict=True):
        assert gradient.shape == ((0,) if given is None else given.shape)
    gradients = [x if there else None for x, there in zip(found, present, strict=True)]
    wanted |= dict(zip(("dq", "dk", "dv"), layouts.unpack(layout, *gradients), strict=True))
    last = launches[-1].addresses
    assert {x: last[x] for x in wanted} == {x: tensor.data_ptr() for x, tensor in wanted.items()}
    assert not any(each.kernel.entry.startswith("varlen") for each in launches)


@pytest.mark.parametrize("name", PACKED)
def test_op_packed_tokens_know_their_lengths(launches, name):
    cu, padded = cumulative(), int32(0, 6, TOKENS)
    given = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), cu)
    layout = layouts.parse(name)
    if layout.kv_format != "thd":
        given = {"cu_seqlens_q": cu}
    _, out, lse, _ = run_both(name, **given, cu_seqlens_q_padded=padded)
    assert out.shape == (TOKENS, HEADS, DIM) and lse.shape == (HEADS, TOKENS)
    families = [each.kernel.entry.partition("__")[0] for each in launches]
    assert families == ["sm90_fwd", "bwd_prepare", "sm90_bwd", "bwd_convert"]
    for each in launches:
        assert each.addresses["q_seqlens"] == cu.data_ptr()
        assert each.addresses["q_offsets"] == padded.data_ptr()
        names = [field.name for field in each.kernel.fields if field.type == "ptr"]
        assert set(names) <= set(each.addresses)
    if layout.kv_format == "thd":
        assert launches[-1].addresses["kv_offsets"] == cu.data_ptr()


@pytest.mark.parametrize("name", ["thd", "bshd"])
@pytest.mark.parametrize("keys, ordered", [(1024, True), (1025, False)])
def test_op_narrow_window_beside_lengths_adds_in_an_order(launches, name, keys, ordered):
    lengths = cumulative() if name == "thd" else int32(4, ROOM)
    given = dict.fromkeys(LENGTHS[:2] if name == "thd" else LENGTHS[4:], lengths)
    q, k, v = carriers(name)
    rest = (*optional(**given), *Arguments(layout=name, mask="causal", window_left=keys))
    out, lse, *_ = forward.forward(q, k, v, *rest)
    backward.backward(torch.zeros_like(out), None, q, k, v, out, lse, *rest)
    families = [each.kernel.entry.partition("__")[0] for each in launches]
    wanted = ["bwd_prepare", "sm90_bwd", *["bwd_convert"] * (not ordered)]
    assert [each for each in families if "bwd" in each] == wanted


def test_op_packed_grids_and_workspaces_hold_whatever_the_lengths_are(launches):
    cu = cumulative()
    run_both("thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    prepare = next(each for each in launches if each.kernel.entry.startswith("bwd_prepare"))
    values = {
        f.name: x for f, x in zip(prepare.kernel.fields, prepare.prepared.values, strict=True)
    }
    assert values["sequences"] == BATCH
    assert values["q_blocks"] == TOKENS // prepare.kernel.row_block + BATCH
    assert prepare.prepared.start[1:4] == (values["q_blocks"], HEADS, 1)


@pytest.mark.parametrize("sides", [("q",), ("kv",), ("q", "kv")], ids="+".join)
def test_op_used_lengths_of_one_side_leave_the_other_whole(launches, sides):
    given = {f"seqused_{side}": int32(3, 6) for side in sides}
    run_both("bshd", **given)
    for each in launches:
        values = zip(each.kernel.fields, each.prepared.values, strict=True)
        least = {f.name: x for f, x in values if f.name.endswith("_least")}
        for name, value in least.items():
            side = name.removesuffix("_least")
            assert value == (0 if side in sides else 1 << 30)
            source = given.get(f"seqused_{side}", given[f"seqused_{sides[0]}"])
            assert each.addresses[f"{side}_lengths"] == source.data_ptr()


def test_op_takes_its_counter_when_nothing_is_allocated_any_more(launches, monkeypatch):
    order = []
    allocate = operation._empty_strided_cuda
    monkeypatch.setattr(operation, "_empty_strided_cuda", lambda *sizes:
                        order.append("memory") or allocate(*sizes))  # fmt: skip
    monkeypatch.setattr(operation, "tile_counter", lambda *_: order.append("counter") or 64)
    cu = cumulative()
    given = optional(cu_seqlens_q=cu, cu_seqlens_kv=cu)
    forward.forward(*carriers("thd"), *given, *Arguments(layout="thd", mask="causal"))
    assert order == ["memory"] * 2 + ["counter"]  # output and LSE


def test_op_without_sequences_launches_nothing_and_is_zero(launches):
    nothing = int32(0)
    _, out, lse, found = run_both("thd", cu_seqlens_q=nothing, cu_seqlens_kv=nothing)
    assert not launches and not out.any() and (lse == -torch.inf).all()
    assert not any(x.any() for x in found)


REFUSED = {
    "none for thd": ("thd", {}, "cu_seqlens_q"),
    "one side of thd": ("thd", {"cu_seqlens_q": cumulative()}, "cu_seqlens_kv"),
    "int64": ("bshd", {"seqused_q": torch.tensor([1, 2])}, "int32"),
    "too few": ("bshd", {"seqused_kv": int32(1)}, "seqused_kv"),
    "strided": ("bshd", {"seqused_kv": int32(1, 0, 2, 0)[::2]}, "contiguous"),
    "cumulative of dense": ("bshd", {"cu_seqlens_q": cumulative()}, "pass seqused_q"),
    "padded of dense": ("bshd", {"cu_seqlens_q_padded": cumulative()}, "belongs to thd"),
    "paged": ("paged_kv_bshd_bshd_bshd", {}, "needs page_table"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_op_lengths_that_do_not_fit_are_refused(launches, name):
    layout, given, word = REFUSED[name]
    q, k, v = carriers("thd" if layout == "thd" else "bshd")
    with pytest.raises(SpecError, match=word):
        forward.forward(q, k, v, *optional(**given), *Arguments(layout=layout))
    assert not launches


def test_settle_lengths_are_those_of_each_side():
    cu, used = cumulative(), int32(3, 4)

    def settled(layout, **given):
        found = lengths.settle(layout, tuple(given.get(name) for name in LENGTHS))
        return {n: x for n, x in zip(LENGTHS, found, strict=True) if x is not None}

    assert settled("bshd", seqused_kv=used).keys() == {"seqused_kv"}
    dense = settled("sbhd", cu_seqlens_q=cu, seqused_kv=used)
    assert dense.keys() == {"seqused_q", "seqused_kv"} and dense["seqused_q"].tolist() == [5, 7]
    one = settled("t3hd", cu_seqlens_q=cu, cu_seqlens_q_padded=cu)
    assert one.keys() == set(LENGTHS[:4]) and all(x is cu for x in one.values())
    other = settled("bs3hd", seqused_kv=used)
    assert other == {"seqused_q": used, "seqused_kv": used}


@pytest.mark.parametrize("name", [*DENSE, *PACKED])
def test_op_fake_results_have_the_shapes_of_the_real_ones(launches, name):
    given = {}
    if name in PACKED:
        given = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), cumulative())
        if layouts.parse(name).kv_format != "thd":
            del given["cu_seqlens_kv"]
    tensors, *real = run_both(name, **given)
    out, lse, found = real
    meta = [None if x is None else x.to("meta") for x in tensors]
    rest = [None if x is None else x.to("meta") for x in optional(**given)]
    arguments = Arguments(layout=name, mask="causal")
    fake = torch.ops.attngen.forward(*meta, *rest, *arguments)
    assert [x.shape for x in fake[:2]] == [out.shape, lse.shape]
    gradients = torch.ops.attngen.backward(fake[0], None, *meta, *fake[:2], *rest, *arguments)
    assert [x.shape for x in gradients] == [x.shape for x in found]


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["dq", "dkv"])
def test_op_gradient_of_one_tensor_is_as_large_in_the_fake_result(launches, wanted):
    q = carriers("bs3hd")[0]
    rest = (*optional(), *Arguments(layout="bs3hd"), *wanted, False)
    out, lse, *_ = forward.forward(q, None, None, *rest[:-3])
    real = backward.backward(out, None, q, None, None, out, lse, *rest)
    meta = [x.to("meta") for x in (out, q, lse)]
    fake = torch.ops.attngen.backward(meta[0], None, meta[1], None, None, meta[0], meta[2], *rest)
    assert [x.shape for x in real] == [x.shape for x in fake]
    assert real[0].shape == q.shape


@pytest.mark.parametrize("name", ["thd", "bshd"])
@pytest.mark.parametrize("softmax", ["off_by_one", "learnable"])
def test_op_without_any_key_gives_sinks_to_rows_of_sequences_alone(launches, name, softmax):
    sink = torch.tensor([1.0, 2.0]) if softmax == "learnable" else None
    given = {"seqused_q": int32(3, 0), "seqused_kv": int32(0, 0)}
    shape, members = (2, 4, HEADS, DIM), [[1, 1, 1, 0], [0, 0, 0, 0]]
    if name == "thd":
        given = {"cu_seqlens_q": int32(0, 3, 3, 5), "cu_seqlens_kv": int32(0, 0, 0, 0)}
        given["cu_seqlens_q_padded"] = int32(1, 5, 5, 9)
        shape, members = (8, HEADS, DIM), [0, 1, 1, 1, 0, 1, 1, 0]
    q = torch.zeros(shape, dtype=torch.bfloat16)
    k = q.narrow(-3, 0, 0)
    rest = (*optional(**given, sink=sink), *Arguments(layout=name, softmax=softmax))
    out, lse, *_ = forward.forward(q, k, k, *rest)
    seen = torch.tensor(members, dtype=torch.bool).unsqueeze(-2).expand(lse.shape)
    alpha = torch.zeros(HEADS) if sink is None else sink
    wanted = torch.where(seen, alpha[:, None].expand(lse.shape), -torch.inf)
    assert torch.equal(lse, wanted) and not out.any() and not launches
    dlse = torch.where(seen, 1.0, torch.nan)
    found = backward.backward(torch.zeros_like(out), dlse, q, k, k, out, lse, *rest)
    assert sink is None or torch.equal(found[3], seen.float().sum(-1).reshape(-1, HEADS).sum(0))


def test_rows_of_none_are_those_that_lie_in_no_sequence_whatever_the_lengths_say():
    lowest, highest = -(1 << 31), (1 << 31) - 1
    lse = torch.zeros(2, 8)
    for ends, starts, members in (
        ((0, 3, 3, 5), (1, 5, 5, 9), (1, 2, 3, 5, 6)),
        ((0, 3, highest, 5), None, (0, 1, 2)),
        ((lowest, 3, 5, 9), None, (3, 4)),
        ((0, 3, 5, 7), (lowest, 6, highest, 0), (6, 7)),
        ((0, 3, 5, 7), (6, 0, 4, 8), (0, 1, 4, 5)),
        ((5, 3, 1, 0), None, ()),
    ):
        given = {"cu_seqlens_q": int32(*ends)}
        given |= {} if starts is None else {"cu_seqlens_q_padded": int32(*starts)}
        found = lengths.rows_of_none(lse, given)
        assert found.tolist() == [row not in members for row in range(8)]


def test_spec_from_call_knows_lengths_of_dense_sides_only():
    q = SimpleNamespace(shape=(4, 2, 64), dtype="torch.bfloat16")
    kv = SimpleNamespace(shape=(2, 4, 2, 64), dtype="torch.bfloat16")
    ends = SimpleNamespace(shape=(3,))
    for given in ({}, {"seqused_kv": ends}, {"cu_seqlens_kv": ends}):
        spec = attngen.AttentionSpec.from_call(
            q, kv, kv, layout="thd_bshd_bshd", cu_seqlens_q=ends, **given
        )
        assert spec.seqused == bool(given)

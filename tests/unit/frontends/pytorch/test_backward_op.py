"""The operation `attngen::backward` without a GPU: what it would launch, and what it refuses."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from attngen import SpecError
from attngen.call import kernel_choice
from attngen.call.gradient_kernels import GRADIENTS
from attngen.call.numbers import Arguments
from attngen.call.sinks import WorkspaceRows
from attngen.call.table import OPTIONAL
from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.frontends.pytorch import backward as op
from attngen.frontends.pytorch import descriptions, operation, sinks
from attngen.frontends.pytorch import routing as choice
from attngen.kernels.plan import plans
from attngen.runtime.load import LoadedKernel
from attngen.spec import resolve
from tests.support.caches import BACKWARD, forget

ARCH = "sm_90a"
BATCH, S_Q, S_KV, HEADS_Q, HEADS_KV = 2, 5, 7, 4, 2


def rest(**arguments):
    """Operands that follow lse: no optional tensors, and the arguments."""
    return *(None,) * len(OPTIONAL), *Arguments(**{"mask": "causal", **arguments})


def given(d=64, d_v=40, dtype=torch.bfloat16, s_kv=S_KV):
    """d_o, dlse, q, k, v, o, lse by name."""
    make = torch.Generator().manual_seed(0)
    shapes = {
        "d_o": (BATCH, S_Q, HEADS_Q, d_v),
        "dlse": (BATCH, HEADS_Q, S_Q),
        "q": (BATCH, S_Q, HEADS_Q, d),
        "k": (BATCH, s_kv, HEADS_KV, d),
        "v": (BATCH, s_kv, HEADS_KV, d_v),
        "o": (BATCH, S_Q, HEADS_Q, d_v),
        "lse": (BATCH, HEADS_Q, S_Q),
    }
    return {
        name: torch.randn(shape, generator=make).to(torch.float32 if "lse" in name else dtype)
        for name, shape in shapes.items()
    }


@pytest.fixture
def launched(monkeypatch):
    """Launches on the CPU of the kernels that plan and renderer describe, and their problems."""
    launches, problems = [], []

    def load(spec, device, choice):
        problem = resolve.resolve(spec, features.scan())[choice.place]
        problems.append(problem)
        entries = [render_problem(problem, each).kernel for each in plans(problem, ARCH)]
        return tuple(LoadedKernel("handle", entry, 0, 132) for entry in entries)

    def note(prepared, addresses, stream):
        kernel = prepared.loaded.kernel
        launches.append(SimpleNamespace(kernel=kernel, addresses=dict(addresses), stream=stream))
        return addresses

    monkeypatch.setattr(kernel_choice, "kernels_of", load)
    monkeypatch.setattr(kernel_choice, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(descriptions, "device_arch", lambda device: ARCH)
    forget(monkeypatch, *BACKWARD)
    for name in ("launch", "relaunch"):  # which the addresses serve for parameters
        monkeypatch.setattr(operation, name, note)
    monkeypatch.setattr(operation, "tile_counter", lambda device, stream: 64)
    monkeypatch.setattr(operation, "_empty_strided_cuda", lambda size, stride, dtype:
                        torch.empty_strided(size, stride, dtype=dtype))  # fmt: skip
    monkeypatch.setattr(op, "is_current", lambda device: True)
    monkeypatch.setattr(operation, "current_stream", lambda index: 7)
    return SimpleNamespace(launches=launches, problems=problems)


@pytest.mark.parametrize(
    ("d", "families"),
    [
        (64, ["bwd_prepare", "sm90_bwd", "bwd_convert"]),
        (256, ["bwd_prepare", "sm90_bwd_dkv", "sm90_bwd_dq_kept"]),
    ],
)
def test_op_launches_each_kernel_in_order_with_every_address(launched, d, families):
    tensors = given(d)
    gradients = op.backward(*tensors.values(), *rest(deterministic=True))[:3]
    assert [each.kernel.entry.partition("__")[0] for each in launched.launches] == families
    (problem,) = launched.problems
    assert (problem.direction, problem.deterministic, problem.masks) == ("bwd", True, ("causal",))
    tensors |= dict(zip(GRADIENTS, gradients, strict=True))
    for launch in launched.launches:
        assert launch.stream == 7 and launch.addresses["tile_counter"] == 64
        assert launch.addresses.items() >= {n: x.data_ptr() for n, x in tensors.items()}.items()
        needed = {field.name for field in launch.kernel.fields if field.type == "ptr"}
        needed |= {recipe.tensor for recipe in launch.kernel.tensor_maps}
        assert needed <= launch.addresses.keys()


@pytest.mark.parametrize("score", [2.0**24, -(2.0**26)])
def test_op_names_rows_without_a_gradient_where_values_are_checked(launched, monkeypatch, score):
    tensors = given()
    tensors["lse"][1, 2, 3] = score
    for place, harmless in enumerate((-math.inf, math.nan, 2.0**24 - 1)):
        tensors["lse"][0, 0, place] = harmless
    op.backward(*tensors.values(), *rest())  # nobody asked
    monkeypatch.setattr(choice, "CHECK_VALUES", True)
    for _ in range(2):
        with pytest.raises(SpecError) as caught:
            op.backward(*tensors.values(), *rest())
        (reason,) = caught.value.reasons
        assert reason.startswith(f"lse[1, 2, 3]={score:g}: ") and "2^24" in reason
    tensors["lse"][1, 2, 3] = 0
    op.backward(*tensors.values(), *rest())


def test_op_names_no_rows_beside_a_bias(launched, monkeypatch):
    monkeypatch.setattr(choice, "CHECK_VALUES", True)
    tensors = given()
    tensors["lse"][1, 2, 3] = 2.0**26
    others = [None] * len(OPTIONAL)
    others[OPTIONAL.index("bias")] = torch.zeros(S_Q, S_KV, dtype=torch.bfloat16)
    op.backward(*tensors.values(), *others, *Arguments(mask="causal", bias_type="post_scale"))
    assert launched.launches


LAUNCHED = {  # by what is wanted, then by head dim
    (True, False): {64: ["bwd_prepare", "sm90_bwd", "bwd_convert"],
                    256: ["bwd_prepare", "sm90_bwd_dq"]},
    (False, True): {64: ["bwd_prepare", "sm90_bwd"], 256: ["bwd_prepare", "sm90_bwd_dkv"]},
    (False, False): {64: [], 256: []},
}  # fmt: skip


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("wanted", LAUNCHED, ids=str)
def test_op_launches_nothing_that_makes_unwanted_gradients_alone(launched, wanted, d):
    tensors = given(d)
    gradients = op.backward(*tensors.values(), *rest(), *wanted)
    entries = [each.kernel.entry.partition("__")[0] for each in launched.launches]
    assert entries == LAUNCHED[wanted][d]
    for name, x, want in zip("qkv", gradients[:3], (wanted[0], *wanted[1:] * 2), strict=True):
        assert x.shape == (tensors[name].shape if want else (0,)) and x.dtype == torch.bfloat16
    for each in launched.launches:
        needed = {field.name for field in each.kernel.fields if field.type == "ptr"}
        needed |= {recipe.tensor for recipe in each.kernel.tensor_maps}
        assert needed <= each.addresses.keys()
    fakes = [tensor.to("meta") for tensor in tensors.values()]
    flags = dict(zip(("want_dq", "want_dkv"), wanted, strict=True))
    fakes = torch.ops.attngen.backward(*fakes, mask="causal", **flags)
    assert [x.shape for x in fakes] == [x.shape for x in gradients]


@pytest.mark.parametrize("wanted", [(True, True), (False, True), (True, False)], ids=str)
def test_op_under_a_window_one_kernel_makes_all_gradients(launched, wanted):
    """It stores dQ by a tensor map, for which there must be a tensor, wanted or not."""
    gradients = op.backward(
        *given().values(), *rest(window_left=2, window_right=0, deterministic=True), *wanted
    )
    entries = [each.kernel.entry.partition("__")[0] for each in launched.launches]
    assert entries == ["bwd_prepare", "sm90_bwd"]
    for each in launched.launches:
        assert all(each.addresses[recipe.tensor] for recipe in each.kernel.tensor_maps)
    assert [bool(x.numel()) for x in gradients[:3]] == [wanted[0], wanted[1], wanted[1]]


@pytest.mark.parametrize(
    ("reached", "d", "heads_kv", "arguments", "wanted"),
    [
        ("ordered", 64, HEADS_Q, {"window_left": 1024}, ()),
        ("plain", 64, HEADS_Q, {"window_left": 1025}, ()),
        ("ordered", 64, HEADS_KV, {"window_left": 512}, ()),
        ("plain", 64, HEADS_KV, {"window_left": 513}, ()),
        ("ordered", 128, HEADS_Q, {"window_left": 1024}, ()),
        ("ordered", 32, HEADS_Q, {"window_left": 256}, ()),
        ("plain", 32, HEADS_Q, {"window_left": 257}, ()),
        ("ordered", 64, HEADS_Q, {"window_left": 500, "window_right": 524, "mask": "none"}, ()),
        ("plain", 64, HEADS_Q, {"window_left": 500, "window_right": 525, "mask": "none"}, ()),
        ("plain", 64, HEADS_Q, {"window_left": 500, "window_right": -1, "mask": "none"}, ()),
        ("plain", 64, HEADS_Q, {}, ()),
        ("plain", 64, HEADS_Q, {"window_left": 5, "softcap": 30.0}, ()),
        ("ordered", 128, HEADS_Q, {"window_left": 5, "softcap": 30.0}, ()),
        ("plain", 256, HEADS_Q, {"window_left": 5}, ()),
        ("plain", 64, HEADS_Q, {"window_left": 5}, (False, True)),
        ("ordered", 64, HEADS_Q, {"window_left": 5}, (True, False)),
        ("ordered", 64, HEADS_Q, {"window_left": 5000, "deterministic": True}, ()),
    ],
)
def test_op_adds_in_an_order_where_that_is_asked_for_or_a_window_narrow(
    launched, reached, d, heads_kv, arguments, wanted
):
    tensors = given(d, d)
    for name in "kv":
        tensors[name] = tensors[name][:, :, :1].repeat(1, 1, heads_kv, 1)
    op.backward(*tensors.values(), *rest(**arguments), *wanted)
    (problem,) = launched.problems
    assert problem.deterministic == (reached == "ordered")


def test_op_same_shapes_with_other_gradients_wanted_are_prepared_anew(launched):
    for _ in range(2):
        for wanted, count in (((True, True), 3), ((True, False), 2), ((False, True), 2)):
            launched.launches.clear()
            op.backward(*given(256).values(), *rest(), *wanted)
            assert len(launched.launches) == count
    assert len(launched.problems) == 3


def test_op_workspaces_share_one_allocation_without_overlap(launched):
    op.backward(*given(64).values(), *rest(deterministic=True))
    (ready,) = op.backwards.by_format.values()
    blocks = BATCH * HEADS_Q  # 5 queries are one block of 128
    sizes = {"lse_log2": 512, "d": 512, "dq_acc": 128 * 64 * 4, "turns": 4, "dkv_acc": 0}
    assert ready.offsets.keys() == sizes.keys()
    places = sorted((ready.offsets[name], sizes[name] * blocks) for name in sizes)
    ends = [start + size for start, size in places]
    assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False))
    assert ends[-1] <= ready.workspace_bytes
    assert all(start % 16 == 0 for start, _ in places)


def test_op_gradients_have_the_shapes_of_their_operands(launched):
    tensors = given()
    found = op.backward(*tensors.values(), *rest())
    assert all(x.shape == (0,) for x in found[3:])
    for name, gradient in zip("qkv", found, strict=False):
        assert gradient.shape == tensors[name].shape and gradient.dtype == torch.bfloat16
        assert gradient.is_contiguous()


def test_op_without_a_gradient_of_the_lse_has_address_zero(launched):
    op.backward(*(given() | {"dlse": None}).values(), *rest())
    assert all(each.addresses["dlse"] == 0 for each in launched.launches)


def test_op_new_addresses_of_known_shapes_prepare_nothing(launched):
    for _ in range(3):
        op.backward(*given().values(), *rest())
    assert len(launched.problems) == 1 and len(launched.launches) == 9


def test_op_gradient_that_kernels_cannot_read_is_copied(launched):
    tensors = given()
    one = torch.ones((), dtype=torch.bfloat16).expand(tensors["d_o"].shape)
    op.backward(*(tensors | {"d_o": one}).values(), *rest())
    assert all(each.addresses["d_o"] != one.data_ptr() for each in launched.launches)
    assert op.copied(one).is_contiguous() and op.copied(one).eq(1).all()
    odd = torch.zeros(2, 5, 4, 41, dtype=torch.bfloat16)[..., 1:]
    assert op.copied(odd).data_ptr() != odd.data_ptr()
    assert op.copied(tensors["o"]) is tensors["o"]


ODD = {
    "strides": {"q": torch.zeros(2, 5, 4, 65).bfloat16()[..., :64]},
    "address": {"k": torch.zeros(2 * 7 * 2 * 64 + 1).bfloat16()[1:].view(2, 7, 2, 64)},
    "columns": {"v": torch.zeros(2, 7, 40, 2).bfloat16().transpose(2, 3)},
    "head dim": given(d=63, d_v=40),
    "values' head dim": given(d=64, d_v=39),
}


@pytest.mark.parametrize("name", ODD)
def test_op_operands_that_the_copy_engine_cannot_read_are_read_where_they_are(launched, name):
    tensors = given() | ODD[name]
    shape = tensors["d_o"].shape
    tensors["d_o"] = torch.zeros((*shape[:-1], 2 * shape[-1])).bfloat16()[..., ::2]
    found = op.backward(*tensors.values(), *rest())[:3]
    assert [problem.kv_fetch for problem in launched.problems] == ["gather"]
    for each in launched.launches:
        assert not each.kernel.tensor_maps
        for operand in ("q", "k", "v", "o", "d_o"):
            assert each.addresses[operand] == tensors[operand].data_ptr()
    assert [x.shape for x in found] == [tensors[n].shape for n in "qkv"]


def test_op_equal_shapes_at_odd_addresses_take_kernels_of_their_own(launched):
    odd = given() | ODD["address"]
    for tensors in (given(), odd, given(), odd):
        op.backward(*tensors.values(), *rest())
    assert [problem.kv_fetch for problem in launched.problems] == ["tma", "gather"]


def test_op_no_keys_launches_nothing_and_is_zero(launched):
    dq, dk, dv, *_ = op.backward(*given(s_kv=0).values(), *rest())
    assert not launched.launches and not launched.problems
    assert not dq.any() and dk.numel() == dv.numel() == 0


REFUSED = {
    "dtype": (given(dtype=torch.float32), "float16 and bfloat16"),
    "kv dtype": ({"k": given()["k"].half(), "v": given()["v"].half()}, "one dtype"),
    "partial": ({"o": given()["o"].float()}, "o needs bfloat16"),
    "d_o shape": ({"d_o": given(d_v=48)["d_o"]}, r"d_o needs bfloat16 \[2, 5, 4, 40\]"),
    "lse": ({"lse": torch.zeros(2, 5, 4)}, r"lse needs float32 \[2, 4, 5\]"),
    "dlse device": ({"dlse": torch.zeros(2, 4, 5, device="meta")}, "dlse is on meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_op_refuses_before_a_launch(launched, name):
    changes, word = REFUSED[name]
    with pytest.raises(SpecError, match=word):
        op.backward(*(given() | changes).values(), *rest())
    assert not launched.launches


def test_op_fake_result_has_the_shapes_of_the_real_one():
    tensors = [tensor.to("meta") for tensor in given().values()]
    *found, dsink = torch.ops.attngen.backward(*tensors, *rest())[:4]
    assert [x.shape for x in found] == [x.shape for x in tensors[2:5]] and dsink.shape == (0,)
    sink = torch.zeros(HEADS_Q, device="meta")
    more = dict(zip(OPTIONAL, (None,) * len(OPTIONAL), strict=True)) | {"sink": sink}
    others = (*more.values(), *Arguments(softmax="learnable"))
    dsink = torch.ops.attngen.backward(*tensors, *others)[3]
    assert dsink.shape == (HEADS_Q,)


def test_gradient_of_the_sink_is_summed_from_the_workspace():
    """LSE in log2 units and D, in blocks; what is no row has +inf and 0."""
    rows, used = 8, 5
    d = torch.zeros(BATCH, HEADS_Q, rows)
    lse = torch.full((BATCH, HEADS_Q, rows), float("inf"))
    make = torch.Generator().manual_seed(0)
    d[..., :used] = torch.randn(BATCH, HEADS_Q, used, generator=make)
    lse[..., :used] = 3 * torch.randn(BATCH, HEADS_Q, used, generator=make)
    lse[0, 0, 0] = float("inf")  # a row that sees nothing, and no sink either
    workspace = torch.cat([(lse / math.log(2)).flatten(), d.flatten()]).view(torch.uint8)
    places = WorkspaceRows(tuple(d.shape), lse_log2=0, d=4 * d.numel())
    sink = torch.linspace(-1, 4, HEADS_Q)
    wanted = -2 * (torch.exp(sink[:, None] - lse) * d).sum((0, 2))
    torch.testing.assert_close(sinks.gradient(sink, places, workspace, 2.0), wanted)


def test_op_sink_alone_needs_the_first_kernel_only(launched):
    sink = torch.zeros(HEADS_Q)
    optional = [sink if name == "sink" else None for name in OPTIONAL]
    others = (*optional, *Arguments(softmax="learnable"), False, False, True)
    *gradients, dsink = op.backward(*given().values(), *others)[:4]
    assert [each.kernel.entry.partition("__")[0] for each in launched.launches] == ["bwd_prepare"]
    assert all(x.shape == (0,) for x in gradients) and dsink.shape == (HEADS_Q,)


def test_op_sink_without_keys_takes_the_gradient_of_the_lse(launched):
    sink = torch.zeros(HEADS_Q)
    optional = [sink if name == "sink" else None for name in OPTIONAL]
    tensors = given(s_kv=0)
    found = op.backward(*tensors.values(), *optional, *Arguments(softmax="learnable"))
    torch.testing.assert_close(found[3], tensors["dlse"].sum((0, 2)))

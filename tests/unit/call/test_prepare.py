"""Launches from descriptions alone: in a process that has no torch, and as of torch's tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from attngen import SpecError
from attngen.call.kernel_choice import Device
from attngen.call.numbers import Arguments
from attngen.call.prepare.backward import prepare_backward
from attngen.call.prepare.forward import prepare_forward
from attngen.call.prepared import LAUNCHES_KEPT, Output, PreparedCall, refuse_addresses
from attngen.call.table import INPUTS, OPTIONAL, WantedGradients
from attngen.call.tensors import TensorDesc
from attngen.frontends.pytorch.descriptions import all_described
from tests.support import launch_kit
from tests.support.paths import ROOT

DEVICE = Device("gpu:0", 0, "sm_90a")
Q = TensorDesc.contiguous((2, 300, 4, 64), "bfloat16")

# A front end without torch: what it is given, and what it gets.
ALONE = """
import sys, json
sys.modules["torch"] = None
from attngen.call import kernel_choice
from attngen.call.kernel_choice import Device
from attngen.call.numbers import Arguments
from attngen.call.prepare.backward import prepare_backward
from attngen.call.prepare.forward import prepare_forward
from attngen.call.prepared import refuse_addresses
from attngen.call.table import OPTIONAL, WantedGradients
from attngen.call.tensors import TensorDesc
from attngen.compiler.builder import render_problem
from attngen.kernels.plan import plans
from attngen.runtime.load import LoadedKernel
from attngen.spec.resolve import resolve
from attngen.fragments import features

def kernels_of(spec, device, choice):
    problem = resolve(spec, features.scan())[choice.place]
    entries = [render_problem(problem, each).kernel for each in plans(problem, device.arch)]
    return tuple(LoadedKernel("handle", entry, 0, 132) for entry in entries)

kernel_choice.kernels_of, kernel_choice.multiprocessors = kernels_of, lambda device: 132
device, q = Device("gpu:0", 0, "sm_90a"), TensorDesc.contiguous((2, 300, 4, 64), "bfloat16")
arguments, absent = Arguments(mask="causal", deterministic=True), [None] * len(OPTIONAL)
forward = prepare_forward((q, q, q, *absent), arguments, device, refuse_addresses)
o, lse = (TensorDesc.contiguous(x.sizes, x.dtype) for x in forward.outputs)
given = {"d_o": o, "o": o, "lse": lse, "q": q, "k": q, "v": q, "dlse": None}
given |= dict.fromkeys(OPTIONAL)
wanted = WantedGradients(dsink=False, dbias=False)
backward = prepare_backward(given, arguments, wanted, False, device)
print(json.dumps({
    name: [
        [x.loaded.kernel.entry.partition("__")[0] for x in found.launches],
        [[x.name, x.sizes, x.dtype] for x in found.outputs],
        found.workspace_bytes,
    ]
    for name, found in (("forward", forward), ("backward", backward))
}))
"""


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stand_in in launch_kit.stand_ins(lambda *_: None).items():
        monkeypatch.setattr(name, stand_in)


def forward_of(**optional: Any) -> PreparedCall:
    """A causal forward of Q three times, with these tensors beside it."""
    operands = (Q, Q, Q, *[optional.get(name) for name in OPTIONAL])
    return prepare_forward(operands, Arguments(mask="causal"), DEVICE, refuse_addresses)


def test_process_without_torch_prepares_both_directions() -> None:
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    kernels, outputs, workspace = found["forward"]
    assert kernels == ["sm90_fwd"] or kernels == ["sm90_fwd_short"]
    assert outputs == [["o", [2, 300, 4, 64], "bfloat16"], ["lse", [2, 4, 300], "float32"]]
    assert not workspace
    kernels, outputs, workspace = found["backward"]
    assert kernels[0] == "bwd_prepare" and "sm90_bwd" in kernels
    assert outputs == [[name, [2, 300, 4, 64], "bfloat16"] for name in ("dq", "dk", "dv")]
    assert workspace >= 2 * 4 * 300 * (4 + 4 + 4 * 64)  # LSE, D and the sums of dQ


@pytest.mark.usefixtures("chip")
def test_description_of_a_tensor_prepares_as_one_that_was_written_out() -> None:
    tensor = torch.empty(Q.shape, dtype=torch.bfloat16)
    operands = all_described((tensor, tensor, tensor, *[None] * len(OPTIONAL)))
    arguments = Arguments(mask="causal")
    described = prepare_forward(operands, arguments, DEVICE, refuse_addresses)
    written = forward_of()
    assert described.outputs == written.outputs
    assert [x.values for x in described.launches] == [x.values for x in written.launches]
    assert [x.start for x in described.launches] == [x.start for x in written.launches]


@pytest.mark.usefixtures("chip")
def test_every_address_of_a_launch_has_a_source() -> None:
    prepared = forward_of(alibi_slopes=TensorDesc.contiguous((4,), "float32"))
    known = {*prepared.fixed, *(name for _, name in prepared.operands), *prepared.offsets}
    known |= {name for name, _, _ in prepared.sources} | {*prepared.names, "tile_counter"}
    needed = {name for each in prepared.launches for _, name in each.pointers}
    assert needed <= known and "alibi_slopes" in needed
    assert [INPUTS[place] for place, _ in prepared.operands] == [*"qkv", "alibi_slopes"]


@pytest.mark.usefixtures("chip")
def test_addresses_that_the_copy_engine_cannot_read_ask_for_the_gathering_call() -> None:
    operands = (Q, Q, Q, *[None] * len(OPTIONAL))
    asked: list[Any] = []

    def gathering(given: Any) -> PreparedCall:
        asked.append(given)
        return prepare_forward(given, Arguments(), DEVICE, gathering, gather=True)

    prepared = prepare_forward(operands, Arguments(), DEVICE, gathering)
    assert prepared.unaligned is not None
    other = prepared.unaligned(operands)
    assert asked == [operands] and other.unaligned is None
    assert other.launches[0].loaded.kernel.entry != prepared.launches[0].loaded.kernel.entry
    with pytest.raises(SpecError, match="multiple of 16 bytes"):
        refuse_addresses(operands)


@pytest.mark.usefixtures("chip")
def test_call_without_keys_has_outputs_and_no_launches() -> None:
    empty = TensorDesc.contiguous((2, 0, 4, 64), "bfloat16")
    operands = (Q, empty, empty, *[None] * len(OPTIONAL))
    arguments = Arguments(softmax="off_by_one")
    prepared = prepare_forward(operands, arguments, Device("x", 0, None), refuse_addresses)
    assert not prepared.launches
    out, lse = prepared.outputs
    assert (out.rest, lse.rest) == (0.0, 0.0)
    assert out == Output.like("o", Q, 0.0) and out.bytes == 2 * 300 * 4 * 64 * 2


@pytest.mark.usefixtures("chip")
def test_unread_results_are_asked_for_where_they_are_small(monkeypatch) -> None:
    prepared = forward_of()
    alone = prepared.first_alone(lambda device: 1 << 30)
    assert alone.names == ("o",) and alone.fixed["lse"] == 1 << 30
    assert prepared.first_alone(lambda device: None).names == ("o", "lse")
    monkeypatch.setattr("attngen.runtime.counters.UNREAD_BYTES", 2 * 4 * 300 * 4 - 1)
    assert prepared.first_alone(lambda device: 1 << 30).names == ("o", "lse")


def test_every_fault_is_named_at_once() -> None:
    other = TensorDesc.contiguous((2, 300, 4, 64), "bfloat16", device="elsewhere")
    sink = TensorDesc.contiguous((3,), "float64")
    operands = (Q, other, Q, *[sink if name == "sink" else None for name in OPTIONAL])
    with pytest.raises(SpecError) as caught:
        prepare_forward(operands, Arguments(softmax="learnable"), DEVICE, refuse_addresses)
    assert caught.value.reasons == (
        "sink needs float32 [h_q=4], got float64 [3]",
        "k is on elsewhere, q on None; move one",
    )


def test_backward_of_other_dtypes_is_refused() -> None:
    q = TensorDesc.contiguous((2, 300, 4, 64), "float32")
    lse = TensorDesc.contiguous((2, 4, 300), "float32")
    given = {**dict.fromkeys(OPTIONAL), **dict.fromkeys(("q", "k", "v", "o", "d_o"), q)}
    given |= {"lse": lse, "dlse": None}
    with pytest.raises(SpecError, match="the backward takes float16 and bfloat16"):
        prepare_backward(given, Arguments(), WantedGradients(), False, DEVICE)


@pytest.mark.usefixtures("chip")
def test_addresses_are_of_operands_results_workspaces_and_parts() -> None:
    q = TensorDesc.contiguous((2, 300, 3, 4, 64), "bfloat16")
    operands = (q, None, None, *[None] * len(OPTIONAL))
    prepared = prepare_forward(operands, Arguments(layout="bs3hd"), DEVICE, refuse_addresses)
    assert prepared.pointed[:3] == ("q", "o", "lse")
    pointers = [4096 * (place + 1) for place in range(len(prepared.pointed))]
    found = prepared.addresses(pointers)
    assert (found["k"], found["v"]) == (4096 + 4 * 64 * 2, 4096 + 2 * 4 * 64 * 2)
    assert found.items() >= dict(zip(prepared.pointed, pointers, strict=True)).items()
    assert prepared.carriers == 1 and prepared.shift % 16 == 0
    with pytest.raises(ValueError):
        prepared.addresses(pointers[1:])


@pytest.mark.usefixtures("chip")
def test_workspaces_lie_in_one_allocation() -> None:
    given = {**dict.fromkeys(OPTIONAL), **dict.fromkeys(("d_o", "o", "q", "k", "v"), Q)}
    given |= {"lse": TensorDesc.contiguous((2, 4, 300), "float32"), "dlse": None}
    wanted = WantedGradients(dsink=False, dbias=False)
    prepared = prepare_backward(given, Arguments(), wanted, False, DEVICE)
    *_, workspace, counter = prepared.pointed
    assert (workspace, counter) == ("workspace", "tile_counter")
    found = prepared.addresses([1 << 20] * len(prepared.pointed))
    assert {name: found[name] - (1 << 20) for name in prepared.offsets} == prepared.offsets
    assert [prepared.names[place] for place in prepared.read] == [
        name for name in prepared.names if name in ("d_o", "o", "q", "k", "v")
    ]


@pytest.mark.usefixtures("chip")
def test_launches_are_kept_by_their_addresses_and_not_too_many() -> None:
    prepared = forward_of()
    (launch,) = prepared.launches
    for number in range(LAUNCHES_KEPT + 1):
        pointers = tuple(4096 * (place + number) for place in range(len(prepared.pointed)))
        launched: Any = [(launch, f"parameters {number}")]
        prepared.keep(pointers, launched)
        assert prepared.kept[pointers] is launched
        assert len(prepared.kept) <= LAUNCHES_KEPT
    assert not prepared.placed([0, 1, 2, *[None] * len(OPTIONAL)]).kept

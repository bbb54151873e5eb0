"""The operation `attngen::forward` without a GPU: what it would launch, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attngen import SpecError
from attngen.call import kernel_choice
from attngen.call.table import SCALES
from attngen.frontends.pytorch import descriptions, operation
from attngen.frontends.pytorch import forward as op
from attngen.frontends.pytorch.signature import split
from attngen.runtime.load import LoadedKernel
from attngen.runtime.program import Field, KernelEntry, TensorMapRecipe
from tests.support.caches import forget
from tests.support.fp8_kit import E4M3, E5M2, operands, rest_of, scales

STRIDES = tuple(f"descale_{name}_stride_{axis}" for name in "qkv" for axis in ("batch", "head"))
POINTERS = ("lse", *SCALES, "amax_s", "amax_o")


@pytest.mark.parametrize("amax", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, E5M2])
def test_op_fake_result_has_the_shapes_of_the_real_one(amax, out_dtype):
    q, k, v = (x.to("meta") for x in operands())
    out, lse, *maxima = torch.ops.attngen.forward(q, k, v, *rest_of(out_dtype, amax))
    assert out.shape == (2, 5, 4, 16) and out.dtype == out_dtype
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    assert [tuple(x.shape) for x in maxima] == [(int(amax),)] * 2 + [(0,)]


ENTRY = KernelEntry(
    entry="kernel",
    threads=512,
    smem_bytes=1000,
    tile_rows=128,
    params_bytes=1024,
    fields=(
        *(Field(f"map_{name}", "tensor_map", 128 * n) for n, name in enumerate("qkvo")),
        *(Field(name, "ptr", 512 + 8 * n) for n, name in enumerate(POINTERS)),
        *(Field(name, "i32", 640 + 4 * n) for n, name in enumerate(STRIDES)),
    ),
    tensor_maps=tuple(
        TensorMapRecipe(f"map_{name}", name, dtype, 128, 64)
        for name, dtype in zip("qkvo", ("e4m3", "e5m2", "e5m2", "e4m3"), strict=True)
    ),
    grid="persistent_tiles",
    workspace=(),
    kv_group_bytes=1 << 20,
    group_heads=8,
    tail_share=0,
)


@pytest.fixture
def launched(monkeypatch):
    """Launches on the CPU of a kernel with every FP8 parameter, and the specs it was asked for."""
    found, specs = [], []

    def note(prepared, addresses, stream):
        found.append(SimpleNamespace(prepared=prepared, addresses=dict(addresses)))
        return addresses

    kernel = LoadedKernel("handle", ENTRY, 0, 132)
    find = lambda spec, *_: specs.append(spec) or (kernel,)  # noqa: E731
    monkeypatch.setattr(kernel_choice, "kernels_of", find)
    monkeypatch.setattr(kernel_choice, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(descriptions, "device_arch", lambda device: "sm_90a")
    for name in ("launch", "relaunch"):  # which the addresses serve for parameters
        monkeypatch.setattr(operation, name, note)
    forget(monkeypatch, op.prepared_calls)
    monkeypatch.setattr(operation, "_empty_strided_cuda", filled)
    monkeypatch.setattr(operation.load, "current_device", lambda: None)
    monkeypatch.setattr(operation, "current_device", lambda: None)
    monkeypatch.setattr(operation, "current_stream", lambda index: 7)
    return SimpleNamespace(launches=found, specs=specs)


def filled(sizes, strides, dtype):
    """Memory in which an element nobody writes shows up."""
    tensor = torch.empty_strided(sizes, strides, dtype=torch.float32).fill_(-1.0)
    return tensor if dtype == torch.float32 else torch.full_like(tensor, float("nan")).to(dtype)


def test_op_launch_has_every_address_and_stride(launched):
    q, k, v = operands(kv_dtype=E5M2)
    given = scales()
    out, lse, amax_s, amax_o, _ = op.forward(q, k, v, *rest_of(E4M3, True, **given))
    (launch,) = launched.launches
    tensors = {**given, "q": q, "k": k, "v": v, "o": out, "lse": lse}
    tensors |= {"amax_s": amax_s, "amax_o": amax_o}
    known = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    absent = set(POINTERS) - known.keys()  # of what the kernel names
    assert launch.addresses == dict.fromkeys(absent, 0) | known
    assert amax_s.tolist() == amax_o.tolist() == [0.0], "a launch must find them zeroed"
    values = dict(zip((f.name for f in ENTRY.fields), launch.prepared.values, strict=True))
    assert [values[name] for name in STRIDES] == [2, 1, 0, 0, 1, 2]
    (spec,) = launched.specs
    assert (spec.dtype, spec.kv_dtype, spec.out_dtype) == ("e4m3", "e5m2", "e4m3")
    assert (spec.head_dim, spec.head_dim_v, spec.window) == (32, 16, False)


def test_op_launch_without_scales_has_addresses_zero(launched):
    *_, amax_s, amax_o, _ = op.forward(*operands(), *rest_of())
    (launch,) = launched.launches
    assert all(launch.addresses[name] == 0 for name in (*SCALES, "amax_s", "amax_o"))
    assert amax_s.shape == amax_o.shape == (0,)


def test_op_new_addresses_of_known_shapes_prepare_nothing(launched):
    given = scales()
    for _ in range(3):
        fresh = {
            name: tensor.clone(memory_format=torch.preserve_format)
            for name, tensor in given.items()
        }
        op.forward(*operands(), *rest_of(E4M3, **fresh))
    first, *others = launched.launches
    assert all(other.prepared is first.prepared for other in others)
    assert len({launch.addresses["descale_q"] for launch in launched.launches}) > 1
    op.forward(*operands(), *rest_of(E4M3, **{**given, "descale_q": torch.ones(1)}))
    assert launched.launches[-1].prepared is not first.prepared


def test_op_nothing_to_see_launches_nothing_and_is_zero(launched):
    out, lse, amax_s, amax_o, _ = op.forward(*operands(s_kv=0), *rest_of(E4M3, True))
    assert not launched.launches and not launched.specs
    assert not out.float().any() and (lse == -torch.inf).all()
    assert amax_s.tolist() == amax_o.tolist() == [0.0]


REFUSED = {
    "float32": ({"q": torch.zeros(2, 5, 4, 32)}, "in k and v alike"),
    "half": ({"q": torch.zeros(2, 5, 4, 32).half()}, "beside float16 it is that"),
    "kv differ": ({"v": operands(kv_dtype=E5M2)[2]}, "in k and v alike"),
    "descale shape": ({"descale_q": torch.ones(2, 4)}, r"descale_q needs float32 \[1\] or \[b=2"),
    "descale device": ({"descale_k": torch.ones(1, device="meta")}, "descale_k is on meta"),
    "scale_s alone": ({"scale_s": torch.ones(1)}, "belong together"),
    "scale_o": ({"scale_o": torch.ones(1)}, "scale_o scales an FP8 output"),
    "out_dtype": ({"out_dtype": torch.float32}, "out_dtype"),
    "alignment": ({"q": torch.zeros(2, 5, 4, 33).to(E4M3)[..., 1:]}, "multiples of 16 bytes"),
    "last axis": ({"q": torch.zeros(2, 5, 4, 64).to(E4M3)[..., ::2]}, "last axis"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_op_called_directly_refuses_before_a_launch(launched, name):
    changes, word = REFUSED[name]
    given = dict(zip("qkv", operands(), strict=True)) | changes
    tensors = [given.pop(letter) for letter in "qkv"]
    with pytest.raises(SpecError, match=word):
        op.forward(*tensors, *rest_of(**given))
    assert not launched.launches


def test_op_descale_out_of_32_bit_reach_is_refused(launched):
    far = torch.empty(2, 2, device="meta").as_strided((2, 2), (1 << 31, 1))
    with pytest.raises(SpecError, match="descale_v.*beyond 2.31"):
        op.forward(*(x.to("meta") for x in operands()), *rest_of(descale_v=far))


@pytest.mark.parametrize(("room", "captured"), [(True, False), (False, False), (True, True)])
def test_ready_for_the_output_alone_writes_the_rest_where_nobody_reads(
    launched, monkeypatch, room, captured
):
    lse_bytes = 2 * 4 * 5 * 4
    monkeypatch.setattr(operation.counters, "UNREAD_BYTES", lse_bytes - (not room))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr(operation.counters, "unread", lambda device: 1 << 40)
    room = room and not captured  # nothing is allocated under capture
    optional, arguments = split(rest_of())
    given = (*operands(), *optional)
    ready = op.find_prepared(given, arguments)
    alone = ready.first_alone(operation.unread_memory)
    assert [x.name for x in ready.outputs] == ["o", "lse"]
    assert [x.name for x in alone.outputs] == (["o"] if room else ["o", "lse"])
    out, *others = operation.run(alone, given)
    assert out.shape == (2, 5, 4, 16) and len(others) == (not room)
    found = launched.launches[-1].addresses["lse"]
    assert found == (1 << 40 if room else others[0].data_ptr())


@pytest.mark.parametrize("unread_bytes", [0, 1 << 20])
def test_ready_for_the_output_alone_has_no_lse_where_the_kernel_writes_none(
    launched, monkeypatch, unread_bytes
):
    monkeypatch.setattr(operation.counters, "UNREAD_BYTES", unread_bytes)
    monkeypatch.setattr(op, "unread_memory", lambda device: pytest.fail("not needed"))
    asked = []

    def load(spec, device, choice):
        alone = choice.kernel == "sm90_fwd_alone"
        asked.append(alone)
        return (LoadedKernel("handle", replace(ENTRY, no_lse=alone), 0, 132),)

    monkeypatch.setattr(kernel_choice, "kernels_of", load)
    optional, arguments = split(rest_of())
    (out,) = operation.run(op.find_alone(given := (*operands(), *optional), arguments), given)
    assert out.shape == (2, 5, 4, 16) and launched.launches[-1].addresses["lse"] == 0
    _, lse = operation.run(op.find_prepared(given, arguments), given)
    assert launched.launches[-1].addresses["lse"] == lse.data_ptr()
    scaled = [
        torch.ones(1) if name.endswith("scale_s") else x
        for name, x in zip(op.INPUTS, given, strict=True)
    ]
    monkeypatch.setattr(op, "unread_memory", lambda device: 1 << 40)
    op.find_alone(scaled, arguments)
    assert asked == [True, False, False]


def test_op_on_integers_is_refused(launched):
    q = torch.zeros(2, 5, 4, 64, dtype=torch.int8)
    with pytest.raises(SpecError, match=r"need one dtype of .*; got int8, int8, int8\. Cast them"):
        op.forward(q, q, q)
    assert not launched.launches

"""Memory: strides, views, far apart elements, and nothing read or left unwritten that must not."""

from __future__ import annotations

import pytest
import torch

import attngen

from . import cases, oracle
from .cases import Case

pytestmark = pytest.mark.gpu
KERNELS = [
    *cases.core_specs(64, 128),
    cases.spec(72, 40, mask="causal"),
    cases.spec(40, 72, "fp16"),
    cases.spec(40, 56),
    cases.spec(128, partial=True, mask="causal"),
]

POISONED = [
    Case(64, 64, mask="causal", lengths=(130, 333)),
    Case(128, 128, lengths=(65, 127), heads=(3, 5, 1)),
    Case(128, 128, window=(50, 20), lengths=(333, 130), layout="sbhd"),
    Case(72, 40, mask="causal", heads=(2, 6, 2), layout="bhsd"),
    Case(40, 72, "fp16", lengths=(1, 300)),
    Case(64, 64, mask="causal_bottom_right", window=(17, -1), lengths=(300, 77)),
]


def surrounded(tensor: torch.Tensor) -> torch.Tensor:
    """Make a view with a tensor's values in a buffer of NaN, larger at every end of every axis."""
    shape = (*(n + 2 for n in tensor.shape[:3]), tensor.shape[3] + 16)
    buffer = torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device)
    view = buffer[1:-1, 1:-1, 1:-1, 8:-8]
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("case", POISONED, ids=str)
def test_memory_nan_all_around_the_operands_is_never_read(case):
    q, k, v = case.operands()
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(
            *(surrounded(x) for x in (q, k, v)), **case.arguments, backend="cuda", return_lse=True
        )
    oracle.check(out, aux.lse, oracle.truth(q, k, v, **case.arguments), case.layout)


@pytest.mark.parametrize("case", POISONED, ids=str)
def test_memory_views_give_the_bits_of_contiguous_operands(case):
    q, k, v = case.operands()
    plain = attngen.attention(q, k, v, **case.arguments, backend="cuda")
    viewed = attngen.attention(
        *(surrounded(x) for x in (q, k, v)), **case.arguments, backend="cuda"
    )
    assert torch.equal(plain, viewed)


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("packed_axis", [2, 3], ids=["3hd", "h3d"])
def test_memory_slices_of_a_packed_tensor_are_read_in_place(layout, packed_axis):
    shape = [2, 140, 4, 64] if layout == "bshd" else [140, 2, 4, 64]
    shape.insert(packed_axis, 3)
    packed = oracle.randn(*shape)
    q, k, v = packed.unbind(packed_axis)
    oracle.check_call(q, k, v, layout=layout, mask="causal")


def test_memory_slices_of_heads_and_positions_are_read_in_place():
    q, k, v = oracle.operands(3, 8, 8, 300, 300, 64)
    oracle.check_call(q[:, 20:151, 2:5], k[:, 100:, 5:], v[:, 100:, 1:4], mask="causal")
    oracle.check_call(q[1:, ::2, ::2], k[1:, ::3, 1::2], v[1:, ::3, ::2])
    oracle.check_call(q[..., :40], k[..., 24:], v[..., 8:])


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3), (2, 1, 0, 3)], ids=str)
def test_memory_permuted_operands_are_read_in_place(order):
    back = [order.index(axis) for axis in range(4)]
    tensors = oracle.operands(2, 4, 4, 130, 130, 64)
    q, k, v = (x.permute(order).contiguous().permute(back) for x in tensors)
    assert not q.is_contiguous()
    oracle.check_call(q, k, v, mask="causal")


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "seq", "heads"])
@pytest.mark.parametrize("which", ["q", "k", "v", "kv"])
def test_memory_broadcast_operands_are_right_or_refused(axis, which):
    def broadcast(tensor, name):
        if name not in which:
            return tensor
        shape = tensor.shape
        return tensor.narrow(axis, 0, 1).expand(shape)

    q, k, v = oracle.operands(3, 4, 4, 140, 140, 64)
    q, k, v = broadcast(q, "q"), broadcast(k, "k"), broadcast(v, "v")
    try:
        out = attngen.attention(q, k, v, mask="causal", backend="cuda")
    except attngen.AttngenError:
        return
    oracle.check(out, None, oracle.truth(q, k, v, mask="causal"))


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("axis", ["b", "s", "h"])
def test_memory_size_one_axis_may_have_any_stride(layout, axis):
    """A stride that nothing steps over need not be a multiple of 16 bytes, nor within reach."""
    sizes = {"b": 2, "s": 70, "h": 2, "d": 64, axis: 1}
    for stride in (1, 3, 0, (1 << 40) + 1):
        tensors = []
        for seed in range(3):
            tensor = oracle.randn(*(sizes[name] for name in layout), seed=seed)
            strides = list(tensor.stride())
            strides[layout.index(axis)] = stride
            tensors.append(tensor.as_strided(tensor.shape, strides))
        oracle.check_call(*tensors, layout=layout, mask="causal")


@pytest.mark.device
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "seq", "heads"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_memory_elements_past_two_to_the_32_are_reached(axis, mask):
    sizes = (2, 130, 2, 64)
    strides = [130 * 128, 128, 64, 1]
    strides[axis] = -(-(1 << 32) // (sizes[axis] - 1) // 64) * 64
    span = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    assert span > 1 << 32
    tensors = oracle.operands(2, 2, 2, 130, 130, 64)
    views = []
    for tensor in tensors:
        buffer = torch.empty(span, dtype=torch.bfloat16, device=oracle.DEVICE)
        views.append(buffer.as_strided(sizes, strides).copy_(tensor))
    oracle.check_call(*views, mask=mask)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    "fault", ["last axis", "row of 8 bytes", "head of 8 bytes", "base 2 bytes", "base 8 bytes"]
)
def test_memory_what_the_copy_engine_cannot_read_is_right(name, fault):
    tensors = dict(zip("qkv", oracle.operands(2, 2, 2, 70, 70, 64), strict=True))
    shape = tensors[name].shape
    flat = oracle.randn(2 * 70 * 2 * 64 * 3)
    strides = {
        "last axis": (70 * 256, 256, 128, 2),
        "row of 8 bytes": (70 * 132, 132, 64, 1),
        "head of 8 bytes": (70 * 144, 144, 68, 1),
    }.get(fault, (70 * 128, 128, 64, 1))
    offset = {"base 2 bytes": 1, "base 8 bytes": 4}.get(fault, 0)
    tensors[name] = flat.as_strided(shape, strides, offset)
    oracle.check_call(*tensors.values(), mask="causal")


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_memory_operands_that_share_their_memory_are_right(mask):
    x = oracle.randn(2, 150, 4, 64)
    oracle.check_call(x, x, x, mask=mask)


def test_memory_inputs_are_left_as_they_were():
    tensors = oracle.operands(2, 4, 2, 200, 200, 128)
    before = [x.clone() for x in tensors]
    attngen.attention(*tensors, mask="causal", backend="cuda")
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


@pytest.mark.parametrize("partial", [False, True])
def test_memory_output_next_to_other_tensors_stays_in_its_bounds(partial):
    """Tensors of the output's size lie around it in the allocator's blocks; none may change."""
    q, k, v = oracle.operands(1, 3, 3, 67, 67, 128)
    size = q.numel() * (4 if partial else 2)
    guards = [torch.full((size,), 0x5A, dtype=torch.uint8, device=q.device) for _ in range(17)]
    del guards[8]
    out_dtype = "float32" if partial else None
    torch.ops.attngen.forward(q, k, v, mask="causal", out_dtype=out_dtype)
    assert all((guard == 0x5A).all() for guard in guards)

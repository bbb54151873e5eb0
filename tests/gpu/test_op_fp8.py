"""The FP8 operation: memory around its operands, repeats, CUDA graphs, torch.compile."""

from __future__ import annotations

import pytest
import torch

import attngen
from tests.support.caches import FORWARD, held

from . import cases, cases_fp8, oracle, oracle_fp8
from .cases_fp8 import Fp8Case
from .oracle_fp8 import DTYPES

pytestmark = pytest.mark.gpu
E4M3 = DTYPES["e4m3"]
KERNELS = [
    *(cases_fp8.spec(d, None, mask) for d in (64, 128, 256) for mask in ("none", "causal")),
    cases_fp8.spec(64, None, "causal", dtypes=("e4m3", "e4m3", "e4m3")),
]
POISONED = [
    Fp8Case(64, 64, mask="causal", lengths=(130, 333), out_dtype="e4m3"),
    Fp8Case(128, 128, lengths=(65, 127), heads=(3, 5, 1)),
    Fp8Case(128, 128, window=(50, 20), lengths=(333, 130), layout="sbhd", kv_dtype="e5m2"),
    Fp8Case(80, 48, mask="causal", heads=(2, 6, 2), layout="bhsd", out_dtype="fp16"),
    Fp8Case(256, 256, mask="causal_bottom_right", lengths=(300, 77), out_dtype="e4m3"),
]


def surrounded(tensor: torch.Tensor) -> torch.Tensor:
    """Make a view with a tensor's values in a buffer of NaN, larger at every end of every axis."""
    shape = (*(n + 2 for n in tensor.shape[:3]), tensor.shape[3] + 32)
    buffer = torch.full(shape, 0xFF, dtype=torch.uint8, device=tensor.device).view(tensor.dtype)
    assert buffer.float().isnan().all()
    view = buffer[1:-1, 1:-1, 1:-1, 16:-16]
    view.copy_(tensor)
    return view


def same(results, wanted) -> bool:
    """Whether tensors of any dtype agree bit for bit; `torch.equal` has no 8-bit floats."""
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(results, wanted, strict=True)
    )


@pytest.mark.parametrize("case", POISONED, ids=str)
def test_fp8_nan_all_around_the_operands_is_never_read(case):
    q, k, v = case.operands()
    oracle_fp8.check_call(*(surrounded(x) for x in (q, k, v)), **case.arguments)


@pytest.mark.parametrize("case", POISONED, ids=str)
def test_fp8_views_give_the_bits_of_contiguous_operands(case):
    q, k, v = case.operands()
    plain = attngen.attention(q, k, v, **case.arguments, backend="cuda")
    views = (surrounded(x) for x in (q, k, v))
    assert same([attngen.attention(*views, **case.arguments, backend="cuda")], [plain])


@pytest.mark.parametrize("packed_axis", [2, 3], ids=["3hd", "h3d"])
def test_fp8_slices_of_a_packed_tensor_are_read_in_place(packed_axis):
    shape = [2, 140, 4, 64]
    shape.insert(packed_axis, 3)
    packed = oracle.randn(*shape).to(E4M3)
    oracle_fp8.check_call(*packed.unbind(packed_axis), mask="causal")


def test_fp8_operands_and_scales_are_left_as_they_were():
    tensors = oracle_fp8.operands(2, 4, 2, 200, 200, 64)
    scales = all_scales(tensors[0].device)
    before = [x.clone() for x in (*tensors, *scales.values())]
    full_call(*tensors, scales)
    assert same((*tensors, *scales.values()), before)


def test_fp8_output_next_to_other_tensors_stays_in_its_bounds():
    q, k, v = oracle_fp8.operands(1, 3, 3, 67, 67, 64)
    size = q.numel()
    guards = [torch.full((size,), 0x5A, dtype=torch.uint8, device=q.device) for _ in range(17)]
    del guards[8]
    attngen.attention(q, k, v, mask="causal", out_dtype=E4M3, backend="cuda")
    assert all((guard == 0x5A).all() for guard in guards)


@pytest.mark.device
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_fp8_hundred_runs_give_the_same_bits(d, mask):
    q, k, v = oracle_fp8.operands(12, 16, 4, 1100, 1100, d)
    arguments = {"mask": mask, "return_amax": True, "backend": "cuda"}
    first, aux = attngen.attention(q, k, v, **arguments)
    differ = torch.zeros(100, dtype=torch.bool, device=q.device)
    for number in range(100):
        out, again = attngen.attention(q, k, v, **arguments)
        differ[number] = (out != first).any() | (again.lse != aux.lse).any()
        differ[number] |= (again.amax_o != aux.amax_o).any() | (again.amax_s != 1).any()
    assert not differ.any(), f"runs {differ.nonzero().flatten().tolist()} differ from the first"


def full_call(q, k, v, scales):
    out, aux = attngen.attention(
        *(q, k, v), mask="causal", out_dtype=E4M3, backend="cuda", return_amax=True, **scales
    )
    return out, aux.lse, aux.amax_s, aux.amax_o


def all_scales(device, factor=1.0):
    """One of each."""
    numbers = {
        **{"descale_q": [[0.5, 1.0], [1.5, 0.25]], "descale_k": [factor], "descale_v": [0.75]},
        **{"scale_s": [128.0], "descale_s": [1 / 128], "scale_o": [8 * factor]},
    }
    return {name: torch.tensor(each, device=device) for name, each in numbers.items()}


@pytest.mark.device
def test_fp8_graph_replay_follows_changed_operands_and_scales():
    q, k, v = oracle_fp8.operands(2, 4, 2, 1100, 1100, 64)
    scales = all_scales(q.device)
    graph, results = oracle.capture(lambda: full_call(q, k, v, scales))
    for number in range(5):
        fresh = oracle_fp8.operands(2, 4, 2, 1100, 1100, 64, seed=number, factor=0.5 + number)
        for tensor, each in zip((q, k, v), fresh, strict=True):
            tensor.copy_(each)
        for name, each in all_scales(q.device, 1 / (1 + number)).items():
            scales[name].copy_(each)
        for result in results:
            result.view(torch.uint8).fill_(0xFF)
        graph.replay()
        assert same(results, full_call(q, k, v, scales))


@pytest.mark.device
def test_fp8_call_never_waits_for_the_device():
    q, k, v = oracle_fp8.operands(2, 4, 2, 130, 130, 64)
    scales = all_scales(q.device)
    full_call(q, k, v, scales)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            full_call(q, k, v, scales)
        for known in held(*FORWARD):
            known.clear()  # nor when it is checked anew
        full_call(q, k, v, scales)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_fp8_compiled_whole_gives_the_eager_result(backend):
    torch._dynamo.reset()

    def model(q, k, v, scales):
        out, lse, amax_s, amax_o = full_call(q, k, v, scales)
        return out.float() * 2, lse.transpose(1, 2), amax_s + amax_o

    q, k, v = oracle_fp8.operands(2, 4, 2, 130, 130, 64)
    scales = all_scales(q.device)
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    for got, want in zip(compiled(q, k, v, scales), model(q, k, v, scales), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("amax", [False, True])
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_fp8_op_passes_opcheck(layout, amax):
    q, k, v = oracle_fp8.operands(2, 4, 2, 70, 90, 128, layout=layout)
    scales = all_scales(q.device)
    del scales["scale_o"]
    torch.library.opcheck(
        torch.ops.attngen.forward,
        (q, k, v),
        {**scales, "layout": layout, "mask": "causal", "amax": amax},
        # test_schema compares operands with an arithmetic that 8-bit floats lack.
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("backend", ["cuda", "auto"])
def test_fp8_backend_auto_takes_the_kernel(backend, caplog):
    q, k, v = oracle_fp8.operands(1, 2, 2, 64, 64, 64)
    out = attngen.attention(q, k, v, backend=backend)
    direct, *_ = torch.ops.attngen.forward(q, k, v)
    assert torch.equal(out, direct) and not caplog.records


def test_fp8_head_dim_without_kernel_takes_the_reference_or_is_refused(caplog):
    q, k, v = oracle_fp8.operands(1, 2, 2, 64, 64, 24)
    with pytest.raises(attngen.SpecError, match="multiples of 16"):
        attngen.attention(q, k, v, backend="cuda")
    out = attngen.attention(q, k, v, backend="auto")
    assert torch.equal(out, attngen.attention(q, k, v, backend="reference"))
    assert "multiples of 16" in caplog.text

"""Whether kernels serve a call, by descriptions of its tensors."""

from __future__ import annotations

import pytest

from attngen import SpecError
from attngen.call.backend import check_backend
from attngen.call.routing import no_kernels, refusals, spec_of_call
from attngen.call.table import AttentionCall
from attngen.call.tensors import TensorDesc
from attngen.targets.target import TARGETS


class Symbol:
    """A size of which a trace knows nothing: whoever compares it fails."""

    def _refuse(self, *_: object) -> bool:
        raise AssertionError("a symbol is compared")

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = _refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def call(*shape: object, dtype: str = "bfloat16", **given: object) -> AttentionCall:
    described = TensorDesc(shape or (2, 300, 4, 64), (0, 0, 0, 1), dtype)  # type: ignore[arg-type]
    operands = dict.fromkeys("qkv", described)
    return AttentionCall(**{**operands, **given})  # type: ignore[arg-type]


def test_described_call_has_its_spec() -> None:
    ends = TensorDesc.contiguous((4,), "int32")
    tokens = TensorDesc.contiguous((900, 4, 64), "float16")
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    spec = spec_of_call(
        call(**dict.fromkeys("qkv", tokens), **lengths, layout="thd", mask="causal", softcap=3.0)
    )
    assert (spec.head_dim, spec.dtype, spec.layout) == (64, "fp16", "thd")
    assert (spec.mask, spec.softcap, spec.gather) == ("causal", True, False)
    assert not refusals(call())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (call(dtype="float64"), "fp64"),
        (call(mask_mod=lambda *_: True), "mask_mod"),
        (call(num_splits=3, dtype="float8_e4m3fn"), "num_splits=3: kernels split the keys of"),
    ],
    ids=["dtype", "function", "splits"],
)
def test_call_without_kernels_is_refused_with_why(given: AttentionCall, reason: str) -> None:
    assert reason in "; ".join(refusals(given))


def test_calls_of_few_queries_have_gradients_where_others_split_their_keys() -> None:
    few = TensorDesc((2, 1, 4, 64), (0, 0, 0, 1), "bfloat16")
    given = call(q=few)
    assert spec_of_call(given).decode
    for arch in ("sm_80", "sm_90"):
        assert not refusals(given, arch=arch, directions=("fwd", "bwd"))
        wide = call(q=few, out_dtype="float32")
        assert not refusals(wide, arch=arch, directions=("fwd", "bwd"))


def test_sizes_of_a_trace_are_not_looked_at() -> None:
    traced = call(Symbol(), Symbol(), Symbol(), 64, mask="causal")
    assert not refusals(traced, traced=True)
    with pytest.raises(AssertionError, match="compared"):
        refusals(traced)


def test_sizes_of_a_trace_decide_where_only_few_queries_have_kernels() -> None:
    wide = call(2, 300, 4, 576)
    assert refusals(wide) == refusals(wide, traced=True) != []


def test_backends_and_devices_are_refused_by_name() -> None:
    check_backend("cuda")
    with pytest.raises(SpecError, match="backend='tpu'; allowed: auto, cuda, reference"):
        check_backend("tpu")
    assert no_kernels("cpu") == f"cpu has no kernels; available: {', '.join(TARGETS)}"

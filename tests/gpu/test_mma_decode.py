"""Split keys by products of warps against float64: on Hopper by kernels built for sm_90, on any
other chip that has kernels by those of its own architecture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import attngen
from attngen.targets.target import TARGETS
from tests.support.caches import kernels_of

from . import oracle
from .conftest import any_chip
from .kv_cache import check_pages, pages
from .test_decode import cache, check, queries
from .test_decode_scores import CHOICES, check_all

pytestmark = pytest.mark.gpu
ARCH = any_chip() or "sm_90"


@pytest.fixture(autouse=True, scope="module")
def forced() -> Iterator[None]:
    """Calls run kernels of this target."""
    with kernels_of(ARCH) as launched:
        yield
    assert "mma_decode" in launched <= {"mma_decode", "combine"}


@pytest.mark.parametrize("page", [1, 7, 16, 64, 100])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_mma_decode_over_pages_of_any_size_is_right(d, page):
    check(queries(4, 1, 8, d), cache([700, 1, 64, 333], 2, d, page))


@pytest.mark.parametrize("splits", [1, 2, 5, 33])
def test_mma_decode_of_any_number_of_splits_is_right(splits):
    check(queries(4, 1, 8, 128), cache([5000, 3, 0, 64], 1, 128), num_splits=splits)


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (6, 2), (71, 1)], ids=str)
@pytest.mark.parametrize("s_q", [1, 7, 40])
def test_mma_decode_of_several_queries_is_right(heads, s_q):
    """Rows of more than one tile among them."""
    q, pages = queries(3, s_q, heads[0], 64), cache([300, 33, 900], heads[1], 64)
    check(q, pages, mask="causal_bottom_right")


@pytest.mark.parametrize("dims", [(192, 128), (80, 48), (8, 8), (40, 256)], ids=str)
def test_mma_decode_of_any_head_dims_is_right(dims):
    d, d_v = dims
    q = queries(3, 2, 4, d).to(torch.float16)
    check(q, cache([150, 40, 7], 2, d, 16, d_v, torch.float16), mask="causal_bottom_right")


@pytest.mark.parametrize("dims", [(576, 512), (512, 512), (320, 264), (64, 448)], ids=str)
@pytest.mark.parametrize("s_q", [1, 3, 9])
def test_mma_decode_of_more_columns_than_a_warp_holds_is_right(s_q, dims):
    """Latent attention is such, whose values are columns of its keys; of 16 to 144 rows."""
    d, d_v = dims
    q, pages = queries(3, s_q, 16, d), cache([300, 33, 0], 1, d, 16, d_v)
    for splits in (None, 1, 3):
        check(q, pages, mask="causal_bottom_right", num_splits=splits)


def test_mma_decode_of_many_columns_beside_scores_and_sinks_is_right():
    q, pages = queries(2, 2, 8, 576), cache([200, 70], 1, 576, 64, 512)
    given = {"softcap": 5.0, "alibi_slopes": True, "softmax": "off_by_one"}
    check(q, pages, mask="causal_bottom_right", num_splits=2, **given)


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("choice", CHOICES[-3:], ids=lambda c: "-".join((*c[0], c[1])))
def test_mma_decode_with_scores_sinks_windows_and_maxima_is_right(choice, splits):
    check_all(choice, queries(4, 5, 8, 128), cache([700, 0, 65, 1500], 2, 128), 1, splits)


DIMS_OF_BYTES = [(64, 64), (128, 128), (256, 256), (80, 48), (576, 512), (64, 448), (304, 272)]


@pytest.mark.parametrize("dims", DIMS_OF_BYTES, ids=str)
@pytest.mark.parametrize("kv", ["e4m3", "e5m2"])
def test_mma_decode_of_8_bit_keys_and_values_is_right(kv, dims):
    """On chips whose tensor cores have the format."""
    if not TARGETS[ARCH].fp8:
        pytest.skip(f"{ARCH} has no FP8")
    for splits in (1, 3):
        cached = pages([500, 0, 65], 2, dims[0], 16, dims[1], kv_dtype=kv, scales="head")
        given = {"mask": "causal_bottom_right", "num_splits": splits}
        check_pages(queries(3, 3, 8, dims[0]), cached, **given)


@pytest.mark.parametrize("lengths", [(1, 4000), (3, 700)], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_mma_decode_of_dense_keys_is_right(lengths, layout):
    s_q, s_kv = lengths
    shapes = ((2, s_q, 4, 64), (2, s_kv, 4, 64), (2, s_kv, 4, 64))
    q, k, v = (oracle.randn(*shape, seed=part) for part, shape in enumerate(shapes))
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    oracle.check_call(q, k, v, layout=layout)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dims", [(64, 64), (576, 512)], ids=str)
def test_mma_decode_of_packed_tokens_is_right(dims, splits):
    d, d_v = dims
    sizes = ((40, d), (900, d), (901, d_v))
    q, k, v = (oracle.randn(n, 4, columns, seed=n) for n, columns in sizes)
    q_ends, kv_ends = (
        torch.tensor(ends, dtype=torch.int32, device=oracle.DEVICE)
        for ends in ([0, 1, 1, 30], [0, 300, 500, 880])
    )
    arguments = {"layout": "thd", "cu_seqlens_q": q_ends, "cu_seqlens_kv": kv_ends}
    expected = oracle.truth(q, k, v[:900], **arguments)
    with oracle.nan_filled_allocations():
        out, aux = attngen.attention(
            q, k, v[:900], **arguments, num_splits=splits, backend="cuda", return_lse=True
        )
    oracle.check(out, aux.lse, expected, "thd")

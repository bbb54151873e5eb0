"""CUDA headers: each compiles alone, those of plain code for a host too; fragment geometry."""

from __future__ import annotations

import ctypes
import itertools

import pytest

from attngen.compiler import cutlass
from attngen.compiler.compile import run_nvrtc
from attngen.io import files

# Headers of scalar code; the others hold PTX, or build on those that do.
HOST_HEADERS = (
    "attngen/context.cuh",
    "attngen/dropout.cuh",
    "attngen/mask_bits.cuh",
    "attngen/mma/fragment.cuh",
    "attngen/platform.cuh",
    "attngen/scheduler/block_range.cuh",
    "attngen/scheduler/cut_tiles.cuh",
    "attngen/scheduler/kv_blocks.cuh",
    "attngen/scheduler/q_blocks.cuh",
    "attngen/scheduler/sequence_order.cuh",
    "attngen/scheduler/tile_order.cuh",
    "attngen/softmax/join.cuh",
    "attngen/softmax/row.cuh",
)
# Headers that stand in the body of a struct, which another one has.
# Those that include CUTLASS's wrappers.
ATOMS = ("attngen/mma/atoms.cuh", "attngen/mma/atoms_fp8.cuh")
MEMBERS = {"attngen/softmax/online/trusted_rows.cuh", "attngen/softmax/online/weights.cuh"}
GEOMETRY = """
#include "attngen/mma/fragment.cuh"
#include "attngen/context.cuh"
using namespace attngen;
extern "C" int row(int index) { return fragment_row(index); }
extern "C" int column(int index) { return fragment_column(index); }
extern "C" int index_of(int half, int k) { return fragment_index(half, k); }
template <int kN>
static void hide(int half, int lo, int hi, float* kept) {
  float scores[kN / 2];
  for (float& score : scores) score = 1.f;
  hide_outside<kN>(scores, half, lo, hi);
  for (int i = 0; i < kN / 2; ++i) kept[i] = scores[i];
}
extern "C" void hide_16(int half, int lo, int hi, float* kept) { hide<16>(half, lo, hi, kept); }
extern "C" void hide_112(int half, int lo, int hi, float* kept) { hide<112>(half, lo, hi, kept); }
extern "C" void hide_128(int half, int lo, int hi, float* kept) { hide<128>(half, lo, hi, kept); }
extern "C" void hide_176(int half, int lo, int hi, float* kept) { hide<176>(half, lo, hi, kept); }
extern "C" int divide(int a, int b) { return ceil_div(a, b); }
extern "C" float infinity() { return kInfinity; }
extern "C" float log2_e() { return kLog2E; }
extern "C" float ln2() { return kLn2; }
"""


@pytest.fixture(scope="module")
def geometry(compile_cpp) -> ctypes.CDLL:
    library = ctypes.CDLL(str(compile_cpp(GEOMETRY)))
    for name in ("infinity", "log2_e", "ln2"):
        getattr(library, name).restype = ctypes.c_float
    return library


@pytest.mark.parametrize("name", sorted(files.headers().keys() - MEMBERS))
def test_header_alone_compiles_for_the_device(name: str) -> None:
    run_nvrtc(f'#include "{name}"\n#include "{name}"\n', "alone.cu", "sm_90a")


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_header_of_members_is_included_in_one_body(name: str) -> None:
    line = f'#include "{name}"'.encode()
    assert [other for other, text in files.headers().items() if line in text] == [
        "attngen/softmax/online.cuh"
    ]


@pytest.mark.parametrize("name", HOST_HEADERS)
def test_header_of_plain_code_alone_compiles_for_a_host(name: str, compile_cpp) -> None:
    compile_cpp(f'#include "{name}"\n#include "{name}"\n')


@pytest.mark.parametrize("name", sorted(files.headers()))
def test_header_is_never_a_template_and_includes_only_ours(name: str) -> None:
    text = files.headers()[name].decode()
    assert not any(tag in text for tag in ("<%", "@{", "<#"))
    included = [line.split()[1] for line in text.splitlines() if line.startswith("#include")]
    ours = files.headers().keys() | (cutlass.ATOMS.keys() if name in ATOMS else set())
    assert all(target.strip('"<>') in ours for target in included)


def test_headers_in_memory_are_the_files_of_the_include_directory() -> None:
    found = {
        path.relative_to(files.include_dir()).as_posix()
        for path in files.include_dir().rglob("*")
        if path.is_file()
    }
    assert set(files.headers()) == found


@pytest.mark.parametrize("n", (8, 16, 24, 80, 128, 256))
def test_fragment_geometry_every_width_covers_the_tile_once(n: int, geometry) -> None:
    """PTX ISA, wgmma: element 4a + 2r + c is row lane/4 + 8r, column 8a + 2(lane%4) + c."""
    covered = set()
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for index in range(n // 2):
            row = warp * 16 + lane // 4 + geometry.row(index) * 8
            covered.add((row, lane % 4 * 2 + geometry.column(index)))
            assert geometry.row(index) == index // 2 % 2
            assert geometry.column(index) == index // 4 * 8 + index % 2
    assert covered == {(row, column) for row in range(64) for column in range(n)}


@pytest.mark.parametrize("n", (8, 24, 128))
def test_fragment_index_each_row_half_walks_its_columns_in_order(n: int, geometry) -> None:
    for half in (0, 1):
        indices = [geometry.index_of(half, k) for k in range(n // 4)]
        columns = [geometry.column(index) for index in indices]
        assert [geometry.row(index) for index in indices] == [half] * len(indices)
        assert columns == sorted(set(columns)) and len(columns) == n // 4


@pytest.mark.parametrize("n", (16, 112, 128, 176))
def test_hide_outside_any_interval_hides_just_the_rest_of_the_row(n: int, geometry) -> None:
    hide = getattr(geometry, f"hide_{n}")
    kept = (ctypes.c_float * (n // 2))()
    ends = [*range(-10, n + 10), -(2**30), 2**30]
    rows = [geometry.row(i) for i in range(n // 2)]
    columns = [geometry.column(i) for i in range(n // 2)]
    for half in (0, 1):
        for lo, hi in itertools.product(ends[::3] if n > 16 else ends, ends):
            hide(half, lo, hi, kept)
            for row, column, found in zip(rows, columns, kept, strict=True):
                assert found == (1.0 if row != half or lo <= column < hi else float("-inf"))


def test_ceil_div_small_numbers_rounds_up(geometry) -> None:
    for a in range(40):
        for b in range(1, 9):
            assert geometry.divide(a, b) == -(-a // b)


def test_constants_are_those_of_base_two_arithmetic(geometry) -> None:
    assert geometry.infinity() == float("inf")
    assert geometry.log2_e() == pytest.approx(1.4426950408889634, rel=2**-24)
    assert geometry.ln2() == pytest.approx(0.6931471805599453, rel=2**-24)

"""Fixtures of unit tests: g++, problems, and the parts of a kernel that a host compiles, too."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attngen.compiler import compile as compiler
from attngen.compiler.builder import render_problem
from attngen.fragments import features
from attngen.io import files
from attngen.kernels.fill import Source
from attngen.kernels.plan import plan
from attngen.kernels.wgmma.forward.plan import Plan
from attngen.reference import visible
from attngen.reference.fragments import positions, seen_by
from attngen.spec.problem import Direction, Problem
from tests.support.compiled_once import remember

ARCH = "sm_90a"
UNBOUNDED = 1 << 30
GXX = ("g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror")
# What only the excerpt of a kernel needs: its loops say unroll, and a kernel may lack masks.
EXCERPT = ("-Wno-unknown-pragmas", "-Wno-unused-parameter")

# The part of a rendered kernel between these lines is free of device code but for the copy engine.
HOST_PART = ("// ---- the fragments\n", "// ---- scheduler")
HOST_HEAD = """
#include <initializer_list>
#include <type_traits>
#include "attngen/context.cuh"
#include "attngen/scheduler/kv_blocks.cuh"
#include "attngen/scheduler/q_blocks.cuh"
#include "attngen/softmax/row.cuh"
#ifndef ATTNGEN_DEVICE
#define ATTNGEN_DEVICE inline
#endif
namespace attngen {
struct alignas(64) TensorMap { u64 opaque[16]; };
inline void tma_load(u32, const TensorMap*, u32, int, int, int, int, u64) {}
"""
MASK_HARNESS = """
}  // namespace attngen
using namespace attngen;

static Params make(const int* lengths, int left, int right) {
  Params p{};
  p.q_len = lengths[0], p.kv_len = lengths[1], p.bottom_right = lengths[2];
  (void)left, (void)right;
  SET_OPERANDS
  return p;
}
extern "C" void row_ranges(const int* lengths, int left, int right, int n, const int* i, int* out) {
  const Params p = make(lengths, left, right);
  for (int k = 0; k < n; ++k) {
    const Range range = mask_list(p).row_range(tile_context(p, 0, 0), i[k]);
    out[2 * k] = range.lo, out[2 * k + 1] = range.hi;
  }
}
extern "C" void col_ranges(const int* lengths, int left, int right, int n, const int* j, int* out) {
  const Params p = make(lengths, left, right);
  const Context ctx = tile_context(p, 0, 0);
  for (int k = 0; k < n; ++k) {
    const Range range = mask_list(p).col_range(ctx, j[k]);
    out[2 * k] = range.lo, out[2 * k + 1] = range.hi;
  }
}
template <int kBlock>
static void turns_of(const Params& p, int n, const int* tiles, int* out) {
  const Context ctx = tile_context(p, 0, 0);
  constexpr int kTile = 3;
  for (int k = 0; k < n; ++k) {
    const int first = tiles[2 * k], last = tiles[2 * k + 1];
    const BlockRange blocks = q_block_range<kBlock>(mask_list(p), ctx, first, last);
    const BlockTurns turns = block_turns<kBlock, kTile>(mask_list(p), ctx, first, blocks);
    out[3 * k] = turns.summed_begin, out[3 * k + 1] = turns.last_begin;
    out[3 * k + 2] = first_visits(blocks.begin, turns.summed_begin);
  }
}
template <int kBlock>
static void first_visited(const Params& p, int n, const int* blocks, int* out) {
  const Context ctx = tile_context(p, 0, 0);
  for (int k = 0; k < n; ++k) out[k] = is_first_visit<kBlock, 3>(mask_list(p), ctx, blocks[k]);
}
template <int kBlock>
static void blocks_of(const Params& p, int n, const int* tiles, int* out, bool of_queries) {
  const Context ctx = tile_context(p, 0, 0);
  for (int k = 0; k < n; ++k) {
    const int first = tiles[2 * k], last = tiles[2 * k + 1];
    const BlockRange blocks =
        of_queries ? q_block_range<kBlock>(mask_list(p), ctx, first, last)
                   : KvIteration::blocks<kBlock>(mask_list(p), ctx, first, last);
    out[4 * k] = blocks.begin, out[4 * k + 1] = blocks.full_begin;
    out[4 * k + 2] = blocks.full_end, out[4 * k + 3] = blocks.end;
  }
}
// Calls `of` with the number of rows or keys of a block as a constant.
template <class Function>
static void with_block(int block, Function of) {
  switch (block) {
    case 2: return of(std::integral_constant<int, 2>());
    case 3: return of(std::integral_constant<int, 3>());
    case 4: return of(std::integral_constant<int, 4>());
    case 80: return of(std::integral_constant<int, 80>());
    case 96: return of(std::integral_constant<int, 96>());
    case 128: return of(std::integral_constant<int, 128>());
    default: __builtin_trap();
  }
}
extern "C" void block_ranges(const int* lengths, int left, int right, int n, const int* tiles,
                             int* out, int block, int of_queries) {
  const Params p = make(lengths, left, right);
  with_block(block, [&](auto size) { blocks_of<size()>(p, n, tiles, out, of_queries); });
}
extern "C" void block_turns_of(const int* lengths, int left, int right, int n, const int* tiles,
                               int* out, int block) {
  const Params p = make(lengths, left, right);
  with_block(block, [&](auto size) { turns_of<size()>(p, n, tiles, out); });
}
extern "C" void first_visited_of(const int* lengths, int left, int right, int n, const int* blocks,
                                 int* out, int block) {
  const Params p = make(lengths, left, right);
  with_block(block, [&](auto size) { first_visited<size()>(p, n, blocks, out); });
}
"""


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Builds of a process compile each source once; `run_nvrtc`, imported by name, always does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "run_nvrtc", remember(compiler.run_nvrtc))
        yield


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An `OnReference`, which stands in for kernels; nothing is traced yet."""
    from tests.support.autograd_kit import OnReference

    stand_in = OnReference(monkeypatch)
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
    yield stand_in
    stand_in.library._destroy()


@pytest.fixture(scope="session")
def compile_cpp(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`compile_cpp(source, *options, executable=False)` → the shared object, or the program."""
    folder = tmp_path_factory.mktemp("cpp")

    @cache
    def compile_(source: str, *options: str, executable: bool = False) -> Path:
        name = hashlib.sha256(repr((source, options, executable)).encode()).hexdigest()[:16]
        text, out = folder / f"{name}.cpp", folder / f"{name}.so"
        text.write_text(source)
        kind = () if executable else ("-shared", "-fPIC")
        command = [*GXX, *kind, *options, "-I", files.include_dir(), text, "-o", out]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr}\n{source}"
        return out

    return compile_


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Problem]:
    """`make_problem(head_dim, head_dim_v, masks, dtype, out, …)` → a dense problem."""

    def make(
        head_dim: int = 64,
        head_dim_v: int | None = None,
        masks: tuple[str, ...] = (),
        dtype: str = "bf16",
        out: str | None = None,
        scores: tuple[str, ...] = (),
        direction: Direction = "fwd",
        deterministic: bool = False,
        dropout: bool = False,
        attn_mask: bool = False,
    ) -> Problem:
        return Problem(
            direction=direction,
            dtype_q=dtype,
            dtype_kv=dtype,
            dtype_o=out or dtype,
            head_dim_qk=head_dim,
            head_dim_v=head_dim_v or head_dim,
            masks=masks,
            scores=scores,
            softmax="vanilla",
            q_seq="dense",
            kv_seq="dense",
            kv_fetch="tma",
            kv_iter="range",
            deterministic=deterministic,
            dropout=dropout,
            attn_mask=attn_mask,
        )

    return make


@pytest.fixture(scope="session")
def render() -> Callable[..., Source]:
    """`render(problem, plan=None, root=None)` → the kernel's source, by the preferred plan."""

    def render_(problem: Problem, chosen: Plan | None = None, root: Path | None = None) -> Source:
        return render_problem(problem, chosen or plan(problem, ARCH), root)

    return render_


@pytest.fixture(scope="session")
def host_code(render: Callable[..., Source]) -> Callable[..., str]:
    """`host_code(problem)` → C++ of the kernel's fragments, lists and parameters, for a host.

    The namespace `attngen` is left open.
    """

    def cut(problem: Problem, root: Path | None = None) -> str:
        text = render(problem, root=root).text
        start, end = HOST_PART
        assert text.count(start) == 1 and text.count(end) == 1, f"no {HOST_PART} in the kernel"
        return HOST_HEAD + text.partition(start)[2].partition(end)[0]

    return cut


class MaskLibrary:
    """The mask list of a kernel, as its own C++: ranges of rows, of columns and of blocks.

    A sequence is (q_len, kv_len, bottom_right); windows are given as (left, right).
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def _call(self, name: str, sequence, window, positions, width: int, *more: int) -> np.ndarray:
        items = np.ascontiguousarray(positions, dtype=np.int32)
        out = np.empty((len(items), width), dtype=np.int32)
        lengths = (ctypes.c_int * 3)(*sequence)
        addresses = (ctypes.c_void_p(items.ctypes.data), ctypes.c_void_p(out.ctypes.data))
        getattr(self._library, name)(lengths, *window, len(items), *addresses, *more)
        return out

    def row_ranges(self, sequence, window, rows) -> np.ndarray:
        """[lo, hi) of the keys that each row sees: [rows, 2]."""
        return self._call("row_ranges", sequence, window, rows, 2)

    def col_ranges(self, sequence, window, columns) -> np.ndarray:
        """[lo, hi) of the rows that see each key: [columns, 2]."""
        return self._call("col_ranges", sequence, window, columns, 2)

    def block_ranges(self, sequence, window, tiles, block: int) -> np.ndarray:
        """begin, full_begin, full_end, end for each tile (first row, last row): [tiles, 4]."""
        return self._call("block_ranges", sequence, window, tiles, 4, block, 0)

    def query_block_ranges(self, sequence, window, tiles, block: int) -> np.ndarray:
        """Blocks of queries for tiles of keys (first key, last key): [tiles, 4]."""
        return self._call("block_ranges", sequence, window, tiles, 4, block, 1)

    def block_turns(self, sequence, window, tiles, block: int) -> np.ndarray:
        """summed_begin, last_begin, first visits for tiles of 3 keys and blocks of queries:
        [tiles, 3]."""
        return self._call("block_turns_of", sequence, window, tiles, 3, block)

    def first_visited(self, sequence, window, blocks, block: int) -> np.ndarray:
        """Whether consumers of a tile of 3 keys prepare each block of queries: [blocks, 1]."""
        return self._call("first_visited_of", sequence, window, blocks, 1, block)


@pytest.fixture(scope="session")
def mask_source(
    make_problem: Callable[..., Problem],
    host_code: Callable[..., str],
    render: Callable[..., Source],
) -> Callable[[tuple[str, ...]], str]:
    """`mask_source(masks)` → C++ of a mask list with the functions of `MaskLibrary`."""

    def make(masks: tuple[str, ...]) -> str:
        known = features.scan()["mask"]
        values = {"window_left": "left", "window_right": "right"}
        for mask in masks:
            for operand, given in zip(known[mask].operands, ("left", "right"), strict=False):
                name = f"arg_{operand.name}{'_of_all' * (operand.domain == 'sequence')}"
                least = f"max_of({given}, {operand.minimum or 0})"
                values |= {name: least} if known[mask].called else {}
        fields = render(make_problem(64, masks=masks)).kernel.fields
        setters = " ".join(f"p.{f.name} = {values[f.name]};" for f in fields if f.name in values)
        harness = MASK_HARNESS.replace("SET_OPERANDS", setters)
        return host_code(make_problem(64, masks=masks)) + harness

    return make


@pytest.fixture(scope="session")
def mask_library(
    compile_cpp: Callable[..., Path], mask_source: Callable[[tuple[str, ...]], str]
) -> Callable[[tuple[str, ...]], MaskLibrary]:
    """`mask_library(masks)` → those masks as the kernels have them, compiled for this machine."""

    @cache
    def load(masks: tuple[str, ...]) -> MaskLibrary:
        return MaskLibrary(compile_cpp(mask_source(masks), *EXCERPT))

    return load


@pytest.fixture(scope="session")
def defined() -> Callable[..., np.ndarray]:
    """`defined(masks, sequence, window)` → the definition of what is seen: bool [q_len, kv_len]."""

    known = features.scan()["mask"]

    @cache
    def define(masks: tuple[str, ...], sequence: tuple[int, int, int], window) -> np.ndarray:
        q_len, kv_len, bottom_right = sequence
        called = [known[name] for name in masks if known[name].called and known[name].operands]
        if called:  # whose operand is what a window's left side is of others
            (mask,), names = called, [x for x in masks if x != called[0].name]
            place = positions(q_len, kv_len, (kv_len - q_len) * bottom_right)
            value = max(window[0], mask.operands[0].minimum or 0)
            seen = seen_by(mask, {mask.operands[0].name: value}, place).numpy()
            return seen & define(tuple(names), sequence, (UNBOUNDED, UNBOUNDED))
        return visible(
            q_len,
            kv_len,
            mask="causal" if "causal" in masks else "none",
            window=tuple(-1 if side == UNBOUNDED else side for side in window),
            bottom_right=bool(bottom_right),
        ).numpy()

    return define

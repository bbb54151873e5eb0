"""Hopper (sm_90a), backward: limits, feasible plans, and what justified the heuristics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..problem import Problem
from .base import SmemRegion, Tile, lay_out
from .sm90 import ARCH, BARRIER_BYTES, SMEM_BYTES, _boxes

JOB_BYTES = 20


@dataclass(frozen=True)
class BackwardPlan:
    arch: str
    family: str
    tile: Tile
    consumers: int
    q_stages: int
    do_stages: int
    ds_stages: int
    producer_registers: int
    consumer_registers: int
    dq_split: str
    dq_columns: int
    descending: bool
    kv_group_bytes: int
    group_heads: int
    tail_share: int
    smem: tuple[SmemRegion, ...]
    smem_bytes: int
    threads: int
    row_block: int  # queries a block of the workspaces
    helper_threads: int = 256
    deterministic: bool = False
    last_block_first: bool = False

    @property
    def dq_floats(self) -> int:
        return self.consumers * 64 * self.dq_columns if self.family == "sm90_bwd" else 0


def make_plan(problem: Problem, m: int, *, consumers: int = 2, q_stages: int = 2, do_stages: int = 2,
              ds_stages: int = 2, dq_split: str = "columns", registers: tuple[int, int] = (24, 240)) -> BackwardPlan:
    n = 64 * consumers
    qk, v = _boxes(problem.head_dim_qk), _boxes(problem.head_dim_v)
    dq_columns = {"rows": problem.head_dim_qk, "columns": -(-qk // consumers) * 64, "swapped": m}[dq_split]
    sizes = {
        "Q": q_stages * m * qk * 128,
        "Do": do_stages * m * v * 128,
        "K": n * qk * 128,
        "V": n * v * 128,
        "Ds": ds_stages * m * consumers * 128,
        "Dq": consumers * 64 * dq_columns * 4,
    }
    small = {
        "Lse": q_stages * m * 4,
        "D": do_stages * m * 4,
        "Barriers": BARRIER_BYTES * (6 + 2 * (q_stages + do_stages + ds_stages + consumers)),
        "Job": JOB_BYTES,
    }
    regions = lay_out(sizes)
    for name, size in small.items():
        end = regions[-1].offset + regions[-1].bytes
        regions = (*regions, SmemRegion(name, -(-end // 16) * 16, size))
    return BackwardPlan(ARCH, "sm90_bwd", Tile(m, n), consumers, q_stages, do_stages, ds_stages,
                        *registers, dq_split, dq_columns, False, 64 << 20, 16, 4 if problem.masks else 0,
                        regions, regions[-1].offset + regions[-1].bytes, 128 * (consumers + 1), m)


def make_dkv(problem: Problem, m: int = 64, *, q_stages: int = 2, do_stages: int = 2, registers: tuple[int, int] = (40, 232)) -> BackwardPlan:
    n = 64
    qk, v = _boxes(problem.head_dim_qk), _boxes(problem.head_dim_v)
    sizes = {
        "Q": q_stages * m * qk * 128,
        "Do": do_stages * m * v * 128,
        "K": n * qk * 128,
        "V": n * v * 128,
        "Weights": 2 * m * n * 2,
    }
    small = {
        "Lse": q_stages * m * 4,
        "D": do_stages * m * 4,
        "Barriers": BARRIER_BYTES * (10 + 2 * (q_stages + do_stages)),
        "Job": JOB_BYTES,
    }
    return _plan(problem, "sm90_bwd_dkv", Tile(m, n), 2, q_stages, do_stages, registers, False, sizes, small)


def make_dq(problem: Problem, n: int, *, k_stages: int = 2, v_stages: int = 1, registers: tuple[int, int] = (40, 232)) -> BackwardPlan:
    m = 128
    qk, v = _boxes(problem.head_dim_qk), _boxes(problem.head_dim_v)
    sizes = {
        "Q": m * qk * 128,
        "Do": m * v * 128,
        "K": k_stages * n * qk * 128,
        "V": v_stages * n * v * 128,
    }
    small = {"Barriers": BARRIER_BYTES * (4 + 2 * (k_stages + v_stages)), "Job": JOB_BYTES}
    return _plan(problem, "sm90_bwd_dq", Tile(m, n), 2, k_stages, v_stages, registers, bool(problem.masks), sizes, small)


def _plan(problem, family, tile, consumers, q_stages, do_stages, registers, descending, sizes, small):
    regions = lay_out(sizes)
    for name, size in small.items():
        end = regions[-1].offset + regions[-1].bytes
        regions = (*regions, SmemRegion(name, -(-end // 16) * 16, size))
    return BackwardPlan(ARCH, family, tile, consumers, q_stages, do_stages, 0, *registers, "", 0, descending,
                        64 << 20, 16, 4 if problem.masks else 0, regions,
                        regions[-1].offset + regions[-1].bytes, 128 * (consumers + 1), 64 if tile.m > 96 else tile.m)

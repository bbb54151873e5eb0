"""Decode: attngen over pages beside public kernels, checked and timed in one run.

GPU times are those of calls in a CUDA graph, so that no host counts; host times are those of
calls outside it, which wait for no GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .. import __version__
from ..errors import MeasureError
from ..frontends.pytorch.attention import attention
from . import peers, timing
from .checking import EPSILON, Expected, check
from .decode_report import SCHEMA, Case, Report, Row, make_row, means_of
from .machine import describe_machine
from .report import OURS
from .run import each_timed, require_gpu

GRAPH_CALLS = 8
HOST_CALLS = 50  # far fewer launches than the driver queues
COPY = "copy"
COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Operands:
    """q [b, 1, h_q, d]; pages of k and v [b·s/page, page, h_kv, d] that `table` int32 [b, s/page]
    names; int32 [b] lengths; k and v of the same values as dense tensors [b, s, h_kv, d]."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    table: Tensor
    lengths: Tensor
    dense: tuple[Tensor, Tensor]


Call = Callable[[], Tensor]  # the output [b, 1, h_q, d]
Maker = Callable[[Case, Operands], Call]


def _ours(case: Case, x: Operands) -> Call:
    layout = "paged_kv_bshd_bshd_bshd"

    def call() -> Tensor:
        out = attention(
            *(x.q, x.k_pages, x.v_pages),
            layout=layout, page_table=x.table, seqused_kv=x.lengths, backend="cuda",
        )  # fmt: skip
        assert isinstance(out, Tensor)  # no by-product was asked for
        return out

    return call


def _load_fa3() -> tuple[str, Maker]:
    peer, operators = peers.load_fa3_operators()
    none = (None,) * 8

    def make(case: Case, x: Operands) -> Call:
        # By position: releases name some of these differently. Tensors that a plain decode has
        # not, lengths and table; then scale, causal, window, …, splits of its own choice.
        given = (x.q, x.k_pages, x.v_pages, *none, x.lengths, None, case.length, x.table, *none)
        rest = (case.head_dim**-0.5, True, -1, -1, 0, 0.0, True, None, 0, None, 0)
        return lambda: operators.fwd(*given, *rest)[0]

    return peer, make


def _load_cudnn() -> tuple[str, Maker]:
    def make(case: Case, x: Operands) -> Call:
        q, k, v = (each.transpose(1, 2) for each in (x.q, *x.dense))

        def call() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

        return call

    return peers.cudnn_source(), make


def _load_cudnn_paged() -> tuple[str, Maker]:
    cudnn: Any = import_module("cudnn")
    handle = cudnn.create_handle()

    def make(case: Case, x: Operands) -> Call:
        kinds = cudnn.data_type
        graph = cudnn.pygraph(
            io_data_type=kinds.BFLOAT16, intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT, handle=handle,
        )  # fmt: skip
        q, k, v = (each.transpose(1, 2) for each in (x.q, x.k_pages, x.v_pages))
        table, lengths = x.table[:, None, :, None], x.lengths[:, None, None, None]
        out, ones = torch.empty_like(q), torch.ones_like(lengths)
        given = {graph.tensor_like(each): each for each in (q, k, v, table, table, ones, lengths)}
        names = ("q", "k", "v", "paged_attention_k_table", "paged_attention_v_table")
        result, _ = graph.sdpa(
            **dict(zip((*names, "seq_len_q", "seq_len_kv"), given, strict=True)),
            generate_stats=False, attn_scale=case.head_dim**-0.5, use_padding_mask=True,
            paged_attention_max_seq_len_kv=case.length,
        )  # fmt: skip
        result.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=x.q.device)

        def call() -> Tensor:
            cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
            graph.execute({**given, result: out}, workspace, handle=handle)
            return out.transpose(1, 2)

        return call

    return f"cuDNN through cudnn-frontend {cudnn.__version__}", make


def _load_flashinfer() -> tuple[str, Maker]:
    module: Any = import_module("flashinfer")

    def make(case: Case, x: Operands) -> Call:
        buffer = torch.empty(256 << 20, dtype=torch.uint8, device=x.q.device)
        # Heads that share keys go through the tensor cores only where it is told to.
        grouped = case.heads_q != case.heads_kv
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD", use_tensor_cores=grouped)
        pages = case.length // case.page
        ends = torch.arange(case.batch + 1, dtype=torch.int32) * pages
        wrapper.plan(
            ends, x.table.flatten(), torch.full((case.batch,), case.page, dtype=torch.int32),
            case.heads_q, case.heads_kv, case.head_dim, case.page,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        return lambda: wrapper.run(x.q[:, 0], (x.k_pages, x.v_pages))[:, None]

    return f"flashinfer {getattr(module, '__version__', 'of unknown version')}", make


LOADERS: dict[str, Callable[[], tuple[str, Maker]]] = {
    "fa3": _load_fa3,
    "cudnn": _load_cudnn,
    "cudnn-paged": _load_cudnn_paged,
    "flashinfer": _load_flashinfer,
}


def load(names: Sequence[str]) -> tuple[dict[str, tuple[str, Maker]], dict[str, str]]:
    """The peers of these names that are here, and why the others are not.

    Raises: MeasureError where a name is unknown.
    """
    return peers.load_from(LOADERS, names)


def run(
    cases: Sequence[Case],
    found: Mapping[str, tuple[str, Maker]],
    absent: Mapping[str, str],
    rounds: int,
    budget_ms: float,
    progress: Callable[[Row], None],
) -> Report:
    """Time attngen and the peers, case after case, on the current CUDA device.

    progress: is told each row as it comes. An interrupt ends the report behind the rows that there
    are. Raises: MeasureError where nothing can be timed here.
    """
    require_gpu()
    makers = {OURS: _ours, **{name: maker for name, (_, maker) in found.items()}}

    def time_one(case: Case) -> Row:
        torch.cuda.empty_cache()  # caches of the case before are as large
        return time_case(case, makers, rounds, budget_ms)

    rows = []
    for row in each_timed(cases, time_one):
        rows.append(row)
        progress(row)
    return Report(
        schema=SCHEMA,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        dtype="bf16",
        machine=describe_machine(),
        rounds=rounds,
        budget_ms=budget_ms,
        peers={OURS: f"attngen {__version__}", **{name: each for name, (each, _) in found.items()}},
        absent=dict(absent),
        rows=tuple(rows),
        means=means_of(rows),
    )


def time_case(case: Case, makers: Mapping[str, Maker], rounds: int, budget_ms: float) -> Row:
    """One row: whoever computes the case rightly is timed, with a copy among them."""
    with torch.no_grad():
        operands = random_operands(case, torch.device("cuda"))
        calls, missing = checked_calls(case, makers, operands)
        graphs = {}
        for name in [*calls]:
            try:
                graphs[name] = graphed(calls[name])
            except RuntimeError as error:
                missing[name] = peers.describe(error)
                del calls[name]
        times = timing.time_interleaved({**graphs, COPY: copy_call()}, rounds, budget_ms)
        host = {name: host_microseconds(call, rounds) for name, call in calls.items()}
    copy_gbps = 2 * COPY_BYTES / times.pop(COPY) / 1e6
    us = {name: ms * 1e3 / GRAPH_CALLS for name, ms in times.items()}
    return make_row(case, us, host, copy_gbps, missing)


def checked_calls(
    case: Case, makers: Mapping[str, Maker], operands: Operands
) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls whose result is right, and why the others have none."""
    expected = expect(case, operands)
    calls: dict[str, Call] = {}
    missing: dict[str, str] = {}
    for name, maker in makers.items():
        try:
            call = maker(case, operands)
            check((call(),), expected)
        except MeasureError as error:
            missing[name] = str(error)
        except Exception as error:  # a peer refuses a case in its own way
            missing[name] = peers.describe(error)
        else:
            calls[name] = call
    return calls, missing


def random_operands(case: Case, device: torch.device) -> Operands:
    """Standard normal q, k and v, the same in every run; the pages lie in no order."""
    make = torch.Generator(device).manual_seed(0)
    sizes = {"generator": make, "device": device, "dtype": torch.bfloat16}
    q = torch.randn(case.batch, 1, case.heads_q, case.head_dim, **sizes)  # type: ignore[call-overload]
    pages = case.batch * case.length // case.page
    shape = (pages, case.page, case.heads_kv, case.head_dim)
    k, v = (torch.randn(shape, **sizes) for _ in "kv")  # type: ignore[call-overload]
    table = torch.randperm(pages, generator=make, device=device).int().view(case.batch, -1)
    dense = (x[table.flatten().long()].view(case.batch, -1, *shape[2:]) for x in (k, v))
    lengths = torch.full((case.batch,), case.length, dtype=torch.int32, device=device)
    return Operands(q, k, v, table, lengths, (next(dense), next(dense)))


def expect(case: Case, x: Operands) -> tuple[Expected, ...]:
    """The first and the last sequence. The limit is that of a forward."""
    return tuple(_expect(case, x, batch) for batch in sorted({0, case.batch - 1}))


def _expect(case: Case, x: Operands, batch: int) -> Expected:
    k, v = (each[batch] for each in x.dense)
    q = x.q[batch, 0].unflatten(0, (case.heads_kv, -1))

    def attend(dtype: torch.dtype) -> Tensor:
        scores = torch.einsum("hgd,shd->hgs", q.to(dtype), k.to(dtype)) * case.head_dim**-0.5
        return torch.einsum("hgs,shd->hgd", scores.softmax(-1), v.to(dtype)).flatten(0, 1)

    exact = attend(torch.float64)
    torch_error = float((attend(torch.float32).bfloat16().double() - exact).abs().max())
    limit = 2 * torch_error + EPSILON * float(exact.abs().max())
    return Expected(0, (batch, 0), f"sequence {batch}", exact, limit)


def graphed(call: Call) -> Callable[[], object]:
    """A replay of so many calls as a graph holds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    return graph.replay


def copy_call() -> Callable[[], object]:
    """A kernel that reads and writes so many bytes: the most that memory gives in practice."""
    source = torch.zeros(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return lambda: torch.neg(source, out=target)


def host_microseconds(call: Call, rounds: int) -> float:
    """Median host time of a call while the GPU is behind."""
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        samples.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)

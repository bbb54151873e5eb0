"""Times callables compiled into attngen's kernels beside compiled FlexAttention, as JSON.

    python tools/callables_speed.py -o docs/results/callables.json

Forward and backward of the twenty masks and scores of tools/callable_cases.py at batch 4, 4096
tokens, 16 heads, head dim 128, bf16, gradients of learned captures among them; beside attngen's own
argument, or packed tokens, that say the same; then masks of 32768 tokens, by the kernel that makes
them, and what callables cost the host. Calls are CUDA graphs of one who trains, interleaved rounds,
medians. attngen makes a mask within each forward, but for what an `attngen.Schedule` has kept; a
BlockMask of FlexAttention is made before. Results are compared first. Cases have a process each:
all compile at once, then one after another is timed; `--compile-only` leaves caches filled for a
later run. docs/results/README.md says what the fields mean.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import attngen  # noqa: E402  # a checkout not installed, too
from attngen.bench.timing import Call, cuda_milliseconds, time_interleaved  # noqa: E402
from attngen.errors import MeasureError  # noqa: E402
from attngen.frontends.pytorch.callables.bits import maker_of  # noqa: E402
from attngen.frontends.pytorch.callables.mask import Sizes  # noqa: E402
from attngen.frontends.pytorch.callables.program import mask_program  # noqa: E402
from attngen.frontends.pytorch.callables.trace import trace  # noqa: E402
from tools.callable_cases import CASES, At, Case  # noqa: E402
from tools.callables_host import host_rows  # noqa: E402
from tools.graphs import captured  # noqa: E402
from tools.reports import timing_of, write_rows  # noqa: E402

SCHEMA = 1
BATCH, LENGTH, HEADS, HEAD_DIM = 4, 4096, 16, 128
LENGTHS = (LENGTH, 32768)  # of masks that are made alone
LISTS = ("documents", "video", "global_tokens", "neighbourhood", "tree", "dilated")
ALL = [*CASES, "lists", "host"]
SLOW_MS = 50.0  # beyond which one call says enough
STAGES = (None, 2, 1)  # of FlexAttention's backward: its own number may not fit shared memory
TOO_MUCH = "No valid triton configs"
TOLERANCE = 0.03  # of the norm of a result: both round to bf16, and order sums their own way
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Replay:
    """A graph of a call, which holds the tensors that the call reads."""

    graph: torch.cuda.CUDAGraph
    call: Call

    @classmethod
    def of(cls, call: Call, stream: torch.cuda.Stream) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        return cls(graph, call)

    def __call__(self) -> None:
        self.graph.replay()


class Side(NamedTuple):
    """Both passes of one who computes a case, as one who trains calls them."""

    forward: Call
    backward: Call


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K, V and the gradient of O, [b, s, h, d]."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn() -> Tensor:
        shape = BATCH, LENGTH, HEADS, HEAD_DIM
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    q, k, v = (randn().requires_grad_() for _ in range(3))
    return q, k, v, randn()


def by_attngen(case: Case) -> Callable[..., Tensor]:
    """attngen's call with callables."""
    mods = {"score_mod": case.score_mod, "mask_mod": case.mask_mod}
    return partial(attngen.attention, backend="cuda", **mods)


def by_flex(case: Case, stages: int | None) -> Attend:
    """Compiled FlexAttention, whose blocks are made here. stages: of its backward, None for its
    own choice."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    options = None if stages is None else {"bwd_num_stages": stages}
    blocks = None
    if case.mask_mod is not None:
        planes = BATCH if case.by_sequence else None
        blocks = create_block_mask(case.mask_mod, planes, None, LENGTH, LENGTH, "cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        given = {"score_mod": case.score_mod, "block_mask": blocks, "kernel_options": options}
        out: Tensor = compiled(*heads, **given)
        return out.transpose(1, 2)

    return attend


def kept(case: Case) -> Attend | None:
    """attngen's call that finds the mask of the call before; None where none is made."""
    if case.mask_mod is None or case.built_in:
        return None
    return partial(by_attngen(case), schedule=attngen.Schedule())


def by_argument(case: Case) -> Attend | None:
    """attngen's argument for the same, or packed documents; None where there is none."""
    if case.built_in:
        return partial(attngen.attention, backend="cuda", **case.built_in)
    if not case.documents:
        return None
    lengths = torch.tensor([0, *case.documents * BATCH], device="cuda")
    offsets = lengths.cumsum(0).int()
    most = max(case.documents)
    given: dict[str, Any] = {
        **{"layout": "thd", "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets},
        **{"max_seqlen_q": most, "max_seqlen_kv": most},
    }

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        out: Tensor = attngen.attention(*packed, backend="cuda", **given)
        dense: Tensor = out.view(BATCH, LENGTH, HEADS, HEAD_DIM)
        return dense

    return attend


def side_of(
    attend: Attend, learned: Sequence[Tensor], stream: torch.cuda.Stream
) -> tuple[Side, list[Tensor]]:
    """Both passes as graphs, and what they returned outside of these."""
    with torch.cuda.stream(stream):
        q, k, v, d_o = operands()
        wanted = [q, k, v, *learned]
        out = attend(q, k, v)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, wanted, d_o, retain_graph=True)

        results = [out.detach().clone(), *backward()]
    stream.synchronize()
    calls = partial(attend, q, k, v), backward
    return Side(*(Replay.of(call, stream) for call in calls)), results


def compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raises: MeasureError where results differ by more than rounding does."""
    names = ("o", "dq", "dk", "dv", *(f"gradient of capture {n}" for n in range(len(found) - 4)))
    for name, one, other in zip(names, found, expected, strict=False):
        norm = other.float().norm()
        error = float((one.float() - other.float()).norm() / norm) if norm else 0.0
        if not error <= TOLERANCE:  # so that NaN is wrong
            raise MeasureError(f"{name} is off by {error:.3f}")


class Prepared(NamedTuple):
    """A case by who computes it; who cannot, and why; stages of FlexAttention's backward, where it
    was not left to choose them."""

    sides: dict[str, Side]
    missing: dict[str, str]
    stages: int | None


def prepared_case(name: str) -> Prepared:
    """A case by all who compute it, whose results agree."""
    case = CASES[name](At(BATCH, HEADS, LENGTH, "cuda"))
    attends: dict[str, Callable[[], Attend | None]] = {
        "attngen": lambda: by_attngen(case),
        "built_in": lambda: by_argument(case),
        **{f"flex, {n}": partial(by_flex, case, n) for n in STAGES},
    }
    stream = torch.cuda.Stream()
    sides: dict[str, Side] = {}
    missing: dict[str, str] = {}
    expected: list[Tensor] = []
    stages: int | None = None
    for each, make in attends.items():
        who, _, asked = each.partition(", ")
        if who == "flex" and (who in sides or not (asked == "None" or TOO_MUCH in missing[who])):
            continue
        try:
            if (attend := make()) is None:
                continue
            learned = () if who == "built_in" else case.learned
            side, results = side_of(attend, learned, stream)
            expected = expected or results
            compare(results, expected)
            sides[who], stages = side, int(asked) if asked.isdigit() else None
            missing.pop(who, None)
        except Exception as error:  # a peer refuses in its own way
            lines = [type(error).__name__, *str(error).strip().splitlines()]
            missing[who] = ": ".join(lines[:3])[:300]
        torch.cuda.empty_cache()
    if (attend := kept(case)) is not None and "attngen" in sides:
        q, k, v, _ = operands()
        call = partial(attend, q, k, v)
        call()
        sides["kept"] = Side(call, sides["attngen"].backward)
    return Prepared(sides, missing, stages)


def rows_of(name: str, options: argparse.Namespace, ready: Callable[[], Any]) -> Iterator[Any]:
    """A case's rows, a direction each, timed when `ready` returns."""
    sides, missing, stages = prepared_case(name)
    ready()
    for index, direction in enumerate(("fwd", "bwd")):
        calls: dict[str, Call] = {who: side[index] for who, side in sides.items()}
        if direction == "bwd":
            calls.pop("kept", None)
        once = {who: cuda_milliseconds(call, 1) for who, call in calls.items()}
        quick = {who: call for who, call in calls.items() if once[who] < SLOW_MS}
        timed = time_interleaved(
            quick, options.rounds, options.budget_ms, settle_ms=options.settle_ms
        )
        taken = {who: timed.get(who, once[who]) for who in calls}
        own = taken.get("attngen")
        others = [who for who in ("flex", "built_in") if own and who in taken]
        ratios = {f"to_{who}": round(taken[who] / own, 3) for who in others if own}
        ms = {who: round(each, 4) for who, each in taken.items()}
        row = {"case": name, "direction": direction, "ms": ms, **ratios, "missing": missing}
        yield {**row, "flex_stages": stages}


def rows_of_lists(options: argparse.Namespace, ready: Callable[[], Any]) -> Iterator[Any]:
    """Masks as calls with gradients have them, a row for each and each length."""
    calls: dict[tuple[str, int], Call] = {}
    missing: dict[tuple[str, int], str] = {}
    device = torch.device("cuda", torch.cuda.current_device())
    for name, length in product(LISTS, LENGTHS):
        try:
            mod: Any = CASES[name](At(1, 1, length, "cuda")).mask_mod
            traced, sizes = (
                mask_program(trace("mask_mod", mod, device)),
                Sizes(1, 1, length, length),
            )
            call = partial(maker_of(traced, sizes, device, columns=True), traced.captures)
            calls[name, length] = captured(call)
        except Exception as error:
            missing[name, length] = f"{type(error).__name__}: {error}"[:200]
    ready()
    named = {f"{name}, {length}": call for (name, length), call in calls.items()}
    taken = time_interleaved(named, options.rounds, options.budget_ms, settle_ms=options.settle_ms)
    for name, length in product(LISTS, LENGTHS):
        ms = {"attngen": round(taken[f"{name}, {length}"], 4)} if (name, length) in calls else {}
        why = {"attngen": missing[name, length]} if (name, length) in missing else {}
        yield {"case": name, "direction": "mask", "length": length, "ms": ms, "missing": why}


def work(parent: Connection, name: str, options: argparse.Namespace) -> None:
    """A process: prepare a case, say so, and time it when the parent answers."""
    torch._inductor.config.compile_threads = 1  # others compile beside this one

    def ready() -> None:
        parent.send("ready")
        parent.recv()

    if name == "lists":
        found = rows_of_lists(options, ready)
    elif name == "host":
        ready()
        found = host_rows()
    else:
        found = rows_of(name, options, ready)
    for row in found:
        parent.send(row)
    parent.close()


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the cases asked for, each printed when it is there."""
    for worker, process in prepared(options):
        worker.send("go")
        while (row := _received(worker)) is not None:
            print(row, flush=True)
            yield row
        process.join()


def prepared(options: argparse.Namespace) -> list[tuple[Connection, Any]]:
    """Processes that are ready to time a case, in the order of cases; others are ended."""
    spawn = multiprocessing.get_context("spawn")
    workers: dict[Connection, Any] = {}
    for name in options.cases:
        own, other = spawn.Pipe()
        process = spawn.Process(target=work, args=(other, name, options), daemon=True, name=name)
        process.start()
        other.close()
        workers[own] = process
    waiting, ready = [*workers], set()
    begin = time.monotonic()
    end = begin + options.ready_within
    while waiting and (spoke := wait(waiting, max(0, end - time.monotonic()))):
        for each in waiting:
            if each in spoke and _received(each) == "ready":
                ready.add(each)
                seconds = time.monotonic() - begin
                print(f"{workers[each].name} is ready after {seconds:.0f} s", file=sys.stderr)
        waiting = [each for each in waiting if each not in spoke]
    for each, process in workers.items():
        if each not in ready:
            print(f"{process.name} is left out", file=sys.stderr)
            process.kill()
    return [(each, process) for each, process in workers.items() if each in ready]


def _received(worker: Connection) -> Any:
    """The next thing that a process sends; None where it has ended."""
    try:
        return worker.recv()
    except EOFError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settle-ms", type=float, default=20)
    parser.add_argument("--budget-ms", type=float, default=20)
    parser.add_argument("--cases", nargs="+", default=ALL)
    parser.add_argument("--ready-within", type=float, default=300, help="seconds for compilation")
    parser.add_argument("--compile-only", action="store_true", help="fill caches, time nothing")
    options = parser.parse_args()
    if unknown := {*options.cases} - {*ALL}:
        parser.error(f"no cases: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    if options.compile_only:
        for _, process in prepared(options):
            process.kill()
        return 0
    write_rows(
        options.output,
        SCHEMA,
        rows(options),
        case=f"b{BATCH} s{LENGTH} h{HEADS} d{HEAD_DIM} bf16",
        **timing_of(options),
        peers={"flex": f"torch {torch.__version__}, compiled"},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

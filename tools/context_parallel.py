"""Checks and times attngen.parallel on the GPUs of one host, and writes what it finds.

    python tools/context_parallel.py check --gpus 2
    python tools/context_parallel.py bench --gpus 2
    torchrun --nproc-per-node 2 tools/context_parallel.py check
    python tools/context_parallel.py simulate
    python tools/context_parallel.py memory

`check` (tools/context_check.py): each case by its strategy, with gradients, against one call in
float64 over the whole. Runs repeat, bit by bit. With `--device cpu` processes of the reference
exchange messages by gloo over all but long cases, and nothing is written. `bench`
(tools/context_bench.py): the time of a forward and of a forward with its backward, beside an equal
share of one GPU's. Both have one pool of processes (tools/context_pool.py): a case that raises,
ends a process, or takes longer than `--limit` is wrong, and the next one has new processes; under
torchrun each goes through all cases by itself. `simulate`: each rank's kernels, merges and sums by
p2p, one rank after another on one GPU, without messages, beside that share, which is timed before
and behind each of them; the longest rank's time counts. `memory`: what a rank of 8 allocates beside
its operands for 1M tokens, forward and backward, without messages. All write
docs/results/context-parallel.json, by the first rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import attngen  # noqa: E402
from attngen.call.context.order import Order  # noqa: E402
from tools.context_bench import SHAPES, lengths_of, results, rows  # noqa: E402
from tools.context_check import TOKENS, USUAL, cases, check  # noqa: E402
from tools.context_pool import Pool  # noqa: E402
from tools.graphs import among, captured, turns  # noqa: E402
from tools.simulated_ranks import Simulated, ranks_of  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "context-parallel.json"
WINDOWS = 7  # in which each call is timed
SIMULATED, PACKED = (2, 4, 8), 16  # ranks; and sequences of packed calls
LONG = 1 << 20  # tokens, of which memory is measured


def simulate(shape: str, ranks: int, sequences: int = 1) -> dict[str, Any]:
    """Times of a causal call's ranks, one after another, and an equal share of one call's, which
    is timed before and behind each rank; medians of windows, in milliseconds. All are replays of
    CUDA graphs, for which nobody waits for the host, in memory that they share. sequences: packed
    ones of all tokens, where they are several."""
    *operands, d_out = SHAPES[shape].operands(TOKENS * ranks)
    given: dict[str, Any] = {"mask": "causal"}
    of_one = {**given}
    if sequences > 1:
        *operands, d_out = (x.squeeze(0) for x in (*operands, d_out))
        lengths = lengths_of(TOKENS * ranks, ranks, sequences)
        ends = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)
        given |= {"layout": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
        of_one = {**given, "cu_seqlens_q": ends.cuda(), "cu_seqlens_kv": ends.cuda()}
    order = Order("dual_chunk", ranks)
    simulated = [*ranks_of(order, operands, given, [], receives=True)]
    alone, own = partial(attngen.attention, **of_one), d_out.narrow(d_out.ndim - 3, 0, TOKENS)
    found: dict[str, Any] = {"shape": shape, "ranks": ranks, "tokens a rank": TOKENS}
    found["sequences"] = sequences

    def both_of(rank: Simulated) -> None:
        out, _ = rank.run()
        torch.autograd.grad(out, rank.leaves, own)

    def forward_of(rank: Simulated) -> None:
        with torch.no_grad():
            rank.run()

    def forward_alone() -> None:
        with torch.no_grad():
            alone(*operands)

    calls = {
        "forward": (forward_of, forward_alone),
        "both": (both_of, lambda: results(alone, operands, d_out)),
    }
    for name, (of_rank, whole) in calls.items():
        pool = torch.cuda.graph_pool_handle()
        one = captured(whole, pool)
        calls_in_turn = [one]
        for rank in simulated:
            calls_in_turn += [captured(partial(of_rank, rank), pool), one]
        alone_ms, times, spreads = among(turns(calls_in_turn, WINDOWS))
        ratios = [x * ranks for x in times]
        found |= {name: max(times) * alone_ms, f"{name}, a share of one call's": alone_ms / ranks}
        found[f"{name}, ratio"] = max(ratios)
        found[f"{name}, ratio of each"] = [round(x, 4) for x in ratios]
        found[f"{name}, ratios differ by"] = round(max(spreads) * ranks, 4)
    return found


def memory(ranks: int = 8, length: int = LONG) -> dict[str, Any]:
    """Bytes that a rank allocates at most beside its operands, and those of its own q, k and v."""
    *operands, d_out = USUAL.operands(length)
    order, given = Order("dual_chunk", ranks), {"mask": "causal"}
    rank, *_ = ranks_of(order, operands, given, [], keeps_regions=False)
    d_out = d_out[:, : length // ranks].clone()
    operands.clear()
    found = {"ranks": ranks, "length": length, "operands": sum(x.nbytes for x in rank.leaves)}
    for name in ("forward", "both"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.set_grad_enabled(name == "both"):
            out, _ = rank.run()
        if name == "both":
            torch.autograd.grad(out, rank.leaves, d_out)
        found[name] = torch.cuda.max_memory_allocated() - before
        del out
    return found


def work(asked: tuple[str, Any]) -> dict[str, Any]:
    """A case of `check`, or a length and a shape of `bench` with its rounds, by a process of a
    group."""
    what, case = asked
    if what == "check":
        return check(case)
    length, shape, rounds, sequences = case
    (row,) = rows([shape], [length], rounds, sequences)
    return row


def in_pool(options: argparse.Namespace) -> int:
    """The cases or the times of a pool of processes, a GPU each, printed and written as they come.
    Returns: how many are wrong."""
    on_cpu = options.device == "cpu"
    asked: list[Any] = [x for x in cases(options.gpus) if not (on_cpu and x.long)]
    if options.what == "bench":
        pairs = [(length, shape) for length in options.lengths for shape in options.shapes]
        asked = [(*pair, options.rounds, options.sequences) for pair in pairs]
    pool, lines = Pool(options.gpus, "gloo" if on_cpu else "nccl", work, options.limit), []
    for case in asked:
        found = pool.run((options.what, case))
        if found.fault:
            line = {"case": str(case), "right": False, "fault": found.fault}
        else:
            line = {**next(iter(found.results))}
            if "right" in line:
                line["right"] = all(each["right"] for each in found.results)
        lines.append(line)
        print(line["case"] if line.get("right") else line, flush=True)
        if not on_cpu:
            write(options.output, name_of(options, options.gpus), lines)
    pool.close()
    return summed(lines)


def name_of(options: argparse.Namespace, gpus: int) -> str:
    """The name of lines of so many GPUs."""
    packed = ", packed" if options.what == "bench" and options.sequences > 1 else ""
    return f"{options.what}, {gpus} GPUs{packed}"


def summed(lines: list[dict[str, Any]]) -> int:
    """Print how many of these are wrong, and which. Returns: how many."""
    wrong = [line for line in lines if not line.get("right", True)]
    print(f"{len(lines)} lines, {len(wrong)} wrong", *(x["case"] for x in wrong), sep="\n  ")
    return len(wrong)


def over_group(options: argparse.Namespace) -> int:
    """The cases or the times of a group that torchrun began, printed and written by its first rank
    as they come. Returns: how many are wrong."""
    lines: list[dict[str, Any]] = []
    timed = rows(options.shapes, options.lengths, options.rounds, options.sequences)
    for line in map(check, cases(dist.get_world_size())) if options.what == "check" else timed:
        lines.append(line)
        if dist.get_rank() == 0:
            print(line["case"] if line.get("right") else line, flush=True)
            write(options.output, name_of(options, dist.get_world_size()), lines)
    return summed(lines) if dist.get_rank() == 0 else sum(not x.get("right", True) for x in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("check", "bench", "simulate", "memory"))
    parser.add_argument("--output", type=Path, default=RESULTS, help="file")
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=[*SHAPES], help="of bench, simulate"
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[16384, 65536], help="of bench")
    parser.add_argument("--rounds", type=int, default=5, help="of bench")
    parser.add_argument("--sequences", type=int, default=1, help="of bench, packed if several")
    parser.add_argument("--gpus", type=int, help="of check and bench; default: all of the host")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: of check")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of a case")
    options = parser.parse_args()
    if options.device == "cpu":
        if options.what != "check" or not options.gpus:
            parser.error("--device cpu is of check, and takes --gpus, how many processes")
        return 1 if in_pool(options) else 0
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    if options.what == "simulate":
        lines = []
        for shape, sequences, ranks in product(options.shapes, (1, PACKED), SIMULATED):
            lines.append(simulate(shape, ranks, sequences))
            print(lines[-1], flush=True)
            write(options.output, "simulate", lines)
        return 0
    if options.what == "memory":
        lines = [memory()]
        print(*lines, flush=True)
        write(options.output, "memory", lines)
        return 0
    if "LOCAL_RANK" not in os.environ:
        options.gpus = options.gpus or torch.cuda.device_count()
        return 1 if in_pool(options) else 0
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    wrong = over_group(options)
    dist.destroy_process_group()
    return 1 if wrong else 0


def links() -> str:
    """How the GPUs of the host are linked, in the words of its driver's tool."""
    found = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True)
    rows_of_gpus = [line.split() for line in found.stdout.splitlines() if line[:3] == "GPU"]
    return "; ".join(" ".join(words[: len(rows_of_gpus) + 1]) for words in rows_of_gpus)


def write(output: Path, name: str, lines: list[dict[str, Any]]) -> None:
    """Put lines under a name into the file, beside what is there."""
    known = json.loads(output.read_text()) if output.exists() else {}
    known[name] = lines
    known["machine"] = {"GPU": torch.cuda.get_device_name(), "torch": torch.__version__}
    known["machine"]["links"] = links()
    output.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

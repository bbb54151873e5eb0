r"""Times layers of transformers' models by who computes their attention, on one GPU, as JSON.

    python tools/doors_speed.py -o docs/results/doors.json

Two layers of a stack shaped like a model, random weights, bfloat16: a training step (forward and
backward) and a prompt with its cache of one sequence, and one token of 8 sequences behind a full
cache of fixed size, replayed as a CUDA graph. Attention is attngen's door, the backends of
PyTorch's `scaled_dot_product_attention`, FlexAttention as transformers compiles it, and the model's
own. Medians of interleaved rounds, in each of which the device has work while the first kernels are
enqueued; a step that waits for the device, or whose host work is the longer, shows it. Training has
a process, and inference, of each stack and length, short steps one each: all compile at once, then
one after another is timed. Compiled code is kept where TORCHINDUCTOR_CACHE_DIR says; a run that
finds none may need --ready-within of some minutes, and leaves out what it does not get ready.
--compile does that alone, in stacks as narrow as attention leaves them. Three things of peers are
mended, as transformers 5.17 has them: the mask of a model's own attention, which no graph takes;
that of FlexAttention over a fixed cache, whose queries move on by one before they are asked where
they are; and the sort of one of 128 blocks of queries, a kernel that Triton compiles for minutes,
which is PyTorch's own sort here.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import multiprocessing
import random
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch._inductor import config as inductor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from attngen import integrations  # noqa: E402
from attngen.bench.timing import following_milliseconds  # noqa: E402
from attngen.errors import MeasureError  # noqa: E402
from tools.doors_peers import compiled, register_masks  # noqa: E402
from tools.graphs import captured  # noqa: E402
from tools.reports import write_rows  # noqa: E402

LAYERS, SEQUENCES = 2, 8
MOST_EAGER = 4096  # tokens of a model's own attention whose scores are tensors of all pairs
SORTED_FOR_LONG = 128 * 128  # keys of a mask of FlexAttention with as many blocks of queries
LENGTHS = (4096, 16384, 32768)
STEPS = ("train", "prefill", "decode")
TOGETHER = (("train",), ("prefill", "decode"))  # in a process
APART = 4096  # tokens of steps so short that what the host does shows: each has a process
TOLERANCE = 0.05  # of the norm of what attngen's layers return for a token
NARROW = {"hidden_size": 64, "intermediate_size": 64}
COMPILED, GRACE = ("flex",), 10.0  # who compiles for long, and seconds to end that in
LEAST_MS, MOST_CALLS = 40.0, 20  # of a round
HEAD_START = 20_000_000  # cycles, some 10 ms, in which a round's first kernels are enqueued
ROW_SECONDS, MOST_ROUNDS = 2.0, 25  # short steps get more rounds than are asked for
SCHEMA = 1
Call = Callable[[], Any]


class Stack(NamedTuple):
    """A model by the names of its classes, what its config says, and who may compute its
    attention beside attngen, in steps of many queries and in decoding."""

    name: str
    config: dict[str, Any]
    peers: tuple[str, ...]
    peers_of_decode: tuple[str, ...]


LLAMA = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": LENGTHS[-1]},
}
GPT_OSS = {
    **{"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64},
    **{"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    **{"num_local_experts": 32, "num_experts_per_tok": 4},
    "layer_types": ["sliding_attention", "full_attention"],
}
STACKS = {
    # The efficient kernels take no groups of heads, flash no masks, which fixed caches have.
    "llama-8b": Stack("Llama", LLAMA, ("flash", "cudnn", "flex"), ("cudnn", "efficient", "flex")),
    "gpt-oss-20b": Stack("GptOss", GPT_OSS, ("eager", "flex"), ("eager", "flex")),
}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
IMPLEMENTATIONS = {"flex": "flex_attention", **dict.fromkeys(BACKENDS, "sdpa")}


def model_of(stack: Stack, narrow: bool) -> Any:
    """The layers, with random weights. narrow: with less between attention and attention."""
    import transformers

    made = {"num_hidden_layers": LAYERS, "vocab_size": 1024, **(NARROW if narrow else {})}
    config = getattr(transformers, f"{stack.name}Config")(**{**stack.config, **made})
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = getattr(transformers, f"{stack.name}Model")(config).eval()
        torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    return model


def train(model: Any, length: int) -> Call:
    """A step's forward and backward, without its optimizer."""
    ids = _ids(1, length)
    d_out = torch.randn(1, length, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)

    def step() -> Any:
        model.zero_grad(set_to_none=True)
        out = model(input_ids=ids, use_cache=False).last_hidden_state
        out.backward(d_out)
        return out

    return step


def prefill(model: Any, length: int) -> Call:
    """A prompt whose keys and values are kept."""
    ids = _ids(1, length)

    def step() -> Any:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=True).last_hidden_state

    return step


def decode(model: Any, length: int) -> Call:
    """One token behind a cache that it fills."""
    from transformers.cache_utils import Cache, StaticLayer

    config = model.config
    cache = Cache(layers=[StaticLayer(max_cache_len=length) for _ in range(LAYERS)])
    sizes = SEQUENCES, config.num_key_value_heads, config.head_dim
    cache.early_initialization(*sizes, dtype=torch.bfloat16, device=torch.device("cuda"))
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    ids = _ids(SEQUENCES, 1)

    def step() -> Any:
        for layer in cache.layers:
            layer.cumulative_length.fill_(length - 1)
        with torch.no_grad():
            return model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state

    return step


MAKERS: dict[str, Callable[[Any, int], Call]] = {
    "train": train,
    "prefill": prefill,
    "decode": decode,
}


def _ids(sequences: int, length: int) -> torch.Tensor:
    return torch.randint(0, 1024, (sequences, length), device="cuda")


class Timed(NamedTuple):
    """A step, and how it is called."""

    call: Call
    select: Call
    around: Callable[[], Any]

    def milliseconds(self, calls: int) -> float:
        """The mean time of so many calls, in the midst of a stream of them: the device is busy
        while the first is enqueued."""
        self.select()
        with self.around():
            torch.cuda.synchronize()
            torch.cuda._sleep(HEAD_START)
            return following_milliseconds(self.call, calls)


class Task(NamedTuple):
    """Rows to be measured in a process."""

    stack: str
    steps: tuple[str, ...]
    length: int


class Row:
    """A step of a model, by who computes its attention. missing: who cannot, and why."""

    def __init__(self, model: Any, task: Task, step: str) -> None:
        torch.manual_seed(1)
        self.model = model
        self.about: dict[str, Any] = {"stack": task.stack, "step": step, "length": task.length}
        self.call = MAKERS[step](model, task.length)
        self.first: torch.Tensor | None = None
        self.timed: dict[str, Timed] = {}
        self.missing: dict[str, str] = {}

    def peers(self, options: argparse.Namespace) -> list[str]:
        """Who is asked, attngen first."""
        stack, is_decode = STACKS[self.about["stack"]], self.about["step"] == "decode"
        peers = stack.peers_of_decode if is_decode else stack.peers
        if options.compile:
            peers = tuple(peer for peer in peers if peer in COMPILED)
        return ["attngen", *[peer for peer in peers if peer not in options.without]]

    def prepare(self, who: str, until: float) -> None:
        """Call the step once, and hold its result to attngen's. until: of the monotonic clock, what
        compiles for long may take."""
        select = partial(self.model.set_attn_implementation, IMPLEMENTATIONS.get(who, who))
        around = partial(sdpa_kernel, BACKENDS[who]) if who in BACKENDS else nullcontext
        try:
            decodes, length = self.about["step"] == "decode", self.about["length"]
            if who == "eager" and not decodes and length > MOST_EAGER:
                raise MeasureError(f"not asked for above {MOST_EAGER} tokens")
            select()
            sorts = length == SORTED_FOR_LONG and not decodes
            compiles = compiled(until, sorts) if who in COMPILED else nullcontext()
            with around(), compiles:
                out = self.call().detach().float()
                again = captured(self.call) if decodes else self.call
                torch.cuda.synchronize()
            self.first = out if self.first is None else self.first
            if not (off := off_by(out, self.first)) < TOLERANCE:
                raise MeasureError(f"its result is off by {off:.3f}")
            self.timed[who] = Timed(again, select, around)
        except Exception as error:  # a peer refuses in its own way
            lines = [type(error).__name__, *str(error).strip().splitlines()]
            self.missing[who] = ": ".join(lines[:2])[:200]
            print(f"{[*self.about.values()]}, {who}: {self.missing[who]}", file=sys.stderr)
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()

    def measured(self, rounds: int) -> dict[str, Any]:
        """The row: medians of a step, and attngen's rate over the best other's."""
        gc.collect()
        gc.freeze()  # what compilation left is not looked through between steps
        counts = {}
        for who, each in self.timed.items():
            once = each.milliseconds(1)
            counts[who] = min(MOST_CALLS, max(1, round(LEAST_MS / once)))
        samples: dict[str, list[float]] = {who: [] for who in self.timed}
        end = time.monotonic() + ROW_SECONDS
        for done in range(MOST_ROUNDS):
            if done >= rounds and time.monotonic() > end:
                break
            for who in random.sample(list(self.timed), len(self.timed)):
                samples[who].append(self.timed[who].milliseconds(counts[who]))
        ms = {who: round(statistics.median(taken), 4) for who, taken in samples.items()}
        others = {who: taken for who, taken in ms.items() if who != "attngen"}
        best = min(others, key=lambda who: others[who], default=None)
        ratio = round(others[best] / ms["attngen"], 3) if best and "attngen" in ms else None
        return {**self.about, "ms": ms, "best_peer": best, "ratio": ratio, "missing": self.missing}


def off_by(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far results [.., c] are from others, of a token's norm: the median over tokens, since
    rounding may tip a router's choice of experts in a few."""
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())


def work(parent: Connection, task: Task, options: argparse.Namespace) -> None:
    """A process: prepare its rows, say so, and time them when the parent answers."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    inductor.compile_threads = 1  # here: others compile beside this one
    # A step of another length is compiled for that length, as a program of one length would be.
    torch._dynamo.config.automatic_dynamic_shapes = False
    integrations.transformers.register(backend="cuda")
    register_masks()
    stack = STACKS[task.stack]
    model = model_of(stack, options.compile)
    own = [Row(model, task, step) for step in task.steps]
    for late in (False, True):  # what may not be ready in time comes last
        for row in own:
            for who in row.peers(options):
                if (who in COMPILED) is late:
                    row.prepare(who, options.until)
    parent.send(None)
    parent.recv()
    for row in own:
        parent.send(row.measured(options.rounds))
    parent.close()


def tasks_of(options: argparse.Namespace) -> Iterator[Task]:
    """Tasks of the processes, of what is asked for."""
    for name, length in itertools.product(options.stacks, options.lengths):
        for together in [(each,) for each in STEPS] if length <= APART else TOGETHER:
            if steps := tuple(each for each in together if each in options.steps):
                yield Task(name, steps, length)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of what is asked for, each printed when it is there."""
    spawn = multiprocessing.get_context("spawn")
    start = time.monotonic()
    options.until = start + options.ready_within
    workers, tasks = {}, {}
    for task in tasks_of(options):
        own, other = spawn.Pipe()
        process = spawn.Process(target=work, args=(other, task, options), daemon=True)
        process.start()
        other.close()
        workers[own], tasks[own] = process, task
    pending: list[Connection] = [*workers]
    ready: dict[Connection, bool] = {}
    end = options.until + GRACE
    while pending and (spoke := wait(pending, max(0, end - time.monotonic()))):
        ready |= {each: _received(each) is None for each in pending if each in spoke}
        pending = [each for each in pending if each not in spoke]
    for each in pending:
        print(f"{tasks[each]}: not ready in time", file=sys.stderr)
        workers[each].kill()
    print(f"{len(ready)} ready in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    for each in workers if not options.compile else ():
        if not ready.get(each):
            continue
        each.send(None)
        while row := _received(each):
            print(f"{row['stack']} {row['step']} {row['length']}: {row['ms']}, {row['ratio']} x")
            sys.stdout.flush()
            yield row
        workers[each].join()


def _received(worker: Connection) -> Any:
    """The next thing that a process sends; {} where it has ended."""
    try:
        return worker.recv()
    except EOFError:
        return {}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stacks", nargs="+", default=[*STACKS], choices=[*STACKS])
    parser.add_argument("--steps", nargs="+", default=[*STEPS], choices=[*STEPS])
    parser.add_argument("--lengths", nargs="+", type=int, default=[*LENGTHS])
    parser.add_argument("--without", nargs="+", default=[], choices=[*IMPLEMENTATIONS, "eager"])
    parser.add_argument("--compile", action="store_true", help="fill caches, and time nothing")
    parser.add_argument("--ready-within", type=float, default=300, help="seconds for compilation")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the processes, too
    fields = {"rounds": options.rounds, "layers": LAYERS, "sequences": SEQUENCES}
    versions = {"transformers": version("transformers")}
    write_rows(options.output, SCHEMA, rows(options), **fields, versions=versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())

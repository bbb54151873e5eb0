"""Compiles kernels of random problems and lists those that may not ship: for spills, a serialised
wgmma, registers that ptxas did not grant, or more bytes in a bundle than a kernel may take.

    python tools/sweep.py --seed 1 --count 200

The covering set (`attngen list --coverage`) has every pair of features at a few head dims; what
spills where many features meet, or at a head dim between, shows here.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from attngen.compiler.builder import render_problem  # noqa: E402
from attngen.compiler.compile import compile_source  # noqa: E402
from attngen.errors import AttngenError  # noqa: E402
from attngen.fragments import features  # noqa: E402
from attngen.kernels.plan import plans  # noqa: E402
from attngen.spec import resolve  # noqa: E402
from attngen.spec.attention_spec import MAX_HEAD_DIM, AttentionSpec  # noqa: E402
from attngen.spec.problem import Problem  # noqa: E402

MOST_BYTES = 90_000  # of a cubin in a bundle, of 100 kB with what the manifest says of it
LAYOUTS = ("bshd", "bshd", "bshd", "thd", "thd", "thd_bshd_bshd")
PAGED = ("paged_kv_bshd_bshd_bshd", "paged_kv_thd_bshd_bshd")
HEAD_DIMS = (64, 128, 192, 256, *range(8, 257, 8), 1, 37, 100, 251)
WIDE_HEAD_DIMS = (264, 320, 384, 448, 512, 576, 64, 128, 300, 511)
# Of the specs that ask for a feature; for others 0.4.
SHARES = {"decode": 0.2, "gather": 0.15, "score_mod": 0.0, "mask_mod": 0.0}
FORWARD_ONLY = ("decode", "return_max_logit")


def draw(choose: random.Random, head_dims: tuple[int, ...] = HEAD_DIMS) -> AttentionSpec:
    """Any spec that has kernels: a random one, fields that have none at their nearest values. Two
    fifths are backwards, which ask for nothing that only a forward has."""
    wide = max(head_dims) > MAX_HEAD_DIM  # of 16 bits alone
    backward = choose.random() < 0.4
    fields = dataclasses.fields(AttentionSpec)
    names = [each.name for each in fields if isinstance(each.default, bool)]
    names.remove("continues")  # which little goes beside
    switches: dict[str, Any] = {n: choose.random() < SHARES.get(n, 0.4) for n in names}
    if backward:
        switches |= dict.fromkeys(FORWARD_ONLY, False)
    head_dim = choose.choice(head_dims)
    spec = AttentionSpec(
        head_dim=head_dim,
        head_dim_v=choose.choice((head_dim, head_dim, choose.choice(head_dims))),
        dtype=choose.choice(
            ("bf16", "fp16") if backward or wide else ("bf16", "fp16", "e4m3", "e5m2")
        ),
        kv_dtype=None if backward or wide else choose.choice((None, None, None, "e4m3", "e5m2")),
        out_dtype=None if backward else choose.choice((None, None, None, "fp32")),
        layout=choose.choice(LAYOUTS if backward else (*LAYOUTS, *PAGED)),
        mask=choose.choice(("none", "causal")),
        bias=choose.choice(("none", "none", "pre_scale", "post_scale")),
        softmax=choose.choice(("vanilla", "vanilla", "off_by_one", "learnable")),
        directions=("bwd" if backward else "fwd",),
        **switches,
    )
    known = features.scan()
    while resolve.find_violations(spec, known):
        spec = resolve.nearest(spec, known)
    return spec


def crossing(problems: Iterable[Problem], count: int) -> list[Problem]:
    """So many of the problems, each of which has most pairs of features that none before has."""
    left, met, found = list(problems), set[tuple[str, str]](), list[Problem]()

    def pairs(problem: Problem) -> set[tuple[str, str]]:
        return {*itertools.combinations(sorted({problem.direction, *problem.label.split("_")}), 2)}

    while left and len(found) < count:
        best = max(left, key=lambda each: len(pairs(each) - met))
        left.remove(best)
        found.append(best)
        met |= pairs(best)
    return found


def wide_sample(count: int, seed: int) -> list[Problem]:
    """So many problems of head dims above 256, crossed, always the same for a seed."""
    choose, found = random.Random(seed), dict[Problem, None]()
    while len(found) < 10 * count:
        drawn = resolve.resolve(draw(choose, WIDE_HEAD_DIMS), features.scan())
        found.update((x, None) for x in drawn if max(x.head_dim_qk, x.head_dim_v) > MAX_HEAD_DIM)
    return crossing(found, count)


def sample(count: int, seed: int) -> list[Problem]:
    """So many problems, each once, always the same for a seed."""
    choose, found = random.Random(seed), dict[Problem, None]()
    while len(found) < count:
        found.update(dict.fromkeys(resolve.resolve(draw(choose), features.scan())))
    return list(found)


def check(problem: Problem, arch: str = "sm_90a") -> list[str]:
    """Why kernels of a problem may not ship; none where all may."""
    try:
        chosen = plans(problem, arch)
    except AttngenError as error:
        return [str(error)]
    found = []
    for each in chosen:
        try:
            binary, cubin = compile_source(render_problem(problem, each), problem, arch)
        except AttngenError as error:
            found.append(str(error))
            continue
        if spills := binary.resources.in_local_memory:
            found.append(f"{binary.kernel.entry}: {spills}")
        if (size := packed_bytes(cubin)) > MOST_BYTES:
            found.append(f"{binary.kernel.entry}: {size} bytes in a bundle")
    return found


def packed_bytes(cubin: bytes) -> int:
    """Count the bytes that a cubin takes in a bundle."""
    return len(zlib.compress(cubin, 6))


def failures(problems: Iterable[Problem], workers: int = 2) -> Iterator[str]:
    """Check all problems, and yield the failures."""
    with ThreadPoolExecutor(workers) as pool:
        for found in pool.map(check, problems):
            yield from found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=24, help="problems")
    parser.add_argument("--wide", action="store_true", help="head dims above 256")
    options = parser.parse_args()
    start, count = time.perf_counter(), 0
    drawn = wide_sample if options.wide else sample
    for line in failures(drawn(options.count, options.seed)):
        print(line, flush=True)
        count += 1
    print(f"{count} failures, {options.count} problems, {time.perf_counter() - start:.0f} s")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())

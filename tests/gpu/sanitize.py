"""Small launches of the curated kernels, for compute-sanitizer; exits 1 where one is wrong.

    for tool in memcheck racecheck synccheck; do
      PYTHONPATH=. compute-sanitizer --tool $tool --error-exitcode 9 --log-file $tool.log \\
        --report-api-errors no python3 tests/gpu/sanitize.py
    done

(cuda-bindings looks up functions that a driver may lack, which would count as errors of the API.)
Operands are made and results checked on the CPU, so that attngen's kernels are all that runs on
the device. Without torch's caching every tensor is an allocation of its own, whose bounds memcheck
knows.  Arguments: words that the names of the cases to run contain; --list prints the names,
--shard 1/4 runs a quarter of them. Shards of all three tools are taken to run side by side, and to
share the cores: with OMP_NUM_THREADS=1 and kernels that are in the cache five of each take half a
minute on 16 cores. ATTNGEN_TARGET=sm_90 runs kernels of mma.sync on Hopper; what they refuse is
named and does not count as wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import attngen  # noqa: E402
import attngen.frontends.pytorch.forward  # noqa: E402  # registers the operations
import attngen.frontends.pytorch.forward_onto  # noqa: E402
from attngen import reference  # noqa: E402
from attngen.call.table import SCALES  # noqa: E402
from attngen.call.tensors import name_of  # noqa: E402
from attngen.errors import AttngenError, PlanError, SpecError  # noqa: E402
from attngen.frontends.pytorch.backward_parts import RowSums  # noqa: E402
from attngen.spec.attention_spec import SHORT_HEAD_DIM  # noqa: E402
from tests.gpu import (  # noqa: E402
    gradients,
    kv_cache,
    oracle,
    oracle_fp8,
    test_append,
    test_fp8_backward,
    test_large_scores,
    test_scale_extremes,
    variants,
    varlen,
)
from tests.gpu.cases import Case  # noqa: E402
from tests.gpu.cases_fp8 import Fp8Case  # noqa: E402
from tests.gpu.cases_learned import LearnedCase  # noqa: E402
from tests.gpu.cases_made import MadeMaskCase, TokenCase  # noqa: E402
from tests.gpu.cases_placed import PlacedCase  # noqa: E402
from tests.gpu.cases_sanitize import (  # noqa: E402
    CASES,
    BackwardCase,
    FoldedCase,
    Fp8AddedCase,
    LargeCase,
    LargeSplitCase,
    PagedCase,
    PartsCase,
    SoftcapCase,
)
from tests.gpu.hostile import Hostile, HostilePages, OnDevice  # noqa: E402
from tests.gpu.test_callables import check_learned  # noqa: E402
from tests.gpu.variants import Variant  # noqa: E402
from tests.gpu.varlen import Call  # noqa: E402

AnyCase = (
    Case
    | Fp8Case
    | Fp8AddedCase
    | BackwardCase
    | test_fp8_backward.Case
    | test_append.Case
    | Variant
    | SoftcapCase
    | PagedCase
    | PartsCase
    | PlacedCase
    | LearnedCase
    | MadeMaskCase
    | TokenCase
    | Call
    | LargeCase
    | LargeSplitCase
    | FoldedCase
    | Hostile
    | HostilePages
)


def run(case: AnyCase, device: torch.device) -> None:
    """One call, checked on the CPU. Raises: AssertionError where the result is wrong."""
    if isinstance(case, FoldedCase):
        with oracle.folded_grids():
            run(case.case, device)
        return
    if isinstance(case, LargeCase):
        test_large_scores.check(case.call, case.deterministic, device)
        return
    if isinstance(case, PagedCase):
        given = case.arguments()
        there = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in given.items()}
        result = attngen.attention(
            **there, num_splits=case.splits or None, return_lse=True, backend="cuda"
        )
        out, lse = result[0].cpu(), result[1].lse.cpu()
        if case.kv_dtype:
            table = given.pop("page_table")
            dense = {n: kv_cache.dense_of(given.pop(n), table, "bshd") for n in "kv"}
            kv_cache.check(out, lse, given.pop("q"), **dense, **{**given, "layout": "bshd"})
        else:
            oracle.check(out, lse, oracle.truth(**given), case.layout)
        return
    if isinstance(case, test_append.Case):
        test_append.check(case, device)
        return
    if isinstance(case, MadeMaskCase | TokenCase | PlacedCase):
        case.check(device)
        return
    if isinstance(case, Hostile | HostilePages):
        case.check([OnDevice(device)])
        return
    if isinstance(case, Call):
        varlen.check(case, device=device)
        return
    if isinstance(case, test_fp8_backward.Case):
        made = test_fp8_backward.given(case)
        found = made.on(device).run()
        test_fp8_backward.check(made, {name: x.cpu() for name, x in found.items()})
        return
    if runner := RUNNERS.get(type(case)):
        runner(case, device)
        return
    operands = case.operands()
    on_device = [x.to(device) for x in operands]
    numbers = numbers_of(case)
    if isinstance(case, Fp8Case):
        run_fp8(case, operands, on_device, numbers)
        return
    out_dtype = "float32" if case.partial else None
    expected = oracle.truth(*operands, **case.arguments)
    for small in (False, True)[: 1 + (max(case.d, case.d_v) <= SHORT_HEAD_DIM)]:
        with oracle.small_tiles(small):
            out, lse, *_ = torch.ops.attngen.forward(*on_device, **numbers, out_dtype=out_dtype)
        oracle.check(out.cpu(), lse.cpu(), expected, case.layout)


def numbers_of(case: Case | Fp8Case) -> dict:
    """Numbers of both operations, and of each its own."""
    left, right = case.window
    numbers = {"layout": case.layout, "mask": case.mask, "window_left": left}
    return {**numbers, "window_right": right, "bottom_right": case.mask.endswith("bottom_right")}


def run_backward(case: BackwardCase, device: torch.device) -> None:
    """Run the gradients, from an output and LSE that the CPU worked out."""
    call, arguments = case.forward, case.forward.arguments
    q, k, v = call.operands()
    shape = (*q.shape[:-1], v.shape[-1])
    d_o = oracle.randn(*shape, dtype=q.dtype, seed=50)
    batch, heads, _ = call.heads
    rows = (batch, heads, call.lengths[0])
    dlse = oracle.randn(*rows, dtype=torch.float32, seed=60) if case.lse else None
    tensors = (q, k, v, d_o)
    out, lse, _ = gradients.reference_gradients(tensors, dlse, q.dtype, **arguments)
    on_device = [None if x is None else x.to(device) for x in (d_o, dlse, q, k, v, out, lse)]
    numbers = {**numbers_of(call), "deterministic": case.deterministic}
    dq, dk, dv, *_ = torch.ops.attngen.backward(*on_device, **numbers)
    gradients.check([x.cpu() for x in (dq, dk, dv)], tensors, dlse, **arguments)


def run_variant(variant: Variant, device: torch.device) -> None:
    """Run the forward of a variant, then its gradients."""
    call, arguments = variant.case, variant.arguments
    q, k, v = call.operands()
    slopes, sink = arguments.get("alibi_slopes"), arguments.get("sink")
    if slopes is True:
        slopes = reference.default_alibi_slopes(call.heads[1])
    tensors = {"alibi_slopes": slopes, "sink": sink}
    numbers = {n: None if x is None else x.to(device) for n, x in tensors.items()}
    numbers |= {**numbers_of(call), "softcap": variant.softcap, "softmax": variant.softmax}
    numbers |= {"max_logit": variant.max_logit}
    on_device = [x.to(device) for x in (q, k, v)]
    out, lse, _, _, largest = torch.ops.attngen.forward(*on_device, **numbers)
    oracle.check(out.cpu(), lse.cpu(), oracle.truth(q, k, v, **arguments), call.layout)
    if variant.max_logit:
        variants.check_max_logit(largest.cpu(), q, k, v, arguments, False)
    d_o = oracle.randn(*out.shape, dtype=q.dtype, seed=50)
    dlse = oracle.randn(*lse.shape, dtype=torch.float32, seed=60)
    numbers["deterministic"] = variant.deterministic
    dq, dk, dv, dsink, *_ = torch.ops.attngen.backward(
        d_o.to(device), dlse.to(device), *on_device, out, lse, **numbers
    )
    gradients.check([x.cpu() for x in (dq, dk, dv)], (q, k, v, d_o), dlse, **arguments)
    if sink is not None:
        variants.check_sink_gradient_of((q, k, v), dsink.cpu(), arguments, d_o, dlse)


def run_large_split(case: LargeSplitCase, device: torch.device) -> None:
    """Run, as `run` does, a call with large scores whose keys are split."""
    operands, more = case.operands(), {"mask": "causal_bottom_right", "softmax_scale": 0.125}
    wanted, expected = reference.attention(*(x.float() for x in operands), **more)
    out, aux = attngen.attention(
        *(x.to(device) for x in operands), **more, num_splits=case.splits, return_lse=True,
        backend="cuda",
    )  # fmt: skip
    test_scale_extremes.check(out.cpu(), wanted, 2**-7)
    test_scale_extremes.check_lse(aux.lse.cpu(), expected.lse)


def run_softcap(case: SoftcapCase, device: torch.device) -> None:
    """Run a softcap by the kernels of usual and of short calls."""
    variant, operands = case.variant, case.operands()
    numbers = {**numbers_of(variant.case), "softcap": variant.softcap}
    if variant.alibi:
        slopes = reference.default_alibi_slopes(variant.case.heads[1])
        numbers["alibi_slopes"] = slopes.to(device)
    on_device = [x.to(device) for x in operands]
    expected = oracle.truth(*operands, **variant.arguments)
    for small in (False, True)[: 1 + (variant.case.d <= SHORT_HEAD_DIM)]:
        with oracle.small_tiles(small):
            out, lse, *_ = torch.ops.attngen.forward(*on_device, **numbers)
        oracle.check(out.cpu(), lse.cpu(), expected, variant.case.layout)


def run_fp8(
    case: Fp8Case, operands: Sequence[Tensor], on_device: Sequence[Tensor], numbers: dict
) -> None:
    """Run a call in 8 bits, with scales and maxima."""
    arguments = case.arguments
    device = on_device[0].device
    scales = {name: arguments[name].to(device) for name in SCALES if name in arguments}
    results = torch.ops.attngen.forward(
        *on_device, **scales, **numbers, out_dtype=name_of(arguments["out_dtype"]), amax=True
    )
    out, lse, amax_s, amax_o, _ = (x.cpu() for x in results)
    expected = oracle_fp8.truth(*operands, **arguments)
    oracle_fp8.check(out, lse, expected, case.layout, arguments.get("scale_o"))
    oracle_fp8.check_maxima(amax_s, amax_o, expected)
    if case.mask == "none":  # which may have a kernel for the output alone
        more = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in arguments.items()}
        out = attngen.attention(*on_device, **more, backend="cuda").cpu()
        oracle_fp8.check_output(out, expected, case.layout, arguments.get("scale_o"))


def run_parts(case: PartsCase, device: torch.device) -> None:
    """Run, as `run` does, a call whose keys come in parts, with its gradients."""
    operands = oracle.operands(1, 4, 2, *case.lengths, case.d, case.d, torch.bfloat16)
    d_o = oracle.randn(*operands[0].shape, dtype=torch.bfloat16, seed=9)
    q, k, v = (x.to(device) for x in operands)
    batch, rows, heads, _ = q.shape
    out, lse = q.new_empty(q.shape, dtype=torch.float32), q.new_empty((batch, heads, rows)).float()
    rounded, wide = torch.empty_like(q), {"out_dtype": "float32"}
    for keys in case.parts:
        state = out, lse, rounded, None, keys.start > 0, True
        torch.ops.attngen.forward_onto(q, k[:, keys], v[:, keys], *state, **wide)
    oracle.check(rounded.cpu(), lse.cpu(), oracle.truth(*operands))
    sums, made = RowSums(q, rounded, lse, d_o.to(device), None), []
    for keys in case.parts:
        into = tuple(torch.empty_like(x[:, keys], dtype=torch.float32) for x in (k, v))
        assert sums.add(0, q, (k[:, keys], v[:, keys]), into, wide)
        made.append(into)
    dk, dv = (torch.cat(x, 1) for x in zip(*made, strict=True))
    found = [x.to(torch.bfloat16).cpu() for x in (sums.end(), dk, dv)]
    gradients.check(found, (*operands, d_o), None)


def run_learned(case: LearnedCase, device: torch.device) -> None:
    """Run, as `run` does, a call whose score learns what it captures."""
    check_learned(case.name, case.d, case.deterministic, device, mask=case.mask)


def run_fp8_added(case: Fp8AddedCase, device: torch.device) -> None:
    """Run, as `run` does, a call in 8 bits with dropout or a bias."""
    operands, given = case.case.operands(), case.arguments()
    there = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in given.items()}
    out, aux = attngen.attention(
        *(x.to(device) for x in operands), **there, return_lse=True, return_amax=True,
        backend="cuda",
    )  # fmt: skip
    expected = oracle_fp8.truth(*operands, **given)
    oracle_fp8.check(out.cpu(), aux.lse.cpu(), expected, case.case.layout, given.get("scale_o"))
    oracle_fp8.check_maxima(aux.amax_s.cpu(), aux.amax_o.cpu(), expected)


REFUSALS = (SpecError, PlanError)  # of what a target has no kernel for
RUNNERS: dict[type, Callable[[Any, torch.device], None]] = {
    BackwardCase: run_backward,
    Fp8AddedCase: run_fp8_added,
    LargeSplitCase: run_large_split,
    LearnedCase: run_learned,
    PartsCase: run_parts,
    SoftcapCase: run_softcap,
    Variant: run_variant,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of the names of the cases to run")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="every N-th of them alone")
    parser.add_argument("--list", action="store_true", help="print the names and leave")
    options = parser.parse_args()
    chosen = [c for c in CASES if all(word in str(c) for word in options.words)]
    shard, shards = map(int, options.shard.split("/"))
    chosen = chosen[shard - 1 :: shards]
    if shards > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (3 * shards)))
    if options.list or not chosen:
        print(*CASES, sep="\n")
        return 0 if options.list else 2
    device, oracle.DEVICE = oracle.DEVICE, torch.device("cpu")
    forced = os.environ.get("ATTNGEN_TARGET")
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(_build, arch=forced or "sm_90a", may_refuse=bool(forced)), chosen))
    outcomes: Counter[str] = Counter()
    for case in chosen:
        outcome, why = _outcome(case, device, may_refuse=bool(forced))
        outcomes[outcome] += 1
        print(f"{outcome}  {case}{why}", flush=True)
    print(f"{outcomes['right']} of {len(chosen)} right, {outcomes['refused']} refused")
    return 1 if outcomes["wrong"] or not outcomes["right"] else 0


def _build(case: AnyCase, arch: str, may_refuse: bool) -> None:
    """Compile what serves the case, beside others. may_refuse: a call is to say why it cannot."""
    try:
        attngen.build(case.spec, arch)
    except REFUSALS:
        if not may_refuse:
            raise


def _outcome(case: AnyCase, device: torch.device, may_refuse: bool) -> tuple[str, str]:
    """Whether a case is right, wrong or, where that is allowed, refused; and why."""
    try:
        run(case, device)
    except (AssertionError, AttngenError, RuntimeError) as error:
        refused = may_refuse and isinstance(error, REFUSALS)
        return "refused" if refused else "wrong", f": {error}"
    return "right", ""


if __name__ == "__main__":
    sys.exit(main())

"""Writes what share of a chip's peak kernels by products of warps can be expected to reach.

    python tools/expected_shares.py -o docs/guide/gpus.md

By arithmetic, of kernels as they compile, in full attention of bf16: cycles that a warp's part of
a block takes of each unit of its scheduler, one of four of an SM, from the instructions of one turn
of the kernel's loop (without what rescales the output, which runs now and then). The share is that
of the time in which some warp of a scheduler multiplies, where each of its warps does so for the
cycles of its products and then for the others does not, at a time of its own (a closed queue of one
server): it needs no measurement, and counts neither memory nor waits at barriers. The tables go
between the two comments that name this tool.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from attngen import AttentionSpec  # noqa: E402  # a checkout not installed, too
from attngen.compiler.builder import build_plan  # noqa: E402
from attngen.fragments import features  # noqa: E402
from attngen.kernels.mma_sync.backward.plan import Plan as BackwardPlan  # noqa: E402
from attngen.kernels.mma_sync.forward.plan import Plan as ForwardPlan  # noqa: E402
from attngen.kernels.plan import plans  # noqa: E402
from attngen.spec.resolve import resolve  # noqa: E402
from attngen.targets.target import TARGETS, Target  # noqa: E402
from tests.support.sass import opcode_of, turn_of_loop  # noqa: E402

CHIPS = ("sm_80", "sm_86", "sm_89", "sm_120")
HEAD_DIMS = (64, 128)  # of which all warps have equal parts
SCHEDULERS = 4  # of an SM
PRODUCT_FLOPS = 4096  # of an instruction, 16 x 8 x 16
SHARED_BYTES = 128  # that an SM's shared memory moves in a cycle
WIDTHS = {"128": 16, "64": 8}  # bytes of a thread, by what instructions are called; else 4
MARK = "<!-- tools/expected_shares.py -->"
COLUMNS = (
    *("chip", "head dim", "queries x keys", "registers", "bytes a CTA", "CTAs, warps an SM"),
    *("products", "instructions", "shared memory", "exponentials", "share of peak"),
)
Weigh = Callable[[str], tuple[int, ...]]


def is_product(text: str) -> int:
    """1 for an instruction of the tensor cores, else 0."""
    return int(opcode_of(text) in ("HMMA", "QMMA"))


def _forward(text: str) -> tuple[int, ...]:
    """Least where a block is weighed whole, the next one is copied, and nothing is rescaled."""
    return -is_product(text), -int(opcode_of(text) == "LDGSTS"), 1


def _backward(text: str) -> tuple[int, ...]:
    """Least where halves of the warps multiply at places of their own, and the next is copied."""
    return -int(text.startswith("MUFU")), -int(opcode_of(text) == "LDGSTS"), is_product(text), 1


WAYS: dict[str, tuple[str, Weigh]] = {
    "forward": ("mma_fwd", _forward),
    "backward": ("mma_bwd", _backward),
}


@dataclass(frozen=True)
class Block:
    """Cycles that a warp's part of a block takes of each unit of its scheduler, the others of the
    SM being as busy."""

    products: float
    instructions: float
    shared: float
    exponentials: float

    def share(self, warps: int) -> float:
        """The part of the time in which one of so many warps of a scheduler multiplies."""
        ratio = self.products / (self.instructions + self.shared + self.exponentials)
        weight = total = 1.0  # of no warp that multiplies or waits for it, then of one, and so on
        for waiting in range(warps):
            weight *= (warps - waiting) * ratio
            total += weight
        return 1 - 1 / total


@dataclass(frozen=True)
class Kernel:
    """A kernel as it compiles: its plan, registers, and its block."""

    arch: str
    head_dim: int
    plan: ForwardPlan | BackwardPlan
    registers: int
    block: Block

    @property
    def warps(self) -> int:
        """Warps of an SM."""
        return self.plan.ctas * self.plan.threads // 32


def shared_bytes(text: str) -> int:
    """Bytes of shared memory that a warp's instruction moves."""
    opcode, *kinds = text.split()[0].split(".")
    if opcode == "LDSM":  # of matrices of 128 bytes
        return 128 * int(kinds[-1]) if kinds[-1].isdigit() else 128
    if opcode not in ("LDS", "STS", "LDGSTS"):
        return 0
    return 32 * next((WIDTHS[kind] for kind in kinds if kind in WIDTHS), 4)


def product_cycles(target: Target) -> float:
    """Cycles of a scheduler for a product of 16 bits."""
    return PRODUCT_FLOPS / (target.mma_flops / 2 / SCHEDULERS)


def block_of(turn: Iterable[str], target: Target) -> Block:
    """The cycles of such instructions of a warp."""
    code = list(turn)
    count = Counter(map(opcode_of, code))
    return Block(
        products=product_cycles(target) * sum(map(is_product, code)),
        instructions=len(code),
        shared=SCHEDULERS * sum(map(shared_bytes, code)) / SHARED_BYTES,
        exponentials=count["MUFU"] * 32 * SCHEDULERS / target.exponentials,
    )


def products_of(plan: ForwardPlan | BackwardPlan, head_dim: int) -> float:
    """Products of a warp's part of a block: two of all its scores in a forward, else five."""
    times = 2 if isinstance(plan, ForwardPlan) else 5
    flops = 2 * times * plan.tile.m * plan.tile.n * head_dim
    return flops / PRODUCT_FLOPS / (plan.threads // 32)


def kernel_of(arch: str, head_dim: int, way: str) -> Kernel:
    """The kernel of full attention in bf16. Raises: ValueError where the turn of its loop that was
    found is no block."""
    directions = ("fwd",) if way == "forward" else ("fwd", "bwd")
    *_, problem = resolve(AttentionSpec(head_dim, directions=directions), features.scan())
    family, weigh = WAYS[way]
    plan = next(each for each in plans(problem, arch) if each.family == family)
    assert isinstance(plan, ForwardPlan | BackwardPlan)
    built = build_plan(problem, plan, arch)
    block = block_of(turn_of_loop(built.cubin, weigh), TARGETS[arch])
    return Kernel(arch, head_dim, plan, built.binary.resources.registers, block)


def row_of(kernel: Kernel) -> str:
    """A line of Markdown; in brackets a unit's cycles over those of the products."""
    plan, block = kernel.plan, kernel.block
    units = (block.instructions, block.shared, block.exponentials)
    cells = [
        *(f"`{kernel.arch}`", str(kernel.head_dim), f"{plan.tile.m} x {plan.tile.n}"),
        *(str(kernel.registers), f"{plan.smem_bytes >> 10} KB"),
        *(f"{plan.ctas}, {kernel.warps}", f"{block.products:.0f}"),
        *(f"{each:.0f} ({each / block.products:.2f})" for each in units),
        f"{block.share(kernel.warps // SCHEDULERS):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def tables() -> Iterator[str]:
    """Lines of Markdown: a table a direction."""
    for way in WAYS:
        yield f"The {way}:"
        yield ""
        yield f"| {' | '.join(COLUMNS)} |"
        yield "|---" * len(COLUMNS) + "|"
        yield from (row_of(kernel_of(arch, d, way)) for arch in CHIPS for d in HEAD_DIMS)
        yield ""


def main(arguments: Sequence[str] | None = None) -> int:
    """0, with the tables in the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a page with the comments")
    options = parser.parse_args(arguments)
    before, _, after = options.output.read_text().split(MARK)
    text = "\n".join(["", "", *tables()])
    options.output.write_text(f"{before}{MARK}{text}{MARK}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Instruction counts and resource figures of cubins, read without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import files as files_of
from pathlib import Path

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
_WHOLE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_GUARDED = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+)?\s*([A-Z][^;]*?)\s*;")
_TARGET = re.compile(r"\((\.L_x_\d+)\)")
_PREDICATE = re.compile(r"\bU?P\d\b")
_OF_WARPGROUP = ("HGMMA", "QGMMA", "WARPGROUP")
_SETS_PREDICATES = ("ISETP", "FSETP", "PLOP3", "UISETP", "UPLOP3", "B2R", "SYNCS")
_FIGURE = re.compile(r"(\w+(?:\[\d+\])?):(\d+)")


def find_tool(name: str) -> str:
    """The path of nvdisasm or cuobjdump, of the wheel or of a CUDA toolkit on PATH.

    Raises: FileNotFoundError with what to install.
    """
    for file in files_of(f"nvidia-cuda-{name}") or ():
        if file.name == name:
            return str(file.locate())
    if found := shutil.which(name):
        return found
    raise FileNotFoundError(f"{name}: install nvidia-cuda-{name}, part of attngen[dev]")


def count_instructions(cubin: bytes) -> Counter[str]:
    """How often each opcode (its first part: `HGMMA`, `UTMALDG`, `STL`) occurs in the cubin."""
    return Counter(_INSTRUCTION.findall(_run("nvdisasm", cubin, "-c")))


def list_instructions(cubin: bytes) -> list[str]:
    """The cubin's instructions in order, without predicates: `WARPGROUP.DEPBAR.LE gsb0, 0x1`."""
    return _WHOLE.findall(_run("nvdisasm", cubin, "-c"))


def find_split_warpgroups(cubin: bytes) -> list[str]:
    """Branches that a vote of one warp decides and behind which the next of a warpgroup's
    instructions is another: its warps must all execute the same one, so a vote of all decides."""
    code, after = _read(cubin)
    # What a warp may meet first from an instruction on, itself included.
    first = [{i} if text.startswith(_OF_WARPGROUP) else set() for i, (_, text) in enumerate(code)]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(code))):
            if code[i][1].startswith(_OF_WARPGROUP):
                continue
            reached = set().union(*(first[k] for k in after[i]))
            changed, first[i] = changed or reached != first[i], reached
    before: list[list[int]] = [[] for _ in code]
    for i, targets in enumerate(after):
        for target in targets:
            before[target].append(i)
    found = []
    for i, (guard, text) in enumerate(code):
        if text.startswith("BRA") and len({frozenset(first[k]) for k in after[i]}) > 1:
            names = _PREDICATE.findall(f"{guard} {text}")
            if any(_is_voted(code, before, i, name) for name in names):
                found.append(f"{guard} {text}")
    return found


def _read(cubin: bytes) -> tuple[list[tuple[str, str]], list[list[int]]]:
    """Guards and texts of the instructions, and which of them follow each."""
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in _run("nvdisasm", cubin, "-c").splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _GUARDED.search(line):
            guard, text = found.groups("")
            code.append((guard, text))
    return code, [_successors(code, labels, i) for i in range(len(code))]


def opcode_of(instruction: str) -> str:
    """The first part of an instruction's opcode: `HMMA` of `HMMA.16816.F32 R4, R8, R2, R4`."""
    return instruction.split()[0].partition(".")[0]


def turn_of_loop(cubin: bytes, weigh: Callable[[str], tuple[int, ...]]) -> list[str]:
    """Instructions of one turn of the loop that has the most products of warps, on the way of the
    least weight; loops inside it are passed once. Nothing where no loop has products.

    weigh: a weight of an instruction, by its text; weights add up, and are compared as tuples.
    """
    code, after = _read(cubin)
    found: list[str] = []
    for head in sorted({k for i, following in enumerate(after) for k in following if k <= i}):
        turn = _least_turn(code, after, head, weigh)
        if _products(turn) > _products(found):
            found = turn
    return found


def _products(code: list[str]) -> int:
    return sum(opcode_of(text) in ("HMMA", "QMMA") for text in code)


def _least_turn(
    code: list[tuple[str, str]],
    after: list[list[int]],
    head: int,
    weigh: Callable[[str], tuple[int, ...]],
) -> list[str]:
    """Instructions from one to itself on the way of the least weight; nothing if there is none."""
    order: list[int] = []  # each behind all that follow it, but for ways back
    seen, ahead = {head}, [(head, iter(after[head]))]
    while ahead:
        i, following = ahead[-1]
        if (k := next(following, None)) is None:
            order.append(i)
            ahead.pop()
        elif k not in seen:
            seen.add(k)
            ahead.append((k, iter(after[k])))
    nothing = tuple(0 for _ in weigh(code[head][1]))
    least: dict[int, tuple[tuple[int, ...], int]] = {}
    for i in order:
        ways = [(nothing, head)] if head in after[i] else []
        ways += [(least[k][0], k) for k in after[i] if k in least and k != head]
        if ways:
            weight, k = min(ways)
            own = weigh(code[i][1])
            least[i] = (tuple(a + b for a, b in zip(own, weight, strict=True)), k)
    turn = [head] if head in least else []
    while turn and least[turn[-1]][1] != head:
        turn.append(least[turn[-1]][1])
    return [code[i][1] for i in turn]


def _successors(code: list[tuple[str, str]], labels: dict[str, int], i: int) -> list[int]:
    guard, text = code[i]
    following = [i + 1] if i + 1 < len(code) else []
    if text.startswith("BRA") and (target := _TARGET.search(text)):
        always = not guard and not _PREDICATE.search(text)
        return [labels[target[1]], *([] if always else following)]
    return [] if text.startswith(("EXIT", "RET")) and not guard else following


def _is_voted(code: list[tuple[str, str]], before: list[list[int]], i: int, name: str) -> bool:
    """Whether a definition of the predicate that reaches instruction i is a vote of a warp."""
    seen: set[int] = set()
    ahead = [*before[i]]
    while ahead:
        k = ahead.pop()
        if k in seen:
            continue
        seen.add(k)
        guard, text = code[k]
        opcode, _, operands = text.partition(" ")
        if name in [word.strip() for word in operands.split(",")[:2]]:
            if opcode.startswith("VOTE"):
                return True
            if not guard and opcode.startswith(_SETS_PREDICATES):
                continue
        ahead += before[k]
    return False


def read_usage(cubin: bytes) -> dict[str, int]:
    """The one kernel's resource figures: REG, STACK, SHARED, LOCAL, CONSTANT[0] …"""
    return {name: int(n) for name, n in _FIGURE.findall(_run("cuobjdump", cubin, "-res-usage"))}


@lru_cache(maxsize=4)  # tests ask one cubin several things
def _run(tool: str, cubin: bytes, option: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [find_tool(tool), option, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

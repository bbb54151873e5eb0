"""Rules of the house that a parser can check: sizes, parameters, positions, docstrings, subjects.

What breaks one today is listed in exceptions/; the lists may only shrink.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.support.exceptions import check
from tests.support.paths import ROOT

FOLDERS = ("attngen", "tools", "examples", "tests")
MOST_LINES = 400  # of a file
MOST_BODY_LINES = 60  # of a function, below its docstring
MOST_PARAMETERS = 8  # but for the call itself
FREE_OF_PARAMETERS = {
    "attngen/frontends/pytorch/attention.py attention",
    "attngen/frontends/pytorch/flex.py flex_attention",  # whose signature is PyTorch's
}
NAMED_FOLDERS = ("attngen/call", "attngen/frontends")  # where positions in tuples have names
VAGUE = re.compile(r"(Those|That|What|The same|As|Of)\b")
LONGEST_SUBJECT = 72
FIRST_CHECKED = "58ba4eeee5dd"  # subjects of commits after it are checked
# Expressions whose positions are axes, or a string's parts.
AXES = re.compile(r"(\.|\b)(shape|strides|sizes)$|\.(size|stride|r?partition)\([^()]*\)$")

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


@dataclass(frozen=True)
class Module:
    """All that the rules ask of a file; its tree, of thousands of nodes, is not kept.

    lines, parameters: of its functions, by their names, as often as these are defined.
    """

    lines: list[tuple[str, int]]
    parameters: list[tuple[str, int]]
    positions: set[str]
    docstrings: list[str]

    @classmethod
    def read(cls, path: Path, with_positions: bool) -> Module:
        found = cls([], [], set(), [])
        tree = ast.parse(path.read_text())
        for node in statements(tree):
            if isinstance(node, FUNCTIONS):
                found.lines.append((node.name, body_lines(node)))
                found.parameters.append((node.name, parameters(node)))
            if isinstance(node, DOCUMENTED):
                found.docstrings.append(ast.get_docstring(node, clean=False) or "")
        for node in ast.walk(tree) if with_positions else ():
            if isinstance(node, ast.Subscript) and is_position(node):
                found.positions.add(ast.unparse(node))
        return found


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what its blocks hold, without the many expressions: no function is in one."""
    yield node
    for block in BLOCKS:
        for each in getattr(node, block, ()):
            yield from statements(each)


@cache
def read() -> dict[str, Module]:
    """Path from the root of the repository → what the file holds."""
    found = {}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        name = path.relative_to(ROOT).as_posix()
        found[name] = Module.read(path, name.startswith(NAMED_FOLDERS))
    return found


def body_lines(function: Function) -> int:
    """Count the lines of a function below its docstring, or below its signature."""
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    start = (first.end_lineno or 0) + 1 if documented else first.lineno
    return (function.end_lineno or 0) - start + 1


def parameters(function: Function) -> int:
    """Count the parameters of a function but for self and cls."""
    args = function.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    starred = [each for each in (args.vararg, args.kwarg) if each is not None]
    return len([each for each in (*named, *starred) if each.arg not in ("self", "cls")])


def is_position(node: ast.Subscript) -> bool:
    """Whether a subscript reads one element by a constant position, and no axis of a shape."""
    index = node.slice.operand if isinstance(node.slice, ast.UnaryOp) else node.slice
    if not isinstance(index, ast.Constant) or type(index.value) is not int:
        return False
    return isinstance(node.ctx, ast.Load) and not AXES.search(ast.unparse(node.value))


def test_functions_are_short() -> None:
    found = {
        f"{path} {name}"
        for path, module in read().items()
        for name, lines in module.lines
        if lines > MOST_BODY_LINES
    }
    check("functions", found)


def test_functions_take_few_parameters() -> None:
    found = {
        f"{path} {name}"
        for path, module in read().items()
        for name, taken in module.parameters
        if taken > MOST_PARAMETERS
    }
    check("parameters", found - FREE_OF_PARAMETERS)


def test_files_are_short() -> None:
    long = {path for path in read() if len((ROOT / path).read_text().splitlines()) > MOST_LINES}
    check("files", long)


def test_tuples_are_not_indexed_by_position() -> None:
    """Listed by the name of the file and the expression, so that moved code stays listed."""
    found = {
        f"{Path(path).stem}: {position}"
        for path, module in read().items()
        for position in module.positions
    }
    check("positions", found)


def test_docstrings_name_their_subject_first() -> None:
    texts = (text for module in read().values() for text in module.docstrings)
    check("docstrings", {text.splitlines()[0] for text in texts if VAGUE.match(text)})


def test_commit_subjects_fit_a_line() -> None:
    command = ["git", "log", "--no-merges", "--format=%h %s", f"{FIRST_CHECKED}..HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no checkout with that much history")
    subjects = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    wrong = [x for x in subjects if len(x) > LONGEST_SUBJECT or x.endswith(".")]
    assert not wrong, f"a subject has at most {LONGEST_SUBJECT} characters and no period"


@pytest.mark.parametrize(
    ("code", "lines", "taken"),
    [
        ("def f(a, *, b): return a", 1, 2),
        ('def f(self, a):\n    """Text.\n\n    More.\n    """\n\n    return a', 2, 1),
        ("def f(\n    a, /, b, *c, **d\n):\n    x = 1\n    return x", 2, 4),
    ],
)
def test_measures_of_functions(code: str, lines: int, taken: int) -> None:
    function = ast.parse(code).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert (body_lines(function), parameters(function)) == (lines, taken)


@pytest.mark.parametrize("code", ["x[0]", "f(x)[-1]", "x.y[2]", "f(x.shape)[3]", "split(x)[1]"])
def test_position_is_seen(code: str) -> None:
    assert is_position(ast.parse(code, mode="eval").body)


@pytest.mark.parametrize(
    "code", ["x.shape[-1]", "x.stride()[0]", "shape[1]", "x[i]", "x['a']", "x[1:]", "Literal[True]"]
)
def test_other_subscripts_are_no_positions(code: str) -> None:
    assert not is_position(ast.parse(code, mode="eval").body)


@pytest.mark.parametrize("text", ["What it is.", "Of keys.", "As `load`.", "The same, whole."])
def test_vague_first_word_is_seen(text: str) -> None:
    assert VAGUE.match(text) and not VAGUE.match(f"Return it. {text}")
    assert not VAGUE.match("Asks for it.") and not VAGUE.match("Whatever it is.")

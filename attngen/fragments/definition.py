"""Definitions that fragments carry for the reference: one expression of Python, over tensors.

A definition is data: its names, operators and functions are from closed sets, and nothing in it can
reach an attribute, an item or an import.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

# Functions of torch, each of tensors or numbers, element by element.
FUNCTIONS = (
    *("abs", "ceil", "clamp", "cos", "erf", "exp", "exp2", "floor", "log", "log1p", "log2"),
    *("maximum", "minimum", "pow", "relu", "rsqrt", "sigmoid", "sin", "sqrt", "square", "tanh"),
    "where",
)
MASK_NAMES = ("i", "j", "delta", "q_len", "kv_len")
SCORE_NAMES = ("score", *MASK_NAMES)
_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Name, ast.Load),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
    *(ast.BitAnd, ast.BitOr, ast.BitXor, ast.LShift, ast.RShift, ast.Invert, ast.USub, ast.UAdd),
    *(ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq, ast.Constant),
)
_LONGEST = 2000  # characters


def mistakes_of(text: object, names: Collection[str]) -> list[str]:
    """Every reason why `text` is no definition over these names; empty where it is one."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        return [f"reference is an expression of at most {_LONGEST} characters"]
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [f"reference is no expression of Python: {error}"]
    found: dict[str, None] = {}
    called = {id(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.BoolOp) or isinstance(node, ast.Not):
            found["reference joins conditions of tensors by &, | and ~"] = None
        elif isinstance(node, ast.Compare) and len(node.ops) > 1:
            found["reference compares two values at a time: put comparisons in parentheses"] = None
        elif isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
                found[f"reference calls none but {', '.join(FUNCTIONS)}"] = None
            if node.keywords or any(isinstance(each, ast.Starred) for each in node.args):
                found["reference passes arguments by their place"] = None
        elif isinstance(node, ast.Name):
            if id(node) not in called and node.id not in names:
                found[f"reference knows no {node.id!r}; known: {', '.join(names)}"] = None
        elif isinstance(node, ast.Constant):
            if type(node.value) not in (int, float):
                found[f"reference has {node.value!r}, which is no number"] = None
        elif not isinstance(node, _NODES):
            found[f"reference has a {type(node).__name__}, which no definition has"] = None
    return [*found]

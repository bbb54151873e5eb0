"""Operands whose rows threads copy, as templates of warps' products find them."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec.problem import Problem
from ..uses import FragmentUse
from ..view import FragmentView, fragment_view

FIRST_TOKEN = "{}.first_token(batch)"


@dataclass(frozen=True)
class Operand:
    """A tensor whose rows are copied.

    fetch: what finds pages, None where there are none. finder: C++, the function that finds rows of
    a head; place: C++, what of its arguments says where they begin; before_rows, behind_rows: C++,
    arguments on either side of their number.
    """

    name: str
    fetch: FragmentView | None
    finder: str
    place: str
    before_rows: str = ""
    behind_rows: str = ""


def operand_of(problem: Problem, name: str, uses: dict[str, list[FragmentUse]]) -> Operand:
    """A tensor whose rows are copied."""
    bytes_each = "<1>" if problem.eight_bit or (problem.widens and name != "q") else ""
    side, kind = ("q", problem.q_seq) if name == "q" else ("kv", problem.kv_seq)
    if problem.paged and name != "q":
        fetch = fragment_view(uses["kv_fetch" if name == "k" else "v_fetch"][0])
        return Operand(
            name, fetch, f"paged_rows{bytes_each}", "fetch, batch, head", f"p.{name}_page_count, "
        )
    token = "0" if kind == "dense" else FIRST_TOKEN.format(f"{side}_sequence(p)")
    place = f"batch, head, {token}"
    if problem.gather:
        columns = "dim_v" if name == "v" else "dim_qk"
        return Operand(
            name, None, "gathered_rows", place, f"p.{name}_stride_column, ", f", p.{columns}"
        )
    return Operand(name, None, f"head_rows{bytes_each}", place)

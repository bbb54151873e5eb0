"""Lowering: a mask's program as the C++ of a fragment that says which pairs take part."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from .header import Fragment
from .lowering import helpers_of, members_of, name_of_struct, operands_of
from .mask_bounds import bounds_struct_of
from .names import CAPTURED, Names
from .program import Operation, Program

# Operations of floats whose last bit counts; a kernel of masks has the time for IEEE's division.
_ROUNDED = {
    "mul": "times_of({0}, {1})",
    "div": "divided_of({0}, {1})",
    "ratio": "divided_of({0}, {1})",
    "recip": "divided_of(1.f, {0})",
    "sqrt": "root_of({0})",
}


class _RoundedNames(Names):
    """Values that are rounded one by one, as PyTorch's are: a mask asks on which side of a number
    they lie."""

    def expression(self, operation: Operation) -> str:
        form = _ROUNDED.get(operation.name) if operation.type == "f" else None
        return form.format(*map(self.of, operation.args)) if form else super().expression(operation)


@cache
def mask_fragment_of(program: Program) -> Fragment:
    """The fragment of a mask's program, whose text is rendered with it.

    Its operands are what calls pass: tensors `captured_0` …, numbers `number_0` …. It bounds no
    rows: kernels of attention read the bits that a kernel before them makes of it.
    """
    struct = name_of_struct(program)
    return Fragment(
        axis="mask",
        name=program.name,
        doc="A traced mask_mod.",
        struct=struct,
        bounds=(),
        selected_by="mask",
        operands=tuple(operands_of(program)),
        text=f"<% macro emit() %>\n{mask_struct_of(program, struct)}\n<% endmacro %>\n",
        program=program.text,
    )


@cache
def asked_fragment_of(program: Program) -> Fragment:
    """The fragment of a mask's program in kernels of attention that ask it: what it reads lies in
    memory, as the kernel before them has left it, and is no operand."""
    whole = mask_fragment_of(program)
    struct = mask_struct_of(program, whole.struct, bounds=False)
    return replace(whole, operands=(), text=f"<% macro emit() %>\n{struct}\n<% endmacro %>\n")


def captured_members(program: Program) -> tuple[str, ...]:
    """Members of a mask's struct that say where captured tensors lie."""
    return tuple(f"{CAPTURED}{place}" for place in range(len(program.captures)))


def state_bytes(program: Program) -> int:
    """Bytes that have room for a mask's struct, a multiple of those of a copy."""
    captures = sum(_POINTER_BYTES + rank * _AXIS_BYTES for _, rank, _ in program.captures)
    whole = captures + _NUMBER_BYTES * len(program.numbers)
    return -(-max(whole, 1) // STATE_STEP) * STATE_STEP


STATE_STEP = 16
_POINTER_BYTES, _NUMBER_BYTES = 8, 8
_AXIS_BYTES = 16  # a stride and a size


def mask_struct_of(program: Program, struct: str, *, bounds: bool = True) -> str:
    """The C++ of a mask's program: a struct of that name, with `sees` and, where it is wanted,
    `bound`."""
    names = _RoundedNames(program)
    lines = names.lines(program.value)
    body = "\n    ".join([*lines, f"return {names.of(program.value)};"])
    members = "".join(f"  {each}\n" for each in members_of(program))
    ends = bounds_struct_of(program, names) if bounds else ""
    helpers = "".join(f"  {each}\n" for each in helpers_of("\n".join((*lines, ends))))
    return f"""struct {struct} {{
{members}{helpers}
  // Whether query `at.i` sees key `at.j`.
  template <class At>
  ATTNGEN_HD bool sees(const Context& ctx, At at) const {{
    {body}
  }}{ends}
}};"""

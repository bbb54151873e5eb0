"""Lowering: a mask's program as the C++ of a fragment that says which pairs take part."""

from __future__ import annotations

from functools import cache

from .header import Fragment
from .lowering import Names, helpers_of, members_of, name_of_struct, operands_of
from .mask_bounds import bounds_struct_of
from .program import Operation, Program


class _RoundedNames(Names):
    """Values that are rounded one by one, as PyTorch's are: a mask asks on which side of a number
    they lie."""

    def expression(self, operation: Operation) -> str:
        if (operation.name, operation.type) == ("mul", "f"):
            one, other = map(self.of, operation.args)
            return f"times_of({one}, {other})"
        return super().expression(operation)


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


def mask_struct_of(program: Program, struct: str) -> str:
    """The C++ of a mask's program: a struct of that name, with `sees` and `bound`."""
    names = _RoundedNames(program)
    lines = names.lines(program.value)
    body = "\n    ".join([*lines, f"return {names.of(program.value)};"])
    members = "".join(f"  {each}\n" for each in members_of(program))
    bounds = bounds_struct_of(program, names)
    helpers = "".join(f"  {each}\n" for each in helpers_of("\n".join((*lines, bounds))))
    return f"""struct {struct} {{
{members}{helpers}
  // Whether query `at.i` sees key `at.j`.
  template <class At>
  ATTNGEN_HD bool sees(const Context& ctx, At at) const {{
    {body}
  }}{bounds}
}};"""

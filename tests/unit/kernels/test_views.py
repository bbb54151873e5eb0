"""Views: a template names exactly its view's fields, and decides nothing by itself."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jinja2
import pytest
from jinja2 import meta, nodes

from attngen.io import files
from attngen.kernels.fill import environment, fill_view
from attngen.kernels.mma_sync.backward.view import MmaBackwardView
from attngen.kernels.mma_sync.backward.view_bias import MmaBiasView
from attngen.kernels.mma_sync.backward.view_learned import MmaLearnedView
from attngen.kernels.mma_sync.decode.view import MmaDecodeView
from attngen.kernels.mma_sync.forward.view import MmaForwardView
from attngen.kernels.support.view_append import AppendView
from attngen.kernels.support.view_around import ConvertView, PrepareView, RowSumsView
from attngen.kernels.support.view_cast import (
    GradientLargestView,
    GradientStoreView,
    LargestView,
    NextScalesView,
    StoreView,
)
from attngen.kernels.support.view_combine import CombineView
from attngen.kernels.support.view_mask_make import MaskMakeView
from attngen.kernels.support.view_mask_pack import MaskPackView
from attngen.kernels.support.view_order import OrderView
from attngen.kernels.view import KernelView, Value
from attngen.kernels.wgmma.backward.fp8_view import Fp8ConvertView, Fp8View, TurningView
from attngen.kernels.wgmma.backward.view import DkvView, DqView
from attngen.kernels.wgmma.backward.view_bias_gradient import BiasGradientView
from attngen.kernels.wgmma.backward.view_fused import FusedView
from attngen.kernels.wgmma.backward.view_kept import KeptView
from attngen.kernels.wgmma.backward.view_learned import LearnedView
from attngen.kernels.wgmma.decode.view import DecodeView
from attngen.kernels.wgmma.forward.view import ForwardView

ROOT = files.templates_dir()
# Kernel's template → the dataclass that fills it.
VIEWS: dict[str, Any] = {
    "kernels/mma_sync/backward/backward.cu.j2": MmaBackwardView,
    "kernels/mma_sync/backward/dbias.cu.j2": MmaBiasView,
    "kernels/mma_sync/backward/dlearned.cu.j2": MmaLearnedView,
    "kernels/mma_sync/decode/decode.cu.j2": MmaDecodeView,
    "kernels/mma_sync/forward/forward.cu.j2": MmaForwardView,
    "kernels/support/append.cu.j2": AppendView,
    "kernels/support/cast_d_o_largest.cu.j2": GradientLargestView,
    "kernels/support/cast_d_o_store.cu.j2": GradientStoreView,
    "kernels/support/cast_largest.cu.j2": LargestView,
    "kernels/support/cast_next_scales.cu.j2": NextScalesView,
    "kernels/support/cast_rows.cu.j2": StoreView,
    "kernels/support/cast_store.cu.j2": StoreView,
    "kernels/support/combine.cu.j2": CombineView,
    "kernels/support/mask_pack.cu.j2": MaskPackView,
    "kernels/support/order.cu.j2": OrderView,
    "kernels/wgmma/decode/decode.cu.j2": DecodeView,
    "kernels/support/mask_make.cu.j2": MaskMakeView,
    "kernels/support/prepare.cu.j2": PrepareView,
    "kernels/support/convert.cu.j2": ConvertView,
    "kernels/support/row_sums.cu.j2": RowSumsView,
    "kernels/wgmma/backward/dq.cu.j2": DqView,
    "kernels/wgmma/backward/dkv.cu.j2": DkvView,
    "kernels/wgmma/backward/dq_kept.cu.j2": KeptView,
    "kernels/wgmma/backward/fused.cu.j2": FusedView,
    "kernels/wgmma/backward/dbias.cu.j2": BiasGradientView,
    "kernels/wgmma/backward/dlearned.cu.j2": LearnedView,
    "kernels/wgmma/backward/fp8.cu.j2": Fp8View,
    "kernels/wgmma/backward/fp8_prepare.cu.j2": TurningView,
    "kernels/wgmma/backward/fp8_convert.cu.j2": Fp8ConvertView,
    "kernels/wgmma/forward/alone.cu.j2": ForwardView,
    "kernels/wgmma/forward/forward.cu.j2": ForwardView,
    "kernels/wgmma/forward/short.cu.j2": ForwardView,
    "kernels/wgmma/forward/wide.cu.j2": ForwardView,
}
# Fields of parts that no template names: other fields are made of them, or they are a plan's.
UNNAMED = {"Scores.scaled", "GradientProducts.depth"}
EACH = pytest.mark.parametrize("template", VIEWS)
MOST_LINES = 400
# Lines that a reader must evaluate: of a kernel's, over its template and that one's parts, and of
# the macros that kernels share, which write lists.
MOST_CONTROL, MOST_CONTROL_OF_SHARED = 0.15, 0.25
CONTROL = re.compile(r"<%[-+]?\s*(if|elif|else|endif|for|endfor|set|endset)\b")
SHARED = "kernels/common/"
MOST_NESTING = 2
# What makes a decision of a value: `loop.last` and a view's fields are known before.
DECIDING = (nodes.Compare, nodes.And, nodes.Or, nodes.Test, nodes.Filter, nodes.CondExpr)
REFERENCES = (nodes.Include, nodes.Import, nodes.FromImport)


def parse(env: jinja2.Environment, name: str) -> nodes.Template:
    assert env.loader is not None
    return env.parse(env.loader.get_source(env, name)[0])


def parts_of(env: jinja2.Environment, name: str, shared: bool = False) -> list[str]:
    """The template and all that it includes and imports. shared: only with its context."""
    found = [name]
    for each in found:
        for node in parse(env, each).find_all(REFERENCES):
            if not shared or node.with_context:
                assert isinstance(node.template, nodes.Const), f"{each} names a part at run time"
                if node.template.value not in found:
                    found.append(node.template.value)
    return found


def variables_of(env: jinja2.Environment, name: str) -> set[str]:
    """The names that a template and its parts expect from who fills it."""
    found: set[str] = set()
    for part in parts_of(env, name, shared=True):
        found |= meta.find_undeclared_variables(parse(env, part))
    return found - env.globals.keys()


def mistakes_in(env: jinja2.Environment, name: str) -> list[str]:
    """Where a file of a template is longer or deeper than it may be, or decides by itself."""
    assert env.loader is not None
    lines = len(env.loader.get_source(env, name)[0].splitlines())
    tree = parse(env, name)
    found = [f"{name}: {lines} lines"] if lines > MOST_LINES else []
    for node in tree.find_all((nodes.If, nodes.CondExpr)):
        assert isinstance(node, nodes.If | nodes.CondExpr)
        if not is_plain(node.test):
            found.append(f"{name}:{node.lineno}: a condition that is not a field")
    for node in tree.find_all((nodes.Assign, nodes.AssignBlock)):
        decides = isinstance(node, nodes.AssignBlock) or is_decided(node)
        found += [f"{name}:{node.lineno}: a set that decides"] * decides
    return found + [f"{name}:{line}: nesting" for line in too_deep(tree)]


def is_plain(test: nodes.Node) -> bool:
    """Whether a condition is a field, an attribute of one, or what is not one."""
    while isinstance(test, nodes.Not | nodes.Getattr):
        test = test.node
    return isinstance(test, nodes.Name)


def is_decided(node: nodes.Node) -> bool:
    """Whether what is set follows from a comparison, a condition or a truth value."""
    assert isinstance(node, nodes.Assign)
    value = nodes.List([node.node])  # find_all leaves out the node itself
    truths = (isinstance(each.value, bool) for each in value.find_all(nodes.Const))
    return any(value.find_all((*DECIDING, nodes.Not))) or any(truths)


def too_deep(node: nodes.Node, depth: int = 0) -> Iterator[int]:
    """The lines of conditions and loops that stand in more than one other."""
    for child in node.iter_child_nodes():
        chained = isinstance(node, nodes.If) and child in node.elif_
        deeper = depth + (isinstance(child, nodes.If | nodes.For) and not chained)
        if deeper > MOST_NESTING and deeper > depth:
            yield child.lineno
        yield from too_deep(child, deeper)


def kernel_parts(env: jinja2.Environment, name: str) -> list[str]:
    """A kernel's template with its parts, less the instructions, which are macros of numbers."""
    return [each for each in parts_of(env, name) if each.startswith("kernels/")]


def control_share(env: jinja2.Environment, parts: Iterable[str]) -> float:
    """The share of lines with a condition, a loop or a set."""
    assert env.loader is not None
    lines = [line for part in parts for line in env.loader.get_source(env, part)[0].splitlines()]
    return sum(CONTROL.search(line) is not None for line in lines) / len(lines)


def dataclasses_in(view: type) -> set[Any]:
    """The dataclasses that a view's fields hold, and those that these hold."""
    pending, found = [*get_type_hints(view).values()], set()
    for hint in pending:
        if dataclasses.is_dataclass(hint) and hint not in found:
            found.add(hint)
            pending += get_type_hints(hint).values()
        pending += get_args(hint)
    return found


def environment_of(**sources: str) -> jinja2.Environment:
    """An environment of attngen's syntax with these templates."""
    return environment(ROOT).overlay(loader=jinja2.DictLoader(sources))


def test_views_every_kernel_has_one() -> None:
    kernels = {str(path.relative_to(ROOT)) for path in ROOT.glob("kernels/**/*.cu.j2")}
    assert kernels == VIEWS.keys()


@EACH
def test_views_fields_are_what_the_template_names(template: str) -> None:
    fields = {field.name for field in dataclasses.fields(VIEWS[template])}
    assert variables_of(environment(ROOT), template) == fields


def test_views_fields_of_their_parts_are_named_by_some_template() -> None:
    env = environment(ROOT)
    named = {
        node.attr
        for path in ROOT.glob("kernels/**/*.j2")
        for node in parse(env, str(path.relative_to(ROOT))).find_all(nodes.Getattr)
    }
    parts = {part for view in VIEWS.values() for part in dataclasses_in(view)}
    assert KernelView in parts and Value in parts
    unnamed = {
        f"{part.__name__}.{field.name}"
        for part in parts
        for field in dataclasses.fields(part)
        if field.name not in named
    }
    assert unnamed == UNNAMED


@EACH
def test_views_templates_decide_nothing(template: str) -> None:
    env = environment(ROOT)
    parts = kernel_parts(env, template)
    assert [mistake for part in parts for mistake in mistakes_in(env, part)] == []


@EACH
def test_views_most_lines_are_code(template: str) -> None:
    env = environment(ROOT)
    own = [part for part in kernel_parts(env, template) if not part.startswith(SHARED)]
    assert control_share(env, own) <= MOST_CONTROL


def test_views_most_lines_of_shared_macros_are_code() -> None:
    shared = [str(path.relative_to(ROOT)) for path in (ROOT / SHARED).iterdir()]
    assert control_share(environment(ROOT), shared) <= MOST_CONTROL_OF_SHARED


def test_views_variables_of_includes_count_and_those_of_imports_do_not() -> None:
    env = environment_of(
        kernel='<% include "part" %><% import "macros" as macros %>@{ macros.f(own) }@',
        part="<% for each in items %>@{ each }@<% endfor %><% include 'deep' %>",
        macros="<% macro f(x) %>@{ x }@<% endmacro %>",
        deep="@{ deep }@@{ range(3) }@",
    )
    assert variables_of(env, "kernel") == {"own", "items", "deep"}
    assert parts_of(env, "kernel") == ["kernel", "part", "macros", "deep"]


@pytest.mark.parametrize(
    ("source", "mistake"),
    [
        ("<% if a and b %>x<% endif %>", "condition"),
        ("<% if a.b == 1 %>x<% endif %>", "condition"),
        ("<% if a %><% elif b | list %>x<% endif %>", "condition"),
        ("@{ 'x' if a in b }@", "condition"),
        ("<% set a = b == c %>", "a set that decides"),
        ("<% set a = not b %>", "a set that decides"),
        ("<% set a = true %>", "a set that decides"),
        ("<% set a = 'x' if b else 'y' %>", "a set that decides"),
        ("<% if a %><% for b in c %><% if b %>x<% endif %><% endfor %><% endif %>", "nesting"),
        ("x\n" * (MOST_LINES + 1), "lines"),
    ],
)
def test_views_mistakes_are_found(source: str, mistake: str) -> None:
    (found,) = mistakes_in(environment_of(kernel=source), "kernel")
    assert mistake in found


@pytest.mark.parametrize(
    "source",
    [
        "<% if not a %>x<% elif a.b %>y<% elif c %>z<% endif %>",
        "<% for a in b %>@{ a }@@{ ', ' if not loop.last }@<% endfor %>",
        "<% if a %><% if b %>x<% endif %><% else %><% if c %>y<% endif %><% endif %>",
        "<% if a %>1<% elif b %>2<% elif c %><% if d %>3<% endif %><% endif %>",
        "<% set columns = dims.columns %>",
        "x\n" * MOST_LINES,
    ],
)
def test_views_plain_templates_pass(source: str) -> None:
    assert mistakes_in(environment_of(kernel=source), "kernel") == []


def test_views_control_lines_are_counted_over_all_parts() -> None:
    env = environment_of(
        **{
            "kernels/a": '<% include "kernels/b" %>\nx\n',
            "kernels/b": "<%- if a %>\nx\n<% endif %><% import 'mma/c' as c %>\n",
            "mma/c": "<% for x in y %>\n<% endfor %>\n",
        }
    )
    parts = kernel_parts(env, "kernels/a")
    assert parts == ["kernels/a", "kernels/b"]
    assert control_share(env, parts) == pytest.approx(2 / 5)


@dataclass(frozen=True)
class View:
    """A view that a template of this test reads."""

    name: str
    sizes: tuple[int, ...]


def test_fill_view_gives_fields_alone(tmp_path: Path) -> None:
    (tmp_path / "good").write_text("@{ name }@: <% for x in sizes %>@{ x }@;<% endfor %>")
    (tmp_path / "bad").write_text("@{ other }@")
    assert fill_view("good", View("a", (1, 2)), tmp_path) == "a: 1;2;"
    with pytest.raises(jinja2.UndefinedError, match="other"):
        fill_view("bad", View("a", ()), tmp_path)

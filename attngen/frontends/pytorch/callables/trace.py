"""Traces of callables: graphs of tensors of one number each, without a device."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ....errors import SpecError
from ....reference.mod_errors import called, line_of_frame

aten: Any = torch.ops.aten
Depends = dict[Node, frozenset[str]]
# What a callable may ask of a tensor that is no tensor; its words are those of the reference.
_ASKS = {
    "__bool__": "data-dependent control flow",
    **dict.fromkeys(("item", "tolist", "__int__", "__float__", "__index__"), ".item()"),
}
_DRAWS = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ "
    "multinomial normal normal_ uniform_ dropout".split()
)
TRACING = threading.RLock()
"""Whoever traces a function holds it: torch traces one at a time in a process."""
_READS = ("index", "select")
_PLACES = 4  # b, h, i and j
# Others that return what a captured tensor holds.
_LOOKS = frozenset("numpy cpu equal allclose is_nonzero __contains__ __array__ __repr__".split())


def _changes(name: str) -> bool:
    """Whether a function of that name changes its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


class _Watching(TorchFunctionMode):
    """Makes `t[x]`, by tensors of one number, an `aten.index`, where torch asks for their
    `.item()`, and refuses what no kernel may do.

    lines: where the callable says each operation, by the names of torch's functions; reads_values:
    whether it asks captured tensors for theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, str] = {}
        self.reads_values = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(getattr(func, "__name__", ""))
        first = next(iter(args), None)
        if name in _ASKS and isinstance(first, FakeTensor):
            raise RuntimeError(_ASKS[name])
        self.reads_values |= name in _ASKS or name in _LOOKS
        if name in _DRAWS:
            raise RuntimeError("randomness")
        if _changes(name) and isinstance(first, Tensor) and not isinstance(first, FakeTensor):
            raise RuntimeError("in-place")
        self.lines.setdefault(name, line_of_frame(sys._getframe(1)))
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            found = _index_of(tensor, index)
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))


def _index_of(tensor: Tensor, index: Any) -> Tensor | None:
    """The element, or part, of a tensor; None where torch finds it without help."""
    given = list(index) if isinstance(index, tuple) else [index]
    if any(x is Ellipsis for x in given):
        place = next(n for n, x in enumerate(given) if x is Ellipsis)
        given[place : place + 1] = [slice(None)] * (tensor.ndim + 1 - len(given))
    tensors = [x for x in given if isinstance(x, Tensor) and x.dtype != torch.bool and not x.ndim]
    plain = [x for x in given if type(x) is int or x == slice(None)] if tensors else []
    if not tensors or len(tensors) + len(plain) != len(given):
        return None
    for place in reversed(range(len(given))):
        if type(given[place]) is int:
            tensor = torch.select(tensor, place, given.pop(place))
    places = [x if isinstance(x, Tensor) else None for x in given]
    found: Tensor = aten.index.Tensor(tensor, places)
    return found


def _positions_of(is_score: bool, device: torch.device, floats: int = 0) -> list[Tensor]:
    """Arguments of a callable that have no values: a score, float32, and b, h, i and j, int32; then
    so many floats."""
    kinds = [torch.float32] * is_score + [torch.int32] * 4 + [torch.float32] * floats
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [torch.empty((), dtype=dtype, device=device) for dtype in kinds]


def trace(name: str, mod: Callable[..., Tensor], device: torch.device) -> GraphModule:
    """The graph of a callable: a node an operation, captured tensors as attributes.

    name: of the argument, `score_mod` or `mask_mod`.
    Raises: SpecError that says what it does wrong.
    """
    given = _positions_of(name == "score_mod", device)

    watching = _Watching()

    def watched(*args: Tensor) -> Tensor:
        with watching:
            return mod(*args)

    def mapped(*args: Tensor) -> Any:
        with torch.no_grad():
            # A score is decomposed once it is differentiated: not all that comes out can be.
            is_score = name == "score_mod"
            table = {} if is_score else {"decomposition_table": _decompositions()}
            return _graph_of(watched, args, **table)

    found: Any = called(name, mod, mapped, tuple(given))  # which a callable's faults pass through
    graph: GraphModule = found
    graph.meta |= {"lines": watching.lines, "reads_values": watching.reads_values}
    _check_result(name, result_of(graph))
    return graph


def _graph_of(function: Callable[..., Any], args: Sequence[Tensor], **options: Any) -> GraphModule:
    with _disable_current_modes(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is a non-leaf Tensor.*")
        make = make_fx(
            function,
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
            **options,
        )
        graph: GraphModule = make(*args)
    graph.graph.eliminate_dead_code()
    changes = any(is_mutable(node) for node in graph.graph.nodes)
    if changes and not isinstance(function, _Functional):
        return _graph_of(_Functional(graph), args, **options)
    return graph


class _Functional:
    """A graph's function without changes in place, which decompositions leave."""

    def __init__(self, graph: GraphModule) -> None:
        self.function = torch.func.functionalize(graph)

    def __call__(self, *args: Tensor) -> Any:
        return self.function(*args)


def is_mutable(node: Node) -> bool:
    """Whether an operation changes a tensor in place."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def _check_result(name: str, result: object) -> None:
    """Raises: SpecError where a callable returns no tensor of one number."""
    value = result.meta.get("val") if isinstance(result, Node) else result
    if isinstance(result, Node) and result.op == "get_attr":
        return  # a captured number
    if not isinstance(value, Tensor) or value.ndim:
        got = f"{list(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
        raise SpecError(f"{name} needs to return one number a position, as a tensor; got {got}.")
    is_bool = value.dtype == torch.bool
    if name == "mask_mod" and not is_bool:
        raise SpecError(
            f"mask_mod needs to return a bool a position, True = take part; got {value.dtype}. "
            "Compare, or call .bool(); a score_mod adds to scores."
        )
    if name == "score_mod" and (is_bool or value.dtype.is_complex):
        raise SpecError(
            f"score_mod needs to return a score, a real number; got {value.dtype}. Choose with "
            "torch.where(…, score, …), or pass a mask_mod."
        )


def result_of(graph: GraphModule) -> Any:
    """The results of a graph: of a callable one node."""
    output = next(node for node in graph.graph.nodes if node.op == "output")
    (found,) = output.args
    return found


def name_of(node: Node) -> str:
    """The name of an operation, without its library and its variant."""
    _, _, name = str(node.target).partition(".")
    name, *_ = name.split(".")
    return name or str(getattr(node.target, "__name__", node.target))


def captured(graph: GraphModule, node: Node) -> Tensor:
    """The tensor that an attribute's node stands for."""
    found: Tensor = getattr(graph, str(node.target))
    return found


def meta_of(graph: GraphModule, node: Node) -> Tensor:
    """A tensor of a node's shape and dtype."""
    found: Tensor = captured(graph, node) if node.op == "get_attr" else node.meta["val"]
    return found


def depends_of(graph: GraphModule, names: Sequence[str]) -> Depends:
    """By node, on which of its inputs, of these names, it depends; `c` for a captured tensor."""
    given = iter(names)
    found: Depends = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            found[node] = frozenset([next(given)])
        elif node.op == "get_attr":
            found[node] = frozenset() if _is_number(graph, node) else frozenset("c")
        elif node.op != "output":
            before = (found[each] for each in node.all_input_nodes)
            found[node] = frozenset[str]().union(*before)
    return found


def _is_number(graph: GraphModule, node: Node) -> bool:
    """Whether an attribute is a number: made in the callable, or captured on the host beside
    tensors of another device."""
    tensor = captured(graph, node)
    if tensor.ndim or tensor.requires_grad or tensor.device.type != "cpu":
        return False
    device = next(x.meta["val"].device for x in graph.graph.nodes if x.op == "placeholder")
    made = all(name_of(user).startswith("lift_fresh") for user in node.users if user.op != "output")
    return made or device.type != "cpu"


def loads_of(graph: GraphModule) -> Iterator[Node]:
    """Nodes that are one float of a captured tensor."""
    depends = depends_of(graph, ("s", "b", "h", "i", "j"))
    for node, on in depends.items():
        if node.op == "placeholder" or "c" not in on:
            continue
        meta: Any = meta_of(graph, node)
        if not isinstance(meta, Tensor) or meta.ndim or not meta.is_floating_point():
            continue  # several tensors at once, among others
        if on != frozenset("c"):
            if name_of(node) in _READS:
                yield node
        elif any(user.op == "output" or depends[user] != on for user in node.users):
            yield node


def differentiate(
    graph: GraphModule, device: torch.device, cut: Sequence[Node], learned: Sequence[bool]
) -> GraphModule:
    """The graph of a score and its derivatives by the score and by what it learns.

    cut: loads of the graph, floats of captured tensors, which are further inputs of the other;
    learned: of which of them it has derivatives, in their order.
    """
    inner = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            copies[node] = inner.node_copy(node)
    for place, node in enumerate(cut):
        copies[node] = inner.placeholder(f"load_{place}")
    for node in graph.graph.nodes:
        if node not in copies:
            copies[node] = inner.node_copy(node, copies.__getitem__)
    function = GraphModule(graph, inner)

    def joint(score: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        places, loads = rest[:_PLACES], rest[_PLACES:]
        with torch.enable_grad():
            variable = score.detach().requires_grad_()
            loads = tuple(
                x.detach().requires_grad_() if each else x
                for x, each in zip(loads, learned, strict=True)
            )
            by = variable, *compress(loads, learned)
            value = function(variable, *places, *loads).to(torch.float32)
            if not value.requires_grad:
                return value, *map(torch.zeros_like, by)
            found = torch.autograd.grad(value, by, torch.ones_like(value), allow_unused=True)
        slopes = (torch.zeros_like(score) if x is None else x for x in found)
        return value.detach(), *slopes

    given = _positions_of(True, device, len(cut))
    return _graph_of(joint, given, decomposition_table=_decompositions())


@cache
def _decompositions() -> dict[Any, Any]:
    """How operations become those that programs have."""
    found: dict[Any, Any] = dict(core_aten_decompositions())
    found |= get_decompositions([
        aten.gelu, aten.silu, aten.softplus, aten.leaky_relu, aten.hardtanh, aten.gelu_backward,
        aten.silu_backward, aten.softplus_backward, aten.leaky_relu_backward,
        aten.hardtanh_backward, aten.tanh_backward, aten.sigmoid_backward,
        aten.threshold_backward, aten.elu, aten.elu_backward, aten.rsub, aten.logical_xor,
        aten.reciprocal, aten.log_sigmoid_forward, aten.log_sigmoid_backward,
    ])  # fmt: skip
    for kept in (aten.expm1.default, aten.log1p.default):
        found.pop(kept, None)
    return found

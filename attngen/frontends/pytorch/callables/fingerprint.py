"""Fingerprints of functions: whether one has been seen before, but for the tensors that it reads.

A fingerprint says all that a function's trace may depend on: its code, what it closes over, its
defaults and its globals, followed through functions; numbers by value, tensors by all but what they
hold. Of objects it says the attributes that any of the code names, whichever function does so. Of a
function that reaches anything else there is none.
"""

from __future__ import annotations

import dis
import functools
import types
from typing import Any

import torch
from torch import Tensor

_MOST = 256  # values that are looked at
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
_UNCALLED = ("__init__", "__post_init__", "__repr__", "__eq__", "__hash__", "__str__")
# Whose contents no program changes while it runs.
_FIXED = ("torch", "math", "builtins", "operator")
# By which code reaches what it does not name.
_BLIND = frozenset(
    "getattr hasattr attrgetter methodcaller vars dir globals locals eval exec asdict astuple "
    "import_module __import__ __dict__ __getattribute__ __closure__ __globals__ "
    "__defaults__".split()
)


class _TooMuch(Exception):
    """A value that a fingerprint says nothing of."""


class _Bare:
    """A class whose objects hold attributes alone."""


class _Walk:
    """The words of a fingerprint, and the tensors that were met, in their order.

    names: those that code looks up, as far as they are known; `met` has what was seen before, and
    when, since two may be one thing here and two things there.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.words: list[Any] = []
        self.tensors: list[Tensor] = []
        self.met: dict[int, int] = {}
        self.names = names
        self.asked = False  # whether attributes of objects were

    def value(self, x: Any) -> None:
        """Add a value."""
        kind = type(x)
        if len(self.words) > _MOST:
            raise _TooMuch
        if kind in _PLAIN:
            self.words += kind, x.hex() if kind is float else x
        elif kind in (Tensor, torch.nn.Parameter):
            self._tensor(x)
        elif kind in (tuple, list):
            self.words += kind, len(x)
            for each in x:
                self.value(each)
        elif kind is types.FunctionType:
            self._function(x)
        elif kind is functools.partial:
            self.words += (kind,)
            self.value(x.func)
            self.value(x.args)
            self.value(tuple(x.keywords.items()))
        elif kind is types.MethodType:
            self.value(x.__func__)
            self.value(x.__self__)
        elif is_fixed(x):
            self.words += kind, id(x)
        else:
            self._object(x)

    def _tensor(self, x: Tensor) -> None:
        """Add a tensor."""
        if x.layout is not torch.strided:
            raise _TooMuch
        place = self.met.setdefault(id(x), len(self.met))
        self.words += type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, place
        self.tensors.append(x)

    def _function(self, function: types.FunctionType) -> None:
        if vars(function):
            raise _TooMuch
        if self._met_before(function):
            return
        self.words += (function.__code__,)
        self.value(function.__defaults__)
        self.value(tuple((function.__kwdefaults__ or {}).items()))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError as error:  # not bound yet
                raise _TooMuch from error
            self.value(content)
        if str(function.__module__).partition(".")[0] == "torch":
            return
        names = names_of(function.__code__)
        if names & _BLIND or _imports(function.__code__):
            raise _TooMuch
        self.names |= names
        for name in sorted(names & function.__globals__.keys()):
            self.words += (name,)
            self.value(function.__globals__[name])

    def _met_before(self, x: Any) -> bool:
        """Whether a function or an object has been added; adds its kind, and the place if so."""
        place = self.met.get(id(x))
        self.words += type(x), place
        self.met.setdefault(id(x), len(self.met))
        return place is not None

    def _object(self, x: Any) -> None:
        """Add the attributes of an object that code may look up."""
        kind: Any = type(x)
        fields = getattr(x, "__dict__", None)
        if isinstance(x, (types.ModuleType, type)) or not isinstance(fields, dict):
            raise _TooMuch
        if kind is not types.SimpleNamespace and not _is_bare(kind):
            raise _TooMuch
        self.asked = True
        if self._met_before(x):
            return
        self.words += (id(kind),)
        if isinstance(x, torch.nn.Module):
            if x._forward_hooks or x._forward_pre_hooks:
                raise _TooMuch
            fields = {**fields, **x._parameters, **x._buffers, **x._modules}
        elif hasattr(kind, "__getattr__"):
            raise _TooMuch
        for name in sorted(self.names | _unnamed(kind)):
            static = _static_of(kind, name)
            if isinstance(static, staticmethod):
                static = static.__func__
            elif isinstance(static, types.FunctionType):
                self.names |= names_of(static.__code__)
            elif hasattr(type(static), "__get__"):
                raise _TooMuch
            found = fields.get(name, static)
            if found is not None:
                self.words += (name,)
                self.value(found)


def _is_bare(kind: Any) -> bool:
    """Whether objects of a class hold what their attributes say, and nothing else."""
    if kind.__basicsize__ != _Bare.__basicsize__ or kind.__itemsize__:
        return False
    # Of torch's containers code gets parts without their names.
    own = _unnamed(kind)
    given = [name for name in ("__getitem__", "__iter__") if hasattr(kind, name)]
    return "__getattribute__" not in own and own.issuperset(given)


def _static_of(kind: type, name: str) -> Any:
    """An attribute that a class's objects have in common; None where there is none."""
    homes = [vars(each) for each in kind.__mro__]
    return next((home[name] for home in homes if name in home), None)


def is_fixed(x: Any) -> bool:
    """Whether this is a part of torch or of Python that stays as it is."""
    name = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None) or ""
    known = isinstance(x, (types.ModuleType, types.BuiltinFunctionType, type))
    known = known or type(x).__name__ in ("builtin_function_or_method", "_OpNamespace")
    return known and str(name).partition(".")[0] in _FIXED


@functools.cache
def _unnamed(kind: Any) -> frozenset[str]:
    """Methods of a class that code calls without their names: as `x(…)`, `x[…]` and `x + …`."""
    own = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in _FIXED]
    found = {
        name
        for each in own
        for name, x in vars(each).items()
        if name.startswith("__") and isinstance(x, types.FunctionType) and name not in _UNCALLED
    }
    is_called = getattr(kind, "forward", None) not in (None, torch.nn.Module.forward)
    return frozenset(found | ({"forward"} if is_called else set()))


@functools.cache
def names_of(code: types.CodeType) -> frozenset[str]:
    """Names that code, and what it defines, may look up."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(code.co_names).union(*map(names_of, inner))


@functools.cache
def _imports(code: types.CodeType) -> bool:
    """Whether code, or what it defines, imports modules that may change."""
    roots = (
        str(each.argval).partition(".")[0]
        for each in dis.get_instructions(code)
        if each.opname == "IMPORT_NAME"
    )
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return any(root not in _FIXED for root in roots) or any(map(_imports, inner))


def fingerprint(function: Any) -> tuple[tuple[Any, ...] | None, list[Tensor]]:
    """The fingerprint of a function, and the tensors that it reaches; None where there is none."""
    names = frozenset[str]()
    try:
        while True:
            walk = _Walk(names)
            walk.value(function)
            if not walk.asked or walk.names == names:
                return tuple(walk.words), walk.tensors
            names = walk.names  # of which objects that came first were not asked
    except _TooMuch:
        return None, []

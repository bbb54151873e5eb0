"""Fingerprints of functions: whether one has been seen before, but for the tensors that it reads.

A fingerprint says all that a function's trace may depend on: its code, what it closes over, its
defaults and its globals, followed through functions; numbers by value, tensors by all but what they
hold. Of a function that reaches anything else there is none.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch
from torch import Tensor

_MOST = 256  # values that are looked at
_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)
_UNCALLED = ("__init__", "__post_init__", "__repr__", "__eq__", "__hash__", "__str__")
# Whose contents no program changes while it runs.
_FIXED = ("torch", "math", "builtins", "operator")


class _TooMuch(Exception):
    """A value that a fingerprint says nothing of."""


class _Walk:
    """The words of a fingerprint, and the tensors that were met, in their order."""

    def __init__(self) -> None:
        self.words: list[Any] = []
        self.tensors: list[Tensor] = []
        self.met: set[Any] = set()

    def value(self, x: Any, names: frozenset[str] = frozenset()) -> None:
        """Add a value. names: those that the code looks up which reaches it, of attributes, too."""
        kind = type(x)
        if len(self.words) > _MOST:
            raise _TooMuch
        if kind in _PLAIN:
            self.words += kind, x.hex() if kind is float else x
        elif kind in (Tensor, torch.nn.Parameter):
            self.words += kind, x.shape, x.stride(), x.dtype, x.device, x.requires_grad
            self.tensors.append(x)
        elif kind in (tuple, list):
            self.words += kind, len(x)
            for each in x:
                self.value(each, names)
        elif kind is types.FunctionType:
            self._function(x)
        elif kind is functools.partial:
            self.words += (kind,)
            self.value(x.func)
            self.value(x.args)
            self.value(tuple(x.keywords.items()))
        elif kind is types.MethodType:
            self._function(x.__func__)
            self.value(x.__self__, _names_of(x.__func__.__code__))
        elif _is_fixed(x):
            self.words += kind, id(x)
        else:
            self._object(x, names)

    def _function(self, function: types.FunctionType) -> None:
        self.words += types.FunctionType, function.__code__
        if vars(function):
            raise _TooMuch
        if id(function) in self.met:
            return
        self.met.add(id(function))
        if function.__module__.partition(".")[0] == "torch":
            return
        names = _names_of(function.__code__)
        self.value(function.__defaults__)
        self.value(tuple((function.__kwdefaults__ or {}).items()))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError as error:  # not bound yet
                raise _TooMuch from error
            self.value(content, names)
        for name in sorted(names & function.__globals__.keys()):
            self.words += (name,)
            self.value(function.__globals__[name], names)

    def _object(self, x: Any, names: frozenset[str]) -> None:
        """Add the attributes of an object that code may look up."""
        fields = getattr(x, "__dict__", None)
        if isinstance(x, (types.ModuleType, dict, type)) or not isinstance(fields, dict):
            raise _TooMuch
        kind: Any = type(x)
        self.words += kind, id(kind)
        if isinstance(x, torch.nn.Module):
            if x._forward_hooks or x._forward_pre_hooks:
                raise _TooMuch
            fields = {**fields, **x._parameters, **x._buffers, **x._modules}
        elif hasattr(kind, "__getattr__"):
            raise _TooMuch
        found: dict[str, Any] = {}
        looked_up, more = frozenset[str](), names | _unnamed(kind)
        while more := more - looked_up:  # methods look up others
            looked_up |= more
            new = {name: fields.get(name, _static_of(kind, name)) for name in more}
            found |= {name: each for name, each in new.items() if each is not None}
            methods = [each for each in new.values() if isinstance(each, types.FunctionType)]
            more = frozenset[str]().union(*[_names_of(each.__code__) for each in methods])
        if (id(x), looked_up) in self.met:
            return
        self.met.add((id(x), looked_up))
        for name in sorted(found):
            self.words += (name,)
            self.value(found[name], looked_up)


def _static_of(kind: type, name: str) -> Any:
    """An attribute that a class's objects have in common; None where there is none."""
    return inspect.getattr_static(kind, name, None)


def _is_fixed(x: Any) -> bool:
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
def _names_of(code: types.CodeType) -> frozenset[str]:
    """Names that code, and what it defines, may look up."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(code.co_names).union(*map(_names_of, inner))


def fingerprint(function: Any) -> tuple[tuple[Any, ...] | None, list[Tensor]]:
    """The fingerprint of a function, and the tensors that it reaches; None where there is none."""
    walk = _Walk()
    try:
        walk.value(function)
        return tuple(walk.words), walk.tensors
    except _TooMuch:
        return None, []

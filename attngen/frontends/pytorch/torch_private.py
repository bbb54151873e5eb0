"""Private parts of torch that a call asks, since nothing public is as quick, or there at all.

Each has a public stand-in, slower or more careful, for versions of torch that lack it; which of
them serve is said once in the log. Whoever reads one takes it from here.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library

log = logging.getLogger("attngen")


def _find(path: str, stand_in: Any, instead: str, of_cuda: bool = False) -> Any:
    """Torch's object of that dotted name; without it the stand-in, said in the log. of_cuda:
    a build for the CPU is right to lack it."""
    try:
        return operator.attrgetter(path)(torch)
    except AttributeError:
        if not of_cuda or torch.version.cuda is not None:
            log.warning("torch %s has no torch.%s: %s", torch.__version__, path, instead)
        return stand_in


# ---- whether somebody looks on at a call


def _unknown(*_: Any) -> bool:
    return True


_DISPATCHED = "calls go through torch's dispatcher, which takes longer"
_watched_by_functions = _find("_C._len_torch_function_stack", _unknown, _DISPATCHED)
_watched_by_modes = _find("_C._len_torch_dispatch_stack", _unknown, _DISPATCHED)
_function_mode_at = _find("_C._get_function_stack_at", lambda place: None, _DISPATCHED)
_tracing_state = _find("_C._get_tracing_state", _unknown, _DISPATCHED)
_is_profiled = _find("_C._autograd._profiler_enabled", _unknown, _DISPATCHED)
_innermost_transform = _find("_C._functorch.peek_interpreter_stack", _unknown, _DISPATCHED)
_functionalize = _find(
    "_C._functorch.TransformType.Functionalize",
    None,
    "torch.func.functionalize passes for a transform that differentiates",
)


def _find_device_mode() -> Any:
    import torch.utils._device  # noqa: F401  # which nothing else may have loaded

    return _find("utils._device.DeviceContext", None, "set_default_device slows calls down")


_DeviceMode = _find_device_mode()
levels: Any = forward_ad
"""Has `_current_level`, that of forward-mode differentiation, −1 outside of it."""
if not hasattr(forward_ad, "_current_level"):
    log.warning(
        "torch %s has no torch.autograd.forward_ad._current_level: %s",
        *(torch.__version__, _DISPATCHED),
    )
    levels = SimpleNamespace(_current_level=0)


def undisturbed() -> bool:
    """Whether no mode, transform, trace or profiler is on; the mode of `torch.set_default_device`
    only sees to where new tensors are."""
    return not (
        _watched_by_modes()
        or (_watched_by_functions() and _functions_are_watched())
        or _innermost_transform() is not None
        or _tracing_state() is not None
        or _is_profiled()
    )


def _functions_are_watched() -> bool:
    count = _watched_by_functions()
    if count is True:  # nobody knows
        return True
    return any(type(_function_mode_at(place)) is not _DeviceMode for place in range(count))


def has_transforms() -> bool:
    """Whether a transform of torch.func is on, in code that torch.compile traces, too; true where
    nobody knows."""
    return _innermost_transform() is not None


# What torch.compiler.assume_constant_result does, which would import the compiler: torch.compile
# asks this as it traces.
has_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]


_NOT_COUNTED = "gradients of gradients are refused within torch.func"
_stack_of_transforms = _find("_C._functorch.get_interpreter_stack", None, _NOT_COUNTED)
_gradient = _find("_C._functorch.TransformType.Grad", None, _NOT_COUNTED)


def differentiates_twice() -> bool:
    """Whether transforms of torch.func ask for gradients of gradients."""
    if _stack_of_transforms is None or _gradient is None:
        return False
    return [each.key() for each in _stack_of_transforms() or ()].count(_gradient) > 1


untransformed: Callable[[], AbstractContextManager[Any]] | None = _find(
    "_functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    None,
    "functions that attention takes are left to the reference within transforms of torch.func",
)
"""Code in which no transform of torch.func is on; None where torch has no such."""


def is_transformed() -> bool:
    """Whether a transform of torch.func is on that takes functions of autograd, which functionalize
    does not. True where nobody knows: such functions serve all calls."""
    innermost = _innermost_transform()
    return innermost is not None and (innermost is True or innermost.key() != _functionalize)


is_deterministic: Callable[[], bool] = _find(
    "_C._get_deterministic_algorithms",
    torch.are_deterministic_algorithms_enabled,
    "torch is asked whether algorithms are deterministic, which takes longer",
)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The `apply` of a function of autograd, for calls that nobody looks on at: without torch's
    search for transforms, and for tensors that one has left wrapped."""
    within = super(torch.autograd.Function, function)
    found: Callable[..., Any] = getattr(within, "apply", function.apply)
    return found


# ---- what a tensor is

_ASKED = "tensors are asked what they are, which takes longer"
is_functional = _find("_is_functional_tensor", _unknown, _ASKED)
is_wrapped = _find("_C._functorch.is_functorch_wrapped_tensor", _unknown, _ASKED)
"""Whether a transform of torch.func has wrapped a tensor; true where nobody knows."""
_is_zero = _find("Tensor._is_zerotensor", None, "lazy zeros are taken for tensors")

share_storage: Callable[[Tensor, Tensor], bool] = _find(
    "_C._is_alias_of",
    lambda one, other: one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr(),
    "storages are compared, which takes longer",
)
"""Whether two tensors are views of one storage."""


def _has_memory(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


_has_storage = _find("_C._has_storage", _has_memory, _ASKED)
PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(tensor: Tensor) -> bool:
    """Whether it is of no subclass, and its values lie where it says: no lazy negation, no zeros
    that nobody has written, none of several gradients that autograd takes at once."""
    lazy = tensor.is_neg() or (_is_zero is not None and _is_zero(tensor))
    return type(tensor) in PLAIN and not lazy and _has_storage(tensor)


class FormatGuards:
    """Stand-in for torch's guards of tensors: the same question, asked in Python."""

    def __init__(self, *tensors: Tensor, **_: Any) -> None:
        self._formats = [*map(_format_of, tensors)]

    def check(self, *tensors: Tensor) -> bool:
        """Whether these are as those were, but for their values and addresses."""
        return [*map(_format_of, tensors)] == self._formats


def _format_of(tensor: Tensor) -> tuple[Any, ...]:
    kind = type(tensor), tensor.dtype, tensor.device, tensor.layout
    state = tensor.requires_grad, tensor.is_inference(), is_plain(tensor)
    return (*kind, *state, tensor.shape, tensor.stride())


_TensorGuards = _find("_C._dynamo.guards.TensorGuards", FormatGuards, _ASKED)


def guard(tensors: Sequence[Tensor]) -> Any:
    """Guards whose `.check(*others)` tells tensors apart by type, dtype, device, sizes, strides,
    dispatch keys, whether they require a gradient, but not whether gradients are enabled; in a
    quarter of the time that Python needs for a key of these."""
    # It has to be told that no size or stride may vary.
    return _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


# ---- the device


def _allocate(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")


def _stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


_PUBLIC = "torch.cuda is asked, which takes longer"
# What Inductor's code allocates with: the dispatcher is behind us.
empty_strided_cuda: Callable[..., Tensor] = _find(
    "_C._dynamo.guards._empty_strided_cuda", _allocate, _PUBLIC
)
current_device: Callable[[], int] = _find(
    "_C._cuda_getDevice", torch.cuda.current_device, _PUBLIC, of_cuda=True
)
current_stream: Callable[[int], int] = _find(
    "_C._cuda_getCurrentRawStream", _stream, _PUBLIC, of_cuda=True
)
is_capturing: Callable[[], bool] = _find(
    "_C._cuda_isCurrentStreamCapturing",
    torch.cuda.is_current_stream_capturing,
    _PUBLIC,
    of_cuda=True,
)


# ---- tracing and registration


def is_traced(operands: Sequence[Tensor | None]) -> bool:
    """Whether a call is traced, by torch.compile, torch.export, make_fx or fake tensors, so that
    values are not there to be read, and sizes may be symbols."""
    if torch.compiler.is_compiling():
        return True
    if undisturbed() and all([x is None or type(x) in PLAIN for x in operands]):
        return False
    return _finds_tracer([x for x in operands if x is not None])


@contextmanager
def as_compiled() -> Iterator[None]:
    """Code that torch.compile traces, though Python runs it: some versions do not say so then."""
    name = "_is_compiling_flag"
    before = getattr(torch.compiler, name, None)
    setattr(torch.compiler, name, True)
    try:
        yield
    finally:
        setattr(torch.compiler, name, before)


@contextmanager
def untraced() -> Iterator[None]:
    """Code in which no trace and no transform is on, for a trace that knows nothing of it."""
    from torch._guards import tracing
    from torch.utils._python_dispatch import _disable_current_modes

    aside = untransformed if has_transforms() else None
    with tracing(None), _disable_current_modes(), aside() if aside else nullcontext():
        yield


def may_be_kept(tensors: Sequence[Tensor]) -> bool:
    """Whether what is worked out for a call of these tensors holds for later ones: no trace may
    have left symbols in it."""
    return not is_traced(tensors) and _tracing_state() is None


def _finds_tracer(tensors: list[Tensor]) -> bool:
    try:
        from torch._guards import detect_fake_mode
        from torch.fx.experimental.proxy_tensor import get_proxy_mode
    except ImportError:
        _say_no_tracers()
        return any(type(size) is not int for x in tensors for size in x.shape)
    return detect_fake_mode(tensors) is not None or get_proxy_mode() is not None


_said: list[str] = []


def _say_no_tracers() -> None:
    if not _said:
        _said.append("tracers")
        log.warning(
            "torch %s says not who traces: calls of symbolic sizes alone pass for traced",
            torch.__version__,
        )


def withdraw(library: Library) -> None:
    """Takes back what a library has registered; without its `_destroy` that happens when nobody
    has it any more."""
    destroy = getattr(library, "_destroy", None)
    if destroy is not None:
        destroy()

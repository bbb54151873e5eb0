"""Private parts of torch: each does what calls rely on, and where a version lacks one, what is
public stands in for it, which the log says once."""

from __future__ import annotations

import importlib.util
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attngen.frontends.pytorch import torch_private
from tests.support.paths import ROOT
from tests.support.private_kit import LEVEL, hide

NAMES = re.findall(r'_find\(\s*"([\w.]+)"', Path(torch_private.__file__).read_text())
OF_CUDA = {
    "_C._cuda_getDevice",
    "_C._cuda_getCurrentRawStream",
    "_C._cuda_isCurrentStreamCapturing",
}
WATCHING = {
    *("_C._len_torch_function_stack", "_C._len_torch_dispatch_stack", "_C._get_tracing_state"),
    *("_C._autograd._profiler_enabled", "_C._functorch.peek_interpreter_stack"),
}  # without one of which nobody knows whether someone looks on


def without(*names):
    """The module as a torch without these names gives it."""
    spec = importlib.util.spec_from_file_location("private_copy", torch_private.__file__)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        hide(patch, names)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["", *NAMES, LEVEL])
def private(request, caplog):
    """The module with all names, and without each."""
    caplog.set_level(logging.WARNING, "attngen")
    module = without(request.param) if request.param else without()
    module.missing = request.param
    said = [record.message for record in caplog.records]
    expected = request.param and (request.param not in OF_CUDA or torch.version.cuda)
    assert len(said) == bool(expected) and all(f"torch.{request.param}" in line for line in said)
    return module


def test_every_private_name_is_looked_up_in_one_module():
    pattern = re.compile(
        r"torch\._C|torch\._dynamo|_functorch|forward_ad\._|torch\._is_|torch\._guards"
    )
    users = {
        path.name
        for path in (ROOT / "attngen").rglob("*.py")
        if pattern.search(path.read_text()) and "bench" not in path.parts
    }
    users.remove("capturing.py")  # of another front end; only where torch failed to end a capture
    assert users == {"torch_private.py"}
    assert len(NAMES) > 10


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_undisturbed_is_a_call_that_nobody_looks_on_at(private):
    assert private.undisturbed() == (private.missing not in WATCHING)
    seen = []
    for mode in (Functions(), Dispatch(), FakeTensorMode(), torch.autograd.profiler.profile()):
        with mode:
            seen.append(private.undisturbed())
    note = lambda x: seen.append(private.undisturbed()) or x  # noqa: E731
    torch.func.vmap(note)(torch.ones(2))
    torch.func.functionalize(note)(torch.ones(2))
    torch.jit.trace(note, torch.ones(2), check_trace=False)
    assert seen == [False] * 7
    with torch.device("cpu"):
        known = private.missing not in (
            *WATCHING,
            "_C._get_function_stack_at",
            "utils._device.DeviceContext",
        )
        assert private.undisturbed() == known


def test_level_is_none_outside_of_forward_mode(private):
    public = private.missing == LEVEL
    assert (private.levels._current_level >= 0) == public
    with forward_ad.dual_level():
        assert private.levels._current_level >= 0


def test_transform_that_takes_functions_of_autograd_is_found(private):
    unknown = private.missing == "_C._functorch.peek_interpreter_stack"
    seen = []
    note = lambda x: seen.append((private.is_transformed(), private.has_transforms())) or x.sum()  # noqa: E731
    note(torch.ones(2))
    torch.func.grad(note)(torch.ones(2))
    torch.func.functionalize(note)(torch.ones(2))
    passes = unknown or private.missing == "_C._functorch.TransformType.Functionalize"
    assert seen == [(unknown, unknown), (True, True), (passes, True)]


def test_compiled_code_knows_transforms_as_it_is_traced():
    def twice(x):
        return x * (2 if torch_private.has_transforms() else 1)

    torch._dynamo.reset()
    compiled = torch.compile(twice, backend="eager", fullgraph=True)
    assert compiled(torch.ones(())) == 1
    torch._dynamo.reset()
    inner = torch.compile(torch.func.grad(twice), backend="eager", fullgraph=True)
    assert inner(torch.ones(())) == 2


def test_plain_tensor_lies_where_it_says(private):
    x = torch.ones(3)
    zeros = torch._efficientzerotensor(3)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    seen = []
    torch.func.vmap(lambda row: seen.append(private.is_plain(row)) or row)(torch.ones(2, 3))
    assert private.is_plain(x) and private.is_plain(torch.nn.Parameter(x))
    assert not private.is_plain(torch._neg_view(x)) and not private.is_plain(fake)
    assert private.is_plain(zeros) == (private.missing == "Tensor._is_zerotensor")
    assert seen == [False]


def test_guard_tells_formats_apart_and_not_addresses(private):
    x = torch.zeros(2, 3)
    guard = private.guard([x, x.T])
    assert guard.check(torch.ones(2, 3), torch.ones(2, 3).T)
    others = [
        x.double(), torch.zeros(2, 4), torch.zeros(3, 2).T, x.clone().requires_grad_(),
        torch.nn.Parameter(x), torch._neg_view(x), x.to("meta"), torch.zeros(2, 3, 1),
    ]  # fmt: skip
    for other in others:
        assert not guard.check(other, x.T), (other, private.missing)
    with torch.inference_mode():
        assert not guard.check(torch.zeros(2, 3), x.T)


def test_functional_tensor_is_told(private):
    seen = []
    torch.func.functionalize(lambda x: seen.append(private.is_functional(x)) or x)(torch.ones(2))
    assert seen == [True]
    assert private.is_functional(torch.ones(2)) == (private.missing == "_is_functional_tensor")


def test_call_is_traced_where_values_are_not_there(private, monkeypatch):
    x = torch.ones(2)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert private.is_traced([x, None])
    assert private.is_traced([None, fake]) and not private.is_traced([x, None])
    with Dispatch():
        assert not private.is_traced([x])
    seen = []
    make_fx(lambda x: seen.append(private.is_traced([x])) or x)(x)
    assert seen == [True]


def test_call_of_symbolic_sizes_is_traced_where_nothing_else_is_known(monkeypatch, caplog):
    module, seen = without(), []

    def note(x):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "torch._guards", None)
            seen.append((module.is_traced([x]), module.is_traced([torch.ones(3)])))
        return x * 2

    make_fx(note, tracing_mode="symbolic")(torch.ones(3, 5))
    assert seen == [(True, False)]
    (record,) = (record for record in caplog.records if record.name == "attngen")
    assert record.levelname == "WARNING" and "who traces" in record.message


def test_stand_ins_of_the_device_are_torchs_own(monkeypatch):
    module = without(*OF_CUDA, "_C._dynamo.guards._empty_strided_cuda")
    assert module.current_device is torch.cuda.current_device
    assert module.is_capturing is torch.cuda.is_current_stream_capturing
    stream = type("Stream", (), {"cuda_stream": 7})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    assert module.current_stream(0) == 7
    with FakeTensorMode():
        made = module.empty_strided_cuda((2, 3), (1, 2), torch.float16)
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.float16)
    assert made.device.type == "cuda"


CALLS = """
import sys, pytest, torch
from tests.support.private_kit import hide
old, patch = pytest.MonkeyPatch(), pytest.MonkeyPatch()
hide(old, sys.argv[1:])
from attngen.frontends.pytorch import torch_private
old.undo()
import attngen
from tests.support.autograd_kit import OnReference
q = torch.randn(2, 5, 4, 16).bfloat16()
leaf = q.clone().requires_grad_()
def gradient(backend):
    return torch.autograd.grad(attngen.attention(leaf, q, q, backend=backend).sum(), leaf)[0]
def mapped(backend):
    return torch.func.vmap(lambda x: attngen.attention(x, x, x, backend=backend))(q[:, None])
want = gradient("reference"), mapped("reference")
stand_in = OnReference(patch)
found = gradient("cuda"), mapped("cuda")
assert stand_in.names == ["forward", "backward", "forward", "forward"], stand_in.names
torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)
"""


@pytest.mark.slow
def test_calls_are_right_where_torch_has_none_of_them():
    """Nothing then stands in for the dispatcher, which reaches the operations."""
    names = [name for name in NAMES if name not in OF_CUDA]
    done = subprocess.run(
        [sys.executable, "-c", CALLS, *names], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name in names:
        assert done.stderr.count(f"no torch.{name}:") == 1


def test_apply_of_a_function_differentiates_without_a_search_for_transforms(monkeypatch):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    apply = torch_private.apply_of(Double)
    monkeypatch.setattr(torch.autograd.Function, "apply", lambda *_: pytest.fail("searched"))
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(apply(x).sum(), x)
    assert gradient.tolist() == [2, 2, 2]

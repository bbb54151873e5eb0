"""GPU tests: who may run them, kernels built before the first, and what to do with a lost GPU.

A test module names the kernels its tests need in `KERNELS`, those of problems in `problems()`;
`Case` parameters name theirs.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attngen
from attngen import AttentionSpec
from attngen.compiler.builder import build_problem
from attngen.errors import AttngenError
from attngen.spec.problem import Problem
from attngen.targets import target
from attngen.targets.target import TARGETS, of_capability

from ..emulator import device
from . import oracle
from .cases import Case

HANG_SECONDS = 150  # a test takes seconds; a kernel that never ends would hold the GPU for good
KEPT_BYTES = 2 << 30  # that a process may keep for its next tests: dozens share a GPU
HERE = Path(__file__).parent
# By name, of what these kernels lack.
REFUSALS = ("of mma.sync have no", "no tile of split keys fits")
# batch, h_q, h_kv, s_q, s_kv, d: from a fraction of a wave of tiles to several.
WORKLOADS = [
    (1, 1, 1, 1, 300, 64),
    (1, 2, 1, 130, 130, 128),
    (2, 8, 2, 700, 900, 64),
    (4, 16, 4, 1024, 1024, 128),
    (3, 5, 1, 513, 257, 256),
    (1, 32, 8, 2048, 2048, 64),
    (2, 4, 4, 1500, 3000, 128),
    (8, 6, 3, 300, 300, 256),
]
Workload = tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]


def any_chip() -> str | None:
    """The architecture of the GPU here, where it is not Hopper and has kernels: tests of modules
    that ask for it run there, too."""
    if not torch.cuda.is_available():
        return None
    found = of_capability(torch.cuda.get_device_capability())
    return found.name if found and "wgmma" not in found.instructions else None


def has_other_kernels() -> bool:
    """Whether calls run kernels by products of warps: those of the GPU here, or of the target that
    ATTNGEN_TARGET names."""
    named = TARGETS.get(target.NAMED)
    return bool(any_chip() or (named and "wgmma" not in named.instructions))


def missing() -> str | None:
    """Why these tests cannot run here; None where they can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device; torch.cuda.is_available() is False"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs compute capability (9, 0); {torch.cuda.get_device_name()} has {capability}"
    return None


def pytest_configure(config: pytest.Config) -> None:
    """Before the modules are imported, which may make tensors."""
    if config.getoption("emulate"):
        oracle.DEVICE = torch.device("cpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    reason: str | None
    if config.getoption("emulate"):
        ours = [item for item in ours if item.get_closest_marker("device")]
        reason = "needs a real GPU"
    else:
        reason = missing() if ours else None
        if any_chip():
            ours = [item for item in ours if not hasattr(item.module, "any_chip")]
    if reason:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))
    if has_other_kernels():
        of_wgmma = (item for item in items if item.get_closest_marker("wgmma"))
        for item in of_wgmma:
            item.add_marker(pytest.mark.skip(reason="says what Hopper's kernels alone do"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skips what kernels by products of warps refuse by name, where calls run these."""
    try:
        return (yield)
    except AttngenError as error:
        refused = [each for each in error.reasons if any(why in each for why in REFUSALS)]
        if not (refused and has_other_kernels()):
            raise
        pytest.skip(refused[0].rpartition(": ")[2])  # behind the problem's label


def wanted_kernels(items: list[pytest.Item]) -> list[AttentionSpec | Problem]:
    """The kernels that the collected tests need, each once."""
    found: dict[AttentionSpec | Problem, None] = {}
    modules: dict[object, None] = {}
    for item in items:
        if has_other_kernels() and item.get_closest_marker("wgmma"):
            continue
        modules[getattr(item, "module", None)] = None
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        found |= {value.spec: None for value in parameters if isinstance(value, Case)}
    for module in modules:
        found |= dict.fromkeys(getattr(module, "KERNELS", ()))
        found |= dict.fromkeys(getattr(module, "problems", list)())
    return list(found)


@pytest.fixture(scope="session", autouse=True)
def emulator(request: pytest.FixtureRequest) -> Iterator[device.Emulator | None]:
    """With --emulate the host is the device, and kernels are compiled when they are called."""
    if not request.config.getoption("emulate"):
        yield None
        return
    cache = request.config.cache
    assert cache is not None
    host = device.Emulator(cache.mkdir("emulator"))
    with device.emulated(host):
        yield host


@pytest.fixture(scope="session", autouse=True)
def kernels(request: pytest.FixtureRequest, emulator: device.Emulator | None) -> None:
    """Builds every kernel in parallel, so that no test waits for the compiler, unless --built says
    that they are there.

    A spec that does not build is reported by the tests that need it.
    """
    if request.config.getoption("emulate"):
        return
    torch.backends.cuda.matmul.allow_tf32 = False  # the float32 reference is float32
    if request.config.getoption("built"):
        return
    lines = build_all(wanted_kernels(request.session.items))
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.ensure_newline()
        reporter.write_line("\n".join(lines))


def build_all(wanted: Sequence[AttentionSpec | Problem], part: str = "1/1") -> list[str]:
    """Builds these kernels, or the part "I/N" of them, on as large a part of the cores; says how
    many, in what time, and which failed."""
    start = time.perf_counter()
    index, parts = map(int, part.split("/"))
    wanted, arch = wanted[index - 1 :: parts], any_chip() or device.ARCH
    failed = []

    def build(each: AttentionSpec | Problem) -> None:
        try:
            if isinstance(each, Problem):
                build_problem(each, arch)
            else:
                attngen.build(each, arch)
        except Exception as error:  # whatever it is, only the tests that need the kernel fail
            title = each.label if isinstance(each, Problem) else each.title
            failed.append(f"{title}: {error}")

    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // parts)) as pool:
        list(pool.map(build, wanted))
    seconds = time.perf_counter() - start
    return [f"{len(wanted)} kernels ready in {seconds:.1f} s, {len(failed)} failed", *failed]


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With --build-only kernels are built, and nothing runs."""
    part = session.config.getoption("build_only")
    if part is None:
        return None
    print("\n".join(build_all(wanted_kernels(session.items), part)), flush=True)
    return True


@pytest.fixture(autouse=True)
def sound_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the run where a kernel hangs or has broken the CUDA context: nothing after it counts."""
    if request.config.getoption("emulate"):
        yield
        return
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=sys.__stderr__)
    yield
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if torch.cuda.memory_reserved() > KEPT_BYTES:
                torch.cuda.empty_cache()
    except RuntimeError as error:
        pytest.exit(f"{request.node.nodeid} has broken the CUDA context: {error}", returncode=3)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test where a kernel is launched in it."""
    launched: list[object] = []
    for name in ("launch", "relaunch"):
        monkeypatch.setattr(
            f"attngen.frontends.pytorch.operation.{name}", lambda *what: launched.append(what)
        )
    yield
    assert not launched


@pytest.fixture(scope="module")
def workloads() -> list[Workload]:
    """Operands of causal calls, and what a lone launch returns, checked against float64."""
    found = []
    for number, shape in enumerate(WORKLOADS):
        tensors = oracle.operands(*shape, seed=number)
        wanted = oracle.run(tensors)
        oracle.check(*wanted, oracle.truth(*tensors, mask="causal"))
        found.append((tensors, wanted))
    torch.cuda.synchronize()
    return found

"""Programs of JAX that benchmarks time, on torch's tensors."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

jax = pytest.importorskip("jax")

from attngen import MeasureError, reference  # noqa: E402
from attngen.bench import in_jax  # noqa: E402
from attngen.bench.peers import Operands  # noqa: E402
from attngen.bench.workloads import Case  # noqa: E402
from attngen.cli.main import main  # noqa: E402

CASE = Case(2, 8, 4, 2, 8, 8, causal=True)


def operands() -> Operands:
    generator = torch.Generator().manual_seed(0)
    heads = CASE.heads_q, CASE.heads_kv, CASE.heads_kv, CASE.heads_q
    shapes = ((CASE.batch, CASE.length, each, CASE.head_dim) for each in heads)
    return Operands(*(torch.randn(*shape, generator=generator) for shape in shapes))


def test_programs_take_and_give_tensors_of_torch() -> None:
    given = operands()
    q, k, v = (x.clone().requires_grad_() for x in given[:3])
    out, _ = reference.attention(q, k, v, mask="causal")
    wanted = torch.autograd.grad(out, (q, k, v), given.d_o)
    peer = in_jax.LOADERS["xla"]()
    (found,) = peer.makers["fwd"](CASE, given)()
    assert torch.allclose(found, out, atol=1e-5)
    gradients = peer.makers["bwd"](CASE, given)()
    for one, other in zip(gradients, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_own_programs_need_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    own = in_jax.ours()
    assert own.source.endswith(f"in jax {jax.__version__}")
    with pytest.raises(ValueError, match="has no kernels|fp32"):
        own.makers["fwd"](CASE, operands())()
    with pytest.raises(MeasureError, match="JAX sees no GPU"):
        in_jax.require_cuda()


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_command_without_a_gpu_says_so(direction: str) -> None:
    done = CliRunner().invoke(main, ["bench", direction, "--frontend", "jax"])
    assert done.exit_code and "timing needs a GPU" in done.output
    done = CliRunner().invoke(main, ["bench", direction, "--frontend", "jax", "--peers", "fa3"])
    assert "unknown peers: fa3; there are: cudnn, xla, tokamax" in done.output


def test_tokamax_is_asked_for_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def attend(*given: Any, implementation: tuple[str, ...], **words: Any) -> Any:
        asked.append(implementation)
        return jax.nn.dot_product_attention(*given, **words)

    fake = SimpleNamespace(dot_product_attention=attend)
    monkeypatch.setattr(in_jax, "version", lambda name: "0.1")
    monkeypatch.setitem(sys.modules, "tokamax", fake)
    peer = in_jax.LOADERS["tokamax"]()
    (found,) = peer.makers["fwd"](CASE, operands())()
    q, k, v, _ = operands()
    wanted, _ = reference.attention(q, k, v, mask="causal")
    assert torch.allclose(found, wanted, atol=1e-5) and asked == [("mosaic", "triton")]
    assert peer.source == "tokamax 0.1"

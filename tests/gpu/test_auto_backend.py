"""`backend="auto"` computes by the reference what kernels refuse, and says why."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import attngen
from attngen import SpecError

from . import oracle
from .test_decode import PAGED, cache

pytestmark = pytest.mark.gpu


def training(*shape: int, **given) -> dict:
    """Operands [b, h_q, h_kv, s_q, s_kv, d] that require gradients."""
    tensors = (x.requires_grad_() for x in oracle.operands(*shape))
    return dict(zip("qkv", tensors, strict=True)) | given


def plain(**given) -> dict:
    return dict(zip("qkv", oracle.operands(2, 4, 2, 9, 64, 64), strict=True)) | given


def learned(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return oracle.randn(*shape, dtype=dtype, seed=7).requires_grad_()


def pages_off_by_8_bytes() -> dict:
    held = cache([40, 7], 2, 64, page=16)
    k, v = (torch.nn.functional.pad(x, (0, 4))[..., :64] for x in (held.k, held.v))
    options = {"page_table": held.table, "seqused_kv": held.lengths, "layout": PAGED}
    return {"q": oracle.randn(2, 1, 4, 64), "k": k, "v": v, **options}


def fp8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn)


def fp8_off_by(elements: int) -> dict:
    """FP8 operands whose rows are so much longer than their head dim."""
    tensors = oracle.operands(2, 4, 2, 9, 64, 64)
    padded = (fp8(torch.nn.functional.pad(x, (0, elements)))[..., :64] for x in tensors)
    return dict(zip("qkv", padded, strict=True))


def fp8_that_begins_at(byte: int) -> dict:
    found = {}
    for name, x in zip("qkv", oracle.operands(2, 4, 2, 9, 64, 64), strict=True):
        memory = torch.empty(x.numel() + 16, dtype=torch.float8_e4m3fn, device=x.device)
        found[name] = memory[byte : byte + x.numel()].view(x.shape).copy_(fp8(x))
    return found


# What kernels refuse, and a word of why.
REFUSED = {
    "a negative scale": (lambda: plain(softmax_scale=-0.2), "softmax_scale"),
    "no scale": (lambda: plain(softmax_scale=0.0), "softmax_scale"),
    "a tiny softcap": (lambda: plain(softcap=1e-39), "softcap"),
    "a learned scale": (lambda: plain(softmax_scale=torch.tensor(0.2).requires_grad_()), "scale"),
    "gradients of wide heads": (lambda: training(1, 2, 2, 1, 9, 576), "head dims above 512"),
    "wide values": (
        lambda: dict(zip("qkv", oracle.operands(1, 4, 2, 130, 64, 320, 520), strict=True)),
        "head_dim_v 520",
    ),
    "gradients of a float32 output": (
        lambda: training(1, 2, 2, 9, 9, 64, out_dtype=torch.float32),
        "float32 output",
    ),
    "gradients of a bias of one column": (
        lambda: plain(bias=learned(9, 1, dtype=torch.bfloat16)),
        "one column",
    ),
    "gradients of slopes": (lambda: plain(alibi_slopes=learned(4)), "alibi_slopes"),
    "splits beside dropout": (
        lambda: plain(
            num_splits=2,
            dropout_p=0.25,
            rng_state=torch.tensor([3, 0], device=oracle.DEVICE),
        ),
        "num_splits",
    ),
    "pages off multiples of 16 bytes": (pages_off_by_8_bytes, "multiples of 16 bytes"),
    "FP8 rows off multiples of 16 bytes": (lambda: fp8_off_by(8), "multiples of 16 bytes"),
    "FP8 that begins elsewhere": (lambda: fp8_that_begins_at(8), "start at a multiple of 16"),
}


def output_of(found):
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.usefixtures("nothing_launched")
@pytest.mark.parametrize("case", REFUSED)
def test_auto_computes_what_kernels_refuse(case, caplog):
    make, word = REFUSED[case]
    given = make()
    leaves = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    with pytest.raises(SpecError, match=word):
        attngen.attention(**given, backend="cuda")
    wanted = attngen.attention(**given, backend="reference")
    attngen.frontends.pytorch.routing._logged.clear()
    for _ in range(2):  # the second one is known
        with caplog.at_level("WARNING", logger="attngen"):
            found = attngen.attention(**given)
        assert torch.equal(output_of(found), output_of(wanted))
    assert sum(word in each.message for each in caplog.records) == 1
    if leaves:
        pairs = (torch.autograd.grad(output_of(x).float().sum(), leaves) for x in (found, wanted))
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other)


def test_auto_takes_forward_mode_derivatives(caplog):
    q, k, v = oracle.operands(2, 4, 2, 9, 64, 64)

    def weighted(q, backend="auto"):
        return attngen.attention(q, k, v, backend=backend).float().square().sum()

    wanted = torch.func.jvp(lambda q: weighted(q, "reference"), (q,), (q,))
    torch.testing.assert_close(torch.func.jvp(weighted, (q,), (q,)), wanted)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(weighted(forward_ad.make_dual(q, q)))
        torch.testing.assert_close((found.primal, found.tangent), wanted)
    assert "forward-mode" in caplog.text

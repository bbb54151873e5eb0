"""Run the forwards of a spec file out of a bundle, and check them against plain PyTorch.

    attngen bundle build examples/specs/gemma3.toml -o build/demo.attn
    python examples/demo.py examples/specs/gemma3.toml build/demo.attn

`make demo` does both, the second with compiling switched off. On a GPU the kernels run; on any
other machine the reference backend takes their place, and is checked the same way. Specs that ask
for more than causal masks and windows in 16 bits are left out.
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

import attngen

BATCH, LENGTH, HEADS_Q, HEADS_KV, WINDOW = 1, 777, 8, 4, 200
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
EPSILON = 1e-4  # beyond twice PyTorch's own error


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: demo.py SPEC.toml FILE.attn", file=sys.stderr)
        return 2
    spec_file, path = sys.argv[1:]
    bundle = attngen.load_bundle(path, require=spec_file)
    print(f"{bundle.path}: {bundle.bytes / 1000:.0f} kB, verified, has every kernel of {spec_file}")
    has_kernels = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device, backend = ("cuda", "cuda") if has_kernels else ("cpu", "reference")
    print(f"device {torch.cuda.get_device_name() if has_kernels else 'CPU'}, backend {backend}")
    torch.manual_seed(0)
    with torch.no_grad():
        specs = [spec for spec in attngen.load_specs(spec_file) if is_plain(spec)]
        correct = [check(spec, device, backend) for spec in specs]
    return 0 if correct and all(correct) else 1


def is_plain(spec: attngen.AttentionSpec) -> bool:
    """Whether `check` knows all that the spec asks for; says so where it does not."""
    plain = attngen.AttentionSpec(
        spec.head_dim,
        spec.head_dim_v,
        dtype=spec.dtype,
        mask=spec.mask,
        window=spec.window,
        directions=spec.directions,
        name=spec.name,
    )
    known = spec == plain and spec.mask in ("none", "causal") and spec.dtype in DTYPES
    if not known:
        print(f"{spec.title:<16} left out: this program checks causal masks and windows in 16 bits")
    return known


def check(spec: attngen.AttentionSpec, device: str, backend: str) -> bool:
    """Whether attngen's error is at most twice the one that PyTorch makes in the same dtype."""

    def random(heads: int, dim: int) -> Tensor:
        shape = (BATCH, LENGTH, heads, dim)
        return torch.randn(shape, device=device, dtype=DTYPES[spec.dtype])

    q, k = random(HEADS_Q, spec.head_dim), random(HEADS_KV, spec.head_dim)
    v = random(HEADS_KV, spec.head_dim_v or spec.head_dim)
    behind_and_ahead = (WINDOW, 0 if spec.mask == "causal" else WINDOW)
    window = behind_and_ahead if spec.window else (-1, -1)
    out = attngen.attention(q, k, v, mask=spec.mask, window=window, backend=backend)
    visible = visible_keys(spec.mask, window).to(device)
    exact = float64_attention(q, k, v, visible)
    ours, theirs = error(out, exact), error(torch_attention(q, k, v, visible), exact)
    correct = math.isfinite(ours) and ours <= 2 * theirs + EPSILON
    verdict = "correct" if correct else "WRONG"
    print(f"{spec.title:<16} largest error {ours:.2e}, PyTorch's {theirs:.2e}: {verdict}")
    return correct


def visible_keys(mask: str, window: tuple[int, int]) -> Tensor:
    """[s, s] bool: which keys each query sees."""
    behind = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None, :]
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    if mask == "causal":
        visible &= behind >= 0
    left, right = window
    if left >= 0:
        visible &= behind <= left
    if right >= 0:
        visible &= -behind <= right
    return visible


def float64_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """The textbook formula in float64; [b, s, h, d] in and out."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.double().repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """PyTorch's own attention in the operands' dtype."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return out.transpose(1, 2)


def error(out: Tensor, exact: Tensor) -> float:
    return (out.double() - exact).abs().max().item()


if __name__ == "__main__":
    sys.exit(main())

"""One call: causal attention with a sliding window and grouped heads.

    python examples/01_attention.py

On a GPU that has kernels the first call compiles one (about a second) and every later one, in
this process or another, finds it in the cache. Elsewhere the reference backend computes the same.
"""

import logging

import torch

import attngen

logging.basicConfig(format="%(message)s", level=logging.INFO)  # says what is compiled, and why not

device = "cuda" if torch.cuda.is_available() else "cpu"
batch, length, heads_q, heads_kv, head_dim = 2, 512, 8, 2, 128


def random(heads: int) -> torch.Tensor:
    return torch.randn(batch, length, heads, head_dim, device=device, dtype=torch.bfloat16)


with torch.no_grad():
    q, k, v = random(heads_q), random(heads_kv), random(heads_kv)
    out, aux = attngen.attention(q, k, v, mask="causal", window=(128, 0), return_lse=True)

print(f"out {tuple(out.shape)} {out.dtype} on {out.device}")
print(f"log-sum-exp {tuple(aux.lse.shape)} {aux.lse.dtype}")

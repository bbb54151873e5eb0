"""Generate from a small transformer over a paged cache, and check every token without one.

    python examples/03_generate.py --tokens 64

Sequences of different lengths share the pages of their common beginning. Each step takes what every
sequence has to read next, a chunk of its prompt or the token before, as packed queries against all
that its pages hold. Afterwards the reference reads the finished sequences whole: no token may be
worse than its own choice by more than TOLERANCE. Without a GPU that has kernels both sides are the
reference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import attngen

LAYERS, WIDTH, HEADS_Q, HEADS_KV, HEAD_DIM = 4, 256, 8, 2, 64
LONGEST, PAGE, CHUNK = 512, 16, 24  # positions of a sequence, of a page, of a step at most
HAS_KERNELS = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE, BACKEND = ("cuda", "auto") if HAS_KERNELS else ("cpu", "reference")
TOLERANCE = 0.05  # of a logit; they have a standard deviation of about 1, and come from 16 bits
SHARED = b"Answer in one sentence, and in plain words. " * 2
PROMPTS = (
    b"Why is the sky blue?",
    b"What is a page?",
    b"Name the largest prime below 100, please.",
)


class Cache:
    """Keys and values of all layers in pages that any sequence may point to."""

    def __init__(self, pages: int) -> None:
        shape = (LAYERS, pages, PAGE, HEADS_KV, HEAD_DIM)
        self.k, self.v = (torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for _ in "kv")
        self.free = [*range(pages)]

    def grow(self, pages: list[int], length: int) -> None:
        """Adds pages to those of a sequence until they hold so many positions."""
        while len(pages) * PAGE < length:
            pages.append(self.free.pop())


class Step:
    """Packed tokens of a step: which sequence each belongs to, where it stands, where it goes."""

    def __init__(self, counts: list[int], starts: list[int], pages: list[list[int]]) -> None:
        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        width = max(map(len, pages))
        self.table = int32([page for row in pages for page in row + [0] * (width - len(row))])
        self.table = self.table.view(len(pages), width)
        self.ends = int32([sum(counts[:n]) for n in range(len(counts) + 1)])
        self.lengths = int32(ends)
        at = [
            (row, i)
            for row, (a, b) in enumerate(zip(starts, ends, strict=True))
            for i in range(a, b)
        ]
        self.positions = torch.tensor([i for _, i in at], device=DEVICE)
        self.slots = torch.tensor(
            [pages[row][i // PAGE] * PAGE + i % PAGE for row, i in at], device=DEVICE
        )


class Block(nn.Module):
    """Attention and a perceptron, each added to what came in; x: [tokens, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(WIDTH, (HEADS_Q + 2 * HEADS_KV) * HEAD_DIM)
        self.out = nn.Linear(HEADS_Q * HEAD_DIM, WIDTH)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, k: Tensor | None, v: Tensor | None, step: Step | None) -> Tensor:
        heads = self.heads(self.norm(x)).unflatten(-1, (-1, HEAD_DIM)).bfloat16()
        q, new_k, new_v = heads.split([HEADS_Q, HEADS_KV, HEADS_KV], dim=1)
        if step is None:  # a whole sequence
            whole = (each[None] for each in (q, new_k, new_v))
            out = attngen.attention(*whole, mask="causal", backend="reference")[0]
        else:
            k.flatten(0, 1)[step.slots], v.flatten(0, 1)[step.slots] = new_k, new_v
            out = attngen.attention(
                q, k, v, layout="paged_kv_thd_bshd_bshd", mask="causal_bottom_right",
                cu_seqlens_q=step.ends, seqused_kv=step.lengths, page_table=step.table,
                backend=BACKEND,
            )  # fmt: skip
        x = x + self.out(out.float().flatten(1))
        return x + self.perceptron(x)


class Model(nn.Module):
    """Logits of the next byte after each; what a step's tokens see besides them is in the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
        nn.init.normal_(self.last[1].weight, std=WIDTH**-0.5)

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, step: Step | None = None
    ) -> Tensor:
        places = torch.arange(len(tokens), device=DEVICE) if step is None else step.positions
        x = self.bytes(tokens) + self.positions(places)
        for number, block in enumerate(self.blocks):
            pages = (None, None) if cache is None else (cache.k[number], cache.v[number])
            x = block(x, *pages, step)
        return self.last(x)


def read(
    model: Model, cache: Cache, chunks: list[list[int]], done: list[int], pages: list[list[int]]
) -> Tensor:
    """Reads each sequence's next tokens; the logits after the last of each, [sequences, 256]."""
    counts = [len(chunk) for chunk in chunks]
    for own, start, count in zip(pages, done, counts, strict=True):
        cache.grow(own, start + count)
    step = Step(counts, done, pages)
    tokens = torch.tensor([token for chunk in chunks for token in chunk], device=DEVICE)
    return model(tokens, cache, step)[step.ends[1:].long() - 1]


def generate(
    model: Model, prompts: Sequence[bytes], count: int, chunk: int = CHUNK
) -> list[list[int]]:
    """Prompts, all beginning with SHARED, with so many tokens after each, chosen greedily."""
    texts = [[*prompt] for prompt in prompts]
    cache = Cache(pages=len(prompts) * LONGEST // PAGE)
    shared = len(SHARED) // PAGE * PAGE  # whole pages of it are read once, and then everybody's
    common: list[int] = []
    for start in range(0, shared, chunk):
        read(model, cache, [texts[0][start : min(start + chunk, shared)]], [start], [common])
    pages, done = [[*common] for _ in texts], [shared] * len(texts)
    while any(len(text) < len(prompt) + count for text, prompt in zip(texts, prompts, strict=True)):
        chunks = [text[at : at + chunk] for text, at in zip(texts, done, strict=True)]
        best = read(model, cache, chunks, done, pages).argmax(-1).tolist()
        done = [at + len(each) for at, each in zip(done, chunks, strict=True)]
        for text, prompt, at, token in zip(texts, prompts, done, best, strict=True):
            if at == len(text) and len(text) < len(prompt) + count:
                text.append(token)
    return texts


def shortfalls(model: Model, text: list[int], prompt: bytes) -> Tensor:
    """By how much each generated token's logit is below the best, by the reference and no cache."""
    tokens = torch.tensor(text, device=DEVICE)
    logits = model(tokens[:-1])[len(prompt) - 1 :]
    chosen = logits.gather(1, tokens[len(prompt) :, None])[:, 0]
    return logits.max(1).values - chosen


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Generate over a paged cache.")
    parser.add_argument("--tokens", type=int, default=64 if HAS_KERNELS else 12)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    prompts = [SHARED + prompt for prompt in PROMPTS]
    texts = generate(model, prompts, options.tokens)
    found = [shortfalls(model, *each) for each in zip(texts, prompts, strict=True)]
    for text, prompt, each in zip(texts, prompts, found, strict=True):
        same = int((each == 0).sum())
        print(
            f"{len(prompt)} bytes read, {len(text) - len(prompt)} written, {same} as the reference"
        )
    worst = max(float(each.max()) for each in found)
    print(f"largest shortfall {worst:.4f} of a logit, allowed {TOLERANCE}; backend {BACKEND}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())

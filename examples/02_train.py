"""Train a small transformer twice, on the kernels and on the reference, and compare the losses.

    python examples/02_train.py --json training.json --plot training.svg

Both runs start from the same weights and read the same text, the standard library's source, byte by
byte, under bfloat16 autocast. They fail where the losses of any step differ by more than TOLERANCE.
Without a GPU that has kernels both are short and run on the reference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import sysconfig
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngen
from attngen.bench.machine import describe_machine

LAYERS, WIDTH, HEADS_Q, HEADS_KV, HEAD_DIM = 4, 512, 8, 2, 64
HAS_KERNELS = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cuda" if HAS_KERNELS else "cpu"
BATCH, LENGTH, STEPS = (8, 512, 400) if HAS_KERNELS else (2, 64, 10)
LEARNING_RATE, WARMUP = 6e-4, 40  # at its highest; steps until then
TOLERANCE = 0.005  # nats a byte


class Block(nn.Module):
    """Attention and a perceptron, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(WIDTH, (HEADS_Q + 2 * HEADS_KV) * HEAD_DIM)
        self.out = nn.Linear(HEADS_Q * HEAD_DIM, WIDTH)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, backend: str) -> Tensor:
        heads = self.heads(self.norm(x)).unflatten(-1, (-1, HEAD_DIM))  # [b, s, heads, d]
        q, k, v = heads.split([HEADS_Q, HEADS_KV, HEADS_KV], dim=2)
        x = x + self.out(attngen.attention(q, k, v, mask="causal", backend=backend).flatten(2))
        return x + self.perceptron(x)


class Model(nn.Module):
    """The next byte after each, from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, backend: str) -> Tensor:
        x = self.bytes(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x, backend)
        return self.last(x)


def text() -> Tensor:
    """Source of the standard library's modules, uint8."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)


def train(backend: str, steps: int, source: Tensor) -> list[float]:
    """The loss of each step, nats a byte."""
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARMUP, 1 - step / steps)
        starts = torch.randint(len(source) - LENGTH, (BATCH, 1))
        tokens = source[starts + torch.arange(LENGTH + 1)].long().to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = model(tokens[:, :-1], backend)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Both curves, and their difference below."""
    from matplotlib.figure import Figure  # only a plot needs it

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=True):
        above.plot(values, style, label=name, linewidth=1.2)
    above.set(ylabel="loss, nats a byte", title="the same training on either backend")
    above.legend()
    ours, theirs = losses.values()
    below.plot([a - b for a, b in zip(ours, theirs, strict=True)], color="black", linewidth=0.8)
    below.set(xlabel="step", ylabel="difference", ylim=(-TOLERANCE, TOLERANCE))
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train on the kernels and on the reference.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="write both curves there")
    parser.add_argument("--plot", type=Path, help="draw them there")
    options = parser.parse_args(arguments)
    source = text()
    backends = {"kernels": "cuda" if HAS_KERNELS else "reference", "reference": "reference"}
    losses = {name: train(backend, options.steps, source) for name, backend in backends.items()}
    difference = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    for name, values in losses.items():
        print(f"{name:<10} {backends[name]:<10} loss {values[0]:.3f} to {values[-1]:.3f}")
    print(f"largest difference {difference:.4f}, allowed {TOLERANCE}")
    if options.json:
        report = {
            "schema": 1,
            "date": datetime.now(timezone.utc).date().isoformat(),
            "machine": dataclasses.asdict(describe_machine()),
            "backends": backends,
            "losses": {name: [round(x, 4) for x in values] for name, values in losses.items()},
            "largest_difference": round(difference, 4),
            "tolerance": TOLERANCE,
        }
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in report.items())
        options.json.write_text("{\n" + ",\n".join(lines) + "\n}\n")  # a curve is one line
    if options.plot:
        draw(losses, options.plot)
    return 0 if difference <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())

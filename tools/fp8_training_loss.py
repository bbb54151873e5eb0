"""Trains a small transformer with FP8 attention and with bfloat16, by kernels on a GPU or by the
reference on a CPU, and writes the losses as JSON and as a figure.

    python tools/fp8_training_loss.py -o docs/results/fp8-training.json --plot fp8-training.svg

The task is one that needs attention: the second half of a sequence of random tokens repeats the
first, and the loss is that of the second half. docs/results/README.md
says what the fields mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attngen import fp8  # noqa: E402  # a checkout not installed, too
from tools.reports import write_report  # noqa: E402

SCHEMA = 2
TOKENS, LENGTH, BATCH = 16, 64, 4
LAYERS, HEADS, DIM = 2, 4, 16
WIDTH = HEADS * DIM
AVERAGED = 20  # steps of which the last loss is the mean
HISTORY = 16
BACKENDS = {"cpu": "reference", "cuda": "cuda"}
COLOURS = ("#9a9a9a", "#1b6ca8", "#d9822b", "#3a9a5b", "#a0457e")
Context = Callable[[], AbstractContextManager[None]]


def contexts() -> dict[str, Context]:
    """Ways to train, by their names in the report."""

    def under(recipe: fp8.DelayedScaling | fp8.Float8CurrentScaling) -> Context:
        return lambda: fp8.autocast(recipe=recipe)

    current, delayed = fp8.Float8CurrentScaling(), fp8.DelayedScaling(amax_history_len=HISTORY)
    return {
        "bfloat16": nullcontext,
        "FP8, current scaling": under(current),
        "FP8, delayed scaling": under(delayed),
        "FP8, current scaling, backward in 8 bits": under(replace(current, backward="fp8")),
        "FP8, delayed scaling, backward in 8 bits": under(replace(delayed, backward="fp8")),
    }


class Block(nn.Module):
    """Attention and a network of one hidden layer, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention = fp8.Attention(HISTORY)
        self.back = nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        before_attention, before_network = self.norms
        parts = self.to_qkv(before_attention(x)).unflatten(-1, (3, HEADS, DIM))
        q, k, v = parts.unbind(-3)
        backend = BACKENDS[x.device.type]
        x = x + self.back(self.attention(q, k, v, mask="causal", backend=backend).flatten(-2))
        made: Tensor = self.network(before_network(x))
        return x + made


class Model(nn.Module):
    """Two blocks over tokens and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.out = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        found: Tensor = self.out(self.blocks(self.tokens(tokens) + self.places(places)))
        return found


def batches(seed: int, steps: int) -> list[Tensor]:
    """Tokens of each step, [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    halves = [
        torch.randint(TOKENS, (BATCH, LENGTH // 2), generator=generator) for _ in range(steps)
    ]
    return [torch.cat([half, half], 1) for half in halves]


def train(seed: int, steps: int, context: Context, device: str) -> list[float]:
    """Losses of the second half, a number a step."""
    torch.manual_seed(seed)
    model = Model().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in batches(seed, steps):
        tokens = batch.to(device)
        optimiser.zero_grad()
        with context(), torch.autocast(device, torch.bfloat16):
            scores = model(tokens[:, :-1])
        seen = slice(LENGTH // 2 - 1, None)
        wanted = tokens[:, 1:][:, seen]
        loss = functional.cross_entropy(scores[:, seen].float().flatten(0, 1), wanted.flatten())
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return [round(loss, 4) for loss in torch.stack(losses).tolist()]


def last(losses: Sequence[float]) -> float:
    """The mean of the last steps."""
    return sum(losses[-AVERAGED:]) / len(losses[-AVERAGED:])


def draw(runs: dict[str, list[list[float]]], path: Path) -> None:
    """A figure of the losses, a line a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, seeds) in zip(COLOURS, runs.items(), strict=True):
        for number, losses in enumerate(seeds):
            pairs = zip(*[iter(losses)] * 5, strict=False)
            means = [sum(each) / 5 for each in pairs]
            label = name if not number else None
            axes.plot(
                range(2, 5 * len(means), 5),
                means,
                color=colour,
                label=label,
                linewidth=1,
                alpha=0.8,
            )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_yscale("log")
    axes.legend()
    figure.savefig(path, format="svg", metadata={"Creator": "attngen", "Date": None})


def main() -> None:
    """Train, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--plot", type=Path, help="an SVG figure")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=BACKENDS, default=device)
    asked = parser.parse_args()
    runs: dict[str, list[list[float]]] = {}
    for name, context in contexts().items():
        runs[name] = [
            train(seed, asked.steps, context, asked.device) for seed in range(asked.seeds)
        ]
        print(name, *[f"{last(losses):.4f}" for losses in runs[name]], flush=True)
    who = {"device": asked.device, "backend": BACKENDS[asked.device]}
    write_report(asked.output, SCHEMA, **who, steps=asked.steps, losses=runs)
    if asked.plot:
        draw(json.loads(asked.output.read_text())["losses"], asked.plot)


if __name__ == "__main__":
    main()

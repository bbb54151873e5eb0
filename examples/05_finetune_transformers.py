"""Fine-tune a model of transformers on attngen's kernels: one line changes, and losses do not.

    python examples/05_finetune_transformers.py --model PATH_OR_NAME

Rows of text hold several documents each, which do not see each other: where each begins is said by
`position_ids` alone, and becomes an argument of the call. Without `--model` a small Llama with
random weights learns bytes. The first batch's loss is held to that of the model's own attention.
Without a GPU that has kernels the run is short, on the reference.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from attngen.integrations.transformers import register
from torch import Tensor

HAS_KERNELS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
DEVICE = "cuda" if HAS_KERNELS else "cpu"
DTYPE = torch.bfloat16 if HAS_KERNELS else torch.float32
BATCH, LENGTH, STEPS = (4, 2048, 60) if HAS_KERNELS else (2, 96, 8)
LEARNING_RATE = 1e-3
TOLERANCE = 0.01  # of the first loss
SMALL: dict[str, Any] = {
    **{"vocab_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0},
    **({"hidden_size": 512, "intermediate_size": 1024} if HAS_KERNELS else {}),
    **({} if HAS_KERNELS else {"hidden_size": 64, "intermediate_size": 128}),
}


def load(name: str | None) -> tuple[Any, Any]:
    """The model and what makes numbers of a text."""
    if name is None:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
        return model, lambda text: [*text.encode()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(name)
    return model, lambda text: tokenizer(text)["input_ids"]


def batches(encode: Any, steps: int) -> Iterator[dict[str, Tensor]]:
    """Rows of documents, the standard library's modules, and positions within each."""
    ids: list[int] = []
    places: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(ids) >= steps * BATCH * LENGTH:
            break
        document = encode(path.read_text(encoding="utf-8", errors="replace")[:4000])
        ids += document
        places += range(len(document))
    for step in range(steps):
        begin = step * BATCH * LENGTH
        part = slice(begin, begin + BATCH * LENGTH)
        rows, positions = (
            torch.tensor(x[part], device=DEVICE).view(BATCH, LENGTH) for x in (ids, places)
        )
        begun = positions.diff(dim=1).lt(0).cumsum(1)  # documents that begin within the row
        first = torch.nn.functional.pad(begun == 0, (1, 0), value=True)
        positions = positions - first * positions[:, :1]  # its own first one may have begun before
        yield {
            "input_ids": rows,
            "position_ids": positions,
            "labels": rows.masked_fill(positions == 0, -100),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a checkpoint, or its name; a small random model if none")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model, encode = load(options.model)
    model = model.to(DEVICE, DTYPE).train()
    register(backend="cuda" if HAS_KERNELS else "reference")  # attention, masks and pages
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses: list[float] = []
    for step, batch in enumerate(batches(encode, options.steps)):
        if step == 0:
            with torch.no_grad():
                own = model(**batch, use_cache=False).loss.item()
            model.set_attn_implementation("attngen")  # the line that changes
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    first, *_, last = losses
    print(f"loss {first:.3f} at first ({own:.3f} by the model's own attention), {last:.3f} at last")
    return int(not (abs(first - own) <= TOLERANCE * own and last < first))


if __name__ == "__main__":
    sys.exit(main())

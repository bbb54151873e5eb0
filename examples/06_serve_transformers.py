"""Serve a model of transformers by continuous batching, over its paged cache, on attngen's kernels.

    python examples/06_serve_transformers.py --model PATH_OR_NAME

Requests of different lengths share each step: the library schedules them and hands out blocks of
its cache, and attngen reads keys and values where they lie. Without `--model` a small Llama with
random weights answers. Answers are held to those that the model gives one request at a time with
its own attention. Without a GPU that has kernels the run is short, on the reference.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from attngen.integrations.transformers import register

HAS_KERNELS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
DEVICE = "cuda" if HAS_KERNELS else "cpu"
DTYPE = torch.bfloat16 if HAS_KERNELS else torch.float32
REQUESTS, TOKENS = (32, 128) if HAS_KERNELS else (3, 8)
AGREE = 0.9 if HAS_KERNELS else 1.0  # of all tokens: in 16 bits near ties fall either way
SMALL: dict[str, Any] = {
    **{"vocab_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256, "intermediate_size": 256},
    **{"pad_token_id": 0, "eos_token_id": None, "initializer_range": 0.1},
}


def load(name: str | None) -> tuple[Any, list[list[int]]]:
    """The model, and prompts of growing lengths."""
    lengths = [7 + 11 * n for n in range(REQUESTS)]
    if name is None:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
        return model, [[1 + (7 * n) % 250 for n in range(length)] for length in lengths]
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    text = tokenizer(__doc__ or "")["input_ids"] * REQUESTS
    model = transformers.AutoModelForCausalLM.from_pretrained(name)
    return model, [text[:length] for length in lengths]


def one_by_one(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Answers to each request alone, by the model's own attention."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=DEVICE)
        answer = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        found.append(answer[0, len(prompt) :].tolist())
    return found


def together(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Answers to all requests, as they share steps."""
    config = transformers.GenerationConfig(
        max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(num_blocks=1024, block_size=32)
    found = model.generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=batching
    )
    return [answer.generated_tokens for answer in found.values()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a checkpoint, or its name; a small random model if none")
    options = parser.parse_args(arguments)
    model, prompts = load(options.model)
    model = model.to(DEVICE, DTYPE).eval()
    wanted = one_by_one(model, prompts)
    takes_others = "paged|sdpa" in transformers.AttentionInterface().valid_keys()
    name = "attngen" if takes_others else "sdpa"  # from 5.23 on it batches with its own alone
    register(name, "cuda" if HAS_KERNELS else "reference")
    model.set_attn_implementation(f"paged|{name}" if takes_others else name)
    begun = time.perf_counter()
    found = together(model, prompts)
    taken = time.perf_counter() - begun
    pairs = [
        one == other
        for answers in zip(found, wanted, strict=True)
        for one, other in zip(*answers, strict=True)
    ]
    agree = sum(pairs) / len(pairs)
    print(f"{len(prompts)} requests, {len(pairs) / taken:.0f} tokens a second")
    print(f"{agree:.0%} of the tokens are those of requests alone")
    return int(agree < AGREE)


if __name__ == "__main__":
    sys.exit(main())

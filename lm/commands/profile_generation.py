"""`lm profile --run R`: how soon a checkpoint writes its first token, and how fast the others follow."""

import json as jsonlib
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lm.generation import stream
from lm.hardware import device_name
from lm.model.decoder import Decoder
from lm.pretrained import load_pretrained
from lm.quantities import Count, format_count
from lm.resume import find_checkpoint
from lm.runs import ROOT
from lm.sampling import Sampling

ROUNDS = 5  # after one that is not counted
FORMULAS = {
    "first_token_ms": "from the prompt's ids to the first token: reading the prompt, which fills the cache",
    "tokens_per_second": "of the tokens after the first one, each of which is read alone; one prompt at a time",
}


def profile_generation(
    run: str = "",
    ckpt_path: str | None = None,
    prompt: str = "",
    max_new_tokens: Count = Count(128),
    json: bool = False,
) -> None:
    """Time the generation of a checkpoint's tokens, the likeliest ones, with weights as they are stored.

    Args:
        run: Name of the run.
        ckpt_path: `best`, `last` or a checkpoint folder; the best if not given.
        prompt: What to go on from; the beginning of a document if not given.
        max_new_tokens: How many tokens; fewer where the context is full.
        json: Print one JSON object instead of text.
    """
    path, _ = find_checkpoint(ckpt_path, run, str(ROOT), named=True, command="profile")
    found = measure(path, prompt, max_new_tokens)
    print(jsonlib.dumps(found)) if json else show(found)


def measure(path: Path, prompt: str, max_new_tokens: int) -> dict[str, Any]:
    """Times of the generation, medians.

    Args:
        path: a checkpoint folder.
        prompt: a text.
        max_new_tokens: the most tokens that follow it.

    Raises:
        RequestError: the prompt leaves no room in the context, or there is nothing to generate.
    """
    model = load_pretrained(path)
    ids = model.tokenizer.encode(prompt) or [model.tokenizer.eos_id]
    rounds = [_generate(model.decoder, ids, max_new_tokens) for _ in range(1 + ROUNDS)][1:]
    first = statistics.median(times[0] for times in rounds)
    tokens = len(rounds[0])
    rest = statistics.median(times[-1] - times[0] for times in rounds) if tokens > 1 else None
    return {
        "checkpoint": str(path),
        "device": device_name(model.device),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": model.kernels,
        "prompt_tokens": len(ids),
        "new_tokens": tokens,
        "rounds": ROUNDS,
        "first_token_ms": first * 1e3,
        "tokens_per_second": (tokens - 1) / rest if rest else None,
        "formulas": FORMULAS,
    }


def _generate(decoder: Decoder, prompt: list[int], max_new_tokens: int) -> list[float]:
    """Seconds from the start to each new token; every token is waited for, as the next one follows from it."""
    began = time.perf_counter()
    tokens = stream(decoder, [prompt], max_new_tokens=max_new_tokens, sampling=Sampling(temperature=0))
    return [time.perf_counter() - began for _ in tokens]


def show(found: dict[str, Any]) -> None:
    """The report on standard output."""
    rate = found["tokens_per_second"]
    console = Console(highlight=False)
    console.print(f"{found['checkpoint']}, {found['dtype']}; {found['device']}, {found['threads']} threads")
    console.print(f"the first token: {found['first_token_ms']:.1f} ms after {found['prompt_tokens']} tokens of prompt")
    if rate is not None:
        console.print(
            f"then {format_count(rate)} tokens/s, {1e3 / rate:.2f} ms each, over {found['new_tokens'] - 1} tokens"
        )

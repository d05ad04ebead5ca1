"""`lm generate`: a checkpoint writes on from prompts: as it comes, several together, as JSON, or at a prompt."""

import json as jsonlib
import logging
import random
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from lm.commands.repl import LARGEST_SEED, Repl
from lm.commands.writer import Settings, put, show
from lm.completion import NewText, Written, begun, gather, stream_text
from lm.data.tokenizer import Begin
from lm.decode_step import Step, check_step
from lm.errors import RequestError
from lm.hardware import device_name
from lm.model.compiled import compile_decoder
from lm.pretrained import Pretrained, load_pretrained
from lm.quantities import Count
from lm.resume import chosen_model
from lm.runs import ROOT

log = logging.getLogger(__name__)

Compile = Literal["auto", "none", "inductor", "cuda_graphs"]
STEPS: dict[str, Step] = {"none": "growing", "inductor": "fixed", "cuda_graphs": "recorded"}
TOGETHER = 64  # texts that are written at once, so that the cache of many has room


def generate(
    run: str | None = None,
    ckpt_path: str | None = None,
    prompt: list[str] | None = None,
    prompt_file: Path | None = None,
    max_new_tokens: Count = Count(128),
    temperature: float = 0.8,
    top_k: Count | None = Count(50),
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: list[str] | None = None,
    seed: int | None = None,
    num_samples: Count = Count(1),
    ignore_eos: bool = False,
    begin: Begin = "nothing",
    device: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    compile: Compile = "auto",
    json: bool = False,
    root: str = str(ROOT),
) -> None:
    """Write on from prompts; without any, from standard input, or at a prompt of its own on a terminal.

    Args:
        run: Name of the run, under the root or in the registry; the newest if not given.
        ckpt_path: `best`, `last`, or a folder, also one with a model of others; the best if not given.
        prompt: Texts to go on from; an empty one begins a document.
        prompt_file: A file with more of them, one a line.
        max_new_tokens: The most tokens that follow a prompt.
        temperature: Logits are divided by it; 0 takes the likeliest token always.
        top_k: Choose among this many of the likeliest tokens; `null`: among all.
        top_p: Choose among the fewest tokens whose probabilities add up to this.
        min_p: Leave out tokens with less than this share of the likeliest one's probability.
        repetition_penalty: Above 1, tokens that were there before become less likely.
        stop: Strings before which a text ends, as they are; a shell writes a line end as $'\\n'.
        seed: Of the random numbers; a new one, which is told, if not given.
        num_samples: Texts for each prompt.
        ignore_eos: Write on where a document ends.
        begin: What stands before a prompt: `eos` where it is to be the beginning of a document, or `nothing`.
        device: Where to compute; the GPU if there is one.
        dtype: Of the weights; as they are stored if not given.
        compile: How a step runs: `none`: as it is; `inductor`: compiled, which takes long at first; `cuda_graphs`:
            recorded, on a GPU; `auto`: recorded there, and as it is elsewhere.
        json: Print one JSON object instead of texts.
        root: Folder of the runs.
    """
    settings = Settings(
        max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, tuple(stop or ()), ignore_eos,
        begin,
    )
    if num_samples < 1:
        raise RequestError(f"--num_samples {num_samples} must be at least 1")
    prompts = read_prompts(prompt, prompt_file)
    if prompts is None and json:
        raise RequestError("--json needs something to go on from: give --prompt or --prompt_file, or pipe a text in")
    model = load_pretrained(chosen_model(run, ckpt_path, root), device, dtype and getattr(torch, dtype))
    mode, step = prepare(model, compile)
    if prompts is None:
        Repl(model, settings, step).run()
        return
    settings = replace(settings, seed=random.randrange(LARGEST_SEED) if seed is None else seed)
    check_room(model, prompts, settings)
    prompts = [text for text in prompts for _ in range(num_samples)]
    if len(prompts) == 1 and not json:
        shown = show(model, prompts[0], settings, step)
        log.info("%s", shown.sentence(settings.seed))
        if shown.reason == "Ctrl-C":
            raise KeyboardInterrupt
        return
    began = time.perf_counter()
    written = write(model, prompts, settings, step)
    seconds = time.perf_counter() - began
    if json:
        print(jsonlib.dumps(describe(model, mode, settings, written, seconds), ensure_ascii=False))
        return
    print_all(written)
    tokens = sum(len(one.tokens) for one in written)
    log.info("%d tokens, %.0f tokens/s, seed %d", tokens, tokens / seconds, settings.seed)


def read_prompts(given: list[str] | None, file: Path | None) -> list[str] | None:
    """The texts to go on from; None where a person is to type them.

    Raises:
        RequestError: the file cannot be read, or has none.
    """
    prompts = list(given or [])
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
            prompts += text.removesuffix("\n").split("\n") if text else []
        except (OSError, ValueError) as error:
            raise RequestError(f"--prompt_file {file} cannot be read: {error}") from error
    if given is not None or file is not None:
        if not prompts:
            raise RequestError("no prompt: " + ("--prompt is empty" if file is None else f"{file} has no line"))
        return prompts
    if not sys.stdin.isatty():
        try:
            return [sys.stdin.read().removesuffix("\n")]
        except UnicodeDecodeError as error:
            raise RequestError(f"what is piped in is no UTF-8 text: {error}") from error
    return None


def check_room(model: Pretrained, prompts: list[str], settings: Settings) -> None:
    """Raise RequestError where a prompt leaves no room for a token, before any text is written."""
    context = model.config.max_position_embeddings
    for number, prompt in enumerate(prompts, start=1):
        count = len(begun(model.tokenizer, prompt, settings.begin))
        if count >= context:
            raise RequestError(
                f"prompt {number} of {len(prompts)} has {count} tokens, which leaves no room in the context of "
                f"{context}: shorten it by {count - context + 1} or more"
            )


def prepare(model: Pretrained, compile: Compile) -> tuple[str, Step]:
    """Decide how a step runs, make the decoder ready for it, and say so.

    Raises:
        RequestError: it cannot run so here.
    """
    mode, why = compile, ""
    if compile == "auto" and model.device.type == "cuda":
        mode = "cuda_graphs"
    elif compile == "auto":
        mode, why = "none", " (compiling takes longer here than it saves)"
    check_step(STEPS[mode], model.device)
    if mode == "inductor":
        compile_decoder(model.decoder, "inductor")
    log.info("%s, %s; %s; compile %s%s", device_name(model.device), dtype_name(model), model.kernels, mode, why)
    return mode, STEPS[mode]


def dtype_name(model: Pretrained) -> str:
    """Of the weights."""
    return str(model.dtype).removeprefix("torch.")


def write(model: Pretrained, prompts: list[str], settings: Settings, step: Step) -> list[Written]:
    """All texts, with a bar on a terminal."""
    written: list[Written] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{len(prompts)} texts", total=len(prompts) * settings.max_new_tokens)
        for first in range(0, len(prompts), TOGETHER):
            some = prompts[first : first + TOGETHER]
            options = replace(settings, seed=settings.seed + first).options()
            news = stream_text(model.decoder, model.tokenizer, some, **options, step=step)
            written += gather(some, progress_of(news, progress, task))
    return written


def progress_of(news: Iterable[NewText], progress: Progress, task: TaskID) -> Iterator[NewText]:
    """The same, while the bar moves."""
    for new in news:
        progress.advance(task)
        yield new


def describe(
    model: Pretrained, mode: str, settings: Settings, written: list[Written], seconds: float
) -> dict[str, Any]:
    """All there is to know, for programs."""
    tokens = sum(len(one.tokens) for one in written)
    return {
        "checkpoint": str(model.path), "step": model.step,
        "device": device_name(model.device), "dtype": dtype_name(model),
        "kernels": model.kernels, "compile": mode,
        **settings.described(),
        "samples": [
            {
                "prompt": one.prompt, "text": one.text, "reason": one.reason,
                "token_ids": [token.id for token in one.tokens],
                "tokens": [token.text for token in one.tokens],
                "log_probabilities": [token.log_probability for token in one.tokens],
            }
            for one in written
        ],
        "new_tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds,
    }  # fmt: skip


def print_all(written: list[Written]) -> None:
    """Each text under its prompt."""
    console = Console()
    for number, one in enumerate(written, start=1):
        console.rule(f"{number} of {len(written)}")
        put(one.prompt, "bold")
        put(one.text + "\n")

"""`lm generate`: a checkpoint continues prompts: as the text comes, several at once, as JSON, or interactively."""

import json as jsonlib
import logging
import random
import sys
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from lm.errors import RequestError, require_at_least
from lm.inference.completion import Written, gather_texts, generate_text
from lm.inference.generation import Reason, Sampling, Step, check_step
from lm.inference.pretrained import DTypeName, Pretrained, load_pretrained
from lm.runs.resume import chosen_model
from lm.runs.run import ROOT
from lm.system.hardware import device_name
from lm.system.process import harmless
from lm.system.units import Count

log = logging.getLogger(__name__)

Compile = Literal["auto", "none", "cuda_graphs"]
STEPS: dict[str, Step] = {"none": "dynamic", "cuda_graphs": "cuda_graph"}
TOGETHER = 64  # texts that are written at once, so that their cache fits


@dataclass(frozen=True)
class Settings(Sampling):
    """`Sampling` by the names and with the defaults that the command line has."""

    temperature: float = 0.8
    top_k: Count | None = Count(50)


def with_seed(settings: Settings) -> Settings:
    return replace(settings, seed=random.getrandbits(32) if settings.seed is None else settings.seed)


def main(
    run: str | None = None,
    ckpt_path: str | None = None,
    prompt: list[str] | None = None,
    num_samples: Count = Count(1),
    device: str | None = None,
    dtype: DTypeName | None = None,
    compile: Compile = "auto",
    json: bool = False,
    root: str = str(ROOT),
    **settings: Any,
) -> None:
    """Continue prompts. Without prompts, continue standard input or, on a terminal, ask for one prompt after another.

    Args:
        run: Name under the root or in the registry, or a path; the newest run if not given.
        ckpt_path: `best` (the default), `last`, `auto` (the newest intact one), `step-00000100`, or a model's folder.
        prompt: Texts to continue; an empty one starts a new document.
        num_samples: Number of texts to generate per prompt.
        device: Device to compute on; the GPU if there is one.
        dtype: Data type of the weights; as stored if not given.
        compile: How decoding steps run: `cuda_graphs`: captured as CUDA graphs; `auto`: that on a GPU, else `none`.
        json: Print one JSON object instead of texts.
        root: Folder of the runs.
    """
    chosen = Settings(**settings)
    require_at_least(1, "--", num_samples=num_samples)
    prompts = prompt or ([] if sys.stdin.isatty() else [sys.stdin.read().removesuffix("\n")])
    if json and not prompts:
        raise RequestError("--json needs a prompt: give --prompt, or pipe a text in")
    model = load_pretrained(chosen_model(run, ckpt_path, root), device, dtype)
    mode, step = choose_step(model, compile)
    if not prompts:
        return converse(model, chosen, step)
    chosen = with_seed(chosen)
    prompts = [text for text in prompts for _ in range(num_samples)]
    if len(prompts) == 1 and not json:
        _, summary, reason = stream_to_terminal(model, prompts[0], chosen, step)
        log.info("%s", summary)
        if reason == "Ctrl-C":
            raise KeyboardInterrupt
        return
    written, first_token, seconds = write_texts(model, prompts, chosen, step)
    tokens = sum(len(one.tokens) for one in written)
    if json:
        found = {
            "checkpoint": str(model.path), "step": model.step,
            "device": device_name(model.device), "dtype": dtype_name(model),
            "kernels": model.kernels, "compile": mode,
            **asdict(chosen),
            "samples": [
                {
                    "prompt": one.prompt, "text": one.text, "reason": one.reason,
                    "token_ids": [token.id for token in one.tokens], "tokens": [token.text for token in one.tokens],
                    "log_probabilities": [token.log_probability for token in one.tokens],
                }
                for one in written
            ],
            "new_tokens": tokens, "first_token_seconds": first_token, "seconds": seconds,
            "tokens_per_second": tokens / seconds,
        }  # fmt: skip
        print(jsonlib.dumps(found, ensure_ascii=False))
        return
    console = Console()
    for number, one in enumerate(written, start=1):
        console.rule(f"{number} of {len(written)}")
        print_text(one.prompt, "bold")
        print_text(one.text + "\n")
    log.info("%d tokens, %.0f tokens/s, the first after %.2g s, seed %d", tokens, tokens / seconds,
             first_token or seconds, chosen.seed)  # fmt: skip


def choose_step(model: Pretrained, compile: Compile) -> tuple[str, Step]:
    """Decide how a step runs, prepare the decoder for it, and log the choice."""
    mode = compile
    if compile == "auto":
        mode = "cuda_graphs" if model.device.type == "cuda" else "none"
    check_step(STEPS[mode], model.device)
    log.info("%s, %s; %s; compile %s", device_name(model.device), dtype_name(model), model.kernels, mode)
    return mode, STEPS[mode]


def dtype_name(model: Pretrained) -> str:
    return str(model.dtype).removeprefix("torch.")


# ---- several texts at once -------------------------------------------------------------------------------------------


def write_texts(
    model: Pretrained, prompts: list[str], settings: Settings, step: Step
) -> tuple[list[Written], float | None, float]:
    """Continue all prompts, with a progress bar on a terminal; also the seconds to the first token and to the last."""
    written: list[Written] = []
    console, began, first_token = Console(stderr=True), time.perf_counter(), None
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{len(prompts)} texts", total=len(prompts) * settings.max_new_tokens)
        for first in range(0, len(prompts), TOGETHER):
            some, news = prompts[first : first + TOGETHER], []
            sampling = replace(settings, seed=(settings.seed or 0) + first)
            for new in generate_text(model.decoder, model.tokenizer, some, sampling, step=step):
                first_token = first_token or time.perf_counter() - began
                progress.advance(task)
                news.append(new)
            written += gather_texts(some, news)
    return written, first_token, time.perf_counter() - began


# ---- one text, while it is written -----------------------------------------------------------------------------------


def stream_to_terminal(
    model: Pretrained, prompt: str, settings: Settings, step: Step, begin: str | None = None
) -> tuple[str, str, Reason | Literal["Ctrl-C"] | None]:
    """Write a text to standard output while it comes, after `begin`, which is its prompt if not given.

    It returns the text, its figures in a line, and why it ended.
    """
    began, first_token, text, tokens, reason = time.perf_counter(), None, "", 0, None
    try:
        with closing(generate_text(model.decoder, model.tokenizer, [prompt], settings, step=step)) as news:
            for new in news:
                if first_token is None:  # the prompt was not refused
                    print_text(prompt if begin is None else begin, "bold")
                    first_token = time.perf_counter() - began
                text += new.text
                tokens += new.token is not None
                reason = new.reason
                print_text(new.text)
    except KeyboardInterrupt:  # ends the text alone
        reason = "Ctrl-C"
    print_text("\n")
    seconds = time.perf_counter() - began
    figures = (f"{tokens} tokens, {tokens / seconds:,.0f} tokens/s, the first after {first_token or seconds:.2g} s, "
               f"ended by {reason}, seed {settings.seed}")  # fmt: skip
    return text, figures, reason


def print_text(text: str, style: str | None = None) -> None:
    """Print a text at once, without a line end; control characters are replaced on a terminal."""
    if sys.stdout.isatty():
        shown = Text(harmless(text), style or "", tab_size=8)
        Console(highlight=False).print(shown, end="", soft_wrap=True)
    else:
        sys.stdout.write(text)
    sys.stdout.flush()


# ---- interactive -----------------------------------------------------------------------------------------------------


def converse(model: Pretrained, settings: Settings, step: Step) -> None:
    """Ask for one prompt after the other; an empty one continues the text so far."""
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  it gives `input` a history and keys to edit with
    print("A line is a prompt, and an empty one continues the text so far. Ctrl-C ends a text, Ctrl-D leaves.")
    text = ""
    while True:
        try:
            line = input("> ")
            prompt = line or text
            written, summary, _ = stream_to_terminal(model, prompt, with_seed(settings), step, begin=line)
            text = prompt + written
            print(summary)
        except RequestError as error:  # such as a prompt that fills the context
            print(harmless(str(error)), file=sys.stderr)
        except KeyboardInterrupt:
            print()
        except EOFError:
            return print()

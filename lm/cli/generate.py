"""`lm generate`: a checkpoint continues prompts: as the text comes, several at once, as JSON, or interactively.

With --chat it answers messages, by the chat template that it was trained with.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from lm.cli.model_options import GenerateOptions
from lm.errors import RequestError
from lm.inference.completion import Written, gather_texts, generate_text
from lm.inference.generation import Reason
from lm.inference.pretrained import Pretrained, load_pretrained
from lm.inference.sampling import Sampling
from lm.inference.steps import Step
from lm.runs.resume import chosen_model
from lm.system.hardware import device_name
from lm.system.process import harmless

log = logging.getLogger(__name__)

STEPS: dict[str, Step] = {"none": "dynamic", "cuda_graphs": "cuda_graph"}
TOGETHER = 64  # texts that are written at once, so that their cache fits


def generate(options: GenerateOptions) -> None:
    reads_lines = sys.stdin.isatty() or options.chat
    prompts = options.prompt or ([] if reads_lines else [sys.stdin.read().removesuffix("\n")])
    if options.json and not prompts:
        raise RequestError("--json needs a prompt: give --prompt, or pipe a text in")
    model = load_pretrained(chosen_model(options.run, options.ckpt_path, options.root), options.device, options.dtype)
    mode = {"auto": "cuda_graphs" if model.device.type == "cuda" else "none"}.get(options.compile, options.compile)
    step, dtype = STEPS[mode], str(model.dtype).removeprefix("torch.")
    log.info("%s, %s; %s; compile %s", device_name(model.device), dtype, model.kernels, mode)
    if options.chat:
        return chat(Conversation(model, options, step), prompts)
    if not prompts:
        print("A line is a prompt, and an empty one continues the text so far. Ctrl-C ends a text, Ctrl-D leaves.")
        return converse(Continuation(model, options, step).add)
    sampling = options.sampling
    if len(prompts) > 1 and not any(" " in text for text in prompts):
        log.info("%d prompts; one of several words stands in quotes: --prompt 'The people of'", len(prompts))
    prompts = [text for text in prompts for _ in range(options.num_samples)]
    if len(prompts) == 1 and not options.json:
        _, summary, reason = stream_to_terminal(model, prompts[0], sampling, step)
        log.info("%s", summary)
        if reason == "Ctrl-C":
            raise KeyboardInterrupt
        return
    written, first_token, seconds = write_texts(model, prompts, sampling, step)
    tokens = sum(len(one.tokens) for one in written)
    if options.json:
        about = {"checkpoint": str(model.path), "step": model.step, "device": device_name(model.device)}
        about |= {"dtype": dtype, "kernels": model.kernels, "compile": mode, **asdict(sampling)}
        speed = {"first_token_seconds": first_token, "seconds": seconds, "tokens_per_second": tokens / seconds}
        samples = [describe_text(one) for one in written]
        print(json.dumps({**about, "samples": samples, "new_tokens": tokens, **speed}, ensure_ascii=False))
        return
    console = Console()
    for number, one in enumerate(written, start=1):
        console.rule(f"{number} of {len(written)}")
        print_text(one.prompt, "bold")
        print_text(one.text + "\n")
    first = first_token or seconds
    log.info(
        "%d tokens, %.0f tokens/s, the first after %.2g s, seed %d", tokens, tokens / seconds, first, sampling.seed
    )


def describe_text(written: Written) -> dict[str, Any]:
    """A text with its tokens, as `lm generate --json` prints it."""
    text = {"prompt": written.prompt, "text": written.text, "reason": written.reason}
    columns = {"token_ids": "id", "tokens": "text", "log_probabilities": "log_probability"}
    return text | {name: [getattr(token, field) for token in written.tokens] for name, field in columns.items()}


# ---- several texts at once -------------------------------------------------------------------------------------------


def write_texts(
    model: Pretrained, prompts: list[str], sampling: Sampling, step: Step
) -> tuple[list[Written], float | None, float]:
    """Continue all prompts, with a progress bar on a terminal; also the seconds to the first token and to the last."""
    written: list[Written] = []
    console, began, first_token = Console(stderr=True), time.perf_counter(), None
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{len(prompts)} texts", total=len(prompts) * sampling.max_new_tokens)
        for first in range(0, len(prompts), TOGETHER):
            some, news = prompts[first : first + TOGETHER], []
            seeded = replace(sampling, seed=(sampling.seed or 0) + first)
            for new in generate_text(model.decoder, model.tokenizer, some, seeded, step=step):
                first_token = first_token or time.perf_counter() - began
                progress.advance(task)
                news.append(new)
            written += gather_texts(some, news)
    return written, first_token, time.perf_counter() - began


# ---- one text, while it is written -----------------------------------------------------------------------------------


def stream_to_terminal(
    model: Pretrained, prompt: str | list[int], sampling: Sampling, step: Step, begin: str | None = None
) -> tuple[str, str, Reason | Literal["Ctrl-C"] | None]:
    """Write a text to standard output while it comes, after `begin`, which is its prompt if not given.

    A prompt of ids needs `begin`. It returns the text, its figures in a line, and why it ended.
    """
    began, first_token, text, tokens, reason = time.perf_counter(), None, "", 0, None
    try:
        with closing(generate_text(model.decoder, model.tokenizer, [prompt], sampling, step=step)) as news:
            for new in news:
                if first_token is None:  # the prompt was not refused
                    print_text(str(prompt) if begin is None else begin, "bold")
                    first_token = time.perf_counter() - began
                text += new.text
                tokens += new.token is not None
                reason = new.reason
                print_text(new.text)
    except KeyboardInterrupt:  # ends the text alone
        reason = "Ctrl-C"
    print_text("\n")
    seconds = time.perf_counter() - began
    speed = f"{tokens / seconds:,.0f} tokens/s, the first after {first_token or seconds:.2g} s"
    return text, f"{tokens} tokens, {speed}, ended by {reason}, seed {sampling.seed}", reason


def print_text(text: str, style: str | None = None) -> None:
    """Print a text at once, without a line end; control characters are replaced on a terminal."""
    if sys.stdout.isatty():
        shown = Text(harmless(text), style or "", tab_size=8)
        Console(highlight=False).print(shown, end="", soft_wrap=True)
    else:
        sys.stdout.write(text)
    sys.stdout.flush()


# ---- interactive -----------------------------------------------------------------------------------------------------


class Continuation:
    """A text that grows by prompts and what the model writes after them."""

    def __init__(self, model: Pretrained, options: GenerateOptions, step: Step) -> None:
        self.model, self.options, self.step, self.text = model, options, step, ""

    def add(self, line: str) -> str:
        """Continue a prompt, or the text so far if it is empty; returns the figures in a line."""
        prompt = line or self.text
        written, summary, _ = stream_to_terminal(self.model, prompt, self.options.sampling, self.step, begin=line)
        self.text = prompt + written
        return summary


def converse(reply: Callable[[str], str]) -> None:
    """Reply to one line after the other, and print the figures that it returns."""
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  it gives `input` a history and keys to edit with
    while True:
        try:
            print(reply(input("> ")))
        except RequestError as error:  # such as a prompt that fills the context
            print(harmless(str(error)), file=sys.stderr)
        except KeyboardInterrupt:
            print()
        except EOFError:
            return print()


# ---- answers to messages ---------------------------------------------------------------------------------------------


class Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(self, model: Pretrained, options: GenerateOptions, step: Step) -> None:
        from lm.data.chat import ChatTemplate

        self.model, self.options, self.step = model, options, step
        try:
            self.template = ChatTemplate(model.tokenizer)
        except RequestError as error:
            raise RequestError(f"{model.path}: {error}") from error
        self.messages: list[dict[str, str]] = []

    def answer(self, message: str) -> str:
        """Write the answer to a message, of which an empty one begins anew; returns the figures in a line."""
        if not message:
            self.messages = []
            return "a new conversation"
        messages = [*self.messages, {"role": "user", "content": message}]
        prompt, sampling = self.template.encode_prompt(messages), self.options.sampling
        if end := self.template.end_of_answer:
            sampling = replace(sampling, stop=[*sampling.stop, end])
        text, summary, reason = stream_to_terminal(self.model, prompt, sampling, self.step, begin="")
        if reason == "Ctrl-C" and (self.options.prompt or not sys.stdin.isatty()):
            raise KeyboardInterrupt
        self.messages = [*messages, {"role": "assistant", "content": text}]
        return summary


def chat(conversation: Conversation, prompts: list[str]) -> None:
    """Answer prompts one after the other; without any, the lines of a terminal or of a pipe."""
    if not prompts and sys.stdin.isatty():
        print("A line is a message, and an empty one begins anew. Ctrl-C ends an answer, Ctrl-D leaves.")
        return converse(conversation.answer)
    for line in prompts or map(str.rstrip, sys.stdin):
        log.info("%s", conversation.answer(line))

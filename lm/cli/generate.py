"""`lm generate`: a checkpoint writes on from prompts: as it comes, several together, as JSON, or at a prompt."""

import difflib
import json as jsonlib
import logging
import random
import signal
import sys
import threading
import time
import typing
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.text import Text

from lm.data.tokenizer import Begin
from lm.errors import LmError, RequestError
from lm.inference.completion import NewText, Written, begun, gather, stream_text
from lm.inference.generation import Reason, Sampling, Step, check_step
from lm.inference.pretrained import Pretrained, load_pretrained
from lm.model.compile import compile_decoder
from lm.runs.resume import chosen_model
from lm.runs.run import ROOT
from lm.system.hardware import device_name
from lm.system.process import harmless
from lm.system.units import Count, parse_count

# ---- writer ----------------------------------------------------------------------------------------------------------
# What `lm generate` and its prompt share: the settings that a person can give, and a text that appears as it is
# written.

MOST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Settings:
    """How to write, by the names that the command line has.

    Raises:
        RequestError: a number means nothing.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    begin: Begin = "nothing"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens {self.max_new_tokens} must be at least 1")
        if self.seed is not None and not 0 <= self.seed <= MOST_SEED:
            raise RequestError(f"seed {self.seed} must lie in 0 to {MOST_SEED}")
        self.sampling()

    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)

    def options(self) -> dict[str, Any]:
        """The arguments of `stream_text`."""
        names = ("max_new_tokens", "seed", "stop", "ignore_eos", "begin")
        return {"sampling": self.sampling(), **{name: getattr(self, name) for name in names}}

    def described(self) -> dict[str, Any]:
        """Names and values."""
        return asdict(self)


@dataclass
class Shown:
    """What was written and shown."""

    text: str
    tokens: int
    reason: Reason | Literal["Ctrl-C"] | None
    seconds: float

    def sentence(self, seed: int) -> str:
        """For people."""
        rate = f"{self.tokens / self.seconds:,.0f} tokens/s" if self.seconds else "at once"
        return f"{self.tokens} tokens, {rate}, ended by {self.reason}, seed {seed}"


def show(model: Pretrained, prompt: str, settings: Settings, step: Step, begin: str | None = None) -> Shown:
    """Write a text to standard output while it comes, after its prompt.

    Args:
        model: that writes it.
        prompt: what it goes on from.
        settings: how.
        step: how the decoder is run.
        begin: what to show before it; the prompt if not given.

    Returns:
        What was written, also where Ctrl-C ended it.
    """
    began, shown = time.perf_counter(), Shown("", 0, None, 0.0)
    news: Iterator[NewText] = stream_text(model.decoder, model.tokenizer, [prompt], **settings.options(), step=step)
    put(prompt if begin is None else begin, "bold")
    with closing(news), interruptible() as interrupted:
        for new in news:
            put(new.text)
            shown.text += new.text
            shown.tokens += new.token is not None
            shown.reason = "Ctrl-C" if interrupted.is_set() else new.reason
            if shown.reason is not None:
                break
    put("\n")
    shown.seconds = time.perf_counter() - began
    return shown


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """While it lasts, the first Ctrl-C sets the event, so that what is under way ends in order; the next one raises."""
    asked, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def put(text: str, style: str | None = None) -> None:
    """Print a text at once, and nothing after it: as it is, but for signs that would confuse a terminal."""
    if sys.stdout.isatty():
        shown = Text(harmless(text), style or "", tab_size=8)
        Console(highlight=False).print(shown, end="", soft_wrap=True)
    else:
        sys.stdout.write(text)
    sys.stdout.flush()


# ---- repl ------------------------------------------------------------------------------------------------------------
# A prompt on the terminal: a line goes in, what the model makes of it comes out, and settings change in between.

log = logging.getLogger(__name__)

HELP = """A line is a prompt, and the model goes on from it. An empty line goes on with the text that is there.
  {names}
                 shows a setting; with a value after it, such as /temperature 0.7 or /top_k none, changes it
  /settings      shows all of them
  /reset         forgets the text and puts the settings back
  /quit          leaves, as Ctrl-D does
  /help          shows this
Ctrl-C ends a text, Ctrl-D leaves."""
LARGEST_SEED = 2**32


class Repl:
    """Reads lines until the input ends.

    Args:
        model: that writes.
        settings: to begin with.
        step: how the decoder is run.
    """

    def __init__(self, model: Pretrained, settings: Settings, step: Step) -> None:
        self.model, self.step = model, step
        self.settings = self.given = settings
        self.text = ""

    def run(self) -> None:
        """Read and write, until Ctrl-D."""
        try:
            import readline  # noqa: F401  it gives `input` a history and keys to edit with
        except ImportError:  # not on every system
            pass
        print("A line is a prompt. /help tells more; Ctrl-D leaves.")
        while True:
            try:
                line = input("> ")
                self.command(line[1:]) if line.startswith("/") else self.write(line)
            except LmError as error:
                print(harmless(str(error)), file=sys.stderr)
            except KeyboardInterrupt:
                print()
            except EOFError:
                print()
                return
            except UnicodeDecodeError as error:
                print(f"this is no UTF-8 text: {error}", file=sys.stderr)

    def write(self, line: str) -> None:
        """Go on from a line; from all that is there where it is empty."""
        seed = self.settings.seed
        seed = random.randrange(LARGEST_SEED) if seed is None else seed
        prompt = line or self.text
        shown = show(self.model, prompt, replace(self.settings, seed=seed), self.step, begin=line)
        self.text = prompt + shown.text
        print(shown.sentence(seed))

    def command(self, line: str) -> None:
        """Do what stands after a slash.

        Raises:
            RequestError: there is no such command, or its value means nothing.
        """
        name, _, value = line.partition(" ")
        names = list(self.settings.described())
        if name in ("quit", "exit"):
            raise EOFError
        if name == "help":
            print(HELP.format(names=" ".join("/" + name for name in names)))
        elif name == "settings":
            for each in names:
                self._tell(each)
        elif name == "reset":
            self.settings, self.text = self.given, ""
        elif name in names:
            if value.strip():
                value = value if name == "stop" else value.strip()
                self.settings = replace(self.settings, **{name: _read(name, value)})
            self._tell(name)
        else:
            close = difflib.get_close_matches(name, [*names, "help", "settings", "reset"], 1)
            hint = f"did you mean /{close[0]}?" if close else "/help lists them"
            raise RequestError(f"there is no /{name}; {hint}")

    def _tell(self, name: str) -> None:
        value = getattr(self.settings, name)
        print(f"{name} {'none' if value in (None, ()) else value}")


def _read(name: str, value: str) -> Any:
    """A setting's value from what a person typed.

    Raises:
        RequestError: it is of another kind.
    """
    kind = typing.get_type_hints(Settings)[name]
    if value.lower() in ("none", "null") and type(None) in typing.get_args(kind):
        return None
    if name == "stop":
        return () if value.lower() == "none" else (value.replace("\\n", "\n").replace("\\t", "\t"),)
    if typing.get_origin(kind) is typing.Literal:
        if value not in typing.get_args(kind):
            raise RequestError(f"{name} {value!r}: give one of {', '.join(typing.get_args(kind))}")
        return value
    if kind is bool:
        if value.lower() not in ("true", "false", "yes", "no", "on", "off"):
            raise RequestError(f"{name} {value!r}: give true or false")
        return value.lower() in ("true", "yes", "on")
    try:
        return float(value) if float in (kind, *typing.get_args(kind)) else int(parse_count(value))
    except ValueError as error:
        raise RequestError(f"{name} {value!r} is no number that it can be") from error


# ---- generate --------------------------------------------------------------------------------------------------------

Compile = Literal["auto", "none", "inductor", "cuda_graphs"]
STEPS: dict[str, Step] = {"none": "dynamic", "inductor": "static", "cuda_graphs": "cuda_graph"}
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

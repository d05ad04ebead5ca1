"""What `lm generate` and its prompt share: the settings that a person can give, and a text that appears as it is
written.
"""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from lm.completion import NewText, stream_text
from lm.data.tokenizer import Begin
from lm.decode_step import Step
from lm.errors import RequestError
from lm.generation import Reason
from lm.pretrained import Pretrained
from lm.sampling import Sampling
from lm.terminal import harmless

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

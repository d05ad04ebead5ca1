"""Completion: text in, text out. `inference/generation` continues tokens; here tokens become text, piece by piece.

A piece is yielded as soon as no later token can change it: it is complete characters that cannot begin a
stop string.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lm.data.tokenizer import Begin, Tokenizer
from lm.inference.generation import Reason, generate
from lm.inference.sampling import Sampling
from lm.inference.steps import Step
from lm.model.decoder import Decoder

BROKEN = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are not a character, or an incomplete one


class Token(NamedTuple):
    id: int
    text: str  # text that it added; empty if it ended within a character, whose text comes with its last token
    log_probability: float  # nats, by the model's own distribution: at temperature 1, before any filter


class NewText(NamedTuple):
    """The text that one step added to a prompt."""

    row: int  # index of the prompt
    text: str  # may be empty
    reason: Reason | None  # why the row ended; None: more follows
    token: Token | None  # the generated token; None: the one that ends a document


class Written(NamedTuple):
    prompt: str
    text: str  # the continuation, without the stop string
    tokens: list[Token]  # without the token that ends a document, with those of a stop string
    reason: Reason  # end of a document, a stop string, `max_new_tokens` reached, or the context is full


def generate_text(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str | list[int]],
    sampling: Sampling = Sampling(),
    step: Step = "dynamic",
) -> Iterator[NewText]:
    """Continue texts, or their ids, by `generation.generate`; for each token, yield the text that is final with it."""
    ids = [encode_prompt(tokenizer, prompt, sampling.begin) for prompt in prompts]
    texts = [GrowingText(tokenizer, prompt, sampling.stop) for prompt in ids]
    eos_id = None if sampling.ignore_eos else tokenizer.eos_id

    def ended(row: int, token: int) -> bool:
        return texts[row].add(token)

    size = tokenizer.vocab_size
    for new in generate(decoder, ids, sampling, eos_id=eos_id, vocab_size=size, ended=ended, step=step):
        text = texts[new.row]
        final = text.take(over=new.reason is not None)
        token = None if new.reason == "eos" else Token(new.token, text.piece, new.log_probability)
        yield NewText(new.row, final, new.reason, token)


def gather_texts(prompts: Sequence[str], news: Iterable[NewText]) -> list[Written]:
    texts: list[list[NewText]] = [[] for _ in prompts]
    for new in news:
        texts[new.row].append(new)
    return [
        Written(prompt, "".join(new.text for new in row), [new.token for new in row if new.token], row[-1].reason)
        for prompt, row in zip(prompts, texts, strict=True)
    ]


def encode_prompt(tokenizer: Tokenizer, prompt: str | list[int], begin: Begin = "nothing") -> list[int]:
    """Encode a prompt to at least one id: an empty prompt begins a document."""
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return [tokenizer.eos_id, *ids] if begin == "eos" or not ids else ids


class GrowingText:
    """The text that tokens add to a prompt, one token at a time.

    Tokens are decoded together with earlier ones, because some tokenizers write a blank before a word only if
    something precedes it; the tokens since the last complete character but one suffice. The prompt has at
    least one token, and the text ends before any of the strings `stop`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.text = ""  # the text up to the last complete character
        self.piece = ""  # the text that the newest token added
        self.returned = 0  # number of characters that `take` has returned
        self.stop_at: int | None = None  # index of the first stop string
        self.complete = list(prompt)  # tokens up to a complete character ...
        self.shown = tokenizer.decode(self.complete)  # ... and their text
        self.pending: list[int] = []  # tokens after these, which end within a character

    def add(self, token: int) -> bool:
        """Add a token; returns whether the text now contains a stop string."""
        self.pending, self.piece = [*self.pending, token], ""
        decoded = self.tokenizer.decode(self.complete + self.pending)
        if not decoded.endswith(BROKEN):
            self._append(decoded[len(self.shown) :])
            self.complete, self.pending = self.pending, []
            self.shown = self.tokenizer.decode(self.complete)
        return self.stop_at is not None

    def take(self, over: bool) -> str:
        """Return the text that is final and was not returned before; if `over`, all that is left."""
        if over and self.pending and self.stop_at is None:
            self._append(self.tokenizer.decode(self.pending))
        end = len(self.text) if self.stop_at is None else self.stop_at
        if not over:
            end -= self._possible_stop()
        returned, self.returned = self.text[self.returned : end], max(self.returned, end)
        return returned

    def _append(self, piece: str) -> None:
        self.piece = piece
        longest = max(map(len, self.stop), default=0)
        start = max(0, len(self.text) - longest + 1)
        self.text += piece
        places = [place for stop in self.stop if (place := self.text.find(stop, start)) >= 0]
        if places and self.stop_at is None:
            self.stop_at = min(places)

    def _possible_stop(self) -> int:
        """Number of characters at the end that may begin a stop string."""
        lengths = (length for stop in self.stop for length in range(1, len(stop)) if self.text.endswith(stop[:length]))
        return max(lengths, default=0)

"""Tokenizers that `lm data prepare` learns from its texts: `bpe` and `char`."""

import sys
import threading
from collections.abc import Callable, Iterable
from itertools import takewhile

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lm.data.tokenizer import END_OF_TEXT, UNKNOWN, Tokenizer, tokenizer_of_characters
from lm.errors import RequestError
from lm.system.process import reader_pool

# A word with the sign or blank before it, up to three digits, runs of signs, line ends, blanks: as in GPT-4. Written as
# in Llama 3, by which other programs know it.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
MAX_RUN = 256  # characters of a word in training, which takes the square of its length; text has no longer ones


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2); decoding restores any text exactly.

    There are fewer than `vocab_size` tokens if the texts have too few pairs to merge. The first is `<|endoftext|>`.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise RequestError(f"--vocab_size {vocab_size} has no room for 256 bytes and {END_OF_TEXT}: at least 257")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=int(vocab_size),
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=sys.stderr.isatty(),
    )
    backend.pre_tokenizer = split_words(WORDS.replace("+", f"{{1,{MAX_RUN}}}").replace("*", f"{{0,{MAX_RUN}}}"))
    _wait_for(lambda stopped: backend.train_from_iterator(takewhile(lambda _: not stopped.is_set(), texts), trainer))
    backend.pre_tokenizer = split_words(WORDS)
    return Tokenizer(backend.to_str(pretty=True))


def split_words(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Splits a text into words by regular expressions in turn, and spells them in bytes."""
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])


def _wait_for(train: Callable[[threading.Event], None]) -> None:
    """Call a function in a thread, since Ctrl-C does not end one that is not in Python; it gets an event of the end."""
    stopped, pool = threading.Event(), reader_pool(1)
    future = pool.submit(train, stopped)
    pool.shutdown(wait=False)
    try:
        future.result()
    finally:
        stopped.set()


def train_char(texts: Iterable[str]) -> Tokenizer:
    """Make a tokenizer with a token for each character, in Unicode's order, after `<|endoftext|>` and `<|unknown|>`."""
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    return tokenizer_of_characters(
        {token: number for number, token in enumerate((END_OF_TEXT, UNKNOWN, *sorted(characters)))}
    )

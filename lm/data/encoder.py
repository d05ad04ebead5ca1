"""A fast encoder of large texts, for `data/encode`: the ids of `data/tokenizer.Tokenizer.encode`.

`Encoder` computes the ids of `tokenizers` several times faster. A byte-level BPE cuts a text into words by a regular
expression and encodes each word independently, so a word needs to be tokenized only once: Python's `re` finds the
words, and a table has their ids. Python's Unicode categories differ from those of `tokenizers`. So they
are read from `tokenizers` when an encoder is made, and both are compared on all short texts over characters of every
kind and on many longer ones. A tokenizer of characters is a table from code points to ids. All other tokenizers and
texts use `tokenizers`.
"""

import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, product

import numpy as np
from tokenizers import Regex, pre_tokenizers

from lm.data.tokenizer import Tokenizer

MAX_WORDS = 500_000  # some hundred bytes each; a text in all languages has more
MAX_WORD_LENGTH = 64  # characters
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# At least one of every kind that a pattern can distinguish: letters of contractions, a letter that folds to such a one,
# digits, blanks, line ends, signs, a combining mark.
KINDS = "sLé\u017f\u4e001\u0663\u00b2 \t\n\r\u0085\u3000'._\u0301"
BLANK = r"\s"
BEYOND = re.compile("[\U00010000-\U0010ffff]")  # their categories would make the expression slow; such texts are rare


def id_type(vocab_size: int) -> np.dtype:
    """The smallest dtype of shards that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class Encoder:
    """Encodes texts to ids, uint16 or uint32, with any tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.dtype = id_type(tokenizer.vocab_size)
        self._codes = _code_table(tokenizer, self.dtype)
        self._find = None if self._codes is not None else _word_finder(tokenizer)
        self._words = _Words(tokenizer, self.dtype)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, equal to those of `Tokenizer.encode`."""
        if self._codes is not None:
            return [self._codes[np.frombuffer(text.encode("utf-32-le"), "<u4")] for text in texts]
        if self._find is None:
            return [np.array(ids, self.dtype) for ids in self.tokenizer.encode_batch(texts)]
        return [self._join(text, self._find) for text in texts]

    def _join(self, text: str, find: Callable[[str], list[str]]) -> np.ndarray:
        if not text.isascii() and BEYOND.search(text):
            return np.array(self.tokenizer.encode(text), self.dtype)
        return np.frombuffer(b"".join(map(self._words.__getitem__, find(text))), self.dtype)


class _Words(dict):
    """Word -> the bytes of its ids; a missing word is tokenized by the model and added."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype) -> None:
        super().__init__()
        self.model = tokenizer.encoder.model
        self.dtype = dtype
        self.alphabet = byte_alphabet()

    def __missing__(self, word: str) -> bytes:
        spelled = word.encode().decode("latin-1").translate(self.alphabet)
        ids = np.array([token.id for token in self.model.tokenize(spelled)], self.dtype).tobytes()
        if len(self) >= MAX_WORDS:
            self.clear()
        if len(word) <= MAX_WORD_LENGTH:
            self[word] = ids
        return ids


def byte_alphabet() -> dict[int, str]:
    """The character that stands for each byte in GPT-2's vocabulary: itself if visible, otherwise one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)}


def _code_table(tokenizer: Tokenizer, dtype: np.dtype) -> np.ndarray | None:
    """Table from code points to ids, if the tokenizer is one of single characters; otherwise None."""
    model = tokenizer.description["model"]
    unknown = tokenizer.vocabulary.get(model.get("unk_token"))
    plain = _is_plain_bpe(tokenizer, "merges", "fuse_unk", "byte_fallback")
    if not plain or tokenizer.description.get("pre_tokenizer") or unknown is None:
        return None
    table = np.full(0x110000, unknown, dtype)
    for token, number in model["vocab"].items():
        if len(token) == 1:
            table[ord(token)] = number
    return table


def _word_finder(tokenizer: Tokenizer) -> Callable[[str], list[str]] | None:
    """A function that splits a text into the words that a byte-level tokenizer encodes separately; None if unknown."""
    pattern = _pattern(tokenizer.description.get("pre_tokenizer") or {}) if _is_plain_bpe(tokenizer) else None
    expression = None if pattern is None else translate(pattern)
    return expression.findall if expression and _finds_same_words(expression.findall, tokenizer) else None


def _is_plain_bpe(tokenizer: Tokenizer, *options: str) -> bool:
    """Whether it is a BPE without a normalizer or these options, whose added tokens are all special.

    Other added tokens would be cut out of a text before its words are found.
    """
    model, added = tokenizer.description["model"], tokenizer.backend.get_added_tokens_decoder().values()
    options = (*options, "continuing_subword_prefix", "end_of_word_suffix")
    plain = model.get("type") == "BPE" and not any(model.get(option) for option in options)
    return plain and not tokenizer.description.get("normalizer") and all(token.special for token in added)


def _pattern(step: dict) -> str | None:
    """The regular expression of a byte-level pre-tokenizer: GPT-2's, or that of a split before the byte alphabet."""
    if step.get("type") == "ByteLevel" and step.get("use_regex", True) and not step["add_prefix_space"]:
        return GPT2_WORDS
    parts = step.get("pretokenizers", [])
    if [part["type"] for part in parts] != ["Split", "ByteLevel"]:
        return None
    split, spell = parts
    plain = not spell.get("use_regex", True) and not spell["add_prefix_space"]
    isolated = split["behavior"] == "Isolated" and not split["invert"]
    return split["pattern"].get("Regex") if plain and isolated else None


def _finds_same_words(find: Callable[[str], list[str]], tokenizer: Tokenizer) -> bool:
    """Whether `find` gives the words of `tokenizers` for all texts of up to three of KINDS, and longer random ones."""
    draw = random.Random(0)
    runs = ("".join(sign * draw.randint(1, 9) for sign in draw.choices(KINDS, k=12)) for _ in range(500))
    short = ("".join(signs) for length in (1, 2, 3) for signs in product(KINDS, repeat=length))
    alphabet, cut = byte_alphabet(), tokenizer.backend.pre_tokenizer.pre_tokenize_str
    return all(
        [word.encode().decode("latin-1").translate(alphabet) for word in find(text)] == [word for word, _ in cut(text)]
        for text in chain(short, runs)
    )


def translate(pattern: str) -> re.Pattern[str] | None:
    r"""Translate a pattern of Oniguruma to `re`, with `\p{..}` and `\s` spelled out; None if it uses more than that."""
    parts, inside = [], False
    for sign in re.findall(r"\\p\{\w+\}|\\.|\[|\]|[^\\\[\]]", pattern, re.DOTALL):
        category = sign.startswith(r"\p") or sign == BLANK
        if category and inside:
            sign = _ranges(sign)
        elif category:
            sign = f"[{_ranges(sign)}]"
        elif sign == r"\S" and not inside:
            sign = f"[^{_ranges(BLANK)}]"
        elif sign in "^$" and not inside or sign in "[]" and inside == (sign == "["):
            return None  # line ends that differ, or a set in a set
        elif sign[0] == "\\" and sign[1:].isalnum() and sign[1:] not in "rnt":
            return None  # an unknown class
        inside = inside + (sign == "[") - (sign == "]")
        parts.append(sign)
    try:
        return re.compile("".join(parts))
    except re.error:
        return None


@cache
def _ranges(category: str) -> str:
    """The characters of a category of `tokenizers`, as ranges inside `[]`."""
    plane = "".join(chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000)
    others = pre_tokenizers.Split(Regex(f"[^{category}]+"), "removed")
    runs = [run for run, _ in others.pre_tokenize_str(plane)]
    return "".join(f"{re.escape(run[0])}-{re.escape(run[-1])}" for run in runs)

"""Much text to token ids, several times faster than `tokenizers` and with the same ids.

Where `data/prepare` spends its time. A byte-level BPE cuts a text into words by a regular expression and then treats
each word alone, so a word needs to be tokenized only once: the words are found by Python's `re`, and their ids kept in
a table. Python does not know Unicode's categories as `tokenizers` does, so the categories are asked of `tokenizers`
when an encoder is made, and both are compared on all short texts over signs of every kind and on many longer ones. A
tokenizer of characters is one table from code points to ids. Whatever is not surely equal goes through `tokenizers`.
"""

import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, product

import numpy as np
from tokenizers import Regex, pre_tokenizers

from lm.data.tokenizer import Tokenizer

KEPT_WORDS = 500_000  # some hundred bytes each; a text in all languages has more
LONGEST_KEPT = 64  # characters
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# One or more of every kind that a pattern can tell apart: letters of contractions, a letter that folds to one of them,
# digits, blanks, line ends, signs, a combining mark.
KINDS = "sLé\u017f\u4e001\u0663\u00b2 \t\n\r\u0085\u3000'._\u0301"
BLANK = r"\s"
BEYOND = re.compile("[\U00010000-\U0010ffff]")  # their categories would make the expression slow; such texts are rare


def id_type(vocab_size: int) -> np.dtype:
    """The smallest type of our shards that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class Encoder:
    """Texts to ids.

    Args:
        tokenizer: of any kind.

    Attributes:
        dtype: of the ids, uint16 or uint32.
        way: "words", "characters" or "tokenizers": how texts are encoded.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.dtype = id_type(tokenizer.vocab_size)
        self._codes = _code_table(tokenizer, self.dtype)
        self._find = None if self._codes is not None else _word_finder(tokenizer)
        self._words = _Words(tokenizer, self.dtype)
        self.way = "characters" if self._codes is not None else "words" if self._find else "tokenizers"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, equal to those of `Tokenizer.encode`."""
        if self._codes is not None:
            return [self._codes[np.frombuffer(text.encode("utf-32-le"), "<u4")] for text in texts]
        if self._find is None:
            return [np.array(ids, self.dtype) for ids in self.tokenizer.encode_batch(texts)]
        return [self._join(text) for text in texts]

    def _join(self, text: str) -> np.ndarray:
        if not text.isascii() and BEYOND.search(text):
            return np.array(self.tokenizer.encode(text), self.dtype)
        return np.frombuffer(b"".join(map(self._words.__getitem__, self._find(text))), self.dtype)


class _Words(dict):
    """Word -> the bytes of its ids; one that is not there yet is tokenized by the model itself."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype) -> None:
        super().__init__()
        self.model = tokenizer.backend.model
        self.dtype = dtype
        self.alphabet = byte_alphabet()

    def __missing__(self, word: str) -> bytes:
        spelled = word.encode().decode("latin-1").translate(self.alphabet)
        ids = np.array([token.id for token in self.model.tokenize(spelled)], self.dtype).tobytes()
        if len(self) >= KEPT_WORDS:
            self.clear()
        if len(word) <= LONGEST_KEPT:
            self[word] = ids
        return ids


def byte_alphabet() -> dict[int, str]:
    """The character that stands for each byte in GPT-2's vocabulary: itself if it is visible, else one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte if byte in visible else 256 + hidden.index(byte)) for byte in range(256)}


def _code_table(tokenizer: Tokenizer, dtype: np.dtype) -> np.ndarray | None:
    """Id of every code point, if the tokenizer is one of single characters."""
    about, model = tokenizer.description, tokenizer.description["model"]
    plain = not any(about.get(step) for step in ("normalizer", "pre_tokenizer")) and _only_special_added(tokenizer)
    unknown = tokenizer.vocabulary.get(model.get("unk_token"))
    options = ("merges", "fuse_unk", "byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or any(model.get(option) for option in options) or not plain or unknown is None:
        return None
    table = np.full(0x110000, unknown, dtype)
    for token, number in model["vocab"].items():
        if len(token) == 1:
            table[ord(token)] = number
    return table


def _word_finder(tokenizer: Tokenizer) -> Callable[[str], list[str]] | None:
    """A function that cuts a text into the words that a byte-level tokenizer treats alone, if there is one."""
    about, model = tokenizer.description, tokenizer.description["model"]
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or any(model.get(option) for option in options) or about.get("normalizer"):
        return None
    pattern = _pattern(about.get("pre_tokenizer") or {})
    expression = None if pattern is None or not _only_special_added(tokenizer) else translate(pattern)
    if expression is None or not _cuts_alike(expression.findall, tokenizer):
        return None
    return expression.findall


def _only_special_added(tokenizer: Tokenizer) -> bool:
    """Tokens that were added and are not special are cut out of a text before its words are found."""
    return all(token.special for token in tokenizer.backend.get_added_tokens_decoder().values())


def _pattern(step: dict) -> str | None:
    """The expression of a byte-level pre-tokenizer that is GPT-2's, or one split followed by the byte alphabet."""
    if step.get("type") == "ByteLevel" and step.get("use_regex", True) and not step["add_prefix_space"]:
        return GPT2_WORDS
    parts = step.get("pretokenizers", [])
    if [part["type"] for part in parts] != ["Split", "ByteLevel"]:
        return None
    split, spell = parts
    plain = not spell.get("use_regex", True) and not spell["add_prefix_space"]
    isolated = split["behavior"] == "Isolated" and not split["invert"]
    return split["pattern"].get("Regex") if plain and isolated else None


def _cuts_alike(find: Callable[[str], list[str]], tokenizer: Tokenizer) -> bool:
    """Whether words are the same as those of `tokenizers` for every text of up to three of KINDS, and longer ones."""
    draw = random.Random(0)
    runs = ("".join(sign * draw.randint(1, 9) for sign in draw.choices(KINDS, k=12)) for _ in range(500))
    short = ("".join(signs) for length in (1, 2, 3) for signs in product(KINDS, repeat=length))
    alphabet, cut = byte_alphabet(), tokenizer.backend.pre_tokenizer.pre_tokenize_str
    return all(
        [word.encode().decode("latin-1").translate(alphabet) for word in find(text)] == [word for word, _ in cut(text)]
        for text in chain(short, runs)
    )


def translate(pattern: str) -> re.Pattern[str] | None:
    r"""An expression of `tokenizers` as one of `re`, with `\p{..}` and `\s` spelled out; None if it says more.

    Args:
        pattern: in the syntax of Oniguruma.
    """
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
            return None  # other ends of lines, a set in a set
        elif sign[0] == "\\" and sign[1:].isalnum() and sign[1:] not in "rnt":
            return None  # a class that is not known here
        inside = inside + (sign == "[") - (sign == "]")
        parts.append(sign)
    try:
        return re.compile("".join(parts))
    except re.error:
        return None


@cache
def _ranges(category: str) -> str:
    """The characters of a category, as they stand inside of `[]`, as `tokenizers` knows them."""
    plane = "".join(chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000)
    others = pre_tokenizers.Split(Regex(f"[^{category}]+"), "removed")
    runs = [run for run, _ in others.pre_tokenize_str(plane)]
    return "".join(f"{re.escape(run[0])}-{re.escape(run[-1])}" for run in runs)

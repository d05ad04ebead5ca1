"""A fast encoder of large texts, for `data/encode`: the ids of `data/tokenizer.Tokenizer.encode`.

A byte-level BPE is encoded by `gigatoken`, tens of times faster than by `tokenizers`, where both give the same ids.
They are compared on thousands of texts when an encoder is made, and on a passage of every batch. Their tables of
letters, digits and blanks are of different versions of Unicode, so a text with a character that some version classifies
otherwise is encoded by `tokenizers`. A tokenizer of characters is a table from code points to ids. All other tokenizers
use `tokenizers`.
"""

import json
import logging
import random
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from lm.data.tokenizer import Tokenizer
from lm.errors import first_line

log = logging.getLogger(__name__)

PASSAGE = 1000  # characters of a batch that are encoded twice
# At least one of every kind that a pattern can distinguish: letters of contractions, digits, blanks, line ends, signs,
# a combining mark.
KINDS = "sLé\u4e001\u0663\u00b2 \t\n\r\v\x1c\u0085\u3000'._\u0301"
PLANES = 0x20000  # code points of the first two planes; of the others, no character is trusted


def id_type(vocab_size: int) -> np.dtype:
    """The smallest dtype of shards that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class Encoder:
    """Encodes texts to ids, uint16 or uint32, with any tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.dtype = id_type(tokenizer.vocab_size)
        self._codes = _code_table(tokenizer, self.dtype)
        self.fast: Any = None if self._codes is not None else _fast_encoder(tokenizer)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, equal to those of `Tokenizer.encode`."""
        if self._codes is not None:
            return [self._codes[np.frombuffer(text.encode("utf-32-le"), "<u4")] for text in texts]
        fast = [text for text in texts if self.fast and is_trusted(text)]
        if fast and not _agree(self.fast, self.tokenizer, [fast[0][:PASSAGE]]):
            passage = fast[0][:PASSAGE]
            log.warning("gigatoken encodes %r otherwise than tokenizers, which encodes what follows", passage)
            self.fast, fast = None, []
        ids = {text: self.fast.encode(text) for text in fast}
        slow = iter(self.tokenizer.encode_batch([text for text in texts if text not in ids]))
        return [np.asarray(ids[text] if text in ids else next(slow), self.dtype) for text in texts]


def _fast_encoder(tokenizer: Tokenizer) -> Any:
    """The tokenizer as `gigatoken` has it; None where that is not installed, or gives other ids."""
    if not tokenizer.byte_level or not _is_plain_bpe(tokenizer):
        return None
    description = {**tokenizer.description, "added_tokens": [], "post_processor": None}  # a text has no special tokens
    try:
        import gigatoken

        fast = gigatoken.Tokenizer.from_json(json.dumps(description))
    except (ImportError, ValueError, RuntimeError) as error:
        log.info("encoding with tokenizers, which takes longer than gigatoken: %s", first_line(error))
        return None
    return fast if _agree(fast, tokenizer, hard_texts()) else None


def hard_texts() -> list[str]:
    """Thousands of short texts that two tokenizers hardly encode alike if they split any text differently."""
    draw = random.Random(0)
    short = ("".join(signs) for length in (1, 2, 3) for signs in product(KINDS, repeat=length))
    runs = ("".join(sign * draw.randint(1, 9) for sign in draw.choices(KINDS, k=12)) for _ in range(500))
    return [*short, *runs]


def _agree(fast: Any, tokenizer: Tokenizer, texts: list[str]) -> bool:
    ids = tokenizer.encode_batch(texts)
    return all(np.array_equal(fast.encode(text), other) for text, other in zip(texts, ids, strict=True))


def is_trusted(text: str) -> bool:
    """Whether all versions of Unicode classify the characters of a text alike."""
    if text.isascii():
        return True
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    return bool(codes.max() < PLANES and trusted_codes()[codes].all())


@cache
def trusted_codes() -> np.ndarray:
    """Which code points are letters, digits, blanks or none of them in every version of Unicode: (PLANES,) bool.

    By the versions that Python has: letters, digits and blanks have to be so in Unicode 3.2 already, other characters
    have to be known. Not U+017F, which is an `s` where case is ignored, nor U+180E, which was a blank in between.
    """

    characters = list(map(chr, range(PLANES)))
    then, now = (np.array(list(map(version.category, characters))) for version in (unicodedata.ucd_3_2_0, unicodedata))
    kinds = [np.where(np.isin(first, list("LNZ")), first, "") for first in (then.astype("U1"), now.astype("U1"))]
    codes = (now != "Cn") & (kinds[0] == kinds[1])
    codes[[*range(0xD800, 0xE000), 0x17F, 0x180E]] = False
    return codes


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


def _is_plain_bpe(tokenizer: Tokenizer, *options: str) -> bool:
    """Whether it is a BPE without a normalizer or these options, whose added tokens are all special.

    Other added tokens would be cut out of a text before its words are found.
    """
    model, added = tokenizer.description["model"], tokenizer.backend.get_added_tokens_decoder().values()
    options = (*options, "continuing_subword_prefix", "end_of_word_suffix")
    plain = model.get("type") == "BPE" and not any(model.get(option) for option in options)
    return plain and not tokenizer.description.get("normalizer") and all(token.special for token in added)

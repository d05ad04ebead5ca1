"""Tokenizers: text to token ids and back, how many bytes a token stands for, and the files other tools load.

Before a batch's way begins: `data/prepare` makes shards with one, `data/shards` checks that they fit it. The format is
Hugging Face's `tokenizer.json`, so that any such file serves; `data/encoder` is the faster way to encode much text.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lm.documents import parse_json
from lm.errors import RequestError

Begin = Literal["nothing", "eos"]  # what a text begins with; documents follow the token that ended the one before
END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<|unknown|>"

# How other people's tokenizers call the end of a document, the most telling first.
END_NAMES = (
    END_OF_TEXT, "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|eot_id|>",
    "<|im_end|>",
)  # fmt: skip

# Words with the sign or blank before them, up to three digits, runs of signs, line ends, blanks: the way of GPT-4.
WORDS = (
    r"(?i:'[sdmt]|'ll|'ve|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A `tokenizer.json` and which of its tokens ends a document.

    Args:
        text: content of a `tokenizer.json`.
        config: content of the `tokenizer_config.json` beside it, as far as there is one.
        eos_token: the token that ends a document; from `config` or by its well-known name if not given.
        name: what messages call it.

    Raises:
        RequestError: it is no tokenizer, or no token is known to end a document.
    """

    def __init__(
        self, text: str, config: dict[str, Any] | None = None, eos_token: str | None = None, name: str = "tokenizer"
    ) -> None:
        try:
            self.description: dict[str, Any] = parse_json(text)
            self.backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise RequestError(f"{name} is not a tokenizer.json: {_first_line(error)}") from error
        self.text = text
        self.config = config if isinstance(config, dict) else {}
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True  # what a document says is text, even where it reads `<|endoftext|>`
        self.vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.eos_token = self._end(eos_token, name)
        self.eos_id = self.vocabulary[self.eos_token]

    @classmethod
    def load(cls, path: str | Path, eos_token: str | None = None) -> "Tokenizer":
        """Read a tokenizer.

        Args:
            path: a `tokenizer.json`, or a folder with one.
            eos_token: the token that ends a document, where the files do not tell.

        Raises:
            RequestError: there is none, it cannot be read, or no token is known to end a document.
        """
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        beside = file.with_name("tokenizer_config.json")
        try:
            text = file.read_text("utf-8")
            config = parse_json(beside.read_text("utf-8")) if beside.exists() else None
        except FileNotFoundError as error:
            raise RequestError(f"tokenizer {file} is not there: give a tokenizer.json or a folder with one") from error
        except (OSError, ValueError) as error:
            raise RequestError(f"tokenizer {file} cannot be read: {_first_line(error)}") from error
        return cls(text, config, eos_token, name=str(file))

    def _end(self, wanted: str | None, name: str) -> str:
        if wanted is not None and wanted not in self.vocabulary:
            raise RequestError(f"{name} has no token {wanted!r} to end a document with")
        told = _content(self.config.get("eos_token"))
        for token in (wanted, told, *END_NAMES):
            if token in self.vocabulary:
                return token
        raise RequestError(f"{name} does not tell which token ends a document; say it with --eos_token")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.vocabulary.values()) + 1

    @cached_property
    def sha256(self) -> str:
        """Of its JSON with sorted keys and no blanks, so that formatting does not matter."""
        canonical = json.dumps(self.description, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text; nothing is added, and the names of special tokens are read as text."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens by their names; bytes that are not UTF-8 become the replacement character."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        """Bytes of UTF-8 that each token stands for.

        Returns:
            (vocab_size,) int32; 0 for special tokens and for ids that no token has.
        """
        sizes = np.zeros(self.vocab_size, dtype=np.int32)
        added = self.backend.get_added_tokens_decoder()
        for token, number in self.vocabulary.items():
            if number not in added:
                sizes[number] = self._size(token)
            elif not added[number].special:
                sizes[number] = len(token.encode())
        return sizes

    def _size(self, token: str) -> int:
        if self.byte_level:
            return len(token)  # one character of the byte alphabet is one byte
        if self.description["model"].get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return 1
        return len((token.replace("▁", " ") if self._blocks_are_blanks else token).encode())

    @cached_property
    def _blocks_are_blanks(self) -> bool:
        """Whether it writes a blank as sentencepiece does."""
        steps = [self.description.get(step) for step in ("normalizer", "pre_tokenizer", "decoder")]
        return '"▁"' in json.dumps(steps, ensure_ascii=False)

    @cached_property
    def byte_level(self) -> bool:
        """Whether tokens are written in the alphabet of bytes of GPT-2."""
        decoder = self.description.get("decoder") or {}
        return "ByteLevel" in [decoder.get("type"), *(part["type"] for part in decoder.get("decoders", []))]

    def files(self, model_max_length: int | None = None) -> dict[str, str]:
        """Names and contents of what `transformers.AutoTokenizer.from_pretrained(folder)` needs.

        Args:
            model_max_length: context of the model, in tokens.
        """
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos_token}
        for name in ("bos_token", "unk_token", "pad_token"):
            if token := _content(self.config.get(name)):
                config[name] = token
        if UNKNOWN in self.vocabulary:
            config["unk_token"] = UNKNOWN
        config["clean_up_tokenization_spaces"] = False
        config["model_input_names"] = ["input_ids", "attention_mask"]  # older readers add types, which models refuse
        if model_max_length is not None:
            config["model_max_length"] = int(model_max_length)
        beside = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        return {"tokenizer.json": self.text, "tokenizer_config.json": beside}


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2); decoding gives back any text exactly.

    Args:
        texts: what to learn from, read once.
        vocab_size: tokens in all, at least 257; there are fewer where the texts do not hold as many pairs.

    Returns:
        A tokenizer whose id 0 is `<|endoftext|>`.

    Raises:
        RequestError: there is no room for the 256 bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise RequestError(f"--vocab_size {vocab_size} has no room for 256 bytes and {END_OF_TEXT}: at least 257")
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=int(vocab_size), special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend.to_str(pretty=True))


def train_char(texts: Iterable[str]) -> Tokenizer:
    """One token a character, in the order of Unicode, after `<|endoftext|>` (0) and `<|unknown|>` (1).

    Args:
        texts: every character in them gets a token.
    """
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    vocabulary = {token: number for number, token in enumerate((END_OF_TEXT, UNKNOWN, *sorted(characters)))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.add_special_tokens([END_OF_TEXT, UNKNOWN])
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend.to_str(pretty=True))


def _content(token: Any) -> str | None:
    """A token of a tokenizer_config.json, which is a string or an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""Tokenizers: convert text to token ids and back, and a fast encoder for large texts.

`data/prepare` makes shards with a tokenizer; `data/catalog` checks that shards fit it. The format is Hugging Face's
`tokenizer.json`, so that any such file works.

`Encoder` computes the ids of `tokenizers` several times faster. A byte-level BPE cuts a text into words by a regular
expression and encodes each word independently, so a word needs to be tokenized only once: Python's `re` finds the
words, and their ids are kept in a table. Python's Unicode categories differ from those of `tokenizers`. So they
are read from `tokenizers` when an encoder is made, and both are compared on all short texts over characters of every
kind and on many longer ones. A tokenizer of characters is a table from code points to ids. All other tokenizers and
texts use `tokenizers`.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, cached_property
from itertools import chain, product, takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from lm.errors import RequestError, first_line
from lm.system.files import parse_json
from lm.system.remote import fetch, is_remote

Begin = Literal["nothing", "eos"]  # what comes before a text; documents follow the token that ended the previous one
END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<|unknown|>"

HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*(?<!\.json)")  # as of a model: `gpt2`, `org/name`

# Names of the token that ends a document in tokenizers of others, the most specific first.
END_NAMES = (
    END_OF_TEXT, "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|eot_id|>",
    "<|im_end|>",
)  # fmt: skip

# A word with the sign or blank before it, up to three digits, runs of signs, line ends, blanks: as in GPT-4.
WORDS = (
    r"(?i:'[sdmt]|'ll|'ve|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

KEPT_WORDS = 500_000  # some hundred bytes each; a text in all languages has more
LONGEST_KEPT = 64  # characters
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# At least one of every kind that a pattern can distinguish: letters of contractions, a letter that folds to such a one,
# digits, blanks, line ends, signs, a combining mark.
KINDS = "sLé\u017f\u4e001\u0663\u00b2 \t\n\r\u0085\u3000'._\u0301"
BLANK = r"\s"
CHANGED = ("Aa", "é", "a.b", "a  b", "a\nb")  # by tokenizers that fold letters or insert blanks between words
CHINESE = "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]"  # as in BERT's normalizer
BESIDE_CHINESE = re.compile(f"(?<={CHINESE}) | (?={CHINESE})")
BEYOND = re.compile("[\U00010000-\U0010ffff]")  # their categories would make the expression slow; such texts are rare


class Tokenizer:
    """A `tokenizer.json`, its `tokenizer_config.json`, and the token that ends a document.

    This token is `eos_token`; by default the one named in `config`, or one with a well-known name.
    """

    def __init__(
        self, text: str, config: dict[str, Any] | None = None, eos_token: str | None = None, name: str = "tokenizer"
    ) -> None:
        try:
            self.description: dict[str, Any] = parse_json(text)
            self.backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise RequestError(f"{name} is not a tokenizer.json: {first_line(error)}") from error
        self.text = text
        self.config = config if isinstance(config, dict) else {}
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True  # the content of a document is text, even `<|endoftext|>`
        self.vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.eos_token = self._end(eos_token, name)
        self.eos_id = self.vocabulary[self.eos_token]
        model = self.description["model"]
        by_id = model.get("unk_id")
        self.unknown: str | None = model.get("unk_token") if by_id is None else model["vocab"][by_id][0]
        self.encoder = self._without_spelled_tokens()

    @classmethod
    def load(cls, path: str | Path, eos_token: str | None = None) -> "Tokenizer":
        """Load a `tokenizer.json` by its path or its folder, or by a name on the Hub from Hugging Face's cache.

        A `meta.json` of character data (`{"stoi": ..., "itos": ...}`) works too. Each may be a URL, which is copied to
        this machine.
        """
        path = _fetch(str(path)) if is_remote(str(path)) else path
        file = _find_file(Path(path))
        beside, template = file.with_name("tokenizer_config.json"), file.with_name("chat_template.jinja")
        try:
            text = file.read_text("utf-8")
            if file.name != "tokenizer.json" and isinstance(meta := parse_json(text), dict) and "stoi" in meta:
                return _from_meta(meta, str(file))
            # Not `parse_json`: transformers writes 10**30 as the length of a tokenizer that has no limit.
            config = json.loads(beside.read_text("utf-8")) if beside.exists() else None
            if template.exists():
                config = {**(config or {}), "chat_template": template.read_text("utf-8")}
        except FileNotFoundError as error:
            fetch = f"`hf download {path} tokenizer.json tokenizer_config.json` puts it into the cache"
            hub = f"; of a model on the hub, {fetch}; without a network, `lm data prepare --tokenizer bpe` learns one"
            raise RequestError(
                f"tokenizer {file} is not there: give a tokenizer.json or a folder with one"
                f"{hub if HUB_NAME.fullmatch(str(path)) and not Path(path).exists() else ''}"
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise RequestError(f"tokenizer {file}, or a file beside it, is unreadable: {first_line(error)}") from error
        return cls(text, config, eos_token, name=str(file))

    def _end(self, wanted: str | None, name: str) -> str:
        if wanted is not None and wanted not in self.vocabulary:
            raise RequestError(f"{name} has no token {wanted!r} to end a document with")
        configured = _content(self.config.get("eos_token"))
        for token in (wanted, configured, *END_NAMES):
            if token in self.vocabulary:
                return token
        raise RequestError(f"{name} does not say which token ends a document; give it with --eos_token")

    def _without_spelled_tokens(self) -> tokenizers.Tokenizer:
        """The backend for encoding: the same ids, but no text becomes a special token or the end of a document.

        For models that build words by merges, `encode_special_tokens` is enough. Others also look up whole words in
        their vocabulary, so the names of special tokens are replaced there by names that no text contains.
        """
        model, added = self.description["model"], self.description.get("added_tokens") or []
        vocabulary = model["vocab"]
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", ())]
        looked_up = "merges" not in model or model.get("ignore_merges")
        found = {token["content"] for token in added if not token["special"]}
        found |= self.vocabulary.keys() if looked_up else {"".join(pair) for pair in pairs}
        names = {self.eos_token, *(token["content"] for token in added if token["special"])} - {self.unknown}
        names = {name for name in names if name in found and len(name) > 1}
        if not names:
            return self.backend

        def renamed(name: str) -> str:
            return self.sha256 + name if name in names else name

        if isinstance(vocabulary, dict):
            model = {**model, "vocab": {renamed(name): number for name, number in vocabulary.items()}}
        else:
            model = {**model, "vocab": [(renamed(name), score) for name, score in vocabulary]}
        if pairs:
            model["merges"] = [pair for pair in pairs if not names & {*pair, "".join(pair)}]
        about = {**self.description, "model": model, "post_processor": None, "truncation": None, "padding": None,
                 "added_tokens": [{**token, "content": renamed(token["content"])} for token in added]}  # fmt: skip
        backend = tokenizers.Tokenizer.from_str(json.dumps(about))
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.vocabulary.values()) + 1

    @cached_property
    def sha256(self) -> str:
        """Digest of the JSON with sorted keys and no blanks; independent of formatting and of whether it is `bare`."""
        about = {**self.description, "post_processor": _adding_nothing(self.description.get("post_processor"))}
        canonical = json.dumps(about, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def prefix(self) -> list[int]:
        """Ids that the post-processor puts before a text, such as a BOS; `encode` never adds them."""
        if self.bare() is self:
            return []
        encoding = self.backend.encode("the")
        return [number for number, _ in takewhile(itemgetter(1), zip(encoding.ids, encoding.special_tokens_mask))]

    def bare(self) -> "Tokenizer":
        """A copy whose post-processor adds nothing to a text: for models trained on documents and their ends."""
        about = {**self.description, "post_processor": _adding_nothing(self.description.get("post_processor"))}
        if about == self.description:
            return self
        return Tokenizer(json.dumps(about, indent=2, ensure_ascii=False), self.config, self.eos_token)

    def encode(self, text: str) -> list[int]:
        """Encode a text; nothing is added, and the names of special tokens are read as text.

        transformers' `AutoTokenizer` adds what the post-processor says, such as a BOS (`prefix`), and reads the names
        of special tokens as these; with `add_special_tokens=False, split_special_tokens=True` it gives the same ids.
        RequestError: the text has something without a token, and the tokenizer has no unknown token.
        """
        try:
            return self.encoder.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises bare Exception
            raise _no_token(error) from error

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts, as `encode` does."""
        try:
            encodings = self.encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            raise _no_token(error) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids, special tokens to their names; bytes that are not UTF-8 become the replacement character."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        """Number of UTF-8 bytes that each token stands for inside a text: (vocab_size,) int32.

        Exact if tokens are bytes or characters. Other tokens are decoded between two words, so that marks such as
        `##`, `</w>` and `▁` count as the blank that they stand for, or as nothing. This counts a blank too many at the
        borders of a document and between some signs; `Shards.token_bytes` corrects it. Special tokens and ids without a
        token have 0 bytes, all others at least 1, including the unknown token.
        """
        sizes = np.zeros(self.vocab_size, dtype=np.int32)
        added = self.backend.get_added_tokens_decoder()
        word, spelled = [self.eos_id], []
        with suppress(RequestError):
            word = self.encode("the") or word
        byte_fallback = self.description["model"].get("byte_fallback")
        for token, number in self.vocabulary.items():
            if number in added:
                sizes[number] = int(token == self.unknown) if added[number].special else len(token.encode())
            elif self.byte_level:
                sizes[number] = len(token)  # one character of the byte alphabet is one byte
            elif byte_fallback and re.fullmatch("<0x[0-9A-F]{2}>", token):
                sizes[number] = 1
            elif self.backend.decoder is None:
                sizes[number] = len(token.encode())
            else:
                spelled.append(number)
        between = [[word[-1], number, word[0]] for number in spelled]
        decoded = self.backend.decode_batch([[word[-1], word[0]], *between], skip_special_tokens=False)
        empty, *whole = (len(text.encode()) for text in decoded)
        sizes[spelled] = np.maximum(1, np.array(whole, dtype=np.int32) - empty)
        sizes[self.eos_id] = 0
        return sizes

    def text_bytes(self, ids: np.ndarray) -> int:
        """Number of UTF-8 bytes of the documents with ids (n,) when decoded; an unknown token counts as one byte."""
        unknown = -1 if self.unknown is None else self.vocabulary.get(self.unknown, -1)
        kept = (ids != self.eos_id) & (ids != unknown)  # not all files call these special: names would be decoded
        documents = np.split(ids[kept], np.cumsum(kept)[ids == self.eos_id])
        texts = self.backend.decode_batch([document.tolist() for document in documents])
        steps = self.description.get("normalizer") or {}
        if any(step.get("handle_chinese_chars") for step in (steps, *steps.get("normalizers", ()))):
            texts = [BESIDE_CHINESE.sub("", text) for text in texts]  # blanks that the normalizer put around them
        return sum(len(text.encode()) for text in texts) + int((ids == unknown).sum())

    @cached_property
    def lossy(self) -> str | None:
        """A description of how encoding changes a text; None if decoding restores texts, except for unknown tokens."""
        for text in CHANGED:
            with suppress(RequestError):
                ids = self.encode(text)
                if self.vocabulary.get(self.unknown) not in ids and (decoded := self.decode(ids)) != text:
                    return f"encoding with this tokenizer is lossy: {text!r} is decoded as {decoded!r}"
        return None

    @cached_property
    def byte_level(self) -> bool:
        """Whether tokens are spelled in GPT-2's byte alphabet."""
        decoder = self.description.get("decoder") or {}
        return "ByteLevel" in [decoder.get("type"), *(part["type"] for part in decoder.get("decoders", []))]

    def files(self, model_max_length: int | None = None) -> dict[str, str]:
        """Names and contents of the files that `transformers.AutoTokenizer.from_pretrained(folder)` needs."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos_token}
        for name in ("bos_token", "unk_token", "pad_token"):
            if token := _content(self.config.get(name)):
                config[name] = token
        if template := self.config.get("chat_template"):
            config["chat_template"] = template
        if UNKNOWN in self.vocabulary:
            config["unk_token"] = UNKNOWN
        config["clean_up_tokenization_spaces"] = False
        config["model_input_names"] = ["input_ids", "attention_mask"]  # older readers add types, which models refuse
        if model_max_length is not None:
            config["model_max_length"] = int(model_max_length)
        beside = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        return {"tokenizer.json": self.text, "tokenizer_config.json": beside}


def _fetch(url: str) -> Path:
    """Copy a tokenizer at a URL (a file or a folder) to this machine; returns the path of the file."""
    address, mark, query = url.partition("?")
    folder, _, name = address.rpartition("/") if address.endswith(".json") else (address, "", "tokenizer.json")
    return fetch(f"{folder}{mark}{query}", (name, "tokenizer_config.json", "chat_template.jinja")) / name


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2); decoding restores any text exactly.

    There are fewer than `vocab_size` tokens if the texts have too few pairs to merge. The first is `<|endoftext|>`.
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
    """Make a tokenizer with a token for each character, in Unicode's order, after `<|endoftext|>` and `<|unknown|>`."""
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    return _of_characters({token: number for number, token in enumerate((END_OF_TEXT, UNKNOWN, *sorted(characters)))})


def _of_characters(vocabulary: dict[str, int]) -> Tokenizer:
    """A tokenizer of characters from their ids, which include END_OF_TEXT and UNKNOWN."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.add_special_tokens([END_OF_TEXT, UNKNOWN])
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend.to_str(pretty=True))


def _no_token(error: Exception) -> RequestError:
    return RequestError(
        f"the tokenizer cannot encode a text ({first_line(error)}); use one with a token for every byte, or with one "
        "for what is unknown"
    )


def _adding_nothing(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A post-processor without the parts that add tokens to a text; None if nothing remains."""
    if step is None or step["type"] in ("TemplateProcessing", "BertProcessing", "RobertaProcessing"):
        return None
    if step["type"] != "Sequence":
        return step
    kept = list(filter(None, map(_adding_nothing, step["processors"])))
    return {**step, "processors": kept} if kept else None


def _find_file(path: Path) -> Path:
    """Find the file of a tokenizer given by its path, its folder, or its name on the Hugging Face Hub."""
    if path.is_dir():
        names = ("tokenizer.json", "meta.json", "meta.pkl")
        path = next((path / name for name in names if (path / name).exists()), path / "tokenizer.json")
    if path.suffix in (".pkl", ".pickle"):
        meta = path.with_suffix(".json")
        raise RequestError(
            f"tokenizer {path} is a pickle, which may run any code when it is read: if you trust it, `python -c "
            f"\"import json, pickle; json.dump(pickle.load(open('{path}', 'rb')), open('{meta}', 'w'))\"`, and give "
            f"{meta}"
        )
    if path.exists() or not HUB_NAME.fullmatch(str(path)):
        return path
    from huggingface_hub import try_to_load_from_cache  # takes a while to import

    models = [str(path)]
    if str(path.parent) in (".", "openai-community"):  # the Hub has moved `gpt2` there
        models += [path.name, f"openai-community/{path.name}"]
    try:
        cached = [try_to_load_from_cache(model, "tokenizer.json") for model in models]
    except ValueError:  # no model can have this name
        return path
    return next((Path(file) for file in cached if isinstance(file, str)), path)


def _from_meta(meta: dict[str, Any], name: str) -> Tokenizer:
    """The tokenizer of character data, with two more tokens: the end of a document, and an unknown character."""
    stoi = meta["stoi"]
    ids = list(stoi.values()) if isinstance(stoi, dict) else []
    whole = all(type(number) is int and 0 <= number < 2**20 for number in ids) and len(set(ids)) == len(ids)
    if not ids or not whole or any(len(token) != 1 for token in stoi):
        raise RequestError(f"tokenizer {name}: stoi must have a whole number of its own for every character")
    return _of_characters({**stoi, END_OF_TEXT: max(ids) + 1, UNKNOWN: max(ids) + 2})


def _content(token: Any) -> str | None:
    """The text of a token in a tokenizer_config.json, where it is a string or an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


# ---- encoder ---------------------------------------------------------------------------------------------------------


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
        if len(self) >= KEPT_WORDS:
            self.clear()
        if len(word) <= LONGEST_KEPT:
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
    options = (*options, "dropout", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        model.get("type") == "BPE" and not any(model.get(option) for option in options)
        and not tokenizer.description.get("normalizer") and all(token.special for token in added)
    )  # fmt: skip


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

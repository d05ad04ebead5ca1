"""Tokenizers: convert text to token ids and back. The format is Hugging Face's `tokenizer.json`: any such file works.

`data/prepare` makes shards with a tokenizer, by `data/encoder`; `data/catalog` checks that shards fit it.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cached_property
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from tokenizers import decoders, models

from lm.data.config import LEARNED
from lm.errors import RequestError, first_line
from lm.system.files import check_fetched, is_remote
from lm.system.parsing import parse_json

Begin = Literal["nothing", "eos"]  # what comes before a text; documents follow the token that ended the previous one
END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<|unknown|>"

HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*(?<!\.json)")  # as of a model: `gpt2`, `org/name`

# Names of the token that ends a document in tokenizers of others, the most specific first.
OTHER_ENDS = "<|end_of_text|> <|end▁of▁sentence|> </s> <eos> <|eos|> [EOS] <|eot_id|> <|im_end|>"
END_NAMES = (END_OF_TEXT, *OTHER_ENDS.split())

CHINESE = "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]"  # as in BERT's normalizer
BESIDE_CHINESE = re.compile(f"(?<={CHINESE}) | (?={CHINESE})")


class Tokenizer:
    """A `tokenizer.json`, its `tokenizer_config.json`, and the token that ends a document.

    This token is `eos_token`; by default the one named in `config`, or one with a well-known name.
    """

    def __init__(
        self, text: str, config: dict[str, Any] | None = None, eos_token: str | None = None, name: str = "tokenizer"
    ) -> None:
        try:
            self.description: dict[str, Any] = parse_json(text)
            if self.description["model"].get("dropout"):  # of merges: every encoding of a text would be another
                self.description["model"]["dropout"] = None
                text = json.dumps(self.description, indent=2, ensure_ascii=False)
            self.backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise RequestError(f"{name} is not a tokenizer.json: {first_line(error)}") from error
        self.text = text
        self.config = config if isinstance(config, dict) else {}
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True  # the content of a document is text, even `<|endoftext|>`
        self.vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.eos_token = self._end_token(eos_token, name)
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
            check_fetched(text[:64].encode(), f"tokenizer {file}")
            if file.name != "tokenizer.json" and isinstance(meta := parse_json(text), dict) and "stoi" in meta:
                last = max(meta["stoi"].values())
                return tokenizer_of_characters({**meta["stoi"], END_OF_TEXT: last + 1, UNKNOWN: last + 2})
            # Not `parse_json`: transformers writes 10**30 as the length of a tokenizer that has no limit.
            config = json.loads(beside.read_text("utf-8")) if beside.exists() else None
            if template.exists():
                config = {**(config or {}), "chat_template": template.read_text("utf-8")}
        except FileNotFoundError as error:
            fetch = f"`hf download {path} tokenizer.json tokenizer_config.json` puts it into the cache"
            hub = f"; of a model on the hub, {fetch}; without a network, `lm data prepare --tokenizer bpe` learns one"
            near = "".join(f"did you mean {name}? Or " for name in get_close_matches(str(path).lower(), LEARNED, 1))
            raise RequestError(
                f"tokenizer {file} is not there: {near}give a tokenizer.json or a folder with one"
                f"{hub if HUB_NAME.fullmatch(str(path)) and not Path(path).exists() else ''}"
            ) from error
        except (OSError, ValueError, RecursionError) as error:
            raise RequestError(f"tokenizer {file}, or a file beside it, is unreadable: {first_line(error)}") from error
        return cls(text, config, eos_token, name=str(file))

    def _end_token(self, eos_token: str | None, name: str) -> str:
        known = next((token for token in END_NAMES if token in self.vocabulary), "")
        end = eos_token or token_name(self.config.get("eos_token")) or known
        if end not in self.vocabulary:
            problem = f"has no {end!r} to end a document with" if end else "does not say which token ends a document"
            raise RequestError(f"{name} {problem}; give it with --eos_token, or as eos_token in tokenizer_config.json")
        return end

    def _without_spelled_tokens(self) -> tokenizers.Tokenizer:
        """The backend for encoding: the same ids, but no text becomes a special token or the end of a document.

        For models that build words by merges, `encode_special_tokens` is enough. Others also look up entire words in
        their vocabulary, so the names of special tokens are replaced there by names that no text contains.
        """
        model, added = self.description["model"], self.description.get("added_tokens") or []
        vocabulary = model["vocab"]
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", ())]
        looked_up = "merges" not in model or model.get("ignore_merges")
        spelled = {token["content"] for token in added if not token["special"]}
        spelled |= self.vocabulary.keys() if looked_up else {"".join(pair) for pair in pairs}
        names = {self.eos_token, *(token["content"] for token in added if token["special"])} - {self.unknown}
        names = {name for name in names if name in spelled and len(name) > 1}
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
        added = [{**token, "content": renamed(token["content"])} for token in added]
        unused = dict.fromkeys(("post_processor", "truncation", "padding"))
        backend = tokenizers.Tokenizer.from_str(
            json.dumps({**self.description, **unused, "model": model, "added_tokens": added})
        )
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
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts, as `encode` does."""
        try:
            encodings = self.encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise RequestError(
                f"the tokenizer cannot encode a text ({first_line(error)}); use one with a token for every byte, or "
                "with one for what is unknown"
            ) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids, special tokens to their names; bytes that are not UTF-8 become the replacement character."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        """Number of UTF-8 bytes that each token stands for inside a text: (vocab_size,) int32.

        Exact if tokens are bytes or characters. Other tokens are decoded between two words, so that marks such as
        `##`, `</w>` and `▁` count as the blank that they stand for, or as nothing. This counts a blank too many at the
        borders of a document and between some signs; `data/shard_statistics` corrects it. Special tokens and ids
        without a token have 0 bytes, all others at least 1, including the unknown token.
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
        empty, *with_token = (len(text.encode()) for text in decoded)
        sizes[spelled] = np.maximum(1, np.array(with_token, dtype=np.int32) - empty)
        sizes[self.eos_id] = 0
        return sizes

    def text_bytes(self, ids: np.ndarray) -> int:
        """Number of UTF-8 bytes of the documents with ids (n,) when decoded; an unknown token counts as one byte."""
        unknown = -1 if self.unknown is None else self.vocabulary.get(self.unknown, -1)
        is_text = (ids != self.eos_id) & (ids != unknown)  # not all files call these special: names would be decoded
        documents = np.split(ids[is_text], np.cumsum(is_text)[ids == self.eos_id])
        texts = self.backend.decode_batch([document.tolist() for document in documents])
        steps = self.description.get("normalizer") or {}
        if any(step.get("handle_chinese_chars") for step in (steps, *steps.get("normalizers", ()))):
            texts = [BESIDE_CHINESE.sub("", text) for text in texts]  # blanks that the normalizer put around them
        return sum(len(text.encode()) for text in texts) + int((ids == unknown).sum())

    @cached_property
    def byte_level(self) -> bool:
        """Whether tokens are spelled in GPT-2's byte alphabet."""
        decoder = self.description.get("decoder") or {}
        return "ByteLevel" in [decoder.get("type"), *(part["type"] for part in decoder.get("decoders", []))]

    def files(self, model_max_length: int | None = None) -> dict[str, str]:
        """Names and contents of the files that `transformers.AutoTokenizer.from_pretrained(folder)` needs."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos_token}
        for name in ("bos_token", "unk_token", "pad_token"):
            if token := token_name(self.config.get(name)):
                config[name] = token
        if template := self.config.get("chat_template"):
            config["chat_template"] = template
        if UNKNOWN in self.vocabulary:
            config["unk_token"] = UNKNOWN
        config["clean_up_tokenization_spaces"] = False
        config["model_input_names"] = ["input_ids", "attention_mask"]  # older readers add types
        if model_max_length is not None:
            config["model_max_length"] = int(model_max_length)
        beside = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        return {"tokenizer.json": self.text, "tokenizer_config.json": beside}


def _fetch(url: str) -> Path:
    """Copy a tokenizer at a URL (a file or a folder) to this machine; returns the path of the file."""
    from lm.system.remote import fetch

    address, mark, query = url.partition("?")
    folder, _, name = address.rpartition("/") if address.endswith(".json") else (address, "", "tokenizer.json")
    return fetch(f"{folder}{mark}{query}", (name, "tokenizer_config.json", "chat_template.jinja")) / name


def tokenizer_of_characters(vocabulary: dict[str, int]) -> Tokenizer:
    """A tokenizer of characters from their ids, which include END_OF_TEXT and UNKNOWN."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.add_special_tokens([END_OF_TEXT, UNKNOWN])
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend.to_str(pretty=True))


def _adding_nothing(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A post-processor without the parts that add tokens to a text; None if nothing remains."""
    if step is None or step["type"] in ("TemplateProcessing", "BertProcessing", "RobertaProcessing"):
        return None
    if step["type"] != "Sequence":
        return step
    processors = list(filter(None, map(_adding_nothing, step["processors"])))
    return {**step, "processors": processors} if processors else None


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
    cached = [try_to_load_from_cache(model, "tokenizer.json") for model in models]
    return next((Path(file) for file in cached if isinstance(file, str)), path)


def token_name(token: Any) -> str | None:
    """The text of a token in a tokenizer_config.json, where it is a string or an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None

"""The options of `data`: what to prepare, what to read, and the batch size. Imports neither torch nor Lightning."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from lm.errors import RequestError, require, require_at_least
from lm.system.files import check_local_path
from lm.system.units import OPEN, Count, Derivable

Packing = Literal["stream", "whole"]
LEARNED = {"bpe": "a byte-level BPE", "char": "one token a character"}
TIMEOUT = 300.0  # seconds to wait for a block


@dataclass
class PrepareOptions:
    """What to make shards from, and how.

    Args:
        input: Files, folders, globs or URLs: plain text, JSON lines, CSV, TSV (also .gz, .zst, .bz2, .xz), Parquet,
            folders of `datasets.save_to_disk`, nanoGPT's .bin; or embedded:sotu, 11 MB of speeches to try things with.
            Names of files or folders such as train.txt and val.txt decide the split, if most have one.
        output: Folder to write: train/ val/ tokenizer.json manifest.json.
        tokenizer: A tokenizer.json or its folder or URL, a name on the Hugging Face hub such as gpt2, or the meta.json
            of characters; "bpe" or "char" trains one on the training documents.
        vocab_size: Vocabulary size of "bpe"; other tokenizers have their own.
        val_fraction: Fraction of the documents for validation, chosen by a hash of their text; 0 for none. Default:
            0.01; below 8 MB of text it grows, up to 0.1, to give about 10,000 tokens.
        workers: Number of processes; one per core if not given. The result does not depend on it.
        packing: How documents become samples. "stream": documents are concatenated, and every `seq_len` tokens are a
            sample, which begins and ends anywhere. "whole": a document that fits into a sample is never cut. A sample
            begins with a document, or continues a longer one, and ends with padding, which is not trained on.
        seq_len: For "whole": predicted tokens per sample, which is the context of the model.
        text_key: Key or column of the text in JSON lines and tables; with `chat` "messages" if not given.
        chat: JSON lines or Parquet of conversations, as TRL and `datasets` have them: "messages", a list of objects
            with "role" and "content". Only the answers of the assistant are learned. The tokenizer is that of the model
            to train; its chat template, or one of plain words if it has none, is kept with it. Rows are of whole
            conversations, of `seq_len` tokens: the model's context if not given.
        eos_token: Token that ends a document, if the tokenizer's own files do not name it.
        keep_duplicates: Keep documents that repeat another, apart from case and blanks; else the first of them alone
            is kept, and one of the validation data before one of the training data.
        shard_tokens: Approximate tokens per shard.
        sample_bytes: Most bytes of text to train a "bpe" or "char" tokenizer on.
    """

    input: list[str] = field(default_factory=list)
    output: str = ""
    tokenizer: str = "bpe"
    vocab_size: Count = Count(32768)
    val_fraction: float | None = None
    workers: int | None = None
    packing: Packing = "stream"
    seq_len: Count | None = None
    text_key: str = "text"
    chat: bool = False
    eos_token: str | None = None
    keep_duplicates: bool = False
    shard_tokens: Count = Count(100_000_000)
    sample_bytes: Count = Count(200_000_000)

    def __post_init__(self) -> None:
        if self.chat:
            self.packing = "whole"
            self.text_key = "messages" if self.text_key == "text" else self.text_key

    def check(self) -> None:
        if not self.output:
            raise RequestError("give the folder to make with --output")
        check_local_path("--output", self.output)
        require(not Path(self.output).is_file(), f"--output {self.output} is a file: give the name of a folder")
        if self.val_fraction is not None and not 0 <= self.val_fraction < 1:
            raise RequestError(f"--val_fraction {self.val_fraction} must be at least 0 and less than 1")
        require_at_least(1, "--", workers=self.workers, shard_tokens=self.shard_tokens, sample_bytes=self.sample_bytes)
        if self.chat and self.tokenizer in LEARNED:
            raise RequestError("--chat needs --tokenizer: the folder of the checkpoint that is to be trained")
        if self.packing == "whole" and self.seq_len is None:
            option = "--chat" if self.chat else "--packing whole"
            raise RequestError(f"{option} needs --seq_len: the model's max_position_embeddings")
        if self.packing == "stream" and self.seq_len is not None:
            raise RequestError("--seq_len is for --packing whole; a stream is cut into samples when it is trained on")
        require_at_least(2, "--", seq_len=self.seq_len)
        if self.eos_token is not None and self.tokenizer in LEARNED:
            raise RequestError(f"--eos_token is for a tokenizer.json; a learned {self.tokenizer!r} has its own")


@dataclass
class SourceConfig:
    """One source of a mixture.

    Args:
        name: Name in metrics and in `phases`: letters, digits, `_`, `-` and `.`.
        path: A folder that `lm data prepare` made; or
        train: shards to train on: a folder, a glob, a file or a URL, or several, with `tokenizer`.
        val: Shards to validate on; those of `path` if not given.
        tokenizer: A `tokenizer.json` or its folder, also by URL, the same for all sources; that of `path` if not given.
        column: Column of token ids in the shards.
        weight: Relative weight: the source's share of the samples is its weight over the sum of all weights.
        max_epochs: A run that would repeat the source more often is an error.
    """

    name: str
    path: str | None = None
    train: str | list[str] | None = None
    val: str | list[str] | None = None
    tokenizer: str | None = None
    column: str = "input_ids"
    weight: float = 1.0
    max_epochs: float | None = None


@dataclass
class PhaseConfig:
    """New weights of the sources, from a number of tokens on.

    Args:
        tokens: Number of training tokens after which the phase begins.
        weights: Weights of the sources, by name; 0 for a source that is not named.
    """

    tokens: Count
    weights: dict[str, float]


def check_mixture(sources: Sequence[SourceConfig], phases: Sequence[PhaseConfig]) -> None:
    """RequestError for settings that make no mixture. (Raised by `SourceConfig`, jsonargparse would hide it.)"""
    if not sources:
        raise RequestError("data.sources is empty: give at least one {name, path, weight}")
    names = [source.name for source in sources]
    for source in sources:
        where = f"data.sources {source.name}"
        if not re.fullmatch(r"[\w.-]+", source.name):
            raise RequestError(f"data.sources: the name {source.name!r} may have letters, digits, `_`, `-` and `.`")
        if names.count(source.name) > 1:
            raise RequestError(f"data.sources has two sources of the name {source.name}")
        if (source.path is None) == (source.train is None):
            raise RequestError(f"{where}: give one of path (a prepared folder) and train (shards)")
        check_local_path(f"{where}: path", source.path or "", "give train, val and tokenizer, which may be URLs")
        if source.train is not None and source.tokenizer is None:
            raise RequestError(f"{where}: train needs a tokenizer, the tokenizer.json that its shards were made with")
    changes = [("data.sources", 0, {source.name: source.weight for source in sources})]
    changes += [(f"data.phases from {phase.tokens:,} tokens", phase.tokens, phase.weights) for phase in phases]
    for place, _, weights in changes:
        if unknown := weights.keys() - set(names):
            raise RequestError(f"{place}: there is no source {min(unknown)}; the sources are {', '.join(names)}")
        for name, weight in weights.items():
            if not 0 <= weight < math.inf:
                raise RequestError(f"{place}: the weight {weight:g} of {name} must be a number, 0 or more")
        if not any(weights.values()):
            raise RequestError(f"{place}: all weights are 0, so there is nothing to train on")
    for (_, before, _), (place, tokens, _) in pairwise(changes):
        if not before < tokens < math.inf:
            raise RequestError(f"{place} comes after {before:,} tokens: sort the phases by tokens, which are above 0")


@dataclass
class DataConfig:
    """The options of `DataModule`.

    Args:
        path: A folder that `lm data prepare` made: `train/ val/ tokenizer.json manifest.json`.
        train: In place of `path`, shards to train on: a folder, a glob, a file or a URL, or several, with `tokenizer`.
        val: Shards to validate on.
        test: Shards for `lm test`; the validation shards, all of them, if not given.
        tokenizer: A `tokenizer.json` or its folder, also by URL; that of `path` if not given.
        sources: In place of the five options above: a mixture of several sources, such as
            `[{name: a, path: data/a, weight: 0.7}, {name: b, path: data/b, weight: 0.3}]`.
        phases: New weights of these sources, each from a number of tokens on.
        prepare: How to make `path` if it does not exist yet. If `path` is given on the command line, it is made only
            if `prepare.input` is given there too.
        packing: How documents become samples, `stream` or `whole` as in `prepare`; as `path` or the shards were made
            if not given.
        column: Column of token ids in the shards.
        pad_id: Id of the padding in shards without an `attention_mask`; it is dropped at both ends of a row.
        seq_len: Predicted tokens per sample; the decoder's `max_position_embeddings` if not given.
        micro_batch_size: Samples per device and forward pass.
        global_batch_tokens: Tokens per optimizer step over all devices; one micro-batch per device if not given.
        val_tokens: Tokens per validation, rounded down to whole samples, equally many of each source; all if not given.
        shuffle_buffer: Most tokens held in memory for shuffling; another value gives another order.
        reshuffle: `documents`: shuffle the documents of a repeated text in every epoch, so that samples are cut at
            other places.
        timeout: Seconds to wait for data from a file system that does not answer before the run ends. Failed reads of
            remote shards are retried for half of that time.
        cache_dir: Folder to cache blocks of remote shards in.
        cache_bytes: Largest size of this cache.
        texts: For `lm predict`: text files, JSONL or Parquet.
        text_key: Key or column of the text in JSONL and Parquet of `texts`; "text" if not given.
    """

    # Where the data is.
    path: str | None = None
    train: str | list[str] | None = None
    val: str | list[str] | None = None
    test: str | list[str] | None = None
    tokenizer: str | None = None
    sources: list[SourceConfig] | None = None
    phases: list[PhaseConfig] | None = None
    prepare: PrepareOptions | None = None
    packing: Packing | None = None
    column: str = "input_ids"
    pad_id: int | None = None
    # How much is read at once.
    seq_len: Derivable[Count] = OPEN
    micro_batch_size: Count = Count(8)
    global_batch_tokens: Count | None = None
    val_tokens: Count | None = None
    shuffle_buffer: Count = Count(96 * 2**20)
    reshuffle: Literal["documents"] | None = None
    # How it is read.
    timeout: float = TIMEOUT
    cache_dir: str = "data/cache"
    cache_bytes: Count = Count(20 * 10**9)
    texts: str | list[str] | None = None
    text_key: str | None = None

    def __post_init__(self) -> None:
        if [self.path, self.train, self.sources].count(None) != 2:
            raise RequestError("give one of data.path (a prepared folder), data.train (shards) and data.sources")
        if self.sources is not None and (self.val or self.test or self.tokenizer or self.prepare):
            raise RequestError("with data.sources leave data.val, test, tokenizer and prepare out: each has its own")
        if self.sources is not None:
            check_mixture(self.sources, self.phases or [])
        elif self.phases:
            raise RequestError("data.phases are weights of data.sources, and there are none")
        if self.tokenizer in LEARNED:
            raise RequestError(f"data.tokenizer {self.tokenizer} is no file: give data.prepare.tokenizer, to train one")
        if self.train is not None and self.tokenizer is None:
            raise RequestError("data.train needs data.tokenizer: the tokenizer.json that its shards were made with")
        check_local_path("data.cache_dir", self.cache_dir, "give a folder of a local disk")
        urls = "give data.train, data.val and data.tokenizer in its place, which may be URLs"
        check_local_path("data.path", self.path or "", urls)
        names = ("seq_len", "micro_batch_size", "global_batch_tokens", "val_tokens", "shuffle_buffer")
        require_at_least(1, "data.", **{name: getattr(self, name) for name in names})


def is_prepared(data: DataConfig) -> bool:
    return not data.path or not data.prepare or (Path(data.path) / "manifest.json").exists()

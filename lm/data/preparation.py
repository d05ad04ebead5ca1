"""The steps of `lm data prepare`: a tokenizer, units of encoded text, splits, shards. `data/prepare` runs them.

What a step has done has a record in the folder `.parts`, so that it is not done twice; doing it twice, or on two
machines, would do no harm, since every file is complete or absent and depends on the options and the input alone.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lm.data.blocks import ranges_within
from lm.data.config import LEARNED, PrepareOptions
from lm.data.encode import (
    Recipe,
    ShardTask,
    Unit,
    encode_unit,
    plan_units,
    record_path,
    run_tasks,
    shard_entry,
    split_of,
    unit_pieces,
    write_shard,
)
from lm.data.encoder import id_type
from lm.data.overlap import describe_shared
from lm.data.parquet import COLUMN, LAYOUT, PackedRows
from lm.data.shards import Shards
from lm.data.splits import Repeated, Split, divide
from lm.data.text_files import TextFile
from lm.data.tokenizer import Tokenizer
from lm.data.tokenizer_training import train_bpe, train_char
from lm.errors import RequestError
from lm.system.files import write_atomically
from lm.system.units import format_count, plural

log = logging.getLogger(__name__)
PARTS = ".parts"  # folder of what is done, in the folder of the shards


class Preparation:
    """The work of a preparation: units to encode, then shards to write; each list may be shared among machines."""

    def __init__(self, options: PrepareOptions, files: list[TextFile], known: Tokenizer | None) -> None:
        self.options, self.output, self.parts = options, Path(options.output), Path(options.output) / PARTS
        self.named = any(file.split for file in files)  # whether the names of files decide the splits
        self.units = plan_units(files)
        self.tokenizer = _tokenizer(options, self.parts, self.units, known)
        identity, chat_tokens = self.tokenizer.sha256 + self.tokenizer.eos_token, None
        if options.chat:
            chat_tokens = options.seq_len
            identity += f" {chat_tokens} {self.tokenizer.config['chat_template']}"
        self.recipe = Recipe(
            self.parts, identity, chat_tokens, options.text_key, options.val_fraction or 0.0, options.shard_tokens
        )

    def unencoded(self, units: list[Unit]) -> list[Unit]:
        return [unit for unit in units if not record_path(unit, self.recipe).exists()]

    def encode(self, units: list[Unit]) -> None:
        tasks = [(unit, self.recipe) for unit in units]
        run_tasks(encode_unit, tasks, [unit.text_bytes for unit in units], "encoding", self.options.workers)

    def divide(self) -> tuple[list[Split], Repeated]:
        records = [json.loads(record_path(unit, self.recipe).read_text()) for unit in self.units]
        parts = [part for record in records for part in record["parts"]]
        if self.options.chat:
            self._check_conversations(parts, [record["conversations"] for record in records])
        return divide(parts, self.recipe, self.tokenizer, self.options.keep_duplicates)

    def _check_conversations(self, parts: list[dict[str, Any]], counts: list[dict[str, int]]) -> None:
        """Say how many conversations are cut or left out; RequestError if none is left."""
        if not parts:
            where = ", ".join(self.options.input)
            raise RequestError(f"{where}: no conversation has an answer of the assistant, which is what is learned")
        within = f"{self.recipe.chat_tokens:,} tokens (--seq_len)"
        if cut := sum(count["cut"] for count in counts):
            log.warning(f"cut at the end: {plural(cut, 'conversation')} of more than {within}")
        if left_out := sum(count["left_out"] for count in counts):
            log.warning(f"left out: {plural(left_out, 'conversation')} without an answer in the first {within}")

    def shards(self, split: Split) -> list[ShardTask]:
        """The shards of a split, each filled in turn."""
        runs = ranges_within([piece.stop - piece.start for piece in split.slices], self.options.shard_tokens)
        groups = [tuple(split.slices[run.start : run.stop]) for run in runs]
        folder, seq_len = self.output / split.name, self.options.seq_len
        return [ShardTask(folder / f"{i:05d}.parquet", group, seq_len) for i, group in enumerate(groups)]

    def unwritten(self, shards: list[ShardTask]) -> list[ShardTask]:
        return [shard for shard in shards if shard_entry(shard, self.recipe) is None]

    def write(self, shards: list[ShardTask]) -> None:
        for shard in shards:
            shard.path.parent.mkdir(exist_ok=True)
        sizes = [2 * sum(stop - start for _, start, stop in shard.slices) for shard in shards]
        run_tasks(write_shard, [(shard, self.recipe) for shard in shards], sizes, "writing", self.options.workers)

    def finish(self) -> dict[str, Any]:
        """Do all that is not done, and return the manifest's content."""
        units = self.unencoded(self.units)
        if len(units) < len(self.units):
            log.info("continuing: %d of %d units are done", len(self.units) - len(units), len(self.units))
        self.encode(units)
        splits, repeated = self.divide()
        shards = {split.name: self.shards(split) for split in splits}
        everything = [shard for of_split in shards.values() for shard in of_split]
        self.write(self.unwritten(everything))
        self._remove_others({shard.path for shard in everything})
        self._report(splits, repeated)
        for name, text in self.tokenizer.files().items():
            write_atomically(self.output / name, text)
        tokenizer, seq_len = self.tokenizer, self.options.seq_len
        entries = {name: [shard_entry(shard, self.recipe) for shard in of_split] for name, of_split in shards.items()}
        return {
            "layout": LAYOUT,
            "column": COLUMN,
            "dtype": id_type(tokenizer.vocab_size).name,
            "tokenizer": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "packed": None if seq_len is None else PackedRows(seq_len, tokenizer.eos_id),
            "labels": self.options.chat,
            "repeated": repeated._asdict(),
            "splits": {split.name: split.counts | {"shards": entries[split.name]} for split in splits},
        }

    def _remove_others(self, paths: set[Path]) -> None:
        """Remove shards of earlier options, and what a killed process had begun to write."""
        for name in ("train", "val"):
            for path in (self.output / name).glob("*"):
                if path not in paths:
                    path.unlink()
            with suppress(OSError):  # it holds shards, or is not there
                (self.output / name).rmdir()

    def _report(self, splits: list[Split], repeated: Repeated) -> None:
        size, encoded_size = (sum(split.counts[name] for split in splits) for name in ("bytes", "token_bytes"))
        if encoded_size < 0.9 * size:
            part = f"{100 * encoded_size / size:.0f} % of the bytes of the text"
            log.warning(f"the tokens stand for {part}; --tokenizer bpe knows all bytes")
        if repeated.documents:
            documents, tokens = plural(repeated.documents, "document"), format_count(repeated.tokens)
            what = f"{documents} that repeat another, {repeated.of_validation:,} of them one of the validation data"
            log.info(f"left out: {what} ({tokens} tokens); --keep_duplicates keeps them")
        if self.named and len(splits) == 2:  # otherwise a hash of the text has chosen the documents
            train, val = (
                Shards.open(str(self.output / name), vocab_size=self.tokenizer.vocab_size) for name in ("train", "val")
            )
            if shared := describe_shared(train, val, self.tokenizer.eos_id):
                log.warning("%s", shared)


def _tokenizer(options: PrepareOptions, parts: Path, units: list[Unit], known: Tokenizer | None) -> Tokenizer:
    """The tokenizer of this preparation; a stopped preparation that has trained one continues with it."""
    if (parts / "tokenizer_config.json").exists():
        return Tokenizer.load(parts)
    tokenizer = known
    if tokenizer is None:
        log.info("learning %s", LEARNED[options.tokenizer])
        texts = _sample(options, units)
        tokenizer = train_bpe(texts, options.vocab_size) if options.tokenizer == "bpe" else train_char(texts)
        if options.tokenizer == "bpe" and tokenizer.vocab_size < options.vocab_size:
            log.info("the text gives %d tokens, fewer than --vocab_size", tokenizer.vocab_size)
    for name, text in tokenizer.files().items():  # tokenizer_config.json is written last
        write_atomically(parts / name, text)
    return tokenizer


def _sample(options: PrepareOptions, units: list[Unit], training: bool = True) -> Iterator[str]:
    """Documents to train a tokenizer on, from the training split if it has any; of much text, beginnings of units."""

    def scattered(unit: Unit) -> bytes:  # an order unrelated to that of the files
        return blake2b(repr([(file.name, part) for file, part, _ in unit.slices]).encode()).digest()

    limit, empty = options.sample_bytes, True
    per_unit = limit if sum(unit.text_bytes for unit in units) <= limit else max(limit // len(units), 2**20)
    for unit in sorted(units, key=scattered):
        unit_limit, selected = min(limit, per_unit), None
        for piece in unit_pieces(unit, options.text_key, None):
            if selected is None:  # a document begins
                selected = not training or split_of(piece, options.val_fraction) == "train"
            if selected and isinstance(piece.content, str):  # ids come with a tokenizer, so none is trained
                empty = False
                unit_limit -= len(piece.content)
                limit -= len(piece.content)
                yield piece.content
            if piece.last:
                selected = None
            if unit_limit <= 0:
                break
        if limit <= 0:
            return
    if empty and training:
        yield from _sample(options, units, training=False)

"""The LightningDataModule: where the data is, how large a batch is, and which sample is trained on next.

The stop after `data/loader` on a batch's way; `training/module` is next. It knows nothing of the model.
"""

import logging
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule

from lm.data.cache import BlockCache
from lm.data.loader import TIMEOUT, Batch, OnBadShard, Reading, Stream, Windows
from lm.data.prepare import PrepareOptions, prepare
from lm.data.sampler import Order, lanes_for
from lm.data.shards import Shards, common_file
from lm.data.text_files import read_documents
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError
from lm.system.files import parse_json, refuse_url
from lm.system.units import Count, plural

log = logging.getLogger(__name__)

BLOCKS_IN_BUFFER = 8  # at least: small shards are joined to blocks no larger than that, so that some are mixed
NOTED_LEFT_OVER = 0.01  # of the tokens


def text_batches(
    sources: list[str], tokenizer: Tokenizer, seq_len: int, micro_batch: int, rows: deque[tuple[str, int]]
) -> Iterator[Batch]:
    """Masked batches of documents, for `lm predict`: every document is cut into windows.

    A document begins with the end-of-text token as its first context, as it does in training, and every one of its
    tokens is predicted once.

    Args:
        sources: files, folders or URLs, as `lm data prepare --input` takes them.
        seq_len: predicted tokens of a row.
        micro_batch: rows of a batch; those that fill up the last one do not count.
        rows: gets the name of the document and the first token of every row, in order.
    """

    def windows() -> Iterator[np.ndarray]:
        for name, text in read_documents(sources):
            ids = np.asarray([tokenizer.eos_id, *tokenizer.encode(text)], dtype=np.int32)
            for start in range(0, len(ids) - 1, seq_len):
                rows.append((name, start))
                yield ids[start : start + seq_len + 1]

    every = windows()
    while group := list(islice(every, micro_batch)):
        tokens = np.full((micro_batch, seq_len + 1), tokenizer.eos_id, dtype=np.int32)  # (B, T + 1)
        mask = np.zeros((micro_batch, seq_len), dtype=bool)  # (B, T)
        for index, row in enumerate(group):
            tokens[index, : len(row)] = row
            mask[index, : len(row) - 1] = True
        yield Batch(torch.from_numpy(tokens), mask=torch.from_numpy(mask))


class DataModule(LightningDataModule):
    """Streams pre-tokenized Parquet shards.

    Args:
        path: A folder that `lm data prepare` made: `train/ val/ tokenizer.json manifest.json`; or
        train: shards to train on: a folder, a glob, a file or a URL, or several, with `tokenizer`.
        val: Shards to validate on.
        test: Shards for `lm test`; the validation shards, all of them, if not given.
        tokenizer: A `tokenizer.json` or its folder, also by URL; that of `path` if not given.
        prepare: What to make `path` from when it is not there yet.
        column: Column of token ids in the shards.
        pad_id: Id that fills rows up, in shards without an `attention_mask`: left out where a row begins or ends in it.
        seq_len: Predicted tokens of a sample; the decoder's `max_position_embeddings` if not given.
        micro_batch_size: Samples that a device runs at once.
        global_batch_tokens: Tokens of an optimizer step over all devices; one micro-batch a device if not given.
        val_tokens: Tokens of a validation, rounded down to whole samples; all of them if not given.
        shuffle_buffer: Tokens that may be held in memory to shuffle; part of what decides the order.
        timeout: Seconds to wait for data before the run ends because a file system does not answer. Reads of remote
            shards that fail are retried for half of it.
        on_bad_shard: What a fit does when it meets a block of tokens that is damaged: `raise` ends it; `skip` leaves
            out its samples and counts them in `data/skipped_samples`; all other samples stay where they are.
        cache_dir: Folder for blocks of remote shards.
        cache_bytes: Most that the folder may hold.
        texts: For `lm predict`: text files, JSONL or Parquet.
    """

    def __init__(
        self,
        path: str | None = None,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        tokenizer: str | None = None,
        prepare: PrepareOptions | None = None,
        column: str = "input_ids",
        pad_id: int | None = None,
        seq_len: Count | None = None,
        micro_batch_size: Count = Count(8),
        global_batch_tokens: Count | None = None,
        val_tokens: Count | None = None,
        shuffle_buffer: Count = Count(96 * 2**20),
        timeout: float = TIMEOUT,
        on_bad_shard: OnBadShard = "raise",
        cache_dir: str = "data/cache",
        cache_bytes: Count = Count(20 * 10**9),
        texts: str | list[str] | None = None,
    ) -> None:
        super().__init__()
        if (path is None) == (train is None):
            raise RequestError("give one of data.path (a prepared folder) and data.train (shards)")
        if train is not None and tokenizer is None:
            raise RequestError("data.train needs data.tokenizer: the tokenizer.json that its shards were made with")
        refuse_url("data.cache_dir", cache_dir, "give a folder of a local disk")
        refuse_url("data.path", path or "", "give data.train, data.val and data.tokenizer, which may be URLs")
        self.path = Path(path) if path else None
        self.sources = {"train": train, "val": val, "test": test}
        self.tokenizer_path = tokenizer or path
        self.prepare_options = prepare
        self.column = column
        self.pad_id = pad_id
        self.seq_len = seq_len
        self.micro_batch_size = micro_batch_size
        self.global_batch_tokens = global_batch_tokens
        self.val_tokens = val_tokens
        self.shuffle_buffer = shuffle_buffer
        if not 0 < timeout <= TIMEOUT_MAX / 2:  # which leaves room to add to it
            raise RequestError(f"data.timeout {timeout:g} is a number of seconds: more than 0")
        self.timeout = timeout
        self.on_bad_shard = on_bad_shard
        self.cache = BlockCache(Path(cache_dir), cache_bytes)
        self.texts = [texts] if isinstance(texts, str) else texts
        self.seed = 0  # of the order of samples; the CLI sets it to seed_everything
        self.global_batch = micro_batch_size  # samples of an optimizer step; the trainer sets it
        self.consumed = 0  # samples trained on so far; a resumed checkpoint sets it
        self.tokenizer: Tokenizer | None = None
        self.token_bytes: torch.Tensor | None = None  # (V,) fp64 bytes of text of each token, in what is evaluated
        self.shards: dict[str, Shards] = {}
        self.predicted: deque[tuple[str, int]] = deque()  # document and first token of rows that were predicted

    def prepare_data(self) -> None:
        """Make `path` when it is not there; on one rank of a node, before `setup`."""
        if self.path is None:
            return
        if (self.path / "manifest.json").exists():
            self._refuse_other_preparation()
            return
        if self.prepare_options is None:
            raise RequestError(
                f"data.path {self.path} holds no manifest.json: make it with `lm data prepare --input TEXTS --output "
                f"{self.path}`, or give data.prepare.input to make it from"
            )
        log.info("preparing %s from %s", self.path, ", ".join(self.prepare_options.input))
        self.prepare_options.output = str(self.path)
        prepare(self.prepare_options)

    def _refuse_other_preparation(self) -> None:
        """A folder that exists must have been made with the config's options; its texts may be gone by now."""
        if self.prepare_options is None:
            return
        file = self.path / "manifest.json"
        try:
            made = dict(parse_json(file.read_bytes()).get("options", {}))
        except (OSError, AttributeError, TypeError, ValueError) as error:
            raise RequestError(f"{file} is damaged ({error}); `rm -r {self.path}`, and it is made again") from error
        learned = {"bpe": ["tokenizer", "vocab_size"], "char": ["tokenizer"]}.get(self.prepare_options.tokenizer, [])
        for name in ["val_fraction", "text_key", *learned]:
            wanted = getattr(self.prepare_options, name)
            if name in made and made[name] != wanted:
                raise RequestError(
                    f"{self.path} was made with {name} {made[name]}, and data.prepare.{name} is {wanted}: "
                    "give --data.prepare null to train on it as it is, or another data.path"
                )

    def setup(self, stage: str) -> None:
        """Open the tokenizer and the shards that this stage needs; footers or the manifest only, no tokens."""
        self.tokenizer = Tokenizer.load(self.tokenizer_path)
        wanted = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ()}[stage]
        for split in wanted:
            shards = self._open(split)
            if shards is not None:
                shards.require_windows(self.seq_len)
                if split != "train":
                    shards.require_targets(self.seq_len, self._limit(split))
                self.shards[split] = shards
        if {"train", "val"} <= self.shards.keys() and (found := common_file(self.shards["train"], self.shards["val"])):
            same = "" if found[0] == found[1] else f", which is {found[1]}"
            raise RequestError(
                f"the training data contains the validation data: {found[0]}{same}; name other files in data.train "
                "or data.val, as a folder, a glob or a list"
            )
        if "train" in self.shards:
            prefix = self.tokenizer.prefix
            if not prefix or self.shards["train"].beginning()[: len(prefix)].tolist() != prefix:
                self.tokenizer = self.tokenizer.bare()  # what a checkpoint has: texts begin as those of the training
        if wanted and wanted[-1] in self.shards:
            self.token_bytes = torch.from_numpy(self.shards[wanted[-1]].token_bytes(self.tokenizer))
        if stage in ("validate", "test"):  # a fit makes the checks of `lm plan`, which has them too
            if wanted[0] not in self.shards:
                raise RequestError(f"there is nothing to {stage} on: give data.{wanted[0]}")
            for what, cure in self.warnings():
                log.warning("warning: %s; %s", what, cure)

    def _open(self, split: str) -> Shards | None:
        source = self.sources[split]
        if source is None and split == "test":
            return self._open("val")
        if source is None and self.path is not None and (self.path / split).is_dir():
            source = str(self.path / split)
        if source is None:
            return None
        return Shards.open(
            source, self.column, vocab_size=self.tokenizer.vocab_size, tokenizer_sha256=self.tokenizer.sha256,
            cache=self.cache, patience=self.timeout / 2,  # so that it is the read that says what is wrong
            pad_id=self.pad_id, eos_id=self.tokenizer.eos_id,
            block_tokens=self.shuffle_buffer // BLOCKS_IN_BUFFER if split == "train" else None,
        )

    def warnings(self) -> list[tuple[str, str]]:
        """What is doubtful in the shards of each split, and what to do about it."""
        found, named = [], False
        for split, shards in self.shards.items():
            left, windows = shards.left_over(self.seq_len), shards.windows(self.seq_len)
            if left > NOTED_LEFT_OVER * shards.tokens:
                found.append((
                    f"{split}: {left:,} of {shards.tokens:,} tokens, {left / shards.tokens:.1%}, are in no sample of "
                    f"{self.seq_len:,} + 1: they are left over at the ends of {plural(len(windows), 'block')}",
                    "lower data.seq_len",
                ))  # fmt: skip
            if padding := shards.padding():
                found.append((padding[1], f"if that is padding: --data.pad_id {padding[0]}"))
                named = True
        train = self.shards.get("train")
        if self.pad_id is not None and not named and train is not None and not train.is_padded():
            found.append((f"data.pad_id {self.pad_id} fills up no row of those of {train.source} that were looked at: "
                          "it leaves nothing out", "leave it out, or give the id that does"))  # fmt: skip
        return found

    @property
    def has_validation(self) -> bool:
        return "val" in self.shards

    def describe_shards(self) -> dict[str, Any]:
        """Name, size in bytes and tokens of every shard by split: what must not change before a resume."""
        return {split: [list(entry) for entry in shards.fingerprint()] for split, shards in self.shards.items()}

    def order(self) -> Order:
        """Which window each sample of the training stream is."""
        train = self.shards["train"]
        lanes = lanes_for(train.largest.tokens, self.shuffle_buffer)
        return Order(train.windows(self.seq_len), self.seed, lanes=lanes)

    def read_samples(self, first: int, count: int) -> tuple[np.ndarray, list[tuple[str, int]]]:
        """Samples of the training stream, `(count, T + 1)`, and of each the file and the window of its block."""
        train, length = self.shards["train"], self.seq_len
        blocks, windows = self.order().locate(np.arange(first, first + count))
        rows = np.empty((count, length + 1), train.column.row_dtype)
        for block in np.unique(blocks).tolist():
            tokens = train.read(block)
            for index in np.flatnonzero(blocks == block).tolist():
                start = int(windows[index]) * length
                rows[index] = tokens[start : start + length + 1]
        places = zip(blocks.tolist(), windows.tolist(), strict=True)
        return rows, [(train.blocks[block].file_of(window * length), window) for block, window in places]

    def train_dataloader(self) -> Stream:
        """This rank's part of one optimizer step after another, without end, from the first sample not trained on."""
        return Stream(
            self.shards["train"], self.order(), seq_len=self.seq_len, start=self.consumed,
            global_batch=self.global_batch, rank=self.trainer.global_rank, world=self.trainer.world_size,
            shuffle_buffer=self.shuffle_buffer, reading=self._reading(),
        )

    def val_dataloader(self) -> Any:
        """The first `val_tokens` of the validation shards, in order."""
        return self._windows("val")

    def test_dataloader(self) -> Any:
        """All of the test shards, in order."""
        return self._windows("test")

    def predict_dataloader(self) -> Any:
        """The samples of the texts of `data.texts`, in order."""
        if not self.texts:
            raise RequestError("nothing to predict on: give text files, JSONL or Parquet with --data.texts")
        return text_batches(self.texts, self.tokenizer, self.seq_len, self.micro_batch_size, self.predicted)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """In one copy, through page-locked memory, so that it does not make the device wait."""
        if device.type != "cuda":
            return batch.to(device)
        return batch.pin_memory().to(device, non_blocking=True)

    def _limit(self, split: str) -> int | None:
        """How many windows an evaluation takes; None: all."""
        return max(1, self.val_tokens // self.seq_len) if split == "val" and self.val_tokens is not None else None

    def _windows(self, split: str) -> Any:
        if split not in self.shards:
            return []
        return Windows(
            self.shards[split], seq_len=self.seq_len, micro_batch=self.micro_batch_size,
            limit=self._limit(split), rank=self.trainer.global_rank, world=self.trainer.world_size,
            reading=self._reading(),
        )

    def _reading(self) -> Reading:
        """Damaged blocks are skipped in a fit alone, whose metrics, log and alerts show them."""
        return Reading(self.timeout, self.on_bad_shard if self.trainer.fitting else "raise")

"""The LightningDataModule: opens the data, and makes the batches from the next sample on.

Input: the options under `data:`; output: the batches of `data/loader`, for `training/step`. It is independent of
the model.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import ChainDataset

from lm.data.blocks import BLOCK_TOKENS
from lm.data.catalog import MANIFEST
from lm.data.config import DataConfig, SourceConfig
from lm.data.loader import Assembler, Batch, Request, Stream, Windows
from lm.data.sampler import BLOCKS_AHEAD, Order, lanes_for
from lm.data.shard_statistics import token_bytes
from lm.data.shards import Shards
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError
from lm.system.dataclass_arguments import arguments_from
from lm.system.files import is_remote
from lm.system.units import plural

if TYPE_CHECKING:
    from lm.data.cache import BlockCache
    from lm.data.mixture import Mixture, Phase

log = logging.getLogger(__name__)

BLOCKS_IN_BUFFER = 8  # at least; small shards are joined into larger blocks only up to this, so that several are mixed
MAX_LEFT_OVER = 0.03  # fraction of the tokens; a warning from there on
SOURCES_IN_BUFFER = 8  # each source of a mixture shuffles with 1/8 of the buffer, so with more sources it grows


class DataModule(LightningDataModule):
    """Streams pre-tokenized Parquet shards. Its arguments are the fields of `DataConfig`, where each is explained."""

    @arguments_from(DataConfig)
    def __init__(self, config: DataConfig) -> None:
        super().__init__()
        self.options = config
        self.mixed = config.sources is not None
        self.sources = config.sources or [
            SourceConfig("all", config.path, config.train, config.val, config.tokenizer, config.column)
        ]
        self.seq_len: int = config.seq_len or 0  # tokens of a sample; 0: not known yet
        self.micro_batch_size = config.micro_batch_size
        self.global_batch_tokens = config.global_batch_tokens
        self.seed = 0  # of the order of samples
        self.global_batch = config.micro_batch_size  # samples of an optimizer step, over all ranks
        self.consumed = 0  # samples trained on so far
        self.tokenizer = cast(Tokenizer, None)  # once the data is open
        # Bytes of text of each token in the evaluated split: (V,) fp64; of a mixture (sources, V).
        self.token_bytes: torch.Tensor | None = None
        self.shards: dict[str, Shards] = {}  # of each split, those of all sources
        self.shared: str | None = None  # a warning if much of the validation data is in the training data
        self.by_source: dict[str, dict[str, Shards]] = {}  # split -> source -> its shards
        self.predicted: deque[tuple[str, int]] = deque()  # document and first token of each predicted row

    def set_position(
        self,
        *,
        seed: int | None = None,
        seq_len: int | None = None,
        global_batch: int | None = None,
        consumed: int | None = None,
    ) -> None:
        """Set the values that determine the samples of the next step; None leaves a value unchanged."""
        position = {"seed": seed, "seq_len": seq_len, "global_batch": global_batch, "consumed": consumed}
        vars(self).update({name: value for name, value in position.items() if value is not None})

    def prepare_data(self) -> None:
        """Prepare the data at `path` if it does not exist; called on one rank per node, before `setup`."""
        options = self.options.prepare
        missing = [source for source in self.sources if source.path and not (Path(source.path) / MANIFEST).exists()]
        if options is None and not missing:
            return
        from lm.data.prepare import check_folder, check_same_options, prepare

        for source in missing:
            where = f"data.sources {source.name}: {source.path}" if self.mixed else f"data.path {source.path}"
            others = [other.tokenizer or other.path for other in self.sources if other is not source]
            tokenizer = next(iter(others), "bpe")
            command = f"`lm data prepare --input TEXTS --output {source.path} --tokenizer {tokenizer}`"
            or_give = "" if self.mixed else ", or give --data.prepare.input TEXTS to make it here"
            check_folder(Path(source.path), where, None if options else command + or_give)
        if options is None or self.options.path is None:
            return
        options.output = self.options.path
        options.packing = self.options.packing or options.packing
        if options.packing == "whole":
            options.seq_len = options.seq_len or self.seq_len
        if (Path(options.output) / MANIFEST).exists():
            check_same_options(options)
            return
        prepare(options)

    def setup(self, stage: str) -> None:
        """Open the tokenizer and the shards of this stage; reads footers or manifests, and a few tokens for checks."""
        if not self.seq_len:
            raise RequestError("give DataModule(seq_len=...): at most the decoder's max_position_embeddings")
        self.tokenizer = self._common_tokenizer()
        splits = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ()}[stage]
        for split in splits:
            opened = {source.name: self._open_checked(source, split) for source in self.sources}
            if by_source := {name: shards for name, shards in opened.items() if shards is not None}:
                self.by_source[split], self.shards[split] = by_source, Shards.join(by_source)
        foreign = any(source.train or source.val for source in self.sources)
        if {"train", "val"} <= self.shards.keys() and (foreign or self.mixed):  # else `lm data prepare` has compared
            from lm.data.overlap import common_file, describe_shared

            train, val = self.shards["train"], self.shards["val"]
            if files := common_file(train, val):
                same = "" if files[0] == files[1] else f", which is {files[1]}"
                raise RequestError(
                    f"the training data contains the validation data: {files[0]}{same}; name other files in data.train "
                    "or data.val, as a folder, a glob or a list"
                )
            self.shared = describe_shared(train, val, self.tokenizer.eos_id)
        if "train" in self.shards:
            prefix, sources = self.tokenizer.prefix, self.by_source["train"].values()
            if not prefix or any(shards.beginning()[: len(prefix)].tolist() != prefix for shards in sources):
                self.tokenizer = self.tokenizer.bare()  # as in a checkpoint: texts begin as in training
        if splits and splits[-1] in self.shards:
            self.token_bytes = self._token_bytes(splits[-1])
        if stage in ("validate", "test"):  # a fit has the checks of `lm plan`, which include these
            if splits[0] not in self.shards:
                raise RequestError(f"there is no {splits[0]} data: give --data.{splits[0]}")
            for problem, fix in self.warnings():
                log.warning("warning: %s; %s", problem, fix)

    @contextmanager
    def _errors_of(self, source: SourceConfig) -> Iterator[None]:
        """Add the name of a mixture's source to errors."""
        try:
            yield
        except RequestError as error:
            if not self.mixed:
                raise
            raise RequestError(f"data.sources {source.name}: {error}") from error

    def _common_tokenizer(self) -> Tokenizer:
        tokenizers = []
        for source in self.sources:
            with self._errors_of(source):
                tokenizers.append(Tokenizer.load(source.tokenizer or source.path))
            if tokenizers[-1].sha256 != tokenizers[0].sha256:
                first = self.sources[0]
                raise RequestError(
                    f"data.sources {first.name} and {source.name} have different tokenizers: prepare the texts of "
                    f"{source.name} again, to another folder, with --tokenizer {first.tokenizer or first.path}"
                )
        return tokenizers[0]

    def _open_checked(self, source: SourceConfig, split: str) -> Shards | None:
        """The shards of a source, with at least one sample; None if it has no such split."""
        with self._errors_of(source):
            shards = self._open(source, split)
            if shards is None:
                return None
            if self.mixed and split != "train" and 0 < shards.index.tokens <= self.seq_len:
                tokens = plural(shards.index.tokens, "token")
                log.warning("data.sources %s has no validation: %s has only %s", source.name, shards.source, tokens)
                return None
            shards.check_windows(self.seq_len)
            return shards

    def _open(self, source: SourceConfig, split: str) -> Shards | None:
        files = {"train": source.train, "val": source.val, "test": self.options.test}[split]
        if files is None and split == "test":
            return self._open(source, "val")
        if files is None and source.path and (split == "train" or (Path(source.path) / split).is_dir()):
            files = str(Path(source.path) / split)
        if files is None:
            return None
        options = self.options
        shards = Shards.open(
            files,
            source.column,
            vocab_size=self.tokenizer.vocab_size,
            tokenizer_sha256=self.tokenizer.sha256,
            cache=self._cache(files),
            patience=options.timeout / 2,  # so that a failed read is reported before the timeout of the loader
            pad_id=options.pad_id,
            eos_id=self.tokenizer.eos_id,
            block_tokens=options.shuffle_buffer // BLOCKS_IN_BUFFER if split == "train" else BLOCK_TOKENS,
        )
        packing = "stream" if shards.packed is None else "whole"
        if options.reshuffle and packing == "whole":
            raise RequestError(f"leave data.reshuffle out: {shards.source} was prepared with --packing whole")
        prepare = options.prepare
        requested = options.packing or ("whole" if prepare and prepare.packing == "whole" else packing)
        if requested != packing:
            raise RequestError(
                f"{shards.source} was prepared with --packing {packing}, and data.packing is {requested}: leave "
                "data.packing out, or prepare the text again, to another folder"
            )
        return shards

    def _cache(self, files: str | Sequence[str]) -> "BlockCache | None":
        """The cache of decoded blocks; None where all files are on this machine."""
        if not any(map(is_remote, [files] if isinstance(files, str) else files)):
            return None
        from lm.data.cache import BlockCache

        return BlockCache(self.options.cache_dir, self.options.cache_bytes)

    def warnings(self) -> list[tuple[str, str]]:
        """Problems of the shards of each split, and what to do about them."""
        from lm.data.document_ends import describe_ends

        problems = [(self.shared, "take the texts that are in both out of one of them")] if self.shared else []
        train = self.by_source.get("train", {}).values()
        problems += filter(None, (describe_ends(shards, self.tokenizer) for shards in train))
        for split, index in ((split, shards.index) for split, shards in self.shards.items()):
            left_over = index.left_over(self.seq_len)
            if left_over > MAX_LEFT_OVER * index.tokens:
                what = f"{split}: {left_over:,} of {index.tokens:,} tokens, {left_over / index.tokens:.1%}, are in no "
                what += f"sample of {self.seq_len:,} + 1: they are left over at the ends of blocks"
                problems.append((what, "lower data.seq_len"))
        return problems

    @property
    def source_names(self) -> list[str]:
        """The names of a mixture's sources; empty without a mixture."""
        return [source.name for source in self.sources] if self.mixed else []

    @property
    def has_validation(self) -> bool:
        return "val" in self.shards

    def documents_per_token(self, split: str) -> float:
        """Number of end-of-text tokens / number of tokens, in the first block of a split."""
        return float((self.shards[split].read(0) == self.tokenizer.eos_id).mean())

    def describe_shards(self) -> dict[str, Any]:
        """Name, bytes, tokens and digest of every shard by split; they must not change before a resume."""
        described: dict[str, Any] = {split: [] for split in self.by_source}
        for split, sources in self.by_source.items():
            for source, shards in sources.items():
                prefix = f"{source}/" if self.mixed else ""
                described[split] += [list(entry._replace(name=prefix + entry.name)) for entry in shards.fingerprint()]
        return described

    def describe_mixture(self) -> dict[str, Any] | None:
        """Names and phases of a mixture as JSON values; before a resume, they may only change for later samples."""
        if not self.mixed:
            return None
        return {"sources": self.source_names, "phases": [[start, list(shares)] for start, shares in self._phases]}

    def order(self) -> "Order | Mixture":
        """The order of the training samples: which window each sample is."""
        orders = []
        for name, shards in self.by_source["train"].items():
            seed = self.seed
            if self.mixed:  # seeded by the source's name, so that its order does not depend on other sources
                seed = int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:8], "big")
            windows, lanes = shards.index.windows(self.seq_len), self._lanes(shards)
            if self.options.reshuffle:
                from lm.data.reshuffle import ReshuffledOrder

                orders.append(ReshuffledOrder(windows, seed, lanes, len(self.shards["train"].index.blocks)))
            else:
                orders.append(Order(windows, seed, lanes))
        if not self.mixed:
            return orders[0]
        from lm.data.mixture import Mixture

        return Mixture(orders, self._phases)

    def _training_shards(self) -> Shards:
        """The shards whose blocks `order` refers to."""
        train = self.shards["train"]
        if not self.options.reshuffle:
            return train
        from lm.data.reshuffle import ReshuffledShards

        return ReshuffledShards(train, self.seed, self.tokenizer.eos_id)

    def _lanes(self, shards: Shards) -> int:
        """The number of lanes for the shards of one source, independent of the other sources."""
        parts = SOURCES_IN_BUFFER if self.mixed else 1
        return lanes_for(shards.index.largest.tokens, self.options.shuffle_buffer // parts)

    def _buffer(self) -> int:
        """The maximum number of tokens of decoded blocks in memory."""
        buffer = self.options.shuffle_buffer
        if self.mixed:
            sources = self.by_source["train"].values()
            lanes = sum(self._lanes(shards) * shards.index.largest.tokens for shards in sources)
            buffer = max(buffer, lanes + BLOCKS_AHEAD * self.shards["train"].index.largest.tokens)
        return buffer

    def shares(self, samples: int) -> np.ndarray:
        """Fraction of each source in the first `samples` samples: (sources,) fp64, with a sum of 1."""
        from lm.data.mixture import source_counts

        return source_counts(self._phases, samples) / samples

    @property
    def _phases(self) -> "list[Phase]":
        from lm.data.mixture import merge_phases

        return merge_phases(self.sources, self.options.phases or [], self.seq_len)

    def _token_bytes(self, split: str) -> torch.Tensor:
        sizes = {name: token_bytes(shards, self.tokenizer) for name, shards in self.by_source[split].items()}
        if not self.mixed:
            return torch.from_numpy(*sizes.values())
        zeros = np.zeros(self.tokenizer.vocab_size)
        return torch.from_numpy(np.stack([sizes.get(source.name, zeros) for source in self.sources]))

    def read_samples(self, first: int, count: int) -> tuple[Batch, list[tuple[str, int]]]:
        """Read samples of the training stream; returns them with the file and window of each."""
        train, order, samples = self._training_shards(), self.order(), np.arange(first, first + count)
        requests = iter([Request(samples)])
        [batch] = Assembler(train, order, self.seq_len, requests, self._buffer(), self.options.timeout).batches()
        places = zip(*(part.tolist() for part in order.locate(samples)), strict=True)
        stride = train.index.stride(self.seq_len)
        return batch, [(train.file_of(block, window * stride), window) for block, window in places]

    def sources_of(self, first: int, count: int) -> list[str | None]:
        """The source name of each sample; None without a mixture."""
        sources = self.order().source_of(np.arange(first, first + count))
        if sources is None:
            return [None] * count
        return [self.source_names[source] for source in sources]

    def train_dataloader(self) -> Stream:
        """Endless batches, each this rank's part of an optimizer step, from the first sample not trained on yet."""
        if "train" not in self.shards:  # without a Trainer, which calls `setup`
            self.setup("fit")
        return Stream(
            self._training_shards(),
            self.order(),
            seq_len=self.seq_len,
            start=self.consumed,
            global_batch=self.global_batch,
            shuffle_buffer=self._buffer(),
            **self._rank_options(),
        )

    def val_dataloader(self) -> Any:
        return self._windows("val")

    def test_dataloader(self) -> Any:
        return self._windows("test")

    def predict_dataloader(self) -> Any:
        from lm.data.text_batches import text_batches

        texts = [self.options.texts] if isinstance(self.options.texts, str) else self.options.texts or []
        text_key = self.options.text_key or "text"
        return text_batches(texts, self.tokenizer, self.seq_len, self.micro_batch_size, self.predicted, text_key)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Copy a batch to the device; to CUDA asynchronously, from page-locked memory."""
        if device.type != "cuda":
            return batch.to(device)
        return batch.pin_memory().to(device, non_blocking=True)

    def _windows(self, split: str) -> Any:
        if self.tokenizer is None:  # without a Trainer, which calls `setup`
            self.setup("validate" if split == "val" else split)
        if split not in self.shards:
            return []
        limit = None  # of windows of each source
        if split == "val" and self.options.val_tokens is not None:
            limit = max(1, self.options.val_tokens // self.seq_len // len(self.sources))
        options = {"seq_len": self.seq_len, "micro_batch": self.micro_batch_size, "limit": limit}
        by_source = self.by_source[split]
        parts = [
            Windows(by_source[source.name], source=index if self.mixed else None, **options, **self._rank_options())
            for index, source in enumerate(self.sources)
            if source.name in by_source
        ]
        return ChainDataset(parts) if self.mixed else parts[0]

    def _rank_options(self) -> dict[str, Any]:
        """Which rows this rank reads, and how long it waits for them; all rows without a Trainer."""
        trainer = self.trainer
        rank, world = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        return {"rank": rank, "world": world, "timeout": self.options.timeout}

"""Test equipment: Parquet files of token ids in every layout that people have, and in our own; files of texts."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm.data.shard_writer import ShardWriter
from lm.data.shards import Shards

COLUMN = "input_ids"
OURS = {"lm.layout": "1"}  # what earlier versions put into the footer


def write_rows(
    path: Path, rows: list, kind: pa.DataType = pa.list_(pa.uint16()), row_group_rows: int = 4,
    columns: dict[str, list | pa.Array] = {}, metadata: dict | None = None, **options,
):  # fmt: skip
    """Write rows (lists of ids, possibly with None) as one shard, behind other columns; the rest goes to pyarrow."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({**columns, COLUMN: pa.array(rows, kind)}).replace_schema_metadata(metadata)
    pq.write_table(table, path, row_group_size=row_group_rows, **options)
    return path


def write_tokens(path: Path, tokens: np.ndarray, row: int = 1024, row_groups: int = 1, metadata: dict | None = OURS):
    """Write a run of tokens in the layout of earlier versions of `lm data prepare`, in equal row groups."""
    rows = np.split(tokens, range(row, len(tokens), row))
    kind = pa.list_(pa.field("element", pa.from_numpy_dtype(tokens.dtype), nullable=False))
    return write_rows(
        path, rows, kind, -(-len(rows) // row_groups), metadata=metadata, use_dictionary=False,
        column_encoding="BYTE_STREAM_SPLIT", compression="lz4", write_page_checksum=True,
    )  # fmt: skip


def write_shard(path: Path, tokens: np.ndarray, ends: Iterable[int] = ()) -> str:
    """Write tokens as `lm data prepare` does, with rows that end there; returns the digest of the footer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(path, tokens.dtype, "ab" * 32)
    writer.write(tokens, np.array([*ends, len(tokens)]))
    writer.close()
    return writer.digest


def write_folder(folder: Path, lengths: list[int], vocab_size: int = 1000, seed: int = 0, row_groups: int = 2):
    """One shard a length, with random tokens; returns all tokens end to end."""
    random = np.random.default_rng(seed)
    runs = [random.integers(0, vocab_size, length).astype(np.uint16) for length in lengths]
    for number, run in enumerate(runs):
        write_tokens(folder / f"{number:05d}.parquet", run, row=7, row_groups=row_groups)
    return np.concatenate(runs)


def write_manifest(folder: Path, vocab_size: int = 1000, digests: Iterable[str | None] = ()) -> dict:
    """Write `folder/manifest.json` for the shards of `folder/train`, with the digests of the first ones."""
    shards = []
    for path in sorted((folder / "train").glob("*.parquet")):
        footer = pq.read_metadata(path)
        counts = [footer.row_group(group).column(0).num_values for group in range(footer.num_row_groups)]
        shards.append({"file": f"train/{path.name}", "size": path.stat().st_size, "row_groups": counts})
    for shard, digest in zip(shards, digests):
        shard["digest"] = digest
    tokens = sum(sum(shard["row_groups"]) for shard in shards)
    manifest = {
        "layout": 1, "column": COLUMN, "dtype": "uint16", "tokenizer": "ab" * 32, "vocab_size": vocab_size, "eos_id": 0,
        "splits": {"train": {"documents": 1, "tokens": tokens, "bytes": 1, "shards": shards}},
        "sources": [], "options": {},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


def all_tokens(shards: Shards) -> np.ndarray:
    """The ids of all blocks end to end."""
    return np.concatenate([shards.read(block) for block in range(len(shards.index.blocks))])


def write_jsonl(path: Path, texts: list, key: str = "text") -> Path:
    """One text a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": number, key: text}) + "\n" for number, text in enumerate(texts)))
    return path

"""Test equipment: Parquet files of token ids in every layout that people have, and in our own."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COLUMN = "input_ids"
OURS = {"lm.layout": "1"}  # what earlier versions put into the footer


def write_rows(path: Path, rows: list, kind: pa.DataType = pa.list_(pa.uint16()), row_group_rows: int = 4, **options):
    """Write rows (lists of ids, possibly with None) as one shard; `extra` adds columns, the rest goes to pyarrow."""
    columns = {"text": [f"row {i}" for i in range(len(rows))], COLUMN: pa.array(rows, kind)}
    columns = columns if options.pop("extra", False) else {COLUMN: columns[COLUMN]}
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns).replace_schema_metadata(options.pop("metadata", None))
    pq.write_table(table, path, row_group_size=row_group_rows, **options)
    return path


def write_tokens(path: Path, tokens: np.ndarray, row: int = 1024, row_groups: int = 1, metadata: dict | None = OURS):
    """Write a run of tokens in the layout of earlier versions of `lm data prepare`: rows of `row` tokens, in equal row groups."""
    ends = np.append(np.arange(0, len(tokens), row), len(tokens)).astype(np.int32)
    kind = pa.list_(pa.field("element", pa.from_numpy_dtype(tokens.dtype), nullable=False))
    lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(tokens), type=kind)
    schema = pa.schema([pa.field(COLUMN, kind, nullable=False)], metadata=metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.Table.from_arrays([lists], schema=schema), path, row_group_size=-(-len(lists) // row_groups),
        use_dictionary=False, column_encoding="BYTE_STREAM_SPLIT", compression="lz4", write_page_checksum=True,
    )
    return path


def write_folder(folder: Path, lengths: list[int], vocab_size: int = 1000, seed: int = 0, row_groups: int = 2):
    """One shard a length, with random tokens; returns all tokens end to end."""
    random = np.random.default_rng(seed)
    runs = [random.integers(0, vocab_size, length).astype(np.uint16) for length in lengths]
    for number, run in enumerate(runs):
        write_tokens(folder / f"{number:05d}.parquet", run, row=7, row_groups=row_groups)
    return np.concatenate(runs)


def write_manifest(folder: Path, split: str = "train", vocab_size: int = 1000, tokenizer: str = "ab" * 32) -> dict:
    """Write `folder/manifest.json` for the shards of `folder/split`, and return it."""
    shards = []
    for path in sorted((folder / split).glob("*.parquet")):
        footer = pq.read_metadata(path)
        counts = [footer.row_group(group).column(0).num_values for group in range(footer.num_row_groups)]
        shards.append({"file": f"{split}/{path.name}", "size": path.stat().st_size, "row_groups": counts})
    tokens = sum(sum(shard["row_groups"]) for shard in shards)
    manifest = {
        "layout": 1, "column": COLUMN, "dtype": "uint16", "tokenizer": tokenizer, "vocab_size": vocab_size, "eos_id": 0,
        "splits": {split: {"documents": 1, "tokens": tokens, "bytes": 1, "shards": shards}},
        "sources": [], "options": {},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest

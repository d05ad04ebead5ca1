"""An index of a folder of shards that another program wrote: `lm data index` makes it, `data/catalog` reads it.

It has what would have to be read from the footer of every shard: the tokens of the row groups, and a digest by which a
changed file is noticed. Ten thousand shards then open as fast as one file is read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lm.data.parquet import Column, PackedRows
from lm.errors import RequestError
from lm.system.files import write_atomically
from lm.system.parsing import parse_json


class IndexedShard(NamedTuple):
    """What is known of a shard; the fields are those of `catalog.Shard`."""

    size: int
    row_groups: tuple[int, ...]
    digest: str | None
    labels: bool
    packed: PackedRows | None


def write_index(file: Path, shards: Mapping[str, IndexedShard], column: Column, tokenizer_sha256: str | None) -> None:
    """Write the index of a folder: its shards by name, as `column` and the tokenizer, if there is one, read them."""
    index = {
        **_options(column),
        "tokenizer": tokenizer_sha256,
        "vocab_size": column.vocab_size,
        "shards": {name: shard._asdict() for name, shard in shards.items()},
    }
    write_atomically(file, json.dumps(index))


def read_index(
    text: bytes, source: str, sizes: Mapping[str, int], column: Column, tokenizer_sha256: str | None
) -> tuple[dict[str, IndexedShard], int | None]:
    """The shards of an index, and the vocabulary's size, if it has one; `sizes` are those of the files in the folder.

    RequestError if the index is of other files, or of another column, padding or tokenizer.
    """
    again = f"run `lm data index {source}` again"
    try:
        index = parse_json(text)
        shards = {}
        for name, entry in index["shards"].items():
            packed = PackedRows(*entry["packed"]) if entry["packed"] else None
            shards[name] = IndexedShard(**{**entry, "row_groups": tuple(entry["row_groups"]), "packed": packed})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RequestError(f"the index of {source} is damaged ({error!r}): {again}") from error
    if changed := sizes.items() ^ {(name, shard.size) for name, shard in shards.items()}:
        name, _ = min(changed)
        raise RequestError(f"{source}/{name} is new, gone or changed since the folder was indexed: {again}")
    for option, value in _options(column).items():
        if index[option] != value:
            was = f"{source} was indexed with {option} {index[option]}"
            raise RequestError(f"{was}, and here it is {value}: {again}, with the options of `data`")
    if None not in (index["tokenizer"], tokenizer_sha256) and index["tokenizer"] != tokenizer_sha256:
        raise RequestError(f"{source} was indexed with another tokenizer: {again}, with --tokenizer")
    return shards, index["vocab_size"]


def _options(column: Column) -> dict[str, str | int | None]:
    return {"column": column.name, "pad_id": column.pad_id, "eos_id": column.pad_id is not None and column.eos_id}

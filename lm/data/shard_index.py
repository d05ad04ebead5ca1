"""An index of a folder of shards that another program wrote: `lm data index` makes it, `data/catalog` reads it.

It has what would have to be read from the footer of every shard: the tokens of the row groups, and a digest by which a
changed file is noticed. Ten thousand shards then open as fast as one file is read.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lm.data.parquet import Column, PackedRows
from lm.errors import RequestError
from lm.system.files import write_atomically
from lm.system.parsing import parse_json

if TYPE_CHECKING:
    from lm.data.catalog import Shard

FACTS = ("size", "row_groups", "digest", "labels", "packed")  # of a `Shard`


def write_index(file: Path, shards: Sequence["Shard"], column: Column, tokenizer_sha256: str | None) -> None:
    """Write the index of a folder: its shards by name, as `column` and the tokenizer, if there is one, read them."""
    index = {
        **_options(column),
        "tokenizer": tokenizer_sha256,
        "vocab_size": column.vocab_size,
        "shards": {shard.name: {name: getattr(shard, name) for name in FACTS} for shard in shards},
    }
    write_atomically(file, json.dumps(index))


def read_index(
    text: bytes, source: str, shards: Sequence["Shard"], column: Column, tokenizer_sha256: str | None
) -> tuple[list["Shard"], int | None]:
    """The shards of a folder with what its index says of them, and the vocabulary's size, if the index has one.

    RequestError if the index is of other files, or of another column, padding or tokenizer.
    """
    again = f"run `lm data index {source}` again"
    try:
        index = parse_json(text)
        indexed = {file: {name: entry[name] for name in FACTS} for file, entry in index["shards"].items()}
        for entry in indexed.values():
            entry["row_groups"] = tuple(entry["row_groups"])
            entry["packed"] = PackedRows(*entry["packed"]) if entry["packed"] else None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RequestError(f"the index of {source} is damaged ({error!r}): {again}") from error
    sizes = {(file, entry["size"]) for file, entry in indexed.items()}
    if changed := sizes ^ {(shard.name, shard.size) for shard in shards}:
        name, _ = min(changed)
        raise RequestError(f"{source}/{name} is new, gone or changed since the folder was indexed: {again}")
    for option, value in _options(column).items():
        if index[option] != value:
            was = f"{source} was indexed with {option} {index[option]}"
            raise RequestError(f"{was}, and here it is {value}: {again}, with the options of `data`")
    if None not in (index["tokenizer"], tokenizer_sha256) and index["tokenizer"] != tokenizer_sha256:
        raise RequestError(f"{source} was indexed with another tokenizer: {again}, with --tokenizer")
    return [replace(shard, **indexed[shard.name]) for shard in shards], index["vocab_size"]


def _options(column: Column) -> dict[str, str | int | None]:
    return {"column": column.name, "pad_id": column.pad_id, "eos_id": column.pad_id is not None and column.eos_id}

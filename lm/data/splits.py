"""Which tokens are for training and which for validation, once all are encoded.

A step of `data/prepare`. The hash of a document's text decides; what is left to do here is to see that a small corpus
has both: of several documents one is moved, an only one is cut near its end.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.data.encoder import id_type
from lm.data.parts import part_ids
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError

log = logging.getLogger(__name__)

CUT_SEARCH = 4096  # tokens that are looked at for the end of a line


@dataclass
class Split:
    """Args:
    name: "train" or "val".
    documents: how many.
    tokens: with the one that ends each document.
    bytes: UTF-8 bytes of the documents.
    slices: (part, first token, token after the last).
    """

    name: str
    documents: int
    tokens: int
    bytes: int
    slices: list[tuple[str, int, int]]


def divide(records: list[dict[str, Any]], val_fraction: float, tokenizer: Tokenizer, folder: Path) -> list[Split]:
    """The splits of a preparation.

    Args:
        records: of all units, in order.
        val_fraction: share of the documents for validation; 0 for one split only.
        tokenizer: that the parts were encoded with.
        folder: of the parts.

    Returns:
        "train", and "val" unless no validation was asked for.

    Raises:
        RequestError: there is no text.
    """
    parts = [part for record in records for part in record["parts"]]
    train, val = (_gather(name, [part for part in parts if part["split"] == name]) for name in ("train", "val"))
    documents = train.documents + val.documents
    if documents == 0:
        raise RequestError("the input holds no text: every document is empty")
    if documents == 1 and val_fraction > 0:
        return _cut(train if train.documents else val, val_fraction, tokenizer, folder)
    if val.documents == 0 and val_fraction > 0:
        log.info("no document fell to validation by its hash: the one that was nearest to it is taken")
        _move(min((record["lowest"] for record in records if record["lowest"]), key=_by_hash), train, val)
    elif train.documents == 0:
        log.info("every document fell to validation by its hash: the one that was farthest from it is for training")
        _move(max((record["highest"] for record in records if record["highest"]), key=_by_hash), val, train)
    return [train, val] if val.documents else [train]


def _by_hash(document: dict[str, Any]) -> float:
    return document["hash"]


def _gather(name: str, parts: list[dict[str, Any]]) -> Split:
    documents, tokens, size = (sum(part[key] for part in parts) for key in ("documents", "tokens", "bytes"))
    return Split(name, documents, tokens, size, [(part["file"], 0, part["tokens"]) for part in parts])


def _move(document: dict[str, Any], source: Split, target: Split) -> None:
    """Take one document out of a split and into the other, which is empty."""
    file, start, stop = document["part"], document["start"], document["stop"]
    for split, sign in ((source, -1), (target, 1)):
        split.documents += sign
        split.tokens += sign * (stop - start)
        split.bytes += sign * document["bytes"]
    target.slices = [(file, start, stop)]
    around = []
    for part, first, end in source.slices:
        around += [(part, first, start), (part, stop, end)] if part == file else [(part, first, end)]
    source.slices = [piece for piece in around if piece[1] < piece[2]]


def _cut(only: Split, val_fraction: float, tokenizer: Tokenizer, folder: Path) -> list[Split]:
    """Cut the only document near its end, at the end of a line if there is one."""
    [(file, _, stop)] = only.slices
    if stop < 2:
        raise RequestError("the input is a single token: there is nothing to train on")
    ids = part_ids(folder, file, id_type(tokenizer.vocab_size))
    edge = min(stop - 1, max(1, round(stop * (1 - val_fraction))))
    for place in range(edge, min(edge + CUT_SEARCH, stop - 1)):
        if tokenizer.decode(ids[place - 1 : place]).endswith("\n"):
            edge = place
            break
    log.info("there is one document: its last %s of %s tokens are for validation", f"{stop - edge:,}", f"{stop:,}")
    size = int(tokenizer.token_bytes()[ids[edge:]].sum())
    return [
        Split("train", 1, edge, only.bytes - size, [(file, 0, edge)]),
        Split("val", 1, stop - edge, size, [(file, edge, stop)]),
    ]

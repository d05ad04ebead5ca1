"""Which documents are for training and which for validation, of the encoded parts of `data/encode`.

Normally a hash of each document has decided, or the names of files have. Of a few long documents, the end is held out.
"""

import logging
from collections.abc import Iterator
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm.data.encode import COUNTS, Slice, part_ids
from lm.data.encoder import id_type
from lm.data.overlap import SPAN, describe_shared
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError

log = logging.getLogger(__name__)

CUT_SEARCH = 4096  # tokens in which to look for the end of a line or document


class Split(NamedTuple):
    name: str  # "train" or "val"
    counts: dict[str, int]  # of COUNTS
    slices: list[Slice]  # of the parts


def divide(parts: list[dict[str, Any]], val_fraction: float, tokenizer: Tokenizer, folder: Path) -> list[Split]:
    """Make splits from the parts of all units: "train", and "val" unless no validation was asked for."""
    train, val = (_gather(name, [part for part in parts if part["split"] == name]) for name in ("train", "val"))
    documents, held_out = train.counts["documents"], val.counts["documents"]
    if documents and (held_out or val_fraction == 0):
        return [train, val] if held_out else [train]
    only = train if documents else val._replace(name="train")
    if only.counts["documents"] == 0:
        raise RequestError("the input holds no text: every document is empty")
    return _cut(only, val_fraction, tokenizer, folder) if val_fraction > 0 else [only]


def _gather(name: str, parts: list[dict[str, Any]]) -> Split:
    counts = {key: sum(part[key] for part in parts) for key in COUNTS}
    return Split(name, counts, [Slice(part["file"], 0, part["tokens"]) for part in parts])


def shared_documents(splits: list[Split], tokenizer: Tokenizer, folder: Path) -> str | None:
    """`describe_shared` for documents of splits that file names decide; documents of up to SPAN tokens are ignored."""
    train, *held_out = splits
    documents = [document for split in held_out for document in _documents(split, tokenizer, folder)]
    digests = [digest for piece, digest in documents if piece.stop - piece.start > SPAN]
    unique = set(digests)
    for _, digest in _documents(train, tokenizer, folder) if unique else ():
        unique.discard(digest)
    return describe_shared(sum(digest not in unique for digest in digests), len(digests), "documents")


def _documents(split: Split, tokenizer: Tokenizer, folder: Path) -> Iterator[tuple[Slice, bytes]]:
    """The documents of a split, each with the digest of its ids."""
    for part, first, last in split.slices:
        ids = part_ids(folder, part, id_type(tokenizer.vocab_size))[first:last]
        ends = first + np.flatnonzero(ids == tokenizer.eos_id) + 1
        for start, stop in pairwise([first, *ends.tolist()]):
            yield Slice(part, start, stop), blake2b(ids[start - first : stop - first]).digest()


def _cut(split: Split, val_fraction: float, tokenizer: Tokenizer, folder: Path) -> list[Split]:
    """Hold out the end of a split that has all documents, cutting at the end of a document or line near the fraction.

    Equal documents go to the same split, or are cut at the same place.
    """

    def ids(piece: Slice) -> np.ndarray:
        return part_ids(folder, piece.part, id_type(tokenizer.vocab_size))[piece.start : piece.stop]

    documents, digests = zip(*_documents(split, tokenizer, folder), strict=True)
    different = dict(zip(digests, documents, strict=True))  # distinct documents, in order
    ends = np.cumsum([document.stop - document.start for document in different.values()])
    if ends[-1] < 2:
        raise RequestError("the input is a single token: there is nothing to train on")
    edge = min(int(ends[-1]) - 1, max(1, round(int(ends[-1]) * (1 - val_fraction))))
    index = int(np.searchsorted(ends, edge, side="right"))  # of the document that is cut
    last = ids(list(different.values())[index])
    first = edge - int(ends[index]) + len(last)
    if first == len(last) - 1 and last[-1] == tokenizer.eos_id:  # the token that ends a document is not text
        first = max(first - 1, 0 if index else 1)
    near = range(first, min(first + CUT_SEARCH, len(last) + (index < len(ends) - 1)))
    near = [at for at in near if at == first or at != len(last) - 1]
    line_ends = ("\n", tokenizer.eos_token)
    cut = next((at for at in near if at == 0 or tokenizer.decode(last[at - 1 : at]).endswith(line_ends)), first)
    order = {digest: number for number, digest in enumerate(different)}
    training, held_out = [], []
    for (part, start, stop), digest in zip(documents, digests, strict=True):
        middle = stop if order[digest] < index else start
        if order[digest] == index:
            middle = start + cut
        if middle > start:
            training.append(Slice(part, start, middle))
        if middle < stop:
            held_out.append(Slice(part, middle, stop))
    sizes, counts = tokenizer.token_bytes(), split.counts
    tokens = sum(piece.stop - piece.start for piece in held_out)
    counted = sum(int(sizes[ids(piece)].sum()) for piece in held_out)
    size = round(counts["bytes"] * counted / max(1, counts["token_bytes"]))
    log.info(f"too few documents to hold some out: validation gets {tokens:,} of {counts['tokens']:,} tokens")
    val = {"documents": len(held_out), "tokens": tokens, "bytes": size, "token_bytes": counted}
    train = {key: counts[key] - val[key] for key in COUNTS} | {"documents": len(training)}
    return [Split("train", train, _joined(training)), Split("val", val, _joined(held_out))]


def _joined(pieces: list[Slice]) -> list[Slice]:
    """Join slices that follow each other in a part; the order stays."""
    joined: list[Slice] = []
    for piece in pieces:
        if joined and joined[-1].part == piece.part and joined[-1].stop == piece.start:
            joined[-1] = joined[-1]._replace(stop=piece.stop)
        else:
            joined.append(piece)
    return joined

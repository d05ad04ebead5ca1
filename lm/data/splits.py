"""Which documents are for training and which for validation, of the encoded parts of `data/encode`; each only once.

Normally a hash of each document has decided, or the names of files have. Of a few long documents, the end is held out.
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm.data.encode import COUNTS, DOCUMENT, DOCUMENTS, Recipe, Slice, part_ids
from lm.data.encoder import id_type
from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError

log = logging.getLogger(__name__)

CUT_SEARCH = 4096  # tokens in which to look for the end of a line or document


class Split(NamedTuple):
    name: str  # "train" or "val"
    counts: dict[str, int]  # of COUNTS, and "documents"
    slices: list[Slice]  # of the parts


class Repeated(NamedTuple):
    """Documents that are left out, since an equal one is there; equal but for case and blanks."""

    documents: int
    tokens: int
    of_validation: int  # documents of the training data that are in the validation data


class PartDocuments(NamedTuple):
    part: str
    split: str
    facts: np.ndarray  # (documents,) DOCUMENT
    kept: np.ndarray  # (documents,) bool


def divide(
    parts: list[dict[str, Any]], recipe: Recipe, tokenizer: Tokenizer, keep_duplicates: bool
) -> tuple[list[Split], Repeated]:
    """Make splits from the parts of all units: "train", and "val" unless no validation was asked for."""
    documents, repeated = read_documents(parts, recipe.folder, keep_duplicates)
    train, val = (_gather(name, [part for part in documents if part.split == name]) for name in ("train", "val"))
    if train.slices and (val.slices or recipe.val_fraction == 0):
        return [train, val] if val.slices else [train], repeated
    if repeated.of_validation and not train.slices:
        raise RequestError("all documents of the training data are in the validation data too: give other text for one")
    if not train.slices and not val.slices:
        raise RequestError("the input holds no text: every document is empty")
    only = train if train.slices else val._replace(name="train")
    if recipe.val_fraction == 0:
        return [only], repeated
    if recipe.chat_tokens is not None:
        return _hold_out_last(documents, recipe.val_fraction), repeated
    return _cut(only, recipe.val_fraction, tokenizer, recipe.folder), repeated


def _hold_out_last(documents: list[PartDocuments], val_fraction: float) -> list[Split]:
    """Hold out the last conversations, at least one, without cutting any."""
    total = sum(int(part.kept.sum()) for part in documents)
    if total < 2:
        raise RequestError("a single conversation is too little to hold some out: --val_fraction 0 trains on it")
    held_out, number = total - max(1, round(total * val_fraction)), 0
    train, val = [], []
    for part in documents:
        is_val = number + np.cumsum(part.kept) > held_out
        number += int(part.kept.sum())
        train.append(part._replace(kept=part.kept & ~is_val))
        val.append(part._replace(kept=part.kept & is_val))
    return [_gather("train", train), _gather("val", val)]


def read_documents(
    parts: list[dict[str, Any]], folder: Path, keep_duplicates: bool
) -> tuple[list[PartDocuments], Repeated]:
    """The documents of all parts. Of equal ones the first is kept, but one of validation before those of training."""
    facts = [np.fromfile(folder / f"{part['file']}{DOCUMENTS}", DOCUMENT) for part in parts]
    kept, repeated = [np.ones(len(of_part), bool) for of_part in facts], Repeated(0, 0, 0)
    if not keep_duplicates:
        order = sorted(range(len(parts)), key=lambda index: parts[index]["split"] != "val")  # validation first
        digests = np.concatenate([np.empty(0, "<u8"), *(facts[index]["digest"] for index in order)])
        _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
        equal, number = first[inverse], np.arange(len(digests))  # (documents,) the first that is equal, and itself
        held_out = sum(len(facts[index]) for index in order if parts[index]["split"] == "val")
        ends = np.cumsum([len(facts[index]) for index in order])
        for index, of_part in zip(order, np.split(equal == number, ends[:-1])):
            kept[index] = of_part
        tokens = sum(int(of_part["tokens"][~stays].sum()) for of_part, stays in zip(facts, kept, strict=True))
        of_validation = int(((equal < held_out) & (number >= held_out)).sum())
        repeated = Repeated(int((equal != number).sum()), tokens, of_validation)
    documents = zip(parts, facts, kept, strict=True)
    return [PartDocuments(part["file"], part["split"], *rest) for part, *rest in documents], repeated


def _gather(name: str, documents: list[PartDocuments]) -> Split:
    """A split of the documents that are kept: slices of the parts, as long as possible."""
    counts, slices = dict.fromkeys(("documents", *COUNTS), 0), []
    for one in documents:
        counts["documents"] += int(one.kept.sum())
        for count in COUNTS:
            counts[count] += int(one.facts[count][one.kept].sum())
        borders = np.flatnonzero(np.diff(one.kept, prepend=False, append=False))  # documents where runs begin and end
        tokens = np.concatenate([[0], np.cumsum(one.facts["tokens"])])[borders].tolist()
        slices += [Slice(one.part, start, stop) for start, stop in zip(tokens[::2], tokens[1::2], strict=True)]
    return Split(name, counts, slices)


def _cut(split: Split, val_fraction: float, tokenizer: Tokenizer, folder: Path) -> list[Split]:
    """Hold out the end of a split that has all documents, cut where a line or document ends near the fraction."""
    total, dtype = split.counts["tokens"], id_type(tokenizer.vocab_size)
    edge = min(total - 1, max(1, round(total * (1 - val_fraction))))
    stops = np.cumsum([piece.stop - piece.start for piece in split.slices])
    index = int(np.searchsorted(stops, edge, side="right"))
    middle = split.slices[index]  # which is cut
    ids = part_ids(folder, middle.part, dtype)[middle.start : middle.stop]
    edge -= int(stops[index]) - len(ids)
    ends = np.flatnonzero(ids == tokenizer.eos_id) + 1  # of documents
    number = int(np.searchsorted(ends, edge, side="right"))
    begin, end = int(ends[number - 1]) if number else 0, int(ends[number])
    is_last = index == len(split.slices) - 1 and end == len(ids)
    cut = begin + _nearest_end(ids[begin:end], edge - begin, index + begin == 0, is_last, tokenizer)
    place = middle.start + cut
    training = [*split.slices[:index], middle._replace(stop=place)]
    held_out = [middle._replace(start=place), *split.slices[index + 1 :]]
    training, held_out = ([piece for piece in side if piece.start < piece.stop] for side in (training, held_out))
    sizes, counts = tokenizer.token_bytes(), split.counts
    tokens = documents = counted = 0
    for part, start, stop in held_out:
        ids = part_ids(folder, part, dtype)[start:stop]
        tokens += len(ids)
        documents += int((ids == tokenizer.eos_id).sum())
        counted += int(sizes[ids].sum())
    log.info(f"too few documents to hold some out: validation gets {tokens:,} of {total:,} tokens")
    size = round(counts["bytes"] * counted / max(1, counts["token_bytes"]))
    val = {"documents": documents, "tokens": tokens, "bytes": size, "token_bytes": counted}
    train = {name: counts[name] - val[name] for name in val}
    train["documents"] += begin < cut < end  # one document is in both
    return [Split("train", train, training), Split("val", val, held_out)]


def _nearest_end(document: np.ndarray, first: int, is_first: bool, is_last: bool, tokenizer: Tokenizer) -> int:
    """Where to cut a document, from `first` on: at the end of a line or of the document if one is near.

    Both sides have text: the token that ends a document is none.
    """
    if first == len(document) - 1:
        first = max(first - 1, 1 if is_first else 0)
    near = range(first, min(first + CUT_SEARCH, len(document) + (not is_last)))
    line_ends = ("\n", tokenizer.eos_token)
    for place in near:
        if place == 0 or tokenizer.decode(document[place - 1 : place]).endswith(line_ends):
            if place == first or place != len(document) - 1:
                return place
    return first

"""Files of token ids as other projects write them: nanoGPT, llm.c, Megatron-LM and NeMo, datatrove, OLMo and NumPy.

`data/documents` yields their documents. Bytes at the beginning of a file, or a file beside it, tell its layout:

- nanoGPT and OLMo write ids alone: uint16, or uint32 if the vocabulary has more than 65,536;
- llm.c and modded-nanogpt: a header of 256 int32 (magic number, version, number of ids), which says their type;
- Megatron-LM and NeMo: ids alone in a `.bin`, and an `.idx` with their type and the borders of sequences and documents;
- datatrove: ids alone in a `.ds`, a `.ds.index` with the ends of documents, a `.ds.metadata` with the size of an id;
- `numpy.save`: a header with type and shape.

A file whose header is not known is an error: trained on, it would be noise.
"""

import io
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lm.data.encoder import id_type
from lm.data.text_files import TextFile
from lm.errors import RunError, first_line

CHUNK = 8 * 2**20  # ids that are held at once
LLM_C_HEADER = 1024  # bytes
LLM_C = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}  # magic number and version -> type of the ids
MEGATRON = b"MMIDIDX\0\0"
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # the others are of floating point
NUMPY = b"\x93NUMPY"


class Layout(NamedTuple):
    """Where the ids of a file are, and where its documents end."""

    dtype: np.dtype
    offset: int = 0  # bytes before the first id
    count: int | None = None  # ids; None: up to the end of the file
    ends: np.ndarray = np.empty(0, np.int64)  # (documents,): the id after the last of each, where the file says it


def read_ids(file: TextFile, vocab_size: int, eos_id: int) -> Iterator[tuple[str, np.ndarray, bool]]:
    """The documents of a file: where each begins, its ids without the end-of-text token, and whether it ends there.

    A long document comes in pieces of at most CHUNK ids; empty ones are left out. RunError for a layout that is not
    known, a truncated file, and an id outside the vocabulary.
    """
    layout = find_layout(file, vocab_size)
    position = 0  # ids before the chunk
    unfinished = False  # whether a piece of the document that the chunk begins with was yielded already
    with file.stream() as stream:
        stream.read(layout.offset)
        following = _chunk(stream, file, layout, 0)
        while len(following):
            ids, following = following, _chunk(stream, file, layout, position + len(following))
            _check(ids, file, position, vocab_size, layout.dtype)
            # Where documents end, and where the next ones begin: behind the end-of-text token, if there is one.
            first, last = np.searchsorted(layout.ends, (position, position + len(ids)), side="right")
            eos, others = np.flatnonzero(ids == eos_id), layout.ends[first:last] - position
            borders = sorted({*zip(eos.tolist(), (eos + 1).tolist()), *zip(others.tolist(), others.tolist())})
            start = 0
            for end, begin in borders:
                if end > start or unfinished:
                    yield f"{file.name}, token {position + start}", ids[start:end], True
                start, unfinished = begin, False
            if start < len(ids):
                unfinished = len(following) > 0
                yield f"{file.name}, token {position + start}", ids[start:], not unfinished
            position += len(ids)
    if layout.count not in (None, position):
        raise RunError(f"{file.name} ends after {position:,} of its {layout.count:,} ids: it is truncated")


def _chunk(stream: io.BufferedIOBase, file: TextFile, layout: Layout, position: int) -> np.ndarray:
    """The next ids, (n,) of the file's type; `position` of them are read."""
    left = CHUNK if layout.count is None else min(CHUNK, layout.count - position)
    data = stream.read(left * layout.dtype.itemsize)
    whole = len(data) // layout.dtype.itemsize * layout.dtype.itemsize
    if whole < len(data):
        raise RunError(f"{file.name} ends inside of a token id: it is truncated, or not of {layout.dtype} ids")
    return np.frombuffer(data, layout.dtype)


def _check(ids: np.ndarray, file: TextFile, position: int, vocab_size: int, dtype: np.dtype) -> None:
    """RunError for ids outside the vocabulary, and for what are the halves of wider ids."""
    if position == 0 and len(ids) >= 16 and not ids[1::2].any():
        size, actual = dtype.itemsize, dtype.itemsize * (2 if ids[2::4].any() else 4)
        raise RunError(
            f"{file.name}: every second id is 0, so an id has {actual} bytes, not {size}: np.fromfile("
            f"{file.name!r}, '<u{actual}').astype('<u{size}').tofile('train.bin') makes a file of {dtype}"
        )
    check_ids(ids, file.name, position, vocab_size)


def check_ids(ids: np.ndarray, where: str, position: int, vocab_size: int) -> None:
    """RunError for an id outside the vocabulary; `position` ids are before these."""
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        first = int(np.argmax(outside))
        raise RunError(
            f"{where}, token {position + first}: id {ids[first]} is outside the vocabulary of {vocab_size}; was it "
            "made with another tokenizer?"
        )


# ---- layouts ---------------------------------------------------------------------------------------------------------


def find_layout(file: TextFile, vocab_size: int) -> Layout:
    """The layout of a file, by its first bytes or the file beside it."""
    with file.stream() as stream:
        head = stream.read(LLM_C_HEADER)
        if head.startswith(NUMPY):
            stream.seek(0)
            return _numpy(stream, file)
    if (index := file.read_beside(".bin", ".idx")) is not None:
        return _megatron(index, file)
    if (ends := file.read_beside(".ds", ".ds.index")) is not None:
        if file.read_beside(".ds", ".ds.loss") is not None:
            raise RunError(f"{file.name} has a mask of its loss beside it: write Parquet with `labels`, which is read")
        name, _, size = (file.read_beside(".ds", ".ds.metadata") or b"").decode().partition("\n")[0].rpartition("|")
        dtype = np.dtype("<u4" if size == "4" else "<u2") if name else id_type(vocab_size)
        return Layout(dtype, ends=np.frombuffer(ends, "<u8").astype(np.int64))
    header = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
    if len(header) == LLM_C_HEADER // 4 and not header[3:].any():
        magic, version, count = header[:3].tolist()
        if (magic, version) not in LLM_C:
            known = " or ".join(f"{magic}, version {version}" for magic, version in LLM_C)
            raise RunError(
                f"{file.name} begins with a header that is not known (magic number {magic}, version {version}; "
                f"llm.c's files of token ids have {known}): write the ids alone, as nanoGPT does"
            )
        return Layout(LLM_C[magic, version], LLM_C_HEADER, count)
    return Layout(id_type(vocab_size))


def _numpy(stream: io.BufferedIOBase, file: TextFile) -> Layout:
    try:
        version = np.lib.format.read_magic(stream)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(stream)
    except ValueError as error:
        raise RunError(f"{file.name} is a damaged array of NumPy ({first_line(error)})") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise RunError(
            f"{file.name} is an array {shape} of {dtype}, not a list of ids: np.load({file.name!r}).ravel()"
            ".astype(np.uint32) is one, if it holds ids"
        )
    return Layout(dtype, stream.tell(), shape[0])


def _megatron(index: bytes, file: TextFile) -> Layout:
    """Of an index: its magic number and version, the code of a type, the numbers of sequences and of borders of
    documents; the length of each sequence (int32), its place in the file (int64), and the borders, as sequences."""
    begin = len(MEGATRON)
    version, code, sequences, borders = struct.unpack_from("<QBQQ", index.ljust(begin + 25, b"\0"), begin)
    size = begin + 25 + 12 * sequences + 8 * borders
    if not index.startswith(MEGATRON) or version != 1 or code not in MEGATRON_TYPES or len(index) != size:
        raise RunError(
            f"{file.name} has an .idx beside it that is not an index of Megatron-LM, version 1, of {len(index):,} "
            "bytes: is it damaged? A file of ids alone has none"
        )
    lengths = np.frombuffer(index, "<i4", sequences, begin + 25)
    ends = np.cumsum(lengths, dtype=np.int64)
    documents = np.frombuffer(index, "<i8", borders, begin + 25 + 12 * sequences)
    documents = documents[documents > 0]
    return Layout(np.dtype(MEGATRON_TYPES[code]), 0, int(ends[-1]) if sequences else 0, ends[documents - 1])

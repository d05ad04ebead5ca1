"""The documents in files of text: plain text, JSON lines, tables; files of token ids are read by `data/token_files`.

Between `data/text_files`, which finds the files, and `data/encode`. A document of any length streams through: it comes
in pieces of at most PIECE characters, cut at line ends.
"""

import codecs
import csv
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lm.data.parquet import is_list_of_integers
from lm.data.text_files import TEXT_KEY, TextFile, find_files
from lm.data.token_files import check_ids, read_ids
from lm.data.tokenizer import Tokenizer
from lm.errors import LmError, RequestError, RunError, first_line

if TYPE_CHECKING:
    from lm.data.chat import ChatTemplate

PIECE = 2**20  # characters of a text that are encoded at once; `tokenizers` needs 200 bytes for each
PARQUET_ROWS = 256  # decoded at once; some million characters for usual documents
SURROGATE = re.compile("[\ud800-\udfff]")


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    where: str  # file and line, row or token, for messages
    content: str | np.ndarray  # text, or (n,) ids without the end-of-text token
    last: bool  # whether the document ends here
    split: str | None = None  # "train" or "val" where the names of the files decide it
    learned: np.ndarray | None = None  # of a conversation: which ids, and whether its end, (n + 1,) bool


def read_documents(inputs: Sequence[str], text_key: str = "text") -> Iterator[tuple[str, str]]:
    """The documents of files, folders, globs or URLs, with the place of each, in order."""
    for file in find_files(inputs):
        contents = []
        for piece in read_pieces(file, text_key=text_key):
            contents.append(piece.content)
            if piece.last:
                yield piece.where, "".join(contents)
                contents = []


def read_pieces(
    file: TextFile,
    part: int = 0,
    parts: int = 1,
    text_key: str = "text",
    tokenizer: Tokenizer | None = None,
    chat: "ChatTemplate | None" = None,
) -> Iterator[Piece]:
    """Documents of a part, from 0, of a file; empty ones are left out. Flat ids need the tokenizer that made them.

    With a chat template they are conversations, and the file's kind is one of `CHAT_KINDS`. The documents of all parts
    one after the other are those of the file; there are several of divisible files only. RunError names the line, byte
    or row of a file that cannot be read.
    """
    try:
        if chat is not None:
            for where, messages in CHAT_KINDS[file.kind](file, part, parts, text_key, chat=True):
                yield _conversation(messages, where, chat, file.split)
            return
        if file.kind == "flat":
            tokenizer = _tokenizer_of_ids(file, tokenizer)
            for where, ids, last in read_ids(file, tokenizer.vocab_size, tokenizer.eos_id):
                yield Piece(where, ids, last, file.split)
            return
        if file.kind == "text":
            documents = [(file.name, _decoded(file))]
        else:
            readers = {"jsonl": _json_lines, "parquet": _parquet, "arrow": _arrow, "csv": _csv, "tsv": _csv}
            documents = ((where, (text,)) for where, text in readers[file.kind](file, part, parts, text_key))
        for where, chunks in documents:
            if isinstance(chunks, tuple) and isinstance(chunks[0], list):  # token ids of a row
                ids = _ids_of_row(chunks[0], where, _tokenizer_of_ids(file, tokenizer))
                yield from (Piece(where, document, True, file.split) for document in ids)
            else:
                yield from (Piece(where, text, last, file.split) for text, last in _cut(chunks) if text)
    except LmError:
        raise
    except (pa.ArrowException, OSError, EOFError, lzma.LZMAError, zlib.error, UnicodeDecodeError) as error:
        raise RunError(f"{file.name} cannot be read ({first_line(error)}); is it damaged or truncated?") from error


def _conversation(messages: Any, where: str, chat: "ChatTemplate", split: str | None) -> Piece:
    try:
        ids, learned = chat.encode(messages)
    except RequestError as error:
        raise RunError(f"{where}: {error}") from error
    return Piece(where, ids, True, split, learned)


def _tokenizer_of_ids(file: TextFile, tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise RequestError(f"{file.name} holds token ids: give the tokenizer.json they were made with (--tokenizer)")
    return tokenizer


def _ids_of_row(row: list[int], where: str, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The documents in a row of token ids, which end with it and at each end-of-text token, without that."""
    ids = np.asarray(row, np.int64)
    check_ids(ids, where, 0, tokenizer.vocab_size)
    for part in np.split(ids, np.flatnonzero(ids == tokenizer.eos_id)):
        if len(document := part[part != tokenizer.eos_id]):
            yield document


def _cut(chunks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Join chunks to pieces that end with a line; the last one is marked."""
    text = ""
    for chunk in chunks:
        text += chunk
        while len(text) > PIECE:
            end = text.rfind("\n", 0, PIECE) + 1 or PIECE
            yield text[:end], False
            text = text[end:]
    yield text, True


def _decoded(file: TextFile) -> Iterator[str]:
    decoder, lines = codecs.getincrementaldecoder("utf-8-sig")(), 0
    with file.stream() as stream:
        while True:
            data = stream.read(PIECE)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line = lines + error.object.count(b"\n", 0, error.start) + 1
                raise RunError(
                    f"{file.name}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8 text; "
                    "convert the file, or leave it out"
                ) from error
            if "\0" in text:
                raise RunError(f"{file.name} is not plain text: it holds zero bytes; convert it, or leave it out")
            yield text
            if not data:
                return
            lines += text.count("\n")


def _json_lines(file: TextFile, part: int, parts: int, key: str, chat: bool = False) -> Iterator[tuple[str, Any]]:
    """The lines that begin in a part of the file."""
    start, stop = (file.size * edge // parts for edge in (part, part + 1))
    position = max(0, start - 1)
    with file.stream() as stream:
        if start > 0:
            stream.seek(position)
            position += len(stream.readline())
        for number, line in enumerate(iter(stream.readline, b""), start=1):
            if parts > 1 and position >= stop:
                return
            if line.strip():
                where = f"{file.name}, line {number}" if start == 0 else f"{file.name}, byte {position}"
                try:
                    text = _json_text(line, key, chat)
                except ValueError as error:
                    raise RunError(f"{where}: {error}") from error
                yield where, text
            position += len(line)


def _json_text(line: bytes, key: str, chat: bool) -> Any:
    """The text of a line, or its messages, which are not checked; ValueError where there is none."""
    try:
        entry = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = re.sub(r"( at)?: line 1 (column \d+) .*", r" at \2", first_line(error))
        raise ValueError(f"not a JSON object on one line ({reason}); write the line again, or leave it out") from error
    if not isinstance(entry, dict):
        raise ValueError(f"a JSON {type(entry).__name__} where one object a line is expected")
    if key not in entry:
        fix = "; conversations need --chat" if "messages" in entry else f"; name it with {TEXT_KEY}"
        if chat:
            fix = "".join(f"; did you mean --text_key {name}?" for name in entry if isinstance(entry[name], list))
        raise ValueError(f"there is no key {key!r} among {', '.join(map(repr, entry))}{fix}")
    text = entry[key]
    if chat:
        return text
    if not isinstance(text, str):
        raise ValueError(f"{key!r} is not a text but {json.dumps(text)[:40]}")
    if not text.isascii() and SURROGATE.search(text):
        raise ValueError(f"{key!r} holds half of a surrogate pair, which is not a character")
    return text


def _parquet(file: TextFile, part: int, parts: int, column: str, chat: bool = False) -> Iterator[tuple[str, Any]]:
    with file.open() as handle:
        parquet = pq.ParquetFile(handle)
        _check_column(file, parquet.schema_arrow, column, chat)
        groups = parquet.num_row_groups
        chosen = range(groups * part // parts, groups * (part + 1) // parts)
        row = sum(parquet.metadata.row_group(group).num_rows for group in range(chosen.start))
        for batch in parquet.iter_batches(PARQUET_ROWS, row_groups=list(chosen), columns=[column]):
            yield from _texts(file, batch.column(0), row, column)
            row += batch.num_rows


def _arrow(file: TextFile, part: int, parts: int, column: str, chat: bool = False) -> Iterator[tuple[str, Any]]:
    with file.open() as handle, pa.ipc.open_stream(handle) as batches:
        _check_column(file, batches.schema, column, chat)
        row = 0
        for batch in batches:
            for start in range(0, batch.num_rows, PARQUET_ROWS):
                yield from _texts(file, batch.column(column)[start : start + PARQUET_ROWS], row + start, column)
            row += batch.num_rows


def _check_column(file: TextFile, schema: pa.Schema, column: str, chat: bool) -> None:
    _check_name(file, schema.names, column)
    if chat:  # each row is checked
        return
    kind = schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if not is_text and not is_list_of_integers(kind):
        raise RunError(f"{file.name}: column {column!r} is not text but {kind}; give another with {TEXT_KEY}")


def _check_name(file: TextFile, names: Sequence[str], column: str) -> None:
    if column not in names:
        raise RunError(
            f"{file.name} has no column {column!r} among {', '.join(map(repr, names))}; name the one with text or "
            f"token ids by {TEXT_KEY}"
        )


def _texts(file: TextFile, values: pa.Array, row: int, column: str) -> Iterator[tuple[str, Any]]:
    """The texts, or the lists of ids, of a part of a column, which begins at a row of the file."""
    for row, text in enumerate(values.to_pylist(), start=row):
        if text is None:
            raise RunError(f"{file.name}, row {row}: column {column!r} is null; leave such rows out")
        yield f"{file.name}, row {row}", text


def _csv(file: TextFile, part: int, parts: int, column: str) -> Iterator[tuple[str, str]]:
    """The rows of a table of text whose first line names the columns."""
    csv.field_size_limit(2**31 - 1)
    with file.stream() as stream:
        lines = io.TextIOWrapper(stream, "utf-8-sig", newline="")
        rows = csv.reader(lines, "excel-tab" if file.kind == "tsv" else "excel", strict=True)
        last = 0  # line of the row before
        try:
            names = next(rows, [])
            _check_name(file, names, column)
            place, last = names.index(column), rows.line_num
            for cells in filter(None, rows):
                where, last = f"{file.name}, line {rows.line_num}", rows.line_num
                if len(cells) != len(names):
                    raise RunError(f"{where}: {len(cells)} columns where the first line names {len(names)}")
                yield where, cells[place]
        except csv.Error as error:
            where = f"{file.name}, the row of lines {last + 1} to {rows.line_num}"
            raise RunError(f"{where}: {error}; end its text with a quote, and write one inside twice") from error


CHAT_KINDS = {"jsonl": _json_lines, "parquet": _parquet, "arrow": _arrow}  # of files that may hold conversations

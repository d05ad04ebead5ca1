"""Broken input of every kind: strange values for the keys of a config, and bytes of a file that were damaged."""

import inspect
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

# CI tries the same thousand each time; LM_FUZZ_EXAMPLES looks further, with other ones each time.
MORE = int(os.environ.get("LM_FUZZ_EXAMPLES", 0))
PATIENCE = 120  # seconds that reading something may take, on a machine that is busy
MEMORY = 3 * 2**30  # bytes that it may take


def examples(count: int):
    """How often a property is tried, without hypothesis' own clock and file of examples."""
    return settings(max_examples=MORE or count, derandomize=not MORE, database=None, deadline=None, print_blob=True)


class Hang(BaseException):
    """Something took longer than `PATIENCE`; no `except Exception` of anybody's hides it."""


@contextmanager
def bounds() -> Iterator[None]:
    """Bound the time and memory of what is done within."""

    def ring(number, frame):
        raise Hang

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(PATIENCE)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    deepest = sys.getrecursionlimit()  # hypothesis raises it, and deep YAML takes time that grows with its square
    sys.setrecursionlimit(min(deepest, len(inspect.stack(0)) + 1000))
    try:
        yield
    finally:
        sys.setrecursionlimit(deepest)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- values ----------------------------------------------------------------------------------------------------------
NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**63, 2**64, 10**30, -(10**18), 0.5, -0.0, 1e-320, 1e308, math.inf, -math.inf, math.nan]),
    st.floats(),
    st.integers(),
)
TEXTS = st.one_of(
    st.sampled_from([
        "", " ", "auto", "null", "true", "1e400", "10B", "512Ki", "9" * 5000, "1e999999999", "-1", "0x10", "nan", "[",
        "{", "../..", "/", "/dev/null", "~", "\x00", "\ufffd", "日本", "[red]", "%s", "{0}", "${x}", "a: b",
        "!!python/name:os.system", "cosine", "muon", "bf16-mixed", "s3://", "file:///", "http://",
    ]),
    st.text(max_size=8),
)  # fmt: skip
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.dates())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.one_of(TEXTS, SCALARS), inner, max_size=3)),
    max_leaves=6,
)
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)


class Content(bytes):
    """Bytes of a file, which a report shows in short."""

    def __repr__(self) -> str:
        return f"{bytes(self[:400])!r}{f'... ({len(self):,} bytes)' * (len(self) > 400)}"


# ---- damage to bytes -------------------------------------------------------------------------------------------------
@st.composite
def damaged(draw: Any, whole: bytes) -> bytes:
    """A file with bytes flipped, cut away, put in or doubled; or something else altogether."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(data)))
        end = min(len(data), place + draw(st.sampled_from([1, 1, 2, 8, 100, 10_000])))
        match draw(st.sampled_from(["flip", "flip", "zero", "cut", "end", "insert", "double", "other"])):
            case "flip" if place < len(data):
                data[place] ^= 1 << draw(st.integers(0, 7))
            case "zero":
                data[place:end] = bytes(end - place)
            case "cut":
                del data[place:end]
            case "end":
                del data[place:]
            case "insert":
                data[place:place] = draw(st.one_of(st.binary(max_size=16), st.sampled_from(INSERTED)))
            case "double":
                data[place:place] = data[place:end]
            case "other":
                data = bytearray(draw(st.sampled_from(OTHERS)))
    return Content(data)


INSERTED = [b"{", b"[", b"}", b"]", b'"', b"\\ud800", b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"\xff", b"\n",
            b"null", b"-"]  # fmt: skip
OTHERS = [b"", b"null", b"[]", b"{}", b"0", b'"text"', b"\x80\x04K\x01.", b"PAR1", b"[" * 20_000, b'{"a":' * 20_000,
          b"\xef\xbb\xbf{}", b"\x00" * 64, b"\xff" * 9, b"NaN"]  # fmt: skip


@st.composite
def changed(draw: Any, document: Any) -> Any:
    """A JSON document in which one to three places hold something else, are gone, or are new."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(list(places(document)) or [()]))
        if not place:
            return draw(JSON_VALUES)
        *path, last = place
        inside = document
        for key in path:
            inside = inside[key]
        match draw(st.sampled_from(["change", "change", "remove", "add"])):
            case "change":
                inside[last] = draw(JSON_VALUES)
            case "remove":
                del inside[last]
            case "add" if isinstance(inside, dict):
                inside[draw(TEXTS)] = draw(JSON_VALUES)
    return document


def places(document: Any, most: int = 12) -> Iterator[tuple[Any, ...]]:
    """The path to each part of a document; of long lists the first ones."""
    if isinstance(document, dict):
        inside = list(document.items())
    else:
        inside = list(enumerate(document))[:most] if isinstance(document, list) else []
    for key, value in inside:
        yield (key,)
        for path in places(value, most):
            yield (key, *path)

"""A JSON document that begins with a digest of the rest of itself, so that no byte of it can change unseen.

It is an ordinary JSON object whose first key is `sha256`: the SHA-256 of every byte after that digest.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

OPENING = b'{"sha256": "'
BODY = len(OPENING) + 64  # where the rest begins: after as many hexadecimal digits


def seal(document: dict[str, Any]) -> bytes:
    """The text of a document, with its digest; not empty, and of what JSON can hold.

    Raises:
        ValueError: a number in it is not finite.
    """
    body = b'", ' + json.dumps(document, allow_nan=False).encode()[1:]
    return OPENING + hashlib.sha256(body).hexdigest().encode() + body


def unseal(text: bytes) -> dict[str, Any]:
    """The inverse of `seal`; nothing is parsed before the digest was compared.

    Raises:
        ValueError: it is not what was written.
    """
    if text[:BODY] != OPENING + hashlib.sha256(text[BODY:]).hexdigest().encode():
        raise ValueError("its digest is not the one that was written")
    document = json.loads(text)  # whole, so nothing that `seal` took is too deep or too large
    del document["sha256"]
    return document


def stated_digest(path: Path) -> str | None:
    """The digest that a file begins with, which tells one document from another; None where there is none."""
    try:
        with open(path, "rb") as file:
            text = file.read(BODY)
    except OSError:
        return None
    return text[len(OPENING) :].decode("ascii", "replace") if text.startswith(OPENING) else None

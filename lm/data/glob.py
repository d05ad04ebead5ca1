"""Globs over any file system: where a pattern begins, and what it matches.

Beside the batch's way: `data/catalog` finds shards with it and `data/files` texts.
"""

import re
from pathlib import Path

from lm.data.remote import is_remote


def split_glob(source: str) -> tuple[str, str | None]:
    """Cut before the first wildcard: `a/b*/c.txt` -> (`a`, `b*/c.txt`); without one, or where it names a file, None.

    In a URL `?` begins the query, which stays with the folder.
    """
    url, mark, query = source.partition("?") if is_remote(source) else (source, "", "")
    wildcard = re.search(r"[*?\[]", url)
    if wildcard is None or (not is_remote(source) and Path(source).exists()):
        return source, None
    folder, slash, _ = url[: wildcard.start()].rpartition("/")
    return (folder or slash or ".") + mark + query, url[len(folder + slash) :]


def glob_expression(pattern: str) -> re.Pattern[str]:
    """As a shell reads it: `*` and `?` stay in a folder, `**/` is any folders, `[!ab]` any sign but these."""
    meanings = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.findall(r"\*\*/|\*\*|\[!?[^\]]+\]|.", pattern)
    return re.compile(
        "".join(meanings.get(part) or (part.replace("[!", "[^") if part[1:] else re.escape(part)) for part in parts)
    )

"""HTML pages that open without a server or a network, from the Jinja templates beside this file.

The templates escape the text of users and models. `report/run` and `cli/ladder_report` fill them.
"""

import base64
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lm.system.units import format_count, format_duration, plural, utc

PARTS = Path(__file__).parent
# Control characters, bidirectional controls, and surrogates, which UTF-8 cannot encode.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def render(template: str, **content: Any) -> str:
    """Render a template beside this file. Text is escaped, and None is empty; `script` is inserted as it is."""
    return templates().get_template(template).render(content, style=source("uPlot.min.css", "page.css"))


@functools.cache
def templates() -> jinja2.Environment:
    """The templates; with a name in them that nothing has, they fail."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PARTS),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= dict(count=format_count, digest=digest, duration=format_duration, plural=plural, utc=utc)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) else "" if value is None else printable(value)


def printable(text: Any) -> str:
    """Untrusted text, with every character of `UNPRINTABLE` replaced by U+FFFD."""
    return UNPRINTABLE.sub("\ufffd", str(text).replace("\r\n", "\n"))


@functools.cache
def source(*names: str) -> Markup:
    """Scripts or styles beside this file, for a page."""
    return Markup("\n".join((PARTS / name).read_text(encoding="utf-8") for name in names))


def digest(source: str) -> str:
    """The name of an inline script or style in a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()

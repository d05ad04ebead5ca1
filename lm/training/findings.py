"""A problem of the options of a training run, as `lm plan` prints it and a fit refuses it."""

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """A problem, and how to mend it."""

    level: Literal["error", "warning"]
    what: str  # with the arithmetic
    cure: str

    def __str__(self) -> str:
        separator = ": " if self.level == "error" else "; "
        return f"{self.what}{separator}{self.cure}" if self.cure else self.what


def error(what: str, cure: str = "") -> Finding:
    return Finding("error", what, cure)

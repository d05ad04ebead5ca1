"""A problem of the options of a training run, as `lm plan` prints it and a fit refuses it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from lm.data.tokenizer import Tokenizer
from lm.errors import RequestError

if TYPE_CHECKING:
    from lm.system.devices import Device


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


def raise_if_any(findings: Iterable[Finding]) -> None:
    """Raise RequestError for the first of some findings of this module, which are all errors."""
    if first := next(iter(findings), None):
        raise RequestError(str(first))


@dataclass(frozen=True)
class Known:
    """Known facts about a training run; None: not known yet, and checks that need it are skipped."""

    device: "Device | None" = None  # one of those that are trained on
    tokenizer: Tokenizer | None = None

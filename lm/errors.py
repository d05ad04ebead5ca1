"""The errors of commands: each is one clear line and an exit code.

0 finished; 1 failed; 2 the request is wrong; 3 stopped by a guard; 75 interrupted with a checkpoint.
"""

import math


class LmError(Exception):
    """A failure with a message that says what was wrong, where, and what to do; no traceback is shown."""

    exit_code = 1


class RunError(LmError):
    """A failure while the command was at work, such as a corrupt shard or a full disk."""


class DataError(RunError):
    """Training data could not be read. No step was under way, so the weights are those of the last whole step."""


class RequestError(LmError):
    """The request is wrong (a config, a path, a flag); nothing was done."""

    exit_code = 2


class GuardStop(LmError):
    """A guard that the user configured stopped the run."""

    exit_code = 3


class Interrupted(LmError):
    """A signal stopped the run after a checkpoint; `--ckpt_path auto` resumes it."""

    exit_code = 75


def require(holds: bool, message: str) -> None:
    """Raise RequestError with a message where something does not hold."""
    if not holds:
        raise RequestError(message)


def require_at_least(least: int, prefix: str, **values: float | None) -> None:
    """Raise RequestError for a value below the least, Inf or NaN; None is no value. In the message the prefix stands
    before its name."""
    for name, value in values.items():
        if value is not None and not least <= value < math.inf:
            finite = ", and finite" if value > least else ""
            raise RequestError(f"{prefix}{name} {value} must be at least {least}{finite}")


def first_line(error: BaseException) -> str:
    """An exception as part of a one-line message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")

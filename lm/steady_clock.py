"""Dates that never go back and never leap, for what a training writes down: curves over time must be read as they were.

Whether another machine's sign of life is fresh is another matter: that is told by the wall clock.
"""

import time
from functools import cache


def now() -> float:
    """Seconds since 1970: what the wall clock said when this process asked first, and what has gone by since then,
    however the wall clock is set in between."""
    return _offset() + time.monotonic()


@cache
def _offset() -> float:
    return time.time() - time.monotonic()

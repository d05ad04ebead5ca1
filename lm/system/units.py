"""Counts as people write them, such as `32_768`, `512K` or `512Ki`; counts, bytes and durations as people read them."""

import re
import time
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar

DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
MULTIPLIERS = DECIMAL | BINARY
DURATIONS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
MAX_NUMBER = 10**18  # before its suffix
MAX_SHOWN = 60  # characters of a value in a message
_PATTERN = re.compile(r"\s*(\d[\d_]*(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d{1,4})?)\s*([KMBGT]?i?)\s*", re.IGNORECASE)


class Count(int):
    """A whole number >= 0 that may be written `1_000`, `1,000`, `1.5e9`, `512K` (thousands) or `512Ki` (1024s)."""


if TYPE_CHECKING:
    T = TypeVar("T")
    Derivable = Annotated[T, "None only until it is derived from other options"]
else:
    Derivable = Optional
OPEN: Any = None  # the default of an option that is derived from others


def parse_count(value: str | int | float) -> Count:
    """Read a count in any of the accepted spellings; a ValueError shows what was given in place of one."""
    match = _PATTERN.fullmatch(str(value))
    if not match or match[2].upper() not in MULTIPLIERS:
        raise ValueError(f"expected a count such as 1000, 32_768, 512K or 10B, got {value!r}")
    number = Decimal(re.sub("[_,]", "", match[1]))
    if number > MAX_NUMBER:  # before anybody writes its digits out
        raise ValueError(f"expected a count of at most {MAX_NUMBER:.0e}, got {value!r:.40}")
    number *= MULTIPLIERS[match[2].upper()]
    if number != int(number):
        raise ValueError(f"expected a whole number, got {value!r}")
    return Count(int(number))


def spelled_count(number: int) -> str:
    """A count as one would type it, with the largest suffix that divides it: 262_144 -> 256Ki, 10_000_000 -> 10M."""
    dividing = {size: suffix for suffix, size in MULTIPLIERS.items() if number and number % size == 0}
    size = max(dividing, default=1)
    return f"{number // size}{dividing.get(size, '').capitalize()}"


def parse_bytes(value: str) -> int:
    """Read a size such as `16GiB` or `80 GB`; a ValueError shows what was given in place of one."""
    number = re.fullmatch(r"(.*[KMGT]i?)B", value.strip(), re.IGNORECASE)
    if not number:
        raise ValueError(f"expected a size with its unit, such as 16GiB, got {value!r}")
    return int(parse_count(number[1]))


def plural(number: int, noun: str) -> str:
    """A number with its noun: 1 shard, 1,024 shards, 2 batches."""
    ending = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def listed(words: Sequence[str], limit: int) -> str:
    """The first words of a list, and how many more there are: 'a, b and 4 more'."""
    more = f" and {len(words) - limit:,} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more


def format_count(number: float) -> str:
    """Three significant digits with a suffix, for people: 12_345_678 -> '12.3M'."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(float(f"{number:.3g}")) >= size:  # 999,999 is 1M and not 1,000K
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}" if isinstance(number, float) else str(number)


def format_figure(number: float) -> str:
    """Hours or dollars with two decimals, and small ones with two digits: 1234.5 -> '1,234.50', 0.00123 -> '0.0012'."""
    return f"{number:.2g}" if 0 < abs(number) < 0.1 else f"{number:,.2f}"


def format_bytes(number: float) -> str:
    """Bytes for people, in powers of 1024: 1_610_612_736 -> '1.5 GiB'."""
    for suffix, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(number) >= size:
            return f"{number / size:,.{1 if number < 100 * size else 0}f} {suffix}"
    return f"{number:.0f} bytes"


def format_duration(seconds: float, parts: int = 2) -> str:
    """A time for people, in at most `parts` units: 42 s, 3 min 5 s, 2 h 10 min, 4 d 3 h."""
    remaining, words = max(0, round(seconds)), []
    first = next((index for index, (_, length) in enumerate(DURATIONS) if remaining >= length), len(DURATIONS) - 1)
    for unit, length in DURATIONS[first : first + parts]:
        count, remaining = divmod(remaining, length)
        if count or not words:
            words.append(f"{count} {unit}")
    return " ".join(words)


def format_time_and_cost(seconds: float, usd: float | None) -> str:
    """A time with what it costs: `2 h 10 min, 6.40 USD`; the time alone where no price is known."""
    return format_duration(seconds) + ("" if usd is None else f", {format_figure(usd)} USD")


def utc(seconds: float) -> str:
    """A time for people all over the world, from seconds since 1970: 2026-01-31 12:00:00 UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def shown(value: Any) -> str:
    """Format a value for a message, shortened to `MAX_SHOWN` characters."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."

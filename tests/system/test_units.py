"""Counts are read as people write them."""

import pytest

from lm.system.units import format_count, format_duration, format_figure, parse_count, plural


@pytest.mark.parametrize("text, number", [
    ("1000", 1000), ("32_768", 32768), ("512K", 512_000), ("512Ki", 524_288), ("10B", 10**10), ("1.5e9", 15 * 10**8),
    ("7.5B", 75 * 10**8), (4096, 4096), (1.5e9, 15 * 10**8), (0, 0), (" 3M ", 3 * 10**6), ("2g", 2 * 10**9),
    ("4,096", 4096), ("1,234,567", 1_234_567),
])  # fmt: skip
def test_accepted(text, number):
    assert parse_count(text) == number


@pytest.mark.parametrize("text", ["", "ten", "-5", "1.5", "10 K B", "1e-3", True, None, "0x10", "5X", "nan", "inf",
                                  "1,5", "4,0960", ",100"])  # fmt: skip
def test_refused(text):
    with pytest.raises(ValueError, match="expected a (count|whole number)"):
        parse_count(text)


def test_formatted_for_people():
    assert [format_count(n) for n in (12, 12_345_678, 1.5e9, 999.4)] == ["12", "12.3M", "1.5B", "999"]
    assert [format_count(n) for n in (999, 999.6, 999_499, 999_999, 999_999_999)] == ["999", "1K", "999K", "1M", "1B"]
    assert [format_figure(n) for n in (1234.5, 2, 0.1, 0.04, 0.00123, 0.0, 1e-12)] == [
        "1,234.50", "2.00", "0.10", "0.04", "0.0012", "0.00", "1e-12"]  # fmt: skip
    assert [plural(n, "older run") for n in (1, 3)] == ["1 older run", "3 older runs"]


@pytest.mark.parametrize("seconds, text", [
    (-1, "0 s"), (59.4, "59 s"), (60, "1 min"), (185, "3 min 5 s"), (7800, "2 h 10 min"), (356400, "4 d 3 h"),
])  # fmt: skip
def test_durations_are_two_units(seconds, text):
    assert format_duration(seconds) == text

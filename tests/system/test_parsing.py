"""YAML and JSON of any kind: one kind of failure, and the stack does not run out."""

import time

import pytest

from lm.system.parsing import parse_json, parse_yaml


@pytest.mark.parametrize("text", [
    "[" * 100_000, "{a: " * 100_000, "- " * 100_000, "a: *b", "a: !!bool x", "a: !!timestamp x",
    "a: !!int ''", "a: !!timestamp 2023-13-45", "a: [", "\x00", b"\x80", b"\xff\xfe\x00", "!!python/object/apply:os.getcwd []",
])  # fmt: skip
def test_a_wrong_yaml_is_a_value_error_at_once(text):
    """The parser in C ends the process where values are nested deep enough."""
    began = time.process_time()
    with pytest.raises(ValueError):
        parse_yaml(text)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, str(2**64), "", b"\x80", "{"])
def test_a_wrong_json_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)


def test_sound_texts_are_what_they_say():
    assert parse_yaml("a: &b {c: [1, 2.5, x]}\nd: *b\n") == {"a": {"c": [1, 2.5, "x"]}, "d": {"c": [1, 2.5, "x"]}}
    assert parse_json(f'{{"a": [{2**64 - 1}, -1, NaN]}}')["a"][:2] == [2**64 - 1, -1]


@pytest.mark.parametrize(("text", "value"), [
    ("1e-3", 0.001), ("-1.5E+3", -1500.0), (".5e3", 500.0), ("1_0e2", 1000.0), (".e3", ".e3"), ("e3", "e3"),
    ("2026-11-29", "2026-11-29"), ("{lr}", {"lr": None}), ("lr:", {"lr": None}), ("true", True),
])  # fmt: skip
def test_a_value_of_yaml_is_what_a_config_means(text, value):
    assert parse_yaml(text) == value

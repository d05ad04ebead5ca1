"""Command lines as people type them become what was meant, and a wrong one is one line."""

import pytest

from lm.errors import RequestError
from lm.system.arguments import call, shorten, typed_options
from lm.system.parsing import parse_yaml

TEXTS = ["🎉", "\u2028", "null", "1", "[Applause]", "[a, b]", "", "a\nb\tc", "日本", "x: y", '"quoted"', "\x7f"]


def typed(*arguments: str):
    def function(prompt: list[str] | None = None, kind: str | None = None, json: bool = False, top: int | None = 3):
        return prompt, kind, json, top

    return call(function, list(arguments), prog="lm test")


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_in_a_list_is_that_text(text):
    assert typed("--prompt", text)[0] == [text]
    assert typed("--prompt", text, "b")[0] == [text, "b"]


def test_a_list_comes_together_one_by_one_or_as_json():
    assert typed("--prompt", "a", "b", "--json") == (["a", "b"], None, True, 3)
    assert typed("--prompt", "a", "--kind", "k", "--prompt", "b") == (["a", "b"], "k", False, 3)
    assert typed("--prompt=a", "--prompt=--b")[0] == ["a", "--b"]
    assert typed("--prompt", '["--x", "y"]')[0] == typed("--prompt=[--x, y]")[0] == ["--x", "y"]
    assert typed("--prompt=null")[0] is None
    assert typed_options(["--samples.prompts", "null"], lists=["samples.prompts"]) == [("--samples.prompts", "null")]


@pytest.mark.parametrize("arguments", [["--input", "[a, b]"], ["--input=[a, b]"], ["--input", "a", "b"]])
def test_brackets_are_a_list_where_no_texts_are_meant(arguments):
    spelled = [argument.replace("input", "data.train") for argument in arguments]
    assert typed_options(spelled, lists=["data.train"]) == [("--data.train", ["a", "b"])]
    assert typed_options(["--on_event", "[x]"], lists=["on_event"]) == [("--on_event", ["x"])]
    assert typed_options(["--input", "[ab]*.txt"], lists=["input"]) == [("--input", ["[ab]*.txt"])]
    assert typed_options(["--lr", "-1e-3", "--run", "-x"]) == [("--lr", "-1e-3"), ("--run", None), ("-x", None)]


@pytest.mark.parametrize("arguments, message", [
    (["--prompt"], "--prompt.* expected one argument"),
    (["--kin", "x"], "did you mean 'kind'"),
    (["--size", "x", "--kin", "x"], r"no options 'size' \(there are --json, --kind, --prompt, --top\), 'kin' \(did"),
    (["--top", "x"], "top"),
])  # fmt: skip
def test_what_cannot_be_read_is_one_line(arguments, message):
    with pytest.raises(RequestError, match=message) as caught:
        typed(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("message", [
    "Subcommand 'fit' does not accept option 'model.groups.embeding.lr'",
    "Group 'model' does not accept option 'groups.embeding.lr'",
])  # fmt: skip
def test_a_name_inside_a_group_has_a_nearest_one(message):
    """jsonargparse has words of its own for a group that was given as one dictionary."""
    assert "did you mean 'model.groups.embedding.lr'?" in shorten(message, ["model.groups.embedding.lr"])


def test_a_path_begins_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert typed_options(["--path=~/a", "--other", "~b"]) == [("--path", "/home/me/a"), ("--other", "~b")]
    assert parse_yaml("{path: ~/a, other: ~, x: a~/b}") == {"path": "/home/me/a", "other": None, "x": "a~/b"}

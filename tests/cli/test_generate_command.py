"""`lm generate`: what a checkpoint writes, on a terminal, in a pipe, as JSON, and at a prompt of its own."""

import io
import json
import os
import pty
import re
import sys
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from decoders import SMALL, trained_like, write_huggingface
from terminal import Terminal, plain
from trainings import fit

from lm import load_model
from lm.cli import generate
from lm.cli.command import main
from lm.data.tokenizer_training import train_char

PROMPTS = ["The letter", "", "of"]


@pytest.fixture(scope="module")
def workplace(workplace):
    """A run `small` of three steps."""
    fit(workplace, **{"trainer.max_steps": 3, "trainer.callbacks": None})
    return workplace


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model of Hugging Face's with a long context, which knows all small letters."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), train_char(["abcdefghijklmnopqrstuvwxyz ."])
    shape = replace(SMALL, vocab_size=tokenizer.vocab_size, max_position_embeddings=8192)
    write_huggingface(trained_like(shape), folder)
    for name, text in tokenizer.files().items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def typed(workplace, monkeypatch, capfd, caplog):
    """Runs `lm generate ...` in the workplace; its exit code, output and messages."""
    monkeypatch.chdir(workplace)

    def run(*arguments, stdin=None):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin) if stdin is not None else open(os.devnull))
        code = main(["generate", *arguments])
        out, err = capfd.readouterr()
        return code, out, "".join(record.getMessage() + "\n" for record in caplog.records) + err

    return run


def as_json(typed, *arguments, **options):
    code, out, err = typed(*arguments, "--json", **options)
    assert code == 0 and out.count("\n") == 1, err
    return json.loads(out)


def test_one_prompt_is_continued(typed, workplace):
    """By the best checkpoint of the newest run, which is said; and the same again from the seed."""
    code, out, err = typed("--prompt", "The letter", "--max_new_tokens", "8", "--seed", "4")
    model = load_model(workplace / "checkpoints" / "small" / "best")
    [written] = model.generate("The letter", max_new_tokens=8, seed=4)
    assert (code, out) == (0, f"The letter{written.text}\n")
    assert "step-00000003" in err and "seed 4" in err and "compile none" in err
    assert typed("--prompt", "The letter", "--max_new_tokens", "8", "--seed", "4", "--run", "small")[1] == out


def test_json_has_texts_tokens_and_figures_and_its_seed_gives_them_again(typed):
    options = ("--prompt", *PROMPTS, "--max_new_tokens", "6", "--num_samples", "2", "--top_p", "0.9")
    found = as_json(typed, *options)
    assert [one["prompt"] for one in found["samples"]] == [prompt for prompt in PROMPTS for _ in range(2)]
    for one in found["samples"]:
        assert len(one["token_ids"]) == len(one["tokens"]) == len(one["log_probabilities"]) <= 6
        assert "".join(one["tokens"]) == one["text"] and one["reason"] in ("length", "eos")
        assert all(log < 0 for log in one["log_probabilities"])
    assert found["checkpoint"].endswith("step-00000003") and found["step"] == 3
    assert (found["top_p"], found["temperature"], found["compile"], found["dtype"]) == (0.9, 0.8, "none", "float32")
    assert found["new_tokens"] == sum(len(one["token_ids"]) for one in found["samples"])
    assert found["tokens_per_second"] == pytest.approx(found["new_tokens"] / found["seconds"])
    again = as_json(typed, *options, "--seed", str(found["seed"]))
    assert again["samples"] == found["samples"] != as_json(typed, *options)["samples"]


def test_several_are_each_printed_under_their_prompt(typed, monkeypatch):
    """However many are written at once, in the order of the prompts, from a file, too."""
    options = ("--prompt", *PROMPTS, "--max_new_tokens", "6", "--seed", "1", "--temperature", "0")
    monkeypatch.setattr(generate, "TOGETHER", 2)
    samples = as_json(typed, *options)["samples"]
    code, out, _ = typed(*options)
    parts = re.split(r"─+ (\d) of 3 ─+\n", out)
    assert parts[1::2] == ["1", "2", "3"]
    assert parts[2::2] == [one["prompt"] + one["text"] + "\n" for one in samples]
    drawn = as_json(typed, "--prompt", "of", "--num_samples", "4", "--max_new_tokens", "9", "--seed", "1")["samples"]
    assert drawn[:2] != drawn[2:]  # each group has its own random numbers


def test_a_text_that_is_piped_in_is_the_prompt(typed):
    code, out, _ = typed("--max_new_tokens", "5", "--temperature", "0", stdin="The letter\nof\n")
    assert code == 0 and out.startswith("The letter\nof") and len(out) == len("The letter\nof") + 5 + 1
    assert as_json(typed, "--max_new_tokens", "5", stdin="The\n")["samples"][0]["prompt"] == "The"


def test_stop_strings_and_filters_are_obeyed(typed, model_folder):
    options = ("--ckpt_path", str(model_folder), "--prompt", "abc", "--max_new_tokens", "40", "--seed", "2")
    [plain] = as_json(typed, *options, "--ignore_eos")["samples"]
    assert len(plain["token_ids"]) == 40
    stop = plain["text"][20:22]
    stopped = as_json(typed, *options, "--ignore_eos", "--stop", "#", stop)
    assert stopped["samples"][0]["text"] == plain["text"][: plain["text"].index(stop)]
    assert stopped["samples"][0]["reason"] == "stop" and stopped["stop"] == ["#", stop] and stopped["step"] is None
    greedy = [as_json(typed, *options, *more)["samples"] for more in
              (["--temperature", "0"], ["--top_k", "1"], ["--top_p", "1e-9"])]  # fmt: skip
    assert all(samples == greedy[0] for samples in greedy)
    assert as_json(typed, *options, "--dtype", "bfloat16")["dtype"] == "bfloat16"


@pytest.mark.parametrize("arguments, words", [
    (["--run", "other"], "other"),
    (["--ckpt_path", "nowhere"], "nowhere"),
    (["--temperature", "-1"], "temperature -1.0 must not be below 0"),
    (["--top_p", "2"], "top_p 2.0"),
    (["--max_new_tokens", "0"], "max_new_tokens 0 must be at least 1"),
    (["--prompt", "x" * 32], "the prompt leaves no room for a new token: it has 32 tokens"),
    (["--stop", ""], "a stop string is empty"),
    (["--temprature", "1"], "did you mean 'temperature'?"),
])  # fmt: skip
def test_wrong_requests_are_one_line(typed, arguments, words):
    code, out, err = typed(*([] if "--prompt" in arguments else ["--prompt", "The"]), *arguments)
    assert (code, out) == (2, "") and words in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("lm generate: ")


def on_terminal(folder, model_folder, *options):
    options = ("--ckpt_path", str(model_folder), "--ignore_eos", *options)
    return Terminal(folder, "-m", "lm", "generate", *options, fork=True)


def prompting(workplace, model_folder, *options):
    terminal = on_terminal(workplace, model_folder, *options)
    terminal.wait_for("> ")
    return terminal


def answer(repl, line: str) -> str:
    """What follows a line, up to the next prompt."""
    repl.type(line + "\n")
    return repl.wait_for("> ")


def test_a_prompt_takes_lines(workplace, model_folder):
    """A text, the same again from a seed, the one before from the history, and one that is continued."""
    repl = prompting(workplace, model_folder, "--max_new_tokens", "12", "--seed", "3")
    first = plain(answer(repl, "abc"))
    text = first.splitlines()[1]
    assert re.fullmatch(r"abc.{12,}", text) and "12 tokens" in first and "seed 3" in first
    assert text in plain(answer(repl, "abc"))
    assert text in plain(answer(repl, "\x1b[A"))  # the key that goes up
    assert "12 tokens" in answer(repl, "")
    repl.type("\x04")
    assert repl.end() == 0


def test_ctrl_c_ends_a_text_and_not_the_prompt(workplace, model_folder):
    repl = prompting(workplace, model_folder, "--max_new_tokens", "8000")
    repl.type("abc\n")
    repl.wait_for("abc")
    repl.wait_for("abc")  # the text, after what was typed
    time.sleep(0.2)
    repl.type("\x03")
    repl.wait_for("ended by Ctrl-C", 20)
    repl.wait_for("> ")
    repl.type("half a line")
    repl.wait_for("half a line")
    for _ in range(10):  # a Ctrl-C that arrives while the line is not yet being read is lost
        repl.type("\x03")
        with suppress(AssertionError):
            repl.wait_for("> ", 1)
            break
    repl.type("\x04")
    assert repl.end() == 0


def test_a_terminal_shows_a_text_while_it_is_written(workplace, model_folder):
    terminal = on_terminal(workplace, model_folder, "--prompt", "abc", "--max_new_tokens", "600")
    terminal.wait_for("abc")
    began, seen = time.monotonic(), set()
    while b"tokens/s" not in terminal.output:
        seen.add(len(terminal.output))
        assert time.monotonic() - began < 60
        terminal.read(0.05)
    assert len(seen) > 10 and terminal.end() == 0


def test_what_a_model_writes_cannot_confuse_a_terminal(monkeypatch):
    text, shown = "a\x1b[2Jb\rc\x9b\td\n", {}
    for kind, open_ends in (("terminal", pty.openpty), ("pipe", os.pipe)):
        reader, writer = open_ends()
        with os.fdopen(reader, "rb", 0) as ours, os.fdopen(writer, "w") as theirs, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", theirs)
            patch.setenv("TERM", "xterm-256color")
            generate.print_text(text, "bold")
            theirs.flush()
            shown[kind] = ours.read(1000).decode()
    assert "\x1b[2J" not in shown["terminal"] and "a␛[2Jb␍c␦" in plain(shown["terminal"])
    assert shown["pipe"] == text

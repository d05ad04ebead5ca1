"""`lm scale --hours` prints a config that fills the time: for a named device by its peak, here by measurement."""

import json
import re
import time

import pytest
from test_scale import prepared, read, scale
from trainings import lm, make_workplace

from lm.cli.command import main
from lm.cli.scale import shape
from lm.cli.scale_hours import Candidate, Speed
from lm.cli.scaling_rules import make_recipe
from lm.runs.expected_loss import published_loss

H100 = "--device", "h100"
SPEED = Speed(flops=4e14, optimizer=0.01, start=20.0, checkpoint=1.0, basis="")


def candidate(depth, devices=1):
    return Candidate(make_recipe(shape(depth), steps=1000), 64, devices, SPEED)


@pytest.mark.parametrize("hours", [0.5, 8.0, 100.0])
@pytest.mark.parametrize("devices", [1, 6, 8])
def test_the_run_fills_the_time(hours, devices):
    """Steps, validations, checkpoints and the start take the time, but for less than one validation and one step."""
    one = candidate(8, devices).fill(hours * 3600)
    assert hours * 3600 - one.interval_seconds - one.step_seconds <= one.seconds <= hours * 3600 + one.interval_seconds
    assert one.recipe.batch % (devices * one.micro_batch) == 0


def test_the_depth_has_the_lowest_published_loss():
    """No other depth would end lower in the same time; more hours make the model larger, and never the loss."""
    depths = []
    for hours in (0.2, 2, 20):
        losses = {depth: candidate(depth).fill(hours * 3600).loss for depth in range(2, 40)}
        depths.append(min(losses, key=losses.get))
    assert depths == sorted(depths) and len(set(depths)) == 3


def test_expected_loss_is_the_published_one():
    """Chinchilla, 70B on 1.4T tokens: about 1.9 nats by the law as it was fitted again; its optimum is near it."""
    assert published_loss(70e9, 1.4e12) == pytest.approx(1.973, abs=0.01)
    flops = 6 * 70e9 * 1.4e12
    sizes = [10 ** (9 + i / 50) for i in range(150)]
    best = min(sizes, key=lambda size: published_loss(size, flops / 6 / size))
    assert 40e9 < best < 100e9


def test_a_named_device(tmp_path):
    text = scale("--hours", 8, *H100)
    config = read(text, tmp_path)
    assert 8 <= config.model.decoder.num_hidden_layers <= 24 and "8 h at " in text and "40% MFU, assumed" in text
    assert "Expected loss: " in text.splitlines()[1]
    by_money = scale("--usd", 24, "--rate", 3, *H100)
    assert by_money.replace("--usd 24 --rate 3", "--hours 8") == text
    eight = read(scale("--hours", 8, *H100, "--devices", 8), tmp_path)
    assert eight.model.decoder.num_hidden_layers > config.model.decoder.num_hidden_layers
    same = read(scale("--hours", 8, "--depth", 12, *H100), tmp_path)
    assert same.model.decoder.num_hidden_layers == 12


def test_a_text_that_ends_before_the_hours(tmp_path):
    text = scale("--hours", 1, *H100, "--data", prepared(tmp_path, 300_000)["data"])
    assert "4 times the text" in text and float(re.search(r": (\S+) s at ", text)[1]) < 600


def test_memory_limits_the_depth(tmp_path):
    options = "--hours", 1000, "--device", "h100"
    large, small = (read(scale(*options, *more), tmp_path) for more in ([], ["--memory", "6GiB"]))
    assert small.model.decoder.num_hidden_layers <= large.model.decoder.num_hidden_layers
    assert small.data.micro_batch_size < large.data.micro_batch_size


def test_the_loss_that_a_ladder_expects(tmp_path):
    sizes = [{"flops": flops, "losses": [100 * flops**-0.1]} for flops in (1e14, 1e15, 1e16)]
    (tmp_path / "ladder.json").write_text(json.dumps({"unit": "bits per byte", "sizes": sizes}))
    text = scale("--hours", 1, *H100, "--ladder", tmp_path)
    flops = float(re.search(r"([\d.e+]+) FLOPs", text)[1])
    expected = float(re.search(r"Expected loss: ([\d.]+) bits per byte", text)[1])
    assert expected == pytest.approx(100 * flops**-0.1, rel=0.02)
    times = float(re.search(r"with (\S+) times the FLOPs of its largest size", text)[1])
    assert times == pytest.approx(flops / 1e16, rel=0.01)


@pytest.mark.parametrize("arguments, said", [
    (["--hours", "0", *H100], "--hours 0 must be above 0"), (["--usd", "20"], "--usd takes --rate"),
    (["--usd", "20", "--rate", "3", "--hours", "1"], "and no --hours beside it"),
    (["--hours", "1e-9", *H100], "s are too few: at depth 2 the start takes"),
    (["--hours", "8", "--max_steps", "5", *H100], "--max_steps gives the length of the run, and so does the time"),
    (["--depth", "4", *H100], "--device is for a run of some hours: give --hours too"),
    (["--hours", "8", "--device", "h300"], "--device h300 is not known"),
    (["--hours", "8", "--memory", "16GiB"], "the peak of any GPU in bf16-mixed is not known: give"),
    (["--hours", "8", "--device", "4090", "--depth", "60"], "not even one sample of 2,048 tokens at depth 60 fits"),
    (["--hours", "8", *H100, "--devices", "0"], "--devices 0 must be above 0"),
    (["--hours", "8", *H100, "--devices", "3", "--batch_tokens", "8Ki"], "4 samples, cannot be divided among 3"),
    (["--hours", "8", *H100, "--ladder", "nope"], "--ladder nope: no ladder.json can be read"),
])  # fmt: skip
def test_a_wrong_request_is_one_line_and_exit_code_2(arguments, said, capsys):
    assert main(["scale", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


@pytest.mark.slow
def test_this_machine_is_measured_and_the_run_takes_the_time(tmp_path):
    """Depths are measured until the chosen one has been, and training it ends near the time."""
    make_workplace(tmp_path, "data/small")
    shape = "--vocab_size 64 --seq_len 64 --head_dim 16 --aspect_ratio 16".split()  # the text does not bound the run
    printed = lm(tmp_path, "scale", "--hours", "0.0125", *shape)
    assert "measured)" in printed.stdout and printed.stderr.startswith("measuring depth 4: ")
    (tmp_path / "timed.yaml").write_text(printed.stdout)
    began = time.monotonic()
    lm(tmp_path, "fit", "--config", "timed.yaml", "--data.path", "data/small")
    assert 25 < time.monotonic() - began < 80  # of 45; other work on the machine changes it

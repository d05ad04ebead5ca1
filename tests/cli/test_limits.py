"""What a run may cost and how often it may read its data is checked before it starts, and the fix is right as printed."""

import re
import shlex

import pytest
from trainings import lm, write_config

PRICE = ["--device", "h100", "--mfu", "0.0001", "--guards.budget.rate_usd_per_hr", "9"]


@pytest.fixture(scope="module")
def workplace(prepared):
    write_config(prepared, **{"trainer.max_steps": 2000})
    (prepared / "other.txt").write_text("".join(f"The {number} rivers had sold the garden.\n" for number in range(200)))
    lm(prepared, "data", "prepare", "--input", "other.txt", "--tokenizer", "data/small", "--output", "data/other")
    return prepared


LIMITS = {  # options of `lm plan` -> what it says
    "a budget": ([*PRICE, "--guards.budget.cap_usd", "0.01"], r"takes .* USD, and guards.budget.cap_usd is 0.01"),
    "hours": ([*PRICE, "--guards.budget.max_hours", "0.001"], r"takes .* h, and guards.budget.max_hours is"),
    "epochs": (["--trainer.max_epochs", "3"], r"of 2,000 steps reads the data .* times, and trainer.max_epochs 3 ends"),
    "of the warm-up": (["--trainer.max_epochs", "3", "--model.schedule.warmup_steps", "900"], "within the warm-up of 900"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), LIMITS.values(), ids=LIMITS.keys())
def test_a_run_beyond_a_limit_is_refused_with_a_fix_that_is_right(workplace, options, message):
    refused = lm(workplace, "plan", "--config", "small.yaml", *options, expect=2).stdout
    assert re.search(message, " ".join(refused.split())), refused
    fixes = re.findall(r"--(?:guards|trainer)\.\w[\w.]* \d[\d.]*", refused.partition("error")[2])
    assert fixes
    for fix in fixes:
        shorter = ["--model.schedule.warmup_steps", "0"] if "max_steps" in fix else []
        lm(workplace, "plan", "--config", "small.yaml", *options, *shlex.split(fix), *shorter)


def test_very_many_epochs_and_epochs_that_set_no_length_are_warnings(workplace):
    said = lm(workplace, "plan", "--config", "small.yaml", "--trainer.max_steps", "100000").stdout
    assert re.search(r"warning the run of 100,000 steps reads the data [\d,]+ times", " ".join(said.split()))
    assert "reads the data" not in lm(workplace, "plan", "--config", "small.yaml").stdout
    options = ("--trainer.max_steps", "9", "--trainer.max_epochs", "3")
    said = lm(workplace, "plan", "--config", "small.yaml", *options).stdout
    assert "trainer.max_epochs 3 is only a limit: the run ends after " in " ".join(said.split())


def test_a_fit_is_refused_too(workplace):
    refused = lm(workplace, "fit", "--config", "small.yaml", "--trainer.max_epochs", "3", expect=2).stderr
    assert "trainer.max_epochs 3 ends after step" in refused and not (workplace / "checkpoints/small").exists()
    limit = ["--guards.budget.rate_usd_per_hr", "5", "--guards.budget.max_rate_usd_per_hr", "4"]
    refused = lm(workplace, "fit", "--config", "small.yaml", *limit, expect=2).stderr
    assert "costs 5.0 US dollars per hour, and guards.budget.max_rate_usd_per_hr is 4.0" in refused


def test_each_source_is_read_as_often_as_it_may_be(workplace):
    sources = "[{name: a, path: data/small}, {name: b, path: data/other, max_epochs: 1e9}]"
    options = ["--data.sources", sources, "--trainer.max_epochs", "3"]
    refused = lm(workplace, "plan", "--config", "small.yaml", *options, expect=2).stdout
    assert "data.sources a is repeated" in refused and "data.sources b is repeated" not in refused

"""The mean of checkpoints is a checkpoint that every command takes, and that no training resumes from."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainings import fit, lm, make_workplace
from transformers import AutoModelForCausalLM

import lm as package
from lm.cli.branch import BranchOptions, branch
from lm.cli.convert import average, mean_weights
from lm.errors import RequestError
from lm.inference.export import Card, model_card
from lm.runs.checkpoint import find_damage
from lm.runs.resume import newest_whole
from lm.runs.run import Run
from lm.system.arguments import call
from lm.system.files import stated_digest


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A run with checkpoints of steps 6, 8, 9 and 12, and the mean of the last three."""
    folder = make_workplace(tmp_path_factory.mktemp("average"))
    fit(folder, **{"trainer.keep_checkpoints": 4, "trainer.callbacks": []})
    done = lm(folder, "average", "--run", "small", "--last", "3")
    assert done.stdout == "checkpoints/small/average-8-12-of-3\n" and "after steps 8, 9, 12" in done.stderr
    return folder


@pytest.fixture
def run(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    return Run(workplace / "checkpoints" / "small")


def test_it_is_the_mean_as_a_whole_checkpoint_that_transformers_reads(run):
    made = run.path / "average-8-12-of-3"
    weights = [load_file(path / "model.safetensors") for step, path in run.steps().items() if step > 6]
    for name, weight in load_file(made / "model.safetensors").items():
        expected = torch.stack([one[name].double() for one in weights]).mean(0)
        assert weight.dtype == torch.float32 and torch.equal(weight, expected.float())
        assert not torch.equal(weight, weights[-1][name])
    assert find_damage(made) is None and not (made / "optimizer.safetensors").stat().st_size > 100
    assert list(run.steps()) == [6, 8, 9, 12] and newest_whole(run).name == "step-00000012"  # as before
    ids = torch.arange(20)[None]
    ours = package.load_model(made).decoder(ids)
    with torch.no_grad():
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(made)(ids).logits, ours, atol=1e-5, rtol=1e-5)


def test_commands_take_it_and_the_curves_of_the_run_do_not_have_it(workplace, run):
    place = ("--ckpt_path", "checkpoints/small/average-8-12-of-3")
    validated = lm(workplace, "validate", *place).stdout
    assert "val/loss" in validated
    assert "step" not in lm(workplace, "evaluate", *place, "--texts", "texts/000.txt").stdout
    assert run.evaluations() == []
    card = model_card(package.load_model(run.path / "average-8-12-of-3"), Card("mean"))
    assert "| weights | the mean of those after steps 8, 9, 12 |" in card
    assert "| steps | 12 of 12 |" in card and "| tokens | 3,072," in card and "## Results" not in card


def test_a_fit_with_it_is_a_new_run_from_its_weights(workplace, run):
    before = (run.path / "metrics.jsonl").read_bytes()
    config, place = str(run.config), "checkpoints/small/average-8-12-of-3"
    lm(workplace, "fit", "--config", config, "--ckpt_path", place, "--trainer.max_steps", "3", "--run", "small")
    new = Run(run.path.with_name("small-2"))
    assert new.read("run.json")["began_from"].endswith("average-8-12-of-3")
    first, old = (one.metrics("train/loss")[0] for one in (new, run))
    assert first["step"] == 1 and first["train/loss"] < old["train/loss"] - 0.3
    assert (run.path / "metrics.jsonl").read_bytes() == before and list(run.steps()) == [6, 8, 9, 12]


def test_checkpoints_that_a_resume_left_behind_are_not_among_the_last(run, tmp_path, caplog):
    """Steps 8 and 12 are of the training before a resume from 6, which has come to 9 since then."""
    shutil.copytree(run.path, tmp_path / "resumed", symlinks=True)
    resumed = Run(tmp_path / "resumed")
    (resumed.path / "last").unlink()
    (resumed.path / "last").symlink_to("step-00000009")
    left = [stated_digest(resumed.path / f"step-{step:08d}/trainer.json") for step in (8, 12)]
    resumed.describe(left_behind=left)
    average(str(resumed.path), last=2)
    assert (resumed.path / "average-6-9-of-2").is_dir() and "left behind" not in caplog.text
    average(str(resumed.path), steps=[9, 12])
    branch(BranchOptions(str(resumed.path), at="12", decay=3000, rewarm=1000, make_only=True), [])
    assert caplog.text.count("step-00000012 was left behind when the run was resumed from an earlier step") == 2


def test_halves_are_added_up_in_full_and_counts_are_the_newest(tmp_path):
    """In bf16 1 + 1/256 is 1, so a sum in bf16 would not get off the spot."""
    for index, step in enumerate([1.0, *[2.0**-8] * 3]):
        (tmp_path / str(index)).mkdir()
        weights = {"weight": torch.full((2,), step, dtype=torch.bfloat16), "count": torch.tensor(index)}
        save_file(weights, tmp_path / str(index) / "model.safetensors")
    mean = mean_weights([tmp_path / str(index) for index in range(4)])
    assert mean["weight"].dtype == torch.bfloat16 and mean["count"] == 3
    assert torch.equal(mean["weight"], torch.full((2,), (1 + 3 / 256) / 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("arguments, message", [
    (["--steps", "6", "7"], "no checkpoint of step 7: run .* has checkpoints of steps 6, 8, 9, 12"),
    (["--steps", "6", "6"], "two checkpoints or more"), (["--last", "1"], "two checkpoints or more"),
    (["--last", "5"], "--last 5: run .* has checkpoints of steps .*keep_checkpoints"),
    ([], "--steps 100 200, or with --last 3"), (["--steps", "6", "8", "--last", "2"], "--steps 100 200, or"),
    (["--last", "3"], "average-8-12-of-3 is there already"),
    (["--last", "2", "--output", "checkpoints/small/step-00000020"], "taken for a checkpoint of the run's training"),
])  # fmt: skip
def test_what_makes_no_mean_is_refused_in_one_line(run, arguments, message):
    before = sorted(run.path.iterdir())
    with pytest.raises(RequestError, match=message) as caught:
        call(average, ["--run", "small", *arguments], prog="lm average")
    assert "\n" not in str(caught.value) and sorted(run.path.iterdir()) == before


def test_the_command_that_validates_one_elsewhere_finds_it(run, caplog):
    average("small", last=2, output="elsewhere")
    assert f"--ckpt_path {Path('elsewhere').resolve()}" in caplog.text and find_damage(Path("elsewhere")) is None


def test_a_damaged_checkpoint_is_named(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "spoilt", symlinks=True, ignore=shutil.ignore_patterns("average*"))
    file = tmp_path / "spoilt" / "step-00000008" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RequestError, match="step-00000008: model.safetensors is damaged"):
        average(str(tmp_path / "spoilt"), last=3)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_a_mean_with_nan_in_it_is_refused(tmp_path, spoilt):
    for number, value in enumerate((1.0, spoilt)):
        (tmp_path / str(number)).mkdir()
        save_file({"weight": torch.full((2,), value)}, tmp_path / str(number) / "model.safetensors")
    with pytest.raises(RequestError, match="the weight weight of .*/1 has NaN or Inf in it: leave that checkpoint out"):
        mean_weights([tmp_path / "0", tmp_path / "1"])

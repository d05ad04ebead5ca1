"""`lm ladder`: real trainings of several sizes, their laws and predictions, kills in the middle, and bad input."""

import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import CAN_FORK, Fork
from trainings import PLACES, lm, make_workplace, processes_of, start, wait_until

from lm.cli import ladder_report
from lm.cli.command import main
from lm.cli.ladder import free_devices, ladder, same_texts
from lm.cli.ladder_options import LadderOptions
from lm.cli.ladder_report import LadderRun, ModelSize
from lm.cli.settings import split_overrides
from lm.errors import RequestError
from lm.runs.run import Run
from lm.system.arguments import call

SIZES = ["--data", "data/small", "--seq_len", "32", "--aspect_ratio", "8", "--head_dim", "8", "--window_pattern", "L",
         "--batch_tokens", "256", "--data.micro_batch_size", "4",
         "--trainer.accelerator", "cpu"]  # fmt: skip
LADDER = ["ladder", "--depths", "2,3,4", "--predict", "5", "--max_steps", "6", *SIZES]


class ForkedRun(Fork):
    """In place of a new process for each training, which would import torch for longer than it trains."""

    def __init__(self, command, *, env, **options):
        arguments = command[command.index("fit") :]
        super().__init__(tuple(arguments), Path.cwd(), {**env, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1"})


def train_in_forks(patch):
    if CAN_FORK:
        forks = SimpleNamespace(Popen=ForkedRun, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
        patch.setattr("lm.cli.ladder.subprocess", forks)


def finish_ladder(place, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        train_in_forks(patch)
        patch.chdir(place)
        assert main(list(arguments)) == 0


@pytest.fixture(scope="module")
def place(prepared):
    """A workplace with data, and a finished ladder of three depths."""
    finish_ladder(prepared, *LADDER)
    return prepared


@pytest.fixture
def run_ladder(place, monkeypatch, capsys, caplog):
    """`lm ladder ...` in this process, with forks that train: what it prints and what it logs."""
    train_in_forks(monkeypatch)
    monkeypatch.chdir(place)

    def run(*arguments, expect=0):
        caplog.clear()
        with caplog.at_level("INFO"):
            assert main(list(arguments)) == expect
        out, err = capsys.readouterr()
        return out, caplog.text + err

    return run


def report(place, name="ladder"):
    return json.loads((place / f"checkpoints/{name}/ladder.json").read_text())


def test_the_sizes_are_ordinary_runs_and_the_next_one_is_predicted(place):
    found = report(place)
    for one in found["runs"][:3]:
        run = Run(place / "checkpoints/ladder" / one["run"])
        assert run.status() == "finished" and run.metrics("val/bpb")[-1]["val/bpb"] == one["loss"]
        assert run.settings()["seed_everything"] == 1 and run.settings()["model"]["decoder"]["vocab_size"] < 100
    [predicted] = found["predictions"]
    assert (predicted["depth"], predicted["of"]) == (5, "operations")
    assert predicted["loss"] > 0 and predicted["low"] is None and predicted["measured"] is None  # one seed
    page = (place / "checkpoints/ladder/ladder.html").read_text()
    assert page.count("data:image/svg+xml") == 1 and "ladder-d4-n6-s1" in page


def test_the_same_command_trains_nothing_again_and_compares_the_prediction(place, run_ladder):
    """The ladder prints the command that trains the predicted size; then its loss stands beside the prediction."""
    said, logged = run_ladder(*LADDER)
    assert "begins" not in logged and "3 runs, 3 of them finished" in said
    command = next(line for line in said.splitlines() if line.startswith("to compare the prediction: "))
    lm(place, "fit", *command.partition(" fit ")[2].partition(";")[0].split())
    run_ladder(*LADDER)
    predicted, run = report(place)["predictions"][0], Run(place / "checkpoints/ladder/ladder-d5-n6-s1")
    assert predicted["measured"] == run.metrics("val/bpb")[-1]["val/bpb"]
    assert predicted["error"] == pytest.approx(predicted["loss"] / predicted["measured"] - 1)


def test_another_recipe_is_compared_at_the_same_sizes(place, run_ladder):
    options = ["ladder", "--depths", "2", "--max_steps", "6", *SIZES, "--name", "still", "--against",
               "--model.optimizer.groups.embedding.lr 1e-9 --model.optimizer.groups.output.lr 1e-9"]  # fmt: skip
    (said, _), page = run_ladder(*options), (place / "checkpoints/still/ladder.html").read_text()
    [size] = report(place, "still")["against"]["sizes"]
    assert size["whole"] == [report(place)["runs"][0]["loss"]] and size["half"][0] > size["whole"][0]
    assert size["tokens"]["value"] < 0.9 and size["tokens"]["low"] is None and size["in_seconds"] > 0
    assert "Nothing can be told from one seed" in said and "token multiplier" in page
    said, logged = run_ladder(*options)
    assert "begins" not in logged and "3 runs, 3 of them finished" in said


def test_other_data_is_compared_where_the_whole_validation_text_is_the_same(tmp_path):
    for name, size, tokens in (("a", 900, 300), ("b", 900, 250), ("other", 901, 300), ("long", 900, 2**20 + 1)):
        (tmp_path / name).mkdir()
        split = {"documents": 3, "bytes": size, "tokens": tokens}
        (tmp_path / name / "manifest.json").write_text(json.dumps({"splits": {"val": split}}))
    a, b, other, long, missing = (str(tmp_path / name) for name in ("a", "b", "other", "long", "missing"))
    assert same_texts(a, b) and not any(same_texts(a, one) for one in (other, long, missing))


def test_settings_that_change_the_loss_are_refused_and_others_are_not(run_ladder):
    _, refused = run_ladder(*LADDER, "--model.optimizer.lr", "0.3", expect=2)
    assert "ladder-d2-n6-s1 has model.optimizer.lr 0." in refused and "another --name" in refused
    assert "finished" in run_ladder(*LADDER, "--data.micro_batch_size", "8", "--trainer.log_interval", "2")[0]


def test_the_plan_alone_makes_no_folder(place, run_ladder):
    new = ["--depths", "2", "--ratio", "3", "--seeds", "3", "--name", "new"]
    printed, said = run_ladder("ladder", *new, *SIZES, "--plan_only", "--json")
    assert "3 runs, 0 of them finished" in said and not (place / "checkpoints/new").exists()
    [size] = json.loads(printed)["sizes"]
    assert (size["depth"], size["runs"]) == (2, 3) and size["tokens"] > 0 and size["parameters"] > 0
    assert size["epochs"] > 4
    printed, _ = run_ladder("ladder", *new, *SIZES, "--plan_only")
    assert "epochs of the text teach nothing new" not in printed
    printed, _ = run_ladder("ladder", *new, *SIZES, "--ratio", "3000", "--plan_only")
    assert "epochs of the text teach nothing new: give more --data, or a smaller --ratio" in printed


def run_with_loss(path, status="finished", **metrics):
    """The folder of a run with one log line."""
    run = Run(path)
    run.path.mkdir()
    run.describe(id=run.name, name=run.name, status=status)
    (run.path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, **metrics}) + "\n")
    return run


@pytest.mark.parametrize("depths", [(2, 3, 4), (2, 3, 4, 5, 6)])
def test_a_loss_that_rises_with_size_has_no_law(tmp_path, depths):
    trainings = [LadderRun(ModelSize(depth, depth**3, 100, 600 * depth**3, False), 1,
                          run_with_loss(tmp_path / str(depth), **{"val/loss": 2 + depth / 10})) for depth in depths]  # fmt: skip
    found = ladder_report.report("rises", "lm ladder", trainings)
    assert not found["laws"] and "The loss does not fall with FLOPs: no law is fitted." in found["notes"]


def test_the_report_finds_a_known_law(tmp_path):

    def expected(depth):
        parameters = 1e5 * depth**3
        return 1 + 100 / parameters**0.34 + 90 / (20 * parameters) ** 0.28

    def trained(depth, seed, held_out):
        parameters = 1e5 * depth**3
        tokens, flops = 20 * parameters, 6 * 20 * parameters**2
        loss = expected(depth) + 1e-4 * seed
        run = run_with_loss(tmp_path / f"{depth}-{seed}", "to do" if held_out else "finished",
                            tokens=tokens, **{"val/loss": 3 * loss, "val/bpb": loss})  # fmt: skip
        return LadderRun(ModelSize(depth, parameters, tokens, flops, held_out), seed, run)

    trainings = [trained(depth, seed, depth == 16) for depth in (2, 3, 4, 6, 8, 16) for seed in (1, 2)]
    found = ladder_report.report("law", "lm ladder", trainings)
    assert len(found["sizes"]) == 6 and found["unit"] == "bits per byte"
    [law], [predicted] = found["laws"], found["predictions"]
    assert predicted["depth"] == 16 and predicted["loss"] == pytest.approx(expected(16), rel=0.01)
    assert law["laws"][0] in ladder_report.page(found) and ladder_report.page(found).count("data:image/svg+xml") == 1


def test_a_trend_without_an_interval_is_not_shown():
    """It is that of one seed, from which nothing can be told."""
    against = {"recipe": "other", "verdict": "cannot be told", "trend": {"value": 0.6, "low": None, "high": None}}
    assert list(ladder_report.compared_remarks(against)) == ["Against other: cannot be told"]
    against["trend"] |= {"low": 0.4, "high": 0.9}
    assert "0.60 times as large (0.40 to 0.90)" in list(ladder_report.compared_remarks(against))[1]


@pytest.mark.parametrize("arguments, message", [
    ([], "give the depths, such as --depths 2,4,6,8"),
    (["--depths", "two"], "'two' is not a number of blocks, 2 or more"),
    (["--depths", "1,2"], "'1' is not a number of blocks, 2 or more"),
    (["--depths", "2,3", "--predict", "4", "--max_steps", "6"], "takes 3 other sizes or more"),
    (["--depths", "2", "--ratio", "1e-6"], "depth 2: "),
    (["--depths", "2", "--ratio", "3", "--max_steps", "6"], "--ratio and --max_steps each give the length"),
    (["--depths", "2", "--seeds", "0"], "--seeds 0 must be above 0"),
    (["--depths", "2", "--name", "a/b"], "run name 'a/b': use letters"),
    (["--depths", "2,300", "--max_steps", "6", "--aspect_ratio", "64"], "depth 300: "),
    (["--depths", "2", "--max_steps", "6", "--mfu", "2"], "--mfu 2.0 must lie in (0, 1]"),
    (["--depths", "2", "--trainer.max_steps", "5"], "give --max_steps"),
    (["--depths", "2", "--max_steps", "1", "--against", ""], "--max_steps 1 has no half"),
    *((["--depths", "2", "--max_steps", "6", "--against", recipe], message) for recipe, message in (
        ("--depths 3", "depths, seeds and folder are those of the ladder"),
        ("--model.optimizer.lrr 3", "there is no option 'model.optimizer.lrr'"),
        ("--data.val_tokens 8K", "--against changes data.val_tokens, and losses"),
        ("other.yaml", "no config 'other.yaml' here"), ("tiny.yaml", "tiny.yaml is the config of one model"),
    )),
])  # fmt: skip
def test_bad_input_is_one_line_and_trains_nothing(place, monkeypatch, arguments, message):
    monkeypatch.chdir(place)
    with pytest.raises(RequestError) as refused:
        typed, overrides = split_overrides([*SIZES, *arguments], LadderOptions)
        ladder(call(LadderOptions, typed, "lm ladder"), overrides)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert not list((place / "checkpoints").glob("ladder/*d300*"))


def test_a_training_without_a_finite_loss_is_named_and_left_out(place):
    said = lm(place, "ladder", "--depths", "2", "--max_steps", "3", *SIZES, "--optimizer", "adamw", "--name", "wild",
              "--model.optimizer.groups.embedding.lr", "1e38", expect=1)  # fmt: skip
    assert "wild-d2-n3-s1 ended without a finite loss" in said.stderr and "Without a finite loss" in said.stdout
    assert report(place, "wild")["runs"][0]["loss"] is None


@pytest.mark.parametrize("count, visible, devices, places", [
    (0, "", 1, [None]), (3, "", 1, ["0", "1", "2"]), (2, "5,7", 1, ["5", "7"]), (5, "", 2, ["0,1", "2,3"]),
    (2, "", "auto", ["0,1"]),
])  # fmt: skip
def test_each_device_takes_a_training(monkeypatch, count, visible, devices, places):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = {"trainer": {"accelerator": "auto", "devices": devices}}
    one = LadderRun(None, 1, Run("checkpoints/ladder/a"), settings)
    assert free_devices([one]) == places


@pytest.mark.slow
def test_a_ladder_is_killed_and_resumed(tmp_path):
    """By SIGKILL in its first training, and by SIGTERM in the second; no training outlives it, and losses are equal."""
    place = make_workplace(tmp_path, "data/small")
    options = ["ladder", "--depths", "2,3", "--max_steps", "60", *SIZES, "--trainer.checkpoint_interval", "10",
               "--trainer.val_interval", "60", "--trainer.stop_within", "0"]  # fmt: skip
    finish_ladder(place, *options, "--name", "whole")
    for signal_number, depth, code in ((signal.SIGKILL, 2, -9), (signal.SIGTERM, 3, 75)):
        process = start(place, *options, "--name", "killed", fresh=True)
        wait_until(lambda: len(Run(place / f"checkpoints/killed/killed-d{depth}-n60-s1").steps()) > 0, process)
        os.kill(process.pid, signal_number)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, err
        assert not processes_of(place, patience=120)
    assert "1 of 2 runs are finished; the same command resumes" in err
    finish_ladder(place, *options, "--name", "killed")
    killed, whole = ([one["loss"] for one in report(place, name)["runs"]] for name in ("killed", "whole"))
    assert killed == whole

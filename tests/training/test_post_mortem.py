"""A post-mortem writes itself, says what is true, and leaves no trace in the training that it is about."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from test_guards import poisoned
from trainings import equipment, fit, lm, losses

from lm.inspection.run_views import draw_incident
from lm.runs import postmortem
from lm.runs.postmortem import Incident, Sample
from lm.runs.run import Run

ALWAYS = {"guards.spike": "step > 1"}  # true from the second log line on
RECOVERED = r"\nThe loss was as low as before: \d\.\d{4} in the log line of step \d+, \d\.\d{4} before\.\n"
NEVER = {"guards.spike": None}
FILES = {"postmortem.md", "postmortem.json", "samples.txt", "tokens.json", "loss.png", "grad_norm.png"}


class InTheWay(Callback):
    """A file where the folder of the first post-mortem should be."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        (trainer.run.path / "postmortem-00000002").touch()


class Compilations(Callback):
    """Writes down how often something was compiled."""

    def on_train_end(self, trainer, pl_module):
        Path("compilations").write_text(str(torch._dynamo.utils.counters["stats"]["unique_graphs"]))


def page_of(run, step):
    return (run.path / f"postmortem-{step:08d}" / "postmortem.md").read_text()


def section(page, title):
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


# ---- in a training ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("compile", ["none", pytest.param("triton_free", marks=pytest.mark.slow)])
def test_losses_are_those_of_a_run_without_one(workplace, compile):
    """To the bit, with dropout; and nothing is compiled for it."""
    changes = {"model.compile": compile, "trainer.max_steps": 4,
               "callbacks": [equipment("test_post_mortem.Compilations")]}  # fmt: skip
    _, without = fit(workplace, f"without-{compile}", **NEVER, **changes)
    expected, compilations = losses(workplace), (workplace / "compilations").read_text()
    _, run = fit(workplace, f"with-{compile}", **ALWAYS, **changes)
    assert losses(workplace) == expected and (workplace / "compilations").read_text() == compilations
    assert {path.name for path in (run.path / "postmortem-00000002").iterdir()} == FILES
    assert postmortem.steps_of(without) == []


@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_numbers_are_those_of_the_step(workplace, packing):
    """Of a step of one micro-batch by weights that do not move: its loss and its samples.

    What fills up the rows of whole documents is no target.
    """
    _, run = fit(workplace, packing, **{
        "data.packing": packing, "data.path": f"data-{packing}",
        "model.optimizer.lr": 1e-30, "model.decoder.dropout": 0.0, "data.micro_batch_size": 8,
        "guards.spike": "step > 4", "trainer.log_interval": 5, "trainer.max_steps": 5,
    })  # fmt: skip
    folder = run.path / "postmortem-00000005"
    facts = json.loads((folder / "postmortem.json").read_text())
    step, loss, _, _ = max(facts["steps"], key=lambda each: each[1])
    assert facts["worst"] == step and [each[0] for each in facts["steps"]] == [1, 2, 3, 4, 5]
    shown = json.loads(lm(workplace, "data", "show", "--run", packing, "--step", str(step), "--json").stdout)["samples"]
    told = json.loads((folder / "tokens.json").read_text())
    assert [entry["loss"] for entry in told] == sorted((entry["loss"] for entry in told), reverse=True)
    counted = [loss for entry in told for loss in entry["losses"][1:] if loss is not None]
    assert sum(counted) / len(counted) == pytest.approx(loss, rel=1e-5)
    assert (sum(len(entry["losses"]) - 1 for entry in told) > len(counted)) == (packing == "whole")
    by_sample = {entry["sample"]: entry for entry in told}
    for sample in shown:
        entry = by_sample[sample["sample"]]
        assert entry["token_ids"] == sample["token_ids"]
        assert entry["origin"] == f"{sample['shard']}, window {sample['window']}"
        assert len(entry["token_ids"]) == len(entry["tokens"]) == len(entry["losses"])
        assert "".join(entry["tokens"]) in (folder / "samples.txt").read_text()
    assert f"| {max(counted):.4g} |" in section(page_of(run, 5), "What the step saw")


def test_a_step_that_is_not_finite_is_written_up(workplace):
    """The step, and not another one of its log line; the run continues and the page is closed."""
    _, run = fit(workplace, "poisoned", **poisoned(loss=[6]), **{
        "trainer.log_interval": 4, "guards.spike": None, "trainer.max_steps": 60, "trainer.val_interval": 60,
    })  # fmt: skip
    page = page_of(run, 8)
    assert "Step 6: loss inf" in page and "It was not applied, so it changed no weight." in page
    assert "guard `not-finite`, action warn: step 6 changed no weight" in page
    assert re.match(RECOVERED, section(page, "Recovery"))
    assert len(postmortem.steps_of(run)) == 1 and postmortem.still_open(run) is None


@pytest.mark.slow
def test_what_guards_do_meanwhile_belongs_to_it_and_a_stop_closes_it(workplace):
    """An Inf, a rollback and a stop are one trouble and one page, where there is no loss before to come back to."""
    alerts = {f"step == {step}": action for step, action in {3: "rollback", 5: "warn", 6: "stop"}.items()}
    _, run = fit(workplace, "stopped", expect=3, **{
        **poisoned(loss=[1]), "guards.alerts": alerts, "trainer.checkpoint_interval": 1, "trainer.keep_checkpoints": 9,
    })  # fmt: skip
    assert "guard `not-finite`, action warn" in page_of(run, 1)
    assert "The training ended at step 6." in section(page_of(run, 1), "Recovery")
    assert len(postmortem.steps_of(run)) == 1


def test_a_post_mortem_that_fails_is_one_warning(workplace):
    ended, run = fit(workplace, "clumsy", callbacks=[equipment("test_post_mortem.InTheWay")], **ALWAYS)
    assert ended.stderr.count("the post-mortem could not be written: FileExistsError") == 1
    assert run.read("run.json")["status"] == "finished"


@pytest.mark.slow
def test_an_interrupted_run_continues_its_page(workplace):
    """Interrupted while it was open; the next process closes it."""
    changes = {"guards.spike": "step == 3", "trainer.max_steps": 40, "trainer.val_interval": 40}
    kill = equipment("recorder.KillAt", signal_name="SIGTERM", micro_batch=5)
    _, run = fit(workplace, "again", callbacks=[kill], expect=75, **changes)
    file = run.path / "postmortem-00000003" / "postmortem.md"
    assert "## Recovery\n\nOpen" in file.read_text() and postmortem.still_open(run).step == 3
    fit(workplace, "again", "--ckpt_path", "auto", **changes)
    assert re.match(RECOVERED, section(file.read_text(), "Recovery")) and postmortem.still_open(run) is None


@pytest.mark.slow
def test_ranks_stay_in_step(workplace):
    """Two ranks; the last one has the NaN, and the losses are those of a run that writes nothing."""
    changes = {
        "trainer.devices": 2, "trainer.strategy": "fsdp2", "data.micro_batch_size": 2, "trainer.max_steps": 6,
        "guards.inject_step": 4,
    }  # fmt: skip

    def both():
        traces = [(workplace / f"trace-{rank}.jsonl").read_text().splitlines() for rank in range(2)]
        return [[json.loads(line)["loss"] for line in lines] for lines in traces]

    fit(workplace, "without", **NEVER, **changes)
    expected = both()
    _, run = fit(workplace, "with", **{"guards.spike": "step == 4"}, **changes)
    assert both() == expected
    told = json.loads((run.path / "postmortem-00000004" / "tokens.json").read_text())
    assert len(told) == 8 and {entry["origin"] for entry in told} == {"injected"}
    assert all(loss > 0 for entry in told for loss in entry["losses"][1:])


# ---- the folder alone ------------------------------------------------------------------------------------------------
def an_incident(**changes):
    return Incident(**{
        "run": "mine", "step": 7, "time": "2026-01-31 12:00:00 UTC", "guard": "spike", "action": "warn",
        "message": "loss > 1", "worst": 6, "baseline": 3.0, "injected": False,
        "steps": [(5, 3.0, 1.0, True), (6, 9.0, math.nan, False), (7, 4.0, 2.0, True)], **changes,
    })  # fmt: skip


def test_only_the_recovery_is_replaced(tmp_path):
    """A person's edits before and after survive that it is closed."""
    run = Run(tmp_path)
    file = postmortem.write_postmortem(run, an_incident(), [], str) / "postmortem.md"
    edited = file.read_text().replace("## Cause", "## Cause\n\nRow 7 of shard 3.").replace("# Post", "# My post")
    file.write_text(edited)
    postmortem.close_postmortem(run, postmortem.still_open(run), "recovered", "It is back.")
    assert file.read_text() == edited.replace(postmortem.OPEN, "It is back.") != edited
    assert postmortem.still_open(run) is None


def test_the_curves_are_those_of_the_log_lines_and_of_the_steps():
    """Also of an incident that was read from JSON, which has no NaN."""
    lines = [{"step": step, "train/loss": 3.0, "optim/grad_norm": 1.0} for step in range(1, 10)]
    pictures = draw_incident(an_incident(steps=[(5, 3.0, 1.0, True), (6, None, None, False)]), lines)
    assert pictures.keys() == {"loss.png", "grad_norm.png"}
    logged, steps = pictures["loss.png"].axes[0].get_lines()[:2]
    assert logged.get_xdata().tolist() == list(range(1, 10)) and steps.get_xdata().tolist() == [5, 6]
    assert math.isnan(steps.get_ydata()[1]) and all(picture._repr_png_() for picture in pictures.values())


def test_a_page_is_written_where_little_is_known(tmp_path):
    """The first log line, nothing read, nothing finite; and text that means something to Markdown."""
    nothing = an_incident(step=1, worst=1, baseline=None, steps=[(1, math.nan, math.nan, False)])
    folder = postmortem.write_postmortem(Run(tmp_path), nothing, [], str)
    assert {path.name for path in folder.iterdir()} == {"postmortem.md", "postmortem.json"}
    assert all(picture._repr_png_() for picture in draw_incident(nothing, []).values())
    text = {1: "a|", 2: "b`", 3: "\n\x00"}
    sample = Sample(3, "a.parquet, window 2", [1, 2, 3], [None, math.inf, 0.5])
    decode = lambda ids: "".join(text[token] for token in ids)  # noqa: E731
    page = (postmortem.write_postmortem(Run(tmp_path), an_incident(), [sample], decode) / "postmortem.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert [line.count("|") for line in rows] == [7] * 4
    assert "| inf | 3 | 1 | `a¦` | **`b'`** | `↵·` |" in rows
    for name in ("postmortem.json", "tokens.json"):
        json.loads((tmp_path / "postmortem-00000007" / name).read_text(), parse_constant=pytest.fail)


def test_one_that_is_damaged_is_passed_over(tmp_path):
    """A training that is resumed looks for the one that is open, though others have been damaged or renamed."""
    run = Run(tmp_path)
    postmortem.write_postmortem(run, an_incident(), [], str)
    for step, content in enumerate(["{}", '{"closed": null, "step": 9}', "[1]", "{", '{"steps": [[1]]}'], start=8):
        postmortem.folder_of(run, step).mkdir()
        (postmortem.folder_of(run, step) / "postmortem.json").write_text(content)
    (tmp_path / "postmortem-00000020-copy").mkdir()
    assert postmortem.steps_of(run) == list(range(7, 13)) and postmortem.still_open(run).step == 7

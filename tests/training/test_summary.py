"""A fit says what it is about to do, and at its end what it did; the commands that it names work when typed."""

import re
import shlex
import shutil

import pytest
from terminal import Terminal
from trainings import equipment, fit, lm, make_workplace, write_config


def test_a_fit_describes_itself_and_what_it_has_made(workplace):
    known = ("--seed", "9", "--trainer.peak_tflops", "1e-5", "--guards.budget.rate_usd_per_hr", "3600")
    said = fit(workplace, "small", *known)[0].stderr
    for part in (
        "device: 1 x ", ", 32-true, peak 1e-05 TFLOP/s", "time left, from the steps so far: ",
        " parameters, ", "context 32", "tokens for training", "training: 12 steps of 256 tokens = 3.07K tokens",
        "a step is 4 x 32 tokens x 2 micro-batches x 1 rank", "data: data/small, ",
        "optimizer: adamw, peak learning rate 0.01, schedule cosine",
        "weights: new, drawn from seed 9", "12 steps in ", "best validation loss ", "model: checkpoints/small/best",
    ):  # fmt: skip
        assert part in said, part

    commands = [line.partition("#")[0] for line in said.splitlines() if " -m lm " in line]
    assert len(commands) == 3
    for command in commands:
        arguments = shlex.split(command)
        assert arguments[1:3] == ["-m", "lm"]
        typed = ("--prompt", "The") if arguments[3] == "generate" else ()
        lm(workplace, *arguments[3:], *typed)

    said = fit(workplace, "small", "--trainer.max_steps", "14", "--ckpt_path", "auto", "--seed=9")[0].stderr
    assert "peak not known, so no MFU" in said
    assert "weights: resumed from checkpoints/small/step-00000012, after step 12 of 14" in said
    assert "2 steps in " in said and "time left, from" not in said  # there was no time left when it was known


PHASES = """
import json
from lightning.pytorch import Callback

class Phases(Callback):
    def note(self, trainer, *args):
        with open("phases.txt", "a") as file:
            state = trainer.run.read("state.json")
            print(state["phase"], state.get("eta_seconds"), file=file)

    on_train_batch_start = on_train_batch_end = note
"""


def test_compiling_is_said_while_it_takes_its_time_and_the_time_left_after_three_steps(workplace):
    (workplace / "phases.py").write_text(PHASES)
    changes = {"model.compile": "triton_free", "model.decoder.num_hidden_layers": 1, "model.schedule.warmup_steps": 0, "trainer.max_steps": 4,
               "trainer.log_interval": 4}  # fmt: skip
    said = fit(workplace, "compiled", **{"trainer.callbacks": [{"class_path": "phases.Phases"}], **changes})[0].stderr
    assert said.index("compiling with triton_free in the first step") < said.index("compiled: the first step took ")
    phases = (workplace / "phases.txt").read_text().splitlines()
    assert "compiling None" in phases and phases[-3].startswith("training ") and phases[-3] != "training None"


def test_on_a_terminal_lines_scroll_by_above_the_bar(workplace):
    width = 40
    write_config(workplace, **{"trainer.max_steps": 4, "trainer.log_interval": 4, "trainer.val_interval": 2})
    terminal = Terminal(workplace, "-m", "lm", "fit", "--config", "small.yaml", size=(width, 24), fork=True)
    assert terminal.end() == 0
    rows = terminal.rows()
    for start in ("device: ", "weights: new", "step 2/4  validation loss", "step 4/4  validation loss", "4 steps in "):
        assert len([row for row in rows if row.startswith(start)]) == 1, (start, *rows)
    [bar] = [row for row in rows if "4 steps  " in row]  # no remains of its earlier states; the figures have priority
    assert bar.lstrip("\N{BOX DRAWINGS HEAVY HORIZONTAL} ").startswith("4/4 steps  loss ") and len(bar) <= width


INSTALLED = """
import os
import sys
import lm
from lm.cli.command import main

sys.path = ["/nowhere", *(path for path in sys.path if path != os.getcwd())]  # as where `lm` is installed
path, config = sys.path[:], ["--config", "small.yaml"]
for command in (["fit", *config], ["plan", *config], ["bench", "step", *config, "--steps", "4", "--checkpoints", "0"],
                ["validate"], ["branch", "small", "--constant", "2k", "--make_only"]):
    assert main(command) == 0, command
    sys.path[:] = path
    sys.modules.pop("mine", None)  # a branch that is only made has read its config and built nothing
sys.path[0] = ""  # as in a notebook
lm.fit("sub/small.yaml")
"""


def test_every_command_and_a_notebook_find_a_callback_in_the_working_directory(tmp_path):
    """A script's own folder is the first of its path, where `python -m lm` has the working directory."""
    folder = make_workplace(tmp_path / "work")
    (folder / "mine.py").write_text("from lightning.pytorch import Callback\n\nclass Mine(Callback):\n    pass\n")
    config = write_config(folder, **{"trainer.callbacks": [{"class_path": "mine.Mine"}], "trainer.max_steps": 4})
    (folder / "sub").mkdir()
    shutil.copy(config, folder / "sub")
    (folder / "installed.py").write_text(INSTALLED)
    lm(folder, "installed.py")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_that_nobody_foresaw_leaves_its_traceback_in_the_log_and_its_place_on_the_terminal(workplace, rank):
    """Where it is another rank's, rank zero ends because it hears nothing more, with an error that says no cause."""
    changes = {"trainer.callbacks": [equipment("recorder.Failing", rank=rank)], "trainer.devices": 1 + rank}
    ended, run = fit(workplace, f"failing-{rank}", expect=1, **changes)
    assert re.search(r"ZeroDivisionError: on purpose \(.*recorder.py, line \d+;", ended.stderr)
    log = (run.path / "log.txt").read_text()
    assert f"  {'rank 1 ' * rank}failed: ZeroDivisionError: on purpose\nTraceback" in log
    assert 'raise ZeroDivisionError("on purpose")' in log
    assert re.match(rf"20\d\d-\d\d-\d\d \d\d:\d\d:\d\dZ  run checkpoints/failing-{rank}\n", log)

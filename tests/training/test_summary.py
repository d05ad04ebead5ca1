"""A fit says what it is about to do, and at its end what it did; the commands that it names work when typed."""

import os
import shlex
import subprocess
import sys

from trainings import PLACES, lm, make_workplace, write_config


def test_a_fit_describes_itself_and_what_it_has_made(tmp_path):
    folder = make_workplace(tmp_path / "work")
    write_config(folder)
    known = ("--seed", "9", "--trainer.peak_tflops", "1e-5", "--guards.budget.rate_usd_per_hr", "3600")
    said = lm(folder, "fit", "--config", "small.yaml", *known).stderr
    for part in (
        "device: 1 x ", ", 32-true, peak 1e-05 TFLOP/s", " USD, at 40% MFU, assumed", "expected, as measured: ",
        " parameters, ", "context 32", "tokens for training", "training: 12 steps of 256 tokens = 3.07K tokens",
        "weights: new, drawn from seed 9", "12 steps in ", "best validation loss ", "model: checkpoints/small/best",
        "sample: ",
    ):  # fmt: skip
        assert part in said, part

    commands = [line.partition("#")[0] for line in said.splitlines() if " -m lm " in line]
    assert len(commands) == 3
    for command in commands:
        arguments = shlex.split(command)
        assert arguments[1:3] == ["-m", "lm"]
        typed = ("--prompt", "The") if arguments[3] == "generate" else ()
        lm(folder, *arguments[3:], *typed)

    said = lm(folder, "fit", "--config", "small.yaml", "--trainer.max_steps", "14", "--ckpt_path", "auto",
              "--seed=9").stderr  # fmt: skip
    assert "peak not known, so no MFU" in said and "expected: not known before two log lines" in said
    assert "weights: resumed from checkpoints/small/step-00000012, after step 12 of 14" in said
    assert "2 steps in " in said


PHASES = """
import json
from lightning.pytorch import Callback

class Phases(Callback):
    def note(self, trainer, *args):
        with open("phases.txt", "a") as file:
            print(trainer.run.read("state.json")["phase"], file=file)

    on_train_batch_start = on_train_batch_end = note
"""


def test_compiling_is_said_while_it_takes_its_time(tmp_path):
    folder = make_workplace(tmp_path)
    (folder / "phases.py").write_text(PHASES)
    write_config(folder, **{"trainer.callbacks": [{"class_path": "phases.Phases"}], "model.compile": "triton_free",
                            "trainer.max_steps": 2, "model.schedule.warmup_steps": 0})  # fmt: skip
    said = lm(folder, "fit", "--config", "small.yaml").stderr
    assert said.index("compiling with triton_free in the first step") < said.index("compiled: the first step took ")
    phases = (folder / "phases.txt").read_text().split()
    assert "compiling" in phases and phases[-1] == "training"


def test_the_installed_command_finds_a_callback_in_the_working_directory_too(tmp_path):
    """A script's own folder is the first of its path, where `python -m lm` has the working directory."""
    folder = make_workplace(tmp_path / "work")
    (folder / "mine.py").write_text("from lightning.pytorch import Callback\n\nclass Mine(Callback):\n    pass\n")
    write_config(folder, **{"trainer.callbacks": [{"class_path": "mine.Mine"}]})
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "lm").write_text("from lm.__main__ import main\n\nmain()\n")
    command = [sys.executable, "../bin/lm", "fit", "--config", "small.yaml"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": PLACES}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_failure_that_nobody_foresaw_leaves_its_traceback_in_the_log_and_its_place_on_the_terminal(tmp_path):
    folder = make_workplace(tmp_path)
    hook = "def on_train_batch_end(self, *args):\n        {}['lost']\n"
    source = f"from lightning.pytorch import Callback\n\nclass Broken(Callback):\n    {hook}"
    (folder / "broken.py").write_text(source)
    write_config(folder, **{"trainer.callbacks": [{"class_path": "broken.Broken"}]})
    fit = lm(folder, "fit", "--config", "small.yaml", expect=1)
    assert "KeyError: 'lost'" in fit.stderr.splitlines()[-1] and "broken.py, line 5;" in fit.stderr.splitlines()[-1]
    log = (folder / "checkpoints/small/log.txt").read_text()
    assert "failed: KeyError: 'lost'\nTraceback" in log and "    {}['lost']" in log


def test_so_does_a_failure_of_another_rank(tmp_path):
    """Rank zero ends because it hears nothing more, with an error that says nothing of the cause."""
    folder = make_workplace(tmp_path)
    hook = "def on_train_batch_end(self, trainer, *args):\n        trainer.global_rank and {}['lost']\n"
    (folder / "broken.py").write_text(f"from lightning.pytorch import Callback\n\nclass Broken(Callback):\n    {hook}")
    write_config(folder, **{"trainer.callbacks": [{"class_path": "broken.Broken"}], "trainer.devices": 2})
    fit = lm(folder, "fit", "--config", "small.yaml", expect=1)
    assert "KeyError: 'lost' (" in fit.stderr and "broken.py, line 5;" in fit.stderr
    log = (folder / "checkpoints/small/log.txt").read_text()
    assert "rank 1 failed: KeyError: 'lost'\nTraceback" in log and "trainer.global_rank and {}['lost']" in log

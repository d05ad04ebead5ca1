"""A training from Python, without the command line: the script of `lm/training/README.md`, and a bare Trainer."""

import os
import re
import subprocess
import sys

import pytest
from trainings import HERE, PLACES, lm, make_workplace

from lm.runs.checkpoint import find_damage
from lm.runs.run import Run

README = (HERE.parent / "lm" / "training" / "README.md").read_text()
SCRIPT = re.search(r"## Train from Python\n.*?```python\n(.*?)```", README, re.DOTALL)[1]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = make_workplace(tmp_path_factory.mktemp("python"))
    lm(folder, "data", "prepare", "--input", "texts", "--output", "data/tiny", "--tokenizer", "char",
       "--val_fraction", "0.2")  # fmt: skip
    return folder


def python(folder, script, **changes):
    """Run a script with these numbers in place of its own; returns its standard error."""
    for name, value in changes.items():
        script, found = re.subn(rf'("{name}": |{name}=)\d+', rf"\g<1>{value}", script)
        assert found == 1, name
    environment = {**os.environ, "PYTHONPATH": PLACES, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_script_of_the_readme_trains_a_run_and_resumes_it(workplace):
    small = {"val_interval": 2, "checkpoint_interval": 3, "seq_len": 32}
    python(workplace, SCRIPT, max_steps=4, **small)
    run = Run(workplace / "checkpoints" / "mine")
    assert run.status() == "finished" and find_damage(run.checkpoint("last")) is None and run.link("best")
    python(workplace, SCRIPT, max_steps=6, **small)
    assert [line["step"] for line in run.metrics("val/loss")] == [2, 4, 6] and list(run.steps())[-1] == 6
    assert "6/6" in lm(workplace, "runs", "ls").stdout
    assert lm(workplace, "generate", "--run", "mine", "--prompt", "Chapter", "--max_new_tokens", "4").stdout


def test_a_trainer_without_checkpoints_says_so(workplace):
    bare = re.sub(r", callbacks=standard_callbacks\(.*\)\)", ")", SCRIPT).replace("mine", "bare")
    assert "callbacks=" not in bare
    said = python(workplace, bare, max_steps=1, seq_len=32)
    assert "this Trainer takes no checkpoints and writes nothing: give it `callbacks=standard_callbacks(...)`" in said

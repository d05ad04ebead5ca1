"""How a process was started, what it may import, and what its outputs can write."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm.errors import RequestError
from lm.system.process import LAUNCHER_PID, check_launcher, rank

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", LAUNCHER_PID, "SLURM_STEP_ID", "SLURM_NTASKS")
LIKE_PYTHONS_OWN = "random inspect queue token yaml statistics numpy"


@pytest.mark.parametrize(("variables", "number", "allowed"), [
    ("", 0, True), ("RANK=0 LOCAL_RANK=0 WORLD_SIZE=1", 0, True), ("LOCAL_RANK=0", 0, True),
    ("RANK=a", 0, False), ("RANK=1", 0, False), ("LOCAL_RANK=1", 0, False), ("RANK=0 WORLD_SIZE=2", 0, False),
    ("RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 TORCHELASTIC_RUN_ID=x", 3, True),
    (f"LOCAL_RANK=1 WORLD_SIZE=2 {LAUNCHER_PID}=5", 1, True),
    ("SLURM_STEP_ID=0 SLURM_NTASKS=4 SLURM_PROCID=2 RANK=2 WORLD_SIZE=4", 2, True),
])  # fmt: skip
def test_ranks_are_those_of_a_known_launcher(variables, number, allowed, monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, _, value in (word.partition("=") for word in variables.split()):
        monkeypatch.setenv(name, value)
    assert rank() == number
    if not allowed:
        with pytest.raises(RequestError, match=f"{variables} in the environment.*`unset"):
            check_launcher()
        return
    check_launcher()
    launched = number > 0
    assert ("LOCAL_RANK" in os.environ) == (launched and "LOCAL_RANK" in variables)  # Lightning would believe it


@pytest.mark.parametrize(("start", "names"), [(["-m", "lm"], ""), ([str(Path(sys.executable).parent / "lm")], "types")])
def test_files_of_the_working_directory_do_not_replace_modules_of_python(start, names, tmp_path):
    for name in f"{LIKE_PYTHONS_OWN} {names}".split():
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user was imported')")
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, *start, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "x"],
                          cwd=tmp_path, env=os.environ | root, text=True, capture_output=True)  # fmt: skip
    assert done.returncode == 2 and "lm fit: trainer.max_steps: expected a count" in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_output_of_any_encoding_takes_any_character(encoding):
    code = ("import json; from lm.__main__ import write_any_character; write_any_character()\n"
            "print(json.dumps('Zürich 😀 █\\udc80', ensure_ascii=False))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONIOENCODING": encoding},
                          capture_output=True, check=True)  # fmt: skip
    assert json.loads(done.stdout.decode(encoding)) == "Zürich 😀 █\udc80"

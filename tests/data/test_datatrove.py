"""The programs of the README with datatrove: near duplicates are removed before, and its executor runs the tasks of
`lm data prepare`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from shard_files import write_jsonl
from test_prepare import digests
from trainings import PLACES

import lm.data

pytestmark = pytest.mark.slow
PROGRAMS = re.findall(r"```python\n(from datatrove.*?|import subprocess\nfrom datatrove.*?)```",
                      (Path(lm.data.__path__[0]) / "README.md").read_text(), re.DOTALL)  # fmt: skip
SPEECHES = Path(lm.data.__path__[0]) / "corpus/sotu.parquet"


def run(folder, *command):
    environment = {**os.environ, "PYTHONPATH": PLACES, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stderr


@pytest.fixture
def folder(tmp_path):
    """Beginnings of speeches, some of them nearly twice; and the command `lm`."""
    pytest.importorskip("datatrove")
    texts = [speech[:600] for speech in pq.read_table(SPEECHES)["text"].to_pylist()[:200]]
    copies = [re.sub(r"\bthe\b", "a", text, count=1) + " So it is." for text in texts[::10]]
    write_jsonl(tmp_path / "texts/a.jsonl", texts + copies)
    (tmp_path / "lm").write_text(f'#!/bin/sh\nexec {sys.executable} -m lm "$@"\n')
    (tmp_path / "lm").chmod(0o755)
    return tmp_path


def test_near_duplicates_are_removed(folder):
    pytest.importorskip("spacy")
    (folder / "near.py").write_text(next(program for program in PROGRAMS if "Minhash" in program))
    run(folder, sys.executable, "near.py")
    run(folder, "lm", "data", "prepare", "--input", "clean/", "--output", "data/clean", "--vocab_size", "400")
    splits = json.loads((folder / "data/clean/manifest.json").read_text())["splits"]
    assert 180 <= sum(split["documents"] for split in splits.values()) <= 202  # of 220, some of which are filtered


def test_its_executor_runs_the_tasks(folder):
    program = next(program for program in PROGRAMS if "--task" in program)
    (folder / "tasks.py").write_text(program)
    command = ["lm", "data", "prepare", "--input", "texts/", "--output", "data/large"]
    run(folder, *command, "--plan_only")
    run(folder, sys.executable, "tasks.py")
    assert not (folder / "data/large/manifest.json").exists() and list(folder.glob("data/large/train/*.parquet"))
    assert "units are done" in run(folder, *command)
    run(folder, *command[:-1], "data/alone")
    assert digests(folder / "data/large") == digests(folder / "data/alone")

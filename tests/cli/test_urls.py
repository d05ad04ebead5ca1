"""A URL where something is written to a disk is refused."""

import pytest
from run_folders import write_run

from lm.cli.command import main

ROOT = "--trainer.default_root_dir"


@pytest.mark.parametrize("command, said", [
    (["fit", ROOT, "s3://b/x"], "give a local folder; configs/launch/mirror.sh copies it to a store"),
    (["fit", ROOT, "hf://b/x"], "give a local folder"),
    (["fit", ROOT, "file:///b/x"], "give the path alone: /b/x"),
    (["plan", ROOT, "gs://b/x"], "gs://b/x is a URL"),
    (["fit", "--data.cache_dir", "s3://b/x"], "data.cache_dir s3://b/x is a URL"),
    (["fit", "--data.path", "s3://b/x"], "data.path s3://b/x is a URL"),
    (["bench", "step", "--output", "s3://b/x"], "--output s3://b/x is a URL"),
    (["profile", "--trace", "s3://b/x"], "--trace s3://b/x is a URL"),
    (["data", "prepare", "--input", "x", "--output", "s3://b/x"], "--output s3://b/x is a URL"),
    (["export", "--output", "hf://b/x"], "--output hf://b/x is a URL"),
    (["import", "--input", ".", "--output", "gs://b/x"], "--output gs://b/x is a URL"),
    (["runs", "export", "small", "--output", "s3://b/x"], "--output s3://b/x is a URL"),
    (["runs", "compare", "small", "small-2", "--png", "s3://b/x"], "--png s3://b/x is a URL"),
])  # fmt: skip
def test_a_url_where_something_is_written_to_a_disk_is_refused(here, command, said, capsys):
    for _ in range(2):  # `small`, `small-2`
        run = write_run("checkpoints", "small", [{"step": 3, "train/loss": 1.0}])
        (run.path / "step-00000003").mkdir()
        (run.path / "step-00000003" / "trainer.json").write_text("{}")
    training = command[0] in ("fit", "validate", "plan", "bench", "profile")
    config, words = ["--config", "tiny.yaml"] if training else [], 1 + (command[0] == "bench")
    assert main([*command[:words], *config, *command[words:]]) == 2
    out, err = capsys.readouterr()
    assert said in out + err.splitlines()[-1]
    assert [entry.name for entry in here.iterdir()] == ["checkpoints"]

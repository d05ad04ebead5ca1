"""A checkpoint that was damaged after it was written: found, passed over by `auto`, refused by name."""

import random
import shutil

import pytest
from trainings import expected, lm, losses, trace, write_config

from lm.cli.command import main
from lm.errors import RequestError
from lm.runs.resume import find_checkpoint
from lm.runs.run import Run

pytestmark = pytest.mark.fault(5)

FILES = ("model.safetensors", "optimizer.safetensors", "trainer.json", "config.json", "generation_config.json",
         "tokenizer.json", "tokenizer_config.json")  # fmt: skip


@pytest.fixture(scope="module")
def kept(uninterrupted, tmp_path_factory):
    """A workplace with a run whose checkpoints were all kept, of steps 3, 4, 6, 8, 9 and 12; read only."""
    folder = tmp_path_factory.mktemp("kept") / "workplace"
    shutil.copytree(uninterrupted, folder, symlinks=True, ignore=shutil.ignore_patterns("checkpoints"))
    lm(folder, "fit", "--config", str(write_config(folder, "kept", **{"trainer.keep_checkpoints": 9})))
    (folder / "trace.jsonl").unlink()
    return folder


@pytest.fixture
def damaged(kept, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(kept, tmp_path / "workplace", symlinks=True)


def flip(path, place=None):
    """Change one bit."""
    data = bytearray(path.read_bytes())
    place = random.Random(path.name).randrange(len(data)) if place is None else place
    data[place] ^= 1 << place % 8
    path.write_bytes(data)


DAMAGES = {
    "flip": flip,
    "flip the first byte": lambda path: flip(path, 0),
    "flip the last byte": lambda path: flip(path, path.stat().st_size - 1),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "remove": lambda path: path.unlink(),
}


def test_each_file_of_a_real_checkpoint_is_covered(damaged, caplog):
    """`auto` falls back and says over which it passes and why; what is put back is taken again."""
    run = Run(damaged / "checkpoints" / "kept")
    newest, before = run.steps()[12], run.steps()[9]
    assert sorted(path.name for path in newest.iterdir()) == sorted(FILES)
    (newest / "notes.txt").write_text("what somebody puts beside is no damage")

    def auto():
        return find_checkpoint("auto", "kept", str(damaged / "checkpoints"), named=False, command="fit")[0]

    for name in FILES:
        whole = (newest / name).read_bytes()
        for damage in DAMAGES.values():
            damage(newest / name)
            caplog.clear()
            assert auto() == before
            said = [record.getMessage() for record in caplog.records]
            assert said[0].startswith(f"passing over {newest}: ") and name in said[0]
            assert said[1] == f"{before} is the newest complete checkpoint"
            with pytest.raises(RequestError, match=name):
                find_checkpoint(str(newest), "kept", str(damaged), named=False, command="fit")
            (newest / name).write_bytes(whole)
        assert auto() == newest


def test_training_resumes_from_the_newest_whole_one(damaged):
    """Bit for bit, with the two newest damaged; they are replaced on the way."""
    run = Run(damaged / "checkpoints" / "kept")
    flip(run.steps()[12] / "optimizer.safetensors")
    flip(run.steps()[9] / "trainer.json")
    config = str(write_config(damaged, "kept", **{"trainer.keep_checkpoints": 9}))
    said = lm(damaged, "fit", "--config", config, "--ckpt_path", "auto").stderr
    assert "passing over checkpoints/kept/step-00000012: optimizer.safetensors is damaged" in said
    assert "passing over checkpoints/kept/step-00000009: trainer.json is damaged" in said
    assert "checkpoints/kept/step-00000008 is the newest complete checkpoint" in said
    assert {entry["step"] for entry in trace(damaged)} == {9, 10, 11, 12}
    assert losses(damaged) == {key: loss for key, loss in expected(damaged).items() if key[0] > 8}
    lm(damaged, "fit", "--config", config, "--ckpt_path", str(run.steps()[9]))  # it is whole again


def test_a_damaged_one_is_refused_by_name(damaged, monkeypatch, capsys):
    """By every command, with one line and exit 2; and where all are damaged `auto` does not begin anew."""
    run = Run(damaged / "checkpoints" / "kept")
    config = str(write_config(damaged, "kept"))
    for path in run.steps().values():
        flip(path / "model.safetensors")
    path = "checkpoints/kept/step-00000012"
    monkeypatch.chdir(damaged)
    commands = [
        ["fit", "--config", config, "--ckpt_path", "last"],
        ["fit", "--config", config, "--ckpt_path", "best"],
        ["fit", "--config", config, "--ckpt_path", path],
        ["validate", "--run", "kept"],
        ["generate", "--ckpt_path", path, "--prompt", "The"],
        ["evaluate", "--run", "kept", "--texts", "texts"],
        ["export", "--run", "kept", "--output", "exported"],
    ]
    for command in commands:
        assert main(command) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(f"lm {command[0]}: ") and "step-00000012: model.safetensors is damaged" in last
    refused = lm(damaged, "fit", "--config", config, "--ckpt_path", "auto", expect=2).stderr
    assert "has no complete checkpoint (step-00000012: model.safetensors is damaged" in refused.splitlines()[-1]
    assert "Traceback" not in refused
    assert not (damaged / "trace.jsonl").exists() and not (damaged / "exported").exists()
    assert run.read("run.json")["status"] == "finished" and list(run.steps()) == [3, 4, 6, 8, 9, 12]

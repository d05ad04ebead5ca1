"""`lm diff` of runs, checkpoints and Hugging Face folders says what changed, or in one line why it cannot."""

import json
import shutil

import pytest
from decoders import SMALL, trained_like, write_huggingface
from safetensors.torch import load_file, save_file
from trainings import lm, make_workplace, write_config

from lm.cli.diff import diff
from lm.data.tokenizer import train_char
from lm.errors import RequestError
from lm.runs.run import Run
from lm.system.arguments import call


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Two runs that differ in the learning rate, the first with checkpoints of steps 3 and 4."""
    folder = make_workplace(tmp_path_factory.mktemp("diff"))
    settings = {"trainer.max_steps": 4, "trainer.keep_checkpoints": 2, "trainer.callbacks": []}
    for lr in (1e-2, 2e-2):
        config = write_config(folder, **settings, **{"model.optimizer.lr": lr})
        lm(folder, "fit", "--config", str(config), "--run", f"lr-{lr}")
    return folder


@pytest.fixture(autouse=True)
def place(workplace, monkeypatch):
    monkeypatch.chdir(workplace)


def differing(capsys, *arguments):
    call(diff, [*arguments, "--json"], prog="lm diff")
    return json.loads(capsys.readouterr().out)


def test_runs_differ_in_a_setting_in_every_weight_and_in_what_they_predict(workplace, capsys):
    found = differing(capsys, "lr-0.01", "lr-0.02", "--texts", "texts/000.txt", "texts/001.txt")
    assert found["settings"] == {"model.optimizer.lr": [0.01, 0.02]}
    before, after = (load_file(Run(f"checkpoints/lr-{lr}").checkpoint() / "model.safetensors") for lr in (0.01, 0.02))
    relative = {name: ((after[name] - weight).norm() / weight.norm()).item() for name, weight in before.items()}
    assert {weight["name"]: weight["relative"] for weight in found["weights"]} == pytest.approx(relative, rel=1e-4)
    group = next(group for group in found["groups"] if group["kind"] == "mlp.up_proj")
    both = [relative[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1)]
    assert (group["weights"], group["layer"]) == (2, both.index(max(both)))
    assert (group["smallest"], group["largest"]) == pytest.approx((min(both), max(both)), rel=1e-4)
    texts = found["texts"]
    assert texts["tokens"] == sum(len((workplace / f"texts/00{index}.txt").read_text()) for index in (0, 1))
    assert 0 < texts["jensen_shannon"]["mean"] < texts["kl"]["mean"] < texts["kl"]["largest"]
    assert 0 < texts["same_likeliest"] <= 1 and texts["bits_per_token"][0] != texts["bits_per_token"][1]


def test_checkpoints_of_one_run_and_a_hugging_face_folder(workplace, capsys):
    three, four = (f"checkpoints/lr-0.01/step-{step:08d}" for step in (3, 4))
    found = differing(capsys, three, four)
    assert [model["step"] for model in found["models"]] == [3, 4]
    assert found["settings"] == {} and found["texts"] is None
    copied = workplace / "hf"
    shutil.copytree(three, copied, ignore=shutil.ignore_patterns("trainer.json", "optimizer.safetensors"))
    found = differing(capsys, three, "hf", "--texts", "texts/000.txt")
    assert max(weight["relative"] for weight in found["weights"]) == 0 and found["settings"] == {}
    assert found["texts"]["kl"]["largest"] == 0 and found["texts"]["same_likeliest"] == 1
    weights = load_file(copied / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 3
    save_file(weights, copied / "model.safetensors")
    call(diff, [three, "hf"], prog="lm diff")
    page = capsys.readouterr().out
    assert "the most changed: model.layers.1.mlp.up_proj.weight 2, " in page and "the shapes are the same" in page


def test_other_shapes_and_tokenizers_are_one_line(tmp_path):
    for name, letters in (("shape", (Run("checkpoints/lr-0.01").checkpoint() / "tokenizer.json")), ("other", None)):
        (tmp_path / name).mkdir()
        write_huggingface(trained_like(SMALL), tmp_path / name)
        for file, text in train_char(["other letters"]).files().items():
            (tmp_path / name / file).write_text(letters.read_text() if letters and file == "tokenizer.json" else text)
    with pytest.raises(RequestError, match="differ in shape: .*hidden_size 32 and 48") as caught:
        diff(["lr-0.01", str(tmp_path / "shape")])
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match="different tokenizers"):
        diff(["lr-0.01", str(tmp_path / "other")])
    with pytest.raises(RequestError, match="name two models"):
        diff(["lr-0.01"])
    with pytest.raises(RequestError, match="did you mean lr-0.01"):
        diff(["lr-0.01", "lr-0.011"])

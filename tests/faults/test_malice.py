"""What somebody else made runs nothing here: pickles under other names, paths that climb out, texts that are code.

A canary tells: each thing below makes a file when it is executed, or has something to show that lies outside.
"""

import contextlib
import io
import json
import os
import pickle
import shutil

import pytest
import torch
import yaml
from trainings import lm, write_config

from lm.cli.command import main
from lm.system.files import digest, dump_checksummed, load_checksummed

pytestmark = pytest.mark.fault(21)
CANARY = "canary"
CODE = f"__import__('os').system('touch {CANARY}')"
TAGGED = f"!!python/object/apply:os.system ['touch {CANARY}']"
CHECKPOINT = ("config.json", "model.safetensors", "optimizer.safetensors", "tokenizer.json", "tokenizer_config.json",
              "trainer.json")  # fmt: skip


class Malice:
    """Makes the canary when it is unpickled."""

    def __reduce__(self):
        return os.system, (f"touch {CANARY}",)


@pytest.fixture
def place(uninterrupted, tmp_path, monkeypatch):
    """A copy of the trained folder, and the working directory; at the end the canary must not be there."""
    folder = tmp_path / "work"
    shutil.copytree(uninterrupted, folder, symlinks=True)
    monkeypatch.chdir(folder)
    yield folder
    assert not list(tmp_path.rglob(CANARY))


@pytest.fixture
def poison(tmp_path):
    """Bytes that make the canary in whoever loads them with torch."""
    torch.save(Malice(), tmp_path / "saved")
    return (tmp_path / "saved").read_bytes()


def said(*arguments: str, code: int | None = 2) -> str:
    """What a command says of a request; without --debug, as people give it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = main(arguments)
    assert code is None or found == code, err.getvalue()
    assert "--debug shows" not in err.getvalue(), err.getvalue()
    return out.getvalue() + err.getvalue()


def test_the_canary_sings(tmp_path, monkeypatch):
    """Who does unpickle these bytes, or loads that YAML, runs them: the tests below would see it."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Malice()))
    (tmp_path / CANARY).unlink()
    yaml.unsafe_load(TAGGED)
    assert (tmp_path / CANARY).exists()


# ---- pickles ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sealed", [False, True])
def test_a_pickle_in_a_checkpoint_is_refused_by_every_command(place, poison, sealed):
    """Also where its digest is the right one, so that only its reader can refuse it."""
    poison = poison if sealed else pickle.dumps(Malice())
    folder = (place / "checkpoints/small/last").resolve()
    (place / "text.txt").write_text("The letter of the captain was lost.")
    commands = (
        ["generate", "--ckpt_path", str(folder), "--prompt", "The"],
        ["export", "--ckpt_path", str(folder), "--output", "out"],
        ["import", "--input", str(folder), "--output", "made"],
        ["validate", "--ckpt_path", str(folder)],
        ["evaluate", "--ckpt_path", str(folder), "--tasks", "embedded:sotu"],
        ["fit", "--config", "small.yaml", "--ckpt_path", str(folder)],
    )
    for name in CHECKPOINT:
        before = {file: (folder / file).read_bytes() for file in (name, "trainer.json")}
        (folder / name).write_bytes(poison)
        if sealed and name != "trainer.json":
            document = load_checksummed(before["trainer.json"])
            document["digests"][name] = digest(folder / name)
            (folder / "trainer.json").write_bytes(dump_checksummed(document))
        # What a fit reads of such a checkpoint, it reads when it begins.
        for command in commands[: 3 if sealed and name != "optimizer.safetensors" else 0 if sealed else None]:
            assert said(*command)
        for file, content in before.items():
            (folder / file).write_bytes(content)
    assert not (place / "made").exists() and not (place / "out").exists()


def test_a_pickle_in_a_folder_to_import_is_refused(place, poison):
    model = place / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / "checkpoints/small/last" / name, model / name)
    importing = ("import", "--input", "model", "--output", "made")
    (model / "pytorch_model.bin").write_bytes(poison)
    assert "is a pickle, which could run anything" in said(*importing)
    (model / "model.safetensors").write_bytes(poison)
    assert "model.safetensors cannot be read" in said(*importing)
    assert "model.safetensors cannot be read" in said("generate", "--ckpt_path", "model", "--prompt", "The")
    assert not (place / "made").exists()


def test_a_pickle_for_a_shard_a_tokenizer_or_a_manifest_is_refused(place, poison):
    config = ("--config", str(write_config(place, **{"trainer.callbacks": None})))
    for name in ("train/00000.parquet", "val/00000.parquet", "tokenizer.json", "manifest.json"):
        file = place / "data/small" / name
        whole = file.read_bytes()
        file.write_bytes(poison.ljust(len(whole), b".") if name.endswith("parquet") else poison)  # of the right length
        said("plan", *config)
        said("fit", *config, "--run", "fresh")
        if name.endswith("parquet") or name == "manifest.json":
            said("data", "inspect", "data/small")
        file.write_bytes(whole)
    (place / "shards").mkdir()
    (place / "shards/a.parquet").write_bytes(poison)
    assert "a.parquet" in said("data", "inspect", "shards")
    assert not (place / "checkpoints/fresh").exists()


def test_a_pickle_for_what_a_run_says_of_itself_is_nothing_known(place, poison):
    run = place / "checkpoints/small"
    for name in ("state.json", "heartbeat.json", "metrics.jsonl", "config.yaml", "data.json"):
        (run / name).write_bytes(poison)
    for look in (["monitor", "small", "--json"], ["runs", "ls"], ["runs", "show", "small"]):
        said(*look, code=None)
    said("data", "show", "--run", "small", "--step", "1")


# ---- texts that are code ---------------------------------------------------------------------------------------------
def test_a_tag_that_would_make_an_object_is_refused_wherever_a_yaml_is_read(place):
    (place / "evil.yaml").write_text(f"trainer: {{max_steps: 3}}\nseed_everything: {TAGGED}\n")
    (place / "tasks.yaml").write_text(f"icl_tasks: {TAGGED}\n")
    for command in (["plan"], ["fit"], ["profile"], ["validate"]):
        assert "could not determine a constructor" in said(*command, "--config", "evil.yaml")
    assert "could not determine a constructor" in said("evaluate", "--run", "small", "--tasks", "tasks.yaml")
    (place / "checkpoints/small/config.yaml").write_text(f"data: {TAGGED}\n")
    for look in (["runs", "show", "small"], ["runs", "compare", "small", "small"]):
        said(*look, code=None)
    said("data", "show", "--run", "small", "--step", "1")
    said("validate", "--run", "small")
    said("fit", "--config", "small.yaml", "--ckpt_path", "last")


@pytest.mark.parametrize("expression", [f"loss > {CODE}", f"loss > 1 * median({CODE}, 2)"])
def test_an_alert_that_is_code_is_refused_before_a_run_begins(place, expression):
    config = str(write_config(place, "alert", **{"guards.alerts": {expression: "stop"}, "trainer.callbacks": None}))
    for command in ("plan", "fit"):
        assert "a condition is" in said(command, "--config", config)
    assert not (place / "checkpoints/alert").exists()


# ---- paths that climb out --------------------------------------------------------------------------------------------
def test_a_manifest_that_names_files_outside_of_its_folder_is_refused(place):
    shutil.copy(place / "data/small/val/00000.parquet", place / "outside.parquet")
    manifest = json.loads((place / "data/small/manifest.json").read_text())
    entry = manifest["splits"]["train"]["shards"][0]
    config = ("--config", str(write_config(place, **{"trainer.callbacks": None})))
    for name in ("../../outside.parquet", str(place / "outside.parquet"), "train/../../../outside.parquet"):
        manifest["splits"]["train"]["shards"] = [{**entry, "file": name}]
        (place / "data/small/manifest.json").write_text(json.dumps(manifest))
        for command in (["plan", *config], ["fit", *config], ["data", "inspect", "data/small"]):
            assert "which is missing" in said(*command)  # only files of the folder are looked at
    manifest["splits"] = {"../../outside": manifest["splits"]["val"]}
    (place / "data/small/manifest.json").write_text(json.dumps(manifest))
    assert "outside" not in said("data", "inspect", "data/small")


def test_a_checkpoint_or_an_index_that_names_files_outside_of_its_folder_is_refused(place):
    folder = (place / "checkpoints/small/last").resolve()
    (place / "secret.txt").write_text("the secret")
    document = load_checksummed((folder / "trainer.json").read_bytes())
    for name in ("../../../secret.txt", str(place / "secret.txt")):
        wrong = {**document, "digests": {**document["digests"], name: digest(place / "secret.txt")}}
        (folder / "trainer.json").write_bytes(dump_checksummed(wrong))
        assert "outside the folder" in said("generate", "--ckpt_path", str(folder), "--prompt", "The")
    model = place / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, model / name)
    shutil.copy(folder / "model.safetensors", place / "outside.safetensors")
    for name in ("../outside.safetensors", str(place / "outside.safetensors"), "a/../../outside.safetensors"):
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        assert "not a safetensors file of this folder" in said("import", "--input", "model", "--output", "made")


def test_tasks_read_no_file_outside_of_their_folder(place):
    (place / "tasks").mkdir()
    (place / "secret.jsonl").write_text(json.dumps({"query": "the secret", "choices": ["a", "b"], "gold": 0}) + "\n")
    (place / "tasks/link.jsonl").symlink_to(place / "secret.jsonl")
    for uri in ("../secret.jsonl", str(place / "secret.jsonl"), "link.jsonl", "eval_data/../../secret.jsonl"):
        task = {"label": "a", "dataset_uri": uri, "icl_task_type": "multiple_choice", "num_fewshot": [0]}
        (place / "tasks/tasks.yaml").write_text(yaml.safe_dump({"icl_tasks": [task]}))
        text = said("evaluate", "--run", "small", "--tasks", "tasks/tasks.yaml")
        assert "leads out of" in text and "the secret" not in text


def test_a_run_stays_within_the_folder_of_runs(place):
    config = ("--config", str(write_config(place, **{"trainer.callbacks": None})))
    for name in ("../out", "a/b", "/tmp/out", "..", ".", "-x", "a\nb"):
        said("fit", *config, "--run", name)
    assert {path.name for path in place.iterdir()} == {"checkpoints", "data", "texts", "expected.jsonl", "small.yaml"}
    assert [path.name for path in (place / "checkpoints").iterdir()] == ["small"]


# ---- a real fit ------------------------------------------------------------------------------------------------------
def test_a_resume_meets_only_what_it_can_refuse(place):
    """A process of its own: `auto` with nothing but poison under the name of a checkpoint ends with 2, and a line."""
    folder = (place / "checkpoints/small/last").resolve()
    for name in CHECKPOINT:
        (folder / name).write_bytes(pickle.dumps(Malice()))
    done = lm(place, "fit", "--config", "small.yaml", "--ckpt_path", "auto", "--trainer.max_steps=14", expect=None)
    assert done.returncode == 2 and "damaged" in done.stderr and "Traceback" not in done.stderr

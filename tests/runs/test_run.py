"""Run folders are claimed and never overwritten, found by name or age, and read back whatever a kill left."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from lm.errors import RequestError
from lm.inspection.data import samples_at
from lm.runs.checkpoint import write_folder
from lm.runs.config_diff import differences
from lm.runs.resume import check_config_changes, checkpoint_folder, find_checkpoint
from lm.runs.run import Run
from lm.system.files import point


def make(root, name, entered=0.0):
    run = Run.create(name, root)
    run.describe(id=run.name, name=name, entered=entered)
    return run


def save(run, step, links=()):
    path = run.path / f"step-{step:08d}"
    write_folder(path, {"state_dict": {}, "global_step": step, "cursor": {"consumed": step * 4}})
    for link in links:
        point(run.path / link, path.name)
    return path


@pytest.mark.parametrize("error, allowed", [("EPERM", True), ("ENOSYS", True), ("ENOTSUP", True), ("ENOSPC", False)])
def test_a_file_system_without_symbolic_links_needs_none(tmp_path, monkeypatch, error, allowed):
    """exFAT and many mounts over FUSE and SMB have none: `best` and `last` are found by their names all the same."""

    def no_links(*arguments, **options):
        raise OSError(getattr(errno, error), error)

    monkeypatch.setattr(os, "symlink", no_links)
    run = make(tmp_path, "a")
    with nullcontext() if allowed else pytest.raises(OSError, match=error):
        save(run, 1)
        path = save(run, 2, ["last"])
        assert run.link("last") == path == checkpoint_folder(str(run.path / "last"))


def test_an_existing_run_is_never_overwritten(tmp_path):
    assert [Run.create("a", tmp_path).name for _ in range(3)] == ["a", "a-2", "a-3"]


@pytest.mark.parametrize("name", ["", "..", "../a", "a/b", ".hidden", "a b"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(RequestError, match="run name"):
        Run.create(name, tmp_path)


def test_newest_is_the_one_entered_last_and_names_do_not_mix(tmp_path):
    make(tmp_path, "depth", 1.0), make(tmp_path, "depth", 3.0), make(tmp_path, "depth-12", 5.0)
    assert [run.name for run in Run.all(tmp_path)] == ["depth", "depth-2", "depth-12"]
    assert [run.name for run in Run.all(tmp_path, "depth")] == ["depth", "depth-2"]
    assert Run.all(tmp_path, "nothing") == []


@pytest.mark.parametrize("command, script", [
    (["models/my_gru.py", "fit"], "models/my_gru.py"), (["my_gru.py", "branch", "a"], "my_gru.py"),
    (["__main__.py", "fit"], None), (["lm", "fit"], None), (["train.py"], None), (["train.py", "a"], None), ([], None),
])  # fmt: skip
def test_the_script_that_trained_a_run_is_part_of_its_commands(tmp_path, command, script):
    """A program that trains by `lm.fit` takes no commands."""
    run = make(tmp_path, "a")
    run.describe(command=command)
    for line in (run.validate_command(), run.resume_command()):
        assert (f" {script} " in line) == (script is not None)


def test_a_dangling_link_is_no_checkpoint(tmp_path):
    run = make(tmp_path, "a")
    save(run, 1)
    point(run.path / "best", "step-00000009")
    assert run.link("best") is None
    with pytest.raises(RequestError, match="no checkpoint 'best'; it has: step-00000001"):
        run.checkpoint("best")


def test_state_is_replaced_in_one_piece(tmp_path):
    run = make(tmp_path, "a")
    run.write_state({"step": 1})
    run.write_state({"step": 2})
    assert run.read("state.json") == {"step": 2} and not [p for p in os.listdir(run.path) if p.startswith(".")]
    (run.path / "state.json").write_text("{")
    assert run.read("state.json") == {}


def find(reference, root, name="a", named=False, command="fit"):
    return find_checkpoint(reference, name, str(root), named=named, command=command)


def test_without_a_reference_a_fit_starts_fresh_and_a_validation_takes_the_best(tmp_path):
    run = make(tmp_path, "a")
    best, last = save(run, 1, ["best"]), save(run, 2, ["last"])
    assert find(None, tmp_path) == (None, None)
    assert find(None, tmp_path, command="validate")[0] == best
    assert find("last", tmp_path)[0] == last


def test_auto_starts_fresh_where_there_is_nothing_and_passes_over_damage(tmp_path):
    assert find("auto", tmp_path) == (None, None)
    run = make(tmp_path, "a")
    assert find("auto", tmp_path)[0] is None
    complete, damaged = save(run, 1), save(run, 2)
    (damaged / "model.safetensors").write_bytes(b"x")
    assert find("auto", tmp_path)[0] == complete
    (run.path / ".tmp-step-00000003-1").mkdir()  # what a kill in a write leaves
    (run.path / "step-00000004").mkdir()
    assert find("auto", tmp_path)[0] == complete


def test_the_samples_of_a_step_are_known_after_the_global_batch_changed(tmp_path):
    run = make(tmp_path, "a")
    stretches = [{"step": 0, "sample": 0, "global_batch": 8}, {"step": 5, "sample": 40, "global_batch": 4}]
    run.describe(step=9, stretches=stretches)
    assert [samples_at(run, step) for step in (1, 5, 6, 9)] == [(0, 8), (32, 8), (40, 4), (52, 4)]
    with pytest.raises(RequestError, match="has taken steps 1 to 9"):
        samples_at(run, 10)


def test_of_several_runs_of_a_config_the_newest_is_taken_and_named(tmp_path, caplog):
    first, second = make(tmp_path, "a", 1.0), make(tmp_path, "a", 2.0)
    paths = [save(run, 1) for run in (first, second)]
    with caplog.at_level("INFO"):
        assert find("auto", tmp_path)[0] == paths[1]
    assert "the newest of the runs a, a-2 is a-2; --run takes another" in caplog.text
    assert find("auto", tmp_path, named=True)[0] == paths[0]


@pytest.mark.parametrize("reference, name, message", [
    ("nowhere", "tiny", "--ckpt_path nowhere: there is no such folder; give a folder, or best, last or auto$"),
    ("checkpoints/tiny/step-00000009", "tiny", "run checkpoints/tiny has no checkpoint 'step-00000009'; it has: step-00000001"),
    ("1", "tiny", "--ckpt_path 1: there is no such folder; did you mean step-00000001?"),
    ("lats", "tiny", "--ckpt_path lats: there is no such folder; did you mean last?"),
    ("org/small-1b", "tiny", "Hub: `hf download org/small-1b --local-dir small-1b`"),
    ("model", "tiny", "`lm import --input model --output FOLDER` makes a checkpoint of it"),
    ("checkpoints/tiny", "tiny", "it is a run: give one of its checkpoints, such as checkpoints/tiny/last"),
    ("best", "tiny", "has no checkpoint 'best'; it has: step-00000001"),
    ("last", "tyni", "no run 'tyni' under checkpoints or in the registry; did you mean tiny?"),
    ("step-00000009", "tiny", "has no checkpoint 'step-00000009'; it has: step-00000001"),
])  # fmt: skip
def test_a_checkpoint_that_is_not_there_is_explained(reference, name, message, here):
    save(make(Path("checkpoints"), "tiny"), 1)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    with pytest.raises(RequestError, match=message):
        find(reference, Path("checkpoints"), name)


def test_a_folder_belongs_to_its_run_unless_another_name_is_given(tmp_path, monkeypatch):
    run = make(tmp_path, "a")
    path = save(run, 1, ["last"])
    assert find(str(path), tmp_path)[1].path.resolve() == run.path.resolve()
    assert find(str(run.path / "last"), tmp_path)[0] == path.resolve()
    assert find(str(path), tmp_path, name="fork", named=True)[1] is None
    monkeypatch.chdir(run.path)
    assert find(f"./{path.name}", tmp_path)[1].name == "a"
    with pytest.raises(RequestError, match="no trainer.json"):
        find(str(tmp_path), tmp_path)


def test_a_changed_config_is_refused_only_where_it_makes_the_run_a_lie(tmp_path):
    """`tests/faults/test_changed_config.py` has every key, in real trainings."""
    run = make(tmp_path, "a")
    run.config.write_text("{seed_everything: 1, model: {optimizer: {lr: 0.1}}, data: {path: x}}")
    config = {"seed_everything": 1, "model": {"optimizer": {"lr": 0.2}}, "data": {"path": "x", "micro_batch_size": 4}}
    assert list(check_config_changes(run, config, force=False)) == ["data.micro_batch_size", "model.optimizer.lr"]
    for changed in ({"seed_everything": 2}, {"data": {"path": "y"}}):
        with pytest.raises(RequestError, match=f"with other options: {next(iter(changed))}.* was .*--force"):
            check_config_changes(run, config | changed, force=False)
        check_config_changes(run, config | changed, force=True)
    other = make(tmp_path, "a")  # a-2, which has what the config asks for
    other.config.write_text("{seed_everything: 2, model: {optimizer: {lr: 0.2}}, data: {path: x}}")
    with pytest.raises(RequestError, match="give --run a-2, which has these options, or "):
        check_config_changes(run, config | {"seed_everything": 2}, force=False)


def test_an_option_that_one_version_lacks_is_no_difference_where_it_is_off():
    """A value that both configs set is one, also where it is 0 in one and nothing in the other."""
    assert differences([{"data": {"packed": False}}, {"data": {"pad_id": None}, "run": "b"}, {"run": "a"}]) == {}
    assert differences([{"data": {"pad_id": 0}}, {"data": {"pad_id": None}}]) == {"data.pad_id": [0, None]}
    assert differences([{"data": {"pad_id": 5}}, {}]) == {"data.pad_id": [5, None]}


def test_a_config_of_a_run_that_is_damaged_is_named_and_not_compared(tmp_path):
    run = make(tmp_path, "a")
    text = "model: {decoder: {hidden_size: 8}}\ndata: {path: x}\n"
    config = {"model": {"decoder": {"hidden_size": 8}}, "data": {"path": "x"}}
    for damaged in (text[:20], "", "\0" * 50, None):
        run.config.write_text(text)
        assert list(check_config_changes(run, config, force=False)) == []
        run.config.unlink() if damaged is None else run.config.write_text(damaged)
        state = "gone" if damaged is None else "damaged"
        with pytest.raises(RequestError, match=f"config.yaml is {state}, .* put it back, or give --force"):
            check_config_changes(run, config, force=False)
        check_config_changes(run, config, force=True)


def test_a_model_beside_the_checkpoints_of_a_run_is_not_of_the_run(tmp_path):
    """Such as an import, or the mean of checkpoints that an earlier version made: it has no step."""
    run = Run.create("a", tmp_path)
    run.describe(name="a")
    for name in ("step-00000004", "average-2-4-of-2"):
        (run.path / name).mkdir()
        (run.path / name / "trainer.json").write_text("{}")
    assert Run.of(run.path / "step-00000004").path == run.path and Run.of(run.path / "average-2-4-of-2") is None

"""A checkpoint is complete or absent, is what was written, and holds no code."""

import json
import os
import shutil
import signal
import sys
import threading
from itertools import count
from pathlib import Path

import pytest
import torch

from lm.errors import RequestError, RunError
from lm.runs.checkpoint import link_to, read_folder, read_progress, write_folder
from lm.runs.json_tree import decode, encode
from lm.runs.resume import find_checkpoint, repair_links
from lm.runs.run import Run
from lm.runs.trainer_json import find_damage
from lm.system.files import (
    digest,
    dump_checksummed,
    load_checksummed,
    point,
    remove_folder,
    stated_digest,
    write_atomically,
)
from lm.system.process import lm_version
from lm.training.callbacks.checkpoints import Checkpoints, remove_unneeded
from lm.training.checkpoint_io import FolderCheckpointIO


def content(step=3):
    return {
        "state_dict": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.randn(4).bfloat16()},
        "optimizer": {"w/exp_avg": torch.randn(2, 3), "w/step": torch.tensor(3.0)},
        "files": {"config.json": "{}\n"},
        "global_step": step,
        "cursor": {"consumed": 4 * step},
        "ranks": [{"rng": torch.get_rng_state()}],
        "loops": {"a": (1, 2), "b": {0: "zero", 1: float("inf")}, "c": None},
    }


def test_what_is_read_is_what_was_written(tmp_path):
    written = content()
    write_folder(tmp_path / "step-00000003", written)
    read = read_folder(tmp_path / "step-00000003")
    for key in ("state_dict", "optimizer"):
        assert all(torch.equal(read[key][name], tensor) for name, tensor in written[key].items())
    assert torch.equal(read["ranks"][0]["rng"], written["ranks"][0]["rng"])
    assert read["loops"] == written["loops"] and read["files"] == written["files"]
    assert read_progress(tmp_path / "step-00000003").step == 3
    assert "optimizer" not in read_folder(tmp_path / "step-00000003", optimizer=False)


FILES = ["model.safetensors", "optimizer.safetensors", "config.json", "trainer.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(path.read_bytes()[:-1]), lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(path.read_bytes() + b"\n"), Path.unlink, lambda path: (path.unlink(), path.mkdir()),
], ids=["cut", "empty", "longer", "removed", "a folder"])  # fmt: skip
def test_damage_to_any_file_is_found_and_named(tmp_path, name, damage):
    folder = tmp_path / "c"
    write_folder(folder, content())
    damage(folder / name)
    assert name in find_damage(folder)
    with pytest.raises(RequestError, match=name):
        read_folder(folder)


@pytest.mark.parametrize("name", FILES)
def test_every_byte_of_every_file_counts(tmp_path, name):
    folder = tmp_path / "c"
    write_folder(folder, content() | {"ranks": [{"rng": torch.arange(9)}]})
    data = (folder / name).read_bytes()
    for place in range(len(data)):
        (folder / name).write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        assert name in (find_damage(folder) or ""), place
    (folder / name).write_bytes(data)
    assert find_damage(folder) is None


def test_a_checkpoint_of_another_version_is_no_damaged_one(tmp_path):
    write_folder(tmp_path / "c", content())
    file = tmp_path / "c" / "trainer.json"
    reader = f"this is lm {lm_version()}, which reads format 5"
    file.write_bytes(dump_checksummed({"format": 6, "written_by": "0.3.0+0123abc", "digests": {}}))
    reads = "lm 0.3.0+0123abc wrote and reads it (`pip install lm-pretrain==0.3.0`)"
    assert find_damage(tmp_path / "c") == f"format 6: {reads}; {reader}"
    with pytest.raises(RequestError, match="format 5"):
        read_progress(tmp_path / "c")


def rewrite(folder, **changes):
    """As somebody would who knows how the digest is made."""
    file = folder / "trainer.json"
    file.write_bytes(dump_checksummed(load_checksummed(file.read_bytes()) | changes))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd"])
def test_a_document_that_leads_astray_is_refused(tmp_path, name):
    write_folder(tmp_path / "c", content())
    rewrite(tmp_path / "c", digests={name: "0", "model.safetensors": digest(tmp_path / "c" / "model.safetensors")})
    assert "outside the folder" in find_damage(tmp_path / "c")


def test_a_document_tells_where_the_training_stood(tmp_path):
    write_folder(tmp_path / "c", content() | {"callbacks": {"Checkpoints": {"best_name": "step-1"}, "of a user": 3}})
    assert read_progress(tmp_path / "c")[:4] == (3, 12, "step-1", False) and read_progress(None)[:2] == (0, 0)


def test_nothing_but_plain_values_goes_in():
    with pytest.raises(TypeError, match="cannot hold"):
        encode({"a": object()})
    for value in [1, 2.5, "x", None, True, [1, (2, 3)], {"a": {1: 2}}, float("-inf"), {"__tensor__": 1}]:
        assert decode(json.loads(json.dumps(encode(value)))) == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5)])
def test_small_tensors_survive(dtype, shape):
    tensor = (torch.rand(shape) * 9).to(dtype)
    again = decode(json.loads(json.dumps(encode(tensor))))
    assert again.dtype == dtype and again.shape == tensor.shape and torch.equal(again, tensor)


def test_a_failed_write_leaves_nothing_and_says_so(tmp_path):
    write_folder(tmp_path / "a", content())
    with pytest.raises(RunError, match="could not write the checkpoint"):
        write_folder(tmp_path / "missing" / "c", content())
    state = {"Own": {"seen": [1, {2: object()}]}}
    with pytest.raises(RunError, match=r"hold callbacks\['Own'\]\['seen'\]\[2\] of the type object: let its `state_d"):
        write_folder(tmp_path / "b", content() | {"callbacks": state})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_gathered_tensors_are_copied_once_and_may_stand_anywhere_in_a_checkpoint(tmp_path):
    """A custom optimizer keeps tensors also where they are plain values."""
    io = FolderCheckpointIO()
    with io.copying() as copy_to_host:
        weight, mean = copy_to_host(("weights", 0), torch.ones(3)), copy_to_host(("optimizer", 0), torch.ones(2))
    pinned = content() | {"state_dict": {"w": weight}, "optimizer_values": {"entries": {"mean": mean}}}
    io.save_checkpoint(pinned, tmp_path / "c")
    mean.zero_()  # the next step changes it, before the folder is written
    io.drain()
    saved = read_folder(tmp_path / "c")
    assert torch.equal(saved["state_dict"]["w"], torch.ones(3)) and type(saved["state_dict"]["w"]) is torch.Tensor
    assert torch.equal(saved["optimizer_values"]["entries"]["mean"], torch.ones(2))


def test_writing_behind_keeps_what_was_there_at_the_time_of_saving(tmp_path, monkeypatch):
    io, changed = FolderCheckpointIO(), threading.Event()
    monkeypatch.setattr("lm.training.checkpoint_io.write_folder",
                        lambda *arguments: changed.wait(30) and write_folder(*arguments))  # fmt: skip
    moving = content() | {"callbacks": {"spike": {"losses": [1.0]}}}
    io.save_checkpoint(moving, tmp_path / "c", storage_options=lambda: point(tmp_path / "last", "c"))
    moving["state_dict"]["w"].zero_()
    moving["callbacks"]["spike"]["losses"].append(2.0)
    changed.set()
    io.drain()
    saved = read_folder(tmp_path / "c")
    assert saved["state_dict"]["w"].sum() == 15 and saved["callbacks"] == {"spike": {"losses": [1.0]}}
    assert os.readlink(tmp_path / "last") == "c"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for names of open files in /proc")
def test_a_power_cut_finds_a_name_only_where_all_of_its_content_is_on_the_disk(tmp_path, monkeypatch):
    done = []
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, lambda *paths, move=getattr(os, name): done.append("named") or move(*paths))
    monkeypatch.setattr(os, "fsync", lambda at: done.append(Path(f"/proc/self/fd/{at}").readlink().name))
    write_folder(tmp_path / "c", content())
    assert sorted(done[:4]) == sorted(FILES) and done[4:] == [f".tmp-c-{os.getpid()}", "named", tmp_path.name]
    done.clear()
    write_atomically(tmp_path / "run.json", "{}")
    assert done == [f".run.json.{os.getpid()}", "named"]


def test_the_files_of_a_checkpoint_are_hashed_once(tmp_path, monkeypatch):
    write_folder(tmp_path / "c", content())
    hashed = []
    monkeypatch.setattr("lm.runs.trainer_json.digest", lambda path: hashed.append(path.name) or digest(path))
    io = FolderCheckpointIO()
    io.load_checkpoint(tmp_path / "c")
    assert sorted(hashed) == ["config.json", "model.safetensors", "optimizer.safetensors"]
    io.verified = tmp_path / "c"  # `find_checkpoint` has compared them
    io.load_checkpoint(str(tmp_path / "c"))
    assert len(hashed) == 3


def test_where_the_disk_is_slow_the_next_save_waits(tmp_path):
    """Or the snapshots that wait for it would fill the memory."""
    io, slow = FolderCheckpointIO(), threading.Event()
    threading.Timer(0.5, slow.set).start()
    io.save_checkpoint(content(1), tmp_path / "a", storage_options=slow.wait)
    io.save_checkpoint(content(2), tmp_path / "b")
    assert slow.is_set()
    io.drain()


@pytest.mark.parametrize("place, error, message", [
    ("missing/c", RunError, "could not write"), ("c", FileNotFoundError, "No such file"),
])  # fmt: skip
def test_a_failure_behind_is_that_of_the_next_save(tmp_path, place, error, message):
    io = FolderCheckpointIO()
    io.save_checkpoint(content(), tmp_path / place, storage_options=lambda: point(tmp_path / "gone" / "last", "c"))
    with pytest.raises(error, match=message):
        io.save_checkpoint(content(), tmp_path / "d")


# ---- a kill at any moment of a save ----------------------------------------------------------------------------------
STEPS = {1: "step-00000001", 2: "step-00000002"}
OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.chmod", "os.scandir"}


def killed_at(operation, work):
    """Do something in a process that is killed before its n-th operation on files; False once it has fewer."""
    child = os.fork()
    if child == 0:
        done = count(1)

        def hook(event, arguments):
            if event in OPERATIONS and next(done) == operation:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def state(step, best):
    return content(step) | {"callbacks": {"Checkpoints": {"best_name": best}}}


@pytest.fixture
def run(tmp_path):
    """A run with a checkpoint of step 1, which is its last and its best."""
    run = Run.create("run", tmp_path)
    run.describe(name="run", status="interrupted")
    write_folder(run.path / STEPS[1], state(1, STEPS[1]))
    for link in ("last", "best"):
        point(run.path / link, STEPS[1])
    return run


@pytest.mark.parametrize("saved", ["the next step", "the same step again"])
def test_a_save_that_is_killed_anywhere_leaves_the_one_before_or_the_new_one(run, tmp_path, saved):
    """Killed before each of its operations on files, one after the other, also while what is old is removed."""
    step = 2 if saved == "the next step" else 1
    for operation in count(1):
        shutil.rmtree(tmp_path / "at", ignore_errors=True)
        shutil.copytree(run.path.parent / "run", tmp_path / "at" / "run", symlinks=True)
        copy = Run(tmp_path / "at" / "run")

        def save(copy=copy):
            write_folder(copy.path / STEPS[step], state(step, STEPS[step]))
            link_to(copy.path / STEPS[step], STEPS[step])
            remove_unneeded(copy, step, keep=1, rollback_step=0, protected={STEPS[step]}, stale=set())

        killed = killed_at(operation, save)
        arrived = (copy.path / STEPS[step]).exists()
        path, _ = find_checkpoint("auto", "run", str(tmp_path / "at"), named=False, command="fit")
        assert path.name == STEPS[step if arrived else 1] and read_progress(path).step in (1, step)
        assert find_damage(copy.checkpoint("last")) is None and find_damage(copy.checkpoint("best")) is None
        assert all(find_damage(each) is None for each in copy.steps().values())
        repair_links(copy, path)
        assert copy.link("last").name == copy.link("best").name == path.name
        copy.remove_half_written()
        assert not list(copy.path.glob(".*"))
        if not killed:
            break
    assert operation > 20 and list(copy.steps()) == [step]


def test_a_replacement_that_fails_gives_the_name_back(run, monkeypatch):
    rename = os.rename

    def fails(source, target):
        if os.path.basename(source).startswith(".tmp-"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(RunError, match="Input/output error; the ones before it are untouched"):
        write_folder(run.path / STEPS[1], state(1, STEPS[1]))
    assert find_damage(run.checkpoint("last")) is None and not list(run.path.glob(".*"))


def test_the_best_of_a_run_outlives_a_resume():
    before, after = Checkpoints(interval=1), Checkpoints(interval=1)
    before.best_loss, before.best_name = 2.5, "step-00000003"
    after.load_state_dict(before.state_dict())
    assert (after.best_loss, after.best_name) == (2.5, "step-00000003")


def test_a_checkpoint_that_somebody_has_removed_by_hand_does_not_matter(run):
    remove_folder(run.path / STEPS[2])
    assert list(run.steps()) == [1]


# ---- which one `auto` takes ------------------------------------------------------------------------------------------
def auto(run):
    return find_checkpoint("auto", "run", str(run.path.parent), named=False, command="fit")[0]


def test_steps_left_behind_come_last(run):
    """Also where they are newer than `last`; a step that was saved before `last` could move is no such step."""
    write_folder(run.path / STEPS[2], state(2, STEPS[2]))
    assert auto(run).name == STEPS[2]
    run.describe(left_behind=[stated_digest(run.path / STEPS[2] / "trainer.json")])
    assert auto(run).name == STEPS[1]
    (run.path / STEPS[1] / "config.json").write_text("")
    assert auto(run).name == STEPS[2]


@pytest.mark.parametrize("damage", [
    lambda step: (step / "config.json").write_text(""), lambda step: (step / "trainer.json").unlink(), shutil.rmtree,
], ids=["a file is empty", "trainer.json is gone", "the folder is gone"])  # fmt: skip
def test_where_every_checkpoint_is_damaged_nothing_starts_anew(run, damage):
    damage(run.path / STEPS[1])
    with pytest.raises(RequestError, match=f"no complete checkpoint.*{STEPS[1]}.*start a new run"):
        auto(run)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text('{"name": "ru')], ids=["gone", "cut"])
def test_a_run_that_lost_its_name_is_not_trained_again_from_the_start(run, damage):
    damage(run.path / "run.json")
    with pytest.raises(RequestError, match="its run.json is damaged or gone.*--ckpt_path .*step-00000001"):
        auto(run)


def test_without_a_checkpoint_the_run_starts_again_and_says_so(tmp_path, caplog):
    run = Run.create("run", tmp_path)
    run.describe(name="run")
    with caplog.at_level("INFO"):
        assert auto(run) is None
    assert "stopped before its first checkpoint" in caplog.text
    with pytest.raises(RequestError, match="has no checkpoint yet"):
        find_checkpoint("auto", "run", str(tmp_path), named=False, command="validate")


# ---- memory of copies ------------------------------------------------------------------------------------------------
def test_copies_reuse_the_memory_of_the_checkpoint_before(monkeypatch):
    """Where the system locks no more memory, a copy goes into memory that is not locked."""
    io, tensor, empty, refused = FolderCheckpointIO(), torch.randn(3, 2), torch.empty, []

    def unlocked(*shape, pin_memory=None, **options):
        if pin_memory is not None:
            refused.append(shape)
            raise RuntimeError("CUDA error: out of memory")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", unlocked)
    for _ in range(2):
        tensor += 1
        with io.copying() as copy_to_host:
            assert torch.equal(copy_to_host(("state_dict", "w"), tensor), tensor)
    assert len(refused) == 1

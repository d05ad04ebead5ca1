"""Which copy of a run is taken, that of this machine or that of the mirror, and what is refused."""

import json
import shutil
import socket
import threading
import time

import pytest

from lm.cli.main import main
from lm.errors import RequestError, RunError
from lm.runs import mirror as mirrors
from lm.runs.mirror import Mirror, Uploads
from lm.runs.run import Run
from lm.system.files import dump_checksummed, load_checksummed


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def mirror(place):
    return Mirror(f"file://{place}/store")


def make(root, turn=1, started="monday", steps=(3,), name="small", folder="small", status="interrupted", **facts):
    """A run as a training leaves it."""
    run = Run(root / folder)
    run.path.mkdir(parents=True)
    entered = facts.pop("entered", 1000.0 + turn)
    run.describe(name=name, id=folder, started=started, turn=turn, entered=entered, status=status, **facts)
    run.append("metrics.jsonl", {"step": turn, "train/loss": 1.0})
    for step in steps:
        save(run, step, turn)
    return run


def save(run, step, turn=1):
    folder = run.path / f"step-{step:08d}"
    folder.mkdir()
    (folder / "model.safetensors").write_text(f"weights of {step} in session {turn}")
    (folder / "trainer.json").write_bytes(dump_checksummed({"step": step, "turn": turn}))
    for link in ("last", "best"):
        (run.path / link).unlink(missing_ok=True)
        (run.path / link).symlink_to(folder.name)


def upload(mirror, run):
    uploads = Uploads(mirror, run)
    uploads.wait(0)
    uploads.stop()
    return uploads


def session(run, step=3):
    return load_checksummed((run.path / f"step-{step:08d}" / "trainer.json").read_bytes())["turn"]


def test_a_run_comes_back_as_it_was(mirror, place):
    run = make(place / "a", steps=(3, 6))
    (run.path / "postmortem-00000002").mkdir()
    (run.path / "postmortem-00000002" / "page.html").write_text("page")
    (run.path / "run.lock").touch()
    (run.path / ".tmp-step-00000009-1").mkdir()  # that is being written
    (run.path / ".tmp-step-00000009-1" / "model.safetensors").touch()
    upload(mirror, run)
    assert not list((place / "store" / "small").glob(".*"))
    mirror.bring_back("small", place / "b", named=False)
    back = Run(place / "b" / "small")
    assert list(back.steps()) == [3, 6] and back.link("last").name == back.link("best").name == "step-00000006"
    assert back.metrics() == run.metrics() and not (back.path / "run.lock").exists()
    assert (back.path / "postmortem-00000002" / "page.html").read_text() == "page"
    assert back.entered() == run.entered()


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ({"turn": 3}, 3),  # resumed here since
        ({"turn": 2}, 2),  # the same session
        ({"turn": 1}, 12),  # resumed elsewhere since: it is replaced
        ({"turn": 1, "started": "tuesday"}, 1),  # another run
        ({"turn": 1, "folder": "small-2", "entered": 2000.0}, 12),  # a later run of the name
    ],
)
def test_the_newer_copy_is_taken(mirror, place, here, expected):
    upload(mirror, make(place / "a", 2))
    (mirror_step := place / "store/small/step-00000003/trainer.json").write_bytes(dump_checksummed({"turn": 12}))
    local = make(place / "b", **here)
    mirror.bring_back("small", place / "b", named=False)
    if here.get("folder"):
        assert not (place / "b" / "small").exists()
    else:
        assert session(Run(local.path)) == expected and mirror_step.exists()


def test_only_the_run_of_that_name_comes_back(mirror, place):
    upload(mirror, make(place / "a", 1))
    upload(mirror, make(place / "a", 2, folder="small-2"))
    upload(mirror, make(place / "a", 3, folder="small-3", name="small-3"))
    mirror.bring_back("small", place / "b", named=False)
    assert [run.name for run in Run.all(place / "b")] == ["small-2"]
    mirror.bring_back("small", place / "c", named=True)
    assert [run.name for run in Run.all(place / "c")] == ["small"]
    mirror.bring_back("smal", place / "d", named=False)
    assert not (place / "d").exists()
    assert mirror.has("small") and not mirror.has("smal")


def test_a_run_that_another_machine_trains_is_refused(mirror, place, monkeypatch):
    """Its signs of life change while one looks; where they do not, it is dead."""
    run = make(place / "a", status="running", entered=time.time())
    upload(mirror, run)
    beat = place / "store" / "small" / "heartbeat.json"

    def write(count):
        beat.write_text(json.dumps({"time": time.time() + count, "pid": 7, "host": "far", "machine": {}}))

    write(0)
    alive = threading.Timer(1.5, write, [1])
    alive.start()
    with pytest.raises(RequestError, match="small is being trained by process 7 on far: wait for its end, or stop it"):
        mirror.bring_back("small", place / "b", named=False)
    assert not (place / "b" / "small").exists()
    monkeypatch.setattr("lm.runs.run.SILENCE", 2.0)
    mirror.bring_back("small", place / "b", named=False)
    assert Run(place / "b" / "small").status() == "interrupted"
    write(0)
    beat.write_text(json.dumps({"time": time.time(), "pid": 2**22 + 1, "host": socket.gethostname()}))
    began = time.monotonic()
    mirror.bring_back("small", place / "c", named=False)  # of this machine, and gone
    assert time.monotonic() - began < 1


def test_the_mirror_of_another_run_is_not_mixed_with_this_one(mirror, place):
    upload(mirror, make(place / "a"))
    with pytest.raises(RequestError, match="small is the mirror of another run, which was started at monday: give"):
        mirror.refuse_other(make(place / "b", started="tuesday"))
    mirror.refuse_other(Run(place / "a" / "small"))


def test_a_session_that_another_one_has_followed_uploads_no_more(mirror, place, caplog):
    run = make(place / "a")
    uploads = Uploads(mirror, run)
    uploads.wait(0)
    upload(mirror, make(place / "b", 2, host="far", steps=(3, 9)))
    save(run, 6)
    uploads.wait(0)
    assert "the run was resumed on " in caplog.text and not (place / "store/small/step-00000006").exists()
    assert (place / "store/small/step-00000009/trainer.json").exists()


def test_checkpoints_go_when_they_went_here_and_not_before_a_newer_one_is_whole(mirror, place):
    run = make(place / "a", steps=(3, 6))
    uploads = Uploads(mirror, run)
    uploads.wait(0)
    store = place / "store" / "small"
    (run.path / "step-00000003" / "trainer.json").unlink()
    (run.path / "step-00000003" / "model.safetensors").unlink()
    (run.path / "step-00000003").rmdir()
    uploads.wait(0)
    assert not (store / "step-00000003").exists() and uploads.newest == "step-00000006"
    (store / "step-00000009").touch()  # no folder: the upload fails
    save(run, 9)
    (run.path / "step-00000006").rename(run.path / "gone")
    uploads.update()
    while not run.read("run.json")["mirror"]["error"]:
        time.sleep(0.02)
    assert (store / "step-00000006" / "trainer.json").exists() and uploads.newest == "step-00000006"
    (store / "step-00000009").unlink()
    uploads.wait(0)
    assert not (store / "step-00000006").exists() and uploads.newest == "step-00000009"
    for path in store.glob("*"):  # somebody empties the mirror
        path.unlink() if path.is_file() else [[each.unlink() for each in path.iterdir()], path.rmdir()]
    uploads.wait(0)
    uploads.stop()
    assert (store / "step-00000009" / "trainer.json").exists() and (store / "run.json").exists()


def test_none_goes_while_the_newest_of_a_training_that_goes_on_is_not_whole(mirror, place, monkeypatch):
    """While step 3 is uploaded, step 6 is saved and takes its place here."""
    run, store, there = make(place / "a"), place / "store" / "small", []
    write, delete = Mirror.write, Mirror.delete_checkpoint

    def train_on(self, name, *arguments, **options):
        write(self, name, *arguments, **options)
        if name.endswith("step-00000003/model.safetensors"):
            save(run, 6)
            shutil.rmtree(run.path / "step-00000003")

    def note(self, name):
        there.append((store / "step-00000006" / "trainer.json").exists())
        delete(self, name)

    monkeypatch.setattr(Mirror, "write", train_on)
    monkeypatch.setattr(Mirror, "delete_checkpoint", note)
    uploads = Uploads(mirror, run)
    for _ in range(2):
        uploads.wait(0)
    uploads.stop()
    assert there == [True] and not (store / "step-00000003").exists()


def test_a_checkpoint_that_is_being_replaced_is_no_whole_one(mirror, place):
    """A download meanwhile would have the old marker and some of the new files."""
    run = make(place / "a")
    upload(mirror, run)
    store = place / "store/small/step-00000003"
    assert (store / "trainer.json").exists()
    shutil.rmtree(run.path / "step-00000003")
    save(run, 3, turn=2)
    (store / "model.safetensors").unlink()
    (store / "model.safetensors").mkdir()  # the upload fails here
    uploads = Uploads(mirror, run)
    uploads.update()
    while not run.read("run.json")["mirror"]["error"]:
        time.sleep(0.02)
    uploads.stop()
    assert not (store / "trainer.json").exists()


def test_a_run_folder_that_is_gone_empties_no_mirror(mirror, place):
    run = make(place / "a")
    uploads = Uploads(mirror, run)
    uploads.wait(0)
    run.path.rename(place / "elsewhere")
    uploads.wait(0)
    uploads.stop()
    assert (place / "store/small/step-00000003/trainer.json").exists()


def test_names_that_lead_out_of_the_folder_are_passed_over(mirror, place):
    upload(mirror, make(place / "a"))
    (place / "store/small/last").write_text("../../../etc")
    mirror.bring_back("small", place / "b", named=False)
    assert not (place / "b" / "small" / "last").is_symlink() and Run(place / "b" / "small").link("best")


@pytest.mark.parametrize("url", ["/disk", "s3:/b", "s3://", "https://b/x", "hf://b", "file://x", "", "memory://x"])
def test_what_is_no_mirror_is_refused(url):
    with pytest.raises(RequestError, match="give s3://bucket/folder, gs://bucket/folder or file:///folder"):
        Mirror(url)


def test_a_mirror_that_cannot_be_written_to_is_refused(place, monkeypatch):
    nowhere = {"ENDPOINT_URL": "http://127.0.0.1:9", "EC2_METADATA_DISABLED": "true", "REGION": "us-east-1",
               "CONFIG_FILE": "none", "SHARED_CREDENTIALS_FILE": "none"}  # fmt: skip
    for name, value in nowhere.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(mirrors, "START_PATIENCE", 3.0)
    with pytest.raises(RequestError, match="^trainer.mirror s3://b/x cannot be written to .* credentials right"):
        Mirror("s3://secret:key@b/x").check("checkpoints")
    (place / "file").touch()
    with pytest.raises(RequestError, match="cannot be written to .* Not a directory"):
        Mirror(f"file://{place}/file/x").check("checkpoints")
    for inside in ("checkpoints", "checkpoints/x"):
        with pytest.raises(RequestError, match="is in the folder of the runs"):
            Mirror(f"file://{place}/{inside}").check("checkpoints")
    with pytest.raises(RunError, match="run small cannot be brought back from s3://b/x: "):
        Mirror("s3://b/x").bring_back("small", "checkpoints", named=False)


ROOT = "--trainer.default_root_dir"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["fit", ROOT, "s3://b/x"], "leave it out, and give --trainer.mirror s3://b/x for a copy there"),
        (["fit", ROOT, "s3://b/x", "--ckpt_path", "auto"], "s3://b/x is a URL"),
        (["validate", ROOT, "s3://b/x"], "s3://b/x is a URL"),
        (["fit", ROOT, "hf://b/x"], "give one of a local disk"),
        (["fit", ROOT, "file:///b/x"], "give the path alone: /b/x"),
        (["plan", ROOT, "gs://b/x"], "--trainer.mirror gs://b/x"),
        (["plan", "--trainer.mirror", "http://b/x"], "give s3://bucket/folder"),
        (["fit", "--data.cache_dir", "s3://b/x"], "data.cache_dir s3://b/x is a URL"),
        (["fit", "--data.path", "s3://b/x"], "data.path s3://b/x is a URL"),
        (["bench", "step", "--output", "s3://b/x"], "--output s3://b/x is a URL"),
        (["profile", "--trace", "s3://b/x"], "--trace s3://b/x is a URL"),
        (["data", "prepare", "--input", "x", "--output", "s3://b/x"], "--output s3://b/x is a URL"),
        (["export", "--output", "hf://b/x"], "--output hf://b/x is a URL"),
        (["import", "--input", ".", "--output", "gs://b/x"], "--output gs://b/x is a URL"),
        (["runs", "export", "small", "--output", "s3://b/x"], "--output s3://b/x is a URL"),
        (["runs", "compare", "small", "small-2", "--png", "s3://b/x"], "--png s3://b/x is a URL"),
    ],
)
def test_a_url_where_something_is_written_to_a_disk_is_refused(place, command, said, capsys):
    for number, folder in enumerate(("small", "small-2")):
        make(place / "checkpoints", number, folder=folder)
    training = command[0] in ("fit", "validate", "plan", "bench", "profile")
    config, words = ["--config", "tiny.yaml"] if training else [], 1 + (command[0] == "bench")
    assert main([*command[:words], *config, *command[words:]]) == 2
    out, err = capsys.readouterr()
    assert said in out + err.splitlines()[-1] and not any(
        entry.name.startswith(("s3", "gs", "hf")) for entry in place.iterdir()
    )

"""A run that is mirrored to an object store resumes from there, bit for bit, when its machine and folder are gone."""

import shutil
import signal
import time

import pytest
from object_store import object_store
from trainings import expected, lm, losses, start, trace, write_config

from lm.runs.run import Run

RECORDER = {"class_path": "recorder.Recorder"}
STEP = ("config.json", "generation_config.json", "model.safetensors", "optimizer.safetensors", "tokenizer.json",
        "tokenizer_config.json", "trainer.json")  # fmt: skip


@pytest.fixture(scope="module")
def served():
    with object_store() as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        yield store


@pytest.fixture
def store(served):
    yield served
    served.proxy.recover()


@pytest.fixture
def machine(workplace, store):
    """Starts trainings that are mirrored, and takes their machine away."""
    return Machine(workplace, store)


class Machine:
    def __init__(self, place, store):
        self.place, self.store, self.prefix = place, store, f"runs/{place.parent.name}"
        self.mirror = f"s3://corpus/{self.prefix}"
        self.run = Run(place / "checkpoints" / "small")

    def fit(self, *arguments, expect=0, wait_at=None, **changes):
        """A fit to its end, or one that waits before micro-batches until there is a file: name -> micro-batch."""
        waiting = [{"class_path": "waiting.WaitAt", "init_args": {"micro_batch": at, "go": go}}
                   for go, at in (wait_at or {}).items()]  # fmt: skip
        callbacks = {"trainer.callbacks": [RECORDER, *waiting]}
        config = write_config(self.place, **{**callbacks, "trainer.mirror": self.mirror, **changes})
        command = ("fit", "--config", str(config), *arguments)
        if wait_at is None:
            return lm(self.place, *command, expect=expect)
        return start(self.place, *command)

    def checkpoints(self):
        """The whole checkpoints in the mirror."""
        names = self.store.names(f"{self.prefix}/small")
        return sorted(name.partition("/")[0] for name in names if name.endswith("/trainer.json"))

    def wait_for(self, condition, process):
        until = time.monotonic() + 60
        while not condition():
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                pytest.fail(process.communicate()[1])
            time.sleep(0.05)

    def kill(self, process):
        """As when a machine is taken away: its disk, too."""
        process.kill()
        process.communicate()
        shutil.rmtree(self.place / "checkpoints")


def curves(run):
    """The metrics of each step that are not times."""
    names = ("train/loss", "val/loss", "val/bpb", "optim/grad_norm", "tokens")
    return [{name: line[name] for name in ("step", *names) if name in line} for line in run.metrics()]


@pytest.fixture(scope="module")
def straight(uninterrupted):
    return curves(Run(uninterrupted / "checkpoints" / "small"))


@pytest.mark.slow
def test_a_run_resumes_on_another_machine_as_if_nothing_had_happened(machine, straight):
    """Killed twice; of the checkpoints the newest and the best are in the mirror, as in the folder."""
    for wait_at, newest in ((10, "step-00000004"), (22, "step-00000009")):
        (machine.place / "waits").unlink(missing_ok=True)
        process = machine.fit("--ckpt_path", "auto", wait_at={"go": wait_at})
        machine.wait_for(lambda: (machine.place / "waits").exists() and newest in machine.checkpoints(), process)
        kept = sorted(path.name for path in machine.run.steps().values())
        machine.wait_for(lambda: machine.checkpoints() == kept, process)
        machine.kill(process)
    said = machine.fit("--ckpt_path", "auto").stderr
    assert f"bringing back run checkpoints/small from {machine.mirror}/small" in said
    assert [entry["step"] for entry in trace(machine.place)].count(11) == 4  # it came after the newest checkpoint
    assert curves(machine.run) == straight and losses(machine.place) == expected(machine.place)
    facts = machine.run.read("run.json")
    assert facts["status"] == "finished" and facts["mirror"]["newest"] == "step-00000012"
    names = machine.store.names(f"{machine.prefix}/small")
    assert {name for name in names if name.startswith("step-")} == {f"step-00000012/{name}" for name in STEP}
    assert {"run.json", "config.yaml", "metrics.jsonl", "log.txt", "last", "best"} < names and "run.lock" not in names
    assert any(name.startswith("events.out") for name in names)
    shutil.rmtree(machine.place / "checkpoints")
    assert "the run has finished" in machine.fit("--ckpt_path", "last").stderr


@pytest.mark.slow
@pytest.mark.parametrize("held", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
def test_a_kill_in_the_middle_of_an_upload_leaves_the_checkpoint_before(machine, straight, held):
    process = machine.fit(wait_at={"go": 10, "never": 12})
    machine.wait_for(lambda: machine.checkpoints() == ["step-00000004"], process)
    machine.store.proxy.hold(f"(PUT|POST) .*step-00000006/{held}")
    (machine.place / "go").touch()
    machine.wait_for(lambda: machine.store.proxy.met["stall"], process)
    machine.kill(process)
    machine.store.proxy.recover()
    names = machine.store.names(f"{machine.prefix}/small")
    begun = {name for name in names if name.startswith("step-00000006/")}
    assert f"step-00000006/{held}" not in begun and machine.checkpoints() == ["step-00000004"]
    assert len(begun) == len(STEP) - 1 or held != "trainer.json"
    said = machine.fit("--ckpt_path", "auto").stderr
    assert ("step-00000006: it was not uploaded to its end" in said) == bool(begun) and "waiting to see" not in said
    assert curves(machine.run) == straight and losses(machine.place) == expected(machine.place)
    assert machine.checkpoints() == ["step-00000012"]


@pytest.mark.slow
def test_a_store_that_does_not_answer_delays_no_step(machine, straight):
    """All steps are done while the first upload hangs; then the end of the run waits for the mirror."""
    process = machine.fit(wait_at={"go": 2})
    machine.wait_for(lambda: (machine.place / "waits").exists(), process)
    machine.store.proxy.hold("(PUT|POST) /corpus")
    began = time.monotonic()
    (machine.place / "go").touch()
    machine.wait_for(lambda: "step-00000012" in [path.name for path in machine.run.steps().values()], process)
    assert machine.store.proxy.met["stall"] and time.monotonic() - began < 30
    time.sleep(1)
    assert process.poll() is None
    machine.store.proxy.recover()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert curves(machine.run) == straight and machine.checkpoints() == ["step-00000012"]


@pytest.mark.slow
def test_failures_are_one_warning_and_the_next_checkpoint_brings_all(machine):
    process = machine.fit(wait_at={"go": 2})
    machine.wait_for(lambda: (machine.place / "waits").exists(), process)
    machine.wait_for(lambda: "run.json" in machine.store.names(f"{machine.prefix}/small"), process)
    machine.store.proxy.fail(500 for _ in range(10**6))
    (machine.place / "go").touch()
    machine.wait_for(lambda: machine.run.read("run.json").get("mirror", {}).get("error"), process)
    machine.store.proxy.recover()
    out, err = process.communicate(timeout=240)
    warnings = [line for line in err.splitlines() if "is not up to date: " in line]
    assert process.returncode == 0 and len(warnings) == 1 and "is up to date again" in err, err
    assert machine.checkpoints() == ["step-00000012"] and machine.run.read("run.json")["mirror"]["error"] is None


@pytest.mark.slow
@pytest.mark.parametrize("answers", [True, False])
def test_a_signal_uploads_the_newest_checkpoint_or_says_that_it_did_not(machine, answers):
    process = machine.fit(wait_at={"go": 10}, **{"trainer.stop_within": 60 if answers else 6})
    machine.wait_for(lambda: machine.checkpoints() == ["step-00000004"], process)
    if not answers:
        machine.store.proxy.hold("PUT /corpus")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    (machine.place / "go").touch()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 75, err
    assert list(machine.run.steps()) == [4, 6]
    if answers:
        assert machine.checkpoints() == ["step-00000004", "step-00000006"] and "not complete" not in err
    else:
        assert time.monotonic() - began < 20
        assert "is not complete at 6 s after SIGTERM (trainer.stop_within)" in err
        assert "its newest checkpoint is step-00000004" in err
    machine.store.proxy.recover()
    shutil.rmtree(machine.place / "checkpoints")
    machine.fit("--ckpt_path", "auto")
    assert losses(machine.place) == expected(machine.place)


@pytest.mark.slow
def test_checkpoints_and_tokenizers_are_read_from_the_store(machine, tmp_path, monkeypatch):
    """What is at a URL is copied once, and again where it has changed."""
    machine.fit("--trainer.max_steps", "4")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = f"{machine.mirror}/small"
    local = ["generate", "--ckpt_path", "checkpoints/small/step-00000004", "--prompt", "The", "--seed", "1"]
    whole = lm(machine.place, *local).stdout
    for checkpoint in ("step-00000004", "best"):
        remote = lm(machine.place, *local[:2], f"{url}/{checkpoint}", *local[3:])
        copied = f"copying {url}/step-00000004 to {tmp_path}" in remote.stderr
        assert remote.stdout == whole and copied == (checkpoint == "step-00000004")
    losses_of = [lm(machine.place, "validate", "--config", "small.yaml", "--ckpt_path", checkpoint).stdout
                 for checkpoint in ("best", f"{url}/best/")]  # fmt: skip
    assert losses_of[0] == losses_of[1] and "val/loss" in losses_of[0]
    shards = ["--data.path", "null", "--data.prepare", "null", "--data.train", "data/small/train", "--data.tokenizer"]
    begun = ["--trainer.max_steps", "6", "--ckpt_path", f"{url}/last", "--run", "next", *shards]
    machine.fit(*begun, f"{url}/step-00000004/tokenizer.json")
    assert Run(machine.place / "checkpoints" / "next").read("run.json")["began_from"].startswith(str(tmp_path))
    refused = lm(machine.place, *local[:2], url, *local[3:], expect=2).stderr.splitlines()[-1]
    assert refused.endswith(f"{url} is a run: give one of its checkpoints, such as {url}/last")
    refused = lm(machine.place, *local[:2], f"{url}/step-9", *local[3:], expect=2).stderr
    assert f"{url}/step-9" in refused.splitlines()[-1] and "no such" in refused.splitlines()[-1]

"""`configs/launch/mirror.sh` copies runs to a store, from which they resume, bit for bit, when the machine is gone."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import repeat
from pathlib import Path

import pytest
from object_store import object_store
from trainings import HERE, RECORDER, equipment, expected, lm, losses, start, wait_until, write_config

from lm.runs.run import Run

SCRIPT = HERE.parent / "configs" / "launch" / "mirror.sh"
BIN = Path(sys.executable).parent  # of `aws`, which the extra `test` has
AUTO = ("--ckpt_path", "auto")
WEIGHTS = "small/step-00000006/model.safetensors"


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
def machine(workplace, store, request):
    """A machine that copies with `aws`, or with the tool that the test's parameter names."""
    tool = getattr(request, "param", "aws")
    if tool != "aws" and not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    return Machine(workplace, store, tool)


each_tool = pytest.mark.parametrize("machine", ["aws", "rclone", "rsync"], indirect=True)


class Machine:
    def __init__(self, place, store, tool):
        self.place, self.store, self.prefix = place, store, f"runs/{place.parent.name}"
        self.disk = place.parent / "disk"
        destinations = {"aws": f"s3://corpus/{self.prefix}", "rclone": f"store:corpus/{self.prefix}"}
        self.destination = destinations.get(tool, str(self.disk))
        self.run = Run(place / "checkpoints" / "small")
        self.environment = {
            **os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "LM_MIRROR_TOOL": tool, "AWS_MAX_ATTEMPTS": "1",
            "RCLONE_CONFIG_STORE_TYPE": "s3", "RCLONE_CONFIG_STORE_PROVIDER": "Other",
            "RCLONE_CONFIG_STORE_ENV_AUTH": "true", "RCLONE_CONFIG_STORE_ENDPOINT": store.environment["AWS_ENDPOINT_URL"],
        }  # fmt: skip
        self.environment.pop("AWS_CA_BUNDLE", None)  # with which Debian's rclone does not start

    def start(self, *arguments, folder="checkpoints"):
        return subprocess.Popen(
            [SCRIPT, arguments[0], folder, self.destination, *arguments[1:]], cwd=self.place, env=self.environment,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def mirror(self, direction, folder="checkpoints", expect=0):
        """Run the script; returns what it said."""
        script = self.start(direction, folder=folder)
        _, said = script.communicate(timeout=120)
        assert script.returncode == expect, said
        return said

    def loop(self):
        return self.start("up", "0.1")

    def train(self, *callbacks, **changes):
        """A training that is under way."""
        config = write_config(self.place, **{"trainer.callbacks": [RECORDER, *callbacks], **changes})
        return start(self.place, "fit", "--config", str(config), *AUTO)

    def resume(self):
        """Train to the end; returns what was said."""
        return lm(self.place, "fit", "--config", str(write_config(self.place)), *AUTO).stderr

    def names(self):
        """The files in the store."""
        if self.destination != str(self.disk):
            return self.store.names(self.prefix)
        return {path.relative_to(self.disk).as_posix() for path in self.disk.rglob("*") if path.is_file()}

    def checkpoints(self):
        """The complete checkpoints in the store."""
        return sorted(name.split("/")[1] for name in self.names() if name.endswith("/trainer.json"))

    def take_away(self, *processes):
        """Kill what runs on the machine, and remove its disk."""
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL) if isinstance(process, subprocess.Popen) else process.kill()
            process.communicate()
        shutil.rmtree(self.place / "checkpoints")
        time.sleep(1 if processes else 0)  # requests that were on their way arrive


def curves(run):
    """The metrics of each step that are not times."""
    names = ("train/loss", "val/loss", "val/bpb", "optim/grad_norm", "tokens")
    return [{name: line[name] for name in ("step", *names) if name in line} for line in run.metrics()]


@pytest.fixture(scope="module")
def straight(uninterrupted):
    return curves(Run(uninterrupted / "checkpoints" / "small"))


def write_checkpoint(run, step):
    folder = run / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"weights of {step} in {run}")
    (folder / "trainer.json").write_text("{}")
    (run / "run.json").write_text(f'{{"step": {step}}}')


# ---- with trainings --------------------------------------------------------------------------------------------------
@pytest.mark.slow
@each_tool
def test_a_run_resumes_on_another_machine_as_if_nothing_had_happened(machine, straight):
    """Training and copying are killed at a random moment; the training waits where it would else be too far."""
    slow, wait = equipment("interruptions.SlowSteps", seconds=0.2), equipment("waiting.WaitAt", micro_batch=14)
    training, loop = machine.train(slow, wait), machine.loop()
    wait_until(machine.checkpoints, training, loop)
    time.sleep(random.Random(machine.prefix).uniform(0, 3))
    machine.take_away(training, loop)
    machine.mirror("down")
    assert not (machine.run.path / "last").exists()  # links are not copied, and not needed
    machine.resume()
    assert curves(machine.run) == straight and losses(machine.place) == expected(machine.place)
    machine.mirror("up")
    names = machine.names()
    assert machine.checkpoints() == ["step-00000012"] and not any("step-00000006" in name for name in names)
    assert {"small/run.json", "small/config.yaml", "small/metrics.jsonl", "small/log.txt", ".mirror/owner"} < names
    assert not names & {"small/run.lock", "small/last", "small/best"}
    machine.take_away()
    machine.mirror("down")
    assert "the run has finished" in machine.resume()
    assert machine.run.link("best").name == machine.run.link("last").name == "step-00000012"


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_copy_leaves_the_checkpoint_before(machine, straight):
    waits = [equipment("waiting.WaitAt", micro_batch=at, go=go) for go, at in (("go", 10), ("never", 12))]
    training = machine.train(*waits)
    wait_until(lambda: (machine.place / "waits").exists(), training)
    machine.mirror("up")
    assert machine.checkpoints() == ["step-00000004"]
    (machine.place / "go").touch()
    wait_until(lambda: 6 in machine.run.steps(), training)
    machine.store.proxy.fail(repeat("stall"), f"PUT .*{WEIGHTS}")
    loop = machine.loop()
    wait_until(lambda: machine.store.proxy.met["stall"], training, loop)
    time.sleep(0.5)
    machine.take_away(training, loop)
    machine.store.proxy.recover()
    begun = {name for name in machine.names() if "step-00000006" in name}
    assert begun and WEIGHTS not in begun and machine.checkpoints() == ["step-00000004"]
    machine.mirror("down")
    said = machine.resume()
    assert len(re.findall("passing over .*step-00000006: no trainer.json", said)) == said.count("passing over ") == 1
    assert curves(machine.run) == straight and losses(machine.place) == expected(machine.place)


@pytest.mark.slow
def test_checkpoints_and_tokenizers_are_read_from_the_store(machine, tmp_path, monkeypatch):
    """What is at a URL is copied once."""
    machine.train(**{"trainer.max_steps": 4}).communicate(timeout=240)
    machine.mirror("up")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = f"{machine.destination}/small"
    local = ["generate", "--ckpt_path", "checkpoints/small/step-00000004", "--prompt", "The", "--seed", "1"]
    whole = lm(machine.place, *local).stdout
    for copied in (True, False):
        remote = lm(machine.place, *local[:2], f"{url}/step-00000004", *local[3:])
        assert remote.stdout == whole and (f"copying {url}/step-00000004 to {tmp_path}" in remote.stderr) == copied
    shards = ["--data.path", "null", "--data.prepare", "null", "--data.train", "data/small/train", "--data.tokenizer"]
    begun = ["--trainer.max_steps", "6", "--ckpt_path", f"{url}/step-00000004/", "--run", "next", *shards]
    lm(machine.place, "fit", "--config", "small.yaml", *begun, f"{url}/step-00000004/tokenizer.json")
    assert Run(machine.place / "checkpoints" / "next").read("run.json")["began_from"].startswith(str(tmp_path))
    refused = lm(machine.place, *local[:2], url, *local[3:], expect=2).stderr.splitlines()[-1]
    assert refused.endswith(f"{url} is a run: give one of its checkpoints, {url}/step-...")
    refused = lm(machine.place, *local[:2], f"{url}/step-9", *local[3:], expect=2).stderr
    assert f"{url}/step-9" in refused.splitlines()[-1] and "no such" in refused.splitlines()[-1]


# ---- whose copy it is ------------------------------------------------------------------------------------------------
@pytest.mark.slow
@each_tool
def test_nothing_is_lost_in_the_store_by_a_folder_that_lacks_it(machine):
    """A new machine, one that was taken for dead, and a folder that somebody has emptied."""
    assert "there is nothing in " in machine.mirror("down") and not (machine.place / "checkpoints").exists()
    for step in (3, 6):
        write_checkpoint(machine.place / "checkpoints/small", step)
    machine.mirror("up")
    whole = machine.names()
    assert "checkpoints stays as it is" in machine.mirror("down")
    write_checkpoint(machine.place / "new/small", 1)
    for command in ("up", "down"):
        assert f"is a copy of {os.uname().nodename}:" in machine.mirror(command, folder="new", expect=2)
    machine.mirror("down", folder="next")
    copied = (machine.place / "next/small").rglob("*.*")
    assert {path.relative_to(machine.place / "next").as_posix() for path in copied} == whole - {".mirror/owner"}
    shutil.rmtree(machine.place / "checkpoints/small/step-00000003")
    for command in ("up", "down"):  # the folder before, which is no longer the store's
        assert "is a copy of " in machine.mirror(command, expect=2) and machine.names() == whole
    shutil.rmtree(machine.place / "next/small")
    machine.mirror("up", folder="next")
    assert machine.names() == whole
    write_checkpoint(machine.place / "next/small", 9)
    machine.mirror("up", folder="next")
    assert machine.checkpoints() == ["step-00000009"]


@pytest.mark.slow
def test_one_run_is_copied_alone_and_an_interrupted_down_continues(machine):
    write_checkpoint(machine.place / "checkpoints/small", 3)
    machine.mirror("up", folder="checkpoints/small")
    assert {"run.json", "step-00000003/trainer.json"} < machine.names()
    machine.take_away()
    machine.store.proxy.fail(repeat("stall"), "GET .*model.safetensors")
    script = machine.start("down", folder="checkpoints/small")
    wait_until(lambda: machine.store.proxy.met["stall"], script)
    os.killpg(script.pid, signal.SIGKILL)
    machine.store.proxy.recover()
    assert not machine.run.path.exists()
    machine.mirror("down", folder="checkpoints/small")
    assert list(machine.run.steps()) == [3] and (machine.run.steps()[3] / "model.safetensors").exists()


@pytest.mark.slow
def test_a_store_that_fails_is_no_empty_store_and_the_loop_outlives_it(machine):
    write_checkpoint(machine.place / "checkpoints/small", 3)
    machine.mirror("up")
    machine.store.proxy.fail(403 for _ in range(10**6))
    assert "AccessDenied" in machine.mirror("down", folder="new", expect=1) and not (machine.place / "new").exists()
    loop = machine.loop()
    wait_until(lambda: machine.store.proxy.met[403] > 3, loop)
    machine.store.proxy.recover()
    write_checkpoint(machine.place / "checkpoints/small", 6)
    loop.send_signal(signal.SIGTERM)  # a last copy
    assert loop.wait(60) == 0 and "the next copy is in 0.1 s" in loop.stderr.read()
    assert machine.checkpoints() == ["step-00000003", "step-00000006"]


@pytest.mark.parametrize(("arguments", "tool", "what"), [
    (["up", "checkpoints"], "rsync", "give up or down, a folder, and where its copy is"),
    (["sideways", "checkpoints", "x"], "rsync", "give up or down"),
    (["up", "checkpoints", "x"], "nothing-like-it", "nothing-like-it is not installed"),
    (["down", "checkpoints", "x"], "cp", "LM_MIRROR_TOOL is cp: give aws, rclone or rsync"),
])  # fmt: skip
def test_what_is_no_request_is_one_line(tmp_path, arguments, tool, what):
    ended = subprocess.run(
        [SCRIPT, *arguments], cwd=tmp_path, env={**os.environ, "LM_MIRROR_TOOL": tool}, capture_output=True, text=True
    )
    assert ended.returncode == 2 and ended.stderr.startswith(f"mirror.sh: {what}") and ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())

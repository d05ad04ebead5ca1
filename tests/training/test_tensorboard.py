"""TensorBoard has one curve a metric however often a run is killed, charts that belong together, and small files."""

import json
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict

import pytest
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from trainings import equipment, fit

STEPS = 12  # optimizer steps of the run
KILL = equipment("recorder.KillAt", signal_name="SIGKILL", micro_batch=20)


@pytest.fixture(scope="module")
def killed(workplace):
    """A run that was killed after ten steps and resumed from step 6."""
    changes = {"trainer.max_steps": STEPS, "trainer.keep_checkpoints": 5}
    fit(workplace, expect=-9, **changes, **{"trainer.callbacks": [KILL]})
    _, run = fit(workplace, "small", "--ckpt_path", "checkpoints/small/step-00000006", **changes)
    assert len(values(run, "train/loss")) > STEPS  # there are points that do not count any more
    return run


def events(run):
    """Every event of a run's files, oldest file first."""
    files = sorted(run.path.glob("events.out.tfevents.*"))
    return [Event.FromString(record) for file in files for record in RawEventFileLoader(str(file)).Load()]


def values(run, tag):
    """The values under one tag, in all files."""
    return [value for event in events(run) for value in event.summary.value if value.tag == tag]


def test_there_is_one_file_a_process_and_no_folder_of_tensorboards_own(killed):
    assert len(list(killed.path.glob("events.out.tfevents.*"))) == 2
    assert not [path.name for path in killed.path.iterdir() if path.is_dir() and not path.name.startswith("step-")
                and path.name not in ("best", "last")]  # fmt: skip
    assert not values(killed, "hp_metric")


def test_an_event_file_stays_small(killed):
    """A log line is under 25 bytes a metric and 100 more; the rest is under 8 KB."""
    size, number = defaultdict(int), defaultdict(int)
    for event in events(killed):
        kind = event.summary.value[0].tag.split("/")[0] if event.summary.value else "rest"
        size[kind] += event.ByteSize() + 16  # and the record around it
        number[kind] += 1
    metrics = len(killed.metrics()[0])  # with step, tokens and time
    assert size["train"] / number["train"] < 25 * metrics + 100
    assert size["rest"] < 8192


# ---- the real server -------------------------------------------------------------------------------------------------
def test_a_tensorboard_server_serves_all_of_it(killed, tmp_path):
    """Both of its readers: the curves without doubles."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(killed.path.parent), "--host", "127.0.0.1"]
    logs = {load_fast: tmp_path / load_fast for load_fast in ("true", "false")}
    servers = []
    try:
        for load_fast, log in logs.items():
            arguments = [*command, "--port", "0", f"--load_fast={load_fast}"]
            with log.open("w") as file:
                servers.append(subprocess.Popen(arguments, stdout=file, stderr=file))
        for log in logs.values():
            address = wait_for(lambda log=log: next(
                word for word in log.read_text().split() if word.startswith("http://127")
            ))  # fmt: skip

            def ask(path, address=address):
                with urllib.request.urlopen(f"{address}data/{path}", timeout=10) as answer:
                    return json.load(answer)

            wait_for(lambda ask=ask: ask("plugin/scalars/tags")["small"]["val/loss"])
            curve = ask("plugin/scalars/scalars?run=small&tag=train/loss")
            assert [point[1] for point in curve] == list(range(1, STEPS + 1))
    finally:
        for server in servers:
            server.terminate()
            server.wait()


def wait_for(question, seconds=30.0):
    """The answer to a question that fails at first."""
    ends = time.monotonic() + seconds
    while True:
        try:
            return question()
        except (OSError, KeyError, StopIteration, ValueError):
            if time.monotonic() > ends:
                raise
            time.sleep(0.2)

"""TensorBoard has one curve a metric however often a run is killed, charts that belong together, and small files."""

import json
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from trainings import equipment, fit, make_workplace

from lm.training.callbacks.histograms import BUCKETS, count_values

STEPS = 12  # optimizer steps of the run
KILL = equipment("recorder.KillAt", signal_name="SIGKILL", micro_batch=20)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run that was killed after ten steps and resumed from step 6; histograms every 4 steps."""
    place = make_workplace(tmp_path_factory.mktemp("curves"))
    changes = {"trainer.histogram_interval": 4, "trainer.max_steps": STEPS, "trainer.keep_checkpoints": 5}
    fit(place, expect=-9, **changes, **{"trainer.callbacks": [KILL]})
    _, run = fit(place, "small", "--ckpt_path", "checkpoints/small/step-00000006", **changes)
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
    """A log line is under 25 bytes a metric and 100 more; a weight's histogram under a kilobyte; the rest under 8 KB."""
    size, number = defaultdict(int), defaultdict(int)
    for event in events(killed):
        kind = event.summary.value[0].tag.split("/")[0] if event.summary.value else "rest"
        size[kind] += event.ByteSize() + 16  # and the record around it
        number[kind] += 1
    metrics = len(killed.metrics()[0])  # with step, tokens and time
    assert size["train"] / number["train"] < 25 * metrics + 100
    assert size["weights"] / number["weights"] < 1000
    assert size["rest"] < 8192


# ---- histograms ------------------------------------------------------------------------------------------------------


def test_histograms_have_hugging_faces_names_and_count_every_weight(killed):
    accumulator = EventAccumulator(str(killed.path), size_guidance={"histograms": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["histograms"]
    assert {"weights/model.embed_tokens.weight", "weights/model.layers.1.self_attn.k_proj.weight",
            "weights/model.layers.0.mlp.up_proj.weight", "weights/model.norm.weight"} <= set(tags)  # fmt: skip
    assert [event.step for event in accumulator.Histograms("weights/model.norm.weight")] == [4, 8, 12]
    drawn = accumulator.Histograms("weights/model.layers.0.mlp.down_proj.weight")[-1].histogram_value
    assert drawn.num == sum(drawn.bucket) == 32 * 64


def test_a_histogram_is_that_of_the_values():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    found = count_values(values)
    assert (found["min"], found["max"], found["num"]) == (values.min().item(), values.max().item(), 1000)
    assert found["sum"] == pytest.approx(values.double().sum().item())
    assert found["sum_squares"] == pytest.approx(values.double().square().sum().item())
    assert found["bucket_counts"] == pytest.approx(torch.histc(values, BUCKETS).tolist(), abs=1)
    assert sum(count_values(torch.ones(7))["bucket_counts"]) == 7  # all alike
    assert count_values(torch.tensor([1.0, torch.nan])) is None is count_values(torch.tensor([1.0, torch.inf]))


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

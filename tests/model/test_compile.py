"""`model.kernels`, `model.compile` and `model.cuda_graphs`: what they refuse, what they say, what they never change."""

import json
import os

import pytest
from trainings import PLACES, lm, losses, make_workplace, write_config

from lm.system.hardware import device_name

SHORT = {"trainer.max_steps": 5, "trainer.val_interval": 5}


def fit(folder, name="small", *arguments, expect=0, environment={}, **changes):  # noqa: B006
    path = write_config(folder, name, **{**SHORT, **changes})
    return lm(folder, "fit", "--config", str(path), *arguments, expect=expect, **environment)


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """The losses of a plain run."""
    folder = make_workplace(tmp_path_factory.mktemp("eager"))
    fit(folder)
    return losses(folder)


# ---- kernels --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["yaml", "flag"])
def test_kernels_that_cannot_run_are_refused_when_asked_for(tmp_path, way):
    """Also as a bare `on` in YAML, which reads as true there."""
    folder = make_workplace(tmp_path)
    if way == "yaml":
        ended = fit(folder, expect=2, **{"model.kernels": True})
    else:
        ended = fit(folder, "small", "--model.kernels", "on", expect=2)
    assert ended.stderr.strip().splitlines()[-1] == (
        f"lm fit: model.kernels on: {device_name()} cannot run them: set model.kernels auto")
    assert not (folder / "checkpoints").exists()


def test_what_was_taken_is_said_once(tmp_path):
    ended = fit(make_workplace(tmp_path))
    said = [line for line in ended.stderr.splitlines() if line.startswith("kernels: ")]
    assert len(said) == 1 and "plain PyTorch (no CUDA device, the model is on cpu)" in said[0]
    assert "attention: " in said[0] and "compile: none" in said[0]


# ---- compile --------------------------------------------------------------------------------------------------------


def test_triton_free_is_eager_to_the_bit_and_no_compiler_runs(tmp_path, eager):
    """No compiler is to be found, none is called, nothing is generated. Triton cannot be imported, even where it is
    installed; torch itself would import it there, if only to see whether it is."""
    folder = make_workplace(tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc"):
        (programs / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/called\nexit 1\n")
        (programs / name).chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, json, sys\n"
        "sys.modules['triton'] = None\n"
        "atexit.register(lambda: open('modules.json', 'w').write(json.dumps(sorted(sys.modules))))\n"
    )
    environment = {
        "PATH": str(programs), "CXX": str(programs / "g++"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "generated"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), PLACES]),
    }  # fmt: skip
    ended = fit(folder, environment=environment, **{"model.compile": "triton_free"})
    assert "compile: triton_free" in ended.stderr
    assert losses(folder) == eager
    assert "torch._dynamo" in json.loads((folder / "modules.json").read_text())
    assert not (tmp_path / "called").exists()
    generated = tmp_path / "generated"
    assert not [path for path in generated.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_inductor_trains_to_the_same_losses_within_rounding(tmp_path, eager):
    folder = make_workplace(tmp_path)
    fit(folder, **{"model.compile": "inductor", "model.decoder.dropout": 0.0})
    (folder / "trace.jsonl").rename(folder / "inductor.jsonl")
    fit(folder, "plain", **{"model.decoder.dropout": 0.0})
    plain = {step: float.fromhex(loss) for step, loss in losses(folder).items()}
    (folder / "inductor.jsonl").replace(folder / "trace.jsonl")
    compiled = {step: float.fromhex(loss) for step, loss in losses(folder).items()}
    assert compiled == pytest.approx(plain, abs=2e-4)


def test_a_run_resumes_with_another_way_to_compute(tmp_path, eager):
    """How blocks are compiled is no part of what a run is."""
    folder = make_workplace(tmp_path)
    fit(folder, **{"trainer.max_steps": 3, "model.schedule.name": "constant"})
    fit(folder, "small", "--ckpt_path", "auto", **{"model.compile": "triton_free", "model.schedule.name": "constant"})
    assert len(losses(folder)) == 10


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


def test_the_recorded_way_trains_as_the_ordinary_one_to_the_bit(tmp_path, eager):
    """Accumulation, clipping, the schedule and a resume are the same where the forward and backward pass is one
    call; on a CPU that call is not a replay."""
    folder = make_workplace(tmp_path)
    callbacks = [{"class_path": "recorder.Recorder"}, {"class_path": "recorder.GraphsWithoutDevice"}]
    kill = {"class_path": "recorder.KillAt", "init_args": dict(signal_name="SIGTERM", micro_batch=5)}
    graphs = {"model.cuda_graphs": True}
    fit(folder, "small", "--force", expect=75, **graphs, **{"trainer.callbacks": [*callbacks, kill]})
    fit(folder, "small", "--force", "--ckpt_path", "auto", **graphs, **{"trainer.callbacks": callbacks})
    assert losses(folder) == eager

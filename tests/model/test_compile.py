"""`model.kernels` and `model.compile`: what they refuse, what they log, what they never change."""

import json
import os

import pytest
from trainings import PLACES, fit, losses, make_workplace

SHORT = {"trainer.max_steps": 5, "trainer.val_interval": 5}


@pytest.fixture(scope="module")
def eager(workplace):
    """A plain run: its losses, and what it says."""
    ended, _ = fit(workplace, **SHORT)
    return losses(workplace), ended.stderr


@pytest.mark.parametrize("way", ["yaml", "flag"])
def test_kernels_that_cannot_run_are_refused_when_asked_for(tmp_path, way):
    """Also as a bare `on` in YAML, which reads as true there."""
    folder = make_workplace(tmp_path)
    arguments, changes = (("--model.kernels", "on"), {}) if way == "flag" else ((), {"model.kernels": True})
    ended, _ = fit(folder, "small", *arguments, expect=2, **changes)
    said = "lm fit: model.kernels on: no CUDA device, the model is on cpu; `auto` uses plain PyTorch there"
    assert ended.stderr.strip().splitlines()[-1] == said
    assert not (folder / "checkpoints").exists()


def test_what_was_taken_is_said_once(eager):
    [said] = [line for line in eager[1].splitlines() if line.startswith("kernels: ")]
    assert "plain PyTorch (no CUDA device, the model is on cpu)" in said
    assert "attention: " in said and "compile: none" in said


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
        "atexit.register(lambda: 'torch' in sys.modules and "  # not of the server that starts readers, in Python 3.14
        "open('modules.json', 'w').write(json.dumps(sorted(sys.modules))))\n"
    )
    environment = {
        "PATH": str(programs), "CXX": str(programs / "g++"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "generated"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), PLACES]),
    }  # fmt: skip
    ended, _ = fit(folder, environment=environment, **SHORT, **{"model.compile": "triton_free"})
    assert "compile: triton_free" in ended.stderr
    assert losses(folder) == eager[0]
    assert "torch._dynamo" in json.loads((folder / "modules.json").read_text())
    assert not (tmp_path / "called").exists()
    assert not [path for path in (tmp_path / "generated").rglob("*") if path.is_file()]


@pytest.mark.slow
def test_inductor_trains_to_the_same_losses_within_rounding(tmp_path):
    folder, found = make_workplace(tmp_path), []
    for mode in ("none", "inductor"):
        fit(folder, mode, **SHORT, **{"model.compile": mode, "model.decoder.dropout": 0.0})
        found.append({step: float.fromhex(loss) for step, loss in losses(folder).items()})
    assert found[1] == pytest.approx(found[0], abs=2e-4)

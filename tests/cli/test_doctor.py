"""`lm doctor`: a healthy machine, and each thing that may be wrong with its cure."""

import importlib
import json
import time

import pytest
from trainings import lm

from lm.cli.command import main


def checks_of(printed, ready=True):
    """The checks by name."""
    found = json.loads(printed)
    assert found["ready"] is ready
    return {check["name"]: check for check in found["checks"]}


def test_a_machine_that_can_train(tmp_path):
    began = time.monotonic()
    found = checks_of(lm(tmp_path, "doctor", "--json").stdout)
    assert time.monotonic() - began < 30  # 3.4 s alone
    assert {"Python", "packages", "torch", "CPU", "GPU", "kernels", "attention", "disk", "registry"} <= found.keys()
    assert all(check["level"] == "ok" or check["cure"] for check in found.values())
    assert "run forward and backward" in found["attention"]["what"] and "NVRTC compiles" in found["kernels"]["what"]
    page = lm(tmp_path, "doctor").stdout
    assert "kernels" in page and "writable, locks work" in page and not list(tmp_path.iterdir())


def test_what_is_wrong_has_a_cure(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    (tmp_path / "runs.db").write_text("no database")
    done = lm(tmp_path, "doctor", "--json", expect=1, LM_REGISTRY=str(tmp_path / "runs.db"))
    found = checks_of(done.stdout, ready=False)
    assert found["disk"]["level"] == "error" and "trainer.default_root_dir" in found["disk"]["cure"]
    assert found["registry"]["level"] == "warning" and "lm runs rebuild" in found["registry"]["cure"]


def test_the_page_has_not_the_users_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "alice").mkdir()
    monkeypatch.chdir(tmp_path / "alice")
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    monkeypatch.setenv("LM_REGISTRY", str(tmp_path / "alice" / "a.db"))
    assert main(["doctor", "--json"]) == 0
    found = checks_of(capsys.readouterr().out)
    assert found["disk"]["what"].startswith("~: ") and "alice" not in json.dumps(found)


@pytest.mark.parametrize("driver, index", [("560.35.05", "cu126"), ("580.65.06", "cu130")])
def test_the_torch_for_a_driver_is_named(monkeypatch, driver, index):
    doctor = importlib.import_module("lm.cli.doctor")
    monkeypatch.setattr(doctor, "driver_version", lambda: driver)
    monkeypatch.setattr(doctor.torch.version, "cuda", None)
    _, check = doctor._torch()
    assert check.level == "error" and check.cure.endswith(f"/whl/{index}")

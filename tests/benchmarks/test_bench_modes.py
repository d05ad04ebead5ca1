"""`bench_modes.py` measures each mode in a process of its own."""

import json

import bench_modes
import pytest
from trainings import start, write_config

SMALL = ("--config", "small.yaml", "--model.decoder.vocab_size", "64", "--steps", "4")


@pytest.mark.slow
def test_modes_are_measured_side_by_side(tmp_path, monkeypatch, capsys):
    """What cannot run here is said, with the reason, and the others are measured."""
    write_config(tmp_path, **{"trainer.log_interval": 2, "trainer.callbacks": None})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_modes, "Popen", lambda command, **_: start(tmp_path, *command[3:]))
    modes = ("none", "none/on")
    assert bench_modes.main([*SMALL, "--output", "found.json", "--modes", *modes]) == 0
    found = json.loads((tmp_path / "found.json").read_text())["modes"]
    assert list(found) == list(modes) and found["none"]["compile"] == "none"
    assert "cannot run them" in found["none/on"]["unavailable"]
    shown = capsys.readouterr()
    assert "1.000x" in shown.out and "none/on is unavailable" in shown.out
    assert "none:\nkernels: " in shown.err and "none/on:\nlm bench step: " in shown.err


def test_a_mode_is_read_as_it_is_written():
    for mode in bench_modes.MODES:
        assert bench_modes.Mode.parse(str(mode)) == mode
    assert bench_modes.Mode.parse("triton_free/off").options == [
        "--model.compile", "triton_free", "--model.kernels", "off"]  # fmt: skip
    with pytest.raises(ValueError, match="no mode 'fast'"):
        bench_modes.Mode.parse("fast")

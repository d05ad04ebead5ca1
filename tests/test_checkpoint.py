"""A checkpoint is complete or absent, is what was written, and holds no code."""

import json
import os

import pytest
import torch

from lm.checkpoint import FolderCheckpointIO, find_damage, point, read_folder, step_of, write_folder
from lm.errors import RequestError, RunError
from lm.plain import decode, encode


def content(step=3):
    return {
        "state_dict": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.randn(4).bfloat16()},
        "optimizer": {"w/exp_avg": torch.randn(2, 3), "w/step": torch.tensor(3.0)},
        "files": {"config.json": "{}\n"},
        "global_step": step,
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
    assert step_of(tmp_path / "step-00000003") == 3
    assert "optimizer" not in read_folder(tmp_path / "step-00000003", optimizer=False)


def test_a_folder_that_is_there_is_replaced_as_a_whole(tmp_path):
    write_folder(tmp_path / "c", content(1))
    write_folder(tmp_path / "c", content(2))
    assert step_of(tmp_path / "c") == 2 and [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "config.json", "trainer.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_to_any_file_is_found_and_named(tmp_path, name, damage):
    folder = tmp_path / "c"
    write_folder(folder, content())
    path = folder / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[0 if name == "trainer.json" else len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    assert name in find_damage(folder)
    with pytest.raises(RequestError, match=name):
        read_folder(folder)


def test_a_path_out_of_the_folder_is_refused(tmp_path):
    write_folder(tmp_path / "c", content())
    document = json.loads((tmp_path / "c" / "trainer.json").read_text())
    document["digests"]["../secret"] = "0" * 64
    (tmp_path / "c" / "trainer.json").write_text(json.dumps(document))
    assert "outside the folder" in find_damage(tmp_path / "c")


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
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_writing_behind_keeps_what_was_there_at_the_time_of_saving(tmp_path):
    io = FolderCheckpointIO()
    moving = content()
    io.save_checkpoint(moving, tmp_path / "c", storage_options=lambda: point(tmp_path / "last", "c"))
    moving["state_dict"]["w"].zero_()
    io.drain()
    assert read_folder(tmp_path / "c")["state_dict"]["w"].sum() == 15
    assert os.readlink(tmp_path / "last") == "c"


def test_a_failure_behind_is_raised_by_the_next_save(tmp_path):
    io = FolderCheckpointIO()
    io.save_checkpoint(content(), tmp_path / "missing" / "c")
    with pytest.raises(RunError, match="could not write"):
        io.drain()

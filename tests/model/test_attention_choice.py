"""A named attention kernel is tried before it is used; on a CPU there are two to try."""

import sys
import types

import pytest
import torch
from torch.nn.attention import _registry, current_flash_attention_impl

from lm.errors import RequestError, RunError
from lm.model import attention_choice
from lm.model.attention_choice import Heads, use_attention, why_it_fails

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 32)


def test_a_kernel_that_does_not_run_says_why_and_no_random_number_is_drawn():
    drawn = torch.get_rng_state()
    found = {name: why_it_fails(name, CPU, torch.bfloat16, HEADS) for name in ("flash", "math", "cudnn")}
    assert torch.equal(torch.get_rng_state(), drawn)  # a training's random numbers are its own
    assert found["flash"] is found["math"] is None and "kernel" in found["cudnn"].lower()
    with pytest.raises(RequestError, match="model.attention cudnn needs a CUDA device"):
        use_attention(torch.nn.Module(), "cudnn", CPU, torch.bfloat16, HEADS)


@pytest.mark.parametrize("sequences", [False, True])
def test_a_version_of_flash_is_tried_with_windows_where_layers_have_some(monkeypatch, sequences):
    tried = []
    monkeypatch.setattr(attention_choice, "why_it_fails", lambda *a, window=None: tried.append(window) or window)
    monkeypatch.setattr(attention_choice, "_use_flash", tried.append)
    monkeypatch.setattr(attention_choice, "enter_kernels", lambda *arguments: None)
    arguments = torch.nn.Module(), "flash3", torch.device("cuda"), torch.bfloat16, HEADS, sequences
    if sequences:
        with pytest.raises(RequestError, match=r"model.attention flash3 does not run here \(64\)"):
            use_attention(*arguments)
    else:
        use_attention(*arguments)
    assert tried == ([None, 64] if sequences else [None, "FA3"])


@pytest.fixture
def third_version(monkeypatch):
    """A wheel of flash attention that torch can be told to take."""
    taken = []
    handle = types.SimpleNamespace(remove=lambda: taken.append("removed"))
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: taken.append("taken") or handle)
    yield taken
    if current_flash_attention_impl():
        attention_choice.restore_flash_attention_impl()


def test_trying_leaves_the_version_of_flash_attention_as_it_was(third_version):
    assert why_it_fails("flash3", CPU, torch.bfloat16, HEADS) is None and third_version == ["taken", "removed"]
    assert current_flash_attention_impl() is None
    attention_choice._use_flash("FA3")
    assert why_it_fails("flash", CPU, torch.bfloat16, HEADS) is None
    assert current_flash_attention_impl() == "FA3"


def test_a_wheel_that_is_not_installed_is_a_reason_and_not_an_error():
    if "flash_attn_interface" in sys.modules:
        pytest.skip("it is installed")
    assert "flash" in why_it_fails("flash3", CPU, torch.bfloat16, HEADS)


def test_a_version_that_is_not_there_is_told_in_one_line_and_leaves_another_project_s_as_it_was(monkeypatch):
    """Its name may be unknown to torch, its wheel missing on this rank; another project may have set a third one."""
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "theirs", lambda: types.SimpleNamespace(remove=lambda: None))
    monkeypatch.delitem(_registry._FLASH_ATTENTION_IMPLS, "FA4")
    attention_choice.activate_flash_attention_impl("theirs")
    try:
        reason = why_it_fails("flash4", CPU, torch.bfloat16, HEADS)
        assert reason.startswith("flash attention FA4: Unknown flash attention impl")
        assert current_flash_attention_impl() == "theirs"
    finally:
        attention_choice.restore_flash_attention_impl()
    with pytest.raises(RunError, match="flash attention FA4: Unknown .* install its wheel"):
        attention_choice._use_flash("FA4")

"""Guards, figures and samples of a training on a CUDA device: `pytest -m gpu`."""

import json

import pytest
import torch
from decoders import written_by
from test_guards import KEEP_ALL, poisoned, same, tensors
from trainings import fit, make_workplace

from lm.inference.sampling import Sampling
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder
from lm.model.fused import fuse

pytestmark = [
    pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]  # fmt: skip
ON_GPU = {"trainer.accelerator": "gpu", "trainer.devices": 1}


@pytest.mark.parametrize("changes", [
    {"trainer.precision": "32-true"}, {"trainer.precision": "bf16-mixed"}, {"trainer.precision": "16-mixed"},
    {"trainer.precision": "bf16-mixed", "model.optimizer.name": "muon"},
], ids=["32-true", "bf16-mixed", "16-mixed", "muon"])  # fmt: skip
def test_a_step_that_is_not_finite_changes_nothing(tmp_path, changes):
    """Also where the optimizer reads on the device whether to skip, and where a GradScaler does."""
    poison = {"gradient": [6], "loss": [9]}
    _, run = fit(make_workplace(tmp_path), "nan", **poisoned(**poison), **KEEP_ALL, **ON_GPU, **changes)
    for step in sum(poison.values(), []):
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert same(tensors(run, step - 1, name), tensors(run, step, name)), (step, name)
    assert not same(tensors(run, 10), tensors(run, 11)) and run.status() == "finished"


def test_the_figures_of_the_device_are_logged_and_samples_written(tmp_path):
    """The device does not wait for data here, and what it holds is known."""
    changes = {"trainer.precision": "bf16-mixed", "samples.prompts": ["The letter of"]}
    _, run = fit(make_workplace(tmp_path), "figures", **ON_GPU, **changes)
    logged = [line for line in run.metrics() if "train/loss" in line]
    for name in ("perf/gpu_load", "perf/gpu_temperature", "perf/gpu_power", "mem/gpu_gib", "mem/cuda_peak_gib"):
        assert name in logged[-1], name
    assert all(0 <= line["perf/data_wait"] <= 1 for line in logged) and logged[-1]["mem/cuda_peak_gib"] > 0
    samples = [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [4, 8, 12] and samples[-1]["text"]
    assert run.read("heartbeat.json")["machine"]["gpus"]


def test_kernels_generate_what_plain_pytorch_does():
    """One token a row, over a cache, with windows: the greedy tokens are the same."""
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, max_position_embeddings=64, qk_norm=True, window_pattern="SL", sliding_window=8,
    )  # fmt: skip
    decoder = Decoder(config).cuda()
    prompts, written = [[1, 2, 3], [5], list(range(20))], []
    for fused in (False, True):
        if fused:
            fuse(decoder)
        written.append(written_by(decoder, prompts, Sampling(temperature=0, max_new_tokens=40)))
    assert written[0] == written[1]

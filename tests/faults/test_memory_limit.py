"""A training that runs out of memory says how much there was and which micro-batch fits, and loses no checkpoint."""

import json
import re
import shutil
import sys

import pytest
import torch
from trainings import RECORDER, equipment, lm, losses, write_config

from lm.runs.run import Run
from lm.runs.trainer_json import find_damage

pytestmark = [
    pytest.mark.fault(16),
    pytest.mark.skipif(sys.platform != "linux", reason="limits the memory as Linux does"),
]
# 64 sequences of 128 tokens a step; all of them at once take half a gibibyte.
WIDE = {
    "model.decoder.hidden_size": 256, "model.decoder.num_attention_heads": 4, "model.decoder.num_hidden_layers": 4,
    "model.decoder.intermediate_size": 512, "model.decoder.max_position_embeddings": 128, "model.decoder.dropout": 0.0,
    "data.seq_len": 128, "data.global_batch_tokens": 8192, "data.val_tokens": 256, "data.micro_batch_size": 64,
    "trainer.max_steps": 2, "trainer.val_interval": 2, "trainer.checkpoint_interval": 1,
    "model.schedule.warmup_steps": 1,
}  # fmt: skip
LIMITED = [RECORDER, equipment("memory_limit.Limit", mebibytes=250)]
FIT = ("fit", "--config", "wide.yaml", "--ckpt_path", "auto")


@pytest.mark.parametrize("given", [8192, None])
def test_out_of_memory_at_the_first_step_names_a_micro_batch_that_fits(workplace, given):
    """The line is the reason in run.json, too; and with what it proposes the same run is trained in the same memory.

    Where a step was one micro-batch, for want of `data.global_batch_tokens`, it proposes these too.
    """
    shutil.rmtree(workplace / "checkpoints" / "wide", ignore_errors=True)
    write_config(workplace, "wide", **WIDE | {"trainer.callbacks": LIMITED, "data.global_batch_tokens": given})
    refused = lm(workplace, *FIT, expect=1)
    said = refused.stderr.splitlines()[-1]
    assert said.startswith("lm fit: out of memory (cpu) in step 1") and "64 x 128 tokens" in said
    assert re.search(r"it had [\d.]+ MiB at most; ", said)
    assert "Traceback" not in refused.stderr
    run = Run(workplace / "checkpoints" / "wide")
    assert run.status() == "failed" and run.read("run.json")["reason"] == said.removeprefix("lm fit: ")

    named = re.search(r"(--data.micro_batch_size (\d+)( --data.global_batch_tokens 8192)?) needs about", said)
    cure, fitting, tokens = named.groups()
    assert 8 <= int(fitting) < 64 and (tokens is None) == (given is not None)
    lm(workplace, *FIT, *cure.split())
    assert run.status() == "finished" and run.read("state.json")["tokens"] == 2 * 8192


def test_out_of_memory_in_a_resume_leaves_the_checkpoints(workplace):
    """A run is resumed with micro-batches that are too large: it fails, and resumes as if that had not been tried."""
    write_config(workplace, "wide", **WIDE)
    small = ("--data.micro_batch_size", "16")
    lm(workplace, *FIT, *small)
    whole = losses(workplace)
    (workplace / "trace.jsonl").unlink()

    first, second = ("--run", "first", *small), ("--run", "first")
    stop = equipment("recorder.KillAt", signal_name="SIGTERM", micro_batch=2)
    lm(workplace, *FIT, *first, "--trainer.callbacks", json.dumps([RECORDER, stop]), expect=75)
    run = Run(workplace / "checkpoints" / "first")
    assert list(run.steps()) == [1]
    write_config(workplace, "wide", **WIDE, **{"trainer.callbacks": LIMITED})
    refused = lm(workplace, *FIT, *second, expect=1)
    assert "in step 2: with micro-batches of 64 x 128" in refused.stderr.splitlines()[-1]
    assert list(run.steps()) == [1] and find_damage(run.steps()[1]) is None

    write_config(workplace, "wide", **WIDE)
    lm(workplace, *FIT, *first)
    assert losses(workplace) == whole


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_out_of_memory_on_a_gpu_names_a_micro_batch_that_fits(workplace):
    """With a fifth of a gibibyte of the GPU for this process."""
    limit = equipment("memory_limit.LimitGPU", mebibytes=200)
    write_config(workplace, "wide", **WIDE, **{"trainer.accelerator": "gpu", "trainer.callbacks": [limit]})
    said = lm(workplace, *FIT, expect=1).stderr.splitlines()[-1]
    assert said.startswith("lm fit: out of memory (cuda) in step ") and "MiB at most; " in said
    fitting = re.search(r"--data.micro_batch_size (\d+) needs about", said)[1]
    lm(workplace, *FIT, "--data.micro_batch_size", fitting)

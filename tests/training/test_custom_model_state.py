"""Custom models with unusual state: saved as what they are, or refused. `test_resumes_exactly` kills them."""

import json
import re

import pytest
from trainings import lm, write_config

from lm.runs.run import Run

MODEL = '''
import os
import random
from dataclasses import replace

import numpy as np
import torch
from torch import nn

import lm
from lm.model.decoder import Decoder, losses_of


class Bigram(nn.Module):
    """Logits of the next token by the token alone."""

    def __init__(self, config, variant):
        super().__init__()
        self.embed, self.out = nn.Embedding(config.vocab_size, 8), nn.Linear(8, config.vocab_size)
        self.variant = variant
        if os.path.exists("tie"):
            self.out.weight = self.embed.weight
        if "transposed" in variant:
            self.out.weight = nn.Parameter(self.out.weight.detach().t().contiguous().t())
        if "slash" in variant:
            self.register_parameter("scale/of/out", nn.Parameter(torch.ones(8)))
        if "float64" in variant:
            self.out.double()
        if variant == "complex":
            self.phase = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, input_ids, labels=None):
        hidden = self.embed(input_ids)
        if self.variant == "late" and labels is not None:
            self.register_buffer("mask", torch.ones(8))
        if "slash" in self.variant:
            hidden = hidden * getattr(self, "scale/of/out")
        if self.variant == "bidirectional":
            hidden = hidden + hidden.mean(1, keepdim=True)
        if "generators" in self.variant and self.training:
            hidden = hidden * (random.random() + np.random.rand())
        logits = self.out(hidden.to(self.out.weight.dtype))
        return logits if labels is None else losses_of(logits, labels)


class Counting(Bigram):
    def get_extra_state(self):
        return {"count": 1}


class MyModule(lm.LanguageModule):
    def __init__(self, variant: str = "", **options):
        super().__init__(**options)
        self.variant = variant
        if variant == "buffer":
            self.register_buffer("counts", torch.zeros(3))

    def build_decoder(self, config):
        if self.variant in ("theta", "output"):
            decoder = Decoder(replace(config, rope_theta=7.0, num_hidden_layers=1))
            if self.variant == "output":
                decoder.lm_head = nn.Linear(config.hidden_size, config.vocab_size + 8, bias=False)
            return decoder
        return (Counting if self.variant == "extra-state" else Bigram)(config, self.variant)

    def configure_optimizers(self):
        if "own-optimizer" in self.variant:
            return torch.optim.SGD(self.decoder.parameters(), lr=0.1, momentum=0.9)
        return super().configure_optimizers()


if __name__ == "__main__":
    lm.run(MyModule)
'''
SHORT = {"trainer.max_steps": 6, "trainer.checkpoint_interval": 2, "trainer.val_interval": 6,
         "model.schedule.warmup_steps": 0, "trainer.precision": "32-true", "trainer.callbacks": []}  # fmt: skip


@pytest.fixture(scope="module")
def place(prepared):
    (prepared / "bigram.py").write_text(MODEL)
    return prepared


def write_variant(place, variant):
    return str(write_config(place, variant, **SHORT, **{"model.variant": variant}))


@pytest.mark.parametrize("variant, kind", [("theta", "llama"), ("output", "lm_custom")])
def test_a_decoder_of_another_config_is_saved_as_what_it_is(place, variant, kind):
    """Our class with another base and depth is a Llama of those; with an output of its own it is a custom model."""
    config = write_variant(place, variant)
    lm(place, "bigram.py", "fit", "--config", config)
    run = place / "checkpoints" / variant
    document = json.loads((run / "last/config.json").read_text())
    assert (document["model_type"], document.get("decoder", document)["rope_theta"]) == (kind, 7.0)
    said = lm(place, "bigram.py", "validate", "--config", config, "--ckpt_path", str(run / "last")).stdout
    assert f"{Run(run).metrics('val/loss')[-1]['val/loss']:.4f}" in said


def test_two_weights_of_a_checkpoint_never_become_one(place):
    """Each command of a class that ties since stops; a checkpoint of its own is resumed."""
    config, step = ("--config", write_variant(place, "untied"), "--trainer.max_steps"), "checkpoints/untied/last"
    lm(place, "bigram.py", "fit", *config, "2")
    (place / "tie").touch()
    for command in ("fit", *config, "4", "--run", "untied"), ("validate", *config, "2"), ("generate", "--prompt", "A"):
        said = lm(place, "bigram.py", *command, "--ckpt_path", step, expect=2).stderr
        assert re.search("embed.weight and .*out.weight are one weight in this model and two", said.splitlines()[-1])
    lm(place, "bigram.py", "fit", *config, "2", "--run", "tied")
    lm(place, "bigram.py", "fit", *config, "4", "--run", "tied", "--ckpt_path", "last")
    (place / "tie").unlink()


@pytest.mark.parametrize("variant, message", [
    ("late", 'Bigram: its checkpoint could not be loaded: .* Unexpected key.* "mask"'),
    ("extra-state", "Counting: its checkpoint could not be loaded: _extra_state is no tensor"),
])  # fmt: skip
def test_a_checkpoint_that_could_not_be_loaded_ends_the_run_at_the_first_save(place, variant, message):
    """And not when hours of training depend on it."""
    said = lm(place, "bigram.py", "fit", "--config", write_variant(place, variant), expect=2).stderr
    run = Run(place / "checkpoints" / variant)
    assert re.search(message, said.splitlines()[-1]) and run.status() == "failed" and not list(run.steps())


@pytest.mark.parametrize("variant, message", [
    ("bidirectional", "Bigram sees later tokens: when those from token 1 of 32 on are others, losses"),
    ("buffer", "MyModule has a weight or buffer of its own, counts, which is not trained and would be in no model"),
    ("complex", "the weight phase is of torch.complex64, which neither optimizers nor checkpoints take"),
])  # fmt: skip
def test_what_cannot_be_trained_or_resumed_is_refused_at_the_start(place, variant, message):
    said = lm(place, "bigram.py", "fit", "--config", write_variant(place, variant), expect=2).stderr
    assert message in said.splitlines()[-1] and not (place / "checkpoints" / variant).exists()

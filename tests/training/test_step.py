"""One optimizer step in plain PyTorch: it is that of `lm fit` to the bit, and that of a few lines of torch."""

import re
import subprocess
import sys

import pytest
import torch
from decoders import SMALL
from trainings import HERE, lm, start

from lm.data.loader import Batch
from lm.model.decoder import Decoder
from lm.runs.run import Run
from lm.training.config import OptimizerConfig, ScheduleConfig
from lm.training.optim import build_optimizer
from lm.training.schedule import Steps
from lm.training.step import OptimizerStep

README = (HERE.parent / "lm" / "training" / "README.md").read_text()
SCRIPT = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
PREPARE = re.search(r"`lm (data prepare .*?)`", README)[1].split()
STEPS = Steps(seq_len=8, micro_batch_size=2, world_size=1, accumulate=3, max_steps=4)


@pytest.mark.slow
def test_the_loop_of_the_page_is_the_training_of_lm_fit_to_the_bit(tmp_path):
    assert len(SCRIPT.splitlines()) <= 40 and "lightning" not in SCRIPT
    lm(tmp_path, *PREPARE)
    (tmp_path / "plain.py").write_text(SCRIPT.replace("max_steps=300", "max_steps=4"))
    out, err = start(tmp_path, "plain.py").communicate(timeout=240)
    lm(tmp_path, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "4", "--trainer.log_interval", "1",
       "--trainer.accelerator", "cpu", "--data.val_tokens", "4096", "--samples.prompts", "[]")  # fmt: skip
    of_fit = [(line["step"], line["train/loss"]) for line in Run(tmp_path / "checkpoints/tiny").metrics()
              if "train/loss" in line]  # fmt: skip
    assert [(int(step), float(loss)) for step, loss in map(str.split, out.splitlines())] == of_fit, err


def test_it_imports_nothing_of_lightning():
    code = "import sys, lm.training.step; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=HERE.parent, check=True)


def made(**options):
    torch.manual_seed(0)
    decoder = Decoder(SMALL)
    optimizer = build_optimizer(decoder, OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-3), {})
    step = OptimizerStep(lambda batch: decoder(batch.input_ids, labels=batch.labels), optimizer, STEPS,
                         ScheduleConfig("linear"), **options)  # fmt: skip
    return decoder, step


def batch(**masked):
    tokens = torch.randint(SMALL.vocab_size, (6, 9), generator=torch.Generator().manual_seed(1))
    return Batch(tokens.to(torch.int32), **masked)


def test_it_is_the_step_of_a_few_lines_of_torch():
    """The gradient is that of the mean over the targets that count, whatever micro-batch they are in."""
    mask = torch.rand(6, 8, generator=torch.Generator().manual_seed(2)) > 0.4
    rows = batch(mask=mask)
    decoder, step = made(clip=0.5)
    result = step(rows, 1)

    [reference, _], rate = made(), 0.75 * (1 - 0.1) + 0.1  # of linear, after 1 of 4 steps
    plain = torch.optim.AdamW(
        [{"params": [p for p in reference.parameters() if p.ndim > 1], "weight_decay": 0.1},
         {"params": [p for p in reference.parameters() if p.ndim == 1], "weight_decay": 0.0}],
        lr=1e-2 * rate, betas=(0.9, 0.95), eps=1e-3)  # a small eps would amplify rounding  # fmt: skip
    loss = torch.nn.functional.cross_entropy(reference(rows.input_ids).flatten(0, 1), rows.labels.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    plain.step()
    torch.testing.assert_close([result.loss, result.grad_norm], [loss.detach(), norm], rtol=1e-5, atol=1e-6)
    assert result.targets == mask.sum() and norm > 0.5
    for name, weight in decoder.named_parameters():
        torch.testing.assert_close(weight, reference.get_parameter(name), rtol=1e-4, atol=1e-5)
        assert weight.grad is None


def test_a_step_that_is_not_finite_changes_no_weight():
    decoder, step = made()
    before = {name: weight.clone() for name, weight in decoder.named_parameters()}
    usual, step.losses = step.losses, lambda rows: usual(rows)._replace(total=usual(rows).total * torch.nan)
    assert not step(batch(), 0).finite
    assert all(torch.equal(weight, before[name]) for name, weight in decoder.named_parameters())
    step.losses = usual
    assert step(batch(), 1).finite
    assert not any(torch.equal(weight, before[name]) for name, weight in decoder.named_parameters() if weight.ndim > 1)


def test_gradients_are_held_back_but_for_the_last_micro_batch():
    held = []

    class Held:
        def __enter__(self):
            held.append(True)

        def __exit__(self, *exception):
            held.append(False)

    order = []
    decoder, step = made(hold_gradients=Held, backward=lambda loss: order.append(len(held)) or loss.backward())
    step(batch(), 0)
    assert held == [True, False, True, False] and order == [1, 3, 4]


def test_a_step_can_be_dropped_and_leaves_nothing():
    left = [None, None, RuntimeError("stop")]

    def raise_next():
        if error := left.pop(0):
            raise error

    decoder, step = made(before_micro_batch=raise_next)
    before = [weight.clone() for weight in decoder.parameters()]
    with pytest.raises(RuntimeError, match="stop"):
        step(batch(), 0)
    step.zero_grad()
    assert all(weight.grad is None for weight in decoder.parameters())
    assert all(torch.equal(*pair) for pair in zip(before, decoder.parameters()))

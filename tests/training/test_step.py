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
from lm.training.config import OptimizerConfig
from lm.training.optim import build_optimizer
from lm.training.step import optimizer_step

README = (HERE.parent / "lm" / "training" / "README.md").read_text()
SCRIPT = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
PREPARE = re.search(r"`lm (data prepare .*?)`", README)[1].split()


@pytest.mark.slow
def test_the_loop_of_the_page_is_the_training_of_lm_fit_to_the_bit(tmp_path):
    assert len(SCRIPT.splitlines()) <= 40 and "lightning" not in SCRIPT
    lm(tmp_path, *PREPARE)
    done = lm(tmp_path, "fit", "--config", "tiny.yaml", "--trainer.max_steps", "4", "--trainer.log_interval", "1",
              "--trainer.accelerator", "cpu", "--data.val_tokens", "4096", "--samples.prompts", "[]")  # fmt: skip
    slow_bf16 = "precision bf16-mixed -> 32-true" in done.stderr  # on this CPU
    script = SCRIPT.replace('"cpu", torch.bfloat16', '"cpu", torch.bfloat16, enabled=False') if slow_bf16 else SCRIPT
    (tmp_path / "plain.py").write_text(script.replace(" 300\n", " 4\n"))
    out, err = start(tmp_path, "plain.py").communicate(timeout=240)
    of_fit = [(line["step"], line["train/loss"]) for line in Run(tmp_path / "checkpoints/tiny").metrics()
              if "train/loss" in line]  # fmt: skip
    assert [(int(step), float(loss)) for step, loss in map(str.split, out.splitlines())] == of_fit, err


def test_it_imports_nothing_of_lightning():
    code = "import sys, lm.training.step; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=HERE.parent, check=True)


def make_model():
    torch.manual_seed(0)
    decoder = Decoder(SMALL)
    return decoder, build_optimizer(decoder, OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-3), {})


def make_batch(**masked):
    tokens = torch.randint(SMALL.vocab_size, (6, 9), generator=torch.Generator().manual_seed(1))
    return Batch(tokens.to(torch.int32), **masked)


def run_step(decoder, optimizer, batch, factor=1.0, **options):
    """A step of three micro-batches of 2 x 8 tokens."""

    def compute_losses(micro_batch):
        total, token_losses = decoder(micro_batch.input_ids, labels=micro_batch.labels)
        return total * factor, token_losses * factor

    return optimizer_step(batch, compute_losses, optimizer, micro_batch_size=2, **{"lr_factor": 1.0} | options)


def test_it_is_the_step_of_a_few_lines_of_torch():
    """The gradient is that of the mean over the unmasked targets, whatever micro-batch they are in."""
    mask = torch.rand(6, 8, generator=torch.Generator().manual_seed(2)) > 0.4
    batch, (decoder, optimizer) = make_batch(mask=mask), make_model()
    result = run_step(decoder, optimizer, batch, lr_factor=0.3, max_norm=0.5)

    reference, _ = make_model()
    matrices, vectors = ([p for p in reference.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    plain = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                              lr=3e-3, betas=(0.9, 0.95), eps=1e-3)  # fmt: skip  # a small eps would amplify rounding
    loss = torch.nn.functional.cross_entropy(reference(batch.input_ids).flatten(0, 1), batch.labels.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    plain.step()
    torch.testing.assert_close([result.loss, result.grad_norm], [loss.detach(), norm], rtol=1e-5, atol=1e-6)
    assert result.num_targets == mask.sum() and norm > 0.5
    for name, weight in decoder.named_parameters():
        torch.testing.assert_close(weight, reference.get_parameter(name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_a_step_that_is_not_finite_changes_no_weight(kind):
    decoder, optimizer = make_model()
    if kind == "torch's":
        optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    before = [weight.clone() for weight in decoder.parameters()]
    assert not run_step(decoder, optimizer, make_batch(), factor=torch.nan).finite
    assert all(map(torch.equal, decoder.parameters(), before))
    optimizer.zero_grad()
    assert run_step(decoder, optimizer, make_batch(), lr_factor=0.5).finite
    assert not any(map(torch.equal, decoder.parameters(), before))
    assert {(group["lr"], group["peak_lr"]) for group in optimizer.param_groups} == {(5e-3, 1e-2)}


def test_gradients_stay_on_their_rank_but_for_the_last_micro_batch():
    held, order = [], []
    decoder, optimizer = make_model()

    class Held:
        def __enter__(self):
            held.append(True)

        def __exit__(self, *exception):
            held.append(False)

    def backward(loss):
        order.append(len(held))
        loss.backward()

    run_step(decoder, optimizer, make_batch(), no_sync=Held, backward=backward)
    assert held == [True, False, True, False] and order == [1, 3, 4]

"""The validation sums are exact and do not depend on how tokens fell into batches."""

import math

import pytest
import torch

from lm.evaluation.metrics import TokenLoss, loss_metrics

TOKEN_BYTES = torch.tensor([0, 1, 2, 5])


def sample(rows=6, length=50):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.1] = -100
    return torch.rand(rows, length, generator=generator), labels


def reference(losses, labels):
    """The definition, a token at a time."""
    pairs = [(x, y) for x, y in zip(losses.flatten().tolist(), labels.flatten().tolist(), strict=True) if y != -100]
    text = [(x, TOKEN_BYTES[y].item()) for x, y in pairs if TOKEN_BYTES[y] > 0]
    loss = math.fsum(x for x, _ in pairs) / len(pairs)
    return {
        "loss": loss,
        "bits_per_byte": math.fsum(x for x, _ in text) / sum(size for _, size in text) / math.log(2),
        "tokens": len(pairs),
    }


@pytest.mark.parametrize("size", [1, 4, 6])
def test_means_are_those_of_all_tokens_however_they_are_batched(size):
    losses, labels = sample()
    metric = TokenLoss()
    for rows, targets in zip(losses.split(size), labels.split(size), strict=True):
        metric.update(rows, targets, TOKEN_BYTES)
    result = {name: value.item() for name, value in metric.compute().items()}
    assert result == pytest.approx(reference(losses, labels), rel=1e-12)


@pytest.mark.parametrize(("losses", "labels", "loss", "tokens", "bits"), [
    ([9.0, 1.0, 2.0], [0, 1, 3], 4, 3, 3 / 6 / math.log(2)),  # tokens of no bytes are left out of nats and bytes alike
    ([2.0, math.nan], [1, -100], 2, 1, 2 / math.log(2)),
    ([0.0, 0.0], [-100, -100], math.nan, 0, math.nan),
], ids=["no bytes", "an ignored label where the loss is nan", "nothing counted"])  # fmt: skip
def test_what_does_not_count(losses, labels, loss, tokens, bits):
    metric = TokenLoss()
    metric.update(torch.tensor([losses]), torch.tensor([labels]), TOKEN_BYTES)
    result = {name: value.item() for name, value in metric.compute().items()}
    expected = {"loss": loss, "bits_per_byte": bits, "tokens": tokens}
    assert result == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("tokens, shares, mean", [
    ([9, 9, 9], [0.5, 0.25, 0.25], 2.25), ([9, 0, 9], [0.5, 0.25, 0.25], 2 + 1 / 3), ([9, 0, 9], [0, 1, 0], 2.5)
])  # fmt: skip
def test_the_loss_of_a_mixture_is_weighted_by_the_shares_of_the_sources_that_are_validated(tokens, shares, mean):
    """Where none of these is trained on, all of them count alike; one without a validation has no loss of its own."""
    losses = torch.tensor([2.0, 2.0 if tokens[1] else math.nan, 3.0], dtype=torch.float64)
    result = {"loss": losses, "bits_per_byte": losses / 2, "tokens": torch.tensor(tokens)}
    found = loss_metrics(result, "val", ["a", "b", "c"], torch.tensor(shares, dtype=torch.float64))
    each = {f"val/loss/{name}": loss for name, loss, count in zip("abc", (2, 2, 3), tokens) if count}
    each |= {name.replace("loss", "bpb"): value / 2 for name, value in each.items()}
    expected = {"val/loss": mean, "val/bpb": mean / 2, "val/perplexity": math.exp(mean), **each}
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected)


def test_sums_stay_exact_over_many_tokens_and_in_a_half_precision_module():
    """A hundred million tokens: fp32 sums would have lost the last ones."""
    module = torch.nn.ModuleDict({"metric": TokenLoss()}).to(torch.bfloat16)
    metric = module["metric"]
    assert metric.nats.dtype == torch.float64
    metric.update(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.long), TOKEN_BYTES)
    metric.nats += 1e8
    metric.tokens += 1e8
    metric.update(torch.full((1, 1), 3.0), torch.ones(1, 1, dtype=torch.long), TOKEN_BYTES)
    assert metric.nats.item() == 1e8 + 4 and metric.tokens.item() == 1e8 + 2
    metric.reset()
    assert metric.nats.item() == 0 and metric.nats.dtype == torch.float64


def test_sums_are_taken_over_ranks():
    """Of two, the second of which has twice as much."""
    metric = TokenLoss()
    metric.update(*sample(), TOKEN_BYTES)
    alone = [getattr(metric, name).item() for name in metric.SUMS]
    metric.sync(dist_sync_fn=lambda value, group=None: [value, 2 * value], distributed_available=lambda: True)
    assert [getattr(metric, name).item() for name in metric.SUMS] == pytest.approx([3 * value for value in alone])


def test_update_waits_for_no_device():
    """On the meta device nothing has a value, so anything that reads one fails."""
    metric = TokenLoss().to("meta")
    losses, labels = (tensor.to("meta") for tensor in sample())
    metric.update(losses, labels, TOKEN_BYTES.to("meta"))
    assert metric.nats.is_meta and metric.text_bytes.is_meta

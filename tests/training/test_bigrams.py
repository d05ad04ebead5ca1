"""`trainer.bigram_steps`: a new model begins with which token follows which in its data."""

import pytest
import torch
from trainings import fit, trace, validations

from lm.training.callbacks import bigrams
from lm.training.callbacks.bigrams import count_bigrams, fit_bigrams

VOCAB, WIDTH = 40, 48


@pytest.fixture
def chain():
    """Tokens of a Markov chain (n,), and its entropy in nats."""
    generator = torch.Generator().manual_seed(0)
    rates = torch.rand(VOCAB, VOCAB, generator=generator).pow(6)
    rates /= rates.sum(1, keepdim=True)
    tokens = [0]
    for _ in range(20_000):
        tokens.append(int(torch.multinomial(rates[tokens[-1]], 1, generator=generator)))
    shares = torch.bincount(torch.tensor(tokens), minlength=VOCAB) / len(tokens)
    return torch.tensor(tokens), float(-(shares[:, None] * torch.xlogy(rates, rates)).sum())


def fitted(tokens, steps):
    torch.manual_seed(1)
    embedding, output = torch.randn(VOCAB, WIDTH) * 0.02, torch.randn(VOCAB, WIDTH) * 0.02
    return embedding, output, fit_bigrams(embedding, output, *count_bigrams(tokens[:-1], tokens[1:], VOCAB), steps)


def test_pairs_are_counted_but_for_masked_labels():
    ids, labels = torch.tensor([[3, 1, 3, 1]]), torch.tensor([[1, 3, 1, -100]])
    pairs, counts = count_bigrams(ids, labels, 5)
    assert dict(zip(pairs.tolist(), counts.tolist())) == {3 * 5 + 1: 2, 1 * 5 + 3: 1}


def test_the_two_matrices_learn_the_chain(chain, monkeypatch):
    tokens, entropy = chain
    embedding, output, loss = fitted(tokens, 40)
    assert entropy - 0.1 < loss < entropy + 0.15
    normed = torch.nn.functional.rms_norm(embedding, (WIDTH,))
    assert torch.allclose(embedding, normed, atol=1e-4)  # rows with a root mean square of 1
    own = torch.nn.functional.cross_entropy(normed[tokens[:-1]] @ output.T, tokens[1:])
    assert abs(own - loss) < 0.05  # which was measured before the last step
    monkeypatch.setattr(bigrams, "CHUNK", 7 * VOCAB)  # rows in parts, of which the last is smaller
    in_parts = fitted(tokens, 40)
    assert torch.allclose(in_parts[0], embedding, atol=1e-3) and abs(in_parts[2] - loss) < 1e-4


UNTIED = {"model.decoder.tie_word_embeddings": False, "trainer.max_steps": 4}
OF_BIGRAMS = {"trainer.bigram_steps": 20, **UNTIED}


def first_loss(place):
    return float.fromhex(trace(place)[0]["loss"])


def test_a_new_run_begins_with_them_and_a_resume_does_not(workplace):
    fit(workplace, "without", **UNTIED)
    before = first_loss(workplace)
    ended, _ = fit(workplace, "small", **OF_BIGRAMS)
    assert first_loss(workplace) < before - 0.5
    assert "bigrams of 1.02K tokens, in 20 steps and " in ended.stderr
    again, _ = fit(workplace, "small", "--ckpt_path", "auto", **{**OF_BIGRAMS, "trainer.max_steps": 5})
    assert "bigrams of" not in again.stderr


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_every_rank_begins_with_the_same(workplace, strategy):
    plain = OF_BIGRAMS | {"model.decoder.dropout": 0, "trainer.val_interval": 1}
    _, one = fit(workplace, f"one-{strategy}", **plain)
    ranks = {"trainer.devices": 2, "trainer.strategy": strategy, "data.micro_batch_size": 4}
    _, two = fit(workplace, strategy, **plain, **ranks)
    assert validations(two) == pytest.approx(validations(one), abs=1e-4)

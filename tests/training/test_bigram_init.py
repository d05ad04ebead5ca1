"""`trainer.bigram_init`: a new model begins with which token follows which in its data."""

import pytest
import torch
import torch.nn.functional as F
from test_own_model import FILES
from trainings import fit, trace, validations

from lm.training.callbacks.bigram_init import count_bigrams, factorize

VOCAB = 200


@pytest.fixture
def tokens():
    """Tokens of a Markov chain (n,) in which each of ten kinds of tokens is followed by its own few kinds."""
    generator = torch.Generator().manual_seed(0)
    rates = torch.rand(10, VOCAB, generator=generator).pow(8)
    tokens = [0]
    for _ in range(50_000):
        tokens.append(int(torch.multinomial(rates[tokens[-1] % 10], 1, generator=generator)))
    return torch.tensor(tokens)


def test_nothing_to_count_is_finite():
    assert all(matrix.isfinite().all() for matrix in factorize(torch.zeros(9, 9, dtype=torch.int64), 4))


def test_pairs_are_counted_but_for_ignored_labels():
    counts = count_bigrams(torch.tensor([[3, 1, 3, 1]]), torch.tensor([[1, 3, 1, -100]]), 5)
    assert counts.shape == (5, 5) and counts.sum() == 3 and counts[3, 1] == 2 and counts[1, 3] == 1


@pytest.mark.parametrize("vocab_size, width, default", [
    (VOCAB, 32, torch.float32), (VOCAB, 256, torch.float32),  # a third is lost to few columns
    (10 * VOCAB, 32, torch.float32),  # most tokens never occur
    (VOCAB, 32, torch.bfloat16),  # as for `trainer.precision: bf16-true`
])  # fmt: skip
def test_the_logits_are_about_the_logs_of_the_probabilities(tokens, vocab_size, width, default):
    counts = count_bigrams(tokens[:-1], tokens[1:], vocab_size)
    torch.manual_seed(1)
    torch.set_default_dtype(default)
    try:
        embedding, output = factorize(counts, width)
    finally:
        torch.set_default_dtype(torch.float32)
    lengths = embedding.square().mean(1)  # which RMSNorm leaves as they are
    assert torch.allclose(lengths, torch.ones(vocab_size), atol=1e-3)
    loss = F.cross_entropy(F.rms_norm(embedding, (width,))[tokens[:-1]] @ output.T, tokens[1:])
    shares, pairs = counts.sum(0) / counts.sum(), counts / counts.sum(1, keepdim=True).clamp(min=1)
    unigram = -torch.xlogy(shares, shares).sum()
    bigram = -(counts * pairs.clamp(min=1e-9).log()).sum() / counts.sum()
    assert bigram < loss < bigram + 0.35 * (unigram - bigram)


UNTIED = {"model.decoder.tie_word_embeddings": False, "trainer.max_steps": 4}
BIGRAMS = {"trainer.bigram_init": True, **UNTIED}


def test_a_new_run_begins_with_bigrams_and_a_resume_does_not(workplace):
    fit(workplace, "without", **UNTIED)
    before = float.fromhex(trace(workplace)[0]["loss"])
    ended, _ = fit(workplace, "small", **BIGRAMS)
    assert float.fromhex(trace(workplace)[0]["loss"]) < before - 0.5
    assert "embedding and output: from bigrams of 1.02K tokens, in " in ended.stderr
    again, _ = fit(workplace, "small", "--ckpt_path", "auto", **{**BIGRAMS, "trainer.max_steps": 5})
    assert "bigrams of" not in again.stderr


def test_tied_matrices_and_custom_models_keep_their_weights(workplace):
    (workplace / "my_gru.py").write_text(FILES["my_gru.py"])
    for program, tied in ([], True), (["my_gru.py"], False):
        losses = []
        for wanted in (False, True):
            changes = {**UNTIED, "trainer.bigram_init": wanted, "model.decoder.tie_word_embeddings": tied}
            ended, _ = fit(workplace, "kept", program=program, **changes)
            losses.append(trace(workplace)[0]["loss"])
            assert ("trainer.bigram_init is left out" in ended.stderr) == wanted
        assert losses[0] == losses[1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_every_rank_begins_with_the_same(workplace, strategy):
    plain = BIGRAMS | {"model.decoder.dropout": 0, "trainer.val_interval": 1}
    _, one = fit(workplace, f"one-{strategy}", **plain)
    ranks = {"trainer.devices": 2, "trainer.strategy": strategy, "data.micro_batch_size": 4}
    _, two = fit(workplace, strategy, **plain, **ranks)
    assert validations(two) == pytest.approx(validations(one), abs=1e-4)

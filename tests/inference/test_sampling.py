"""The choice of a token: the probabilities that transformers' filters leave, drawn as often as they say."""

import pytest
import torch
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lm.errors import RequestError
from lm.inference.generation import candidates, choose_tokens
from lm.inference.sampling import Sampling

CASES = [
    Sampling(), Sampling(0.7), Sampling(top_k=7), Sampling(1.3, 1000), Sampling(top_p=0.9), Sampling(0.5, None, 0.3),
    Sampling(1.5, 20, 0.6), Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(top_p=1.0), Sampling(1.2, 30, 0.8),
]  # fmt: skip


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distribution(logits, sampling):
    """The probabilities of all tokens, `(B, V)`."""
    weights, ids = candidates(logits, sampling)
    ids = torch.arange(logits.shape[1]).expand(len(logits), -1) if ids is None else ids
    return torch.zeros_like(logits).scatter(1, ids, weights / weights.sum(-1, keepdim=True))


def processors(sampling):
    """Transformers', in its order."""
    made = [TemperatureLogitsWarper(sampling.temperature)]
    made += [] if sampling.top_k is None else [TopKLogitsWarper(sampling.top_k)]
    made += [] if sampling.top_p is None else [TopPLogitsWarper(sampling.top_p)]
    return LogitsProcessorList(made)


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_probabilities_are_those_of_transformers(sampling):
    logits = torch.randn(5, 101, generator=seeded()) * 3
    ids = torch.randint(101, (5, 30), generator=seeded(1))  # some twice
    expected = processors(sampling)(ids, logits.clone()).softmax(-1)
    torch.testing.assert_close(distribution(logits, sampling), expected)


@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(0.8, 6, 0.9)], ids=str)
def test_tokens_come_as_often_as_their_probabilities_say(sampling):
    """Pearson's chi-square of 20,000 draws, below what one in a million would exceed; what is left out never comes."""
    logits, draws = torch.randn(12, generator=seeded(1)), 20_000
    tokens = choose_tokens(logits.expand(draws, -1), sampling, seeded(2))
    expected = draws * distribution(logits[None], sampling)[0]
    counted = tokens.bincount(minlength=12)
    possible = expected > 0
    assert counted[~possible].sum() == 0
    chi_square = ((counted - expected).square() / expected)[possible].sum()
    degrees = int(possible.sum()) - 1
    assert torch.special.gammaincc(torch.tensor(degrees / 2), chi_square / 2) > 1e-6


def test_a_row_takes_one_random_number_whatever_the_filters():
    """So that a seed's other rows and steps do not change with them."""
    logits = torch.randn(3, 50, generator=seeded())
    after = []
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.2)):
        generator = seeded(7)
        choose_tokens(logits, sampling, generator)
        after.append(torch.rand(1, generator=generator).item())
    assert len(set(after)) == 1


def test_a_low_temperature_is_greedy_and_nothing_overflows():
    logits = torch.tensor([[3e38, 1.0, 2e38], [-3e38, -2e38, -2.5e38]])
    assert choose_tokens(logits, Sampling(1e-30), seeded()).tolist() == [0, 1]
    assert choose_tokens(logits, Sampling(0), seeded()).tolist() == [0, 1]


@pytest.mark.parametrize("options, words", [
    ({"temperature": -0.1}, "temperature -0.1 must not be below 0"),
    ({"temperature": float("nan")}, "temperature nan"),
    ({"temperature": float("inf")}, "temperature inf"),
    ({"top_k": 0}, "top_k 0 must be at least 1"),
    ({"top_p": 0.0}, r"top_p 0.0 must lie in \(0, 1\]"),
    ({"top_p": 1.1}, "top_p 1.1"),
    ({"max_new_tokens": 0}, "max_new_tokens 0 must be at least 1"),
    ({"stop": ["a", ""]}, "a stop string is empty"),
])  # fmt: skip
def test_numbers_that_mean_nothing_are_refused(options, words):
    with pytest.raises(RequestError, match=words):
        Sampling(**options)

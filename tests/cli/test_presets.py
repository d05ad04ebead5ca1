"""Every preset parses, comes out even on one device and on a node, and builds at the size that it says."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lm.cli import request
from lm.model.decoder import Decoder
from lm.model.estimates import parameters
from lm.training.schedule import lr_fraction

FOLDER = Path(__file__).parent.parent.parent / "configs"
CONFIGS = sorted([*FOLDER.glob("*.yaml"), *FOLDER.glob("published/*.yaml")])
# config -> (parameters outside the embedding in millions, vocabulary (4,096 are built where it has none), tokens of a
# step, optimizer steps)
SIZES = {
    "tiny": (1.38, None, 8_192, 300),
    "char": (5.8, None, 8_192, 2_000),
    "shakespeare": (1.30, None, 768, 2_000),
    "shakespeare-10m": (12.2, None, 16_384, 5_000),
    "pretrain-50m": (50.3, 50_304, 524_288, 19_074),
    "pretrain-300m": (251.7, 50_304, 131_072, 100_000),
    "pretrain-350m": (364.9, 32_768, 524_288, 14_306),
    "depth12": (110.1, 32_768, 262_144, 8_402),
}


def parse(path):
    """A preset, parsed as `lm plan` and `lm fit` parse it."""
    return request.read("plan", ["--config", str(path)])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_builds_at_its_size_and_comes_out_even(path):
    size, vocab_size, tokens, steps = SIZES[path.stem.removesuffix("-adamw")]
    config = parse(path)
    decoder = config.model.decoder
    assert decoder.vocab_size == vocab_size and decoder.head_dim == decoder.hidden_size // decoder.num_attention_heads
    decoder.vocab_size = decoder.vocab_size or 4_096
    with torch.device("meta"):
        model = Decoder(decoder)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == parameters(decoder)["total"]
    embedding = decoder.vocab_size * decoder.hidden_size
    assert (counted - embedding) / 1e6 == pytest.approx(size, rel=0.03)
    for world in (1, 2, 4, 8) if path.stem not in ("tiny", "char", "shakespeare", "shakespeare-10m") else (1,):
        plan = config.steps(world)
        assert plan.tokens_per_step == tokens and (steps is None or plan.max_steps == steps)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_first_loss_is_that_of_guessing(path):
    """Within 3 % of ln V, at the width and vocabulary of the preset; two blocks are enough to see it."""
    torch.manual_seed(1)
    model = parse(path).model
    config = replace(model.decoder, vocab_size=model.decoder.vocab_size or 4_096, num_hidden_layers=2)
    ids = torch.randint(config.vocab_size, (1, 65))
    with torch.no_grad():
        loss = Decoder(config)(ids[:, :-1], ids[:, 1:]).total.item() / 64
    assert loss == pytest.approx(math.log(config.vocab_size), rel=0.03)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_warm_up_is_a_small_share_and_the_rate_ends_at_its_fraction(path):
    config = parse(path).model
    steps = SIZES[path.stem.removesuffix("-adamw")][3]
    assert config.schedule.warmup_steps <= 0.1 * steps
    end = 0.05 if config.optimizer.name == "muon" else 0.1
    assert lr_fraction(steps, steps, config.schedule) == pytest.approx(end)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_number_has_a_comment(path):
    bare = [line for line in path.read_text().splitlines() if re.match(r"\s*\w+: \[?[\d.]", line) and " # " not in line]
    assert bare == []


@pytest.mark.parametrize("path", FOLDER.glob("published/*.yaml"), ids=lambda path: path.stem)
def test_the_recipe_keeps_the_published_shape(path):
    """Norms of queries and keys, and other initial weights, are all that the recipe adds; data and length are equal.
    Heads may be wider, as many times as they are fewer."""
    files = path, FOLDER / f"{path.stem.removesuffix('-adamw')}.yaml"
    first, second = map(parse, files)
    published, ours = first.model, second.model
    assert (published.optimizer.name, ours.optimizer.name) == ("adamw", "muon")
    as_published = {"qk_norm": False, "zero_init_residual": False} | {
        name: getattr(published.decoder, name)
        for name in ("dropout", "initializer_range", "num_attention_heads", "num_key_value_heads", "head_dim")
    }  # fmt: skip
    assert replace(ours.decoder, **as_published) == published.decoder
    ours_in_parts, published_in_parts = parameters(ours.decoder), parameters(published.decoder)
    assert all(ours_in_parts[part] == published_in_parts[part] for part in ("embedding", "attention", "mlp"))
    assert first.data == second.data and first.trainer == second.trainer

"""What is shown of a model is what the model does: numbers against independent ones, pictures that read."""

import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from decoders import SHAPES, SMALL, trained_like, write_huggingface
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM

from lm.data.tokenizer_training import train_char
from lm.errors import RequestError
from lm.inference.pretrained import Pretrained
from lm.inspection import drawing, text_views, weights
from lm.model.config import DecoderConfig

LETTERS = train_char([" !.,$<>'abcdefghijklmnopqrstuvwxyz\n"])
TEXT = "the people of the united states"


def ready(config: DecoderConfig = SMALL, seed: int = 0, tokenizer=LETTERS) -> Pretrained:
    """A model with a tokenizer of letters, whose weights depend on the seed."""
    decoder = trained_like(config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight += 0.05 * seed * torch.randn_like(weight)
    return Pretrained(Path("nowhere"), decoder.requires_grad_(False), tokenizer, None, "plain PyTorch")


def check_picture(picture: Figure) -> None:
    """It is drawn without a complaint, a notebook shows it, and every pair of axes says what it is of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert picture._repr_png_().startswith(b"\x89PNG")
    for axes in picture.axes:
        assert axes.get_title() or axes.get_xlabel() or axes.get_ylabel() or picture.get_suptitle()


def test_the_weights_of_a_custom_model_have_its_own_names():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    assert list(weights.named_weights(model)) == ["0.weight", "0.bias"]
    assert list(weights.weight_histograms(model)) == ["0.weight"]


def test_histograms_are_densities_of_each_matrix():
    decoder = trained_like(SMALL)
    found = weights.weight_histograms(decoder, bins=20)
    assert len(found) == 1 + 7 * SMALL.num_hidden_layers
    for density, edges in found.values():
        assert (density * np.diff(edges)).sum() == pytest.approx(1)
    keys = decoder.layers[1].self_attn.qkv_proj.weight[48:96]
    _, edges = found["model.layers.1.self_attn.k_proj.weight"]
    assert (edges[0], edges[-1]) == pytest.approx((keys.min().item(), keys.max().item()))


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_maps_are_those_of_transformers_eager_attention(config, tmp_path):
    decoder = trained_like(config)
    folder = write_huggingface(decoder, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.randint(config.vocab_size, (1, 40))
    with torch.no_grad():
        expected = torch.stack(theirs(ids, output_attentions=True).attentions)[:, 0]  # (layers, heads, T, T)
    maps = text_views.attention_maps(decoder, ids[0].tolist())
    assert maps.shape == (config.num_hidden_layers, config.num_attention_heads, 40, 40)
    np.testing.assert_allclose(maps, expected.numpy(), atol=1e-5)
    assert maps.std(-1).max() > 0.01  # the comparison is of something


def test_tokens_of_a_text_stand_beside_its_maps():
    with pytest.raises(RequestError, match="longer than max_position_embeddings"):
        text_views.attention_maps(ready().decoder, [1] * 65)
    found = text_views.attention_of(ready(), "we a\n")
    assert found.tokens == ["<|endoftext|>", "w", "e", "␣", "a", "↵"] and found.maps.shape[-2:] == (6, 6)


def test_models_of_other_tokenizers_are_not_compared():
    other = ready(tokenizer=train_char(["other letters"]))
    with pytest.raises(RequestError, match="different tokenizers"):
        weights.distribution_drift(ready(), other, [TEXT])


def test_divergence_of_a_text_is_that_of_the_definition_token_by_token():
    """A text of several windows and chunks: every token once, in its window, against logits of the whole window."""
    before, after = ready(), ready(seed=1)
    text = (TEXT + "\n") * 8  # 256 tokens: four windows of the context
    found = weights.distribution_drift(before, after, ["", text])
    ids = torch.tensor([LETTERS.eos_id, *LETTERS.encode(text)])
    logs = [
        torch.cat([model.decoder(ids[start : start + 64][None])[0] for start in range(0, 256, 64)])
        [:, : LETTERS.vocab_size].double().log_softmax(-1)
        for model in (before, after)
    ]  # fmt: skip
    middle = torch.logaddexp(*logs) - math.log(2)
    expected = sum((log.exp() * (log - middle)).sum(-1) for log in logs) / 2 / math.log(2)
    assert "".join(found.tokens) == text
    np.testing.assert_allclose(found.divergence, expected.numpy(), atol=1e-6)
    assert (found.agree == (logs[0].argmax(-1) == logs[1].argmax(-1)).numpy()).all() and not found.agree.all()
    assert 0.01 < found.divergence.mean() < 1
    alike = weights.distribution_drift(before, ready(), [text])
    assert alike.divergence.max() < 1e-12 and alike.agree.all()


def test_expectations_are_the_models_own_losses():
    model = ready()
    text = TEXT * 3  # longer than the context
    found = text_views.expectations(model, text, alternatives=3)
    assert "".join(one.text for one in found) == text
    ids = torch.tensor([LETTERS.eos_id, *LETTERS.encode(text)])
    logs = torch.cat([model.decoder(ids[:64][None])[0], model.decoder(ids[64:-1][None])[0]]).log_softmax(-1)
    for place, (one, log, token) in enumerate(zip(found, logs, ids[1:].tolist(), strict=True)):
        assert math.log(one.probability) == pytest.approx(log[token].item(), abs=1e-4), place
        assert [chance for _, chance in one.alternatives] == pytest.approx(log.exp().topk(3).values.tolist(), rel=1e-4)
    assert text_views.expectations(model, "") == []


@pytest.mark.parametrize("prompt", ["the people", ""])
def test_what_was_written_cost_what_the_writer_said(prompt):
    model = ready()
    written = model.generate(prompt, max_new_tokens=20, seed=1, ignore_eos=True)[0]
    found = text_views.expectations(model, written)
    assert len(found) == len(written.tokens) == 20
    for one, token in zip(found, written.tokens, strict=True):
        assert math.log(one.probability) == pytest.approx(token.log_probability, abs=1e-4)


def test_text_on_a_page_is_text_whatever_it_says():
    page = drawing.colored_text(["a", "<b>&", "c"], [None, 0.5, 0.0], ["", "it's <i>", ""])._repr_html_()
    assert "<b>" not in page and "&lt;b&gt;&amp;" in page and "it&#x27;s &lt;i&gt;" in page
    assert f"background:{drawing.VERMILION}ff" in page  # as strong as it gets
    sheet = drawing.table([("<b>", 1234, 0.5, math.nan)], ("x", "y", "z", "<w>"), "a & b")._repr_html_()
    assert "<b>" not in sheet and "1,234" in sheet and "0.5" in sheet and "nan" not in sheet and "&lt;w&gt;" in sheet
    assert drawing.table([], ("x",)).source.count("<tr>") == 1
    assert drawing.visible(" a\n") == "␣a↵" and drawing.visible("") == "∅"


def test_every_picture_of_a_model_is_drawn():
    """Also of awkward texts: two dollars would be a formula, and a model of one layer and one head has one cell."""
    single = replace(SMALL, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=48)
    for config in (replace(single, tie_word_embeddings=False), SHAPES["qwen3, windows"]):
        model, other = ready(config), ready(config, seed=1)
        seen = text_views.attention_of(model, "a $b$ is < c\n")
        expected = text_views.expectations(model, "a $b$ is < c\n")
        for picture in (
            weights.draw_histograms(weights.weight_histograms(model.decoder)),
            text_views.draw_attention(seen, 0),
            weights.draw_divergence(weights.distribution_drift(model, other, [TEXT])),
        ):  # fmt: skip
            check_picture(picture)
        assert "a" in text_views.color_expectations(expected).source


def test_written_text_is_shown_with_its_alternatives():
    model = ready()
    written = model.generate("a", max_new_tokens=5, seed=3, ignore_eos=True)[0]
    expected = text_views.expectations(model, written, 2)
    assert len(expected) == 5 and all(len(one.alternatives) == 2 for one in expected)
    page = text_views.color_written(written).source
    assert page.count("<span") == 1 + 5 + len(drawing.LEGEND)

"""Texts out of a decoder: handed out when they are sure, whole characters, and never what a stop string takes away."""

import pytest
import torch
from decoders import SMALL, continued, trained_like
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lm.data.tokenizer import Tokenizer
from lm.data.tokenizer_training import train_bpe, train_char
from lm.inference.completion import BROKEN, GrowingText, gather_texts, generate_text
from lm.inference.sampling import Sampling
from lm.model.decoder import Decoder

TEXT = "Zwölf Boxkämpfer jagen 维克托 über den Sylter Deich. \U0001f469\u200d\U0001f680 — naïve façade, 12 °C!\n\n ok "


def sentencepiece_like() -> Tokenizer:
    """As Llama 2's: blanks are written as blocks, the first one of a text is left out, and bytes have tokens."""
    words = ["▁", "▁den", "▁S", "y", "l", "t", "er", "▁De", "ich", ".", "Z", "w", "f", "ch"]
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend.to_str())


def metaspace() -> Tokenizer:
    """As sentencepiece's unigrams are written in `tokenizer.json`."""
    pieces = ["<unk>", "</s>", "▁", "▁a", "▁ab", "a", "b", "c", "▁c", "."]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend.to_str())


TOKENIZERS = {
    "bytes": lambda: train_bpe([TEXT], 258),
    "pairs": lambda: train_bpe([TEXT * 3], 300),
    "characters": lambda: train_char([TEXT]),
    "sentencepiece": sentencepiece_like,
    "metaspace": metaspace,
}


@pytest.fixture(params=TOKENIZERS.values(), ids=TOKENIZERS.keys())
def tokenizer(request):
    return request.param()


def grown(tokenizer, prompt, tokens, stop=()):
    """What a text hands out for each token, and at the end."""
    text, taken = GrowingText(tokenizer, prompt, stop), []
    for index, token in enumerate(tokens):
        found = text.add(token)
        taken.append(text.take(over=found or index == len(tokens) - 1))
        if found:
            break
    return taken


@pytest.mark.parametrize("encode_prompt", [0, 1, 7, 30])
def test_pieces_are_whole_characters_and_make_the_text(tokenizer, encode_prompt):
    """Divided anywhere between the tokens of a prompt's characters."""
    text = TEXT if tokenizer.vocab_size > 20 else "ab a c. abc"
    before, after = text[:encode_prompt], text[encode_prompt:]
    prompt = tokenizer.encode(before) or [tokenizer.eos_id]
    tokens = tokenizer.encode(before + after)
    tokens = tokens[len(prompt) :] if tokens[: len(prompt)] == prompt else tokenizer.encode(after)
    taken = grown(tokenizer, prompt, tokens)
    assert "".join(taken) == continued(tokenizer, prompt, tokens)
    assert not any(BROKEN in piece for piece in taken)
    assert len([piece for piece in taken if piece]) > len(tokens) / 5 or not tokens  # as it comes, not at the end


@pytest.mark.parametrize("seed", range(5))
def test_any_tokens_make_the_text_that_they_make_together(seed):
    """Bytes at random, of which most are no characters."""
    tokenizer = train_bpe([TEXT], 258)
    tokens = torch.randint(1, 257, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
    assert "".join(grown(tokenizer, [1, 2], tokens)) == continued(tokenizer, [1, 2], tokens)


def test_a_character_that_is_never_whole_is_shown_as_broken_at_the_end():
    for tokenizer in (train_bpe([TEXT], 258), sentencepiece_like()):
        tokens = tokenizer.encode("维维")[-6:]  # a byte each
        taken = grown(tokenizer, [tokenizer.eos_id], tokens[:5])
        assert taken[:4] == ["", "", "维", ""] and set(taken[4]) == {BROKEN}


@pytest.mark.parametrize("stop, expected", [
    (["den"], "Zwölf Boxkämpfer jagen 维克托 über "), (["Sylter", "über den"], "Zwölf Boxkämpfer jagen 维克托 "),
    (["维x", "克"], "Zwölf Boxkämpfer jagen 维"), (["\n\n"], TEXT[: TEXT.index("\n")]), (["Z"], ""), (["xyz"], TEXT),
    (["k "], TEXT[:-2]), (["k  "], TEXT),
])  # fmt: skip
@pytest.mark.parametrize("name", ["bytes", "pairs", "characters"])
def test_a_text_ends_before_the_first_stop_string(name, stop, expected):
    tokenizer = TOKENIZERS[name]()
    taken = grown(tokenizer, [tokenizer.eos_id], tokenizer.encode(TEXT), stop)
    assert "".join(taken) == expected


def test_what_may_become_a_stop_string_is_held_back():
    tokenizer = train_char(["abcx"])
    assert grown(tokenizer, [0], tokenizer.encode("aabxabcx"), ["abc"]) == ["", "a", "", "abx", "", "", ""]
    assert grown(tokenizer, [0], tokenizer.encode("xab"), ["abc"]) == ["x", "", "ab"]


@pytest.fixture(scope="module")
def pair():
    """A decoder with 101 tokens, and a tokenizer for as many characters."""
    tokenizer = train_char(["".join(map(chr, range(0x100, 0x100 + 99)))])
    return trained_like(SMALL), tokenizer


def complete(decoder, tokenizer, prompts, **options):
    return gather_texts(prompts, generate_text(decoder, tokenizer, prompts, Sampling(**options)))


PROMPTS = ["\u0101\u0102\u0103\u0104", "", "\u0110"]


def test_texts_tokens_and_figures_belong_together(pair):
    decoder, tokenizer = pair
    options = {"max_new_tokens": 20, "temperature": 0.8, "top_p": 0.9, "seed": 5, "ignore_eos": True}
    written = complete(decoder, tokenizer, PROMPTS, **options)
    assert [one.prompt for one in written] == PROMPTS
    for one in written:
        assert one.reason == "length" and len(one.tokens) == 20
        assert one.text == "".join(token.text for token in one.tokens)
        assert one.text == tokenizer.decode([token.id for token in one.tokens])
    assert written == complete(decoder, tokenizer, PROMPTS, **options)
    assert written != complete(decoder, tokenizer, PROMPTS, **{**options, "seed": 6})


def test_a_stop_string_and_the_end_of_a_document_end_a_row_alone(pair):
    decoder, tokenizer = pair
    plain = complete(decoder, tokenizer, PROMPTS, max_new_tokens=20, seed=1)
    stop = plain[0].text[6:8]
    stopped = complete(decoder, tokenizer, PROMPTS, max_new_tokens=20, seed=1, stop=[stop])
    assert stopped[0].reason == "stop" and stopped[0].text == plain[0].text[: plain[0].text.index(stop)]
    assert stopped[0].tokens == plain[0].tokens[: len(stopped[0].text) + 2]
    assert all(one == other for one, other in zip(stopped[1:], plain[1:], strict=True) if stop not in other.text)
    tokenizer = Tokenizer(tokenizer.text, eos_token=plain[1].tokens[4].text)
    ended = complete(decoder, tokenizer, PROMPTS[:1] + PROMPTS[2:], max_new_tokens=20, seed=1)
    on = complete(decoder, tokenizer, PROMPTS[:1] + PROMPTS[2:], max_new_tokens=20, seed=1, ignore_eos=True)
    assert {one.reason for one in on} == {"length"} and all(len(one.tokens) == 20 for one in on)
    for one, other in zip(ended, on, strict=True):
        assert one.tokens == other.tokens[: len(one.tokens)]
        assert (one.reason == "eos") == (tokenizer.eos_id in [token.id for token in other.tokens])


def test_a_vocabulary_that_is_wider_than_the_tokenizers_is_no_harm():
    tokenizer = train_char(["abc"])
    [written] = complete(Decoder(SMALL), tokenizer, ["abc"], max_new_tokens=30, temperature=2.0, ignore_eos=True)
    assert len(written.tokens) == 30 and all(token.id < tokenizer.vocab_size for token in written.tokens)
    assert set(written.text) <= set("abc<|endoftext|>unknown")

"""Tokenizers: nothing is lost between text and ids, bytes are counted right, other tools read the files."""

import json
import os
import random
import signal
import sys
import threading
import time
from itertools import repeat
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from other_tokenizers import write_tokenizer
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from lm.data.encoder import KINDS, Encoder, trusted_codes
from lm.data.tokenizer import END_OF_TEXT, UNKNOWN, Tokenizer
from lm.data.tokenizer_training import WORDS, train_bpe, train_char
from lm.errors import RequestError

TEXTS = [
    "It's the first of the fellow-citizens of the Senate; they'll see 1234567 ways.\n\n\tNext line of it\r\n",
    "Größe und Maß, naïve café, 東京の天気は晴れ。 Ελληνικά, русский язык, العربية ٣٤٥",
    "𝒳𝒴𝒵abc 𐐀𐐁𐐂x 𝒳𝒴𝒵abc ١٢٣٤ 1234567 ",
    "def f(x):\n    return x ** 2  # squared\n\n\nclass A:\n\tpass\n" * 3,
]
BPE = train_bpe(TEXTS * 3, 400)
texts = st.text() | st.text(alphabet=KINDS + "alrvedmt<|endoftext|>😀") | st.sampled_from(TEXTS)


def with_pre_tokenizer(step, normalizer=None) -> Tokenizer:
    """The same BPE behind another cut."""
    backend = Backend.from_str(BPE.text)
    backend.pre_tokenizer, backend.normalizer = step, normalizer
    return Tokenizer(backend.to_str())


def sequence(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


@given(texts)
def test_a_learned_bpe_gives_back_any_text(text):
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text and BPE.token_bytes()[ids].sum() == len(text.encode())
    assert BPE.encode_batch([text, ""]) == [ids, []]


def test_an_end_of_text_in_a_text_is_text_and_one_in_ids_is_seen():
    assert BPE.eos_id not in BPE.encode(f"a {END_OF_TEXT} b")
    assert BPE.decode([*BPE.encode("a"), BPE.eos_id]) == f"a{END_OF_TEXT}"
    assert (BPE.eos_id, BPE.token_bytes()[BPE.eos_id]) == (0, 0)


@given(st.text(alphabet=sorted(set("".join(TEXTS)))))
def test_characters_give_back_texts_of_characters_that_were_seen(text):
    characters = train_char(TEXTS)
    ids = characters.encode(text)
    assert characters.decode(ids) == text and len(ids) == len(text)
    assert characters.token_bytes()[ids].sum() == len(text.encode())


def test_characters_are_in_order_and_others_are_unknown():
    characters = train_char(["cab", "▁"])
    assert [characters.decode([i]) for i in range(characters.vocab_size)] == [END_OF_TEXT, UNKNOWN, "a", "b", "c", "▁"]
    assert characters.encode("bzb") == [3, 1, 3]
    assert characters.token_bytes().tolist() == [0, 1, 1, 1, 1, 3]


def save(tokenizer, folder, **options):
    for name, content in tokenizer.files(**options).items():
        (folder / name).write_text(content, encoding="utf-8")


@pytest.mark.parametrize("tokenizer", [BPE, train_char(TEXTS)], ids=["bpe", "char"])
def test_transformers_loads_the_files_and_agrees(tokenizer, tmp_path):
    save(tokenizer, tmp_path, model_max_length=77)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.eos_token_id, theirs.model_max_length) == (tokenizer.eos_id, 77)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == tokenizer.decode(ids)
    again = Tokenizer.load(tmp_path)
    assert (again.sha256, again.eos_id, again.vocab_size) == (tokenizer.sha256, tokenizer.eos_id, tokenizer.vocab_size)


def test_the_ids_of_transformers_without_what_it_adds(tmp_path):
    """As `Tokenizer.encode` says: with a BOS, and with a text that names a special token."""
    write_tokenizer(tmp_path, "llama3", TEXTS)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the law", f"a{END_OF_TEXT}b"):
        ids = ours.encode(text)
        assert theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids
        assert theirs(text, split_special_tokens=True)["input_ids"] == [*ours.prefix, *ids] != ids
    assert theirs(text, add_special_tokens=False)["input_ids"] != ids


@pytest.mark.parametrize("settings", [
    {"model": json.loads(BPE.text)["model"] | {"dropout": 0.5}},
    {"truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}},
    {"padding": {"strategy": {"Fixed": 500}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": END_OF_TEXT}},
])  # fmt: skip
def test_settings_of_a_training_change_no_ids(settings, tmp_path):
    tokenizer = Tokenizer(json.dumps(json.loads(BPE.text) | settings))
    save(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for encode in (tokenizer.encode_batch, Encoder(tokenizer).encode, lambda texts: theirs(texts)["input_ids"]):
        assert [list(ids) for ids in encode(TEXTS)] == BPE.encode_batch(TEXTS)


def test_the_digest_is_of_the_content_and_not_of_its_formatting():
    described = json.loads(BPE.text)
    assert Tokenizer(json.dumps(described)).sha256 == BPE.sha256
    described["model"]["merges"].pop()
    assert Tokenizer(json.dumps(described)).sha256 != BPE.sha256


def test_the_end_of_a_document_is_given_known_or_asked_for(tmp_path):
    words = {word: number for number, word in enumerate(["a", "b", "</s>", "stop"])}
    file = tmp_path / "tokenizer.json"
    file.write_text(Backend(models.WordLevel(words, unk_token="a")).to_str())
    assert Tokenizer.load(file).eos_token == "</s>"
    chosen = Tokenizer.load(file, eos_token="stop")
    assert chosen.eos_id == 3 not in chosen.encode("stop") and chosen.token_bytes().tolist() == [1, 1, 4, 0]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "b"}}))
    assert Tokenizer.load(tmp_path).eos_token == "b"
    assert Tokenizer.load(tmp_path, eos_token="stop").eos_token == "stop"
    with pytest.raises(RequestError, match="has no 'nope' to end a document with; give it with --eos_token"):
        Tokenizer.load(tmp_path, eos_token="nope")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "nope"}))  # which transformers adds
    with pytest.raises(RequestError, match="has no 'nope'"):
        Tokenizer.load(tmp_path)
    del words["</s>"]
    (tmp_path / "tokenizer_config.json").unlink()
    file.write_text(Backend(models.WordLevel(words, unk_token="a")).to_str())
    with pytest.raises(RequestError, match="--eos_token"):
        Tokenizer.load(file)


def test_a_text_that_a_tokenizer_has_no_tokens_for_is_refused():
    tokenizer = Tokenizer(Backend(models.WordLevel({"go": 0, "</s>": 1}, unk_token="<unk>")).to_str())
    assert tokenizer.encode_batch(["go"]) == [[0]]
    with pytest.raises(RequestError, match=r"cannot encode a text \(.*\); use one with a token for every byte"):
        tokenizer.encode_batch(["go", "stop"])


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"not json", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_a_file_that_is_not_a_tokenizer_is_refused_in_one_line(content, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(RequestError, match="tokenizer.json") as caught:
        Tokenizer.load(file)
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match="is not there"):
        Tokenizer.load(tmp_path / "gpt2")


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(RequestError, match="at least 257"):
        train_bpe(TEXTS, 256)
    assert train_bpe(TEXTS, 257).vocab_size == 257


@pytest.mark.parametrize("unit", ["ab", " ", "\n", "=-", "漢字"])
def test_a_word_of_any_length_is_learned_from_in_linear_time(unit):
    text, began = unit * 30_000, time.process_time()
    tokenizer = train_bpe([text, *TEXTS], 300)
    assert time.process_time() - began < 2  # some ten times as long if a merge goes through all of the word
    assert tokenizer.decode(tokenizer.encode(text[:5000])) == text[:5000]
    assert tokenizer.description["pre_tokenizer"] == BPE.description["pre_tokenizer"]


def test_an_interrupt_ends_the_training_of_a_tokenizer_at_once():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a command that ran before may have set its own
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train_bpe(repeat("some words of a text, " * 1000, 2_000), 300)
    assert time.monotonic() - began < 2
    signal.signal(signal.SIGINT, before)


def test_a_tokenizer_that_git_lfs_has_not_fetched_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    with pytest.raises(RequestError, match="tokenizer.json is a pointer of Git LFS.*`git lfs pull`"):
        Tokenizer.load(tmp_path)


def test_bytes_of_sentencepiece_tokens():
    """The block is a blank, a byte token is a byte, added tokens are themselves, specials are nothing."""
    vocabulary = {"<unk>": 0, "</s>": 1, "<0x0A>": 2, "<0xC3>": 3, "▁": 4, "▁ab": 5, "é": 6, "<extra>": 9}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.add_tokens([AddedToken("<extra>", special=False)])
    assert Tokenizer(backend.to_str()).token_bytes().tolist() == [1, 0, 1, 1, 1, 3, 2, 0, 0, 7]


def test_an_end_and_an_unknown_word_are_no_text_though_the_file_does_not_call_them_special():
    tokenizer = Tokenizer(Backend(models.WordLevel({"<unk>": 0, "</s>": 1, "go": 2}, unk_token="<unk>")).to_str())
    assert tokenizer.text_bytes(np.array([2, 1, 2, 2, 1])) == len("go") + len("go go")
    assert tokenizer.text_bytes(np.array([2, 0, 1])) == len("go") + 1  # which counts as one byte


@pytest.mark.parametrize("kind", ["wordpiece", "word_ends", "unigram"])
def test_marks_of_words_are_not_text(kind, tmp_path):
    """The bytes are those of the text, but for one blank at a border of the document."""
    learned = ["the quick brown foxes were jumping over the lazy dogs", "Fellow citizens of the Senate"]
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, kind, learned))
    for text in (learned[0], "quicking overs the foxer citizens"):
        ids = tokenizer.encode(text)
        assert tokenizer.vocabulary[tokenizer.unknown] not in ids
        assert tokenizer.token_bytes()[ids].sum() == len(text.encode()) + 1


# ---- the faster encoder ---------------------------------------------------------------------------------------------
FAST = {
    "ours": BPE,
    "gpt2": with_pre_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefixed": with_pre_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)),
}
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
SLOW = {
    "possessive": with_pre_tokenizer(sequence(r"[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}++| ?[^\s\p{L}\p{N}]++|\s++")),
    "normalized": with_pre_tokenizer(sequence(WORDS), normalizers.NFC()),
    "lines": with_pre_tokenizer(sequence(r"\s+$|\s|\S+")),
    "other braces": with_pre_tokenizer(sequence(r"\p{N}{1,3}+|\p{L}+|[^\p{L}\p{N}]")),  # not possessive to Oniguruma
    "other class": with_pre_tokenizer(sequence(r"\w+|\W")),
    "digits": with_pre_tokenizer(DIGITS),
}
ENCODERS = {name: Encoder(tokenizer) for name, tokenizer in {**FAST, **SLOW, "char": train_char(TEXTS)}.items()}


def test_the_faster_way_is_taken_where_it_is_sure_and_only_there():
    ways = {name: "characters" if encoder._codes is not None else "gigatoken" if encoder.fast else "tokenizers"
            for name, encoder in ENCODERS.items()}  # fmt: skip
    assert ways == {**dict.fromkeys(FAST, "gigatoken"), **dict.fromkeys(SLOW, "tokenizers"), "char": "characters"}


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=150, deadline=None)
@given(batch=st.lists(texts, max_size=3))
def test_the_encoder_gives_the_ids_of_tokenizers(name, batch):
    encoder = ENCODERS[name]
    assert [ids.tolist() for ids in encoder.encode(batch)] == encoder.tokenizer.encode_batch(batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_the_ids_are_equal_at_every_trusted_character(name):
    """Beside a letter, a digit, a blank, an apostrophe and itself; and in many random strings."""
    encoder, draw = ENCODERS[name], random.Random(0)
    characters = [chr(code) for code in np.flatnonzero(trusted_codes())]
    assert len(characters) > 60_000 and {"é", "ж", "中", "😀", "\u0301"} < {*characters}
    assert not {"\u017f", "\u180e", "\ua7af", "\u0378"} & {*characters}  # folds to s, was a blank, is new, is nothing
    around = [f"a{c}b 1{c}2 {c}{c}\n{c} {c}'{c}s{c}'s\t{c}." for c in characters]
    alphabet = characters + list(KINDS) * 900
    hostile = [draw.choice("'s aA1.\n") + "".join(draw.choices(alphabet, k=6)) for _ in range(10**5)]
    for texts in (around, hostile):
        expected = encoder.tokenizer.encode_batch(texts)
        assert [encoder.fast.encode(text).tolist() for text in texts] == expected


def test_other_ids_end_the_use_of_the_faster_encoder(caplog):
    encoder = Encoder(BPE)
    encoder.fast = SimpleNamespace(encode=lambda text: np.zeros(3))
    assert [ids.tolist() for ids in encoder.encode(TEXTS)] == BPE.encode_batch(TEXTS)
    assert encoder.fast is None and "otherwise than tokenizers, which encodes what follows" in caplog.text


def test_without_the_faster_encoder_ids_are_the_same(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    encoder = Encoder(BPE)
    assert encoder.fast is None and "which takes longer than gigatoken" in caplog.text
    assert [ids.tolist() for ids in encoder.encode(TEXTS)] == BPE.encode_batch(TEXTS)


def test_a_length_without_a_limit_is_read(tmp_path):
    """transformers writes it as 10**30, which no number of 64 bits holds."""
    save(BPE, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"model_max_length": int(1e30)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).sha256 == BPE.sha256

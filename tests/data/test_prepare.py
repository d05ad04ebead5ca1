"""`lm data prepare`: text becomes shards that hold exactly it, whoever works on it and however often it is stopped."""

import hashlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from other_tokenizers import KINDS, write_tokenizer
from shard_files import all_tokens, write_jsonl, write_rows
from trainings import PLACES, processes_of

from lm.cli.data import describe_folder, inspect
from lm.data import encode, preparation, prepare
from lm.data import shard_writer as writer
from lm.data.config import PrepareOptions
from lm.data.encode import split_hash
from lm.data.shard_statistics import token_bytes
from lm.data.shard_writer import ShardWriter
from lm.data.shards import Shards
from lm.data.tokenizer import END_OF_TEXT, Tokenizer
from lm.data.tokenizer_training import train_bpe, train_char
from lm.errors import RequestError, RunError
from lm.system.units import Count

WORDS = "the of and senate house union state people year government peace war law great, made. Größe 😀 \n".split(" ")


def make_texts(count, seed=0, length=60):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, length))) for _ in range(count)]


def run(folder, *inputs, **options):
    """Prepare, and give the manifest."""
    options = {"vocab_size": Count(300), "val_fraction": 0.1, "workers": 1, **options}
    return prepare.prepare(PrepareOptions(input=[str(one) for one in inputs], output=str(folder), **options))


def documents(folder, split):
    """The texts of a split, from its tokens; each ends with the token that says so."""
    tokenizer = Tokenizer.load(folder)
    shards = Shards.open(str(folder / split), vocab_size=tokenizer.vocab_size, tokenizer_sha256=tokenizer.sha256)
    ids = all_tokens(shards)
    texts = tokenizer.decode(ids).split(END_OF_TEXT)
    return texts[:-1] if ids[-1] == tokenizer.eos_id else texts


def digests(folder):
    """Every file below a folder, and what is in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def many_small_units(monkeypatch):
    """Work for several processes, out of little text."""
    monkeypatch.setattr(encode, "MIN_UNIT_BYTES", 4096)
    monkeypatch.setattr(encode, "SMALL_WORK", 0)


# ---- what is in the shards ------------------------------------------------------------------------------------------
def test_the_shards_hold_every_document_once_with_its_end(tmp_path):
    texts = make_texts(200)
    manifest = run(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts))
    train, val = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "val")
    chosen = [split_hash(text) < 0.1 for text in texts]
    assert train == [text for text, is_val in zip(texts, chosen, strict=True) if not is_val]
    assert val == [text for text, is_val in zip(texts, chosen, strict=True) if is_val]
    tokenizer, rows = Tokenizer.load(tmp_path / "out"), pq.read_table(tmp_path / "out/train")["input_ids"].to_pylist()
    assert rows == [[*tokenizer.encode(text), tokenizer.eos_id] for text in train]
    for name, documents_of_split in (("train", train), ("val", val)):
        split = manifest["splits"][name]
        size = sum(len(text.encode()) for text in documents_of_split)
        assert (split["documents"], split["bytes"]) == (len(documents_of_split), size)
        assert split["tokens"] == sum(map(sum, (shard["row_groups"] for shard in split["shards"])))
    assert manifest == json.loads((tmp_path / "out/manifest.json").read_text())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json", "tokenizer.json", "tokenizer_config.json", "train", "val",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_the_shards_are_those_of_the_text(kind, tmp_path):
    """Whatever a tokenizer does to blanks, case and words that it does not know; in the validation, too."""
    texts = [*(f"{i}. {text.strip()}" for i, text in enumerate(make_texts(300))), "我们今天去公园散步。天气很好"]
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / kind, kind, texts[:100]))
    run(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts), tokenizer=str(tmp_path / kind))
    for split, chosen in (("train", False), ("val", True)):
        shards = Shards.open(str(tmp_path / "out" / split), tokenizer_sha256=tokenizer.sha256)
        size = sum(len(text.encode()) for text in texts if (split_hash(text) < 0.1) is chosen)
        assert token_bytes(shards, tokenizer)[all_tokens(shards)].sum() == pytest.approx(size, rel=1e-9)


@pytest.mark.parametrize("kind, text, share", [
    ("wordpiece", "a house", None), ("wordpiece", "die große Tür", 20),  # three unknown words, a byte each, of 15 bytes
    ("char", "a house", None), ("char", "房子很大", 33), ("byte_level", "房子很大", None),
])  # fmt: skip
def test_a_tokenizer_that_does_not_know_the_text_is_reported(kind, text, share, tmp_path, caplog):
    known, file = ["a house of the Senate"] * 20, tmp_path / "tokenizer.json"
    file.write_text(train_char(known).text) if kind == "char" else write_tokenizer(tmp_path, kind, known)
    run(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", [text] * 20), tokenizer=str(file), val_fraction=0.0)
    assert f"the tokens stand for {share} % of the bytes" in caplog.text if share else "stand for" not in caplog.text


@pytest.mark.parametrize("kind, texts", [
    *((kind, ["the state of the union", "a great house", "laws made by people"] * 30) for kind in KINDS),
    ("wordpiece", ["我们今天去公园散步天气很好", "昨天下雨了所以没有去"] * 30),
])  # fmt: skip
def test_bytes_of_shards_of_others_are_those_that_they_decode_to(kind, texts, tmp_path):
    """Without a blank too many at the borders of documents or between Chinese characters."""
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / kind, kind, texts))
    rows = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    sizes = token_bytes(Shards.open(str(write_rows(tmp_path / "0.parquet", rows))), tokenizer)
    assert sizes[np.concatenate(rows)].sum() == pytest.approx(sum(len(text.encode()) for text in texts), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_spells_a_special_token_is_one_document(kind, tmp_path):
    texts = make_texts(100)
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / kind, kind, texts))
    special = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
    spelled = [f"the {token} house{token}of {token} {token}" for token in special] + special
    source = write_jsonl(tmp_path / "a.jsonl", texts + spelled)
    manifest = run(tmp_path / "out", source, tokenizer=str(tmp_path / kind), val_fraction=0)
    ids = np.concatenate(pq.read_table(tmp_path / "out/train")["input_ids"].to_pylist())
    assert manifest["splits"]["train"]["documents"] == len(texts + spelled) == (ids == tokenizer.eos_id).sum()
    known = {tokenizer.vocabulary[token] for token in special} - {tokenizer.vocabulary.get(tokenizer.unknown)}
    assert known & set(ids.tolist()) == {tokenizer.eos_id}


def test_the_manifest_describes_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "ROW_GROUP_TOKENS", 1000)
    monkeypatch.setattr(encode, "ROW_GROUP_TOKENS", 700)  # what is copied at once; it need not be the same
    texts = make_texts(300)
    manifest = run(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts), shard_tokens=Count(2500))
    assert (manifest["layout"], manifest["column"], manifest["dtype"]) == (1, "input_ids", "uint16")
    assert len(manifest["splits"]["train"]["shards"]) > 2
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            path = tmp_path / "out" / shard["file"]
            with pq.ParquetFile(path) as parquet:
                groups = [parquet.read_row_group(group)["input_ids"] for group in range(parquet.num_row_groups)]
                assert str(parquet.schema_arrow.field("input_ids").type) == "list<element: uint16 not null>"
                assert not parquet.schema_arrow.field("input_ids").nullable
                assert parquet.metadata.metadata[b"lm.tokenizer"].decode() == manifest["tokenizer"]
            assert shard["row_groups"] == [len(pa.concat_arrays(group.chunks).flatten()) for group in groups]
            assert shard["size"] == path.stat().st_size
            assert sum(shard["row_groups"]) < 2500 + 1000  # a shard is about as long as was asked for
            assert set(shard["row_groups"][:-1]) <= {1000}
    assert sorted(documents(tmp_path / "out", "train") + documents(tmp_path / "out", "val")) == sorted(texts)


def test_a_row_that_passes_row_groups_continues_in_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "ROW_GROUP_TOKENS", 10)
    rows = [3, 7, 1, 25, 4, 10]
    tokens = np.arange(sum(rows), dtype=np.uint16)
    shard = ShardWriter(tmp_path / "a.parquet", tokens.dtype, "abc")
    shard.write(tokens[:10], np.array([3, 10]))
    shard.write(tokens[10:], np.cumsum(rows[2:]))
    assert shard.close() == (tmp_path / "a.parquet").stat().st_size
    assert shard.row_groups == [10, 10, 10, 10, 10]
    lists = pq.read_table(tmp_path / "a.parquet")["input_ids"].to_pylist()
    assert [len(row) for row in lists] == [3, 7, 1, 9, 10, 6, 4, 10]
    assert sum(lists, []) == tokens.tolist()


def test_text_of_every_kind_and_a_long_document_go_through(tmp_path, monkeypatch):
    monkeypatch.setattr("lm.data.documents.PIECE", 200)
    source = tmp_path / "in"
    texts = make_texts(30)
    write_jsonl(source / "a.jsonl", texts[:10])
    pq.write_table(pa.table({"text": texts[10:20]}), source / "b.parquet")
    (source / "c.txt").write_text("\n".join(texts[20:]), encoding="utf-8")
    manifest = run(tmp_path / "out", source, val_fraction=0.0, tokenizer="char")
    assert documents(tmp_path / "out", "train") == [*texts[:20], "\n".join(texts[20:])]
    assert manifest["splits"]["train"]["documents"] == 21


def test_names_of_texts_decide_their_split(tmp_path):
    """And what is learned is learned from the training texts alone."""
    train = write_jsonl(tmp_path / "train.jsonl", ["ab", "c"])
    val = write_jsonl(tmp_path / "validation.jsonl", ["cab", "ba", "d"])
    run(tmp_path / "out", train, val, tokenizer="char")
    assert documents(tmp_path / "out", "train") == ["ab", "c"]
    assert documents(tmp_path / "out", "val") == ["cab", "ba", "<|unknown|>"]


@pytest.mark.parametrize("keep", [False, True])
def test_of_equal_documents_the_first_is_kept(keep, tmp_path, many_small_units, caplog):
    """In the whole text, whatever their case and blanks; and one of the validation, not one of the training data."""
    caplog.set_level("INFO")
    texts = list(dict.fromkeys(make_texts(300, length=30)))
    copies = [*texts[::7], *(f" {text.replace('e', 'E')}\n" for text in texts[::11])]
    source = write_jsonl(tmp_path / "a.jsonl", [*texts, *copies])
    manifest = run(tmp_path / "out", source, keep_duplicates=keep)
    plain = run(tmp_path / "plain", write_jsonl(tmp_path / "b.jsonl", texts), tokenizer=str(tmp_path / "out"))
    kept = documents(tmp_path / "out", "train") + documents(tmp_path / "out", "val")
    assert len(kept) == len(texts) + (len(copies) if keep else 0)
    repeated = manifest["repeated"]
    assert repeated["documents"] == (0 if keep else len(copies)) and ("left out: " in caplog.text) is not keep
    if not keep:  # a copy with other blanks may be chosen for the other split
        assert {" ".join(text.split()).casefold() for text in kept} == {" ".join(t.split()).casefold() for t in texts}
        first = documents(tmp_path / "out", "val")[: plain["splits"]["val"]["documents"]]
        assert first == documents(tmp_path / "plain", "val")
        count, size = (sum(each[what] for each in manifest["splits"].values()) for what in ("documents", "bytes"))
        assert count == len(kept) and size == sum(len(text.encode()) for text in kept)


def test_character_data_of_nanogpt(tmp_path):
    """Its meta.pkl is never read; the message's command makes the meta.json that becomes a tokenizer."""
    stoi = {"\n": 0, "a": 1, "b": 2, "'": 3}
    np.array([1, 2, 4, 0, 3], np.uint16).tofile(tmp_path / "train.bin")  # 4 ends a document
    np.array([2, 2], np.uint16).tofile(tmp_path / "val.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 4, "stoi": stoi, "itos": {1: "a"}}))
    with pytest.raises(RequestError, match="is a pickle, which may run any code") as caught:
        run(tmp_path / "out", tmp_path / "*.bin", tokenizer=str(tmp_path))
    subprocess.run(str(caught.value).split("`")[1].replace("python", sys.executable, 1), shell=True, check=True)
    with pytest.raises(RequestError, match="--tokenizer"):
        run(tmp_path / "out", tmp_path / "*.bin")
    manifest = run(tmp_path / "out", tmp_path / "*.bin", tokenizer=str(tmp_path))
    assert documents(tmp_path / "out", "train") == ["ab", "\n'"] and documents(tmp_path / "out", "val") == ["bb"]
    assert (manifest["splits"]["train"]["bytes"], manifest["splits"]["val"]["bytes"]) == (4, 2)
    assert Tokenizer.load(tmp_path / "out").eos_id == 4


def test_a_name_on_the_hub_is_found_in_the_cache(tmp_path, monkeypatch):
    model = tmp_path / "models--openai-community--gpt2"
    for name, content in {"refs/main": "abc", **{f"snapshots/abc/{name}": text for name, text in
                                                 train_char(["ab"]).files().items()}}.items():  # fmt: skip
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(content)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("gpt2", "openai-community/gpt2"):
        assert Tokenizer.load(name).sha256 == train_char(["ab"]).sha256
    with pytest.raises(RequestError, match="`hf download org/other tokenizer.json tokenizer_config.json`"):
        Tokenizer.load("org/other")


def test_ids_beyond_sixteen_bits_are_written_wider(tmp_path):
    described = json.loads(train_char(["ab"]).text)
    described["model"]["vocab"]["c"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    source = write_jsonl(tmp_path / "a.jsonl", ["abc", "cab"])
    manifest = run(tmp_path / "out", source, tokenizer=str(tmp_path / "tokenizer.json"), val_fraction=0.0)
    assert (manifest["dtype"], manifest["vocab_size"]) == ("uint32", 70_001)
    assert documents(tmp_path / "out", "train") == ["abc", "cab"]


# ---- what is for validation -----------------------------------------------------------------------------------------
def test_documents_stay_in_their_split_when_others_come(tmp_path):
    texts = make_texts(300)
    first = write_jsonl(tmp_path / "in/m.jsonl", texts[:150])
    run(tmp_path / "one", first)
    for name, more in (("a.jsonl", texts[150:200]), ("z.jsonl", texts[200:])):
        write_jsonl(tmp_path / "in" / name, more)
    write_jsonl(first, texts[:150][::-1])
    run(tmp_path / "two", tmp_path / "in")
    for split in ("train", "val"):
        assert set(documents(tmp_path / "one", split)) <= set(documents(tmp_path / "two", split))


def test_a_share_of_the_documents_is_for_validation():
    picked = np.mean([split_hash(text) < 0.1 for text in make_texts(5000)])
    assert 0.08 < picked < 0.12


@pytest.mark.parametrize("fraction", [1e-9, 0.3, 1 - 1e-9])
def test_a_corpus_of_a_few_documents_has_both_splits(fraction, tmp_path, caplog, monkeypatch):
    """Where the hash leaves one of them empty, the text is cut near its end."""
    monkeypatch.setattr(encode, "split_hash", lambda content: 0.5)
    caplog.set_level("INFO")
    texts = [f"{text.strip()}\nlast line" for text in make_texts(6)]
    manifest = run(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts), val_fraction=fraction)
    train, val = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "val")
    splits, ended = manifest["splits"], END_OF_TEXT.join([*texts, ""])
    tokenizer = Tokenizer.load(tmp_path / "out")
    ids = {name: pq.read_table(tmp_path / f"out/{name}")["input_ids"].to_pylist() for name in ("train", "val")}
    assert tokenizer.decode(sum(ids["train"] + ids["val"], [])) == ended
    assert [splits[name]["tokens"] for name in ids] == [sum(map(len, rows)) for rows in ids.values()]
    assert sum(split["bytes"] for split in splits.values()) == sum(len(text.encode()) for text in texts)
    assert [splits["train"]["documents"], splits["val"]["documents"]] == [len(train), len(val)]
    assert len(train) + len(val) in (6, 7)  # one may be in both
    assert "too few documents to hold some out: validation gets" in caplog.text


@pytest.mark.parametrize("letters, shared", [("abac", "b"), ("aaaa", "a"), ("abcb", "b"), ("aabbccaab", "b")])
def test_a_document_is_there_once_also_where_the_text_is_cut(letters, shared, tmp_path, monkeypatch):
    """Where the hash leaves one split empty: no line of the validation is trained on."""
    monkeypatch.setattr(encode, "split_hash", lambda content: 0.5)
    texts = {letter: "".join(f"{letter} {line}\n" for line in range(100)) for letter in letters}
    source = write_jsonl(tmp_path / "a.jsonl", [texts[letter] for letter in letters])
    manifest = run(tmp_path / "out", source, val_fraction=0.4, tokenizer="char")
    train, val = ("".join(documents(tmp_path / "out", split)).splitlines() for split in ("train", "val"))
    assert train and val and not set(train) & set(val)
    assert train + val == "".join(texts[letter] for letter in dict.fromkeys(letters)).splitlines()
    assert {line[0] for line in train} & {line[0] for line in val} == set(shared)
    for split, lines, edge in (("train", train, " 0"), ("val", val, " 99")):
        assert manifest["splits"][split]["bytes"] == sum(len(line) + 1 for line in lines)
        assert manifest["splits"][split]["documents"] == sum(line[1:] == edge for line in lines)


@pytest.mark.parametrize("tokenizer", ["bpe", "char"])
def test_one_text_file_is_cut_at_a_line_near_its_end(tokenizer, tmp_path, caplog):
    caplog.set_level("INFO")
    text = "".join(f"Line {i} of the play.\n" for i in range(500))
    (tmp_path / "input.txt").write_text(text)
    manifest = run(tmp_path / "out", tmp_path / "input.txt", tokenizer=tokenizer)
    [train], [val] = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "val")
    assert train + val == text
    assert train.endswith("\n")
    assert 0.08 < len(val) / len(text) < 0.12
    assert [manifest["splits"][name]["bytes"] for name in ("train", "val")] == [len(train), len(val)]
    assert "too few documents" in caplog.text


@pytest.mark.parametrize("documents, fraction", [(2, 0.1), (20, 0.044), (400, 0.01)])
def test_without_a_fraction_a_small_text_gives_more_to_validation(documents, fraction, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "VAL_BYTES", 100)
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "%s"}\n' % ("word " * 20) * documents)
    assert run(tmp_path / "out", text, tokenizer="char", val_fraction=None)["options"]["val_fraction"] == fraction


def test_a_tokenizer_is_learned_from_training_documents_alone(tmp_path):
    texts = make_texts(100)
    held_out = next(text for text in (f"{i} ~" for i in range(1000)) if split_hash(text) < 0.1)
    run(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", [*texts, held_out]), tokenizer="char")
    assert "~" not in Tokenizer.load(tmp_path / "out").vocabulary
    assert "<|unknown|>" in "".join(documents(tmp_path / "out", "val"))


def test_a_tokenizer_is_learned_from_no_more_than_the_sample(tmp_path):
    texts = make_texts(400)
    source = str(write_jsonl(tmp_path / "a.jsonl", texts))
    options = PrepareOptions(input=[source], sample_bytes=Count(2000), val_fraction=0.01)
    units = encode.plan_units(prepare.find_files(options.input))
    sample = list(preparation._sample(options, units))
    assert 2000 <= sum(map(len, sample)) < 2000 + max(map(len, texts))


# ---- whoever works, and however often it is stopped -----------------------------------------------------------------
def test_any_number_of_workers_makes_the_same_bytes(tmp_path, many_small_units):
    source = tmp_path / "in"
    for i in range(6):
        write_jsonl(source / f"{i}.jsonl", make_texts(300, seed=i))
    run(tmp_path / "one", source, shard_tokens=Count(20_000))
    run(tmp_path / "three", source, shard_tokens=Count(20_000), workers=3)
    assert len(digests(tmp_path / "one")) > 8
    assert digests(tmp_path / "one") == digests(tmp_path / "three")


COMMAND = """
import sys
from lm.data import encode, preparation, prepare
encode.MIN_UNIT_BYTES, encode.SMALL_WORK = 4096, 0
prepare.prepare(prepare.PrepareOptions(
    input=[sys.argv[1]], output=sys.argv[2], vocab_size=300, workers=int(sys.argv[3]), shard_tokens=20_000
))
"""


def begin(source, folder, workers):
    command = [sys.executable, "-c", COMMAND, str(source), str(folder), str(workers)]
    environment = {**os.environ, "PYTHONPATH": PLACES}
    return subprocess.Popen(command, cwd=folder.parent, env=environment, stderr=subprocess.DEVNULL)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.0005)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Some text, and what a preparation makes of it that nothing stopped."""
    folder = tmp_path_factory.mktemp("straight")
    for i in range(12):
        write_jsonl(folder / f"in/{i:02}.jsonl", make_texts(400, seed=i))
    assert begin(folder / "in", folder / "out", 1).wait() == 0
    return folder / "in", digests(folder / "out")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
@pytest.mark.parametrize("reached", [".parts/plan.json", ".parts/*-train", "train/*.parquet"])
def test_a_killed_preparation_resumes_to_the_same_bytes(reached, straight, tmp_path):
    source, expected = straight
    out = tmp_path / "out"
    process = begin(source, out, 2)
    wait_for(lambda: any(out.glob(reached)) or process.poll() is not None)
    process.kill()
    process.wait()
    wait_for(lambda: not processes_of(tmp_path))  # workers do not outlive it
    assert not (out / "manifest.json").exists()
    done = {path: path.stat().st_mtime_ns for path in out.glob(".parts/*.json") if len(path.stem) == 32}
    again = begin(source, out, 1)
    wait_for(lambda: any(out.glob("train/*.parquet")) or again.poll() is not None)
    assert again.poll() == 0 or {path: path.stat().st_mtime_ns for path in done} == done  # finished units are kept
    assert again.wait() == 0
    assert digests(out) == expected


def test_of_two_processes_that_make_a_folder_one_waits_for_the_other(straight, tmp_path):
    source, expected = straight
    out = tmp_path / "out"
    both = [begin(source, out, 1) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert digests(out) == expected and not list(out.glob(".*"))  # neither lock nor parts are left


def test_an_interrupted_command_explains_how_to_resume(tmp_path):
    texts = make_texts(20_000)
    source = write_jsonl(tmp_path / "a.jsonl", (f"{i} {text}" for i in range(12) for text in texts))  # seconds of work
    command = [sys.executable, "-m", "lm", "data", "prepare", f"--input={source}", f"--output={tmp_path / 'out'}"]
    process = subprocess.Popen([*command, "--vocab_size=300", "--sample_bytes=1M"], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any((tmp_path / "out").glob(".parts/*-train")) or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 75, errors
    assert "the same command continues" in errors
    assert not (tmp_path / "out/manifest.json").exists()


def test_finished_units_are_kept_when_a_bad_file_is_mended(tmp_path, many_small_units, monkeypatch):
    source = tmp_path / "in"
    for i in range(6):
        write_jsonl(source / f"{i}.jsonl", make_texts(200, seed=i))
    tokenizer = train_bpe(make_texts(50), 300)
    for name, content in tokenizer.files().items():
        (tmp_path / name).write_text(content)
    good = (source / "5.jsonl").read_text()
    (source / "5.jsonl").write_text(good + "{bad\n")
    with pytest.raises(RunError, match=r"5\.jsonl, byte \d+"):
        run(tmp_path / "out", source, tokenizer=str(tmp_path))
    assert not (tmp_path / "out/manifest.json").exists()
    before = {path.name for path in (tmp_path / "out/.parts").glob("*.json")}
    assert len(before) > 5
    write_jsonl(source / "5.jsonl", make_texts(200, seed=5))
    anew = []
    monkeypatch.setattr(preparation, "encode_unit", lambda *task: anew.append(task[0]) or encode.encode_unit(*task))
    run(tmp_path / "out", source, tokenizer=str(tmp_path))
    assert {file.name[-7:] for unit in anew for file, _, _ in unit.slices} <= {"4.jsonl", "5.jsonl"}
    run(tmp_path / "fresh", source, tokenizer=str(tmp_path))
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")


def test_a_finished_folder_is_left_as_it_is_or_refused(tmp_path):
    source = write_jsonl(tmp_path / "in/a.jsonl", make_texts(100))
    manifest = run(tmp_path / "out", source)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert run(tmp_path / "out", source, workers=2) == manifest
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    with pytest.raises(RequestError, match="--vocab_size was 300, is 301; give another --output"):
        run(tmp_path / "out", source, vocab_size=Count(301))
    with pytest.raises(RequestError, match=r"b\.jsonl is new"):
        run(tmp_path / "out", source, write_jsonl(tmp_path / "in/b.jsonl", ["b"]))
    write_jsonl(source, make_texts(99))
    with pytest.raises(RequestError, match=r"a\.jsonl has changed"):
        run(tmp_path / "out", source)


def test_an_unfinished_folder_is_made_with_other_options_as_a_fresh_one_is(tmp_path, many_small_units, caplog):
    """Once a part of the texts is done; the tokenizer is given, so that no text is read before."""
    texts = make_texts(800)
    source = write_jsonl(tmp_path / "a.jsonl", [*texts, 5])
    run(tmp_path / "first", write_jsonl(tmp_path / "b.jsonl", make_texts(50)))
    with pytest.raises(RunError, match="byte .*: .text. is not a text but 5"):
        run(tmp_path / "out", source, tokenizer=str(tmp_path / "first" / "tokenizer.json"))
    write_jsonl(source, texts)
    caplog.set_level("INFO")
    made, fresh = (run(tmp_path / name, source, val_fraction=0.2) for name in ("out", "fresh"))
    assert made == fresh and "options or files have changed since it was begun" in caplog.text
    assert not (tmp_path / "out/.parts").exists()


def test_a_folder_with_other_things_is_not_touched(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("mine")
    with pytest.raises(RequestError, match="holds other files: if .*/out --output .*/out-tokens` makes"):
        run(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", ["a"]))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("options, message", [
    ({"val_fraction": 1.0}, "val_fraction"), ({"workers": 0}, "workers"), ({"output": ""}, "--output"),
    ({"tokenizer": "gpt2"}, "gpt2 is not there.*`hf download gpt2 tokenizer.json tokenizer_config.json`"),
    ({"shard_tokens": Count(0)}, "shard_tokens"), ({"eos_token": "</s>"}, "--eos_token"),
    ({"tokenizer": "bep"}, r"bep is not there: did you mean bpe\? Or give"), ({"tokenizer": "chra"}, "did you mean char"),
    ({"output": "a.jsonl"}, "--output a.jsonl is a file: give the name of a folder"),
])  # fmt: skip
def test_a_wrong_request_is_refused(options, message, here):
    write_jsonl(here / "a.jsonl", ["text"])
    with pytest.raises(RequestError, match=message):
        prepare.prepare(PrepareOptions(**{"input": ["a.jsonl"], "output": "out", **options}))
    assert [path.name for path in here.iterdir()] == ["a.jsonl"]


def test_texts_that_are_all_empty_are_refused(tmp_path):
    with pytest.raises(RequestError, match="the input holds no text"):
        run(tmp_path / "out", write_jsonl(tmp_path / "empty.jsonl", ["", ""]))


MEASURED = """
import resource, sys
from lm.data.prepare import PrepareOptions, prepare
for file in sys.argv[2:]:
    prepare(PrepareOptions(input=[file], output=file + ".out", tokenizer=sys.argv[1], workers=1, val_fraction=0.0))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_memory_does_not_grow_with_the_text(kind, tmp_path):
    """Neither with the number of documents nor with the length of one."""
    for name, content in train_char(make_texts(50)).files().items():
        (tmp_path / name).write_text(content)
    block = "\n".join(make_texts(2000, length=200)) + "\n"
    files = [tmp_path / f"{name}.{kind}" for name in ("small", "large")]
    for file, megabytes in zip(files, (20, 50)):
        with open(file, "w", encoding="utf-8") as out:
            while out.tell() < megabytes * 10**6:
                out.write(block if kind == "txt" else json.dumps({"text": block}) + "\n")
    command = [sys.executable, "-c", MEASURED, str(tmp_path), *map(str, files)]
    small, large = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert large - small < 15  # MiB, where the text grew by 30 MB


# ---- the commands ---------------------------------------------------------------------------------------------------
def test_inspect_prints_one_json_object_that_agrees_with_the_manifest(tmp_path, capsys):
    manifest = run(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", make_texts(100)))
    inspect(str(tmp_path / "out"), json=True)
    facts = json.loads(capsys.readouterr().out)
    for name, split in manifest["splits"].items():
        assert facts["splits"][name]["tokens"] == split["tokens"]
        assert facts["splits"][name]["bytes_per_token"] == pytest.approx(split["bytes"] / split["tokens"])
    assert facts["tokenizer"]["sha256"] == manifest["tokenizer"]
    assert documents(tmp_path / "out", "val")[0].startswith(facts["sample"].partition(END_OF_TEXT)[0])
    inspect(str(tmp_path / "out"))
    assert "bytes per token" in capsys.readouterr().out


def test_the_key_that_a_failure_asked_for_is_taken(tmp_path):
    """The first command has left an unfinished preparation of nothing, begun with another key."""
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(50), key="body")
    with pytest.raises(RunError, match="no key 'text' among 'id', 'body'; name it with --text_key"):
        run(tmp_path / "out", source)
    assert run(tmp_path / "out", source, text_key="body")["splits"]["train"]["documents"] > 0


def test_a_damaged_manifest_is_named(here):
    run("a folder", write_jsonl(here / "a.jsonl", make_texts(100)))
    (here / "a folder" / "manifest.json").write_text("{")
    with pytest.raises(RequestError, match="^a folder/manifest.json cannot be read .*; is it damaged?"):
        inspect("a folder")


def test_inspect_describes_shards_of_other_programs(tmp_path):
    for name, ids in (("train/a", [1, 2, 3]), ("val/a", [4, 5]), ("b", [6])):
        write_rows(tmp_path / f"{name}.parquet", [ids])
    facts = describe_folder(str(tmp_path))
    assert (facts["made_by_lm"], facts["tokenizer"], facts["sample"]) == (False, None, None)
    splits = {name: (split["tokens"], split["shards"]) for name, split in facts["splits"].items()}
    assert splits == {"b.parquet": (1, 1), "train": (3, 1), "val": (2, 1)}
    with pytest.raises(RequestError, match="nowhere"):
        describe_folder(str(tmp_path / "nowhere"))
    with pytest.raises(RequestError, match="has no column 'ids'; it has input_ids; set `column`$"):
        describe_folder(str(tmp_path), column="ids")


def test_nearest_line_end_is_looked_for_only_near_by(tmp_path, monkeypatch):
    """A text without lines is cut all the same."""
    monkeypatch.setattr("lm.data.splits.CUT_SEARCH", 8)
    (tmp_path / "input.txt").write_text("word " * 400)
    run(tmp_path / "out", tmp_path / "input.txt", tokenizer="char")
    assert len(documents(tmp_path / "out", "train")[0]) == 1801


@pytest.mark.parametrize("source, text, is_same", [
    ("texts/a.txt", "/elsewhere/texts", True), ("a.txt", ".", True), ("../texts/a.txt", "../texts/", True),
    ("texts/a.txt", "texts/*.txt", True), ("hf://datasets/o/d@0123/a.jsonl", "hf://datasets/o/d@main", True),
    ("embedded:sotu", "embedded:sotu", True), ("embedded:sotu", "mine.txt", False), ("texts/a.txt", "texts/b.txt", False),
])  # fmt: skip
def test_a_prepared_folder_is_not_taken_for_that_of_other_texts(source, text, is_same, tmp_path):
    """It may have moved with its texts, and these may be gone."""
    (tmp_path / "manifest.json").write_text(json.dumps({"options": {}, "sources": [{"name": source}]}))
    options = PrepareOptions([text], str(tmp_path))
    if is_same:
        prepare.check_same_options(options)
    else:
        with pytest.raises(RequestError, match=f"was made from {source}, and data.prepare.input has {text}: "):
            prepare.check_same_options(options)

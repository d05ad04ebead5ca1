"""An export is a model for others: the same weights, tokens and texts, described truthfully, or no folder at all."""

import json
import re
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from decoders import SHAPES, trained_like, write_huggingface
from other_tokenizers import KINDS, write_tokenizer
from safetensors.torch import save_file
from trainings import CORPUS, fit, lm, make_workplace
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm.cli import convert as command
from lm.cli.model_options import ExportOptions
from lm.data.datamodule import DataModule
from lm.data.tokenizer import Tokenizer
from lm.data.tokenizer_training import train_char
from lm.errors import RequestError, RunError
from lm.inference import export
from lm.inference.export import Card, model_card, public_name
from lm.inference.pretrained import load_pretrained, read_weights
from lm.system.arguments import call
from lm.system.units import Count


@pytest.fixture(scope="module")
def workplace(workplace):
    """A folder with one finished run, `small`: 12 steps of 256 tokens, with the budget counted."""
    fit(workplace, "small", "--guards.budget.rate_usd_per_hr", "2")
    return workplace


def model_folder(path, config):
    """A model of random weights with a tokenizer of characters, as a Hugging Face folder."""
    path.mkdir()
    if config.attention_bias:
        write_huggingface(trained_like(replace(config, vocab_size=400)), path)
        write_tokenizer(path, "qwen2", export.TEXTS)
        return path
    write_huggingface(trained_like(config), path)
    tokenizer = train_char(sorted(set("".join(export.TEXTS))))
    assert tokenizer.vocab_size <= config.vocab_size
    for name, text in tokenizer.files().items():
        (path / name).write_text(text)
    return path


def compared(source: Path, folder: Path) -> str:
    """The loader, after the check of a folder made of `source`."""
    return export.check_reload(folder, load_pretrained(source, device="cpu"))[0]


# ---- the folder ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def exported(workplace):
    """`small` in bfloat16, by the command line."""
    done = lm(workplace, "export", "--output", "out/sotu", "--dtype", "bfloat16", "--license", "CC-BY-4.0",
              "--language", "en", "de", "--name", "Small")  # fmt: skip
    assert done.stdout == "out/sotu\n"
    assert "loaded it with transformers" in done.stderr
    assert not list((workplace / "out").glob(".*"))
    return workplace / "out" / "sotu"


def test_weights_are_those_of_the_best_checkpoint_cast_bit_by_bit(workplace, exported):
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
    assert theirs.dtype == torch.bfloat16
    source = read_weights(workplace / "checkpoints" / "small" / "best")
    written = read_weights(exported)
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], source[name].bfloat16()) for name in source)
    assert all(torch.equal(theirs.state_dict()[name], weight) for name, weight in written.items())


def test_the_folder_holds_a_hugging_face_model_and_nothing_of_the_training(exported):
    assert {path.name for path in exported.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "README.md",
    }  # fmt: skip
    modes = {stat.S_IMODE(path.stat().st_mode) for path in exported.iterdir()}
    assert len(modes) == 1 and modes.pop() & stat.S_IROTH  # as others may read it


def test_special_tokens_survive_the_way_to_ids_and_back(exported):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    end = tokenizer.eos_token
    ids = tokenizer(f"ab{end}", add_special_tokens=False)["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id and len(ids) == 3
    assert tokenizer.decode(ids) == f"ab{end}" and tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    assert tokenizer.model_max_length == 32 and not tokenizer.chat_template
    assert tokenizer.unk_token_id == 1
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id


def test_the_code_on_the_card_runs(exported, monkeypatch, capsys):
    monkeypatch.chdir(exported)
    code = re.search(r"```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)[1]
    exec(code.replace('"Small"', '"."').replace("max_new_tokens=50", "max_new_tokens=5"), {})
    assert capsys.readouterr().out.startswith("The")


# ---- the card --------------------------------------------------------------------------------------------------------
def card_of(folder: Path) -> tuple[dict, str]:
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_card_says_what_is_known_and_nothing_else(workplace, exported):
    front, text = card_of(exported)
    assert front == {
        "language": ["en", "de"], "license": "cc-by-4.0", "library_name": "transformers",
        "pipeline_tag": "text-generation", "tags": ["causal-lm", "llama"],
    }  # fmt: skip
    run = workplace / "checkpoints" / "small"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    step = json.loads((run / "best" / "trainer.json").read_text())["global_step"]
    validation = next(line for line in metrics if line["step"] == step and "val/loss" in line)
    tokens = {split: sum(shard[2] for shard in shards)
              for split, shards in json.loads((run / "data.json").read_text()).items()}  # fmt: skip
    for fact in (
        "# Small", f"| steps | {step} of 12 |", f"| tokens | {step * 256:,} |", "256 tokens: 8 sequences of 32",
        f"| validation loss, nats a token | {validation['val/loss']:.4f} |", f"{validation['val/bpb']:.4f}",
        f"| {tokens['train']:,} tokens |", f"| {tokens['val']:,} tokens |", "name: adamw\n  lr: 0.01\n",
        "warmup_steps: 2", "| seed | 7 |", "| precision | 32-true |",
        "000.txt", "from scratch",
    ):  # fmt: skip
        assert fact in text, fact
    assert "None" not in text and str(workplace) not in text


@pytest.fixture
def run(workplace, tmp_path) -> Path:
    """A copy of the run `small`, to change."""
    return shutil.copytree(workplace / "checkpoints" / "small", tmp_path / "checkpoints" / "small", symlinks=True)


def test_the_card_of_a_mixture_has_its_sources(workplace, run, tmp_path):
    """With their tokens, and of `web`, whose manifest is there, the files."""
    shutil.copytree(workplace / "data" / "small", tmp_path / "texts" / "web")
    files = ("config.yaml", "data.json")
    config, shards = (yaml.safe_load((run / name).read_text()) for name in files)
    web = {"name": "web", "path": "texts/web", "weight": 3}
    code = {"name": "code", "path": None, "train": ["hf://datasets/some/code/*.parquet"], "weight": 1}
    config["data"] |= {"path": None, "prepare": None, "sources": [web, code]}
    whole = sum(shard[2] for shard in shards["train"])
    shards["train"] = [[f"web/{name}", *rest] for name, *rest in shards["train"]]
    shards["train"].append(["code/0.parquet", 5, 2000, "x", 0])
    for name, content in zip(files, (config, shards)):
        (run / name).write_text(json.dumps(content))
    model = load_pretrained(run, device="cpu")
    text = model_card(model, Card("x"))
    rows = dict(line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| source "))
    assert rows["source web"].startswith(f"{whole:,} tokens: ") and "000.txt, 001.txt" in rows["source web"]
    assert rows["source code"] == "2,000 tokens: hf://datasets/some/code/*.parquet"
    assert yaml.safe_load(text.split("---\n")[1])["datasets"] == ["some/code"]
    assert f"| training data | {whole + 2000:,} tokens |" in text
    manifest = tmp_path / "texts/web/manifest.json"
    manifest.write_text(manifest.read_text().replace('"size": ', '"size": 1'))  # the folder was made anew since
    text = model_card(model, Card("x"))
    assert "000.txt" not in text and f" {whole:,} tokens: " in text


def test_the_card_has_the_evaluations_of_this_very_step(run):
    model = load_pretrained(run, device="cpu")
    task = {"interval": [0.2, 0.4], "accuracy": 0.3, "num_fewshot": 5, "items": 120, "baseline": 0.25, "centered": 0.1}
    lines = [
        {"step": step, "checkpoint": None, "time": 1.0, "settings": {}, "core": 0.0667, "core_interval": [0.0, 0.1],
         "tasks": {"speeches": {**task, "accuracy": accuracy}},
         "texts": {"/home/me/book.txt": {"bits_per_byte": 1.25, "loss": 2.0, "tokens": 9}}}
        for step, accuracy in ((model.step, 0.3), (model.step + 1, 0.9))
    ]  # fmt: skip
    (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = model_card(model, Card("x"))
    assert "| speeches | 30.0% right (20.0% to 40.0%), guessing 25.0%, centred 0.100; 120 items, 5 shots |" in text
    assert "| book.txt | 1.2500 bits per byte, " in text and "0.0667" in text
    assert "90.0%" not in text and "/home/me" not in text


def test_a_model_without_a_run_has_a_card_without_a_history(tmp_path):
    source = model_folder(tmp_path / "hf", SHAPES["qwen3, windows"])
    text = model_card(load_pretrained(source, device="cpu"), Card("x", "MIT"))
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["license"] == "mit"
    assert "language" not in front and "datasets" not in front
    assert not any(word in text for word in ("Training", "Data", "scratch", "None", "unknown"))


def test_a_dataset_of_the_hub_is_named_where_the_hub_looks_for_it(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"] |= {"path": None, "train": ["hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT/*.parquet",
                                               "https://me:secret@host/x.parquet?token=abc"]}  # fmt: skip
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    text = model_card(load_pretrained(run, device="cpu"), Card("x"))
    assert yaml.safe_load(text.split("---\n")[1])["datasets"] == ["HuggingFaceFW/fineweb-edu"]
    assert "https://host/x.parquet" in text and "secret" not in text and "abc" not in text
    assert yaml.safe_load(text.split("---\n")[1])["license"] == "unknown"


# ---- what others load ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_reloads_with_the_same_logits_and_texts(shape, dtype, tmp_path):
    source = model_folder(tmp_path / "hf", SHAPES[shape])
    model = load_pretrained(source, device="cpu", dtype=dtype)
    (tmp_path / "out").mkdir()
    command.write_model(model, Card("x"), tmp_path / "out")
    assert compared(tmp_path / "out", tmp_path / "out").startswith("transformers")


def test_without_transformers_our_own_loader_compares(tmp_path, monkeypatch):
    source = model_folder(tmp_path / "hf", SHAPES["llama, tied"])
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    assert compared(source, source).startswith("lm ")
    spoilt = model_folder(tmp_path / "spoilt", SHAPES["llama, tied"])
    change(spoilt / "config.json", rope_theta=5100.0)
    with pytest.raises(RunError, match="another model to lm .*logits differ"):
        compared(source, spoilt)


def change(file: Path, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def swap_two_characters(folder: Path):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["e"], vocabulary["h"] = vocabulary["h"], vocabulary["e"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def drop_a_weight(folder: Path):
    weights = read_weights(folder)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("spoil, named", [
    (lambda folder: change(folder / "config.json", rope_theta=5100.0), "logits differ"),
    (swap_two_characters, "to the tokenizer, not"), (drop_a_weight, "logits differ"),
])  # fmt: skip
def test_what_is_another_model_is_noticed(spoil, named, tmp_path):
    source = model_folder(tmp_path / "hf", SHAPES["llama, tied"])
    shutil.copytree(source, tmp_path / "spoilt")
    spoil(tmp_path / "spoilt")
    with pytest.raises(RunError, match=named):
        compared(source, tmp_path / "spoilt")


def test_nothing_is_left_where_the_reloaded_model_is_another_one(tmp_path, monkeypatch):
    source = model_folder(tmp_path / "hf", SHAPES["llama, tied"])
    write = command.write_model

    def write_otherwise(model, card, folder):
        write(model, card, folder)
        change(folder / "config.json", rope_theta=5100.0)

    monkeypatch.setattr(command, "write_model", write_otherwise)
    with pytest.raises(RunError, match="another model to transformers .*logits differ"):
        command.export(ExportOptions(ckpt_path=str(source), output=str(tmp_path / "out")))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("kind", ["llama", "wordpiece"])
def test_texts_begin_for_transformers_as_they_did_in_the_training(kind, tmp_path):
    """Without the BOS of the tokenizer's template, which the shards of `lm data prepare` do not have."""
    folder = make_workplace(tmp_path)
    write_tokenizer(folder / "given", kind, [CORPUS])
    changes = {"data.path": "data/given", "data.prepare.tokenizer": "given", "trainer.max_steps": 3}
    fit(folder, **changes)
    lm(folder, "export", "--output", "out")
    text, shards = CORPUS.split("\n")[7] + "\n", sorted((folder / "data/given").rglob("*.parquet"))
    rows = [row for shard in shards for row in pq.read_table(shard)["input_ids"].to_pylist()]
    first, second = (AutoTokenizer.from_pretrained(folder / model)(text).input_ids
                     for model in ("checkpoints/small/best", "out"))  # fmt: skip
    assert [*first, Tokenizer.load(folder / "given").eos_id] in rows and second == first


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_template_is_kept_where_the_shards_of_others_begin_with_it(kind, begun, tmp_path):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "given", kind, [CORPUS]))
    encode = (lambda text: tokenizer.backend.encode(text).ids) if begun else tokenizer.encode
    rows = [encode(text) + [tokenizer.eos_id] for text in CORPUS.split("\n")]
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "shard.parquet")
    data = DataModule(train=str(tmp_path / "shard.parquet"), tokenizer=str(tmp_path / "given"), seq_len=Count(16))
    data.setup("fit")
    for name, text in data.tokenizer.files().items():
        (tmp_path / name).write_text(text)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert [theirs(text)["input_ids"] + [tokenizer.eos_id] for text in CORPUS.split("\n")] == rows
    assert data.tokenizer.sha256 == tokenizer.sha256


# ---- weights ---------------------------------------------------------------------------------------------------------
def test_large_weights_are_several_files_that_transformers_reads(tmp_path, monkeypatch):
    source = model_folder(tmp_path / "hf", SHAPES["llama, untied, grouped heads"])
    monkeypatch.setattr(command, "SHARD_BYTES", 60_000)
    command.export(ExportOptions(ckpt_path=str(source), output=str(tmp_path / "out")))
    files = list((tmp_path / "out").glob("model-*-of-*.safetensors"))
    assert len(files) > 2 and max(file.stat().st_size for file in files) < 70_000
    theirs, weights = (read_weights(tmp_path / name) for name in ("out", "hf"))
    assert theirs.keys() == weights.keys() and all(torch.equal(theirs[name], weights[name]) for name in weights)


@pytest.mark.parametrize("value", [1e6, float("nan")])
def test_weights_that_half_precision_cannot_hold_are_refused(value, tmp_path):
    source = model_folder(tmp_path / "hf", SHAPES["llama, tied"])
    weights = read_weights(source)
    weights["model.norm.weight"][0] = value
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match="norm.weight has values that are not finite in float16"):
        command.export(ExportOptions(ckpt_path=str(source), output=str(tmp_path / "out"), dtype="float16"))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# ---- requests --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arguments, named", [
    ([], "--output"), (["--output", "full"], "full is there already"),
    (["--output", "out", "--dtype", "float8"], "dtype"),
    (["--output", "out", "--ckpt_path", "nowhere"], "nowhere"),
    (["--output", "out", "--run", "nobody"], "no run 'nobody'"),
])  # fmt: skip
def test_a_wrong_request_is_one_line_and_makes_nothing(arguments, named, here):
    (here / "full").mkdir()
    (here / "full" / "file").write_text(CORPUS[:10])
    with pytest.raises(RequestError, match=named) as caught:
        command.export(call(ExportOptions, arguments, prog="lm export"))
    assert "\n" not in str(caught.value)
    assert [path.name for path in here.iterdir()] == ["full"]


@pytest.mark.parametrize("name, published", [
    ("https://user:p@ss@host/x?key=1#token=abc", "https://host/x"),
    ("file:///home/alice/secret/x.txt", "x.txt"),
    ("/home/alice/x.txt", "x.txt"),
    ("hf://datasets/a/b", "hf://datasets/a/b"),
    ("embedded:sotu", "embedded:sotu"),
])  # fmt: skip
def test_a_card_names_no_folder_and_no_secret(name, published):
    assert public_name(name) == published

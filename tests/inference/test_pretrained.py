"""`lm.load_model` and `lm.load_run`: a trained model and a run in two lines of Python."""

import json

import pytest
import torch
from decoders import SHAPES, SMALL, trained_like, write_huggingface
from safetensors.torch import load_file, save_file
from trainings import fit

import lm
from lm.data.tokenizer_training import train_char
from lm.errors import RequestError


@pytest.fixture(scope="module")
def workplace(workplace):
    fit(workplace)
    return workplace


def write_model(decoder, folder):
    write_huggingface(decoder, folder)
    for name, text in train_char(["abc"]).files().items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder with a tokenizer, of a model and of nothing else."""
    return write_model(trained_like(SMALL), tmp_path)


def test_a_run_gives_its_best_checkpoint_and_a_checkpoint_itself(workplace):
    run = lm.load_run(workplace / "checkpoints" / "small")
    best = lm.load_model(run.path, device="cpu")
    assert best.path == run.link("best") and best.step == int(best.path.name.removeprefix("step-"))
    last = lm.load_model(run.path / "last", device="cpu")
    assert last.step == 12
    assert best.tokenizer.decode(best.tokenizer.encode("The letter")) == "The letter"
    assert not best.decoder.training and not any(weight.requires_grad for weight in best.decoder.parameters())


def test_a_run_is_found_by_name_and_says_what_it_wrote_down(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    run = lm.load_run("small")
    assert run.status() == "finished" and list(run.steps())[-1] == 12
    assert [line["step"] for line in run.metrics() if "train/loss" in line] == list(range(1, 13))
    with pytest.raises(RequestError, match="no run 'smal' under checkpoints.*did you mean small"):
        lm.load_run("smal")


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_logits_are_those_of_the_weights_in_the_folder(config, tmp_path):
    decoder = trained_like(config)
    model = lm.load_model(write_model(decoder, tmp_path), device="cpu")
    assert model.step is None and model.config == config and model.dtype == torch.float32
    ids = torch.randint(config.vocab_size, (2, 20))
    with torch.no_grad():
        assert torch.equal(model.decoder(ids), decoder.eval()(ids))
    half = lm.load_model(tmp_path, device="cpu", dtype="bfloat16")
    assert half.dtype == torch.bfloat16 and half.decoder(ids).dtype == torch.bfloat16
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, tmp_path / "model.safetensors")
    stored = lm.load_model(tmp_path, device="cpu")  # as its weights are stored
    assert stored.dtype == torch.bfloat16 and torch.equal(stored.decoder(ids), half.decoder(ids))


def test_what_is_wrong_with_a_folder_is_said_in_one_line(folder):
    def refused(message: str) -> None:
        with pytest.raises(RequestError, match=message) as caught:
            lm.load_model(folder, device="cpu")
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)

    tokenizer, config = (folder / name for name in ("tokenizer.json", "config.json"))
    kept = tokenizer.read_text(), config.read_text()
    tokenizer.unlink()
    refused("tokenizer.json is not there")
    tokenizer.write_text(train_char([chr(i) for i in range(200, 600)]).files()["tokenizer.json"])
    refused("the tokenizer has 402 ids and the model 101")
    tokenizer.write_text(kept[0])
    config.write_text("{")
    refused("config.json cannot be read")
    config.write_text(json.dumps({**json.loads(kept[1]), "hidden_size": 64, "head_dim": 12}))
    refused(r"embed_tokens.weight.* torch.Size\(\[101, 48\]\).* torch.Size\(\[101, 64\]\)")
    config.unlink()
    refused("is not a model: it has no config.json$")
    (folder / "small.gguf").touch()
    refused("no config.json; to use .*small.gguf: lm import --input .*small.gguf --output models/small$")
    config.write_text(kept[1])
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])
    refused("model.safetensors cannot be read .* is it damaged or truncated")


@pytest.mark.parametrize("name, value, message", [
    ("hidden_size", 48.5, "hidden_size 48.5 must be a whole number"),
    ("num_hidden_layers", 2.5, "a value is of another kind"),
    ("num_hidden_layers", "3", "a value is of another kind"),
    ("architectures", [["x"]], "a value is of another kind"),
    ("rope_parameters", [1], "a value is of another kind"),
    ("hidden_size", None, "config.json lacks hidden_size"),
])  # fmt: skip
def test_values_of_another_kind_are_refused_in_one_line(folder, name, value, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(RequestError, match=message):
        lm.load_model(folder)


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_a_device_that_is_not_there_is_said_in_one_line(folder, device):
    with pytest.raises(RequestError, match=f"device {device}: .*; `cpu` is everywhere, `cuda` a GPU"):
        lm.load_model(folder, device=device)


def test_integer_weights_are_refused(folder):
    with pytest.raises(AttributeError, match="bf16"):
        lm.load_model(folder, dtype="bf16")
    with pytest.raises(RequestError, match="is a file: give its folder"):
        lm.load_model(folder / "config.json")
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight.to(torch.int8) for name, weight in weights.items()}, folder / "model.safetensors")
    with pytest.raises(RequestError, match="named .embed_tokens.weight.* floating point"):
        lm.load_model(folder, device="cpu")


def test_a_name_will_do_and_a_stop_string_alone(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    (workplace / "small").mkdir()  # not a model, so the run is meant
    model = lm.load_model("small", device="cpu")
    [whole] = model.generate("Chapter", max_new_tokens=12, seed=3, ignore_eos=True)
    stop = whole.text[4:6]
    [cut] = model.generate("Chapter", max_new_tokens=12, seed=3, ignore_eos=True, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.reason == "stop"
    [begun] = model.generate("", max_new_tokens=12, seed=3)
    assert begun.text == model.generate("", max_new_tokens=12, seed=3, begin="eos")[0].text

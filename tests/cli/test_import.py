"""A model of others becomes a checkpoint that a new run starts from: its weights, its tokenizer, and how it is used."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
import yaml
from decoders import LLAMA3, SHAPES, trained_like, write_huggingface
from other_tokenizers import write_tokenizer
from safetensors.torch import load_file, save_file
from trainings import CORPUS, lm, losses, trace, write_config
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lm import load_model
from lm.cli.convert import export, import_model
from lm.cli.model_options import ExportOptions, ImportOptions
from lm.data.tokenizer import Tokenizer
from lm.data.tokenizer_training import train_char
from lm.errors import RequestError
from lm.inference.pretrained import read_weights
from lm.model.config import DecoderConfig
from lm.runs.checkpoint import read_folder
from lm.runs.resume import find_checkpoint
from lm.runs.run import Run
from lm.runs.trainer_json import find_damage
from lm.system.arguments import call

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 48, "max_position_embeddings": 64, "vocab_size": 80, "initializer_range": 0.2,
}  # fmt: skip
MODELS = {
    "llama": lambda **sizes: LlamaForCausalLM(LlamaConfig(**SIZES | {"tie_word_embeddings": False} | sizes)),
    "llama, tied, bf16": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).bfloat16(),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{name: size for name, size in SIZES.items() if name != "head_dim"})),
    "qwen3, bf16": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)).bfloat16(),
    "qwen3, tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "qwen3, windows": lambda: Qwen3ForCausalLM(Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)),
}  # fmt: skip


def save(path, kind="llama", max_shard_size="5GB", **sizes):
    """A model of transformers' with random weights, as it saves them, and a tokenizer of the characters of CORPUS."""
    torch.manual_seed(0)
    model = MODELS[kind](**sizes)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    for name, text in train_char([CORPUS, "\n"]).files().items():
        (path / name).write_text(text)
    return path


@pytest.fixture(scope="module")
def workplace(workplace):
    """A folder with texts, a sharded model in bfloat16, and a checkpoint that was imported from it."""
    save(workplace / "hf", "qwen3, bf16", max_shard_size="10KB")
    done = lm(workplace, "import", "--input", "hf", "--output", "models/qwen")
    assert done.stdout == "models/qwen\n" and "--ckpt_path models/qwen" in done.stderr
    return workplace


def config(folder, name, **changes):
    """The arguments of a fit that begins with the imported model, with data made by its tokenizer."""
    settings = {"data.path": "data/qwen", "data.prepare.tokenizer": "models/qwen", "data.seq_len": 32,
                "model.decoder.dropout": 0.0, **changes}  # fmt: skip
    path = write_config(folder, name, **settings)
    return ("fit", "--config", str(path), "--config", "models/qwen/model.yaml", "--run", name)


def train_losses(folder, run):
    return [line["train/loss"] for line in Run(folder / "checkpoints" / run).metrics("train/loss")]


# ---- the checkpoint --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", ["5GB", "10KB"])
@pytest.mark.parametrize("kind", MODELS)
def test_weights_and_shape_are_those_that_transformers_saved(kind, size, tmp_path):
    source = save(tmp_path / "hf", kind, max_shard_size=size)
    assert (len(list(source.glob("*.safetensors"))) > 1) is (size == "10KB")
    import_model(ImportOptions(str(source), str(tmp_path / "made")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "made"]
    assert find_damage(tmp_path / "made") is None
    state, saved = read_folder(tmp_path / "made")["state_dict"], read_weights(source)
    assert state.keys() == saved.keys()
    assert all(weight.dtype == torch.float32 and torch.equal(weight, saved[name].float())
               for name, weight in state.items())  # fmt: skip
    theirs = [AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("hf", "made")]
    ids = torch.randint(80, (2, 64))
    with torch.no_grad():
        torch.testing.assert_close(theirs[0](ids).logits, theirs[1](ids).logits, atol=0, rtol=0)


NARROW = {"head_dim": 8, "num_key_value_heads": 4}  # what Llama derives from hidden_size and the heads
UNSAID = {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}
DEFAULT = {"rope_type": "default", "rope_theta": 7.0}


@pytest.mark.parametrize("sizes, document", [
    (NARROW, {"head_dim": None, "num_key_value_heads": None}),
    (NARROW, {"head_dim": ..., "num_key_value_heads": ...}),
    ({}, {"rms_norm_eps": 0.3, "attention_bias": False, "mlp_bias": False}),
    ({}, {"rope_parameters": ..., "rope_theta": 500.0}),
    ({}, {"rope_parameters": DEFAULT, "rope_theta": 500.0}),
    ({}, {"rope_parameters": DEFAULT, "rope_scaling": {"rope_type": "default", "rope_theta": 500.0}}),
    ({}, {"rope_parameters": DEFAULT, "rope_scaling": {"rope_type": "default"}, "rope_theta": 500.0}),
    ({}, {"rope_parameters": DEFAULT, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    ({}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}}),
    ({}, {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}),
    ({}, {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16}),
    ({}, {"rope_parameters": ..., "rope_scaling": UNSAID, "rope_theta": 500.0}),
    ({"tie_word_embeddings": True}, {}),
])  # fmt: skip
def test_a_config_is_read_as_transformers_reads_it(sizes, document, tmp_path):
    """By the import, which others load, by its YAML and by `lm.load_model`."""
    source, ids = save(tmp_path / "hf", **sizes), torch.arange(64)[None]
    settings = json.loads((source / "config.json").read_text()) | document
    settings = {name: value for name, value in settings.items() if value is not ...}
    (source / "config.json").write_text(json.dumps(settings))
    import_model(ImportOptions(str(source), str(tmp_path / "made")))
    model = load_model(source, device="cpu")
    shape = yaml.safe_load((tmp_path / "made" / "model.yaml").read_text())["model"]["decoder"]
    assert DecoderConfig(**shape) == model.config == load_model(tmp_path / "made", device="cpu").config
    with torch.no_grad():
        wanted, *logits = (AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits for name in ("hf", "made"))
        logits.append(model.decoder(ids))
    torch.testing.assert_close(logits, [wanted] * 2, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_yaml_gives_a_fit_this_very_decoder(shape, tmp_path):
    (tmp_path / "hf").mkdir()
    source = write_huggingface(trained_like(SHAPES[shape]), tmp_path / "hf")
    for name, text in train_char([CORPUS]).files().items():
        (source / name).write_text(text)
    import_model(ImportOptions(str(source), str(tmp_path / "made")))
    decoder = yaml.safe_load((tmp_path / "made" / "model.yaml").read_text())["model"]["decoder"]
    assert DecoderConfig(**decoder) == SHAPES[shape] and "dropout" not in decoder
    (tmp_path / "made" / "model.yaml").write_text("# as a person likes it\n")
    assert find_damage(tmp_path / "made") is None


def test_what_a_chat_needs_is_kept(tmp_path):
    """The template, all ends of a turn, the token before a text, sampling: as transformers finds them in the source."""
    source = save(tmp_path / "hf")
    write_tokenizer(source, "llama", [CORPUS])
    config = json.loads((source / "config.json").read_text())
    size = Tokenizer.load(source).vocab_size
    (source / "config.json").write_text(json.dumps({**config, "vocab_size": size, "bos_token_id": 1,
                                                    "eos_token_id": [2, 70]}))  # fmt: skip
    weights = read_weights(source)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.randn(size, 32)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 99}
    (source / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 70], **sampling}))
    import_model(ImportOptions(str(source), str(tmp_path / "made")))
    export(ExportOptions(ckpt_path=str(tmp_path / "made"), output=str(tmp_path / "out")))
    wanted, *found = (described_by_transformers(folder) for folder in (source, tmp_path / "made", tmp_path / "out"))
    assert wanted["generation"].items() >= {"eos_token_id": [2, 70], "bos_token_id": 1, **sampling}.items()
    assert wanted["chat"] == "hello</s>" and wanted["ids"][0] == 1 and found == [wanted] * 2


def described_by_transformers(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    generation = transformers.GenerationConfig.from_pretrained(folder).to_dict()
    own = {"transformers_version", "pad_token_id"}  # padding is ours where the source has none
    return {
        "ids": tokenizer("The garden of the river")["input_ids"],
        "special": (tokenizer.bos_token, tokenizer.eos_token),
        "config": (config.bos_token_id, config.eos_token_id, config.pad_token_id),
        "chat": tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False),
        "generation": {name: value for name, value in generation.items()
                       if value is not None and name[0] != "_" and name not in own},
    }  # fmt: skip


# ---- training from it ------------------------------------------------------------------------------------------------
def test_a_new_run_begins_with_the_loss_of_the_imported_model(workplace):
    """Step 0, a fresh optimizer, and the same loss to the first step as transformers computes of the same samples."""
    (workplace / "trace.jsonl").unlink(missing_ok=True)
    lm(workplace, *config(workplace, "begun", **{"trainer.max_steps": 4}), "--ckpt_path", "models/qwen")
    run = Run(workplace / "checkpoints" / "begun")
    assert run.read("run.json")["stretches"] == [{"step": 0, "sample": 0, "global_batch": 8}]
    assert run.read("run.json")["status"] == "finished" and list(run.steps())[-1] == 4
    first = [torch.tensor(entry["tokens"]).view(4, 33) for entry in trace(workplace) if entry["step"] == 1]
    theirs, ids = AutoModelForCausalLM.from_pretrained(workplace / "hf", dtype=torch.float32), torch.cat(first)
    ours = train_losses(workplace, "begun")
    assert ours[0] == pytest.approx(theirs(ids, labels=ids).loss.item(), rel=1e-5) and ours[-1] < ours[0]
    state = json.loads((run.path / "last" / "trainer.json").read_text())
    assert state["global_step"] == 4 and state["cursor"]["consumed"] == 32
    done = lm(workplace, "validate", *config(workplace, "begun")[1:], "--ckpt_path", "models/qwen")
    assert done.stdout.startswith("val/loss ")


@pytest.mark.slow
def test_a_kill_and_a_resume_change_nothing(workplace):
    """Killed before its first checkpoint, such a run begins with the imported weights again, and not from scratch."""
    lm(workplace, *config(workplace, "whole"), "--ckpt_path", "models/qwen")
    expected = losses(workplace)
    for number, (micro_batch, code) in enumerate([(3, -9), (15, -9), (None, 0)]):
        kills = [{"class_path": "recorder.KillAt", "init_args": {"signal_name": "SIGKILL", "micro_batch": micro_batch}}]
        callbacks = [{"class_path": "recorder.Recorder"}, *(kills if micro_batch else [])]
        if not number:
            (workplace / "trace.jsonl").unlink()
        arguments = config(workplace, "killed", **{"trainer.callbacks": callbacks})
        lm(workplace, *arguments, "--ckpt_path", "auto" if number else "models/qwen", expect=code)
    assert losses(workplace) == expected
    assert list(Run(workplace / "checkpoints" / "killed").steps())[-1] == 12


@pytest.mark.slow
def test_shards_of_the_model_begin_as_the_whole_of_it_does(workplace):
    """Under FSDP2 the fresh optimizer is as fresh as in one process."""
    changes = {"trainer.max_steps": 4, "data.micro_batch_size": 2}
    lm(workplace, *config(workplace, "one", **changes), "--ckpt_path", "models/qwen")
    two = {**changes, "trainer.devices": 2, "trainer.strategy": "fsdp2"}
    lm(workplace, *config(workplace, "two", **two), "--ckpt_path", "models/qwen")
    assert train_losses(workplace, "two") == pytest.approx(train_losses(workplace, "one"), rel=1e-5)


def test_a_checkpoint_of_ours_makes_a_fresh_start(workplace):
    lm(workplace, *config(workplace, "ours", **{"trainer.max_steps": 3}), "--ckpt_path", "models/qwen")
    run = Run(workplace / "checkpoints" / "ours")
    import_model(ImportOptions(str(run.path), str(workplace / "again")))
    made, best = read_folder(workplace / "again"), read_folder(run.checkpoint("best"))
    assert all(torch.equal(made["state_dict"][name], weight) for name, weight in best["state_dict"].items())
    assert (made["global_step"], made["optimizer"], made["cursor"]) == (0, {}, {"consumed": 0})


def test_a_run_without_a_checkpoint_resumes_from_where_it_began(tmp_path):
    import_model(ImportOptions(str(save(tmp_path / "hf")), str(tmp_path / "made")))
    run = Run.create("mine", tmp_path / "checkpoints")
    run.describe(name="mine", began_from=str(tmp_path / "made"))
    asked = {"reference": "auto", "name": "mine", "root": str(tmp_path / "checkpoints"), "named": True}
    assert find_checkpoint(**asked, command="fit")[0] == tmp_path / "made"
    (tmp_path / "made" / "config.json").write_text("{}")
    with pytest.raises(RequestError, match="began from is damaged: .*config.json is damaged"):
        find_checkpoint(**asked, command="fit")


# ---- what is refused -------------------------------------------------------------------------------------------------
def test_data_of_another_tokenizer_is_refused_before_there_is_a_run(workplace):
    arguments = config(workplace, "other", **{"data.path": "data/other", "data.prepare.tokenizer": "other.json"})
    vocabulary = json.loads((workplace / "models" / "qwen" / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"] |= {"a": vocabulary["model"]["vocab"]["b"], "b": vocabulary["model"]["vocab"]["a"]}
    (workplace / "other.json").write_text(json.dumps(vocabulary))
    done = lm(workplace, *arguments, "--ckpt_path", "models/qwen", expect=2)
    assert "the data's tokenizer" in done.stderr.splitlines()[-1] and "is not the checkpoint's" in done.stderr
    assert not (workplace / "checkpoints" / "other").exists()


def change(**values):
    def apply(folder):
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return apply


def pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize("spoil, named", [
    (pickle, "pytorch_model.bin is a pickle"),
    (change(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    (change(tie_word_embeddings=True), "lm_head.weight is not model.embed_tokens.weight"),
    (change(vocab_size=20), r"tokenizer has \d+ ids and the model 20|embed_tokens.weight"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json; transformers makes one: AutoTokenizer"),
    (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    (lambda folder: shutil.rmtree(folder), "hf is not there"),
])  # fmt: skip
def test_what_cannot_be_trained_on_is_refused_in_one_line_and_makes_nothing(spoil, named, tmp_path):
    source = save(tmp_path / "hf")
    spoil(source)
    with pytest.raises(RequestError, match=named) as caught:
        import_model(ImportOptions(str(source), str(tmp_path / "made")))
    assert "\n" not in str(caught.value)
    if (source / "config.json").exists() and (source / "tokenizer.json").exists():
        with pytest.raises(RequestError, match=named):
            load_model(source, device="cpu")
    assert not (tmp_path / "made").exists() and not list(tmp_path.glob(".*"))


def test_places_that_are_taken_are_refused(tmp_path):
    source = save(tmp_path / "hf")
    with pytest.raises(RequestError, match="there already"):
        import_model(ImportOptions(str(source), str(source)))
    with pytest.raises(RequestError, match="--input and the folder to make"):
        call(ImportOptions, [], prog="lm import")


def test_a_gguf_of_qwen3_says_how_wide_its_heads_are(tmp_path):
    """transformers takes 128 for any, and refuses the weights of others."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    heads, kv_heads, width, size, inner, count = 4, 2, 24, 64, 96, 258
    file = gguf.GGUFWriter(tmp_path / "q.gguf", "qwen3")
    for name, value in {"context_length": 64, "embedding_length": size, "block_count": 1, "feed_forward_length": inner,
                        "head_count": heads, "head_count_kv": kv_heads, "key_length": width, "value_length": width,
                        "layer_norm_rms_eps": 1e-6, "rope_freq_base": 1e4, "tokenizer_model": "gpt2",
                        "tokenizer_pre": "qwen2", "token_list": [*map(chr, range(256, 512)), "ĀĀ", "<|endoftext|>"],
                        "token_types": [1] * 257 + [3], "token_merges": ["Ā Ā"], "eos_token_id": 257}.items():  # fmt: skip
        getattr(file, f"add_{name}")(value)
    shapes = {"attn_q": (heads * width, size), "attn_k": (kv_heads * width, size), "attn_v": (kv_heads * width, size),
              "attn_output": (size, heads * width), "ffn_gate": (inner, size), "ffn_up": (inner, size),
              "ffn_down": (size, inner), "attn_norm": size, "ffn_norm": size, "attn_q_norm": width,
              "attn_k_norm": width}  # fmt: skip
    shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()}
    shapes |= {"token_embd": (count, size), "output": (count, size), "output_norm": size}
    weights = {name: np.random.default_rng(0).normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, weight in weights.items():
        file.add_tensor(f"{name}.weight", weight)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    import_model(ImportOptions(str(tmp_path / "q.gguf"), str(tmp_path / "q")))
    found = load_file(tmp_path / "q/model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(found, torch.from_numpy(weights["blk.0.attn_q"]))

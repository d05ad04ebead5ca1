"""An export for llama.cpp: to llama.cpp itself it is the same model, with the same ids of any text."""

import json
from dataclasses import replace

import llama_cpp
import pytest
import torch
from decoders import LLAMA3, SHAPES, SMALL, trained_like, write_huggingface
from gguf import GGUFReader
from other_tokenizers import byte_level, qwen2
from tokenizers import Regex, pre_tokenizers

from lm.cli.convert import export
from lm.cli.model_options import ExportOptions
from lm.data.encoder import hard_texts
from lm.data.tokenizer import Tokenizer as OurTokenizer
from lm.data.tokenizer_training import WORDS, train_bpe, train_char
from lm.errors import RequestError
from lm.inference.gguf import write_gguf
from lm.inference.pretrained import load_pretrained

pytest.importorskip("xllamacpp")

IDS = torch.randint(1, 250, (40,), generator=torch.Generator().manual_seed(1)).tolist()
ROWS = 410  # of the embedding: more than the tokenizer has tokens
TEXTS = ["It's the people's right, isn't it? I'LL say 1234 and 56.7%:\n\n  Zürich, 日本語 \t\n"] * 3 + hard_texts()
LLAMAS = {
    "llama 3": replace(SMALL, rope_scaling=LLAMA3, tie_word_embeddings=False, hidden_size=64, intermediate_size=96),
    **{name: shape for name, shape in SHAPES.items() if shape.window_pattern is None},
    "qwen3, untied": replace(SHAPES["qwen3, untied"], rope_scaling=None),
    "windows of the whole context": replace(SHAPES["ministral, windows"], sliding_window=64),
}


def ours():
    return train_bpe(TEXTS, 300)


def splitting(expression, **model):
    """A byte-level BPE that splits by an expression."""

    def make():
        backend = byte_level(TEXTS)
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        document = json.loads(backend.to_str())
        return OurTokenizer(json.dumps({**document, "model": {**document["model"], **model}}))

    return make


def smollm():
    """As GPT-2, with each digit by itself."""
    backend = byte_level(TEXTS)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return OurTokenizer(backend.to_str())


TOKENIZERS = {
    "ours": ours,
    "gpt-2": lambda: OurTokenizer(byte_level(TEXTS).to_str()),
    "llama 3": splitting(WORDS, ignore_merges=True),
    "qwen 2": lambda: OurTokenizer(qwen2(TEXTS).to_str()),
    "smollm": smollm,
}


def make_model(folder, shape, tokenizer=None):
    folder.mkdir(exist_ok=True)
    write_huggingface(trained_like(replace(shape, vocab_size=ROWS)), folder)
    for name, text in (tokenizer or ours()).files().items():
        (folder / name).write_text(text)
    return load_pretrained(folder, device="cpu")


def log_probabilities(model):
    """Of all tokens after each prefix of `IDS`: (len(IDS), ROWS)."""
    with torch.no_grad():
        return model.decoder(torch.tensor([IDS]))[0].log_softmax(-1)


def following(model, file):
    """The same by llama.cpp."""
    prefixes = [IDS[: length + 1] for length in range(len(IDS))]
    chosen = model.tokenizer.vocabulary["a"]
    return torch.tensor(llama_cpp.ask(file, prompts=prefixes, rows=ROWS, chosen=chosen)[1])


@pytest.mark.parametrize("shape", LLAMAS)
def test_llama_cpp_computes_the_same(shape, tmp_path):
    model = make_model(tmp_path, LLAMAS[shape])
    write_gguf(model, tmp_path / "model.gguf", "float32", {"name": "small"})
    difference = following(model, tmp_path / "model.gguf") - log_probabilities(model)
    assert difference.abs().max().item() < 1e-3


@pytest.mark.parametrize(
    "kind", ["ours", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(TOKENIZERS)[1:])]
)
def test_every_text_has_the_same_ids(kind, tmp_path):
    model = make_model(tmp_path, SMALL, TOKENIZERS[kind]())
    write_gguf(model, tmp_path / "model.gguf", "float16", {})
    ids, _ = llama_cpp.ask(tmp_path / "model.gguf", texts=TEXTS)
    different = [text for text, own, other in zip(TEXTS, model.tokenizer.encode_batch(TEXTS), ids) if own != other]
    assert not different


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.01), ("float16", 0.001), ("q8_0", 0.01)])
def test_the_perplexity_is_that_of_the_model(dtype, tolerance, tmp_path):
    """Rows of 64 and 96 weights, of which q8_0 takes 32 at a time."""
    model = make_model(tmp_path, replace(LLAMAS["llama 3"], initializer_range=0.05))
    write_gguf(model, tmp_path / "model.gguf", dtype, {})
    mine, theirs = (
        rows[range(len(IDS) - 1), IDS[1:]].mean().neg().exp().item()
        for rows in (log_probabilities(model)[:-1], following(model, tmp_path / "model.gguf")[:-1])
    )
    assert theirs == pytest.approx(mine, rel=tolerance)


@pytest.mark.parametrize("shape, tokenizer, reason", [
    (SHAPES["qwen3, windows"], None, "no sliding windows"),
    (SHAPES["ministral, windows"], None, "no sliding windows"),
    (SHAPES["qwen3, untied"], None, "llama3 in a Llama, not in a Qwen3"),
    (SMALL, train_char(["abc"]), "byte-level BPE"),
    (SMALL, splitting(r"\p{L}+|[^\p{L}]+")(), "it would see other ids"),
])  # fmt: skip
def test_what_llama_cpp_would_compute_otherwise_is_refused(shape, tokenizer, reason, tmp_path):
    model = make_model(tmp_path, shape, tokenizer)
    with pytest.raises(RequestError, match=reason):
        write_gguf(model, tmp_path / "model.gguf", "float32", {})


def test_tokens_that_begin_and_end_are_those_of_the_tokenizer(tmp_path):
    """Of ours what ends a document also begins one; of a Llama 3 the beginning, and the end of an answer beside it."""
    model = make_model(tmp_path, SMALL)
    names = ("bos_token_id", "add_bos_token", "eos_token_id", "eot_token_id")

    def written():
        write_gguf(model, tmp_path / "model.gguf", "float32", {})
        fields = GGUFReader(tmp_path / "model.gguf").fields
        return [fields[key].contents() if (key := f"tokenizer.ggml.{name}") in fields else None for name in names]

    eos_id, bos_id, eot_id = model.tokenizer.eos_id, 7, 9
    assert written() == [eos_id, False, eos_id, None]
    document, bos = model.tokenizer.description, list(model.tokenizer.vocabulary)[bos_id]
    bos_id = model.tokenizer.vocabulary[bos]
    document["post_processor"] = {"type": "TemplateProcessing", "pair": [], "special_tokens": {bos: {"id": bos, "ids": [
        bos_id], "tokens": [bos]}}, "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}  # fmt: skip
    model = replace(model, tokenizer=OurTokenizer(json.dumps(document), {"bos_token": bos}, model.tokenizer.eos_token))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos_id, eot_id]}))
    assert written() == [bos_id, True, eos_id, eot_id]


def test_matrices_that_q8_0_cannot_divide_are_counted(tmp_path, caplog):
    model = make_model(tmp_path, replace(SMALL, intermediate_size=72))
    with caplog.at_level("INFO", "lm"):
        write_gguf(model, tmp_path / "model.gguf", "q8_0", {})
    kinds = [tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "model.gguf").tensors if len(tensor.shape) > 1]
    assert f"{kinds.count('F32')} of {len(kinds)} matrices stay in fp32: q8_0 needs rows of a multiple" in caplog.text


def test_the_command_writes_a_file_a_modelfile_and_a_card(tmp_path):
    make_model(tmp_path / "hf", SMALL)
    options = {"ckpt_path": str(tmp_path / "hf"), "format": "gguf", "dtype": "q8_0", "license": "apache-2.0"}
    export(ExportOptions(output=str(tmp_path / "out"), **options))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"out.gguf", "Modelfile", "README.md"}
    lines = ["FROM ./out.gguf", f"PARAMETER num_ctx {SMALL.max_position_embeddings}", 'TEMPLATE """{{ .Prompt }}"""']
    assert (tmp_path / "out/Modelfile").read_text().splitlines() == lines
    card = (tmp_path / "out/README.md").read_text()
    assert "library_name: gguf" in card and "llama-cli -m out.gguf" in card and "from_pretrained" not in card
    fields = GGUFReader(tmp_path / "out/out.gguf").fields
    values = [fields[f"general.{name}"].contents() for name in ("architecture", "name", "license")]
    assert values == ["llama", "out", "apache-2.0"]
    with pytest.raises(RequestError, match="q8_0 is a format of llama.cpp: give --format gguf"):
        ExportOptions(output="x", dtype="q8_0")

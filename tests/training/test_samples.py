"""Samples of a real training: they show what its weights say, and the training continues as if nobody had asked."""

import json
import textwrap
import time

import pytest
import tokenizers
import torch
from decoders import written_by
from lightning.pytorch import Callback
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import decoders, models
from trainings import fit, losses, make_workplace

from lm.data.tokenizer import END_OF_TEXT, Tokenizer, train_bpe
from lm.errors import RequestError
from lm.inference.generation import Sampling, generate
from lm.model.decoder import Decoder
from lm.model.huggingface import config_from_json, from_huggingface
from lm.training.callbacks import evaluation
from lm.training.callbacks.evaluation import continued
from lm.training.config import SamplesConfig

PROMPTS = ["The letter of ", "", "Chapter 1"]
OPTIONS = {"prompts": PROMPTS, "max_new_tokens": 12, "temperature": 0.5, "top_k": 5, "seed": 3}
PAUSE = 2.0  # seconds


class Obstacles(Callback):
    """Samples take long, at step 8 the weights are broken, and `samples.jsonl` cannot be written to."""

    def __init__(self) -> None:
        evaluation.generate = self.generate

    def on_train_start(self, trainer, pl_module):
        self.trainer = trainer
        if trainer.is_global_zero:
            (trainer.run.path / "samples.jsonl").mkdir()

    def generate(self, decoder, prompts, sampling):
        time.sleep(PAUSE)
        kept = decoder.norm.weight.detach().clone()
        try:
            with torch.no_grad():
                if self.trainer.global_step == 8:
                    decoder.norm.weight.fill_(torch.nan)
            yield from generate(decoder, prompts, sampling)
        finally:
            with torch.no_grad():
                decoder.norm.weight.copy_(kept)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("samples"))


def written(run):
    return [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]


def in_tensorboard(run):
    """(step, prompt's index) -> text."""
    events = EventAccumulator(str(run.path), size_guidance={"tensors": 0}).Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.startswith("sample/")]
    return {
        (event.step, int(tag.split("/")[1])): event.tensor_proto.string_val[0].decode()
        for tag in tags for event in events.Tensors(tag)
    }  # fmt: skip


def said_by(checkpoint):
    """What the weights of a checkpoint continue the prompts with."""
    config = config_from_json(json.loads((checkpoint / "config.json").read_text()))
    decoder, tokenizer = Decoder(config), Tokenizer.load(checkpoint)
    decoder.load_state_dict(from_huggingface(load_file(checkpoint / "model.safetensors"), config))
    prompts = [tokenizer.encode(text) or [tokenizer.eos_id] for text in PROMPTS]
    written = written_by(decoder, prompts, Sampling(0.5, 5, max_new_tokens=12, seed=3))
    return [continued(tokenizer, prompt, tokens) for prompt, (tokens, _) in zip(prompts, written, strict=True)]


# ---- in a training --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_losses_are_those_without_samples_and_samples_those_of_the_weights(workplace):
    """Also with dropout, over a kill and a resume, and in both logs."""
    fit(workplace, "without")
    expected = losses(workplace)
    (workplace / "trace.jsonl").unlink()
    kill = {"class_path": "recorder.KillAt", "init_args": {"signal_name": "SIGKILL", "micro_batch": 16}}
    for callbacks, code in (([kill], -9), ([], 0)):
        callbacks = [{"class_path": "recorder.Recorder"}, *callbacks]
        changes = {"samples": {**OPTIONS, "interval": 2}, "trainer.callbacks": callbacks, "trainer.keep_checkpoints": 9}
        _, run = fit(workplace, "with", "--ckpt_path", "auto", expect=code, **changes)
    assert losses(workplace) == expected
    lines = written(run)
    assert all(line["tokens"] == line["step"] * 256 for line in lines)
    texts = {(line["step"], line["prompt"]): line["text"] for line in lines}
    assert all(texts[line["step"], line["prompt"]] == line["text"] for line in lines)  # those written twice, too
    assert texts.keys() == {(step, prompt) for step in (2, 4, 6, 8, 10, 12) for prompt in PROMPTS}
    for step in (6, 12):
        assert [texts[step, prompt] for prompt in PROMPTS] == said_by(run.steps()[step])
    assert len({text for (_, prompt), text in texts.items() if prompt == ""}) > 2  # they change as it learns
    shown = in_tensorboard(run)
    for (step, prompt), text in texts.items():
        assert shown[step, PROMPTS.index(prompt)] == textwrap.indent(prompt + text, "    ", lambda line: True)


@pytest.mark.slow
def test_ranks_that_share_a_model_write_one_set_after_every_validation(workplace):
    """And blocks that are compiled do not mind."""
    changes = {"trainer.devices": 2, "trainer.strategy": "fsdp2", "data.micro_batch_size": 2, "trainer.callbacks": [],
               "trainer.max_steps": 8, "model.compile": "triton_free", "samples": OPTIONS}  # fmt: skip
    _, run = fit(workplace, "shared", **changes)
    lines = written(run)
    assert [(line["step"], line["prompt"]) for line in lines] == [(step, text) for step in (4, 8) for text in PROMPTS]
    assert [line["text"] for line in lines[3:]] == said_by(run.checkpoint("last"))


@pytest.mark.slow
def test_nothing_that_goes_wrong_stops_the_training_and_its_clock_is_stopped(workplace):
    """On two ranks with a whole model each, of which the first alone writes."""
    changes = {"trainer.callbacks": [{"class_path": "test_samples.Obstacles"}], "trainer.devices": 2,
               "data.micro_batch_size": 2, "trainer.max_steps": 8,
               "samples": {**OPTIONS, "prompts": ["The"], "interval": 2}}  # fmt: skip
    ended, run = fit(workplace, "obstacles", **changes)
    assert ended.stderr.count("Is a directory") == 3
    assert "no samples at step 8: the logits are not finite" in ended.stderr
    assert run.read("run.json")["status"] == "finished" and in_tensorboard(run).keys() == {(2, 0), (4, 0), (6, 0)}
    rates = [entry["perf/tokens_per_second"] for entry in run.metrics() if entry["step"] in (3, 5, 7)]
    assert len(rates) == 3 and all(256 / rate < PAUSE for rate in rates)


# ---- the request, and the text --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"interval": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": 0}])
def test_wrong_numbers_are_refused(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(RequestError, match=f"samples.{name} {value}"):
        SamplesConfig(**wrong)


def test_a_text_ends_with_its_document_and_reads_on_from_the_prompt():
    tokenizer = train_bpe(["a short text, and another: é"], 300)
    prompt, end = tokenizer.encode("a sh"), tokenizer.vocabulary[END_OF_TEXT]
    assert continued(tokenizer, prompt, tokenizer.encode("ort")) == "ort"
    assert continued(tokenizer, prompt, [*tokenizer.encode("ort"), end, *tokenizer.encode("text")]) == "ort"
    assert continued(tokenizer, [end], tokenizer.encode("text")) == "text"


def test_blanks_between_words_are_kept():
    """Tokenizers such as Llama's drop the blank before the first word of whatever they decode."""
    words = models.WordLevel({END_OF_TEXT: 0, "▁the": 1, "▁letter": 2}, unk_token=END_OF_TEXT)
    backend = tokenizers.Tokenizer(words)
    backend.decoder = decoders.Metaspace()
    assert continued(Tokenizer(backend.to_str()), [1], [2, 1]) == " letter the"

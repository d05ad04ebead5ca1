"""Training from Python, by scripts of `lm/training/README.md`: functions, `lm.Trainer`, Lightning's Trainer and CLI."""

import csv
import json
import math
import re
from dataclasses import fields
from inspect import signature

import pytest
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from trainings import HERE, lm, make_workplace, start, wait_until

import lm as package
from lm.data.config import DataConfig
from lm.errors import Interrupted, RequestError
from lm.inference.pretrained import Pretrained
from lm.runs.run import Run
from lm.runs.trainer_json import find_damage
from lm.training.callbacks.guards import NotFinite
from lm.training.callbacks.samples import Samples
from lm.training.config import GuardsConfig, ModelConfig, SamplesConfig, TrainerConfig
from lm.training.end_of_run import end_run
from lm.training.trainer import Trainer as BareTrainer

README = (HERE.parent / "lm" / "training" / "README.md").read_text()
SECTION, LIGHTNING = (
    re.search(rf"## {title}\n(.*?)\n## ", README, re.DOTALL)[1]
    for title in ("Train from Python", "Use Lightning's own Trainer or CLI")
)
FUNCTIONS, TRAINER = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
[CLI], [CLI_YAML] = (re.findall(rf"```{kind}\n(.*?)```", LIGHTNING, re.DOTALL) for kind in ("python", "yaml"))
SMALL = {"max_steps": 4, "val_interval": 2, "checkpoint_interval": 3, "max_position_embeddings": 32}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("python"), "data/tiny")


def write(folder, script, **changes):
    """A file with a script of the page, with these numbers in place of its own."""
    for name, value in changes.items():
        script, found = re.subn(rf'("{name}": |{name}=)[\d_]+', rf"\g<1>{value}", script)
        assert found == 1, name
    file = folder / "script.py"
    file.write_text(script)
    return file.name


def test_the_functions_do_what_the_commands_do(workplace):
    """They return values, and a mistake is an exception that can be caught."""
    script = FUNCTIONS.replace("my_texts/", "texts/").replace("vocab_size=8192", 'tokenizer="char", val_fraction=0.2')
    script = script.replace('"tiny.yaml", {', '"tiny.yaml", SMALL | {').replace('max_steps": 50', 'max_steps": 2')
    small = {"model.decoder.hidden_size": 32, "model.decoder.num_hidden_layers": 1, "samples.prompts": [],
             "data.val_tokens": 512, "data.seq_len": 32, "data.global_batch_tokens": 512}  # fmt: skip
    more = """
try:
    lm.fit("tiny.yaml", {"trainer.max_step": 3})
except Exception as error:
    print(type(error).__name__, error)
class Stop(lm.Callback):
    def on_metrics(self, trainer, pl_module, metrics):
        import os, signal
        os.kill(os.getpid(), signal.SIGINT)
options = SMALL | {"data.path": "data/mine", "trainer.max_steps": 6, "trainer.log_interval": 1}
try:
    lm.fit("tiny.yaml", options, run="stopped", callbacks=[Stop()])
except Exception as error:
    print(type(error).__name__, error)
import signal
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print("steps", list(lm.fit("tiny.yaml", options, run="stopped", ckpt_path="auto").steps()))
"""
    said = lm(workplace, write(workplace, f"SMALL = {small!r}\n{script}{more}"))
    out = said.stdout.splitlines()
    assert "'val/loss': " in out[0] and out[0].endswith("checkpoints/mine/step-00000002")
    assert "'bits_per_byte': " in said.stdout
    assert "RequestError there is no option 'trainer.max_step'; did you mean 'trainer.max_steps'?" in said.stdout
    assert re.search(r"Interrupted SIGINT: stopped after step 1 with a checkpoint", said.stdout)
    assert out[-2:] == ["True", "steps [1, 6]"]
    assert "step 2/2  validation loss" in said.stderr


class Own(package.Callback):
    pass


DECODER = package.DecoderConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=8)
ON_CPU = {"max_steps": 1, "accelerator": "cpu"}
LOADER = "data from an lm.DataModule, and this is a DataLoader"
MISTAKES = {
    "not a count": (lambda: package.Trainer(max_tokens="2Q"), r"^lm\.Trainer\(max_tokens='2Q'\): expected a count"),
    "no number": (lambda: package.DataModule("data", val_tokens=math.nan), r"^DataModule\(val_tokens=nan\): expected a"),
    "none of the validation": (lambda: package.DataModule("data", val_tokens=0), "data.val_tokens 0 must be at least 1"),
    "a loader": (lambda: package.Trainer(**ON_CPU).fit(package.LanguageModule(DECODER), DataLoader([1])), LOADER),
    "a loader to validate": (
        lambda: package.Trainer(**ON_CPU).validate(package.LanguageModule(DECODER), DataLoader([1])), LOADER),
    "another module": (lambda: package.Trainer(**ON_CPU).fit(LightningModule(), package.DataModule("data")),
                       "trains an lm.LanguageModule, and this is a LightningModule"),
    "a class as a module": (lambda: package.Trainer(**ON_CPU).fit(package.LanguageModule, package.DataModule("data")),
                            "and this is the class LanguageModule"),
    "another class": (lambda: package.fit("tiny.yaml", module=LightningModule), "module is the class LightningModule"),
    "no such option": (lambda: package.Trainer(max_step=3), r"^lm\.Trainer: .*'max_step'; did you mean 'max_steps'\?$"),
    "none of a module": (lambda: package.LanguageModule(DECODER, optimiser=3),
                         "^LanguageModule: there is no option 'optimiser'; did you mean 'optimizer'?"),
    "none of the data": (lambda: package.DataModule("data", micro_batch=4), "^DataModule: .*'micro_batch_size'"),
    "a group of a fit": (lambda: package.fit("tiny.yaml", {"trainer": {"max_steps": "x"}}),
                         r"^trainer\.max_steps: expected a count"),
    "none of a group": (lambda: package.fit("tiny.yaml", {"trainer": {"max_step": 5}}),
                        "did you mean 'trainer.max_steps'"),
    "none of a text": (lambda: Pretrained.generate(None, "x", max_tokens=5),
                       r"^generate: .* 'max_tokens'; did you mean 'max_new_tokens'\?$"),
    "none of a preparation": (lambda: package.prepare("a", "b", vocabulary=4), "^lm.prepare: .* no option 'vocabulary'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake, said", MISTAKES.values(), ids=MISTAKES)
def test_an_object_of_another_kind_is_refused_in_one_line(tmp_path, monkeypatch, mistake, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=said) as refused:
        mistake()
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())


def test_counts_are_taken_as_in_a_config():
    trainer = package.Trainer(max_tokens="2K", val_interval="1K", accelerator="cpu")
    assert trainer.options.max_tokens == 2000 and trainer.options.val_interval == 1000
    assert package.DataModule("data", global_batch_tokens="32Ki").global_batch_tokens == 32_768


def test_the_trainer_takes_the_other_sections_of_a_config_by_name():
    given = {"guards": GuardsConfig(max_skipped=3), "samples": SamplesConfig(prompts=["a"])}
    callbacks = package.Trainer(**given, **ON_CPU).callbacks
    assert [each.max_skipped for each in callbacks if isinstance(each, NotFinite)] == [3]
    assert [each.prompts for each in callbacks if isinstance(each, Samples)] == [["a"]]


@pytest.mark.parametrize("kind, config", [
    (BareTrainer, TrainerConfig), (package.LanguageModule, ModelConfig), (package.DataModule, DataConfig),
])  # fmt: skip
def test_help_shows_the_fields_of_the_dataclass(kind, config):
    """Each call makes its own defaults: a change of one is not seen by the next."""
    parameters = signature(kind).parameters
    assert list(parameters) == [option.name for option in fields(config)]
    assert "Args:" in kind.__init__.__doc__
    if kind is package.LanguageModule:
        one, other = kind(DECODER), kind(DECODER)
        one, other = one.options.optimizer, other.options.optimizer
        assert one == other and one is not other


def test_what_a_subclass_adds_is_in_its_hyperparameters():
    class Mine(package.LanguageModule):
        def __init__(self, width: int = 3, **options):
            super().__init__(**options)

    assert dict(Mine(decoder=DECODER, document_mask=True, width=4).hparams) == {"width": 4}
    assert not package.LanguageModule(DECODER, document_mask=True).hparams


def test_the_trainer_makes_a_run_and_resumes_it(workplace):
    """A run folder with whole checkpoints, by the same script; the commands know the run."""
    paths = "print('best', *(getattr(trainer.checkpoint_callback, f'{name}_model_path') for name in ('best', 'last')))"
    said = lm(workplace, write(workplace, f"{TRAINER}\n{paths}\n", **SMALL))
    run = Run(workplace / "checkpoints" / "objects")
    assert run.status() == "finished" and find_damage(run.checkpoint("last")) is None and run.link("best")
    best, last = re.search(r"best (\S+) (\S+)", said.stdout).groups()
    assert [workplace / best, workplace / last] == [run.link("best").resolve(), run.link("last").resolve()]
    measured = float(re.search(r"'val/loss': ([\d.]+)", said.stdout)[1])
    assert measured == pytest.approx(run.metrics("val/loss")[-1]["val/loss"])
    lm(workplace, write(workplace, TRAINER, **SMALL | {"max_steps": 6}))
    assert [line["step"] for line in run.metrics("val/loss")] == [2, 4, 6] and list(run.steps())[-1] == 6
    assert "6/6" in lm(workplace, "runs", "ls").stdout
    assert lm(workplace, "generate", "--run", "objects", "--prompt", "Chapter", "--max_new_tokens", "4").stdout


def test_a_trainer_trains_one_run():
    trainer = package.Trainer()
    trainer.run_state.run = Run("checkpoints/first")  # as after a fit
    with pytest.raises(RequestError, match="has trained run checkpoints/first: make another lm.Trainer"):
        trainer.fit(package.LanguageModule(package.DecoderConfig()), package.DataModule("data/tiny"))


def test_a_trainer_without_a_callback_for_checkpoints_ends_too():
    with pytest.raises(Interrupted, match="a signal on another rank: stopped in the first step; "):
        end_run(BareTrainer(**ON_CPU))


TWICE = """
import json
import threading
from pathlib import Path

import lightning
import numpy as np
import torch
from safetensors.torch import load_file

import lm
from lm.data.config import SourceConfig


def train(name, data, context=16, kind=lm.LanguageModule, ckpt_path=None, callbacks=()):
    lightning.seed_everything(1)
    module = kind(lm.DecoderConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                   max_position_embeddings=context))
    trainer = lm.Trainer(name, max_steps=4, val_interval=2, checkpoint_interval=2, accelerator="cpu",
                         callbacks=callbacks)
    trainer.fit(module, data, ckpt_path)
    return trainer, module


class Stop(lm.Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step == 2


class Scheduled(lm.LanguageModule):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.decoder.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def data(path="data/tiny"):
    return lm.DataModule(path, micro_batch_size=2, val_tokens=256)


def refusal(train, *arguments, **options):
    try:
        train(*arguments, **options)
    except Exception as error:
        return str(error)


def weights(name):
    return load_file(Path("checkpoints", name, "last/model.safetensors"))


used = data()
train("halted", used, callbacks=[Stop()])
train("halted", used, ckpt_path="auto")
train("second", used)
trainer, module = train("fresh", data())
found = {"fresh again": all(weights("second")[name].equal(weight) for name, weight in weights("fresh").items())}
train("wide", used, context=32)
found["context"] = used.seq_len
found["alone"] = len(list(lm.DataModule("data/tiny", seq_len=16, micro_batch_size=2, val_tokens=256).val_dataloader()))
lm.Trainer("again", max_steps=2).fit(module, data())
sources = [SourceConfig("a", "data/tiny"),
           SourceConfig("b", train="data/tiny/val", val="data/tiny/train", tokenizer="data/tiny")]
mixed = trainer.validate(module, lm.DataModule(sources=sources, seq_len=16, val_tokens=256))
found["of a source"] = "val/loss/b" in mixed and "val/loss/b" not in trainer.validate(module, data())
found["other tokenizer"] = refusal(lm.Trainer("bytes", max_steps=2).fit, module, data("data/bytes"))
found["scheduler"] = refusal(train, "scheduled", data(), kind=Scheduled)
config = {"trainer": {"max_steps": np.int64(2)}, "data": {"path": Path("data/tiny"), "micro_batch_size": 2},
          "model": {"decoder": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}}}
ended = []
thread = threading.Thread(target=lambda: ended.append(lm.fit(config, {"model.optimizer.lr": np.float32(1)}).status()))
thread.start()
thread.join()
print(json.dumps(found | {"in a thread": ended}))
"""


def test_objects_that_are_used_again_begin_anew(workplace):
    """And what a notebook does: data without a Trainer, numbers of numpy, a training in a thread."""
    lm(workplace, "data", "prepare", "--input", "texts", "--output", "data/bytes", "--tokenizer", "bpe", "--vocab_size",
       "300", "--val_fraction", "0.2")  # fmt: skip
    (workplace / "twice.py").write_text(TWICE)
    ended = lm(workplace, "twice.py")
    found = json.loads(ended.stdout.splitlines()[-1])
    assert ended.stderr.count("weights: those that the module had") == 1
    assert "was built for data of another tokenizer" in found.pop("other tokenizer")
    assert found.pop("scheduler").startswith("Scheduled.configure_optimizers returns one optimizer and no scheduler")
    assert found == {"fresh again": True, "context": 32, "alone": 8, "of a source": True, "in a thread": ["finished"]}


def test_a_signal_ends_it_with_a_checkpoint(workplace):
    script = TRAINER.replace('"objects"', '"signalled"')
    process = start(workplace, write(workplace, script, **SMALL | {"max_steps": 100_000}))
    run = Run(workplace / "checkpoints/signalled")
    wait_until(lambda: (run.read("state.json").get("step") or 0) > 3, process)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and "Interrupted: SIGTERM: stopped after step" in said
    assert run.status() == "interrupted" and list(run.steps())[-1] > 3


PLAIN = """
import lightning, sys
import lm
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

name, checkpoint = sys.argv[1], (sys.argv[2:] or [None])[0]
lightning.seed_everything(3)
decoder = lm.DecoderConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32)
trainer = lightning.Trainer(
    max_steps=8, val_check_interval=4, check_val_every_n_epoch=None, log_every_n_steps=2, accelerator="cpu",
    devices=DEVICES, logger=CSVLogger(".", name="csv", version=name), enable_progress_bar=False,
    callbacks=[ModelCheckpoint(f"saved-{name}", "{step}", every_n_train_steps=4, save_top_k=-1)],
)
module = lm.LanguageModule(decoder, lm.OptimizerConfig(name="muon", lr=0.01))
data = lm.DataModule("data/tiny", seq_len=32, micro_batch_size=2, global_batch_tokens=256, val_tokens=512)
trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
"""


def logged(folder, name):
    """The last loss of each step that a CSV logger wrote, of training and validation."""
    lines = list(csv.DictReader((folder / "csv" / name / "metrics.csv").open()))
    return [(line["step"], line["train/loss"], line["val/loss"]) for line in lines if int(line["step"]) > 4]


def test_lightning_s_own_trainer(workplace):
    """Validations, checkpoints of its kind, whose weights are loaded; what is missing is said."""
    script = PLAIN.replace("DEVICES", "1") + """
loaded = lm.LanguageModule.load_from_checkpoint(f"saved-{name}/step=8.ckpt", decoder=decoder)
print(all(a.equal(b) for a, b in zip(loaded.state_dict().values(), module.state_dict().values(), strict=True)))
expected = trainer.callback_metrics["val/loss"].item()
for checkpoint in (None, f"saved-{name}/step=8.ckpt"):
    print(trainer.validate(module, datamodule=data, ckpt_path=checkpoint)[0]["val/loss"] == expected)
from lm.errors import RequestError
batch = next(iter(lm.DataModule("data/tiny", seq_len=32, micro_batch_size=2).train_dataloader()))
print(module(batch.input_ids).shape == (2, 32, data.tokenizer.vocab_size))
try:
    lm.LanguageModule(decoder)(batch.input_ids)
except RequestError as error:
    print(error)
from dataclasses import replace
try:
    trainer.validate(lm.LanguageModule(replace(decoder, rope_theta=500.0)), datamodule=data, ckpt_path=checkpoint)
except RequestError as error:
    print(error)
quiet = lightning.Trainer(max_steps=2, barebones=True, accelerator="cpu")
quiet.fit(lm.LanguageModule(decoder), datamodule=data)
"""  # fmt: skip
    (workplace / "plain.py").write_text(script)
    said = lm(workplace, "plain.py", "whole")
    assert said.stdout.split().count("True") == 4
    assert "the model is built once a Trainer has opened the data" in said.stdout
    assert "under lightning.Trainer there is no run folder" in said.stderr
    assert "this is a checkpoint of another model: LanguageModule.load_from_checkpoint builds it" in said.stdout
    assert len(logged(workplace, "whole")) > 3
    refused = lm(workplace, "plain.py", "refused", "saved-whole/step=4.ckpt", expect=1).stderr
    assert "RequestError: lightning.Trainer cannot resume a LanguageModule: lm.Trainer can" in refused
    (workplace / "plain.py").write_text(PLAIN.replace("DEVICES", "1").replace("max_steps=8", "max_epochs=1"))
    refused = lm(workplace, "plain.py", "refused", expect=1).stderr
    assert "trainer.max_steps -1 must be at least 1" in refused


@pytest.mark.slow
def test_lightning_s_own_trainer_over_two_ranks(workplace):
    for name, devices in (("one", 1), ("two", 2)):
        (workplace / "plain.py").write_text(PLAIN.replace("DEVICES", str(devices)))
        lm(workplace, "plain.py", name)
    one, two = ([float(value) for _, *losses in logged(workplace, name) for value in losses if value]
                for name in ("one", "two"))  # fmt: skip
    assert one == pytest.approx(two, rel=1e-4)


def test_a_custom_command_line(workplace):
    (workplace / "cli.py").write_text(CLI)
    text = re.sub(r"(max_position_embeddings: )\d+", r"\g<1>32", CLI_YAML).replace("8192", "256")
    (workplace / "cli.yaml").write_text(text.replace("max_steps: 100", "max_steps: 4, accelerator: cpu"))
    lm(workplace, "cli.py", "fit", "--config", "cli.yaml", "--trainer.val_check_interval", "2", "--data.val_tokens",
       "512")  # fmt: skip
    [taken] = (workplace / "lightning_logs").rglob("*.ckpt")
    said = lm(workplace, "cli.py", "validate", "--config", "cli.yaml", "--ckpt_path", str(taken))
    assert "val/bpb" in said.stdout
    said = lm(workplace, "cli.py", "fit", "--config", "cli.yaml", "--ckpt_path", str(taken), expect=1)
    assert "cannot resume" in said.stderr

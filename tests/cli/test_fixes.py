"""Mistakes of the second hour, each answered in a line that names what was meant."""

import json

import pytest
from run_folders import write_run
from trainings import write_config

from lm.cli.command import main

DEDENTED = "trainer:\n  max_steps: 3\n val_interval: 2\n"
FIT = ["fit", "--config", "small.yaml"]
MISTAKES = {  # typed -> said
    "a logger's short name": ([*FIT, "--trainer.logger", "wandb"], "Lightning has no wandb; did you mean WandbLogger?"),
    "a callback without its file": ([*FIT, "--trainer.callbacks", "Norm"], "such as my_file.Norm for one in my_file.py"),
    "a file that is not there": ([*FIT, "--trainer.callbacks", "[nofile.X]"], "nofile.X: there is no module nofile"),
    "a folder that is not there": ([*FIT, "--trainer.callbacks", "[no.file.X]"], "no.file.X: there is no module no;"),
    "a misspelt key of a source": ([*FIT, "--data.path", "null", "--data.sources", "[{name: a, path: x, weigth: 2}]"],
        "data.sources has no 'weigth'; did you mean 'weight'?"),
    "another optimizer by name": ([*FIT, "--model.optimizer.name", "lion"], "give model.optimizer.class_path in its place, such as"),
    "batches of a validation": ([*FIT, "--trainer.limit_val_batches", "2"], "give data.val_tokens, which counts tokens and not"),
    "the lowest rate": ([*FIT, "--model.schedule.min_lr", "1e-5"], "give model.schedule.final_fraction, a fraction of lr"),
    "another name of a command": (["runs", "delete", "a"], "did you mean `lm runs rm a`?"),
    "half an option": (["data", "prepare", "a.txt", "--out", "data/x"], "did you mean `lm data prepare --input a.txt --output data/x`?"),
    "a share of a run": ([*FIT, "--model.schedule.warmup_ratio", "10%"], "did you mean 0.1?"),
    "off": ([*FIT, "--model.compile=off"], "did you mean none?"),
    "one logger of two": ([*FIT, "--trainer.logger", "[CSVLogger, {class_path: TensorBoardLogger, init_args: {save_dr: x}}]"],
        "trainer.logger: Option 'save_dr' is not accepted"),
    "an optimizer without its module": ([*FIT, "--model.optimizer.class_path", "lion"], "give the module too, such as torch."),
    "a callback without its argument": ([*FIT, "--trainer.callbacks", "EarlyStopping"], "give --trainer.callbacks.init_args.monitor val/loss"),
    "a run and a prompt": (["generate", "tiny", "--prompt", "a b"], "did you mean `lm generate --run tiny --prompt 'a b'`?"),
    "from and to": (["data", "prepare", "a.txt", "data/a"], "did you mean `lm data prepare --input a.txt --output data/a`?"),
    "one text": (["evaluate", "--text", "a.txt"], "did you mean 'texts'?"),
    "a section in the singular": (["fit", "--config", "sample.yaml"], "did you mean 'samples'?"),
    "a section cut short": (["fit", "--config", "train.yaml"], "did you mean 'trainer'?"),
    "betas for another class": ([*FIT, "--model.optimizer", "{class_path: torch.optim.SGD, betas: [0.8, 0.9]}"],
        "betas of the built-in optimizers: leave them out of the config; arguments of torch.optim.SGD stand in"),
    "Lightning's option": ([*FIT, "--trainer.limit_train_batches", "3"], "did you mean 'trainer.max_steps'?"),
    "a config for a run": (["generate", "--config", "small.yaml"], "did you mean 'run'?"),
    "the whole line": (["export", "mine", "--output", "x"], "did you mean `lm export --run mine --output x`?"),
    "a context beyond a batch": ([*FIT, "--model.decoder.max_position_embeddings", "100000000"],
        "a sample has model.decoder.max_position_embeddings, 100,000,000 tokens"),
    "a wrong indentation": (["fit", "--config", "dedented.yaml"], "line 3, 'val_interval: 2': its indentation"),
    "the ratio of a ladder": (["ladder", "--target_param_data_ratio", "3"], "did you mean 'ratio'?"),
    "a run without its run.json": (["runs", "show", "lost"], "its model is --ckpt_path checkpoints/lost/last"),
    "a run without its config": (["validate", "--run", "bare"], "config.yaml is gone: give the config of the run"),
    "no run": (["runs", "rm", "--yes"], "name the runs to remove, as `lm runs rm NAME`"),
    "a folder of configs": (["fit", "--config", "checkpoints"], "checkpoints is a folder, not a config; it has none"),
    "a source without a name": ([*FIT, "--data.path", "null", "--data.sources", "[{path: x}]"], "name is missing: `{name: "),
    "heads and key heads": ([*FIT, "--model.decoder.num_attention_heads", "3", "--model.decoder.num_key_value_heads", "2"],
        "fits is 30 or 36, and num_key_value_heads 2 does not divide it: null makes one of each query head"),
    "a line too far in": (["fit", "--config", "deep.yaml"], "is it indented as the line above, with a space after"),
    "a colon without a space": (["fit", "--config", "colon.yaml"], "line 2, 'max_steps:3': write a space after max_steps:"),
    "an optimizer of the Trainer": ([*FIT, "--trainer.optimizer", "adamw"], "did you mean 'model.optimizer.name'?"),
    "minutes": ([*FIT, "--trainer.max_steps", "null", "--hours", "30m"], "minutes are sixtieths: 0.5 for 30"),
    "less validation than a sample": ([*FIT, "--data.val_tokens", "10"], "10 is less than a sample, which has 32 tokens"),
    "a tab": (["fit", "--config", "tab.yaml"], "line 2, 'max_steps: 3': it is indented with a tab: use spaces"),
    "an action that is none": ([*FIT, "--guards.alerts", "{loss > 9: {action: halt}}"], "halt"),
    "a misspelt action": ([*FIT, "--guards.alerts", "{loss > 9: stopp}"], "'stop', 'rollback', got stopp"),
    "a list of alerts": (["plan", *FIT[1:], "--guards.alerts", "[{loss > 9: stop}]"], "guards.alerts: expected keys and values, such as `loss > 10: stop`"),
    "a misspelt metric": (["plan", *FIT[1:], "--guards.alerts", "{los > 9: stop}"], "did you mean loss?"),
    "two conditions in one": ([*FIT, "--guards.alerts", "{val_loss > 4 and step > 9: stop}"], "or `metric op number * median("),
    "an alert without its action": ([*FIT, "--guards.alerts", "loss > 10"], "guards.alerts: expected keys and values, such as `loss > 10"),
    "a bound that is no range": ([*FIT, "--expect", "{val/loss: 3}"], "such as `{val/loss: [3.2, 3.5]}`"),
    "weights alone": ([*FIT, "--data.sources", "{a: 0.7}"], "such as `[{name: a, path: data/a, weight: 0.7}"),
    "a weight in per cent": ([*FIT, "--data.path", "null", "--data.sources", "[{name: a, path: x, weight: 70%}]"],
        "data.sources: weight: expected float, got 70%"),
    "two numbers": ([*FIT, "--model.optimizer.betas", "0.9", "0.95"], "did you mean --model.optimizer.betas '[0.9, 0.95]'?"),
    "a number for a group": ([*FIT, "--trainer.early_stopping", "3"], "write early_stopping: {patience: 3} in a config, or give --trainer.early_stopping.patience 3"),
    "PyTorch's number format": ([*FIT, "--trainer.precision", "bf16"], "did you mean bf16-mixed?"),
    "a group at the top": (["fit", "--config", "top.yaml"], "no option 'optimizer'; did you mean 'model.optimizer'?"),
    "a group that is too deep": (["fit", "--config", "schedule.yaml"], "did you mean 'model.schedule'?"),
    "a group that is not there": (["fit", "--config", "flat.yaml"],
        "hidden_size, num_hidden_layers stand under model: write them under model.decoder"),
    "an option of training": (["generate", "--trainer.precision", "bf16"], "did you mean 'dtype'?"),
    "a name for a group": (
        [*FIT, "--model.optimizer", "torch.optim.SGD", "--model.optimizer.init_args.momentum", "0.9"],
        "give --model.optimizer.class_path torch.optim.SGD, or in a config optimizer: {class_path: torch.optim.SGD}",
    ),
    "a name for a group in a config": (["fit", "--config", "named.yaml"], "give --model.schedule.name cosine, or in a config"),
    "a dotted name and its group": (["fit", "--config", "twice.yaml"], "twice.yaml: model.optimizer.lr is there twice"),
    "no is no group": ([*FIT, "--samples", "false"], "samples: {prompts: ...} in a config, or give --samples.prompts ...; null is for the defaults"),
    "a run for a plan": (["plan", "--config", "small.yaml", "--run", "a"], "no option 'run'; `lm plan --help all` lists them"),
    "a run without its checkpoint": (["fit", "--run", "mine"], "a new run needs a config, by --config; to resume one: --run mine --ckpt"),
    "epochs for a length": ([*FIT, "--trainer.max_steps", "null", "--trainer.max_epochs", "2"], "max_epochs is only a limit"),
    "a trained tokenizer": ([*FIT, "--data.tokenizer", "bpe"], "data.tokenizer bpe is no file: give data.prepare.tokenizer"),
    "a callback's file": ([*FIT, "--trainer.callbacks", "norm.py"], "norm.py is a file: give the class in it, as norm.NAME"),
    "a callback's argument": ([*FIT, "--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.init_args", "{every: 2}"],
        "EarlyStopping takes no argument every; it takes monitor, min_delta, patience"),
    "two lengths beyond the run": ([*FIT, "--model.schedule.name", "wsd", "--model.schedule", "{warmup_ratio: 0.6, decay_ratio: 0.5}"],
        "--model.schedule.decay_ratio 0.4 is the most"),
    "no name": ([*FIT, "--run", ""], "run name '': use letters"),
    "a rate that is none": ([*FIT, "--model.optimizer.lr", "1e3"], "lr 1000 is above 1.0, where adamw learns nothing"),
    "texts for a size": (["scale", "--data", "checkpoints"], "`lm data prepare --input checkpoints --output checkpoints-t"),
    "no texts for a size": (["scale", "--data", "a/b"], "make it with `lm data prepare --input TEXTS --output a/b`, or give"),
    "a share for a count": ([*FIT, "--model.schedule.warmup_steps", "10%"], "is --model.schedule.warmup_ratio 0.1"),
    "a decimal comma": ([*FIT, "--model.optimizer.lr", "1,12e-2"], "did you mean 1.12e-2?"),
    "an empty value": ([*FIT, "--model.optimizer.lr="], "model.optimizer.lr needs a value"),
    "null for a choice": ([*FIT, "--model.compile", "null"], "give one of none, inductor, triton_free, or leave it out"),
    "Hugging Face's name in a group": ([*FIT, "--model.optimizer.groups.lm_head.lr_ratio", "2"], "did you mean 'model.optimizer.groups.output.lr_ratio'?"),
    "FP8 without its scaling": ([*FIT, "--trainer.precision", "fp8"], "did you mean fp8-rowwise, on an NVIDIA GPU from Hopper on?"),
    "a config that is there": (["scale", "--depth", "4", "--output", "small.yaml"], "small.yaml is there already"),
}  # fmt: skip


@pytest.mark.parametrize(("typed", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_answered_with_what_was_meant(typed, said, here, capsys):
    write_config(here)
    (here / "dedented.yaml").write_text(DEDENTED)
    (here / "deep.yaml").write_text("trainer:\n  max_steps: 3\n   val_interval: 2\n")
    (here / "sample.yaml").write_text("sample: {prompts: [a]}\n")
    (here / "train.yaml").write_text("train: {max_steps: 3}\n")
    (here / "top.yaml").write_text("optimizer: {name: muon}\n")
    (here / "schedule.yaml").write_text("model: {optimizer: {schedule: {name: cosine}}}\n")
    (here / "colon.yaml").write_text("trainer:\n  max_steps:3\n  val_interval: 2\n")
    (here / "flat.yaml").write_text("model: {hidden_size: 64, num_hidden_layers: 2}\n")
    (here / "named.yaml").write_text("model: {schedule: cosine}\n")
    (here / "twice.yaml").write_text("model: {optimizer.lr: 1e-3, optimizer: {lr: 1e-2}}\n")
    (here / "tab.yaml").write_text("trainer:\n\tmax_steps: 3\n")
    (here / "checkpoints/lost/last").mkdir(parents=True)
    (write_run("checkpoints", "bare").path / "config.yaml").unlink()
    assert main(typed) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert said in err[-1] and len(err) == 1


def test_a_run_of_another_folder_is_removed_by_its_path_alone(here, capsys):
    """Not by a name, which the registry has too: the folder may be a typing mistake."""
    path = write_run("checkpoints", "lr-1").path
    assert main(["runs", "rebuild", "checkpoints"]) == 0
    for name in ("lr-*", "lr-1"):
        assert main(["runs", "rm", name, "--yes", "--root", "check"]) == 2
        assert f"run lr-1 is not under check: to remove it, give its path, {path.resolve()}" in capsys.readouterr().err
    assert main(["runs", "rm", str(path), "--yes", "--root", "check"]) == 0
    assert capsys.readouterr().out.endswith("removed\n")
    assert not path.exists()


def write_manifest(folder, tokens, vocab_size):
    folder.mkdir()
    counts = {"splits": {"train": {"tokens": tokens}}, "vocab_size": vocab_size}
    counts["options"] = {"vocab_size": vocab_size + 9}  # of which the text has given fewer
    (folder / "manifest.json").write_text(json.dumps(counts))


@pytest.mark.parametrize(("tokens", "vocab_size", "depth", "said"), [
    (350_000, 25_015, 2, "14 for each of the 25,015 entries of the vocabulary; prepare it with --vocab_size 4096"),
    (350_000, 4_096, 100, "parameters for 350K tokens of {data}; without --depth the size follows from the text"),
    (350_000, 4_096, 2, ""), (5_000_000, 32_768, 6, ""),
])  # fmt: skip
def test_what_is_too_large_for_a_text_is_said_and_the_config_is_written(here, caplog, tokens, vocab_size, depth, said):
    data = str(here / "data")
    write_manifest(here / "data", tokens, vocab_size)
    assert main(["scale", "--depth", str(depth), "--data", data, "--seq_len", "256", "--output", "new.yaml"]) == 0
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == bool(said) and said.replace("{data}", data) in "".join(warnings)
    config = (here / "new.yaml").read_text()
    assert "--output new.yaml\n" in config and f"--tokenizer bpe --vocab_size {vocab_size + 9}\n" in config


def test_epochs_alone_are_answered_with_their_tokens(here, capsys):
    write_config(here)
    write_manifest(here / "data", 1_001, 100)
    typed = ["fit", "--config", "small.yaml", "--data.path", "data", "--trainer.max_steps", "null"]
    assert main([*typed, "--trainer.max_epochs", "1.5"]) == 2
    assert "1.5 is only a limit: give the length too, such as --trainer.max_tokens 1502" in capsys.readouterr().err


def test_a_size_for_texts_that_are_not_there_is_written_and_said(here, caplog):
    with caplog.at_level("INFO", "lm"):
        assert main(["scale", "--data", "data/mien", "--depth", "2", "--output", "new.yaml"]) == 0
    assert "data/mien is not there yet: `lm data prepare` makes it" in caplog.text


def test_a_share_is_no_proposal_for_a_choice(capsys):
    assert main(["fit", "--config", "tiny.yaml", "--trainer.precision", "10%"]) == 2
    assert "'fp8-rowwise', got 10%\n" in capsys.readouterr().err

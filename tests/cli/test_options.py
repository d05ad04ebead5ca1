"""Help and the refusal of unknown names come from the dataclasses, and know the options that the parser knows."""

import re

import pytest
from processor_time import run_python
from run_folders import write_run
from trainings import write_config

from lm.cli import help, options, request, settings
from lm.cli.command import TABLE, main
from lm.cli.command import _load as load
from lm.errors import RequestError
from lm.system.arguments import known_names
from lm.system.other_names import OPTIONS, nearest_option

TRAINING = [command.name for command in TABLE if command.kind == "request"]
WITHOUT_TORCH = """
import sys
from lm.cli.command import main
for arguments in {commands}:
    main(arguments)
assert not {{'torch', 'lightning'}} & set(sys.modules)
"""


def test_the_dataclasses_have_the_options_of_the_parser():
    read = {option.name for option in options.all_options("plan")} - {"config", "print_config"}
    known = {name.removesuffix("+") for name in known_names(request.make_parser("plan"))}
    known -= {"run", "ckpt_path", "force"}  # which a config of a fit may have
    assert all(name.startswith("data.prepare.") for name in read - known)  # the parser reads this group as one value
    request.check_names("plan", [(name, "1") for name in known - {"h"} if not name.endswith("help")])


def test_what_is_shown_first_exists():
    names = {option.name for option in options.all_options("fit")}
    assert set(help.FREQUENT) | set(help.FREQUENT_WITHOUT_FIT) <= names
    assert {option for option in OPTIONS if "." in option} <= names
    assert all(option.help for option in options.all_options("fit"))


@pytest.mark.parametrize("command", TRAINING)
def test_help_is_two_screens_and_has_everything_on_demand(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help"]) == 0
    short = capsys.readouterr().out.splitlines()
    assert len(short) <= 100 and max(map(len, short)) <= 100
    assert any("--config" in line for line in short)
    assert main([*command.split(), "--help", "all"]) == 0
    everything = capsys.readouterr().out
    assert all(f"--{option.name}" in everything for option in options.all_options(command))
    assert main([*command.split(), "--help", "guards.budget"]) == 0
    part = capsys.readouterr().out
    assert "--guards.budget.cap_usd" in part and "--data.path" not in part


def test_help_of_a_command_has_its_own_options_first_and_names_the_groups(capsys):
    assert main(["fit", "--help", "optimiser"]) == 2
    assert "no option or group of options 'optimiser': give all, or one of trainer, model" in capsys.readouterr().err
    assert main(["fit", "--help", "optimizer"]) == 0 and "--model.optimizer.betas" in capsys.readouterr().out
    for name in ("model.compile", "compile"):  # a single option
        assert main(["fit", "--help", name]) == 0
        shown = capsys.readouterr().out
        assert "--model.compile none|inductor|triton_free" in shown and "--model.optimizer" not in shown
    main(["plan", "--help"])
    shown = capsys.readouterr().out
    assert shown.index("--strict") < shown.index("--trainer.max_steps")


def test_help_and_a_wrong_name_need_no_torch(tmp_path):
    """Importing Lightning takes seconds, and a typo should not; a callback by class path is not imported either."""
    write_config(tmp_path, **{"trainer.max_step": 5})
    good = str(write_config(tmp_path, "good"))
    wrong = [["fit", "--config", str(tmp_path / "small.yaml")], ["fit", "--trainer.max_step", "3"],
             ["plan", "--config", good, "--trainer.max_steps", "abc"], ["generate", "--run", "no"],
             ["data", "prepare", "--input", str(tmp_path / "smal.yaml"), "--output", "data/x"]]  # fmt: skip
    for arguments in (["fit", "--help"], *wrong):
        assert run_python(WITHOUT_TORCH.format(commands=[arguments]))[1] < 2  # usually 0.2 seconds
    run_python(WITHOUT_TORCH.format(commands=[[*command.split(), "--help", "all"] for command in TRAINING]))


@pytest.mark.parametrize("arguments, message", [
    (["fit", "--trainer.max_steps", "abc"], "lm fit: trainer.max_steps: expected a count such as 1000, 32_768, "),
    (["fit", "--config", "two.yaml"], "lm fit: trainer.val_interval: expected a count such as 1000, "),
    (["plan", "--model.decoder.hidden_size=1.5"], "lm plan: model.decoder.hidden_size: expected a whole number, got '1.5'"),
    (["bench", "step", "--trainer.precision", "fp12"], "lm bench step: trainer.precision: expected one of '32-true'"),
    (["profile", "--model.optimizer.lr", "x"], "lm profile: model.optimizer.lr: expected float, got x"),
    (["plan", "--mfu", "much"], "lm plan: mfu: expected float, got much"),
    (["fit", "--model.decoder.dropout", "10"], "lm fit: dropout 10.0 must lie in [0, 1)"),
    (["fit", "--model.optimizer.lr", "0,001"], "expected float, got 0,001"),
    (["fit", "--guards.budget.max_hours", "-1"], "lm fit: guards.budget.max_hours -1.0 must be at least 0"),
    (["plan", "--data.seq_len", "4096"], "give --model.decoder.max_position_embeddings 4096"),
    (["fit", "--data.global_batch_tokens", "31"], "data.global_batch_tokens 31: give a larger batch"),
    (["fit", "--model.decoder.max_position_embeddings", "256", "--data.global_batch_tokens", "128"],
     "an optimizer step only data.global_batch_tokens 128: give --data.seq_len 32, for shorter samples, or a larger batch"),
    (["fit", "--trainer.max_steps", "5", "--trainer.max_tokens", "1M"], "give one of trainer.max_steps and trainer."),
    (["fit", "--trainer.patience", "2"], "did you mean 'trainer.early_stopping.patience'?"),
    (["fit", "--model.decoder.attention_dropout", "0.1"], "leave it out: attention weights have no dropout; model.deco"),
    (["fit", "--resume_from_checkpoint", "true"], "give --ckpt_path auto, which resumes the newest run of this config"),
    (["fit", "--model.decoder.qk_norm", "1"], "'1' belongs to no option: --model.decoder.qk_norm takes true or false"),
    (["fit", "--no-model.decoder.qk_norm"], "give --model.decoder.qk_norm false"), (["fit", "--no_samples"], "null"),
    (["fit", "--guards.alerts", "{gradient norm > 1: stop}"], "is at most 9,999; metrics are loss, max_loss, "),
    (["generate", "--prompt", "a", "-n", "3"], "there is no option 'n'; did you mean 'num_samples'?"),
    (["fit", "trainer.max_steps=5"], "did you mean --trainer.max_steps=5?"),
    (["fit", "--trainer.log_interval", "null"], "lm fit: trainer.log_interval is null, which means "),
    *((command.split(), "no run 'nothing' under checkpoints or in the registry; `lm runs ls` lists") for command in (
        "generate --run nothing", "evaluate --run=nothing --tasks embedded:sotu", "export --run nothing --output o",
        "branch nothing --tags a b", "validate --run nothing", "test --run nothing",
        "predict --run nothing")),
    (["generate", "--prompt", "a"], "no run under checkpoints yet: start one with `lm fit --config tiny.yaml`, or "),
    (["fit", "--config", ""], "no config '' here"), (["fit", "--config", "x**.yaml"], "no config 'x**.yaml' here"),
    (["fit", "--config", "small.yaml", "--config", "timed.yaml"], "there is no option 'hours'; give --hours on the comm"),
    (["fit", "--trainer", "{max_steps: 5}", "--hours", "1"], "--trainer.max_steps gives the length of the run, and so"),
    (["fit", "--hours", "0"], "--hours 0 must be above 0"), (["fit", "--data.sources.weight", "9"], "data.sources: exp"),
    (["plan", "--run", "small"], "there is no option 'run'"),
    (["branch", "nothing", "--trainer", "{max_steps: 9}"], "no run 'nothing'"),
    (["generate", "--temperature", "-1"], "temperature -1.0 must not be below 0"),
    (["ladder", "--depths", "2,a"], "'a' is not a number of blocks"), (["predict"], "start one with `lm fit"),
    (["validate", "--ckpt_path", "best"], "start one with `lm fit --config tiny.yaml`, or give --config"),
])  # fmt: skip
def test_wrong_values_and_missing_runs_are_refused_without_torch(arguments, message, here, monkeypatch, capsys):
    write_config(here)
    write_config(here, "two", **{"trainer.val_interval": "two"})
    (here / "timed.yaml").write_text("hours: 2\n")
    monkeypatch.setattr("lm.cli.command._load", lambda target: load(target) if "options:" in target else pytest.fail())
    place = 2 if arguments[0] == "bench" else 1
    if arguments[0] in ("fit", "plan", "bench", "profile") and "--config" not in arguments:
        arguments = [*arguments[:place], "--config", "small.yaml", *arguments[place:]]
    assert main(arguments) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("typed, nulls", [
    ("--data.path a", "train sources phases prepare"), ("--data.path=a --data.prepare.input b", "train sources phases"),
    ("--data.path null --data.sources [{name:a}]", "train val test tokenizer prepare path"),
    ("--data.path null", "path"), ("--data.train a b --data.val c", "path sources phases prepare"),
    ("--data.path a --data.train b", "sources phases prepare"),
    ("--trainer.max_tokens 1M", "max_steps"), ("--trainer.max_tokens null --trainer.max_steps=5", "max_tokens"),
])  # fmt: skip
def test_data_or_a_length_that_is_typed_replaces_that_of_the_config(typed, nulls):
    there = {
        "data": dict.fromkeys(("path", "train", "val", "test", "tokenizer", "sources", "phases"), "there")
        | {"prepare": {"input": "there"}},
        "trainer": dict.fromkeys(("max_steps", "max_tokens"), "there"),
    }
    combined = settings.combine("fit", [there], settings.read_options("fit", typed.split()))
    off = [name for section in combined.values() for name, value in section.items() if value in (None, "null")]
    off += [name for section in there for name in there[section].keys() - combined[section].keys()]
    assert set(off) == set(nulls.split())


def test_a_later_config_clears_what_it_replaces_and_an_empty_value_empties():
    first = {"trainer": {"max_steps": 5, "logger": "a.B"}, "guards": {"alerts": {"loss > 10": "stop"}, "spike": None}}
    second = {"trainer": {"max_tokens": 100}, "guards": {"alerts": {}}, "data": {}}
    typed = settings.read_options("fit", ["--trainer", "{logger: {class_path: c.D}}", "--trainer.logger.save_dir", "e",
                                          "--trainer.logger+", "f.G"])  # fmt: skip
    assert settings.combine("fit", [first, second], typed) == {
        "trainer": {"max_tokens": 100,
                    "logger": [{"class_path": "c.D", "init_args": {"save_dir": "e"}}, "f.G"]},
        "guards": {"alerts": {}, "spike": None},
    }  # fmt: skip


def test_a_length_is_needed_but_for_some_hours_and_what_is_only_printed(tmp_path, capsys):
    assert main(["fit", "--print_config", "--model.optimizer.lr", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert "lr: 0.5" in printed and "max_steps: null" in printed
    config = write_config(tmp_path, **{"trainer.max_steps": None})
    assert request.read("fit", ["--config", str(config), "--hours", "1"]).command_options.hours == 1
    with pytest.raises(RequestError, match="give one of trainer.max_steps and trainer.max_tokens"):
        request.read("fit", ["--config", str(config)])


@pytest.mark.parametrize("arguments, message", [
    (["--trainer.max_step", "5"], "there is no option 'trainer.max_step'; did you mean 'trainer.max_steps'?"),
    (["--trainer.num_train_epochs=5"], "there is no option 'trainer.num_train_epochs'; give trainer.max_steps or trainer.max_"),
    (["--modle.optimizer.lr", "1"], "did you mean 'model.optimizer.lr'?"),
    (["--zzz", "all"], "there is no option 'zzz'; `lm fit --help all` lists them"),
    (["--learning_rate", "1"], "did you mean 'model.optimizer.lr'?"),
    (["--model.n_embd", "8"], "did you mean 'model.decoder.hidden_size'?"),
    (["--batch_size", "8"], "give data.micro_batch_size"),
    (["--report_to", "none"], "TensorBoard and metrics.jsonl are always written to the run folder"),
    (["--wandb"], "--trainer.logger lightning.pytorch.loggers.WandbLogger adds W&B"),
    (["--fsdp"], "give --trainer.strategy fsdp2"),
    (["--dry_run"], "`lm plan` with the same options"), (["--name", "x"], "give --run NAME"),
    (["--resume"], "give --ckpt_path auto"), (["--device", "cuda"], "give --trainer.accelerator cpu, or gpu"),
    (["--model.decoder.heads", "4"], "did you mean 'model.decoder.num_attention_heads'?"),
    (["--gradient_accumulation", "4"], "it follows from data.global_batch_tokens"),
    (["--save_every=5", "--trainer.max_step", "5"],
     "there are no options 'save_every' (did you mean 'trainer.checkpoint_interval'?), 'trainer.max_step' (did you"),
    (["--config", "small.yml"], "no config 'small.yml' here or in configs/; did you mean small.yaml?"),
    (["--config", "runs/tinny/config.yaml"], "did you mean runs/tiny/config.yaml?"),
    (["pythia"], "no config 'pythia' here or in configs/"),
    (["--config"], "--config needs a value"), (["--trainer.max_steps"], "--trainer.max_steps needs a value"),
    (["--foo.init_args.x", "1"], "there is no option 'foo.init_args.x'"),
    (["--model.schedule", "{name: wsd"], "--model.schedule '{name: wsd' cannot be read: line 1, "),
    (["--trainer.max_steps+", "5"], "trainer.max_steps: expected a count such as"),
    (["--model.schedule", "wsd"], "model.schedule is a group of options and not 'wsd'"),
    (["--tags=null"], "tags is null, which means nothing there"),
    (["--hours", "1", "--trainer.max_steps", "5"], "--trainer.max_steps gives the length of the run, and so does"),
])  # fmt: skip
def test_wrong_names_are_refused(arguments, message, here):
    write_config(here)
    (here / "runs/tiny").mkdir(parents=True)
    (here / "runs/tiny/config.yaml").touch()
    with pytest.raises(RequestError) as caught:
        request.read("fit", ["--config", "small.yaml", *arguments] if arguments[0][:1] == "-" else arguments)
    assert message in str(caught.value)


def test_the_hint_for_a_warm_up_ratio_works_when_typed(tmp_path):
    """The config has steps, and of two lengths none is meant."""
    config = write_config(tmp_path)
    hint = nearest_option("warmup_ratio", ["trainer.max_steps"])
    flags = re.findall(r"--model\S+", hint.replace(",", ""))
    assert flags == ["--model.schedule.warmup_ratio", "--model.schedule.warmup_steps"] and "steps 0 if" in hint
    read = request.read("plan", ["-c", str(config), flags[0], "0.1", flags[1], "0"])
    assert read.model.schedule.warmup_ratio == 0.1


@pytest.mark.parametrize("text, message", [
    ("trainer: {max_step: 1}", "config small.yaml: there is no option 'trainer.max_step'; did you mean 'trainer.max"),
    ("data: {prepare: {tokeniser: 1}}", "did you mean 'data.prepare.tokenizer'?"),
    ("data: {path: [a, b]}", "data.path is one folder; several are data.sources, such as [{name: a, path: data/a, wei"),
    ("trianer: {max_steps: 1}", "there is no option 'trianer'; did you mean 'trainer'?"),
    ("", "config small.yaml is empty"),
    ("trainer:\n\tmax_steps: 5", "line 2, 'max_steps: 5': it is indented with a tab: use spaces"),
    ("data:\n  path: a\ndata:\n  val: b", "cannot be read: line 3: data is there a second time, after line 1"),
    ("trainer: {max_steps: 1, max_steps: 2}", "small.yaml cannot be read: line 1: max_steps is there a second time"),
    ("data: &d {path: a}\nmodel:\n  decoder: {<<: *d, 'a': 1, \"a\": 2}", "line 3: a is there a second time"),
    ("trainer: {max_step: 1}\nmodel: {n_head: 2}", "no options 'trainer.max_step' (did you mean 'trainer.max_steps'?), "
     "'model.n_head' (did you mean 'model.decoder.num_attention_heads'?); there is no option 'bs'"),
])  # fmt: skip
def test_a_config_that_cannot_be_meant_is_refused(text, message, here):
    (here / "small.yaml").write_text(text)
    with pytest.raises(RequestError) as caught:
        request.read("fit", ["-c", "small.yaml", *["--bs=2"] * message.endswith("'bs'")])
    assert message in str(caught.value)


@pytest.mark.parametrize("arguments, message", [
    (["fit", "--data.sources", "[{name:", "a,", "path:", "b}]"], "'a,' belongs to no option; a list or mapping needs quotes"),
    (["generate", "Once upon"], "did you mean `lm generate --prompt 'Once upon'`?"),
    (["data", "prepare", "my_texts"], "did you mean `lm data prepare --input my_texts --output data/my_texts`?"),
    (["data", "prepare", "texts/", "--output", "a"], "did you mean `lm data prepare --input texts/ --output a`?"),
    (["generate", "--ckpt_path", ".", "--dtype", "bf16"], "expected one of 'float32', 'bfloat16', "),
    (["export", "--output", "x", "--dtype", "q4_k"], "'bfloat16', 'float16', 'q8_0', got q4_k"),
    (["plan", "--config", "tiny.yaml", "--trainer.precision", "bf16"], "expected one of '32-true', 'bf16-mixed', "),
    (["plan", "--config", "tiny.yaml", "--model.optimizer.betas", "0.9,0.95"], "expected a list: [a, b]"),
    (["plan", "--config", "tiny.yaml", "--lr-warmup-steps", "5"], "did you mean 'model.schedule.warmup_steps'?"),
    (["generate", "--ckpt_path", ".", "--temp", "0.5"], "did you mean 'temperature'?"),
    (["scale", "--size", "50M"], "did you mean 'depth'?"),
    (["data", "inspect", "--path", "a"], "give the path without a name: `lm data inspect PATH`"),
    (["runs", "ls", "--sort", "loss"], "there is no option 'sort'; there are --all, --json, --root, --tag"),
    (["ladder", "--zzz"], "there is no option 'zzz'; --help lists them"),
    (["exprot"], "did you mean `lm export`?"), (["--config=a.yaml"], "the command comes first: `lm fit --config=a.yaml`"),
    (["list"], "did you mean `lm runs ls`?"), (["runs", "list"], "no command 'runs list'; did you mean `lm runs ls`?"),
    (["inspect", "a"], "`lm data inspect a`?"),
    (["runs", "show"], "give a run, as in `lm runs show RUN`; `lm runs ls` lists them"),
    (["--config", "tiny.yaml", "fit"], "the command comes before its options: `lm fit --config tiny.yaml`"),
    (["--root", "a", "runs", "ls"], "`lm runs ls --root a`"),
    (["evaluate", "mine"], "did you mean `lm evaluate --run mine`?"),
    (["fit", "--run", "nothing", "--ckpt_path", "auto"], "no run 'nothing' under checkpoints"),
    (["train", "--config", "tiny.yaml"], "no command 'train'; did you mean `lm fit --config tiny.yaml`?"),
    (["resume", "mine"], "did you mean `lm fit --ckpt_path auto --run mine`?"),
    (["generate", "--ckpt_path", "mine", "--prompt", "a"], "it is a run: give --run mine, and best, last or auto"),
    (["generate", "--ckpt_path", "my_callbacks.py", "--prompt", "a"], "my_callbacks.py is a file: give its folder ."),
    (["predict", "--data.texts", "missing.txt"], "lm predict: missing.txt: no such file or folder"),
])  # fmt: skip
def test_what_was_meant_is_suggested(arguments, message, capsys, here):
    (here / "my_callbacks.py").touch()
    (write_run(here / "checkpoints", "mine").path / "step-00000002").mkdir()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_what_the_parser_takes_is_let_through(here):
    """Lists that are appended to, values with keys of their own, classes by path, and another command's keys."""
    write_config(here, **{"guards.alerts": {"loss > 10": "stop"}, "run": "a"})
    given = ["--config=small.yaml", "--trainer.callbacks+=recorder.Recorder", "--trainer.callbacks.init_args.x=1",
             "--guards.alerts", '{"lr > 1": "warn"}']  # fmt: skip
    asked = request.read("fit", given)
    assert asked.guards.alerts == {"lr > 1": "warn"} and asked.run_name == "a"
    [first, *_, last] = asked.settings["trainer"]["callbacks"]
    assert first["class_path"] == "recorder.Recorder" and last["init_args"] == {"x": "1"}
    assert request.read("plan", ["-c", "small.yaml", "--strict"]).command_options.strict


def test_a_fit_without_a_config_says_how_to_give_one():
    with pytest.raises(RequestError, match="give a config with --config, such as `lm fit --config tiny.yaml`"):
        request.read("fit", ["--trainer.max_steps", "5"])
    with pytest.raises(RequestError, match=r"no options 'cofig' \(did you mean 'config'\?\), 'lr' \("):
        request.read("fit", ["--cofig", "small.yaml", "--lr", "3"])


@pytest.mark.parametrize("typed", [["runs", "--help"], ["help", "runs"], ["runs", "-h"]])
def test_help_on_the_commands_about_runs_lists_them(typed, capsys):
    assert main(typed) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines] == [c.name for c in TABLE if c.name.startswith("runs ")]


def test_a_config_needs_no_name_before_it(here):
    write_config(here)
    typed = ["--trainer.log_interval", "3"]
    assert request.read("fit", ["small.yaml", *typed]) == request.read("fit", ["--config", "small.yaml", *typed])


def test_a_list_ends_at_any_option_and_its_texts_stay_texts():
    typed = ["--samples.prompts", "a", "b", "-c", "tiny.yaml", "--samples.prompts+", "1984"]
    named = settings.read_options("fit", typed)
    assert named == [("samples.prompts", ["a", "b"]), ("config", "tiny.yaml"), ("samples.prompts+", ["1984"])]
    assert settings.combine("fit", [], named[::2]) == {"samples": {"prompts": ["a", "b", "1984"]}}

"""What editors and shells complete: the schema of a config takes what `lm plan` takes; the completion knows all options."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator

from lm.cli.command import COMMANDS, main
from lm.cli.completion import options_of_command
from lm.cli.schema import config_schema
from lm.system.parsing import parse_yaml

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
SCHEMA = Draft7Validator(config_schema())


class Yaml12(yaml.SafeLoader):
    """As editors read: 8_192 and 1e-3 as in YAML 1.2, where the first is text and the second a number."""


Yaml12.yaml_implicit_resolvers = {
    key: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":int", ":float"))]
    for key, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def test_the_schema_is_one():
    Draft7Validator.check_schema(SCHEMA.schema)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("read", [parse_yaml, lambda text: yaml.load(text, Yaml12)], ids=["1.1", "1.2"])
def test_every_preset_is_valid(config, read):
    text = config.read_text()
    assert "# yaml-language-server: $schema=lm.schema.json" in text
    assert not list(SCHEMA.iter_errors(read(text)))


def test_a_complete_config_is_valid(capsys):
    """With every option and its default, as a run's config.yaml."""
    assert main(["fit", "--config", "tiny.yaml", "--print_config"]) == 0
    assert not list(SCHEMA.iter_errors(parse_yaml(capsys.readouterr().out)))


@pytest.mark.parametrize("option, value", [
    ("trainer.max_stepz", 3), ("trainer.max_steps", "many"), ("model.optimizer.name", "lion"), ("hours", 1),
    ("model.decoder.hidden_size", "wide"), ("model.decoder.qk_norm", "yes"), ("data.sources", [{"weigth": 1}]),
    ("trainer.checkpoint_interval", None), ("trainer.max_steps", -1), ("guards.alerts", ["loss > 1"]),
    ("model.schedule", "wsd"),
])  # fmt: skip
def test_what_plan_refuses_is_underlined(option, value, capsys):
    config = {}
    *groups, last = option.split(".")
    inner = config
    for group in groups:
        inner = inner.setdefault(group, {})
    inner[last] = value
    assert list(SCHEMA.iter_errors(config))
    assert main(["plan", "--config", "tiny.yaml", f"--{option}={json.dumps(value)}"]) == 2


@pytest.mark.parametrize("line, expected, missing", [
    ("f", ["fit"], []), ("runs ", ["ls", "rm"], ["fit"]), ("runs ls --", ["--all", "--json"], ["--data.path"]),
    ("fit --config tiny.yaml --model.optimizer.", ["--model.optimizer.lr"], ["--model.decoder.hidden_size"]),
    ("fit --model.optimizer.name ", ["adamw", "muon"], []), ("generate --t", ["--temperature", "--top_k"], []),
    ("branch --d", ["--decay", "--data.path"], []), ("data prepare --v", ["--val_fraction", "--vocab_size"], []),
    ("generate --chat --ru", ["--run"], ["true"]), ("generate --temperature ", [], ["--top_k"]),
    ("generate --run ", ["mine"], ["--top_k"]), ("runs show ", ["mine"], ["--json"]), ("branch ", ["mine"], ["--at"]),
    ("fit --trainer.devices ", [], ["int", "str"]), ("runs show mine ", ["mine"], ["show"]),
    ("completion ", ["fish"], ["mine"]), ("fit --config ", ["tiny.yaml", "own.yaml"], ["mine"]),
])  # fmt: skip
@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_shell_completes(shell, line, expected, missing, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints/mine").mkdir(parents=True)
    (tmp_path / "own.yaml").touch()
    if subprocess.run(["which", shell], capture_output=True).returncode:
        pytest.skip(f"no {shell}")
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    words = f"lm {line}".split(" ")
    typed = f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}"
    command = {
        "bash": f'source {script}; {typed}; _lm; printf "%s\\n" "${{COMPREPLY[@]}}"',
        "fish": f"source {script}; complete -C 'lm {line}'",
    }
    done = subprocess.run([shell, "-c", command[shell]], capture_output=True, text=True)
    offered = {one.split("\t")[0] for one in done.stdout.splitlines()}
    assert offered >= set(expected) and not offered & set(missing), done


def test_bash_completes_after_an_equals_sign(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    typed = "COMP_WORDS=(lm fit --model.optimizer.name = m); COMP_CWORD=4"  # bash makes three words of it
    command = f"source {tmp_path}/script; {typed}; _lm; echo ${{COMPREPLY[@]}}"
    assert subprocess.check_output(["bash", "-c", command], text=True) == "muon\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_options_of_every_command_are_known(name):
    options = [option.name for option in options_of_command(COMMANDS[name])]
    assert len(options) == len(set(options)) and ("json" in options) == (name not in WITHOUT_JSON)


WITHOUT_JSON = {
    "fit", "branch", "validate", "test", "predict", "scale", "data prepare", "data index", "export", "import",
    "runs rm", "runs rebuild", "runs export", "schema", "completion",
}  # fmt: skip

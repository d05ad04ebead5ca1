"""Options that are gone: an older config and an older run still work where the option has its default, and any use of it
is answered in one line."""

import pytest
import yaml
from trainings import RECORDER, equipment, fit, lm, losses, write_config

import lm as package
from lm.cli.command import main
from lm.errors import RequestError
from lm.system.parsing import parse_yaml
from lm.system.removed_options import REMOVED, drop_removed

SECTIONS = {"trainer": package.Trainer, "model": package.LanguageModule, "data": package.DataModule}


def with_option(document, option, value):
    *groups, last = option.split(".")
    place = document
    for group in groups:
        place = place.setdefault(group, {})
    place[last] = value
    return document


@pytest.mark.parametrize("option", REMOVED)
def test_a_use_of_it_is_one_line(option, here, capsys):
    default, what = REMOVED[option]
    other = not default if isinstance(default, bool) else "other"
    config = write_config(here)
    config.write_text(yaml.safe_dump(with_option(yaml.safe_load(config.read_text()), option, other)))
    for arguments in ([f"--{option}", str(default)], ["--config", str(config)]):
        for command in ("fit", "plan"):
            assert main([command, "--config", "tiny.yaml", *arguments]) == 2
            [line] = capsys.readouterr().err.splitlines()
            assert f"there is no option {option!r}; {what}" in line
    section, _, name = option.rpartition(".")
    for use in (package.fit, SECTIONS.get(section)):
        if use is None:
            continue
        with pytest.raises(RequestError, match="gone since") as refused:
            use("tiny.yaml", {option: other}) if use is package.fit else use(**{name: other})
        assert "\n" not in str(refused.value)
    assert [path.name for path in here.iterdir()] == [config.name]


@pytest.fixture(scope="module")
def whole(workplace):
    """A folder, and the losses of a run in it that nothing interrupts."""
    fit(workplace, "whole")
    return workplace, losses(workplace)


@pytest.mark.parametrize("name, resume", [("by-run", "--run=by-run"), ("by-config", "--config=by-config.yaml")])
def test_an_older_run_resumes_to_the_bit(whole, name, resume):
    """Its own config and the one that it was begun with have the options that are gone, at their defaults."""
    folder, expected = whole
    kill = equipment("recorder.KillAt", signal_name="SIGKILL", micro_batch=15)
    _, run = fit(folder, name, callbacks=[kill], expect=-9)
    for file in (folder / f"{name}.yaml", run.config):
        document = yaml.safe_load(file.read_text())
        document["trainer"]["callbacks"] = [RECORDER]
        for option, (default, _) in REMOVED.items():
            with_option(document, option, default)
        file.write_text(yaml.safe_dump(document))
    run.describe(mirror={"url": "s3://bucket/runs/killed", "newest": None})  # of `trainer.mirror`
    assert name in lm(folder, "runs", "ls").stdout
    lm(folder, "fit", resume, "--ckpt_path", "auto")
    assert losses(folder) == expected and run.status() == "finished"


def test_it_is_found_however_it_is_written():
    for text in ('model: {"cuda_graphs": false, lr: 1e-3}', "model:\n  cuda_graphs : no\n  lr: 1e-3\n"):
        config = parse_yaml(text)
        drop_removed(config)
        assert config == {"model": {"lr": 1e-3}}
    for damaged in (None, [], {"model": None}, {"model": [1]}):
        drop_removed(damaged)

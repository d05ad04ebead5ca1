"""Editing a config: rates follow the rate, and what an option leaves without meaning is dropped and said."""

import logging

import pytest
import yaml

from lm.cli.config_files import find_config
from lm.cli.plan_checks import check_optimizer
from lm.cli.request import read
from lm.training.config import SECTIONS, GroupConfig, GroupsConfig, OptimizerConfig

TINY = ["--config", "tiny.yaml"]


def optimizer(*options: str) -> OptimizerConfig:
    return read("fit", [*TINY, *options]).model.optimizer


def test_the_rates_of_groups_follow_the_rate():
    groups = optimizer("--model.optimizer.lr", "1e-3").groups
    assert [groups.embedding.peak_lr(1e-3), groups.output.peak_lr(1e-3)] == pytest.approx([8e-3, 1.6e-3])
    typed = optimizer("--model.optimizer.groups.embedding.lr", "0.5").groups.embedding
    assert (typed.lr, typed.lr_ratio) == (0.5, None)


def test_a_rate_that_does_not_follow_is_said():
    far = OptimizerConfig(lr=1e-3, groups=GroupsConfig(embedding=GroupConfig(lr=0.09)))
    [finding] = check_optimizer(far)
    assert "lr 0.09 is 90 times model.optimizer.lr 0.001" in str(finding)
    typed = finding.cure.partition(" makes")[0].split()
    assert not list(check_optimizer(optimizer("--model.optimizer.lr", "1e-3", *typed)))


CASES = {  # options over tiny.yaml -> what is left out, and what must be as it was
    "another optimizer": (["--model.optimizer.name", "adamw"], "left out of the config: groups, betas, momentum"),
    "its rate": (["--model.optimizer.name", "adamw"], "model.optimizer.lr stays 0.0112, which was for muon"),
    "another class": (["--model.optimizer.class_path", "torch.optim.SGD"], "groups, betas, momentum"),
    "one of them given": (["--model.optimizer.name", "adamw", "--model.optimizer.betas", "[0.8, 0.9]"], "groups, momentum"),
    "another schedule": (["--model.schedule.name", "cosine"], "was wsd: left out of the config: decay_ratio"),
    "no decay": (["--model.schedule.name", "constant"], "decay_ratio"),
    "tied": (["--model.decoder.tie_word_embeddings", "true"], "model.optimizer.groups.output is left out of the config"),
    "tied, and its rate": (["--model.decoder.tie_word_embeddings", "true"], "groups.embedding.lr_ratio 2.67 is a rate for"),
    "a width": (
        ["--model.decoder.hidden_size", "256"],
        "intermediate_size stays 384, which was for model.decoder.hidden_size 128; --model.decoder.intermediate_size null",
    ),
    "a width, and the MLP's": (["--model.decoder.hidden_size", "256", "--model.decoder.intermediate_size", "null"], ""),
    "another folder": (["--data.path", "data/elsewhere"], "out; --data.prepare.input embedded:sotu keeps it"),
    "the same optimizer": (["--model.optimizer.name", "muon"], ""),
    "the same schedule": (["--model.schedule.name", "wsd"], ""),
    "its own length": (["--model.schedule.name", "cosine", "--model.schedule.decay_ratio", "0.9"], ""),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), CASES.values(), ids=CASES.keys())
def test_what_means_nothing_any_more_is_dropped_and_said(options, message, caplog):
    with caplog.at_level(logging.INFO, "lm"):
        request = read("fit", [*TINY, *options])
    assert message in caplog.text and bool(message) == bool(caplog.text)
    if "groups" in message:
        assert request.model.optimizer.groups.output == GroupConfig()
    if "decay_ratio" in message:
        assert request.model.schedule.decay_ratio is None
    assert request.model.optimizer.lr == 1.12e-2  # what is the user's stays


def test_a_class_takes_the_place_of_a_name_that_is_wrong(tmp_path):
    (tmp_path / "lion.yaml").write_text("model: {optimizer: {name: lion}}\n")
    typed = ["--config", str(tmp_path / "lion.yaml"), "--model.optimizer.class_path", "torch.optim.SGD"]
    assert read("fit", [*TINY, *typed]).model.optimizer.class_path == "torch.optim.SGD"


def test_a_tied_embedding_of_a_config_leaves_the_output_out(tmp_path, caplog):
    tied = tmp_path / "tied.yaml"
    untied = find_config("tiny.yaml").read_text()
    tied.write_text(untied.replace("tie_word_embeddings: false", "tie_word_embeddings: true"))
    with caplog.at_level(logging.INFO, "lm"):
        assert read("fit", ["--config", str(tied)]).model.optimizer.groups.output == GroupConfig()
    assert "model.optimizer.groups.output is left out of the config" in caplog.text


def test_a_name_counts_over_the_class_of_a_config(tmp_path):
    config = tmp_path / "sgd.yaml"
    config.write_text("model: {optimizer: {class_path: torch.optim.SGD, init_args: {momentum: 0.9}}}")
    configs = [*TINY, "--config", str(config)]
    assert read("fit", configs).model.optimizer.class_path == "torch.optim.SGD"
    back = read("fit", [*configs, "--model.optimizer.name", "muon"]).model.optimizer
    assert (back.class_path, back.init_args, back.name) == (None, {}, "muon")


GROUPS = [section.name for section in SECTIONS if section.of_callbacks]
GROUPS += ["trainer.early_stopping", "trainer.distributed", "model.optimizer", "model.schedule"]
GROUPS += ["model.optimizer.groups", "model.optimizer.groups.output", "guards.budget", "guards.throughput"]


@pytest.mark.parametrize("group", GROUPS)
def test_null_clears_a_group_of_options(group, tmp_path):
    typed = read("fit", [*TINY, f"--{group}", "null"])
    section = next(section for section in SECTIONS if section.name == group.partition(".")[0])
    if group == section.name:
        assert getattr(typed, section.name) == section.options()
    value: object = {"a": None}
    for name in reversed(group.split(".")):
        value = {name: None if value == {"a": None} else value}
    (tmp_path / "null.yaml").write_text(yaml.safe_dump(value))
    assert read("fit", [*TINY, "--config", str(tmp_path / "null.yaml")]).settings == typed.settings
    assert typed.settings != read("fit", TINY).settings or group.startswith(("guards", "trainer", "evaluation"))


def test_options_after_a_null_count():
    assert read("fit", [*TINY, "--samples", "null", "--samples.prompts", "a"]).samples.prompts == ["a"]

"""Any optimizer by its class path: our groups and schedule, skipped steps, exact resume, the memory that it takes."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from trainings import expected, lm, losses, make_workplace, write_config

from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder
from lm.training.optim import GroupConfig, GroupsConfig, OptimizerConfig, build_optimizer, parameter_names
from lm.training.optimizer_class import build_by_class

LION = '''
import torch

class Lion(torch.optim.Optimizer):
    """arXiv:2302.06675, with plain values in its state and in its groups, as some optimizers have them."""

    def __init__(self, params, lr, beta=0.9, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, beta=beta, weight_decay=weight_decay, rounds=0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["rounds"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(p.grad, 1 - group["beta"])
                state["seen"] = state.get("seen", 0) + 1
                rate = group["lr"] / (1 + 0.1 * state["seen"] + 0.01 * group["rounds"])
                p.mul_(1 - rate * group["weight_decay"]).sub_(rate * state["mean"].sign())

class Hoarder(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["kept"] = object()
'''
SGD = {"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.9, "nesterov": True}, "lr": 0.05, "weight_decay": 0}
OWN = {"class_path": "my_optimizers.Lion", "init_args": {"beta": 0.95}, "lr": 0.003}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = make_workplace(tmp_path_factory.mktemp("place"))
    (place / "my_optimizers.py").write_text(LION)
    lm(place, "data", "prepare", "--input", "texts", "--output", "data/small", "--tokenizer", "char",
       "--val_fraction", "0.2")  # fmt: skip
    return place


@pytest.mark.parametrize("optimizer", [SGD, OWN], ids=["torch's", "own"])
def test_a_kill_changes_nothing(place, optimizer):
    """A checkpoint has the state as tensors and plain values."""
    (place / "trace.jsonl").unlink(missing_ok=True)
    lm(place, "fit", "--config", str(write_config(place, "whole", **{"model.optimizer": optimizer})))
    (place / "trace.jsonl").rename(place / "expected.jsonl")
    name = optimizer["class_path"].replace(".", "-")
    kill = {"class_path": "recorder.KillAt", "init_args": dict(signal_name="SIGKILL", micro_batch=9)}
    changes = {"model.optimizer": optimizer, "trainer.callbacks": [{"class_path": "recorder.Recorder"}, kill]}
    lm(place, "fit", "--config", str(write_config(place, name, **changes)), "--ckpt_path", "auto", expect=-9)
    del changes["trainer.callbacks"]
    lm(place, "fit", "--config", str(write_config(place, name, **changes)), "--ckpt_path", "auto")
    assert losses(place) == expected(place)
    checkpoint = place / "checkpoints" / name / "last"
    slots = {key.rpartition("/")[2] for key in load_file(checkpoint / "optimizer.safetensors")}
    values = json.loads((checkpoint / "trainer.json").read_text())["optimizer_values"]
    if optimizer is SGD:  # without a decay all parameters are one group
        assert slots == {"momentum_buffer"} and values == {"state": {}, "groups": [{}]}
    else:
        assert slots == {"mean"} and set(values["state"].values()) == {12}
        assert values["groups"] == [{"rounds": 12}, {"rounds": 12}]


@pytest.mark.slow
def test_fsdp_saves_and_resumes_it(place):
    changes = {
        "trainer.devices": 2, "trainer.strategy": "fsdp2", "trainer.keep_checkpoints": 2, "model.decoder.dropout": 0.0,
        "model.optimizer": OWN, "trainer.checkpoint_interval": 4,
    }  # fmt: skip
    (place / "trace.jsonl").unlink(missing_ok=True)
    whole = str(write_config(place, "fsdp", **changes))
    lm(place, "fit", "--config", whole)
    before = load_file(place / "checkpoints/fsdp/last/model.safetensors")
    lm(place, "fit", "--config", whole, "--run", "again", "--ckpt_path", "checkpoints/fsdp/step-00000008")
    after = load_file(place / "checkpoints/again/last/model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_groups_and_decay_are_ours():
    model = Decoder(DecoderConfig(
        vocab_size=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8))  # fmt: skip
    groups = GroupsConfig(embedding=GroupConfig(lr=0.3))
    config = OptimizerConfig(class_path="torch.optim.SGD", lr=0.1, weight_decay=0.2, groups=groups)
    optimizer = build_optimizer(model, config, {})
    each = [(group["lr"], group["peak_lr"], group["weight_decay"])
            for group in optimizer.param_groups for _ in group["params"]]  # fmt: skip
    found = dict(zip(parameter_names(model, optimizer), each, strict=True))
    assert found["embed_tokens.weight"] == (0.3, 0.3, 0.2) and found["norm.weight"] == (0.1, 0.1, 0.0)


def test_a_step_that_is_to_be_skipped_changes_nothing():
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = build_by_class("torch.optim.RMSprop", {}, [{"params": [weight], "lr": 0.1, "weight_decay": 0.0}])
    weight.grad = torch.full_like(weight, torch.nan)
    optimizer.skip = torch.tensor(True)
    optimizer.step()
    assert torch.equal(weight, torch.ones(4, 4)) and not optimizer.state
    optimizer.skip, weight.grad = torch.tensor(False), torch.ones(4, 4)
    optimizer.step()
    assert not torch.equal(weight, torch.ones(4, 4))


@pytest.mark.parametrize("path, values", [("torch.optim.SGD", 0), ("torch.optim.Adagrad", 1), ("torch.optim.NAdam", 2)])
def test_plan_counts_what_it_keeps(place, path, values):
    config = str(write_config(place, "planned", **{"model.optimizer": {"class_path": path}}))
    found = json.loads(lm(place, "plan", "--config", config, "--json").stdout)
    assert found["memory"]["optimizer"] == values * 4 * found["model"]["parameters"]["total"]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"class_path": "torch.optim.LBFGS"}, "computes the loss several times a step"),
        ({"class_path": "torch.optim.Rprop"}, "has no weight_decay: give --model.optimizer.weight_decay 0"),
        ({"class_path": "torch.optim.Muon"}, "only supports 2D parameters"),
        ({"class_path": "torch.optim.Nope"}, "has no attribute 'Nope'; give a class such as torch.optim.SGD"),
        ({"class_path": "my_optimizer.Lion"}, "No module named 'my_optimizer'; give a class"),
        ({"class_path": "torch.nn.Linear"}, "is no torch.optim.Optimizer"),
        ({"class_path": "my_optimizers.Hoarder"}, "keeps 'kept' of a parameter, a object, and a checkpoint can hold"),
        ({"class_path": "torch.optim.SGD", "init_args": {"speed": 1}}, "unexpected keyword argument 'speed'"),
        ({"class_path": "torch.optim.SGD", "init_args": {"lr": 1}}, "init_args.lr: give model.optimizer.lr"),
        ({"init_args": {"momentum": 0.9}}, "init_args are for a class: give model.optimizer.class_path"),
    ],
)
def test_what_cannot_train_is_one_line(place, optimizer, message):
    config = str(write_config(place, "wrong", **{"model.optimizer": optimizer}))
    [line] = lm(place, "fit", "--config", config, expect=2).stderr.strip().splitlines()[-1:]
    assert message in line
    assert not (place / "checkpoints/wrong").exists()


def test_another_optimizer_s_checkpoint_is_refused(place):
    config = str(write_config(place, "other", **{"model.optimizer": SGD, "trainer.max_steps": 4}))
    lm(place, "fit", "--config", config)
    config = str(write_config(place, "other", **{"model.optimizer": OWN, "trainer.max_steps": 8}))
    said = lm(place, "fit", "--config", config, "--ckpt_path", "auto", expect=2).stderr
    assert "checkpoint of another optimizer: it has momentum_buffer of " in said and "needs mean, seen" in said

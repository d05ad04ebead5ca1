"""Any optimizer by its class path: our groups and schedule, skipped steps, exact resume, the memory that it takes."""

import json
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from trainings import expected, lm, losses, make_workplace, write_config

from lm.errors import RequestError
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder
from lm.training.checkpoint_state import parameter_names, refuse_other_optimizer
from lm.training.config import GroupConfig, GroupsConfig, OptimizerConfig
from lm.training.optim import build_optimizer
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

class Everything(torch.optim.Optimizer):
    """State of several dtypes and shapes, of large matrices only, of later steps, of no parameter, and of the whole."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr, sums=torch.zeros(2)))
        self.steps = 0

    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        shared = self.state["shared"]
        shared["count"] = shared.get("count", torch.zeros((), dtype=torch.int64)) + 1
        for group in self.param_groups:
            group["sums"] += 1  # in place
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["half"], state["kind"] = torch.zeros_like(p, dtype=torch.bfloat16), "first"
                    state["byte"] = torch.full((3,), 250, dtype=torch.uint8)
                    state["row"] = p.new_zeros(*p.shape[:-1], 1)
                state["half"].mul_(0.9).add_(p.grad.bfloat16())
                state["byte"] += 1
                state["row"].lerp_(p.grad.square().mean(-1, keepdim=True), 0.1)
                update = state["half"].float() + state["row"]
                update += int(state["byte"][0]) * 1e-3 * (state["kind"] == "first")
                if p.numel() >= 2000:
                    update += state.setdefault("large", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                if self.steps == 2:
                    state["late"] = p.clone()
                if self.steps > 2:
                    update += state["late"].lerp_(p, 0.1)
                count = self.steps + int(shared["count"]) + int(group["sums"][0])
                p.sub_(update, alpha=group["lr"] / (1 + count % 7))

class Hoarder(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.keep(p)

    def keep(self, p):
        self.state[p]["kept"] = object()

class NumbersItsSlots(Hoarder):
    def keep(self, p):
        self.state[p][0] = torch.zeros_like(p)

class KeepsUnderNumbers(Hoarder):
    def keep(self, p):
        self.state[0] = {"kept": torch.zeros_like(p)}

class LateHoarder(torch.optim.SGD):
    count = 0

    def state_dict(self):
        return {**super().state_dict(), **({"queue": object()} if self.count > 1 else {})}

    def step(self, closure=None):
        self.count += 1
'''
SGD = {"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.9, "nesterov": True}, "lr": 0.05, "weight_decay": 0}
EVERYTHING = {"class_path": "my_optimizers.Everything", "lr": 0.01, "weight_decay": 0}
OWN = {"class_path": "my_optimizers.Lion", "init_args": {"beta": 0.95}, "lr": 0.003}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = make_workplace(tmp_path_factory.mktemp("place"))
    (place / "my_optimizers.py").write_text(LION)
    lm(place, "data", "prepare", "--input", "texts", "--output", "data/small", "--tokenizer", "char",
       "--val_fraction", "0.2")  # fmt: skip
    return place


@pytest.mark.parametrize("optimizer", [SGD, OWN, EVERYTHING], ids=["torch's", "own", "everything"])
def test_a_kill_changes_nothing(place, optimizer):
    """A checkpoint has the state as tensors and plain values, whichever it is."""
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
    slots = {(key.rpartition("/")[2], value.dtype)
             for key, value in load_file(checkpoint / "optimizer.safetensors").items()}  # fmt: skip
    values = json.loads((checkpoint / "trainer.json").read_text())["optimizer_values"]
    assert values["written_by"] == {"class_path": optimizer["class_path"]}
    if optimizer is SGD:  # without a decay all parameters are one group
        assert slots == {("momentum_buffer", torch.float32)} and values["state"] == {} and values["groups"] == [{}]
    elif optimizer is OWN:
        assert slots == {("mean", torch.float32)} and set(values["state"].values()) == {12}
        assert values["groups"] == [{"rounds": 12}, {"rounds": 12}]
    else:
        assert dict(slots) == {"half": torch.bfloat16, "byte": torch.uint8,
                               **dict.fromkeys(["row", "large", "late"], torch.float32)}  # fmt: skip
        assert values["entries"] == {"steps": 12} and "count" in values["of_no_parameter"]["shared"]


@pytest.mark.slow
def test_fsdp_saves_and_resumes_it(place):
    changes = {
        "trainer.devices": 2, "trainer.strategy": "fsdp2", "trainer.keep_checkpoints": 2, "model.decoder.dropout": 0.0,
        "model.optimizer": EVERYTHING, "trainer.checkpoint_interval": 4,
    }  # fmt: skip
    (place / "trace.jsonl").unlink(missing_ok=True)
    whole = str(write_config(place, "fsdp", **changes))
    lm(place, "fit", "--config", whole)
    lm(place, "fit", "--config", whole, "--run", "again", "--ckpt_path", "checkpoints/fsdp/step-00000008")
    for file in ("model.safetensors", "optimizer.safetensors"):
        before, after = (load_file(place / "checkpoints" / run / "last" / file) for run in ("fsdp", "again"))
        assert before.keys() == after.keys()
        for name in before:
            assert before[name].dtype == after[name].dtype and torch.equal(before[name], after[name])


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
    optimizer.skip, called = torch.tensor(True), []
    optimizer.step(lambda: called.append(True))  # Lightning calls the hooks of callbacks in it
    assert torch.equal(weight, torch.ones(4, 4)) and not optimizer.state and called
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
        ({"class_path": "torch.nn.Linear"}, "is not a torch.optim.Optimizer"),
        ({"class_path": "my_optimizers.Hoarder"}, "keeps 'kept' of a parameter, and a checkpoint cannot hold a value of"),
        ({"class_path": "my_optimizers.NumbersItsSlots"}, "under names that are not texts"),
        ({"class_path": "my_optimizers.KeepsUnderNumbers"}, "under a number, which in a state_dict is a parameter's"),
        ({"class_path": "torch.optim.SGD", "init_args": {"speed": 1}}, "unexpected keyword argument 'speed'"),
        ({"class_path": "torch.optim.SGD", "init_args": {"momentum": "high"}, "weight_decay": 0},
         "torch.optim.SGD with init_args {'momentum': 'high'}: "),
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
    [line] = lm(place, "fit", "--config", config, "--ckpt_path", "auto", expect=2).stderr.strip().splitlines()[-1:]
    assert "another optimizer, of model.optimizer.class_path torch.optim.SGD, and the config has class_path my" in line


@pytest.mark.parametrize(("written", "now", "message"), [
    ({"class_path": "torch.optim.sgd.SGD"}, SGD, None),
    ({"class_path": "torch.optim.Adam"}, SGD, "has class_path torch.optim.SGD: give class_path torch.optim.Adam"),
    ({"class_path": "torch.optim.Adam"}, {"name": "muon"}, "config has name muon: give class_path torch.optim.Adam"),
    ({"name": "muon"}, SGD, "give name muon and no class_path"),
    ({"name": "muon"}, {"name": "adamw"}, "give name muon$"),
    (None, SGD, None),  # an imported model, which has no state
])  # fmt: skip
def test_the_class_that_wrote_a_checkpoint_decides(written, now, message):
    with nullcontext() if message is None else pytest.raises(RequestError, match=message):
        refuse_other_optimizer(written, OptimizerConfig(**now))


def test_what_a_class_keeps_later_is_refused_at_the_first_checkpoint(place):
    optimizer = {"class_path": "my_optimizers.LateHoarder", "weight_decay": 0}
    config = str(write_config(place, "late", **{"model.optimizer": optimizer}))
    [line] = lm(place, "fit", "--config", config, expect=2).stderr.strip().splitlines()[-1:]
    assert "my_optimizers.LateHoarder: it keeps 'queue' in its state_dict, and a checkpoint cannot hold" in line

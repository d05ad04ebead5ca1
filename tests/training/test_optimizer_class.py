"""Any optimizer by its class path: our groups and schedule, skipped steps, checkpoints, the memory that it takes."""

import json
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from trainings import fit

from lm.errors import RequestError
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder
from lm.training.checkpoint_checks import check_same_optimizer
from lm.training.checkpoint_content import parameter_names
from lm.training.config import GroupConfig, GroupsConfig, OptimizerConfig
from lm.training.optim import build_optimizer
from lm.training.optimizer_by_class import build_by_class

SGD = {"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.9, "nesterov": True}, "lr": 0.05, "weight_decay": 0}
EVERYTHING = {"class_path": "my_optimizers.Everything", "lr": 0.01, "weight_decay": 0}
OWN = {"class_path": "my_optimizers.Lion", "init_args": {"beta": 0.95}, "lr": 0.003}


@pytest.mark.parametrize("optimizer, slots, values", [
    (SGD, {"momentum_buffer": torch.float32}, {"state": {}, "groups": [{}]}),  # without a decay there is one group
    (OWN, {"mean": torch.float32}, {"groups": [{"rounds": 3}, {"rounds": 3}]}),
    (EVERYTHING, {"half": torch.bfloat16, "byte": torch.uint8, "row": torch.float32, "large": torch.float32,
                  "late": torch.float32}, {"entries": {"steps": 3}}),
], ids=["SGD", "Lion", "Everything"])  # fmt: skip
def test_a_checkpoint_has_its_state_as_tensors_and_plain_values(prepared, optimizer, slots, values):
    name = optimizer["class_path"].rpartition(".")[2]
    _, run = fit(prepared, name, **{"model.optimizer": optimizer, "trainer.max_steps": 3})
    tensors = load_file(run.checkpoint("last") / "optimizer.safetensors")
    assert {key.rpartition("/")[2]: value.dtype for key, value in tensors.items()} == slots
    found = json.loads((run.checkpoint("last") / "trainer.json").read_text())["optimizer_values"]
    assert found["written_by"] == {"class_path": optimizer["class_path"]} and found.items() >= values.items()
    assert optimizer is not OWN or set(found["state"].values()) == {3}
    assert optimizer is not EVERYTHING or "count" in found["of_no_parameter"]["shared"]


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


@pytest.mark.parametrize(("optimizer", "message"), [
    ({"class_path": "torch.optim.Muon"}, "only supports 2D parameters"),
    ({"class_path": "torch.optim.Nope"}, "has no attribute 'Nope'; give a class such as torch.optim.SGD"),
    ({"class_path": "my_optimizer.Lion"}, "No module named 'my_optimizer'; give a class"),
    ({"class_path": "torch.nn.Linear"}, "is not a torch.optim.Optimizer"),
    ({"class_path": "torch.optim.SGD", "init_args": {"speed": 1}}, "unexpected keyword argument 'speed'"),
    ({"class_path": "torch.optim.SGD", "init_args": {"lr": 1}}, "init_args.lr: give model.optimizer.lr"),
])  # fmt: skip
def test_what_cannot_train_is_one_line(prepared, optimizer, message):
    refused, run = fit(prepared, "wrong", expect=2, **{"model.optimizer": optimizer})
    assert message in refused.stderr.strip().splitlines()[-1] and not run.path.exists()


@pytest.mark.parametrize(("written", "now", "message"), [
    ({"class_path": "torch.optim.SGD"}, SGD, None),
    ({"class_path": "torch.optim.Adam"}, SGD, "has class_path torch.optim.SGD: give --model.optimizer.class_path torch.optim.Adam"),
    ({"class_path": "torch.optim.Adam"}, {"name": "muon"}, "this run has name muon: give --model.optimizer.class_path torch.optim.Adam"),
    ({"name": "muon"}, SGD, "give --model.optimizer.name muon and no class_path"),
    ({"name": "muon"}, {"name": "adamw"}, "give --model.optimizer.name muon$"),
    ({"name": "adamw"}, {"configure_optimizers": "torch.optim.sgd.SGD"}, "has configure_optimizers torch.optim.sgd.SGD"),
    ({"configure_optimizers": "torch.optim.sgd.SGD"}, {"name": "adamw"}, "of configure_optimizers torch.optim.sgd.SGD"),
    (None, SGD, None),  # an imported model, which has no state
])  # fmt: skip
def test_the_class_that_wrote_a_checkpoint_decides(written, now, message):
    with nullcontext() if message is None else pytest.raises(RequestError, match=message):
        check_same_optimizer(written, dict([next(iter(now.items()))]))


@pytest.mark.parametrize(("name", "what"), [("LateHoarder", "['queue']"), ("Hoarder", "['state'][0]['kept']")])
def test_what_a_checkpoint_cannot_hold_is_refused_at_the_first_one(prepared, name, what):
    optimizer = {"class_path": f"my_optimizers.{name}", "weight_decay": 0}
    refused, _ = fit(prepared, "late", expect=2, **{"model.optimizer": optimizer})
    said = f"my_optimizers.{name}: of its state_dict a checkpoint cannot hold {what} of the type object"
    assert said in refused.stderr.splitlines()[-1]

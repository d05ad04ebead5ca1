"""A custom model, as `lm/training/README.md` shows: its command line, and checkpoints that name its class.

The files are those of the page, as they stand there.
"""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from trainings import HERE, lm, write_config

import lm as package
from lm.cli.request import make_parser
from lm.errors import RequestError
from lm.inference.generation import generate
from lm.inspection.weights import distribution_drift
from lm.model.build import BuildOptions, attach_config, build, config_of
from lm.model.builtin import is_builtin
from lm.model.custom import call_for_losses, check_causal, custom_flops_per_token
from lm.model.decoder import Decoder, DecoderConfig, losses_of
from lm.model.estimates import flops_per_token
from lm.runs.run import Run
from lm.training.config import GroupConfig, GroupsConfig, OptimizerConfig
from lm.training.optim import build_optimizer

README = (HERE.parent / "lm" / "training" / "README.md").read_text()
FILES = dict(re.findall(r"```python\n# (my_(?:model|gru).py)\n(.*?)```", README, re.DOTALL))
SHORT = {"trainer.max_steps": 4, "trainer.checkpoint_interval": 2, "trainer.keep_checkpoints": 2,
         "trainer.callbacks": [], "model.schedule.warmup_steps": 0, "samples.prompts": ["Chapter"],
         "samples.max_new_tokens": 4}  # fmt: skip


@pytest.fixture(scope="module")
def place(prepared):
    for name, text in FILES.items():
        (prepared / name).write_text(text)
    return prepared


def run(place, *arguments, expect=0):
    done = lm(place, *arguments, expect=expect)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(place):
    """A run of the page's GRU."""
    config = str(write_config(place, "gru", **SHORT))
    run(place, "my_gru.py", "fit", "--config", config, "--run", "gru")
    return Run(place / "checkpoints/gru")


def load_class(place, monkeypatch, file, name):
    monkeypatch.syspath_prepend(str(place))
    return getattr(__import__(file), name)


def test_a_decoder_with_another_activation(place, monkeypatch):
    """An option of its own, plan, a resume by another command, evaluation, and loading in Python."""
    changes = SHORT | {"model.expansion": 3, "model.optimizer.name": "muon"}
    config = str(write_config(place, "relu", **changes))
    planned = json.loads(lm(place, "my_model.py", "plan", "--config", config, "--json").stdout)
    said = run(place, "my_model.py", "fit", "--config", config, "--trainer.max_steps", "2", "--run", "relu")
    assert " my_model.py generate " in said
    assert "transformers" not in said and " export " not in said
    run(place, "my_model.py", "fit", "--config", config, "--run", "relu", "--ckpt_path", "auto", "--force")
    run(place, "my_model.py", "fit", "--config", config, "--run", "whole")
    last, whole = (load_file(place / "checkpoints" / name / "step-00000004/model.safetensors")
                   for name in ("relu", "whole"))  # fmt: skip
    assert last.keys() == whole.keys() and "layers.1.mlp.up_proj.weight" in last
    assert f"my_model.py bench step --config {config}` measures" in planned["model"]["unknown"] and planned["ready"]
    document = json.loads((place / "checkpoints/whole/best/config.json").read_text())
    assert document["architectures"] == ["MyModule"] and document["init_args"] == {"expansion": 3}
    assert "val/loss" in run(place, "my_model.py", "validate", "--run", "whole")
    assert run(place, "my_model.py", "evaluate", "--run", "whole", "--texts", "texts/000.txt")
    kind = load_class(place, monkeypatch, "my_model", "MyModule")
    model = package.load_model(place / "checkpoints/whole", module=kind)
    assert isinstance(model.decoder, Decoder) and not is_builtin(model.decoder)
    greedy = {"max_new_tokens": 4, "sampling": package.Sampling(temperature=0)}
    [written] = package.generate(place / "checkpoints/whole", "Chapter", module=kind, **greedy)
    assert written.text and written.text == model.generate("Chapter", **greedy)[0].text
    assert package.evaluate(place / "checkpoints/whole", texts=str(place / "texts/000.txt"), module=kind)["texts"]


def test_any_module(place, trained, monkeypatch):
    """Texts are written without a cache; the commands that read weights know it."""
    kind = load_class(place, monkeypatch, "my_gru", "MyGRU")
    model = package.load_model(trained.path, module=kind)
    prompts = ["Chapter 1", "The answer of the"]
    greedy = {"max_new_tokens": 6, "sampling": package.Sampling(temperature=0)}
    alone = [model.generate(prompt, **greedy)[0].text for prompt in prompts]
    assert [each.text for each in model.generate(prompts, **greedy)] == alone
    again = package.load_model(trained.path, module=kind)
    assert distribution_drift(model, again, prompts).agree.all()


@pytest.mark.slow
def test_over_two_ranks(place):
    config = str(write_config(place, "ranks", **SHORT | {"model.decoder.dropout": 0.0}))
    run(place, "my_gru.py", "fit", "--config", config, "--run", "one")
    one = load_file(place / "checkpoints/one/last/model.safetensors")
    for strategy in ("ddp", "fsdp2"):
        run(place, "my_gru.py", "fit", "--config", config, "--run", strategy, "--trainer.devices", "2",
            "--trainer.strategy", strategy, "--data.micro_batch_size", "2")  # fmt: skip
        two = load_file(place / f"checkpoints/{strategy}/last/model.safetensors")
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


def test_commands_that_a_model_of_another_class_does_not_take(place, trained):
    fit = ["fit", "--config", "gru.yaml", "--trainer.max_steps", "8"]
    assert " my_gru.py validate --ckpt_path " in trained.validate_command()
    assert " my_gru.py fit --config " in trained.resume_command()
    other, cure = "a model that the class MyGRU builds", "has `lm.run(MyGRU)`, such as `python my_gru.py generate`"
    for command, *words in [
        (["validate", "--run", "gru"], other, cure),
        (["generate", "--run", "gru", "--prompt", "a"], other, cure),
        ([*fit, "--run", "gru", "--ckpt_path", "auto", "--force"], other),
        (["export", "--run", "gru", "--output", "published"], "a custom model, which Hugging Face's"),
        (["my_model.py", *fit, "--model.expansoin", "2"], "did you mean 'model.expansion'?"),
    ]:  # fmt: skip
        refused = run(place, *command, expect=2)
        assert all(each in refused for each in words), refused
    assert not (place / "published").exists()
    assert "--model.expansion int [4]" in run(place, "my_model.py", "fit", "--help", "model")


class Small(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.mix = nn.Conv1d(4, 4, 3)
        self.lm_head = nn.Linear(4, 11, bias=False)
        if tied:
            self.lm_head.weight = self.table.weight

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.table(input_ids))
        return logits if labels is None else losses_of(logits, labels)


def test_groups_of_other_names_and_shapes():
    """Embeddings are those that are looked up, and Muon takes matrices only."""
    groups = GroupsConfig(embedding=GroupConfig(lr=1.0), output=GroupConfig(lr=2.0))
    model = Small()
    optimizer = build_optimizer(model, OptimizerConfig("muon", lr=0.1, groups=groups), {})
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(model.table.weight)] == 1.0 and rates[id(model.lm_head.weight)] == 2.0
    assert [group["kind"] for group in optimizer.param_groups if group["params"][0] is model.mix.weight] == ["adamw"]


def test_operations_are_counted_by_weights():
    config = DecoderConfig(vocab_size=11, hidden_size=4, num_hidden_layers=1, num_attention_heads=2)
    mixed = 4 * 4 * 3 + 4
    assert custom_flops_per_token(Small(), config, 8) == 6 * (mixed + 44)
    assert custom_flops_per_token(Small(tied=True), config, 8) == 6 * (mixed + 44)
    assert custom_flops_per_token(Decoder(config), config, 8) == flops_per_token(config, 8)


def test_what_is_no_model_is_refused():
    with pytest.raises(RequestError, match="build_decoder returned int"):
        attach_config(3, DecoderConfig())


@pytest.mark.parametrize("forward", [
    lambda module, ids, labels: torch.zeros(2, 3, 11),
    lambda module, ids, labels: losses_of(module(ids)[:, 1:], labels[:, 1:]),
], ids=["logits", "one target less"])  # fmt: skip
def test_losses_of_another_shape_are_refused(forward):
    module, ids = Small(), torch.arange(6).view(2, 3)
    assert call_for_losses(module, ids, ids).per_token.shape == (2, 3)
    logits = module.forward
    module.forward = lambda ids, labels=None: logits(ids) if labels is None else forward(module, ids, labels)
    with pytest.raises(RequestError, match=r"^Small\.forward\(.*\) returns Losses\(total, per_token\), .* \(2, 3\)"):
        call_for_losses(module, ids, ids)


class Seeing(Small):
    """Sees what `of`, a function of hidden states `(B, T, C)`, makes of them."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, input_ids, labels=None):
        hidden = self.table(input_ids)
        logits = self.lm_head(hidden + self.of(hidden))
        return logits if labels is None else losses_of(logits, labels)


@pytest.mark.parametrize("tokens", [16, 2])
def test_a_model_that_sees_any_later_token_is_refused(tokens):
    torch.manual_seed(0)
    for of in (
        lambda hidden: hidden[:, -1:],
        lambda hidden: hidden[:, : max(2, tokens // 2)].mean(1, keepdim=True),  # the first half, and not the last token
        lambda hidden: torch.cat((hidden[:, 1:-1], hidden[:, -2:]), 1) if tokens > 2 else hidden.flip(1),
    ):
        with pytest.raises(RequestError, match="^Seeing sees later tokens: when those from token "):
            check_causal(Seeing(of), tokens, 11)
    for length in (tokens, 1):
        check_causal(model := Seeing(lambda hidden: hidden.cumsum(1)), length, 11)
    assert model.training


OPTIONS = """
import lm
from my_gru import GRU, MyGRU

class Cut(GRU):
    def forward(self, input_ids, labels=None):
        found = super().forward(input_ids, labels)
        return found[:, -1] if labels is None else found

class Last(MyGRU):
    def __init__(self, layers: int, kind: str = "gru", **options):
        super().__init__(**options)

    def build_decoder(self, config):
        return Cut(config.vocab_size, config.hidden_size, self.hparams.layers)

if __name__ == "__main__":
    lm.run(Last)
"""


def test_a_model_without_logits_is_trained(place):
    """`kind` is an option like any other, though ours has that name, too."""
    (place / "my_last.py").write_text(OPTIONS)
    changes = SHORT | {"samples.prompts": None, "trainer.max_steps": 2, "model.layers": 1}
    config = str(write_config(place, "last", **changes))
    run(place, "my_last.py", "fit", "--config", config, "--run", "last", "--model.kind", "lstm")
    document = json.loads((place / "checkpoints/last/best/config.json").read_text())
    assert document["init_args"] == {"layers": 1, "kind": "lstm"}


def test_our_class_with_other_numbers_is_no_model_of_its_config():
    """Its checkpoints would be another model for Hugging Face's classes, and our kernels would compute another one."""

    def changed(change):
        decoder = Decoder(DecoderConfig(vocab_size=11, hidden_size=32, num_attention_heads=2, num_hidden_layers=1))
        change(decoder)
        return decoder

    assert is_builtin(changed(lambda decoder: None)) and not is_builtin(nn.Embedding(3, 2))
    for change in (
        lambda decoder: setattr(decoder.norm, "eps", 0.1),
        lambda decoder: setattr(decoder.layers[0].mlp, "down_proj", nn.Linear(85, 32, bias=True)),
        lambda decoder: setattr(decoder.layers[0].dropout, "p", 0.1),
        lambda decoder: decoder.layers.append(decoder.layers[0]),
        lambda decoder: decoder.layers[0].mlp.register_forward_hook(lambda part, inputs, output: 2 * output),
        lambda decoder: decoder.norm.register_forward_pre_hook(lambda part, inputs: (inputs[0] + 1,)),
        lambda decoder: setattr(decoder.layers[0].mlp, "forward", torch.relu),
        lambda decoder: setattr(decoder, "windows", [4]),
        lambda decoder: setattr(decoder.layers[0].mlp, "down_proj", nn.Linear(85, 32, bias=False)),
        lambda decoder: decoder.register_buffer("scale", torch.ones(3)),
    ):
        assert not is_builtin(changed(change))


def test_a_config_of_its_own_survives():
    """nanoGPT's modules read `self.config.block_size`; nothing is written on a custom model."""

    class Configured(Small):
        def __init__(self):
            super().__init__()
            self.config, self.fused = SimpleNamespace(block_size=8), "mine"

        def forward(self, input_ids, labels=None):
            return super().forward(input_ids[:, -self.config.block_size :], labels)

    config = DecoderConfig(vocab_size=11, max_position_embeddings=8)
    built = build(config, BuildOptions(), torch.device("cpu"), torch.float32, make=lambda config: Configured())
    before = vars(Configured()).keys()
    model = built.decoder
    assert vars(model).keys() == before and model.config.block_size == 8 and model.fused == "mine"
    assert config_of(model) is config and built.kernels == "the model's own, Configured"
    written = list(generate(model, [[1, 2]], package.Sampling(temperature=0, max_new_tokens=3)))
    assert len(written) == 3


class Takes(package.LanguageModule):
    def __init__(self, width: int = 3):
        super().__init__(DecoderConfig())


class Passes(package.LanguageModule):
    def __init__(self, width: int = 3, **options):
        pass


class Reserved(package.LanguageModule):
    def __init__(self, items: int = 3, **options):
        super().__init__(**options)


@pytest.mark.parametrize("kind, message", [
    (Takes, r"does not take decoder .* with \*\*options"), (Passes, r"does not take decoder .* with \*\*options"),
    (Reserved, "has an argument items, which jsonargparse keeps"),
])  # fmt: skip
def test_a_class_with_other_options_than_a_model_has_is_refused(monkeypatch, kind, message):
    monkeypatch.setattr("lm.system.process.module_class", kind)
    with pytest.raises(RequestError, match=rf"^{kind.__name__}\.__init__ {message}"):
        make_parser("fit")


def test_an_option_without_a_default_has_to_be_given():
    with pytest.raises(RequestError, match="^give --model.layers, or model.layers in the config"):
        make_parser("plan").error("the following arguments are required: model.layers")

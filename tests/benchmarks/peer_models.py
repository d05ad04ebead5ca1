"""The same decoder as different projects build it, each with its own loss; `peers` times them.

Weights are fp32 and computation is under autocast, as all of them are trained. A project is imported only when its
model is asked for.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.model.build import BuildOptions
from lm.model.build import build as build_decoder
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder
from lm.model.fused import is_fused
from lm.model.huggingface import config_json
from lm.model.low_precision import WeightCopies

Loss = Callable[[Tensor, Tensor], Tensor]  # input ids and labels (B, T) -> mean cross-entropy


class Mode(NamedTuple):
    """A way of this project to compute a step, such as `triton_free` or `inductor/off`."""

    compile: str  # as `model.compile`
    kernels: str | None  # as `model.kernels`; None: where they can run

    @classmethod
    def parse(cls, text: str) -> "Mode":
        match = re.fullmatch(r"(none|inductor|triton_free)(?:/(on|off))?", text)
        if not match:
            raise ValueError(f"no mode {text!r}: none, inductor or triton_free, and /on or /off for our kernels")
        return cls(*match.groups())


class Contender(NamedTuple):
    """A model with its loss, on its device."""

    model: nn.Module
    loss: Loss
    same: bool = True  # the very architecture of the config; False: as near as the project has one
    copies: AbstractContextManager = nullcontext()  # of the weights, entered around the micro-batches of a step


def build(
    name: str, config: DecoderConfig, seq_len: int, device: torch.device, half: torch.dtype | None = None
) -> Contender:
    """A contender that computes in `half`, or as its weights are, sequences of `seq_len` tokens.

    Its name is `lm:MODE` with a `Mode`, or `transformers`, `liger`, `litgpt`, `nanogpt`, each also
    with `+inductor`, which compiles the whole model with torch.compile.
    """
    if name.startswith("lm:"):
        return ours(Mode.parse(name.removeprefix("lm:")), config, device, half)
    project, _, compiler = name.partition("+")
    with device:
        contender = BUILDERS[project](config, seq_len)
    return contender._replace(loss=torch.compile(contender.loss, dynamic=False)) if compiler else contender


def ours(mode: Mode, config: DecoderConfig, device: torch.device, half: torch.dtype | None) -> Contender:
    """This project's, as `LanguageModule` sets it up."""

    def make(config: DecoderConfig) -> Decoder:
        with device:
            return Decoder(config)

    options = BuildOptions(mode.kernels or "auto", compile=mode.compile)
    model = build_decoder(config, options, device, half or torch.float32, make=make).decoder
    copied = half is not None and is_fused(model)
    copies = WeightCopies(model, half, adds=mode.compile == "none") if copied else nullcontext()

    def loss(input_ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids, labels=labels).total / labels.numel()

    return Contender(model, loss, copies=copies)


def transformers(config: DecoderConfig, seq_len: int) -> Contender:
    """Hugging Face's, whose own loss is used."""
    from transformers import AutoConfig, AutoModelForCausalLM

    document = config_json(config, None, "float32")
    settings = AutoConfig.for_model(**{**document, "use_cache": False})
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa", dtype=torch.float32)

    def loss(input_ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=input_ids, labels=labels, shift_labels=labels).loss

    return Contender(model.train(), loss)


def liger(config: DecoderConfig, seq_len: int) -> Contender:
    """Hugging Face's with Liger's kernels in place of its modules, loss included. It changes transformers for good."""
    from liger_kernel.transformers import monkey_patch

    kind = config_json(config, None, "float32")["model_type"]
    getattr(monkey_patch, f"apply_liger_kernel_to_{kind}")()
    return transformers(config, seq_len)


def litgpt(config: DecoderConfig, seq_len: int) -> Contender:
    """litgpt's, with the whole batch's logits and cross-entropy, as its `pretrain` has it."""
    from litgpt.config import Config
    from litgpt.model import GPT

    if any(config.windows):
        raise ValueError("windows are not set up for litgpt here")
    model = GPT(Config(
        block_size=seq_len, n_layer=config.num_hidden_layers, n_embd=config.hidden_size,
        vocab_size=config.vocab_size, padded_vocab_size=config.vocab_size, norm_class_name="RMSNorm",
        norm_eps=config.rms_norm_eps, norm_qk=config.qk_norm, n_head=config.num_attention_heads,
        head_size=config.head_dim, n_query_groups=config.num_key_value_heads, rope_base=int(config.rope_theta),
        rotary_percentage=1.0, intermediate_size=config.intermediate_size, bias=False, parallel_residual=False,
        mlp_class_name="LLaMAMLP",
    ))  # fmt: skip
    if config.tie_word_embeddings:
        model.transformer.wte.weight = model.lm_head.weight

    def loss(input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(input_ids).flatten(0, 1), labels.flatten())

    return Contender(model, loss)


def nanogpt(config: DecoderConfig, seq_len: int) -> Contender:
    """nanoGPT's GPT-2 of the same depth and width: other norms, positions and MLP, and no grouped heads."""
    from model import GPT, GPTConfig  # the name of its file

    model = GPT(GPTConfig(
        block_size=seq_len, vocab_size=config.vocab_size, n_layer=config.num_hidden_layers,
        n_head=config.num_attention_heads, n_embd=config.hidden_size, dropout=0.0, bias=False,
    ))  # fmt: skip
    return Contender(model, lambda input_ids, labels: model(input_ids, labels)[1], same=False)


BUILDERS = {"transformers": transformers, "liger": liger, "litgpt": litgpt, "nanogpt": nanogpt}


class Training:
    """Optimizer steps of a contender, in a plain loop that is the same for all.

    `batches` are input ids and labels, `(micro-batches, B, T)` each, gone through in every step.
    """

    def __init__(self, contender: Contender, batches: tuple[Tensor, Tensor], half: torch.dtype | None) -> None:
        self.contender, self.batches, self.half = contender, batches, half
        self.device = batches[0].device
        self.parameters = list(contender.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(self) -> float | Tensor:
        """One optimizer step; the sum of its losses."""
        total = 0.0
        with self.contender.copies:
            for input_ids, labels in zip(*self.batches, strict=True):
                total += self._micro_batch(input_ids, labels)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _micro_batch(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(self.device.type, self.half, enabled=self.half is not None):
            loss = self.contender.loss(input_ids, labels) / len(self.batches[0])
        loss.backward()
        return loss.detach()

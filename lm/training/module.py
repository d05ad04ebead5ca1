"""The LightningModule around the decoder: `training_step` is one optimizer step, from a batch to changed weights.

Fifth stop of a batch: it comes from `data/datamodule`, and `model/decoder` computes its losses. This is the one place
that sees both the model and the data.
"""

import json
import logging
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields, replace
from inspect import currentframe
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lm.data.loader import Batch, Cursor
from lm.errors import RequestError
from lm.evaluation.statistics import TokenLoss, perplexity
from lm.kernels.operations import choose_kernels
from lm.model.attention import describe_attention
from lm.model.attention_choice import Shape, choose_attention
from lm.model.compile import GraphedMicroBatch, checkpoint_activations, compile_decoder
from lm.model.config import DecoderConfig, matrix_rows
from lm.model.custom import (
    call_for_losses,
    custom_flops_per_token,
    is_stock,
    module_class,
    named,
    plain_arguments,
    refuse_contract,
    refuse_losses,
)
from lm.model.decoder import Decoder, Losses, document_ids_from
from lm.model.estimates import flops_per_token
from lm.model.fused import WeightCopies, fuse
from lm.system.arguments import arguments_from
from lm.system.stop_signals import STOP
from lm.training import checkpoint_state
from lm.training.callback import call_hook
from lm.training.config import ModelConfig
from lm.training.distributed import FullyShardedStrategy, gather_from_ranks
from lm.training.optim import build_optimizer
from lm.training.plain_trainer import adopt
from lm.training.schedule import lr_fraction
from lm.training.step_stats import StepRecord, StepStats, sum_by_source, sum_over_ranks, total_norm
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)


class LanguageModule(LightningModule):
    """A decoder and how it is trained.

    Its arguments are the fields of `ModelConfig`, where each is explained.
    """

    @arguments_from(ModelConfig)
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # What a subclass adds is in `hparams`: checkpoints name it, to build the model again. Lightning looks for it in
        # the frames of the constructors, from the caller of this one on.
        self.save_hyperparameters(
            ignore=[option.name for option in fields(ModelConfig)], frame=currentframe().f_back, logger=False
        )
        self.automatic_optimization = False  # Lightning's batch is an optimizer step, and `training_step` takes it
        self.config = config.decoder
        self.optimizer_config = config.optimizer
        self.schedule_config = config.schedule
        self.document_mask = config.document_mask
        self.z_loss = config.z_loss
        self.kernels = {True: "on", False: "off"}.get(config.kernels, config.kernels)  # YAML takes a bare `on` for true
        self.compile_mode = config.compile
        self.compile_whole = config.compile_whole
        self.activation_checkpointing = config.activation_checkpointing
        self.keep_normed_rows = config.keep_normed_rows
        self.attention = config.attention
        self.cuda_graphs = config.cuda_graphs
        self.graphed: GraphedMicroBatch | None = None  # while training with CUDA graphs
        self.weight_copies: AbstractContextManager = nullcontext()  # in half precision, while training
        self.decoder: nn.Module | None = None
        self.plain = False  # whether the Trainer is Lightning's own
        self.stock = True  # whether the decoder is ours in all its parts
        self.attention_kernels = "not chosen yet"  # of the libraries, in words
        self.kernels_taken = "not chosen yet"
        self.validation = TokenLoss()
        self.cursor: Cursor | None = None  # of the newest step
        self.stats = StepStats()  # no buffers: DDP would overwrite them with those of rank zero
        self.recent_steps: list[StepRecord] = []  # since the log line before the newest one
        self._token_bytes: Tensor | None = None  # (V,) bytes of text of each token, on the device
        self._rank_state: dict[str, Any] = {}  # of the checkpoint that is resumed: what belongs to this rank alone

    def setup(self, stage: str) -> None:
        self.plain = not isinstance(self.trainer, Trainer)
        if self.plain:
            adopt(self.trainer, self, stage)

    @property
    def fitting(self) -> bool:
        """Whether this is a fit, also while it validates."""
        return self.trainer.state.fn == TrainerFn.FITTING

    # ---- the model ----------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the decoder, once, when the tokenizer and so the vocabulary is known."""
        if self.decoder is not None or self._trainer is None:  # `load_from_checkpoint` has no tokenizer
            return
        tokenizer = self.trainer.datamodule.tokenizer
        vocab_size = self.config.vocab_size or tokenizer.vocab_size
        if vocab_size < tokenizer.vocab_size:
            raise RequestError(
                f"model.decoder.vocab_size {vocab_size:,} is smaller than the tokenizer's {tokenizer.vocab_size:,}: "
                "leave it out to take the tokenizer's"
            )
        self.config = replace(self.config, vocab_size=vocab_size)
        if sources := self.trainer.datamodule.source_names:
            self.validation = TokenLoss(len(sources))
        self.decoder = named(self.build_decoder(self.config), self.config)
        self.stock = is_stock(self.decoder)
        call_hook(self.trainer, "on_model_built", self)
        device = self.trainer.strategy.root_device
        self._refuse_graphs(device)
        if not self.stock:
            self._refuse_what_is_for_ours()
        sharded = isinstance(self.trainer.strategy, FullyShardedStrategy)
        if self.compile_whole and self.compile_mode == "none":
            raise RequestError("model.compile_whole is for a compiled model: set model.compile inductor, or leave it "
                               "out")  # fmt: skip
        if sharded and self.compile_whole:
            raise RequestError("model.compile_whole needs whole weights, and sharding gathers them block by block: "
                               "leave it out, or set trainer.strategy ddp")  # fmt: skip
        ops, self.kernels_taken = None, f"off for {type(self.decoder).__name__} of {type(self).__name__}"
        if self.stock:
            ops, self.kernels_taken = choose_kernels(self.kernels, device)
        if self.keep_normed_rows and ops is None and self.fitting:
            raise RequestError(f"model.keep_normed_rows is for our kernels, and this is {self.kernels_taken}: leave it "
                               "out")  # fmt: skip
        if ops is not None:
            fuse(self.decoder, ops, self.keep_normed_rows)
        dtype = torch.float32 if self.trainer.precision == "32-true" else torch.bfloat16  # fp16 takes bf16's kernels
        self.attention_kernels = "the model's own"
        if isinstance(self.decoder, Decoder):
            self._choose_attention(device, dtype)
            self.attention_kernels = describe_attention(
                device, dtype, self.config.windows, self.document_mask, self.config.head_dim, self.config.dropout,
                self.decoder.attention_backend,
            )  # fmt: skip
        log.info(
            "kernels: %s; attention: %s; compile: %s%s; activation checkpointing: %s", self.kernels_taken,
            self.attention_kernels, self.compile_mode, ", all blocks as one" * self.compile_whole,
            self.activation_checkpointing,
        )  # fmt: skip
        checkpoint_activations(self.decoder, self.activation_checkpointing, self.compile_mode)
        compile_decoder(self.decoder, self.compile_mode, self.compile_whole)
        if sharded:
            self.trainer.strategy.shard(self.decoder)

    def build_decoder(self, config: DecoderConfig) -> nn.Module:
        """The model to train; a subclass may return its own, by the contract of `model/custom`.

        It is built again from this method, with the same arguments of the class, to use a checkpoint; so it must read
        nothing of the trainer or the data.

        Args:
            config: `model.decoder`, whose vocabulary is known.
        """
        return Decoder(config)

    def _refuse_what_is_for_ours(self) -> None:
        """Refuse options that a model of one's own has no use for.

        Raises:
            RequestError: names the option; or the model does not keep to the contract.
        """
        name, whole = type(self.decoder).__name__, isinstance(self.decoder, Decoder)
        plain_arguments(type(self), self.hparams)
        given = {"document_ids": self.document_mask, "z_loss": bool(self.z_loss)}
        refuse_contract(self.decoder, given)
        for option, asked, possible in (
            ("kernels", self.kernels == "on", False),
            ("attention", self.attention != "auto", whole),
            ("activation_checkpointing", self.activation_checkpointing != "none", whole),
            ("compile_whole", self.compile_whole, whole),
        ):
            if asked and not possible:
                raise RequestError(f"model.{option} is for the decoder of this project, and build_decoder returned "
                                   f"{name}: leave it out")  # fmt: skip
        if self.fitting and not whole:
            self.decoder.to(self.trainer.strategy.root_device)
            data = self.trainer.datamodule
            with self.trainer.precision_plugin.forward_context():
                refuse_losses(self.decoder, (min(2, data.micro_batch_size), data.seq_len), given)

    def _choose_attention(self, device: torch.device, dtype: torch.dtype) -> None:
        """All ranks take the kernels that are the fastest on the first one."""
        config, data = self.config, self.trainer.datamodule
        windows = tuple(w if w is not None and w < data.seq_len else None for w in config.windows)
        shape = Shape(data.micro_batch_size, data.seq_len, config.num_attention_heads, config.num_key_value_heads,
                      config.head_dim, windows, self.document_mask)  # fmt: skip
        choice = gather_from_ranks(choose_attention(self.attention, device, dtype, shape))[0]
        if choice is not None:
            choice.apply(self.decoder)

    def _refuse_graphs(self, device: torch.device) -> None:
        if not (self.cuda_graphs and self.fitting):
            return
        reasons = {
            f"a CUDA device, and this is a {device.type}": device.type != "cuda",
            f"one device, and these are {self.trainer.world_size}": self.trainer.world_size > 1,
            "shards in which every token is a target: what `labels` or packed rows leave out differs by the batch":
                any(shards.labels for shards in self.trainer.datamodule.shards.values()),
            "data.on_bad_shard raise: what is skipped differs from batch to batch":
                self.trainer.datamodule.on_bad_shard == "skip",
        }
        for need, missing in reasons.items():
            if missing:
                raise RequestError(f"model.cuda_graphs needs {need}")

    def losses(self, batch: Batch) -> Losses:
        """The losses of a batch: their sum in nats, which is differentiable, and each token's loss, which is not."""
        input_ids = batch.input_ids  # (B, T)
        documents = None
        if self.document_mask:
            documents = document_ids_from(input_ids, self.trainer.datamodule.tokenizer.eos_id)
        z_loss = self.z_loss if self.training else 0.0
        with self.trainer.precision_plugin.forward_context():
            if not isinstance(self.decoder, Decoder):
                return call_for_losses(
                    self.decoder, input_ids, batch.labels, document_ids=documents, z_loss=z_loss or None)  # fmt: skip
            return self.decoder(
                input_ids, labels=batch.labels, document_ids=documents, z_loss=z_loss,
                max_documents=batch.max_documents,
            )  # fmt: skip

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Count documents while the batch is still on the host, so that nothing waits for the device."""
        if self.document_mask:
            batch.count_documents(self.trainer.datamodule.tokenizer.eos_id)
        return batch

    # ---- training -----------------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One optimizer step on this rank's rows `(B, T + 1)` of the global batch.

        The gradient is that of the mean loss over all targets that count, of all micro-batches and all ranks. A step
        whose loss or gradient is not finite changes no weight, on any rank. The host does not wait for the device
        here, but for optimizers that are not fused (on a Mac).

        Returns:
            The mean loss of this rank's targets in nats, a scalar.
        """
        trainer, optimizer = self.trainer, self.optimizers()
        generators = checkpoint_state.rng_state()  # for a step that is dropped: dropout has drawn from them
        micro_batches = batch.split(trainer.steps.micro_batch_size)
        loss_sum, by_source = torch.zeros((), device=self.device), None
        if batch.sources is not None:
            by_source = torch.zeros_like(self.stats.by_source)  # (sources, 2)

        with self.weight_copies:
            for number, micro_batch in enumerate(micro_batches, start=1):
                if STOP.half_time_over:  # a signal came, and the time to finish this step is over
                    self._zero_grad()
                    checkpoint_state.restore_generators(generators)
                    trainer.end_run(f"; the next one was not done within {trainer.stop_within / 2:g} s")
                # Ranks exchange gradients once, in the backward pass of the last micro-batch.
                with optimizer.toggle_model(sync_grad=number == len(micro_batches)):
                    per_token = self.forward_backward(micro_batch)  # (b, T)
                loss_sum += per_token.sum()
                if by_source is not None:
                    sum_by_source(per_token, micro_batch.mask, micro_batch.sources, by_source)

        # The backward passes averaged over all positions; the mean is over the targets that count.
        global_loss, num_targets, by_source = sum_over_ranks(
            loss_sum, batch.num_tokens, trainer.world_size, by_source)  # fmt: skip
        to_mean = trainer.steps.tokens_per_step / num_targets.clamp(min=1)  # exactly 1 where all targets count

        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grad_norm = total_norm(gradients) * to_mean / self._loss_scale
        finite = self.stats.add(
            self.global_step + 1, global_loss, num_targets, grad_norm, self._scaler is not None, by_source)  # fmt: skip
        clip = (trainer.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1) if trainer.max_grad_norm else 1
        self._scale_or_skip(gradients, to_mean * clip, finite)

        fraction = lr_fraction(self.global_step, trainer.max_steps, self.schedule_config)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * fraction
        optimizer.step()
        self._zero_grad()
        self.cursor = batch.cursor
        if self.plain and self.global_step % trainer.log_every_n_steps == 0:
            self.log_dict(self.logged_metrics())
        return loss_sum / max(1, batch.num_tokens)

    def forward_backward(self, micro_batch: Batch) -> Tensor:
        """Add the gradient of a micro-batch's mean loss, divided by the micro-batches of a step, to those before it.

        Returns:
            The loss of every token in nats, `(b, T)`.
        """
        if self.graphed is not None:
            documents = micro_batch.max_documents  # few values occur, and each has its graph
            return self.graphed(micro_batch.tokens, documents and (documents,))
        return self._accumulate_gradient(micro_batch)

    def _accumulate_gradient(self, micro_batch: Batch) -> Tensor:
        total, per_token = self.losses(micro_batch)  # (), (b, T)
        self.manual_backward(total / per_token.numel() / self.trainer.steps.accumulate)
        return per_token

    def _scale_or_skip(self, gradients: list[Tensor], factor: Tensor, finite: Tensor) -> None:
        """Multiply the gradients; where `finite`, a bool on the device, is false, the next step changes no weight."""
        if self._scaler is None:
            self.optimizers().optimizer.skip = ~finite  # torch's optimizer, inside Lightning's
        else:  # a GradScaler skips a step by itself where a gradient is not finite
            factor = torch.where(finite, factor, torch.nan)
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))

    def _zero_grad(self) -> None:
        (self.graphed or self.optimizers()).zero_grad()

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    @property
    def _loss_scale(self) -> Tensor | float:
        """What gradients were multiplied with, so that fp16 can hold them; `get_scale` would wait for the device."""
        return 1.0 if self._scaler is None else self._scaler._scale

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The one optimizer; learning rates are set before each step, so there is no scheduler to save."""
        stacked = matrix_rows(self.config) if isinstance(self.decoder, Decoder) else {}
        return build_optimizer(self.decoder, self.optimizer_config, stacked)

    def logged_metrics(self) -> dict[str, float]:
        """What a log line says of the steps since the last one, which are then in `recent_steps`.

        Called on every rank; waits for the device.
        """
        loss, by_source, self.recent_steps = self.stats.read()
        data = self.trainer.datamodule
        epochs = data.order().epochs(self.cursor.end).tolist() if data.source_names else []
        fraction = lr_fraction(self.global_step - 1, self.trainer.max_steps, self.schedule_config)
        return {
            "train/loss": loss,
            "train/max_loss": max((s.loss for s in self.recent_steps if math.isfinite(s.loss)), default=math.nan),
            "train/perplexity": perplexity(loss),
            "optim/lr": self.optimizer_config.lr * fraction,
            "optim/grad_norm": self.recent_steps[-1].grad_norm,
            "optim/param_norm": total_norm([p.detach() for p in self.decoder.parameters()]).item(),
            **{f"train/loss/{name}": loss for name, loss in zip(data.source_names, by_source) if loss == loss},
            **{f"data/epochs/{name}": count for name, count in zip(data.source_names, epochs)},
        }

    def flops_per_token(self, full_attention: bool = False) -> float:
        """Floating-point operations of training on one token, forward and backward."""
        if not self.stock:
            return custom_flops_per_token(self.decoder, self.config, self.trainer.datamodule.seq_len, full_attention)
        return flops_per_token(self.config, self.trainer.datamodule.seq_len, full_attention)

    # ---- validating, testing, predicting ------------------------------------------------------------------------

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 0:
            self._token_bytes = self.trainer.datamodule.token_bytes.to(self.device)
        self.validation.update(self.losses(batch).per_token, batch.labels, self._token_bytes, batch.sources)

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, prefix: str) -> None:
        result = self.validation.compute()  # sums over ranks
        self.validation.reset()
        names = {"loss": "loss", "bits_per_byte": "bpb"}
        metrics = {f"{prefix}/{short}": result[name] for name, short in names.items()}
        data = self.trainer.datamodule
        if data.source_names:
            each, shares = metrics, data.shares(self.trainer.samples_of_run)  # (sources,)
            measured = result["tokens"] > 0
            shares = torch.where(measured, torch.from_numpy(shares).to(self.device), 0)
            shares = shares if shares.any() else measured.double()  # none that is trained on now has a validation
            metrics = {name: (values.nan_to_num() * shares).sum() / shares.sum() for name, values in each.items()}
            metrics |= {
                f"{name}/{source}": value
                for name, values in each.items() for source, value in zip(data.source_names, values)
                if not value.isnan()
            }  # fmt: skip
        self.log_dict(metrics | {f"{prefix}/perplexity": metrics[f"{prefix}/loss"].exp()}, logger=self.plain)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log-probability of every label of a batch given what is before it: (B, T) fp32, 0 where it is ignored."""
        return -self.losses(batch).per_token

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.plain:
            decoder = json.loads(json.dumps(asdict(self.config)))  # plain values, which torch.load takes without pickle
            checkpoint["lm"] = {"consumed": self.cursor.end if self.cursor else 0, "decoder": decoder}
        else:
            checkpoint_state.to_checkpoint(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "lm" not in checkpoint and isinstance(self._trainer, Trainer):
            self._rank_state = checkpoint_state.from_checkpoint(self, checkpoint)
        elif "lm" not in checkpoint or isinstance(self._trainer, Trainer):
            raise RequestError("a checkpoint is resumed by the Trainer that took it, lightning.Trainer or lm.Trainer")
        elif self._trainer is None:  # load_from_checkpoint
            self.config = DecoderConfig(**checkpoint["lm"]["decoder"])
            self.decoder = named(self.build_decoder(self.config), self.config)
        else:
            self.cursor = Cursor(start=0, end=checkpoint["lm"]["consumed"])
            self.trainer.datamodule.consumed = self.cursor.end

    def on_train_start(self) -> None:
        """Put the sums on the device and this rank's generators where the checkpoint left them."""
        # A training step is more than a forward pass: `losses` enters the precision's context by itself.
        self.trainer.precision_plugin.train_step_context = nullcontext
        sources = len(self.trainer.datamodule.source_names)
        self.stats = StepStats(self.device, self._rank_state.get("step_stats"), sources)
        if "rng" in self._rank_state:
            checkpoint_state.restore_generators(self._rank_state["rng"])
        elif self.global_rank:  # all ranks drew the same initial weights; from here on each drops out its own
            torch.manual_seed(torch.initial_seed() + self.global_rank)
        self._rank_state = {}
        precision = self.trainer.precision
        mixed = precision not in ("32-true", "bf16-true")
        if mixed and self.decoder.fused and not isinstance(self.trainer.strategy, FullyShardedStrategy):
            self.weight_copies = WeightCopies(
                self.decoder, torch.float16 if precision == "16-mixed" else torch.bfloat16)  # fmt: skip
        if self.cuda_graphs:
            self.graphed = GraphedMicroBatch(
                self.decoder.parameters(),
                lambda tokens, row_documents: self._accumulate_gradient(Batch(tokens, row_documents=row_documents)),
                capture=self.device.type == "cuda",
            )  # fmt: skip

    def on_train_end(self) -> None:
        self.graphed, self.weight_copies = None, nullcontext()


def training_class() -> type[LanguageModule]:
    """The class that the commands of this process train: `LanguageModule`, or what was given to `lm.run`."""
    return module_class() or LanguageModule


def builds_own_model() -> bool:
    """Whether that class may build another model than the config describes."""
    return training_class().build_decoder is not LanguageModule.build_decoder

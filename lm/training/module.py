"""The spine: the LightningModule around the decoder. Read it first.

On the way of a batch this is the stop after `data/datamodule`: `training_step` hands the token ids to
`model/decoder`, sums the loss, and `optim` takes the step. It is also the one place that sees both the model and the
data, so what a checkpoint holds is put together here.
"""

import logging
import math
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lm.data.loader import Batch, Cursor
from lm.errors import RequestError
from lm.evaluation.statistics import TokenLoss, perplexity
from lm.kernels.operations import choose
from lm.model.attention import describe
from lm.model.compile import Compile, MicroStep, compile_decoder
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder, Losses, document_ids_from
from lm.model.estimates import flops_per_token
from lm.model.fused import fused_rows
from lm.training import checkpointing
from lm.training.optim import OptimizerConfig, build_optimizer
from lm.training.schedule import ScheduleConfig, schedule
from lm.training.step_stats import Step, Tally

log = logging.getLogger(__name__)


class LanguageModule(LightningModule):
    """A decoder and how it is trained.

    Args:
        decoder: Shape of the decoder, in Hugging Face's names.
        optimizer: Which optimizer, and its settings.
        schedule: Learning-rate schedule over optimizer steps.
        document_mask: Keep attention inside a document and restart positions at its beginning.
        z_loss: Weight of the squared log of the partition function in the training loss; keeps logits from drifting.
        kernels: Our CUDA kernels: `on`, `off`, or `auto`, where they can run.
        compile: What runs a block: `none` is eager mode, `inductor` generates code, `triton_free` traces forward and
            backward pass together and generates none.
        cuda_graphs: Record a micro-batch's forward and backward pass once and replay it; for small models.
    """

    def __init__(
        self,
        decoder: DecoderConfig,  # no default: an instance would fix what follows from the other fields
        optimizer: OptimizerConfig = OptimizerConfig(),
        schedule: ScheduleConfig = ScheduleConfig(),
        document_mask: bool = False,
        z_loss: float = 0.0,
        kernels: Literal["auto", "on", "off"] | bool = "auto",
        compile: Compile = "none",
        cuda_graphs: bool = False,
    ) -> None:
        super().__init__()
        self.config = decoder
        self.optimizer_config = optimizer
        self.schedule_config = schedule
        self.document_mask = document_mask
        self.z_loss = z_loss
        self.kernels = {True: "on", False: "off"}.get(kernels, kernels)  # YAML takes a bare `on` for true
        self.compile_mode = compile
        self.cuda_graphs = cuda_graphs
        self.micro_step: MicroStep | None = None  # while training with CUDA graphs
        self.decoder: Decoder | None = None
        self.attention = "not chosen yet"  # which library kernels do it, in words
        self.kernels_taken = "not chosen yet"
        self.validation = TokenLoss()
        self.cursor: Cursor | None = None  # of the newest micro-batch that was trained on
        self.tally = Tally()  # no buffers: DDP would overwrite them with those of rank zero
        self.recent_steps: list[Step] = []  # since the log line before the newest one
        self.step_began: tuple[int, dict[str, Tensor]] | None = None  # samples before the newest step, and generators
        self._token_bytes: Tensor | None = None  # (V,) UTF-8 bytes of each token, on the device
        self._resumed: dict[str, Any] = {}  # what a checkpoint holds for this rank alone

    # ---- the model ----------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the decoder, once, when the tokenizer and so the vocabulary is known."""
        if self.decoder is not None:
            return
        tokenizer = self.trainer.datamodule.tokenizer
        vocab_size = self.config.vocab_size or tokenizer.vocab_size
        if vocab_size < tokenizer.vocab_size:
            raise RequestError(
                f"model.decoder.vocab_size {vocab_size:,} is smaller than the tokenizer's {tokenizer.vocab_size:,}: "
                "leave it out to take the tokenizer's"
            )
        self.config = replace(self.config, vocab_size=vocab_size)
        self.decoder = Decoder(self.config)
        device = self.trainer.strategy.root_device
        self._refuse_graphs(device)
        self.decoder.operations, self.kernels_taken = choose(self.kernels, device)
        dtype = torch.float32 if self.trainer.precision == "32-true" else torch.bfloat16  # or fp16, which is the same
        self.attention = describe(device, dtype, self.config.windows, self.document_mask, self.config.dropout)
        log.info("kernels: %s; attention: %s; compile: %s", self.kernels_taken, self.attention, self.compile_mode)
        compile_decoder(self.decoder, self.compile_mode)
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard is not None:
            shard(self.decoder)

    def _refuse_graphs(self, device: torch.device) -> None:
        if not self.cuda_graphs:
            return
        reasons = {
            f"a CUDA device, and this is a {device.type}": device.type != "cuda",
            f"one device, and these are {self.trainer.world_size}": self.trainer.world_size > 1,
            "model.document_mask off: how many documents there are differs from batch to batch": self.document_mask,
            "data.on_bad_shard raise: what is skipped differs from batch to batch":
                self.trainer.datamodule.on_bad_shard == "skip",
        }
        for need, missing in reasons.items():
            if missing:
                raise RequestError(f"model.cuda_graphs needs {need}")

    def losses(self, batch: Batch) -> Losses:
        """What a batch costs: the total in nats, which is differentiable, and each token's loss, which is not."""
        input_ids = batch.input_ids  # (B, T)
        documents = None
        if self.document_mask:
            documents = document_ids_from(input_ids, self.trainer.datamodule.tokenizer.eos_id)
        z_loss = self.z_loss if self.training else 0.0
        return self.decoder(input_ids, labels=batch.labels, document_ids=documents, z_loss=z_loss)

    # ---- training -----------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Remember how an optimizer step began: until it is taken it may be given up."""
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.step_began = batch.cursor.start, checkpointing.rng_state()
        self.trainer.repeatable = True

    def on_after_backward(self) -> None:
        """What comes now changes weights, or is for the callbacks to do."""
        self.trainer.repeatable = False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one micro-batch.

        It is divided by the tokens a micro-batch has room for. Lightning then divides by the micro-batches of a step
        and DDP by the ranks, so the gradient is that of the mean over the whole global batch; where labels are
        masked, `configure_gradient_clipping` makes up the difference with the tokens that really counted.
        """
        total, each = self.losses(batch) if self.micro_step is None else self.micro_step(batch.tokens)  # (), (B, T)
        self.tally.add(each.sum(), batch.num_tokens)
        self.cursor = batch.cursor
        return total / each.numel()

    def _forward_backward(self, tokens: Tensor) -> Losses:
        """A micro-batch with its backward pass, and all that Lightning would do to the loss in between."""
        total, each = self.losses(Batch(tokens))
        loss = total / each.numel() / self.trainer.accumulate_grad_batches
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        with torch.autocast(tokens.device.type, enabled=False):
            (loss if scaler is None else scaler.scale(loss)).backward()
        return Losses(total.detach(), each)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass, unless `training_step` has replayed it already."""
        if self.micro_step is None:
            super().backward(loss, *args, **kwargs)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Forget old gradients; those in the buffers of a CUDA graph are new here, and are cleared after the step."""
        if self.micro_step is None:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Clear the buffers of a CUDA graph once a step is taken."""
        if self.micro_step is not None and (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.micro_step.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The one optimizer; learning rates are set before each step, so there is no scheduler to save."""
        return build_optimizer(self.decoder, self.optimizer_config, fused_rows(self.config))

    def learning_rate(self, step: int) -> float:
        """The learning rate of optimizer step `step` (0 is the first), where a group has none of its own."""
        return self.optimizer_config.lr * schedule(step, self.trainer.max_steps, self.schedule_config)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Set the learning rate of every group for this step and take it."""
        share = schedule(self.global_step, self.trainer.max_steps, self.schedule_config)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """One norm and one multiplication: per-token mean over the global batch, then clipping by the global norm.

        A step whose loss or gradient is not finite changes nothing, on any rank. Nothing here waits for the device. A
        fused optimizer under a GradScaler unscales in its own step, so the gradients are still scaled here and the
        norm is taken back by that scale.
        """
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        nats, tokens = self.tally.step_sums(self.trainer.world_size)
        room = self.trainer.steps.tokens_per_step
        factor = room / tokens.clamp(min=1)  # 1 exactly, where no label was masked
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scaled = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
        norm = norm * factor / (scaler._scale if scaled else 1)
        finite = self.tally.close_step(self.global_step + 1, nats, tokens, norm, scaler is not None)
        if scaled:  # the scaler skips a step whose gradients are not finite
            factor = torch.where(finite, factor, torch.nan)
        else:
            optimizer.skip = ~finite
        if gradient_clip_val:
            factor = factor * (gradient_clip_val / (norm + 1e-6)).clamp(max=1)
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))

    def logged_metrics(self) -> dict[str, float]:
        """What a log line says of the steps since the last one, which are then in `recent_steps`.

        Called on every rank; waits for the device.
        """
        loss, self.recent_steps = self.tally.read()
        norm = torch.nn.utils.get_total_norm([p.detach() for p in self.decoder.parameters()], foreach=True)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return {
            "train/loss": loss,
            "train/max_loss": max((s.loss for s in self.recent_steps if math.isfinite(s.loss)), default=math.nan),
            "train/perplexity": perplexity(loss),
            "optim/lr": self.learning_rate(self.global_step - 1),
            "optim/grad_norm": self.recent_steps[-1].grad_norm,
            "optim/param_norm": norm.item(),
        }

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of training on one token, forward and backward."""
        return flops_per_token(self.config, self.trainer.datamodule.seq_len)

    # ---- validating, testing, predicting ------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        self.trainer.repeatable = self.trainer.fitting

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if self._token_bytes is None:
            self._token_bytes = self.trainer.datamodule.token_bytes.to(self.device)
        self.validation.update(self.losses(batch).each, batch.labels, self._token_bytes)

    def on_validation_epoch_end(self) -> None:
        self.trainer.repeatable = False
        self._log_evaluation("val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, prefix: str) -> None:
        result = self.validation.compute()  # sums over ranks
        self.validation.reset()
        names = {"loss": "loss", "perplexity": "perplexity", "bits_per_byte": "bpb"}
        self.log_dict({f"{prefix}/{short}": result[name] for name, short in names.items()}, logger=False)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log-probability of every label of a batch given what is before it: (B, T) fp32, 0 where it is ignored."""
        return -self.losses(batch).each

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpointing.complete(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._resumed = checkpointing.restore(self, checkpoint)

    def on_train_start(self) -> None:
        """Put the sums on the device and this rank's generators where the checkpoint left them."""
        self.tally = Tally(self.device, self._resumed.get("tally"))
        if "rng" in self._resumed:
            checkpointing.restore_generators(self._resumed["rng"])
        elif self.global_rank:  # all ranks drew the same initial weights; from here on each drops out its own
            torch.manual_seed(torch.initial_seed() + self.global_rank)
        self._resumed = {}
        if self.cuda_graphs:
            self.micro_step = MicroStep(self.decoder.parameters(), self._forward_backward, self.device.type == "cuda")

    def on_train_end(self) -> None:
        self.micro_step = None

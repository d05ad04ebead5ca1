"""The spine: the LightningModule around the decoder. Read it first.

On the way of a batch this is the stop after `data/datamodule`: `training_step` hands the token ids to
`model/decoder`, sums the loss, and `optim` takes the step. It is also the one place that sees both the model and the
data, so what a checkpoint holds is put together here.
"""

import json
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lm.data.batch import Batch, Cursor
from lm.errors import RequestError
from lm.metrics import TokenLoss
from lm.model.accounting import flops_per_token
from lm.model.config import DecoderConfig
from lm.model.decoder import Decoder, document_ids_from
from lm.model.huggingface import config_json, from_huggingface, generation_config_json, to_huggingface
from lm.optim import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    index_state,
    name_state,
    parameter_groups,
    schedule,
)


class LanguageModule(LightningModule):
    """A decoder and how it is trained.

    Args:
        decoder: Shape of the decoder, in Hugging Face's names.
        optimizer: AdamW's settings.
        schedule: Learning-rate schedule over optimizer steps.
        document_mask: Keep attention inside a document and restart positions at its beginning.
    """

    def __init__(
        self,
        decoder: DecoderConfig,  # no default: an instance would fix what follows from the other fields
        optimizer: OptimizerConfig = OptimizerConfig(),
        schedule: ScheduleConfig = ScheduleConfig(),
        document_mask: bool = False,
    ) -> None:
        super().__init__()
        self.config = decoder
        self.optimizer_config = optimizer
        self.schedule_config = schedule
        self.document_mask = document_mask
        self.decoder: Decoder | None = None
        self.validation = TokenLoss()
        self.cursor: Cursor | None = None  # of the newest micro-batch that was trained on
        self.grad_norm: Tensor | None = None  # of the newest optimizer step, before clipping, on the device
        # Sums that stay on the device, so that nothing waits for it; plain attributes, because DDP would overwrite
        # buffers with those of rank zero.
        self._step_tokens = torch.zeros((), dtype=torch.int64)  # counted by the current optimizer step so far
        self._logged_nats = torch.zeros(())  # of all steps since they were last logged
        self._logged_tokens = torch.zeros((), dtype=torch.int64)
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
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard is not None:
            shard(self.decoder)

    def token_losses(self, batch: Batch) -> Tensor:
        """Loss of every token of a batch, in nats: (B, T) fp32, 0 where a label is ignored."""
        input_ids = batch.input_ids  # (B, T)
        documents = None
        if self.document_mask:
            documents = document_ids_from(input_ids, self.trainer.datamodule.tokenizer.eos_id)
        return self.decoder(input_ids, labels=batch.labels, document_ids=documents)

    # ---- training -----------------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one micro-batch.

        It is divided by the tokens a micro-batch has room for. Lightning then divides by the micro-batches of a step
        and DDP by the ranks, so the gradient is that of the mean over the whole global batch; where labels are
        masked, `configure_gradient_clipping` makes up the difference with the tokens that really counted.
        """
        losses = self.token_losses(batch)  # (B, T)
        nats = losses.sum()
        self._step_tokens.add_(batch.num_tokens)
        self._logged_nats.add_(nats.detach())
        self._logged_tokens.add_(batch.num_tokens)
        self.cursor = batch.cursor
        return nats / losses.numel()

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Forget the token count of a step once it is taken."""
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self._step_tokens.zero_()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; the learning rate is set before each step, so there is no scheduler to save."""
        return build_optimizer(self.decoder, self.optimizer_config)

    def learning_rate(self, step: int) -> float:
        """The learning rate of optimizer step `step` (0 is the first)."""
        return self.optimizer_config.lr * schedule(step, self.trainer.max_steps, self.schedule_config)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Set the learning rate of this step and take it."""
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate(self.global_step)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """One norm and one multiplication: per-token mean over the global batch, then clipping by the global norm.

        Nothing here waits for the device. A fused optimizer under a GradScaler unscales in its own step, so the
        gradients are still scaled here and the norm is taken back by that scale.
        """
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        tokens = self._step_tokens.clone()
        if self.trainer.world_size > 1:
            dist.all_reduce(tokens)
        room = self.trainer.steps.tokens_per_step
        factor = room / tokens.clamp(min=1)  # 1 exactly, where no label was masked
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scaled = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)
        self.grad_norm = norm * factor / (scaler._scale if scaled else 1)
        if gradient_clip_val:
            factor = factor * (gradient_clip_val / (self.grad_norm + 1e-6)).clamp(max=1)
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))

    def logged_metrics(self) -> dict[str, float]:
        """What a log line says of the steps since the last one. Called on every rank; waits for the device."""
        sums = torch.stack([self._logged_nats, self._logged_tokens.float()])
        if self.trainer.world_size > 1:
            dist.all_reduce(sums)
        self._logged_nats.zero_()
        self._logged_tokens.zero_()
        loss = sums[0] / sums[1]
        norm = torch.nn.utils.get_total_norm([p.detach() for p in self.decoder.parameters()], foreach=True)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return {
            "train/loss": loss.item(),
            "train/perplexity": loss.exp().item(),
            "optim/lr": self.learning_rate(self.global_step - 1),
            "optim/grad_norm": self.grad_norm.item(),
            "optim/param_norm": norm.item(),
        }

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of training on one token, forward and backward."""
        return flops_per_token(self.config, self.trainer.datamodule.seq_len)

    # ---- validating, testing, predicting ------------------------------------------------------------------------

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if self._token_bytes is None:
            self._token_bytes = self.trainer.datamodule.token_bytes.to(self.device)
        self.validation.update(self.token_losses(batch), batch.labels, self._token_bytes)

    def on_validation_epoch_end(self) -> None:
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
        return -self.token_losses(batch)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Make Lightning's checkpoint a Hugging Face model, named optimizer state, and the rest of an exact resume."""
        groups = parameter_groups(self.decoder.named_parameters(), 0.0)
        names = [name for group in groups for name in group["names"]]
        weights = {name.removeprefix("decoder."): value for name, value in checkpoint["state_dict"].items()}
        checkpoint["state_dict"] = to_huggingface(weights, self.config) if weights else {}
        states = checkpoint.pop("optimizer_states", [])
        checkpoint["optimizer"] = name_state(states[0], names) if states and states[0] else {}
        checkpoint["lr_schedulers"] = []
        checkpoint["cursor"] = {"consumed": self.cursor.end} if self.cursor else {"consumed": 0}
        checkpoint["ranks"] = _gather(
            {"rng": _rng_state(), "nats": self._logged_nats.item(), "tokens": self._logged_tokens.item()}
        )
        tokenizer = self.trainer.datamodule.tokenizer
        dtype = str(next(self.decoder.parameters()).dtype).removeprefix("torch.")
        documents = {
            "config.json": config_json(self.config, eos_id=tokenizer.eos_id, dtype=dtype),
            "generation_config.json": generation_config_json(eos_id=tokenizer.eos_id),
        }
        checkpoint["files"] = {
            **{name: json.dumps(document, indent=2) + "\n" for name, document in documents.items()},
            **tokenizer.files(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The inverse; the config decides every hyper-parameter, so a changed learning rate is the one that is used."""
        weights = checkpoint["state_dict"]
        self._refuse_other_shapes(weights)
        weights = from_huggingface(weights, self.config)
        checkpoint["state_dict"] = {f"decoder.{name}": value for name, value in weights.items()}
        if "optimizer" in checkpoint:
            groups = parameter_groups(self.decoder.named_parameters(), 0.0)
            state = build_optimizer(self.decoder, self.optimizer_config).state_dict()
            state["state"] = index_state(checkpoint.pop("optimizer"), groups)
            checkpoint["optimizer_states"] = [state]
        ranks, rank = checkpoint["ranks"], self.global_rank
        if len(ranks) != self.trainer.world_size:  # what other ranks had summed up and not logged yet is rank zero's
            sums = {name: sum(of_rank[name] for of_rank in ranks) for name in ("nats", "tokens")}
            ranks = [{**ranks[0], **sums}]
        self._resumed = ranks[rank] if rank < len(ranks) else {}
        self.trainer.recount(checkpoint)
        self.cursor = Cursor(start=0, end=checkpoint["cursor"]["consumed"], micro=0)
        self.trainer.datamodule.consumed = self.cursor.end

    def _refuse_other_shapes(self, weights: dict[str, Tensor]) -> None:
        with torch.device("meta"):
            expected = to_huggingface(Decoder(self.config).state_dict(), self.config)
        for name in sorted(expected.keys() | weights.keys()):
            have, want = (tuple(side[name].shape) if name in side else "absent" for side in (weights, expected))
            if have != want:
                raise RequestError(
                    f"this is a checkpoint of another architecture: its {name} is {have}, the config makes it {want}"
                )

    def on_train_start(self) -> None:
        """Put the sums on the device and this rank's generators where the checkpoint left them."""
        self._step_tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        self._logged_nats = torch.tensor(self._resumed.get("nats", 0.0), device=self.device)
        self._logged_tokens = torch.tensor(self._resumed.get("tokens", 0), dtype=torch.int64, device=self.device)
        if self._resumed:
            _restore_rng(self._resumed["rng"])
        elif self.global_rank:  # all ranks drew the same initial weights; from here on each drops out its own
            torch.manual_seed(torch.initial_seed() + self.global_rank)
        self._resumed = {}


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _gather(value: Any) -> list[Any]:
    """`value` of every rank, in the order of the ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

"""The LightningModule around the decoder: it gives batches of `data/datamodule` to `training/step`.

This is the one place that sees both the model and the data.
"""

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from lm.data.loader import Batch
from lm.errors import RequestError
from lm.evaluation.metrics import TokenLoss, loss_metrics
from lm.model.build import NOT_BUILT, BuildOptions, attach_config, build, config_of
from lm.model.config import DecoderConfig, matrix_rows
from lm.model.decoder import Decoder, Losses, document_ids_from
from lm.model.estimates import flops_per_token
from lm.model.huggingface import check_tied
from lm.system import process
from lm.system.dataclass_arguments import arguments_from
from lm.training.callback import call_hook, has_hook
from lm.training.config import ModelConfig
from lm.training.end_of_run import end_run
from lm.training.lightning_patches import attached_trainer, save_subclass_arguments
from lm.training.lightning_step import LightningStep, StepDropped
from lm.training.optim import build_optimizer
from lm.training.run_state import RunState
from lm.training.schedule import lr_fraction
from lm.training.step import total_norm
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)


class LanguageModule(LightningModule):
    """A decoder and how it is trained.

    Its arguments are the fields of `ModelConfig`, where each is explained. In a fit Lightning calls, in this order:

        configure_callbacks          the state of the run is known
        configure_model              the data is open, and so the vocabulary known: the decoder is built
        on_load_checkpoint           of a run that is resumed; Lightning then loads weights and optimizer
        configure_optimizers
        on_train_start
        on_before_batch_transfer     of every batch
        training_step                one optimizer step, once for each global batch
        validation_step              after every `trainer.val_interval` steps, once for each batch
        on_validation_epoch_end
        on_save_checkpoint           after every `trainer.checkpoint_interval` steps
        on_train_end

    An optimizer step is `training_step` -> `LightningStep` -> `training/step.optimizer_step`, which calls `losses` and
    runs a backward pass for each micro-batch. Under DDP Lightning wraps this module, and DDP averages the gradients.
    """

    @arguments_from(ModelConfig)
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        save_subclass_arguments(self, ModelConfig)  # sets `hparams`, from which a checkpoint's model is rebuilt
        self.options, self.config = config, config.decoder  # `vocab_size` is set once the data is open
        self.automatic_optimization = False  # `training_step` runs backward passes and optimizer itself
        self.run_state: RunState = RunState()
        self.lightning_step: Any = None  # a `LightningStep` during training
        self.decoder = cast(nn.Module, None)  # once it is built; compiled and sharded in place
        self.builtin, self.built = True, NOT_BUILT  # whether it is what its config says; kernels and attention
        self.validation = TokenLoss()  # sums of the validation that runs
        self.decoder_is_new = True  # whether the current fit or evaluation, not an earlier one, built the decoder
        self._vocabulary: Any = None  # of the tokenizer that the decoder was built for
        self._is_loadable = False  # whether a custom model was seen to load a checkpoint of this one
        self._token_bytes: Tensor | None = None  # (V,) bytes of text of each token, on the device

    def configure_callbacks(self) -> Sequence[Callback]:
        """Use the `RunState` of `lm.Trainer`; with a plain `lightning.Trainer`, add a `PlainRunState` as a callback."""
        if isinstance(self.trainer, Trainer):
            self.run_state = self.trainer.run_state
            return []
        from lm.training.plain_run_state import PlainRunState

        self.run_state = PlainRunState()
        return [self.run_state]

    # ---- the model ----------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the decoder, once, when the tokenizer and so the vocabulary is known."""
        if attached_trainer(self) is None:  # see `_build_for_checkpoint`
            return
        data, strategy = self.trainer.datamodule, self.trainer.strategy
        self.validation, self.decoder_is_new = TokenLoss(len(data.source_names) or None), self.decoder is None
        if self.decoder is not None:
            if self._vocabulary not in (None, data.tokenizer.vocabulary):
                raise RequestError(
                    "this LanguageModule was built for data of another tokenizer, so the same ids mean "
                    "other texts: make another one for this data"
                )
            return
        self._vocabulary = data.tokenizer.vocabulary
        self.config = replace(self.config, vocab_size=self.config.vocab_size or data.tokenizer.vocab_size)
        options = BuildOptions(**{option.name: getattr(self.options, option.name) for option in fields(BuildOptions)})
        # A custom model or a callback makes or sees the first weights, so they must be there when they are built.
        user_sees_weights = self.is_custom() or has_hook(self.trainer, "on_model_built")
        # Of the activations; in fp16 the choice is that of bf16.
        dtype = torch.float32 if self.trainer.precision == "32-true" else torch.bfloat16
        self.built = build(
            self.config,
            options,
            strategy.root_device,
            dtype,
            make=self.build_decoder if user_sees_weights else Decoder,
            builtin=None if self.is_custom() else True,
            on_made=self._take_decoder,
            shard=getattr(strategy, "shard", None),
        )
        log.info(self.built.description)

    @classmethod
    def is_custom(cls) -> bool:
        """Whether this class may build another model than the config describes."""
        return cls.build_decoder is not LanguageModule.build_decoder

    def build_decoder(self, config: DecoderConfig) -> nn.Module:
        """The model to train; a subclass may return its own, by the contract of `model/custom`.

        Loading a checkpoint calls this method again, on a module made with the same arguments, so it must not use the
        trainer or the data. `config` is `model.decoder` with its vocabulary size set.
        """
        return Decoder(config)

    def _take_decoder(self, decoder: nn.Module, builtin: bool) -> None:
        self.decoder, self.builtin, self.config = decoder, builtin, config_of(decoder)
        if not builtin:
            from lm.model.custom import check_causal

            with self.trainer.precision_plugin.forward_context():
                check_causal(decoder, self.trainer.datamodule.seq_len, self.config.vocab_size)
        call_hook(self.trainer, "on_model_built", self)

    def forward(self, input_ids: Tensor) -> Tensor:
        """The logits `(B, T, V)` of tokens `(B, T)`."""
        if self.decoder is None:
            raise RequestError(
                "the model is built once a Trainer has opened the data, and so its vocabulary is known; "
                "of a run, lm.load_model(run).decoder is the model"
            )
        return self.decoder(input_ids)

    def losses(self, batch: Batch) -> Losses:
        """Compute the losses of a batch, in nats: their sum, with gradient, and the loss of each token, detached.

        Masked tokens contribute to neither.
        """
        input_ids = batch.input_ids  # (B, T)
        documents = None
        if self.options.document_mask:
            documents = document_ids_from(input_ids, self.trainer.datamodule.tokenizer.eos_id)
        with self.trainer.precision_plugin.forward_context():  # `LightningStep` turned Lightning's own off
            if isinstance(self.decoder, Decoder):
                options = {"document_ids": documents, "max_documents": batch.max_documents}
                return self.decoder(input_ids, batch.labels, **options)
            from lm.model.custom import call_for_losses

            return call_for_losses(self.decoder, input_ids, batch.labels, documents)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Count documents while the batch is still on the host, so that nothing waits for the device."""
        if self.options.document_mask:
            batch.count_documents(self.trainer.datamodule.tokenizer.eos_id)
        return batch

    # ---- training -----------------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Run one optimizer step (see `training/step`) on this rank's rows `(B, T + 1)` of the global batch.

        Returns:
            The mean loss over the unmasked targets of all ranks, in nats: a scalar, for callbacks.
        """
        number = self.global_step  # counts calls of the optimizer, including skipped steps
        try:
            result = self.lightning_step(batch, number)
        except StepDropped:  # after a signal, which only our Trainer handles
            end_run(self.trainer, f"; the next one was not done within {self.trainer.options.stop_within / 2:g} s")
            raise
        self.run_state.stats.add(number + 1, batch, result)
        self.run_state.consumed = batch.consumed
        return result.loss

    def on_train_start(self) -> None:
        self.lightning_step = LightningStep(self)
        sources = len(self.trainer.datamodule.source_names)
        self.run_state.begin(self.device, sources=sources, scaled=self.lightning_step.scaled, rank=self.global_rank)

    def on_train_end(self) -> None:
        self.lightning_step = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build the optimizer, which skips non-finite steps; `training/step` sets its learning rates."""
        stacked = matrix_rows(self.config) if isinstance(self.decoder, Decoder) else {}  # several matrices in one
        return build_optimizer(self.decoder, self.options.optimizer, stacked)

    def logged_metrics(self) -> dict[str, float]:
        """Metrics of the steps since the last call, for `callbacks/logging`, on every rank; waits for the device."""
        data, state = self.trainer.datamodule, self.run_state
        metrics = state.stats.metrics(data.source_names)
        fraction = lr_fraction(self.global_step - 1, state.steps.max_steps, self.options.schedule)
        epochs = data.order().epochs(state.consumed).tolist() if data.source_names else []
        return metrics | {
            "optim/lr": self.options.optimizer.lr * fraction,
            "optim/param_norm": total_norm([p.detach() for p in self.decoder.parameters()]).item(),
            **{f"data/epochs/{name}": count for name, count in zip(data.source_names, epochs)},
        }

    def flops_per_token(self, full_attention: bool = False) -> float:
        """As `estimates.flops_per_token`; of a custom model by the weights that are there."""
        seq_len = self.trainer.datamodule.seq_len
        if self.builtin:
            return flops_per_token(self.config, seq_len, full_attention)
        from lm.model.custom import custom_flops_per_token

        return custom_flops_per_token(self.decoder, self.config, seq_len, full_attention)

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
        data = self.trainer.datamodule
        shares = None
        if data.source_names:
            shares = torch.from_numpy(data.shares(self.run_state.samples_of_run(self.trainer))).to(self.device)
        self.log_dict(loss_metrics(result, prefix, data.source_names, shares))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log-probability of every label of a batch given what is before it: (B, T) fp32, 0 where it is ignored."""
        return -self.losses(batch).per_token

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not (self.builtin or self._is_loadable):
            from lm.training.checkpoint_checks import check_loadable

            check_loadable(self)
            self._is_loadable = True
        self.run_state.save(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if attached_trainer(self) is None:
            self._build_for_checkpoint(DecoderConfig(**checkpoint["lm"]["decoder"]))
        else:
            self.run_state.restore(self, checkpoint)
        check_tied(self, checkpoint["state_dict"])

    def _build_for_checkpoint(self, config: DecoderConfig) -> None:
        """Build the decoder for the weights of a plain Trainer's checkpoint.

        `load_from_checkpoint` calls `configure_model` without a Trainer, and so without data and a vocabulary; the
        decoder has to wait for `on_load_checkpoint`, where the checkpoint's own config is known. Checkpoints of
        `lm.Trainer` are loaded by `lm.load_model`.
        """
        self.config = config
        self.decoder = attach_config(self.build_decoder(config), config)
        if self.is_custom():
            from lm.model.builtin import is_builtin

            self.builtin = is_builtin(self.decoder)


def training_class() -> type[LanguageModule]:
    """The class that the commands of this process train: `LanguageModule`, or what was given to `lm.run`."""
    return process.module_class or LanguageModule

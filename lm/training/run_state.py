"""`RunState`: the mutable state of a run, except for weights, optimizer and Lightning's step counter.

The Trainer makes one; callbacks and the module change it, but never each other. `save` writes it to a checkpoint, and
`restore` reads it back. `plain_run_state` replaces it where `LanguageModule` and `DataModule` are used with a plain
`lightning.Trainer`, and so in a custom `LightningCLI`.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from lm.errors import GuardStop
from lm.runs.checkpoint import Progress
from lm.runs.run import Run
from lm.training.checkpoint_content import from_content, to_content
from lm.training.pace import StepTimeEstimator
from lm.training.rng_state import restore_rng_state
from lm.training.schedule import Steps
from lm.training.step_stats import StepStats

if TYPE_CHECKING:
    from lm.training.module import LanguageModule
    from lm.training.trainer import Trainer


@dataclass(eq=False)
class RunState:
    """The state of a run, the same on every rank but where a field says otherwise."""

    # Set when a fit starts.
    clip: float | None = None  # largest norm of the gradient
    steps: Steps = cast(Steps, None)  # counts of the run
    start: Progress = Progress()  # where the training of this process began
    new_weights: bool = True  # training begins from new weights, not from a checkpoint
    run: Run = cast(Run, None)  # the run's folder, once it is claimed; None before
    other_model: bool = False  # load a checkpoint's weights into another model, as a branch does

    # The position in the run, which checkpoints save.
    consumed: int = 0  # samples trained on so far, over all ranks
    stats: StepStats = field(default_factory=StepStats)  # of the steps since the newest log line
    pending_validation: bool = False  # the run stopped before validating its newest step: do it first
    restored: dict[str, Any] = field(default_factory=dict)  # of the checkpoint, for `begin`; of each rank

    # What callbacks tell each other.
    stop: GuardStop | None = None  # why the run is to end after this optimizer step
    latest: dict[str, float] = field(default_factory=dict)  # the newest value of each metric; on rank zero
    validated: set[str] = field(default_factory=set)  # metrics that were passed to Lightning's `log` in validations
    pace: StepTimeEstimator = field(default_factory=StepTimeEstimator)  # of steps, validations and other pauses
    machine: dict[str, Any] = field(default_factory=dict)  # the newest reading of its load; on rank zero
    usd_per_hour: float | None = None  # price of the machine, if a budget knows it; on rank zero

    def samples_of_run(self, trainer: "Trainer") -> int:
        """About how many samples the config asks for, the same in a fit and in an evaluation."""
        data, tokens = trainer.datamodule, trainer.options.max_tokens
        if tokens is None:
            batch = data.global_batch_tokens or data.micro_batch_size * data.seq_len
            tokens = (trainer.options.max_steps or 1) * batch
        return max(1, tokens // data.seq_len)

    def begin(self, device: torch.device, sources: int, scaled: bool, rank: int) -> None:
        """Training begins: the sums and this rank's random generators are where the checkpoint left them."""
        restored, self.restored = self.restored, {}
        self.stats = StepStats(device, restored.get("step_stats"), sources, scaled)
        if "rng" in restored:
            restore_rng_state(restored["rng"])
        elif rank:  # all ranks drew the same initial weights; from here on each drops out its own
            torch.manual_seed(torch.initial_seed() + rank)

    def save(self, module: "LanguageModule", checkpoint: dict[str, Any]) -> None:
        """Turn Lightning's checkpoint, in place as it asks for, into the content of a folder; on every rank."""
        content = to_content(module, checkpoint)
        content["cursor"] = {"consumed": self.consumed}
        content["pending_validation"] = self.pending_validation
        content["step_stats"] = self.stats.state_dict()
        checkpoint.clear()
        checkpoint.update(content)

    def restore(self, module: "LanguageModule", checkpoint: dict[str, Any]) -> None:
        """Restore the run from the content of a folder, which becomes Lightning's checkpoint, in place as it asks for.

        Hyper-parameters come from the config, so a changed learning rate takes effect.
        """
        from lm.training.checkpoint_checks import check_same_model, check_same_tokenizer

        data, ranks, rank = module.trainer.datamodule, checkpoint["ranks"], module.global_rank
        check_same_tokenizer(checkpoint["files"], data)
        loadable = from_content(module, checkpoint)
        checkpoint.clear()
        checkpoint.update(loadable)
        if not self.other_model:
            check_same_model(checkpoint["files"], module)
        self.pending_validation = checkpoint.get("pending_validation", False) and data.has_validation
        self.consumed = checkpoint["cursor"]["consumed"]
        data.set_position(consumed=self.consumed)
        self.restored = {"step_stats": checkpoint["step_stats"], **(ranks[rank] if rank < len(ranks) else {})}

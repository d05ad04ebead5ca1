"""The newest complete checkpoint from before a finding of a guard: the return to it, or the words of a stop on it."""

from lm.runs.trainer_json import find_damage
from lm.training.checkpoint_loading import from_content
from lm.training.module import LanguageModule
from lm.training.trainer import Trainer


def return_to(trainer: Trainer, pl_module: LanguageModule, step: int) -> None:
    """Load the weights and the optimizer state of the checkpoint of a step; call it on every rank."""
    checkpoint = from_content(pl_module, trainer.strategy.load_checkpoint(trainer.run.path / f"step-{step:08d}"))
    trainer.strategy.load_model_state_dict(checkpoint)
    trainer.strategy.load_optimizer_state_dict(checkpoint)


def how_to_go_on(trainer: Trainer, began: int) -> str:
    """The words of a stop on the newest checkpoint from before a step, which is kept; call it on every rank."""
    step = newest_checkpoint(trainer, began - 1)
    if step is None:
        return (
            f"there is no checkpoint from before step {began}: start a new run with a change of its settings; a "
            "smaller trainer.checkpoint_interval or more trainer.keep_checkpoints leave one"
        )
    trainer.checkpoint_callback.keep_for_rollback(step)
    command = trainer.run.resume_command(f"step-{step:08d}")
    place = " before the #" if "  # " in command else ""
    return (
        f"`{command}` goes on from the newest checkpoint before step {began}; add what is to change{place}, since "
        "the samples are the same"
    )


def newest_checkpoint(trainer: Trainer, last: int) -> int | None:
    """The step of the newest complete checkpoint at or before a step; call it on every rank."""
    newest = None
    if trainer.is_global_zero:
        trainer.checkpoint_io.drain()
        stale = trainer.checkpoint_callback.stale  # the resume began before these
        folders = {step: path for step, path in trainer.run.steps().items() if step <= last and path.name not in stale}
        newest = next((step for step in reversed(folders) if find_damage(folders[step]) is None), None)
    return trainer.strategy.broadcast(newest)

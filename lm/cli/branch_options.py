"""The options of `lm branch`; nothing here imports PyTorch."""

from dataclasses import dataclass

from lm.errors import RequestError, require_at_least
from lm.runs.run import ROOT
from lm.system.units import Count


@dataclass
class BranchOptions:
    """Start a new run from a checkpoint of another: its weights, optimizer state, data position and random states.
    Options of a run, such as `--data.path data/other` or `--model.optimizer.lr 1e-3`, override the other run's.

    Args:
        run: Run to branch from: its name, under the root or in the registry, or its path.
        at: Checkpoint to branch from: a step, such as 200, `best` or `last`; the last if not given.
        name: Name of the new run; made of the other run's name, the step and the kind of change if not given.
        decay: Number of tokens to train on while the learning rate decays linearly to `final_fraction`.
        constant: Number of tokens to train on at the constant learning rate of that step.
        rewarm: Warm up again: tokens in which the rate first rises to its peak; part of `decay` or `constant`.
        final_fraction: Learning rate at the end of `decay`, as a fraction of the peak.
        make_only: Only create the run and print the command that trains it, for example on several machines.
        root: Folder of the runs.
    """

    run: str
    at: str | None = None
    name: str | None = None
    decay: Count | None = None
    constant: Count | None = None
    rewarm: Count | None = None
    final_fraction: float = 0.0
    make_only: bool = False
    root: str = str(ROOT)

    def __post_init__(self) -> None:
        require_at_least(1, "--", decay=self.decay, constant=self.constant, rewarm=self.rewarm)
        if self.decay and self.constant:
            raise RequestError("give --decay or --constant: with the first the rate falls, with the second it stays")
        if self.rewarm and not self.tokens:
            raise RequestError("--rewarm is a part of --decay or of --constant: give one of them too")
        if self.rewarm and self.rewarm >= self.tokens:
            raise RequestError(f"--rewarm {self.rewarm:,} is all of the {self.tokens:,} tokens: make it shorter")

    @property
    def tokens(self) -> int:
        """Tokens that the branch trains on; 0: as many as the other run has left."""
        return self.decay or self.constant or 0

"""The options of commands themselves, besides those of a run; their docstrings are the help."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lm.errors import RequestError
from lm.runs.run import ROOT
from lm.system.units import Count


@dataclass
class RunChoice:
    """Which run and which checkpoint are meant.

    Args:
        run: Name of the run. Default: for `fit`, that of the config; for others, the newest run. With a config, the
            newest of `mine`, `mine-2` and so on is resumed, validated or tested.
        ckpt_path: A checkpoint: `auto` (the newest intact one), `best`, `last`, a folder or a URL. Without any, `fit`
            starts from scratch. With --run and no --config, `fit` uses the run's config.
        force: Train even if `lm plan` finds an error, and resume even if the config or the data differs from the run's.
    """

    run: str | None = None
    ckpt_path: str | None = None
    force: bool = False


@dataclass
class FitOptions:
    """The options of `lm fit`, besides those of a run.

    Args:
        hours: Length of the run in hours, 0.05 for three minutes, including start and validations: `lm bench step`
            measures a step here, and trainer.max_steps follows. A resumed run keeps its length.
    """

    hours: float | None = None

    def __post_init__(self) -> None:
        if self.hours is not None and not self.hours > 0:
            raise RequestError(f"--hours {self.hours:g} must be above 0")


@dataclass(frozen=True)
class DeviceOptions:
    """The device that a run is planned for.

    Args:
        device: Device to plan for: h200, a100, 4090, ..., cpu, or auto.
        memory: Memory of the device, such as 16GiB; without --device, plan for an unlisted GPU, Ampere or later.
        peak_tflops: Peak throughput of the device in the configured precision: dense TFLOP/s with fp32 accumulation.
        mfu: Model FLOPs utilization (MFU) to assume, as a fraction of the peak; masked attention does not count.
        rate_usd_per_hr: Price of the machine in US dollars per hour, if guards.budget has none.
    """

    device: str = "auto"
    memory: str | None = None
    peak_tflops: float | None = None
    mfu: float | None = None
    rate_usd_per_hr: float | None = None

    def __post_init__(self) -> None:
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise RequestError(f"--mfu {self.mfu} must lie in (0, 1]")


@dataclass(frozen=True)
class PlanOptions(DeviceOptions):
    """The options of `lm plan`, besides those of a run.

    Args:
        strict: Check only the config and its arithmetic, without looking at data or device.
        bench: File from `lm bench step --output`; its measured speed is used instead of an assumed MFU.
        fit: Print only the largest micro-batch that fits; with --json, add it to the output as `fit`.
        json: Print one JSON object instead of a page.
    """

    strict: bool = False
    bench: Path | None = None
    fit: bool = False
    json: bool = False


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


@dataclass
class BenchOptions:
    """The options of `lm bench step`, besides those of a run.

    Args:
        steps: Number of optimizer steps to time, in rounds of trainer.log_interval steps.
        checkpoints: Number of checkpoints to time after the steps; 0 for none.
        hours: Print only the length of a run that takes this many hours, as an option of `lm fit`.
        json: Print one JSON object instead of lines.
        output: File to write the JSON object to.
    """

    steps: Count = Count(50)
    checkpoints: int = 3
    hours: float | None = None
    json: bool = False
    output: Path | None = None


@dataclass
class ProfileOptions:
    """The options of `lm profile`, besides those of a run.

    Args:
        steps: Number of optimizer steps to time, without checkpoints and validations.
        trace: Trace a few more steps to this file, such as trace.json or trace.json.gz, for https://ui.perfetto.dev or
            chrome://tracing, and list the most expensive operators.
        json: Print one JSON object instead of tables.
    """

    steps: Count = Count(30)
    trace: str | None = None
    json: bool = False


def take_fields(kind: type, values: Any) -> Any:
    """A dataclass of those attributes of an object that are its fields."""
    return kind(**{option.name: getattr(values, option.name) for option in fields(kind)})


COMMAND_OPTIONS = {"fit": FitOptions, "plan": PlanOptions, "bench step": BenchOptions, "profile": ProfileOptions}

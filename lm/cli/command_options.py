"""The options that commands with a training's config have of their own; nothing heavy is imported."""

from dataclasses import dataclass
from pathlib import Path

from lm.system.units import Count


@dataclass
class PlanOptions:
    """The options of `lm plan` beside those of a training.

    Args:
        strict: Check the schema and the algebra alone: no data, no device.
        device: What to plan for: h200, a100, 4090, ..., cpu, or auto.
        memory: The device's memory, such as 16GiB; without --device it is any other GPU, an Ampere or later.
        peak_tflops: The device's peak in this precision: dense TFLOP/s with fp32 accumulation.
        mfu: Share of the device's peak to reckon with, causal attention counted as attended.
        bench: A file of `lm bench step --output`, whose rate is taken in place of a share of the peak.
        rate_usd_per_hr: Price of the machine, where guards.budget has none; a cap_usd of the config is counted by it.
        fit: Print the largest micro-batch that fits, and nothing else; with --json as `fit` beside the rest.
        test_notify: Only send a test message to those under `notify`.
        rehearse: Play the guards through on invented log lines, without training: what they would log and do.
        json: Print one JSON object instead of a page.
    """

    strict: bool = False
    device: str = "auto"
    memory: str | None = None
    peak_tflops: float | None = None
    mfu: float | None = None
    bench: Path | None = None
    rate_usd_per_hr: float | None = None
    fit: bool = False
    test_notify: bool = False
    rehearse: bool = False
    json: bool = False


@dataclass
class BenchOptions:
    """The options of `lm bench step` beside those of a training.

    Args:
        steps: Optimizer steps that are timed, in stretches of trainer.log_interval steps.
        checkpoints: Checkpoints that are timed after them; 0 for none.
        json: Print one JSON object instead of lines.
        output: File to write the JSON object to.
    """

    steps: Count = Count(50)
    checkpoints: int = 3
    json: bool = False
    output: Path | None = None


@dataclass
class ProfileOptions:
    """The options of `lm profile` beside those of a training.

    Args:
        steps: Optimizer steps that are timed; checkpoints and validations are not among them.
        trace: Trace a few more steps to this file, such as trace.json or trace.json.gz, for https://ui.perfetto.dev or
            chrome://tracing, and list the most expensive operators.
        json: Print one JSON object instead of tables.
    """

    steps: Count = Count(30)
    trace: str | None = None
    json: bool = False


COMMAND_OPTIONS = {"plan": PlanOptions, "bench step": BenchOptions, "profile": ProfileOptions}

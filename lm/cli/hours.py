"""How many optimizer steps a run does in some hours: `lm bench step` measures them, in a process of its own."""

import argparse
import json
import logging
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm.cli.command_options import FitOptions
from lm.cli.plan_facts import data_facts
from lm.cli.request import Request, to_yaml
from lm.data.config import is_prepared
from lm.errors import RequestError, RunError
from lm.runs.resume import runs_of_name
from lm.system.process import arguments, command, seconds_since_process_start
from lm.training.pace import steps_within
from lm.training.world import devices_of_node, srun_world, torchrun_world

log = logging.getLogger(__name__)
FEW = 4  # optimizer steps that are timed first, for the pace of a run of some hours
PACE, MAX_SECONDS = 0.02, 20.0  # fraction of the run, and seconds at most, that steps are timed for then


def with_measured_length(request: Request[FitOptions]) -> tuple[Request[FitOptions], list[str]]:
    """A request for some hours with the steps that the time has here, measuring it included, and its command line.

    A run that is resumed keeps its own.
    """
    hours, run_choice, imported = request.command_options.hours, request.run_choice, seconds_since_process_start()
    assert hours is not None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--hours")
    other_options = parser.parse_known_args(arguments())[1]  # which starts the other processes of the run
    runs = []
    if run_choice.ckpt_path:
        runs = runs_of_name(request.trainer.default_root_dir, request.run_name, named=run_choice.run is not None)
    if runs:
        trainer, model = (runs[-1].settings()[section] for section in ("trainer", "model"))
        length = {f"trainer.{option}": trainer[option] for option in ("max_steps", "max_tokens")}
        length["model.schedule.warmup_steps"] = model["schedule"]["warmup_steps"]
        log.info("--hours %g: %s keeps its %s optimizer steps", hours, runs[-1].name, trainer["max_steps"])
    elif torchrun_world() or srun_world() or request.trainer.num_nodes > 1:
        raise RequestError(
            "--hours is for one machine whose processes `lm fit` starts: here start `lm bench step --hours H` as you "
            "start this, and give the option that it prints"
        )
    else:
        validated = validation_tokens(request)
        log.info("--hours %g: measuring a step", hours)
        devices = devices_of_node(request.trainer, request.trainer.devices)
        trainer = {**request.settings["trainer"], "max_steps": FEW, "max_tokens": None}  # any length will do
        times = measure_step({**request.settings, "trainer": trainer}, 3600 * hours, devices)
        # A process that measures imports what this one has imported already.
        steps = steps_of_hours(request, hours, times, validated, seconds_since_process_start() - imported)
        log.info("--hours %g: %d optimizer steps", hours, steps)
        length = {"trainer.max_tokens": None, **options_of_length(request, steps)}
    request = replace(request.with_values(length), command_options=FitOptions())
    new_options = [f"--{option}={'null' if value is None else value}" for option, value in length.items()]
    return request, other_options + new_options


def options_of_length(config: Request, steps: int) -> dict[str, int]:
    """The options of a run of `steps` optimizer steps, with a warm-up of at most a tenth of it, as in `lm scale`."""
    options = {"trainer.max_steps": steps}
    if config.model.schedule.warmup_steps > steps / 10:
        options["model.schedule.warmup_steps"] = steps // 10
        log.info("the warm-up takes %d of them in place of %d", steps // 10, config.model.schedule.warmup_steps)
    return options


def measure_step(settings: dict[str, Any], seconds: float, devices: int = 1, steps: int = FEW) -> dict[str, Any]:
    """What `lm bench step` finds for the settings of a run, in a process of its own for each device.

    First of a few steps, then of as many as take `PACE` of a run of so many seconds: other programs and clock speeds
    change from second to second.
    """
    python, *target = command()
    if devices > 1:  # after "--" torchrun takes no option for its own
        target = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={devices}", *target]
        target.insert(-1, "--")
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "config.yaml", Path(folder) / "step.json"
        file.write_text(to_yaml(settings), encoding="utf-8")
        options = ["--steps", str(steps), "--checkpoints", "1", "--output", output, "--config", file]
        done = subprocess.run([python, *target, "bench", "step", *options], capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"the time of a step could not be measured: {done.stderr.strip().splitlines()[-1]}")
        times = json.loads(output.read_text())
    more = int(1e3 * min(MAX_SECONDS, PACE * seconds) / times["ms_per_step"])
    return measure_step(settings, seconds, devices, more) if steps == FEW < more else times


def validation_tokens(config: Request) -> int:
    """Tokens of a validation; RequestError where the data is not there and cannot be made."""
    limit = config.data.val_tokens
    if not is_prepared(config.data):
        return limit or 0
    splits, _ = data_facts(config.data, None, False)
    present = splits["val"]["tokens"] if "val" in splits else limit or 0
    return min(present, limit or present)


def steps_of_hours(config: Request, hours: float, times: dict[str, Any], validated: int, spent: float = 0.0) -> int:
    """Optimizer steps of a run of so many hours, with its start, validations of `validated` tokens and checkpoints, by
    `describe_times`; `spent` are seconds that are over."""
    start, step = spent + times["first_step_s"], times["ms_per_step"] / 1e3
    validation = validated / times["tokens_per_second"] / 3  # forward alone
    pauses = [(config.trainer.val_interval, validation)]
    if times["checkpoint"]:
        pauses.append((config.trainer.checkpoint_interval, times["checkpoint"]["stall_ms"] / 1e3))
    steps = int(steps_within(hours * 3600 - start - validation, step, pauses))  # a validation follows the last step
    if steps < 1:
        raise RequestError(
            f"--hours {hours:g} are too few: the start takes {start:.1f} s, a validation {validation:.1f} s and a step "
            f"{step:.3g} s: give {1.2 * (start + validation + 10 * step) / 3600:.2g} or more"
        )
    return steps

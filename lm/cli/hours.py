"""How many optimizer steps a training does in some hours: `lm bench step` measures them, in a process of its own."""

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
PACE, MOST = 0.02, 20.0  # share of the run, and seconds at most, that steps are timed for then


def with_measured_length(request: Request[FitOptions]) -> tuple[Request[FitOptions], list[str]]:
    """A request for some hours with the steps that the time has here, measuring it included, and its command line.

    A run that is resumed keeps its own.
    """
    hours, choice = request.options.hours, request.choice
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--hours")
    rest = parser.parse_known_args(arguments())[1]  # which starts the other processes of the run
    length: dict[str, int | None] = {}
    if choice.ckpt_path and (runs := runs_of_name(
        request.trainer.default_root_dir, request.run_name, named=choice.run is not None
    )):  # fmt: skip
        kept = runs[-1].settings()
        length = {f"trainer.{option}": kept["trainer"][option] for option in ("max_steps", "max_tokens")}
        length["model.schedule.warmup_steps"] = kept["model"]["schedule"]["warmup_steps"]
        log.info("--hours %g: %s keeps its %s optimizer steps", hours, runs[-1].name, kept["trainer"]["max_steps"])
    elif torchrun_world() or srun_world() or request.trainer.num_nodes > 1:
        raise RequestError("--hours is for one machine whose processes `lm fit` starts: here start `lm bench step "
                           "--hours H` as you start this, and give the option that it prints")  # fmt: skip
    else:
        validated = validation_tokens(request)
        log.info("--hours %g: measuring a step", hours)
        devices = devices_of_node(request.trainer, request.trainer.devices)
        trainer = {**request.settings["trainer"], "max_steps": FEW, "max_tokens": None}  # any length will do
        found = measured(to_yaml({**request.settings, "trainer": trainer}), 3600 * hours, devices)
        steps = steps_of_hours(request, hours, found, validated, seconds_since_process_start())
        log.info("--hours %g: %d optimizer steps", hours, steps)
        length = {"trainer.max_tokens": None, **options_of_length(request, steps)}
    request = replace(request.with_values(length), options=FitOptions())
    return request, [*rest, *(f"--{option}={'null' if value is None else value}" for option, value in length.items())]


def options_of_length(config: Request, steps: int) -> dict[str, int]:
    """The options of a run of `steps` optimizer steps, with a warm-up of at most a tenth of it, as in `lm scale`."""
    options = {"trainer.max_steps": steps}
    if config.model.schedule.warmup_steps > steps / 10:
        options["model.schedule.warmup_steps"] = steps // 10
        log.info("the warm-up takes %d of them in place of %d", steps // 10, config.model.schedule.warmup_steps)
    return options


def measured(config: str, seconds: float, devices: int = 1, steps: int = FEW) -> dict[str, Any]:
    """What `lm bench step` finds for the content of a config, in a process of its own for each device.

    First of a few steps, then of as many as take `PACE` of a run of so many seconds: other programs and clock speeds
    change from second to second.
    """
    python, *target = command()
    if devices > 1:  # after "--" torchrun takes no option for its own
        target = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={devices}", *target]
        target.insert(-1, "--")
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "config.yaml", Path(folder) / "step.json"
        file.write_text(config, encoding="utf-8")
        own = ["bench", "step", "--steps", str(steps), "--checkpoints", "1"]
        done = subprocess.run(
            [python, *target, *own, "--output", output, "--config", file], capture_output=True, text=True
        )
        if done.returncode:
            raise RunError(f"the time of a step could not be measured: {done.stderr.strip().splitlines()[-1]}")
        found = json.loads(output.read_text())
    more = int(1e3 * min(MOST, PACE * seconds) / found["ms_per_step"])
    return measured(config, seconds, devices, more) if steps == FEW < more else found


def validation_tokens(config: Request) -> int:
    """Tokens of a validation; RequestError where the data is not there and cannot be made."""
    most = config.data.val_tokens
    if not is_prepared(config.data):
        return most or 0
    there = data_facts(config.data, None, False)[0].get("val", {}).get("tokens", most or 0)
    return min(there, most or there)


def steps_of_hours(
    config: Request, hours: float, found: dict[str, Any], validated: int, spent: float = 0.0
) -> int:  # fmt: skip
    """Optimizer steps of a run of so many hours, with its start, validations of `validated` tokens and checkpoints, by
    `describe_times`; `spent` are seconds that are over."""
    step = found["ms_per_step"] / 1e3
    validation = validated / found["tokens_per_second"] / 3  # forward alone
    pauses = [(config.trainer.val_interval, validation)]
    if found["checkpoint"]:
        pauses.append((config.trainer.checkpoint_interval, found["checkpoint"]["stall_ms"] / 1e3))
    left = hours * 3600 - spent - found["first_step_s"] - validation  # one follows the last step
    steps = int(steps_within(left, step, pauses))
    if steps < 1:
        raise RequestError(f"--hours {hours:g} are too few: the start takes {spent + found['first_step_s']:.1f} s, a "
                           f"validation {validation:.1f} s and a step {step:.3g} s: give more")  # fmt: skip
    return steps

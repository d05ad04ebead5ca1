"""`lm ladder`: train models of several sizes with several seeds, and predict the loss of larger ones from theirs.

The configs are those of `lm scale`, and every training is an ordinary run in the ladder's folder, so the same command
resumes it. `cli/ladder_report` computes and prints the results and predictions.
"""

import ctypes
import json
import logging
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from lm.cli import scale
from lm.cli.charts import plain_table
from lm.cli.classes_by_path import with_classes
from lm.cli.fit import quiet_lightning
from lm.cli.ladder_options import LadderOptions, Overrides, recipes
from lm.cli.ladder_report import AGAINST, ModelSize, Training, page, print_report, report
from lm.cli.plan_facts import examine
from lm.cli.request import override
from lm.errors import Interrupted, RequestError, RunError
from lm.runs.config_diff import differences, not_allowed
from lm.runs.run import Run
from lm.system import process
from lm.system.files import write_atomically
from lm.system.parsing import to_json
from lm.system.stop_signals import STOP
from lm.system.units import (
    format_bytes,
    format_count,
    format_duration,
    format_figure,
    format_time_and_cost,
    plural,
)
from lm.training.trainer import device_count

log = logging.getLogger(__name__)

VALIDATED = 2**20  # tokens of a validation, the same for all sizes
# Settings that determine the validation text.
VALIDATION = (
    "data.path", "data.sources", "data.tokenizer", "data.prepare", "data.column", "data.pad_id", "data.val_tokens",
)  # fmt: skip
POLL = 0.2  # seconds between looks at the trainings
PATIENCE = 60.0  # seconds that a training of a killed ladder has to save its last checkpoint


# Settings that follow from the size and length of a training -> the option of `lm ladder` that changes them.
FOLLOWS = {
    "trainer.default_root_dir": "--root",
    "trainer.max_steps": "--max_steps",
    "trainer.max_tokens": "--ratio", "data.seq_len": "--seq_len", "model.decoder.num_hidden_layers": "--depths",
    "model.decoder.hidden_size": "--aspect_ratio", "model.decoder.intermediate_size": "--aspect_ratio",
    "model.decoder.num_attention_heads": "--head_dim", "model.decoder.max_position_embeddings": "--seq_len",
    "model.decoder.vocab_size": "--vocab_size", "data.global_batch_tokens": "--batch_tokens",
}  # fmt: skip


def ladder(options: LadderOptions, overrides: Overrides) -> None:
    """Plan all trainings, train those that are not finished, and write the report."""
    quiet_lightning()
    if process.under_torchrun() or process.under_srun():
        raise RequestError("`lm ladder` starts the trainings itself, one on each device: start it once, without "
                           "torchrun or srun")  # fmt: skip
    trainings: list[Training] = []
    for recipe, its_options, its_overrides in recipes(options, overrides):
        made = make_trainings(its_options, its_overrides, recipe)
        trainings += [one for one in made if not recipe or one.size.depth in options.sizes]
    trainings.sort(key=lambda one: (one.seed, one.size.depth))  # recipes alternate, so that other load slows all alike
    check_same_validation(trainings)
    wanted = [one for one in trainings if one.size.depth in options.sizes]
    check_same_settings(trainings)
    console = Console(highlight=False, stderr=options.json)
    console.width = max(console.width, 110)  # a narrower terminal wraps lines, and no number is cut off
    print_plan(console, options, trainings, wanted)
    if options.plan_only:
        if options.json:
            print(to_json({"sizes": planned_sizes(options, trainings)}))
        return
    from filelock import FileLock, Timeout  # takes a while to import

    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(options.folder / "ladder.lock", timeout=0):
            failed = train(options, wanted, trainings)
            found = save_report(options, trainings)
            to_train = write_predicted(options, trainings)
    except Timeout:
        raise RequestError(f"another process trains the ladder {options.folder}: wait for its end, or give another "
                           "--name") from None  # fmt: skip
    if options.json:
        print(to_json(found))
    else:
        print_report(console, found)
        for one in to_train:
            command = f"{process.program()} fit --config {shlex.quote(str(one.file))}"
            console.print(f"to compare the prediction: {command}; then the same ladder again", soft_wrap=True)
        console.print(f"\n{options.folder / 'ladder.html'}", soft_wrap=True)
    if failed:
        names = ", ".join(f"{one.run.name} ({one.log})" for one in failed)
        raise RunError(f"{plural(len(failed), 'training')} failed, and the report is without them: {names}")


# ---- the trainings ---------------------------------------------------------------------------------------------------


def make_trainings(options: LadderOptions, overrides: Overrides, recipe: str = "") -> list[Training]:
    """Make and plan all trainings of a recipe; `recipe` is as in `Training`."""
    for key, _ in overrides:
        if key in FOLLOWS:
            raise RequestError(f"{key} follows from the depth and the length of each run: give {FOLLOWS[key]}")
    made = []
    for depth in sorted({*options.sizes, *options.held_out}):
        try:
            scaled = scale.ScaleRequest(**options.scaled, depth=depth, **options.horizon)
            settings = yaml.safe_load(scale.scaled_config(scaled)[1])
        except RequestError as error:
            raise RequestError(f"depth {depth}: {error}") from error
        settings["trainer"] |= {"devices": 1, "default_root_dir": str(options.folder), "keep_checkpoints": 1}
        settings["data"]["val_tokens"] = VALIDATED
        request = override(settings, overrides)
        settings = request.settings
        facts, noted = examine(with_classes(request), options.planned)
        errors = [finding for finding in noted if finding.level == "error"]
        if errors and (depth in options.sizes or "time" not in facts):  # a size that is not trained may not fit
            raise RequestError(f"depth {depth}: {errors[0]}")
        model, tokens = facts["model"], facts["steps"]["tokens"]
        outside = model["parameters"]["total"] - model["parameters"]["embedding"]
        flops = tokens * model["flops_per_token"]
        size = ModelSize(depth, outside, tokens, flops, depth in options.held_out)
        prefix = options.name + f"-{AGAINST}" * (recipe == AGAINST)
        for seed in range(1, options.seeds + 1):
            name = f"{prefix}-d{depth}-{options.length}-s{seed}"
            text = yaml.safe_dump({"run": name, **settings, "seed_everything": seed}, sort_keys=False)
            made.append(Training(size, seed, Run(options.folder / name), text, facts, recipe))
    return made


def check_same_settings(trainings: list[Training]) -> None:
    """Raise RequestError if an existing run of this ladder was trained with other settings."""
    for one in trainings:
        if not (one.run.path / "run.json").exists():
            continue
        differing = differences([one.run.settings(), yaml.safe_load(one.config)])
        for key, (before, now) in not_allowed("ladder", differing).items():
            raise RequestError(f"run {one.run.path} has {key} {before}, and this ladder {now}: give the options "
                               "that it was made with, or another --name")  # fmt: skip


def check_same_validation(trainings: list[Training]) -> None:
    """Raise RequestError if the recipes are validated on different texts."""
    configs = {one.recipe: yaml.safe_load(one.config) for one in trainings}
    for key, values in differences([configs[""], configs.get(AGAINST, configs[""])]).items():
        if key.startswith(VALIDATION) and not (key == "data.path" and same_texts(*values)):
            raise RequestError(f"--against changes {key}, and losses on other texts do not compare: give the same to "
                               "both")  # fmt: skip


def same_texts(*folders: str) -> bool:
    """Whether the folders have the same validation text (tokenizers may differ), and a validation reads all of it."""
    found = [json.loads((Path(folder) / "manifest.json").read_text())["splits"]["val"]
             for folder in folders if (Path(folder) / "manifest.json").exists()]  # fmt: skip
    equal = len({(split["documents"], split["bytes"]) for split in found}) == 1
    return len(found) == len(folders) and equal and all(split["tokens"] <= VALIDATED for split in found)


def planned_sizes(options: LadderOptions, trainings: list[Training]) -> list[dict[str, Any]]:
    """The planned cost of one training of each size and recipe; `runs` is 0 for sizes that are only predicted."""
    by_size = {(one.recipe, one.size.depth): one for one in trainings}
    return [
        {
            "depth": one.size.depth, "recipe": one.recipe, "parameters": one.plan["model"]["parameters"]["total"],
            "steps": one.plan["steps"]["max_steps"],
            "tokens": float(one.size.tokens), "epochs": one.plan["steps"].get("epochs"), "flops": one.size.flops,
            "memory": one.plan["memory"]["total"], "seconds": one.plan["time"]["seconds"],
            "usd": one.plan["time"].get("usd"),
            "runs": options.seeds * (one.size.depth in options.sizes),
        }
        for one in by_size.values()
    ]  # fmt: skip


def print_plan(console: Console, options: LadderOptions, trainings: list[Training], wanted: list[Training]) -> None:
    sizes = planned_sizes(options, trainings)
    priced = any(size["usd"] is not None for size in sizes)
    heads = ["depth", "parameters", "steps", "tokens", "epochs", "operations", "memory", "time", "runs"]
    rows, seconds, usd = [], 0.0, 0.0
    for size in sizes:
        runs, each, price = size["runs"], size["seconds"], size["usd"]
        seconds += runs * each if each is not None else math.nan * bool(runs)
        usd += runs * (price or 0.0)
        rows.append([
            f"{size['depth']} {size['recipe']}".strip(), format_count(size["parameters"]), f"{size['steps']:,}",
            format_count(size["tokens"]), "" if size["epochs"] is None else f"{size['epochs']:.2f}",
            f"{size['flops']:.2e}", format_bytes(size["memory"]),
            "" if each is None else format_duration(each), str(runs) if runs else "predicted",
            *["" if price is None else format_figure(runs * price)] * priced,
        ])  # fmt: skip
    console.print(plain_table(heads + ["USD"] * priced, "n" * (len(heads) + priced), rows))
    finished = sum(one.finished for one in wanted)
    total = "" if finished else ": how long they take is known when the first one has ended"
    if not math.isnan(seconds):
        basis = trainings[0].plan["time"]["basis"]
        total = f"; all take {format_time_and_cost(seconds, usd if priced else None)} on one device ({basis})"
    console.print(f"{plural(len(wanted), 'training')}, {finished} of them finished{total}", soft_wrap=True)


# ---- training --------------------------------------------------------------------------------------------------------


def train(options: LadderOptions, wanted: list[Training], trainings: list[Training]) -> list[Training]:
    """Run the unfinished trainings, one process at a time on each device, and write the report after each.

    Returns the trainings that failed.
    """
    waiting = [one for one in wanted if not one.finished]
    places, failed = free_devices(waiting), []
    running: dict[subprocess.Popen, tuple[Training, str | None, float]] = {}
    done: list[tuple[float, float]] = []  # operations and seconds of each finished training
    if waiting:
        log.info("watch them: %s", f"{process.program()} monitor --root {shlex.quote(str(options.folder))}")
    STOP.arm()
    while (waiting or running) and not STOP.received:
        while waiting and places:
            one, place = waiting.pop(0), places.pop(0)
            running[start(one, place)] = one, place, time.monotonic()
        time.sleep(POLL)
        for child in [child for child in running if child.poll() is not None]:
            one, place, began = running.pop(child)
            places.append(place)
            if child.returncode == Interrupted.exit_code:
                stop(running)
                raise Interrupted(f"{one.run.name} was interrupted; the same command resumes the ladder")
            if not one.finished:
                failed.append(one)
                log.error("%s: %s", one.run.name, last_line(one.log))
                continue
            done.append((one.size.flops, time.monotonic() - began))
            left = [*waiting, *(each[0] for each in running.values())]
            a_flop = sum(seconds for _, seconds in done) / sum(flops for flops, _ in done)
            eta = sum(a_flop * other.size.flops for other in left) / (len(places) + len(running))
            found = save_report(options, trainings)
            rate = options.rate_usd_per_hr
            usd = eta / 3600 * rate if rate else None
            about = f"; {plural(len(left), 'training')} left, about {format_time_and_cost(eta, usd)}" if left else ""
            loss = next(each["loss"] for each in found["runs"] if each["run"] == one.run.name)
            if loss is None:
                failed.append(one)
                log.error("%s ended without a finite loss%s", one.run.name, about)
            else:
                log.info("%s: %.4f %s%s", one.run.name, loss, found["unit"], about)
    if STOP.received:
        stop(running)
        raise Interrupted(f"{STOP.received.name}: {sum(one.finished for one in wanted)} of {len(wanted)} trainings are "
                          "finished; the same command resumes the ladder")  # fmt: skip
    return failed


def free_devices(trainings: Iterable[Training]) -> list[str | None]:
    """Values of `CUDA_VISIBLE_DEVICES` for trainings that run at the same time; `[None]` without GPUs."""
    config = next((yaml.safe_load(one.config)["trainer"] for one in trainings), {})
    count = torch.cuda.device_count() if config.get("accelerator") in ("auto", "gpu", "cuda") else 0
    if not count:
        return [None]
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name][:count]
    named = named or list(map(str, range(count)))
    each = device_count(config["devices"]) or count
    return [",".join(named[begin : begin + each]) for begin in range(0, max(1, count - each + 1), each)]


def start(one: Training, place: str | None) -> subprocess.Popen:
    """Start a training, once no process left by a killed ladder runs it; the new process ends with this one."""
    began = time.monotonic()
    while one.run.is_locked() and time.monotonic() < began + PATIENCE and not STOP.received:
        time.sleep(POLL)
    write_atomically(one.file, one.config)
    command = [*process.command(), "fit", "--config", str(one.file), "--run", one.run.name, "--ckpt_path", "auto"]
    environment = os.environ | ({} if place is None else {"CUDA_VISIBLE_DEVICES": place})
    log.info("%s begins%s", one.run.name, f" on GPU {place}" if place else "")
    with open(one.log, "ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,  # Ctrl-C reaches only this process, which forwards it
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )  # fmt: skip


def end_with_parent() -> None:
    """Ask the system for a SIGTERM when the parent process dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG


def stop(running: dict[subprocess.Popen, Any]) -> None:
    """Send trainings SIGTERM, so that they save a checkpoint and end, and wait for them."""
    for child in running:
        child.terminate()
    for child in running:
        child.wait()


def last_line(file: Path) -> str:
    lines = [line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it printed nothing")


def write_predicted(options: LadderOptions, trainings: list[Training]) -> list[Training]:
    """Write the configs of sizes that are predicted but not trained yet, and return these trainings."""
    left = [one for one in trainings if one.size.depth not in options.sizes and one.seed == 1 and not one.finished]
    for one in left:
        settings = yaml.safe_load(one.config)
        settings["trainer"]["devices"] = "auto"
        write_atomically(one.file, yaml.safe_dump(settings, sort_keys=False))
    return left


def save_report(options: LadderOptions, trainings: Sequence[Training]) -> dict[str, Any]:
    """Write the results so far to `ladder.json` and `ladder.html` in the ladder's folder, and return them."""
    found = report(options.name, f"{process.program()} {shlex.join(sys.argv[1:])}", trainings, options.against)
    write_atomically(options.folder / "ladder.json", to_json(found) + "\n", durable=False)
    write_atomically(options.folder / "ladder.html", page(found), durable=False)
    return found

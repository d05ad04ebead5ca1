"""`lm ladder`: train models of several sizes with several seeds, and predict the loss of larger ones from theirs.

The configs are those of `lm scale`, and each is trained by an ordinary run in the ladder's folder, so the same command
resumes it. `cli/ladder_report` computes and prints the results and predictions.
"""

import ctypes
import logging
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
from lm.cli.command_options import DeviceOptions, PlanOptions, take_fields
from lm.cli.fit import quiet_lightning
from lm.cli.ladder_options import LadderOptions, Overrides, recipes
from lm.cli.ladder_report import AGAINST, LadderRun, ModelSize, page, print_report, report
from lm.cli.plan_checks import MANY_EPOCHS
from lm.cli.plan_facts import examine
from lm.cli.request import override, to_yaml
from lm.errors import Interrupted, RequestError, RunError
from lm.runs.config_diff import differences, not_allowed
from lm.runs.run import Run
from lm.system import process
from lm.system.files import write_atomically
from lm.system.parsing import to_json
from lm.system.stop_signals import STOP
from lm.system.units import format_bytes, format_count, format_duration, format_figure, format_time_and_cost, plural
from lm.training.world import device_count

log = logging.getLogger(__name__)

VALIDATED = 2**20  # tokens of a validation, the same for all sizes
# Settings that determine the validation text.
VALIDATION = tuple(f"data.{name}" for name in "path sources tokenizer prepare column pad_id val_tokens".split())
POLL = 0.2  # seconds between looks at the runs
PATIENCE = 60.0  # seconds that a run of a killed ladder has to save its last checkpoint
# Settings that follow from the size and length of a run -> the option of `lm ladder` that changes them.
FOLLOWS = {
    "trainer.default_root_dir": "--root",
    "trainer.max_steps": "--max_steps",
    "trainer.max_tokens": "--ratio",
    "data.seq_len": "--seq_len",
    "data.global_batch_tokens": "--batch_tokens",
    "model.decoder.num_hidden_layers": "--depths",
    "model.decoder.hidden_size": "--aspect_ratio",
    "model.decoder.intermediate_size": "--aspect_ratio",
    "model.decoder.num_attention_heads": "--head_dim",
    "model.decoder.max_position_embeddings": "--seq_len",
    "model.decoder.vocab_size": "--vocab_size",
}


def ladder(options: LadderOptions, overrides: Overrides) -> None:
    """Plan all runs, train those that are not finished, and write the report."""
    quiet_lightning()
    if process.under_torchrun() or process.under_srun():
        raise RequestError("start `lm ladder` once, without torchrun or srun: it starts a run on each device itself")
    ladder_runs: list[LadderRun] = []
    for recipe, its_options, its_overrides in recipes(options, overrides):
        of_recipe = make_runs(its_options, its_overrides, recipe)
        ladder_runs += [one for one in of_recipe if not recipe or one.size.depth in options.sizes]
    # Recipes alternate, so that other load slows all alike.
    ladder_runs.sort(key=lambda one: (one.seed, one.size.depth))
    check_same_validation(ladder_runs)
    to_train = [one for one in ladder_runs if one.size.depth in options.sizes]
    check_same_settings(ladder_runs)
    console = Console(highlight=False, stderr=options.json)
    console.width = max(console.width, 110)  # a narrower terminal wraps lines, and no number is cut off
    print_plan(console, options, ladder_runs, to_train)
    if options.plan_only:
        if options.json:
            print(to_json({"sizes": planned_sizes(options, ladder_runs)}))
        return
    from filelock import FileLock, Timeout  # takes a while to import

    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(options.folder / "ladder.lock", timeout=0):
            failed = train(options, to_train, ladder_runs)
            results = save_report(options, ladder_runs)
            predicted = write_predicted(options, ladder_runs)
    except Timeout:
        raise RequestError(f"{options.folder} is being trained: wait for its end, or give another --name") from None
    if options.json:
        print(to_json(results))
    else:
        print_report(console, results)
        for one in predicted:
            command = f"{process.program()} fit --config {shlex.quote(str(one.file))}"
            console.print(f"to compare the prediction: {command}; then the same ladder again", soft_wrap=True)
        console.print(f"\n{options.folder / 'ladder.html'}", soft_wrap=True)
    if failed:
        names = ", ".join(f"{one.run.name} ({one.log})" for one in failed)
        raise RunError(f"{plural(len(failed), 'run')} failed, and the report is without them: {names}")


# ---- the runs --------------------------------------------------------------------------------------------------------


def make_runs(options: LadderOptions, overrides: Overrides, recipe: str = "") -> list[LadderRun]:
    """Make and plan all runs of a recipe; `recipe` is as in `LadderRun`."""
    for key, _ in overrides:
        if key in FOLLOWS:
            raise RequestError(f"{key} follows from the depth and the length of each run: give {FOLLOWS[key]}")
    scale_options = vars(take_fields(scale.ScaleOptions, options)) | options.horizon
    plan_options = PlanOptions(**vars(take_fields(DeviceOptions, options)))
    ladder_runs = []
    for depth in sorted({*options.sizes, *options.held_out}):
        try:
            scaled = scale.ScaleRequest(**scale_options, depth=depth)
            settings = yaml.safe_load(scale.scaled_config(scaled)[1])
        except RequestError as error:
            raise RequestError(f"depth {depth}: {error}") from error
        del settings["samples"]  # which take time and teach nothing
        settings["trainer"].pop("bigram_init", None)  # only short runs have it: all sizes begin alike
        settings["trainer"] |= {"devices": 1, "default_root_dir": str(options.folder), "keep_checkpoints": 1}
        settings["data"]["val_tokens"] = VALIDATED
        request = override(settings, overrides)
        facts, findings = examine(with_classes(request), plan_options)
        errors = [finding for finding in findings if finding.level == "error"]
        if errors and (depth in options.sizes or "time" not in facts):  # a size that is not trained may not fit
            raise RequestError(f"depth {depth}: {errors[0]}")
        model, tokens = facts["model"], facts["steps"]["tokens"]
        parameters = model["parameters"]["total"] - model["parameters"]["embedding"]
        flops = tokens * model["flops_per_token"]
        size = ModelSize(depth, parameters, tokens, flops, depth in options.held_out)
        prefix = f"{options.name}-{AGAINST}" if recipe == AGAINST else options.name
        for seed in range(1, options.seeds + 1):
            name = f"{prefix}-d{depth}-{options.length}-s{seed}"
            settings = {"run": name, **request.settings, "seed_everything": seed}
            ladder_runs.append(LadderRun(size, seed, Run(options.folder / name), settings, facts, recipe))
    return ladder_runs


def check_same_settings(ladder_runs: list[LadderRun]) -> None:
    """Raise RequestError if an existing run of this ladder was trained with other settings."""
    for one in ladder_runs:
        if not (one.run.path / "run.json").exists():
            continue
        differing = differences([one.run.settings(), one.settings])
        for key, (before, now) in not_allowed("ladder", differing).items():
            what = f"run {one.run.path} has {key} {before}, and this ladder {now}"
            raise RequestError(f"{what}: give the options that it was made with, or another --name")


def check_same_validation(ladder_runs: list[LadderRun]) -> None:
    """Raise RequestError if the recipes are validated on different texts."""
    configs = {one.recipe: one.settings for one in ladder_runs}
    for key, values in differences([configs[""], configs.get(AGAINST, configs[""])]).items():
        if key.startswith(VALIDATION) and not (key == "data.path" and same_texts(*values)):
            raise RequestError(f"--against changes {key}, and losses on other texts do not compare: give it to both")


def same_texts(*folders: str) -> bool:
    """Whether the folders have the same validation text (tokenizers may differ), and a validation reads all of it."""
    splits = [scale.manifest(folder).get("splits", {}).get("val") for folder in folders]
    if not all(splits):
        return False
    equal = len({(split["documents"], split["bytes"]) for split in splits}) == 1
    return equal and all(split["tokens"] <= VALIDATED for split in splits)


def planned_sizes(options: LadderOptions, ladder_runs: list[LadderRun]) -> list[dict[str, Any]]:
    """The planned cost of one run of each size and recipe; `runs` is 0 for sizes that are only predicted."""
    sizes = []
    for one in {(one.recipe, one.size.depth): one for one in ladder_runs}.values():
        model, steps, time = (one.plan[name] for name in ("model", "steps", "time"))
        size = {"depth": one.size.depth, "recipe": one.recipe, "parameters": model["parameters"]["total"]}
        size |= {"steps": steps["max_steps"], "tokens": float(one.size.tokens), "epochs": steps.get("epochs")}
        size |= {"flops": one.size.flops, "memory": one.plan["memory"]["total"]}
        size |= {"seconds": time["seconds"], "usd": time.get("usd")}
        sizes.append(size | {"runs": options.seeds if one.size.depth in options.sizes else 0})
    return sizes


def print_plan(
    console: Console, options: LadderOptions, ladder_runs: list[LadderRun], to_train: list[LadderRun]
) -> None:
    sizes = planned_sizes(options, ladder_runs)
    heads = ["depth", "parameters", "steps", "tokens", "epochs", "FLOPs", "memory", "time", "runs"]
    rows = []
    for size in sizes:
        depth, epochs = f"{size['depth']} {size['recipe']}".strip(), size["epochs"]
        parameters, tokens, memory = format_count(size["parameters"]), format_count(size["tokens"]), size["memory"]
        counts = [depth, parameters, f"{size['steps']:,}", tokens, "" if epochs is None else f"{epochs:.2f}"]
        time = "" if size["seconds"] is None else format_duration(size["seconds"])
        rows.append([*counts, f"{size['flops']:.2e}", format_bytes(memory), time, str(size["runs"] or "predicted")])
    usd_is_known = any(size["usd"] is not None for size in sizes)
    if usd_is_known:
        heads.append("USD")
        for row, size in zip(rows, sizes, strict=True):
            row.append("" if size["usd"] is None else format_figure(size["runs"] * size["usd"]))
    console.print(plain_table(heads, "n" * len(heads), rows))
    if (most := max(size["epochs"] or 0 for size in sizes)) > MANY_EPOCHS:
        console.print(f"{most:,.0f} epochs of the text teach nothing new: give more --data, or a smaller --ratio")
    finished, planned = sum(one.finished for one in to_train), [size for size in sizes if size["runs"]]
    total = "" if finished else ": how long they take is known when the first one has ended"
    if all(size["seconds"] is not None for size in planned):
        seconds = sum(size["runs"] * size["seconds"] for size in planned)
        usd = sum(size["runs"] * (size["usd"] or 0.0) for size in planned) if usd_is_known else None
        basis = ladder_runs[0].plan["time"]["basis"]
        total = f"; all take {format_time_and_cost(seconds, usd)} on one device ({basis})"
    console.print(f"{plural(len(to_train), 'run')}, {finished} of them finished{total}", soft_wrap=True)


# ---- training --------------------------------------------------------------------------------------------------------


def train(options: LadderOptions, to_train: list[LadderRun], ladder_runs: list[LadderRun]) -> list[LadderRun]:
    """Train the unfinished runs, one at a time on each device, with a report after each; returns those that failed."""
    waiting = [one for one in to_train if not one.finished]
    places, failed = free_devices(waiting), []
    running: dict[subprocess.Popen, tuple[LadderRun, str | None, float]] = {}
    done: list[tuple[float, float]] = []  # FLOPs and seconds of each finished run
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
            unfinished = [*waiting, *(training for training, _, _ in running.values())]
            remaining = describe_remaining(options, unfinished, done, devices=len(places) + len(running))
            results = save_report(options, ladder_runs)
            loss = next(run["loss"] for run in results["runs"] if run["run"] == one.run.name)
            if loss is None:
                failed.append(one)
                log.error("%s ended without a finite loss%s", one.run.name, remaining)
            else:
                log.info("%s: %.4f %s%s", one.run.name, loss, results["unit"], remaining)
    if STOP.received:
        stop(running)
        finished = f"{sum(one.finished for one in to_train)} of {len(to_train)} runs are finished"
        raise Interrupted(f"{STOP.received.name}: {finished}; the same command resumes the ladder")
    return failed


def describe_remaining(
    options: LadderOptions, unfinished: list[LadderRun], done: list[tuple[float, float]], devices: int
) -> str:
    """How long the unfinished runs take, and what they cost, by the FLOPs and seconds of those that are done."""
    if not unfinished:
        return ""
    flops_per_second = sum(flops for flops, _ in done) / sum(seconds for _, seconds in done)
    seconds = sum(one.size.flops for one in unfinished) / flops_per_second / devices
    usd = seconds / 3600 * options.rate_usd_per_hr if options.rate_usd_per_hr else None
    return f"; {plural(len(unfinished), 'run')} left, about {format_time_and_cost(seconds, usd)}"


def free_devices(ladder_runs: Iterable[LadderRun]) -> list[str | None]:
    """Values of `CUDA_VISIBLE_DEVICES` for runs that are trained at the same time; `[None]` without GPUs."""
    trainer = next((one.settings["trainer"] for one in ladder_runs), {})
    count = torch.cuda.device_count() if trainer.get("accelerator") in ("auto", "gpu", "cuda") else 0
    if not count:
        return [None]
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name][:count]
    named = named or list(map(str, range(count)))
    each = device_count(trainer["devices"]) or count
    return [",".join(named[begin : begin + each]) for begin in range(0, max(1, count - each + 1), each)]


def start(one: LadderRun, place: str | None) -> subprocess.Popen:
    """Start a run, once no process of a killed ladder trains it; the new process ends with this one."""
    began = time.monotonic()
    while one.run.is_locked() and time.monotonic() < began + PATIENCE and not STOP.received:
        time.sleep(POLL)
    write_atomically(one.file, to_yaml(one.settings))
    command = [*process.command(), "fit", "--config", str(one.file), "--run", one.run.name, "--ckpt_path", "auto"]
    environment = os.environ | ({} if place is None else {"CUDA_VISIBLE_DEVICES": place})
    log.info("%s begins%s", one.run.name, f" on GPU {place}" if place else "")
    with open(one.log, "ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only this process, which forwards it
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )


def end_with_parent() -> None:
    """Ask the system for a SIGTERM when the parent process dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG


def stop(running: dict[subprocess.Popen, Any]) -> None:
    """Send runs SIGTERM, so that they save a checkpoint and end, and wait for them."""
    for child in running:
        child.terminate()
    for child in running:
        child.wait()


def last_line(file: Path) -> str:
    lines = [line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it printed nothing")


def write_predicted(options: LadderOptions, ladder_runs: list[LadderRun]) -> list[LadderRun]:
    """Write the configs of sizes that are predicted but not trained yet, and return their runs."""
    others = [one for one in ladder_runs if one.size.depth not in options.sizes and one.seed == 1 and not one.finished]
    for one in others:
        trainer = {**one.settings["trainer"], "devices": "auto"}
        write_atomically(one.file, to_yaml({**one.settings, "trainer": trainer}))
    return others


def save_report(options: LadderOptions, ladder_runs: Sequence[LadderRun]) -> dict[str, Any]:
    """Write the results so far to `ladder.json` and `ladder.html` in the ladder's folder, and return them."""
    results = report(options.name, f"{process.program()} {shlex.join(sys.argv[1:])}", ladder_runs, options.against)
    write_atomically(options.folder / "ladder.json", to_json(results) + "\n", durable=False)
    write_atomically(options.folder / "ladder.html", page(results), durable=False)
    return results

"""`lm ladder`: train models of several sizes with several seeds, and predict the loss of larger ones from theirs.

The configs are those of `lm scale`, and every training is an ordinary run in the ladder's folder, so the same command
resumes it. `cli/ladder_report` computes and prints the results and predictions.
"""

import copy
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from lm.cli import scale
from lm.cli.charts import plain_table
from lm.cli.fit import quiet_lightning, with_classes
from lm.cli.ladder_report import AGAINST, HALF, ModelSize, Training, page, print_report, report
from lm.cli.options import PlanOptions
from lm.cli.plan_facts import examine
from lm.cli.request import Request, find_config, override, read_config, split_overrides
from lm.errors import Interrupted, RequestError, RunError, require_at_least
from lm.runs import scaling_laws
from lm.runs.config_diff import differences, not_allowed
from lm.runs.run import ROOT, Run, refuse_name
from lm.system import process
from lm.system.arguments import call
from lm.system.files import flatten, to_json, write_atomically
from lm.system.stop_signals import STOP
from lm.system.units import (
    Count,
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
Overrides = list[tuple[str, Any]]  # options of a training, as typed
PATIENCE = 60.0  # seconds that a training of a killed ladder has to save its last checkpoint
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


# Settings that follow from the size and length of a training -> the option of `lm ladder` that changes them.
FOLLOWS = {
    "trainer.default_root_dir": "--root",
    "trainer.max_steps": "--max_steps",
    "trainer.max_tokens": "--ratio", "data.seq_len": "--seq_len", "model.decoder.num_hidden_layers": "--depths",
    "model.decoder.hidden_size": "--aspect_ratio", "model.decoder.intermediate_size": "--aspect_ratio",
    "model.decoder.num_attention_heads": "--head_dim", "model.decoder.max_position_embeddings": "--seq_len",
    "model.decoder.vocab_size": "--vocab_size", "data.global_batch_tokens": "--batch_tokens",
}  # fmt: skip


class LadderOptions:
    """Train small models of several depths with configs from `lm scale`, fit scaling laws to their losses, and predict
    larger ones. The same command resumes it. Training options such as `--trainer.precision 32-true` apply to all runs.

    Args:
        depths: Numbers of blocks to train, such as 2,4,6,8; width, heads, batch and learning rate as in `lm scale`.
        predict: Depths whose loss to predict. They are trained only if --depths lists them too; the report then
            compares the prediction with the measured loss.
        ratio: Training tokens per non-embedding parameter; 20 if neither this nor --max_steps is given.
        max_steps: Instead of --ratio: optimizer steps per run, the same for all sizes.
        seeds: Runs per size, with seeds 1, 2 and so on; three or more show the noise between seeds.
        against: Another recipe to compare with: the options it adds or changes, such as '--optimizer adamw', or a YAML
            file of them. It is trained at the same sizes, and the ladder's own recipe also at half of the length.
        name: Name of the ladder: its folder, and the prefix of its runs' names.
        plan_only: Print what would be trained, without training.
        json: Print one JSON object instead of tables.
        device: Device to plan for, as in `lm plan`.
        memory: Memory of the device, such as 16GiB.
        peak_tflops: Peak throughput of the device in the configured precision, in dense TFLOP/s.
        mfu: Model FLOPs utilization (MFU) to assume, as a fraction of the peak.
        rate_usd_per_hr: Price of the machine in US dollars per hour.
        root: Folder of the runs; the ladder makes a folder of its own in it.
        scaled: Options of `lm.cli.scale.ScaleOptions`.
    """

    def __init__(
        self, depths: list[str] = [], predict: list[str] = [], ratio: float | None = None,
        max_steps: Count | None = None, seeds: int = 1, against: str | None = None, name: str = "ladder",
        plan_only: bool = False, json: bool = False, device: str = "auto", memory: str | None = None,
        peak_tflops: float | None = None, mfu: float | None = None, rate_usd_per_hr: float | None = None,
        root: str = str(ROOT), **scaled: Any,
    ) -> None:  # fmt: skip
        self.sizes, self.held_out = _depths("--depths", depths), _depths("--predict", predict)
        if not self.sizes:
            raise RequestError("give the depths, such as --depths 2,4,6,8")
        fitted = set(self.sizes) - set(self.held_out)
        if self.held_out and len(fitted) < scaling_laws.FEWEST:  # `ladder_report` says what is far from them
            raise RequestError(f"a prediction takes {scaling_laws.FEWEST} other sizes or more, and --depths has "
                               f"{len(fitted)} that --predict has not: add some, such as --depths 2,4,6,8")  # fmt: skip
        require_at_least(1, "--", seeds=seeds, max_steps=max_steps)
        refuse_name(name)
        if max_steps and ratio is not None:
            raise RequestError("--ratio and --max_steps each give the length of the runs: give one of them")
        ratio = scale.TOKENS_PER_PARAMETER if ratio is None else ratio
        self.horizon = {"max_steps": max_steps} if max_steps else {"target_param_data_ratio": ratio}  # as of `lm scale`
        self.seeds, self.name, self.folder, self.against = seeds, name, Path(root) / name, against
        self.plan_only, self.json = plan_only, json
        planned = {"device": device, "memory": memory, "peak_tflops": peak_tflops, "mfu": mfu,
                   "rate_usd_per_hr": rate_usd_per_hr}  # fmt: skip
        self.planned = {option: value for option, value in planned.items() if value is not None}  # as of `lm plan`
        self.scaled = scale.ScaleOptions(**scaled)

    @property
    def length(self) -> str:  # in the names of runs
        [(name, value)] = self.horizon.items()
        return f"n{int(value)}" if name == "max_steps" else f"r{value:g}"


def _depths(option: str, given: list[str]) -> list[int]:
    """Parse the depths of an option, separated by commas or spaces; returns them sorted, without duplicates."""
    words = ",".join(given).split(",") if given else []
    for word in words:
        if not word.isdecimal() or int(word) < 2:
            raise RequestError(f"{option} {','.join(given)}: {word!r} is not a number of blocks, 2 or more; give "
                               "several as 2,4,6")  # fmt: skip
    return sorted(set(map(int, words)))


def main(arguments: list[str]) -> None:
    """`lm ladder --depths 2,4,6,8 [options] [options of a training]`."""
    if "--against" in arguments[:-1]:
        place = arguments.index("--against")  # its value looks like options of the ladder
        arguments[place : place + 2] = ["=".join(arguments[place : place + 2])]
    own, overrides = split_overrides(arguments)
    options = call(LadderOptions, own, "lm ladder", "--depths {value}")
    ladder(options, overrides, [] if options.against is None else compared_recipes(options, own, overrides))


def compared_recipes(
    options: LadderOptions, own: list[str], overrides: Overrides
) -> list[tuple[str, LadderOptions, Overrides]]:
    """Make the recipes that --against adds: the ladder's own at half of its length, and the other recipe."""
    half, words = copy.copy(options), shlex.split(options.against)
    half.horizon = {name: value // 2 if name == "max_steps" else value / 2 for name, value in options.horizon.items()}
    if half.horizon.get("max_steps") == 0:
        raise RequestError("--max_steps 1 has no half: --against trains the ladder's recipe with half of its steps too")
    if len(words) == 1 and not words[0].startswith("-"):
        given = flatten(read_config(find_config(words[0])))
        if "seed_everything" in given:
            raise RequestError(f"--against {words[0]} is the config of one model, and a ladder makes one for each "
                               "depth: leave in it what the other recipe changes, as `optimizer: adamw` or `model: "
                               "{optimizer: {momentum: 0.9}}`; two models compare by `lm runs compare`")  # fmt: skip
        words = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in given.items()]
    more, changed = split_overrides(words)
    other = call(LadderOptions, [*own, *more], "lm ladder --against")
    for name in ("sizes", "seeds", "folder", "against"):
        if getattr(other, name) != getattr(options, name):
            raise RequestError(f"--against {options.against!r}: depths, seeds and folder are those of the ladder: "
                               "leave them out there")  # fmt: skip
    return [(HALF, half, overrides), (AGAINST, other, [*overrides, *changed])]


def ladder(
    options: LadderOptions, overrides: Overrides, compared: list[tuple[str, LadderOptions, Overrides]] = []
) -> None:
    """Plan all trainings, train those that are not finished, and write the report."""
    quiet_lightning()
    if process.under_torchrun() or process.under_srun():
        raise RequestError("`lm ladder` starts the trainings itself, one on each device: start it once, without "
                           "torchrun or srun")  # fmt: skip
    trainings = make_trainings(options, overrides)
    for recipe, its, own in compared:
        trainings += [one for one in make_trainings(its, own, recipe) if one.size.depth in options.sizes]
    trainings.sort(key=lambda one: (one.seed, one.size.depth))  # recipes alternate, so that other load slows all alike
    refuse_other_validation(trainings)
    wanted = [one for one in trainings if one.size.depth in options.sizes]
    refuse_other_settings(trainings)
    console = Console(highlight=False, stderr=options.json)
    console.width = max(console.width, 110)  # a narrower terminal wraps lines, and no number is cut off
    print_plan(console, options, trainings)
    if options.plan_only:
        if options.json:
            print(to_json({"sizes": planned_sizes(options, trainings)}))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    with only_one(options.folder):
        failed = train(options, wanted, trainings)
        found = save_report(options, trainings)
        to_train = write_predicted(options, trainings)
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
    parts = []
    for depth in sorted({*options.sizes, *options.held_out}):
        try:
            scaled = scale.ScaleRequest(**vars(options.scaled), depth=depth, **options.horizon)
            settings = yaml.safe_load(scale.scaled_config(scaled)[1])
        except RequestError as error:
            raise RequestError(f"depth {depth}: {error}") from error
        settings["trainer"] |= {"devices": 1, "default_root_dir": str(options.folder), "keep_checkpoints": 1}
        settings["data"]["val_tokens"] = VALIDATED
        request = override(settings, overrides)
        settings = request.settings
        facts = plan_facts(options, request, depth, refuse=depth in options.sizes)
        model, tokens = facts["model"], facts["steps"]["tokens"]
        outside = model["parameters"]["total"] - model["parameters"]["embedding"]
        flops = tokens * model["flops_per_token"]
        size = ModelSize(depth, outside, tokens, flops, depth in options.held_out)
        prefix = options.name + f"-{AGAINST}" * (recipe == AGAINST)
        parts.append((size, settings, facts, f"{prefix}-d{depth}-{options.length}"))
    made = []
    for seed in range(1, options.seeds + 1):
        for size, config, facts, name in parts:
            text = yaml.safe_dump({"run": f"{name}-s{seed}", **config, "seed_everything": seed}, sort_keys=False)
            made.append(Training(size, seed, Run(options.folder / f"{name}-s{seed}"), text, facts, recipe))
    return made


def plan_facts(options: LadderOptions, request: Request, depth: int, refuse: bool) -> dict[str, Any]:
    """Return the facts of `lm plan`; if `refuse`, raise RequestError for an error such as too little memory."""
    found, noted = examine(with_classes(request), PlanOptions(**options.planned))
    errors = [finding for finding in noted if finding.level == "error"]
    if errors and (refuse or "time" not in found):
        raise RequestError(f"depth {depth}: {errors[0]}")
    return found


def refuse_other_settings(trainings: list[Training]) -> None:
    """Raise RequestError if an existing run of this ladder was trained with other settings."""
    for one in trainings:
        if not (one.run.path / "run.json").exists():
            continue
        differing = differences([one.run.settings(), yaml.safe_load(one.config)])
        for key, (before, now) in not_allowed("ladder", differing).items():
            raise RequestError(f"run {one.run.path} has {key} {before}, and this ladder {now}: give the options "
                               "that it was made with, or another --name")  # fmt: skip


def refuse_other_validation(trainings: list[Training]) -> None:
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


def print_plan(console: Console, options: LadderOptions, trainings: list[Training]) -> None:
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
    wanted = [one for one in trainings if one.size.depth in options.sizes]
    finished = sum(one.finished for one in wanted)
    total = "" if finished else ": how long they take is known when the first one has ended"
    if not math.isnan(seconds):
        basis = trainings[0].plan["time"]["basis"]
        total = f"; all take {format_time_and_cost(seconds, usd if priced else None)} on one device ({basis})"
    console.print(f"{plural(len(wanted), 'training')}, {finished} of them finished{total}", soft_wrap=True)


# ---- training --------------------------------------------------------------------------------------------------------


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold a lock on the ladder's folder; raise RequestError if another process holds it."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(folder / "ladder.lock", timeout=0):
            yield
    except Timeout:
        raise RequestError(
            f"another process trains the ladder {folder}: wait for its end, or give another --name"
        ) from None


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
            rate = options.planned.get("rate_usd_per_hr")
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
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGTERM, 0, 0, 0)


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

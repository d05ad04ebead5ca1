"""`lm plan`: describe a config on one page before it is run, and find its errors; `lm fit` makes the same checks.

`cli/plan_facts` has the numbers and the findings on them. Nothing is built or written.
"""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from rich.console import Console

from lm.cli import plan_facts as facts
from lm.cli.options import PlanOptions
from lm.data.config import DataConfig
from lm.data.datamodule import DataModule
from lm.errors import RequestError, require_at_least
from lm.model.estimates import checkpoint_bytes, describe_mfu, recomputed_flops_per_token
from lm.runs.run import Run, refuse_name
from lm.system.devices import Device, find_device
from lm.system.files import disk_space, nonnegative
from lm.system.hardware import device_name
from lm.system.process import program
from lm.system.units import format_bytes, format_count, format_figure, format_time_and_cost, plural
from lm.training.budget import read_budget_file
from lm.training.callback import Callback
from lm.training.checks import Finding, Known, find, of_accelerator
from lm.training.config import TrainerConfig
from lm.training.launcher import EXIT_WAIT
from lm.training.module import LanguageModule, training_class
from lm.training.optim import state_size
from lm.training.precision import multiplication_precision, precision_for_cpu
from lm.training.schedule import plan_steps, warmup_and_decay_steps
from lm.training.trainer import Trainer

log = logging.getLogger(__name__)


# ---- the command -----------------------------------------------------------------------------------------------------


def plan(config: Namespace, name: str) -> None:
    """Check a config, which has `PlanOptions` too, and print what it means; `name` is that of the run."""
    if config.fit and config.strict:
        raise RequestError("--fit is about a device, and --strict looks at none: give one of them")
    refuse_name(name)
    found, noted = examine(config)
    found = {"config": name, **found}
    noted.sort(key=lambda finding: finding.level)  # errors first
    errors = [finding for finding in noted if finding.level == "error"]
    if config.fit:
        best = largest_that_fits(found, noted)
        found["fit"] = {"data.micro_batch_size": best}
    if config.json:
        print(json.dumps({**found, "findings": [finding._asdict() for finding in noted], "ready": not errors}))
    elif config.fit:
        print(*(f"--{name} {value}" for name, value in found["fit"].items()))
    else:
        show_plan(found, noted)
    if errors and not config.fit:
        raise RequestError(f"{name} is not ready: {_counted(noted)}{f': {errors[0].what}' * config.json}")


def largest_that_fits(found: dict[str, Any], noted: list[Finding]) -> int:
    if "memory" not in found:
        raise RequestError(f"--fit: {found.get('model', {}).get('unknown') or noted[0].what}")
    if found["memory"]["device"] is None:
        raise RequestError(f"--fit: how much memory {found['device']['name']} has is not known: name one with --device")
    best = found["memory"]["largest_micro_batch"]
    if best is None:
        raise RequestError(
            f"--fit: not even a micro-batch of 1 fits {found['device']['name']}: take a smaller model or data.seq_len"
        )
    return best


# ---- facts and findings ----------------------------------------------------------------------------------------------


def examine(
    config: Namespace, opened: DataModule | None = None, resumed: Run | None = None
) -> tuple[dict[str, Any], list[Finding]]:
    """Return the facts of a config, as far as they can be known, and the findings on it.

    When a fit calls this, `opened` is its data, and `resumed` a run whose warm-up and budget are not checked again.
    """
    if config.mfu is not None and not 0 < config.mfu <= 1:
        raise RequestError(f"--mfu {config.mfu} must lie in (0, 1]")
    if config.peak_tflops is not None and not 0 < config.peak_tflops < math.inf:
        raise RequestError(f"--peak_tflops {config.peak_tflops} must be above 0")
    require_at_least(0, "--", rate_usd_per_hr=config.rate_usd_per_hr)
    wanted = config.device or "auto"
    cpu = wanted == "auto" and config.trainer.accelerator == "cpu"
    device, here = (Device("", None, None), 1) if config.strict else find_device(
        "cpu" if cpu and not config.memory else wanted, facts.memory_of_option(config.memory),
        config.peak_tflops or (config.trainer.peak_tflops if wanted == "auto" else None),
    )  # fmt: skip
    try:
        trainer, options = TrainerConfig(**vars(config.trainer)), DataConfig(**vars(config.data))
        on_node = facts.ranks(trainer.devices, here)
        world_size = on_node * trainer.num_nodes
        steps = plan_steps(
            seq_len=config.data.seq_len, micro_batch_size=config.data.micro_batch_size,
            global_batch_tokens=config.data.global_batch_tokens, world_size=world_size,
            max_steps=config.trainer.max_steps, max_tokens=config.trainer.max_tokens,
        )  # fmt: skip
        warmup_and_decay_steps(steps.max_steps, config.model.schedule)
    except RequestError as error:
        return {}, [Finding("error", str(error), "")]
    found: dict[str, Any] = {}
    noted: list[Finding] = []
    data, tokenizer, budget_file, rate = {"prepared": False, "from": []}, None, {}, None
    if not config.strict:
        data, tokenizer = facts.open_data(config, opened, noted)
        budget_file, rate = _read_rate(config, noted)
    decoder = facts.with_vocabulary(config, tokenizer)
    found["steps"] = facts.step_facts(steps, config, data)
    custom = training_class().is_custom()
    known = Known() if config.strict else Known(
        world_size, device, here=wanted == "auto" and not config.memory, tokenizer=tokenizer,
        has_validation="val" in data if data.get("prepared") else None,
    )  # fmt: skip
    noted += find(trainer, config.model, options, known, samples=config.get("samples"), evaluation=config.evaluation,
                  custom=custom)  # fmt: skip
    if known.here:
        noted += of_accelerator(trainer.accelerator)
    noted += facts.of_steps(found["steps"], config)
    if resumed is None:
        noted += facts.of_warmup(found["steps"], config)
    if not config.strict and "unknown" not in data:
        found["data"] = data
        noted += facts.of_data(data, found["steps"], config)
        noted += facts.of_tasks(config.evaluation)
    noted += facts.of_optimizer(config.model.optimizer)
    if custom:
        found["model"] = {"unknown": "size, memory and speed are those of what build_decoder returns: "
                          f"`{program()} bench step --config FILE` measures them"}  # fmt: skip
        return found, noted
    if decoder is None:
        if "unknown" not in data:  # otherwise there is an error already
            found["model"] = {"unknown": "the size is not known before the tokenizer is made: "
                              "give --model.decoder.vocab_size N"}  # fmt: skip
        return found, noted
    found["model"] = facts.model_facts(decoder, config.data.seq_len)
    if config.strict:
        return found, noted
    if device.capability is None and device.memory_bytes is not None:
        device = device._replace(memory_bytes=device.memory_bytes // on_node)  # the ranks on a CPU share its memory
    precision = precision_for_cpu(config.trainer.precision) if device.capability is None else config.trainer.precision
    step, optimizer = facts.computation(steps, config, device, precision, data), config.model.optimizer
    found["device"] = {"name": device.name, "precision": precision, "kernels": step.kernels, "count": world_size}
    global_batch = config.data.global_batch_tokens is not None
    found["memory"] = facts.memory_facts(decoder, step, optimizer, device, global_batch)
    count = found["model"]["parameters"]["total"]
    measured = facts.read_bench(config.bench, count, config.data.seq_len) if config.bench else {}
    found["time"] = facts.time_facts(
        found["steps"], found["model"], device,
        multiplication_precision(precision, config.trainer.matmul_precision), config.mfu, measured, rate,
        recomputed_flops_per_token(decoder, step.seq_len, config.model.activation_checkpointing),
    )  # fmt: skip
    one = checkpoint_bytes(decoder, step.master_item, state_size(optimizer))
    found["checkpoints"] = facts.checkpoint_facts(
        config.trainer.checkpoint_interval, found["steps"], found["time"], one, measured
    )
    if config.guards.budget.wanted:
        found["budget"] = facts.budget_facts(config.guards.budget, found["time"], rate, budget_file)
        if resumed is None:
            noted += facts.of_budget(found["budget"], found["time"], found["steps"], config)
    every = config.trainer.keep_every
    kept = config.trainer.keep_checkpoints + (steps.max_steps // every if every else 0)
    present = len(resumed.steps()) if resumed else 0
    space = disk_space(Path(config.trainer.default_root_dir), one, kept, present)
    found["disk"] = space._asdict()
    noted += facts.of_device(found["memory"], space, found["steps"], device, config, precision)
    return found, noted


def _read_rate(config: Namespace, noted: list[Finding]) -> tuple[dict[str, Any], float | None]:
    """The content of `guards.budget.file`, and the price of an hour in US dollars; findings are added to `noted`."""
    budget, file, rate = config.guards.budget, {}, None
    try:
        file = read_budget_file(budget)
        rate = nonnegative(file.get("rate_usd_per_hr")) or budget.rate_usd_per_hr or config.rate_usd_per_hr
    except RequestError as error:
        noted.append(Finding("error", str(error), ""))
    return file, rate


class PlanChecks(Callback):
    """Runs the checks of `lm plan` when a fit begins: logs the warnings, and raises RequestError on errors."""

    def __init__(self, sections: Mapping[str, Any]) -> None:
        self._sections = sections
        self._resumed: Run | None = None
        self._force = False
        self._changed: list[str] = []  # this and `_noted` are logged once the run has a log file
        self._noted: list[str] = []

    def resume(self, run: Run | None, force: bool, changed: dict[str, list[Any]], news: Sequence[str] = ()) -> None:
        """Set the run that the fit resumes, whose warm-up and budget are not checked, and the changes to its config.

        With `force`, errors are only logged, and the run trains; the lines of `news` are logged first.
        """
        self._resumed, self._force = run, force
        self._changed = [*news, *(f"changed since the run was started: {key}: {before} -> {now}"
                                  for key, (before, now) in changed.items())]  # fmt: skip

    def setup(self, trainer: Trainer, pl_module: LanguageModule, stage: str) -> None:
        """Run the checks: the data is open, and the model is not built yet."""
        if stage == "fit":
            self.refuse(trainer, pl_module, trainer.datamodule, opened=True)

    def refuse(self, trainer: Trainer, module: LanguageModule, data: DataModule, opened: bool) -> None:
        """Raise RequestError if the config has an error; with several ranks, rank zero decides and reports.

        If `opened` is false, the data is not prepared yet and ranks cannot communicate, so every rank runs the checks.
        """
        ranks = {"num_nodes": trainer.num_nodes, "devices": trainer.world_size // trainer.num_nodes}
        config = Namespace(
            trainer=Namespace(**vars(trainer.options) | ranks),  # as torchrun or SLURM says
            model=Namespace(**vars(module.options) | dict(module.hparams)),
            data=Namespace(**vars(data.options) | {"seq_len": data.seq_len}), **self._sections,
            **vars(PlanOptions(device="cpu" if trainer.options.accelerator == "cpu" else "auto")),
        )  # fmt: skip
        noted: list[Finding] = []
        if trainer.is_global_zero or not opened:
            _, noted = examine(config, data if opened else None, self._resumed)
        if opened:
            noted = trainer.strategy.broadcast(noted)
        errors = [str(finding) for finding in noted if finding.level == "error"]
        if errors and not self._force:
            if not trainer.is_global_zero:
                time.sleep(EXIT_WAIT)  # a launcher may end all ranks with the first one, which is to report
                raise SystemExit(RequestError.exit_code)
            for error in errors[:-1]:
                log.error("%s", error)
            raise RequestError(errors[-1])
        self._noted = [f"{finding.level}: {finding}" for finding in noted]

    def on_fit_start(self, trainer: Trainer, pl_module: LanguageModule) -> None:
        if trainer.is_global_zero:
            for line in self._changed:
                log.info("%s", line)
            for line in self._noted:
                log.warning("%s", line)


# ---- the page --------------------------------------------------------------------------------------------------------


def show_plan(found: dict[str, Any], noted: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{found['config']}[/bold]")
    for name, lines_of in PAGE.items():
        for number, line in enumerate(lines_of(found) if name in found else []):
            console.print(f"{name if not number else '':8}{line}")
    colours = {"error": "red", "warning": "yellow"}
    for finding in noted:
        console.print(f"[{colours[finding.level]}]{finding.level:8}[/]{finding.what}")
        if finding.cure:
            console.print(f"{'':8}{finding.cure}")
    if not any(finding.level == "error" for finding in noted):  # otherwise the command ends with that message
        console.print(f"[bold]ready[/bold]{': ' * bool(noted)}{_counted(noted)}")


def _counted(noted: list[Finding]) -> str:
    """Count findings by level, in the order of the list (errors first): `1 error, 2 warnings`."""
    counts = Counter(finding.level for finding in noted)
    return ", ".join(plural(count, level) for level, count in counts.items())


def _model_lines(found: dict[str, Any]) -> list[str]:
    model = found["model"]
    if "unknown" in model:
        return [model["unknown"]]
    counts = model["parameters"]
    names = [name for name in ("embedding", "attention", "mlp", "norms", "lm_head") if counts[name]]
    parts = ", ".join(f"{name} {format_count(counts[name])}" for name in names)
    return [
        f"{format_count(counts['total'])} parameters: {parts}{' (the output too)' * model['tied']}",
        f"{model['flops_per_token'] / 1e9:.3g} GFLOPs a token, both passes; vocabulary {model['vocab_size']:,}",
    ]


def _data_lines(found: dict[str, Any]) -> list[str]:
    data = found["data"]
    return [
        f"{split}: {format_count(data[split]['tokens'])} tokens in {plural(data[split]['shards'], 'shard')}, "
        f"{plural(data[split]['windows'], 'sample')}, {data[split]['left_over']:,} tokens left over"
        + ("" if data[split]["filled_up"] is None else f", {data[split]['filled_up']:.2%} of a sample only fills it up")
        for split in ("train", "val") if split in data
    ] + [
        f"{name}: {source['share']:.1%} of the samples, {source['epochs']:.2f} epochs of "
        f"{format_count(data['sources'][name]['tokens'])} tokens"
        for name, source in found["steps"].get("sources", {}).items()
    ] or [f"not there yet: the first fit makes it from {', '.join(data['from'])}"]  # fmt: skip


def _steps_lines(found: dict[str, Any]) -> list[str]:
    steps = found["steps"]
    epochs = f", {steps['epochs']:.2f} epochs" if "epochs" in steps and "sources" not in steps else ""
    return [
        f"{steps['micro_batch_size']:,} x {steps['seq_len']:,} tokens x {plural(steps['accumulate'], 'micro-batch')} x "
        f"{plural(steps['world_size'], 'rank')} = {steps['tokens_per_step']:,} tokens a step",
        f"{plural(steps['max_steps'], 'step')} = {format_count(steps['tokens'])} tokens{epochs}; warm-up "
        f"{steps['warmup_steps']:,} ({steps['warmup_share']:.1%}), {plural(steps['validations'], 'validation')}, "
        f"{plural(steps['checkpoints'], 'checkpoint')}",
    ]


def _memory_lines(found: dict[str, Any]) -> list[str]:
    memory, device = found["memory"], found["device"]
    free = " free" * (device["name"] == device_name("cpu"))
    parts = ("weights", "gradients", "optimizer", "casts", "activations", "working", "reserve")
    whole, best = memory["device"], memory.get("largest_micro_batch")
    of_device = f" of {format_bytes(whole)}{free} ({memory['total'] / whole:.0%})" if whole else ""
    return [
        f"{format_bytes(memory['total'])}{of_device} on {device['count']} x {device['name']}, {device['precision']}, "
        f"kernels {'on' if device['kernels'] else 'off'}",
        ", ".join(f"{name} {format_bytes(memory[name])}" for name in parts if memory[name]),
        *([f"the largest micro-batch that fits is {best:,}"] if best and memory["total"] <= whole else []),
        *(
            [f"model.activation_checkpointing store_all, a little faster, takes {format_bytes(more)}"]
            if whole and (more := memory.get("store_all", whole)) <= whole * facts.NEARLY_FULL
            else []
        ),
    ]


def _time_lines(found: dict[str, Any]) -> list[str]:
    time = found["time"]
    if time["seconds"] is None:
        return [f"unknown: {time['basis']}"]
    mfu = describe_mfu(time["mfu"], time["mfu_full_attention"])
    return [
        f"{format_time_and_cost(time['seconds'], time['usd'])} at {format_count(time['tokens_per_second'])} tokens/s "
        f"({time['basis']})",
        *([f"MFU {mfu}"] if time["mfu"] else []),
    ]


def _disk_lines(found: dict[str, Any]) -> list[str]:
    one, at_once, free = (format_bytes(found["disk"][name]) for name in ("checkpoint", "at_once", "free"))
    lines = [f"{one} a checkpoint, {at_once} at once; {free} free", f"{one} of rank zero's memory for its copy"]
    work = found["checkpoints"]
    if "lost_seconds" in work:
        lines.append(
            f"a crash loses at most {plural(work['interval'], 'step')} of work: "
            f"{format_time_and_cost(work['lost_seconds'], work['lost_usd'])}; saving takes "
            f"{work['saving_share']:.1%} of the time ({work['saving_basis']})"
        )
    return lines


def _budget_lines(found: dict[str, Any]) -> list[str]:
    budget = found["budget"]
    if budget["hours"] is None:
        return ["unknown, since the time is"]
    hours, parts = f"{format_figure(budget['hours'])} h", []
    if budget["max_hours"]:
        parts.append(f"{hours} of {format_figure(budget['max_hours'])}")
    if budget["usd"] is not None:
        cap = f" of {format_figure(budget['cap_usd'])}" if budget["cap_usd"] else ""
        rate, usd = format_figure(budget["rate_usd_per_hr"]), format_figure(budget["usd"])
        parts.append(f"{hours} x {rate} USD/h = {usd} USD{cap}")
    if budget["spent_usd"]:
        parts.append(f"{format_figure(budget['spent_usd'])} USD are spent already")
    return ["; ".join(parts) or f"{hours}, and no rate is known"]


PAGE = {"model": _model_lines, "data": _data_lines, "steps": _steps_lines, "memory": _memory_lines,
        "time": _time_lines, "budget": _budget_lines, "disk": _disk_lines}  # fmt: skip

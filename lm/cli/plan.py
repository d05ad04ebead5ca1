"""`lm plan`: describe a config on one page before it is run, and find its errors; `lm fit` makes the same checks.

`cli/plan_facts` has the numbers and the findings on them. Nothing is built or written.
"""

import json
import logging
from collections import Counter
from typing import Any

from rich.console import Console

from lm.cli import plan_facts
from lm.cli.classes_by_path import with_classes
from lm.cli.command_options import PlanOptions
from lm.cli.fit import quiet_lightning
from lm.cli.request import Request
from lm.errors import RequestError
from lm.model.estimates import describe_mfu
from lm.runs.run import check_run_name
from lm.system.hardware import device_name
from lm.system.units import format_bytes, format_count, format_figure, format_time_and_cost, plural
from lm.training.checks import Finding, check_event_program

log = logging.getLogger(__name__)


# ---- the command -----------------------------------------------------------------------------------------------------


def plan(request: Request[PlanOptions]) -> None:
    """Check a config, and print what it means."""
    quiet_lightning()
    options, name = request.command_options, request.run_name
    if options.fit and options.strict:
        raise RequestError("--fit is about a device, and --strict looks at none: give one of them")
    check_run_name(name)
    found, noted = plan_facts.examine(with_classes(request), options)
    noted += check_event_program(request.run_options)
    found = {"config": name, **found}
    noted.sort(key=lambda finding: finding.level)  # errors first
    errors = [finding for finding in noted if finding.level == "error"]
    if options.fit:
        best = largest_that_fits(found, noted)
        found["fit"] = {"data.micro_batch_size": best}
    if options.json:
        print(json.dumps({**found, "findings": [finding._asdict() for finding in noted], "ready": not errors}))
    elif options.fit:
        print(*(f"--{name} {value}" for name, value in found["fit"].items()))
    else:
        show_plan(found, noted)
    if errors and not options.fit:
        raise RequestError(f"{name} is not ready: {_counted(noted)}{f': {errors[0].what}' * options.json}")


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
            if whole and (more := memory.get("store_all", whole)) <= whole * plan_facts.NEARLY_FULL
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

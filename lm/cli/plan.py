"""`lm plan`: describe a config on one page before it is run, and find its errors; `lm fit` makes the same checks.

`cli/plan_facts` has the numbers, `cli/plan_checks` the findings on them. Nothing is built or written.
"""

import json
from collections import Counter

from rich.console import Console

from lm.cli.classes_by_path import with_classes
from lm.cli.command_options import PlanOptions
from lm.cli.fit import quiet_lightning
from lm.cli.plan_checks import Facts
from lm.cli.plan_facts import examine
from lm.cli.request import Request
from lm.errors import RequestError
from lm.model.estimates import describe_mfu
from lm.runs.expected_loss import ExpectedLoss
from lm.runs.run import check_run_name
from lm.system.hardware import device_name
from lm.system.units import format_bytes, format_count, format_figure, format_time_and_cost, plural
from lm.training.checks import Finding


def plan(request: Request[PlanOptions]) -> None:
    quiet_lightning()
    options, name = request.command_options, request.run_name
    check_run_name(name)
    facts, findings = examine(with_classes(request), options)
    facts = {"config": name, **facts}
    findings.sort(key=lambda finding: finding.level)  # errors first
    errors = [finding for finding in findings if finding.level == "error"]
    if options.fit:
        micro_batch = largest_that_fits(facts, findings)
        facts["fit"] = {"data.micro_batch_size": micro_batch}
        if not options.json:
            print(f"--data.micro_batch_size {micro_batch}")
    if options.json:
        print(json.dumps({**facts, "findings": [finding._asdict() for finding in findings], "ready": not errors}))
    elif not options.fit:
        show_plan(facts, findings)
    if errors and not options.fit:
        first = f": {errors[0].what}" if options.json else ""
        raise RequestError(f"{name} is not ready: {_counted(findings)}{first}")


def largest_that_fits(facts: Facts, findings: list[Finding]) -> int:
    if "memory" not in facts:
        raise RequestError(f"--fit: {facts.get('model', {}).get('unknown') or findings[0].what}")
    memory, device = facts["memory"], facts["device"]["name"]
    if memory["device"] is None:
        raise RequestError(f"--fit: how much memory {device} has is not known: name one with --device")
    if memory["largest_micro_batch"] is None:
        raise RequestError(f"--fit: not even a micro-batch of 1 fits {device}: take a smaller model or data.seq_len")
    return memory["largest_micro_batch"]


def show_plan(facts: Facts, findings: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{facts['config']}[/bold]")
    for name, describe in PAGE.items():
        for number, line in enumerate(describe(facts) if name in facts else []):
            console.print(f"{name if not number else '':8}{line}")
    colours = {"error": "red", "warning": "yellow"}
    for finding in findings:
        console.print(f"[{colours[finding.level]}]{finding.level:8}[/]{finding.what}")
        if finding.cure:
            console.print(f"{'':8}{finding.cure}")
    if not any(finding.level == "error" for finding in findings):  # otherwise the command ends with that message
        console.print(f"[bold]ready[/bold]{': ' if findings else ''}{_counted(findings)}")


def _counted(findings: list[Finding]) -> str:
    """Count findings by level, in the order of the list (errors first): `1 error, 2 warnings`."""
    counts = Counter(finding.level for finding in findings)
    return ", ".join(plural(count, level) for level, count in counts.items())


def _model_lines(facts: Facts) -> list[str]:
    model = facts["model"]
    if "unknown" in model:
        return [model["unknown"]]
    counts, tied = model["parameters"], " (the output too)" if model["tied"] else ""
    names = [name for name in ("embedding", "attention", "mlp", "norms", "lm_head") if counts[name]]
    parts = ", ".join(f"{name} {format_count(counts[name])}" for name in names)
    return [
        f"{format_count(counts['total'])} parameters: {parts}{tied}",
        f"{model['flops_per_token'] / 1e9:.3g} GFLOPs a token, both passes; vocabulary {model['vocab_size']:,}",
    ]


def _data_lines(facts: Facts) -> list[str]:
    data, lines = facts["data"], []
    if not data["prepared"]:
        return [f"not there yet: the first fit makes it from {', '.join(data['from'])}"]
    for name in ("train", "val"):
        if split := data.get(name):
            filled = "" if split["filled_up"] is None else f", {split['filled_up']:.2%} of a sample only fills it up"
            lines.append(
                f"{name}: {format_count(split['tokens'])} tokens in {plural(split['shards'], 'shard')}, "
                f"{plural(split['windows'], 'sample')}, {split['left_over']:,} tokens left over{filled}"
            )
    for name, source in facts["steps"].get("sources", {}).items():
        tokens = format_count(data["sources"][name]["tokens"])
        samples = f"{source['share']:.1%} of the samples"
        lines.append(f"{name}: {samples}, {source['epochs']:.2f} epochs of {tokens} tokens")
    return lines


def _steps_lines(facts: Facts) -> list[str]:
    steps = facts["steps"]
    epochs = f", {steps['epochs']:.2f} epochs" if "epochs" in steps and "sources" not in steps else ""
    return [
        f"{steps['micro_batch_size']:,} x {steps['seq_len']:,} tokens x {plural(steps['accumulate'], 'micro-batch')} x "
        f"{plural(steps['world_size'], 'rank')} = {steps['tokens_per_step']:,} tokens a step",
        f"{plural(steps['max_steps'], 'step')} = {format_count(steps['tokens'])} tokens{epochs}; warm-up "
        f"{steps['warmup_steps']:,} ({steps['warmup_share']:.1%}), {plural(steps['validations'], 'validation')}, "
        f"{plural(steps['checkpoints'], 'checkpoint')}",
    ]


def _memory_lines(facts: Facts) -> list[str]:
    memory, device = facts["memory"], facts["device"]
    available, largest = memory["device"], memory.get("largest_micro_batch")
    of_device = ""
    if available:
        free = " free" if device["name"] == device_name("cpu") else ""
        of_device = f" of {format_bytes(available)}{free} ({memory['total'] / available:.0%})"
    parts = ("weights", "gradients", "optimizer", "casts", "activations", "working", "reserve")
    lines = [
        f"{format_bytes(memory['total'])}{of_device} on {device['count']} x {device['name']}, {device['precision']}, "
        f"kernels {'on' if device['kernels'] else 'off'}",
        ", ".join(f"{name} {format_bytes(memory[name])}" for name in parts if memory[name]),
    ]
    if largest and memory["total"] <= available:
        steps = facts["steps"]
        whole = ", the whole batch" if largest == steps["micro_batch_size"] * steps["accumulate"] else ""
        lines.append(f"the largest micro-batch that fits is {largest:,}{whole}")
    return lines


def _time_lines(facts: Facts) -> list[str]:
    time = facts["time"]
    if time["seconds"] is None:
        return [f"unknown: {time['basis']}"]
    duration, rate = format_time_and_cost(time["seconds"], time["usd"]), format_count(time["tokens_per_second"])
    mfu = [f"MFU {describe_mfu(time['mfu'], time['mfu_full_attention'])}"] if time["mfu"] else []
    return [f"{duration} at {rate} tokens/s ({time['basis']})", *mfu]


def _loss_lines(facts: Facts) -> list[str]:
    loss = ExpectedLoss(**facts["loss"])
    return [f"{'unknown' if loss.loss is None else 'expected'}: {loss}"]


def _disk_lines(facts: Facts) -> list[str]:
    size, at_once, free = (format_bytes(facts["disk"][name]) for name in ("checkpoint", "at_once", "free"))
    lines = [
        f"{size} a checkpoint, {at_once} at once; {free} free",
        f"{size} of memory, to write it while training goes on",
    ]
    work = facts["checkpoints"]
    if "lost_seconds" in work:
        lines.append(
            f"a crash loses at most {plural(work['interval'], 'step')} of work: "
            f"{format_time_and_cost(work['lost_seconds'], work['lost_usd'])}; saving takes "
            f"{work['saving_share']:.1%} of the time ({work['saving_basis']})"
        )
    return lines


def _budget_lines(facts: Facts) -> list[str]:
    budget = facts["budget"]
    if budget["hours"] is None:
        return ["unknown, since the time is"]
    line = f"{format_figure(budget['hours'])} h"
    if budget["max_hours"]:
        line += f" of {format_figure(budget['max_hours'])}"
    if budget["usd"] is not None:
        line += f" x {format_figure(budget['rate_usd_per_hr'])} USD/h = {format_figure(budget['usd'])} USD"
    if budget["cap_usd"]:
        spent = format_figure(budget["spent_usd"] or 0)
        line += f"; the cap is {format_figure(budget['cap_usd'])} USD, {spent} are spent"
    return [line]


PAGE = {  # fact -> the lines that describe it
    "model": _model_lines,
    "data": _data_lines,
    "steps": _steps_lines,
    "memory": _memory_lines,
    "time": _time_lines,
    "loss": _loss_lines,
    "budget": _budget_lines,
    "disk": _disk_lines,
}

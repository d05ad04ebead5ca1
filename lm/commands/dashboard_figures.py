"""The figures of a run in words, for `dashboard` to place: a title, a bar, and sections of labels and values."""

import math
import statistics
import textwrap
import time
from itertools import pairwise
from typing import Any

from rich.text import Text

from lm.commands.runs import STYLES
from lm.quantities import format_bytes, format_count

UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
METRICS = {
    "loss": ("train/loss", "{:.4f}"), "validation": ("val/loss", "{:.4f}"), "bits per byte": ("val/bpb", "{:.4f}"),
    "lr": ("optim/lr", "{:.2e}"), "gradient norm": ("optim/grad_norm", "{:.3g}"),
    "tokens/s": ("perf/tokens_per_second", "{}"), "MFU": ("perf/mfu", "{:.1%}"),
}  # fmt: skip

Fact = tuple[str, str, str]  # label, value, style


def plain(text: str) -> str:
    """What somebody else wrote, as one line that does nothing to a terminal."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def duration(seconds: float) -> str:
    """A time in at most two units: 42 s, 3 min 5 s, 2 h 10 min, 4 d 3 h."""
    seconds = max(0, round(seconds))
    for (unit, length), (smaller, part) in pairwise(UNITS):
        if seconds >= length:
            rest = seconds % length // part
            return f"{seconds // length} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds} s"


def title(state: dict[str, Any], width: int) -> Text:
    """What the run is and how it does; on the right, where there is room, what it runs on."""
    status = state["status"]
    line = Text().append(plain(state["run"]), "bold").append("  ").append(status, f"bold {STYLES.get(status, '')}")
    if status == "running" and state.get("phase") not in (None, "training"):
        line.append(f", {state['phase']}")
    if status == "dead" and state.get("heartbeat_age_seconds") is not None:
        line.append(f", last sign of life {duration(state['heartbeat_age_seconds'])} ago")
    if status == "gone":
        line.append(f": {state['path']} is not there any more")
    where = "  ".join(plain(str(state[name])) for name in ("device", "host") if state.get(name))
    if (state.get("world_size") or 1) > 1:
        where = f"{state['world_size']} x {where}"
    room = width - line.cell_len - len(where)
    return line.append(" " * room + where, "dim") if room > 1 else line


def progress(state: dict[str, Any], width: int) -> Text:
    """A bar, steps, tokens, and the time that is left."""
    step, last = state.get("step"), state.get("max_steps")
    if not last:
        return Text("no step yet", "dim")
    share = min(1.0, step / last)
    text = f" {share:4.0%}  step {step:,}/{last:,}"
    if state.get("max_tokens"):
        text += f"  {format_count(float(state['tokens']))}/{format_count(float(state['max_tokens']))} tokens"
    if state.get("eta_seconds") is not None:
        text += f"  {duration(state['eta_seconds'])} left"
    elif state["status"] == "running":
        text += "  time left not known yet"
    room = max(min(10, width), width - len(text))
    done = round(share * room)
    return Text().append("━" * done, "cyan").append("─" * (room - done), "dim").append(text)


def training(state: dict[str, Any]) -> list[Fact]:
    """The newest metrics, and the best validation; what is no number stands out."""
    facts = []
    for label, (name, form) in METRICS.items():
        value = state.get("metrics", {}).get(name)
        if value is not None:
            text = format_count(float(value)) if form == "{}" else form.format(value)
            facts.append((label, text, "" if math.isfinite(value) else "bold red"))
        if label == "validation" and state.get("best_val_loss") is not None:
            facts.append(("best", f"{state['best_val_loss']:.4f} at step {state['best_val_step']:,}", ""))
    return facts


def machine(state: dict[str, Any], most: int) -> list[Fact]:
    """The newest reading, more GPUs than `most` in one line; of a run that is over there is none."""
    reading = state.get("machine")
    if not reading or state["status"] not in ("running", "dead"):
        return []
    gpus = reading["gpus"] or []
    if len(gpus) > most:
        facts = [(f"{len(gpus)} GPUs", *_gpu(together(gpus)))]
    else:
        facts = [("GPU" if gpu["index"] is None else f"GPU {gpu['index']}", *_gpu(gpu)) for gpu in gpus]
    cpu, memory, process = reading["cpu"], reading["memory"], reading["process"]
    if cpu["load_percent"] is not None:
        facts.append(("CPU", f"{cpu['load_percent']:.0f}% of {cpu['cores']} cores", ""))
    if memory["used_bytes"] is not None:
        facts.append(("RAM", _of(memory["used_bytes"], memory["total_bytes"]), ""))
    if process["memory_bytes"] is not None:
        facts.append(("process", format_bytes(process["memory_bytes"]), ""))
    return facts


def together(gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """Several GPUs as one: mean load, the fullest memory, the highest temperature, the power of all."""

    def over(name: str, summary: Any) -> Any:
        known = [gpu[name] for gpu in gpus if gpu[name] is not None]
        return summary(known) if known else None

    return {
        "load_percent": over("load_percent", statistics.fmean),
        "memory_used_bytes": over("memory_used_bytes", max),
        "memory_total_bytes": over("memory_total_bytes", max),
        "temperature_celsius": over("temperature_celsius", max),
        "power_watts": over("power_watts", sum),
        "power_limit_watts": over("power_limit_watts", sum),
        "clocks_limited_by": list(dict.fromkeys(limit for gpu in gpus for limit in gpu["clocks_limited_by"] or [])),
    }


def _gpu(gpu: dict[str, Any]) -> tuple[str, str]:
    """A GPU's figures in a line, and its style: what limits its clocks is worth a look."""
    parts = []
    if gpu["load_percent"] is not None:
        parts.append(f"{gpu['load_percent']:.0f}%")
    if gpu["memory_used_bytes"] is not None:
        parts.append(_of(gpu["memory_used_bytes"], gpu["memory_total_bytes"]))
    if gpu["temperature_celsius"] is not None:
        parts.append(f"{gpu['temperature_celsius']:.0f}°C")
    if gpu["power_watts"] is not None:
        limit = "" if gpu["power_limit_watts"] is None else f"/{gpu['power_limit_watts']:.0f}"
        parts.append(f"{gpu['power_watts']:.0f}{limit} W")
    limits = gpu["clocks_limited_by"] or []
    return " ".join([*parts, ", ".join(limits)]).strip() or "not known", "yellow" if limits else ""


def _of(used: int, total: int | None) -> str:
    if not total:
        return format_bytes(used)
    decimals = 0 if total >= 100 * 2**30 else 1
    return f"{used / 2**30:,.{decimals}f}/{total / 2**30:,.{decimals}f} GiB"


def checkpoints(state: dict[str, Any]) -> list[Fact]:
    """The last and the best one with their ages."""
    found = [(label, state.get(name)) for label, name in (("last", "checkpoint"), ("best", "best_checkpoint"))]
    facts = [(label, f"{one['name']}, {duration(one['age_seconds'])} ago", "") for label, one in found if one]
    return facts or [("checkpoint", "none yet", "")]


def alerts(state: dict[str, Any], most: int, width: int | None = None) -> list[Text]:
    """The newest, newest first; folded to a width where one is given."""
    lines: list[Text] = []
    for alert in reversed(state.get("alerts", [])[-most:]):
        at = time.strftime("%H:%M", time.localtime(alert.get("time", 0.0)))
        head = f"{at} {plain(str(alert.get('guard', '')))}"
        text = f"{head} {plain(str(alert.get('message', '')))} -> {plain(str(alert.get('action', '')))}"
        first, *more = textwrap.wrap(text, width, subsequent_indent="      ") if width else [text]
        lines.append(Text().append(first[: len(head)], "bold yellow").append(first[len(head) :]))
        lines += map(Text, more)
    return lines

"""How a checkpoint came to be, from the folder of its run: its data, its training, how good it was found to be.

Everything is rows of a name and a text, for a table. What is not known is left out, and nothing names folders of the
machine or secrets of a URL, so that it may be published.
"""

import json
import re
from pathlib import Path
from typing import Any

from lm.checkpoint import samples_of
from lm.evaluation_log import joined
from lm.model.accounting import flops_per_token
from lm.pretrained import Pretrained
from lm.quantities import format_bytes
from lm.runs import Run

Rows = dict[str, Any]  # name -> what to say; None where it is not known
SHOWN_SOURCES = 12


# ---- data ------------------------------------------------------------------------------------------------------------


def data_rows(model: Pretrained, run: Run) -> Rows:
    """What the model was trained and validated on, and the tokenizer."""
    shards, sizes = run.read("data.json"), _manifest(run).get("splits", {})
    names = list(dict.fromkeys(_public(name) for name in sources(run)))
    more = f" and {len(names) - SHOWN_SOURCES:,} more" if len(names) > SHOWN_SOURCES else ""
    kind = model.tokenizer.description["model"].get("type", "")
    rows: Rows = {
        "sources": ", ".join(names[:SHOWN_SOURCES]) + more or None,
        "tokenizer": f"{'byte-level ' if model.tokenizer.byte_level else ''}{kind}, "
        f"{len(model.tokenizer.vocabulary):,} tokens",
    }
    for split, label in (("train", "training data"), ("val", "validation data")):
        if tokens := sum(shard[2] for shard in shards.get(split, [])):
            rows[label] = f"{tokens:,} tokens"
        if tokens and (size := sizes.get(split)):
            rows[label] += (
                f" of {size['documents']:,} documents, {format_bytes(size['bytes'])} of text, "
                f"{size['bytes'] / size['tokens']:.2f} bytes a token"
            )
    return rows


def sources(run: Run) -> list[str]:
    """The files or URLs that the data was made of; its shards where that is not known."""
    if manifest := _manifest(run):
        return [source["name"] for source in manifest.get("sources", [])]
    data = run.settings().get("data") or {}
    given = data.get("train") or (data.get("prepare") or {}).get("input") or []
    return [given] if isinstance(given, str) else list(given)


def _manifest(run: Run) -> dict[str, Any]:
    """What `lm data prepare` noted; {} where it is not there any more, or the data was made anew since."""
    try:
        folder = run.started_in() / run.settings()["data"]["path"]
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        made = {Path(shard["file"]).name: shard["size"] for shard in manifest["splits"]["train"]["shards"]}
        used = {Path(name).name: size for name, size, *_ in run.read("data.json")["train"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return manifest if made == used else {}


def _public(name: str) -> str:
    """A source without what is of this machine or secret: the folders of a file, the user and the query of a URL."""
    if "://" in name and not name.startswith("file://"):
        return re.sub(r"//[^/]*@", "//", re.split(r"[?#]", name)[0])
    return name if name.startswith("embedded:") else Path(name).name


# ---- training --------------------------------------------------------------------------------------------------------


def training_rows(model: Pretrained, run: Run) -> Rows:
    """How the model was trained: steps, batch, optimizer, hardware, operations, time, cost."""
    described, step, config = run.read("run.json"), model.step, run.settings()
    data, trainer, module = (config.get(name) or {} for name in ("data", "trainer", "model"))
    seq_len = data.get("seq_len") or model.config.max_position_embeddings
    tokens = samples_of(model.path) * seq_len
    whole = sum(shard[2] for shard in run.read("data.json").get("train", []))
    planned = run.read("state.json").get("max_steps")
    batches = [stretch["global_batch"] for stretch in described.get("stretches", []) if stretch["step"] < step]
    seconds = _seconds(run.metrics(), step)
    began_from = described.get("began_from")
    return {
        "began from": f"the weights of {Path(began_from).name}" if began_from else None,
        "steps": f"{step:,}" + (f" of {planned:,}" if planned else ""),
        "tokens": f"{tokens:,}" + (f", {tokens / whole:.2f} times the data" if whole else ""),
        "batch": f"{batches[-1] * seq_len:,} tokens: {batches[-1]:,} sequences of {seq_len:,}" if batches else None,
        **_optimizer_rows(module),
        "precision": trainer.get("precision"),
        "hardware": f"{described.get('world_size') or 1} x {described['device']}" if described.get("device") else None,
        "compute": f"{flops_per_token(model.config, seq_len) * tokens:.2e} floating-point operations: 6 a parameter "
        "and token, and those of attention",
        "time": f"{_duration(seconds)} of optimizer steps" if seconds else None,
        "cost": _cost(run.read("budget.json")),
        "seed": config.get("seed_everything"),
    }


def _optimizer_rows(module: dict[str, Any]) -> Rows:
    optimizer, schedule = module.get("optimizer") or {}, module.get("schedule") or {}
    betas = " and ".join(map(str, optimizer.get("betas", [])))
    rows: Rows = {"dropout": (module.get("decoder") or {}).get("dropout") or None}
    if optimizer:
        rows["optimizer"] = (
            f"{optimizer.get('name')}, learning rate {optimizer.get('lr')}, betas {betas}, weight decay "
            f"{optimizer.get('weight_decay')}"
        )
    if schedule:
        warmup = schedule.get("warmup_steps")
        rows["schedule"] = f"{schedule.get('name')}" + (f" after {warmup:,} steps of warm-up" if warmup else "")
    return rows


def _seconds(metrics: list[dict[str, Any]], step: int) -> float:
    """How long the optimizer steps took by the log lines, tokens over tokens a second: without validations."""
    seconds, before = 0.0, 0
    for line in metrics:
        if (rate := line.get("perf/tokens_per_second")) and line["step"] <= step:
            seconds += (line["tokens"] - before) / rate
            before = line["tokens"]
    return seconds


def _cost(budget: dict[str, Any]) -> str | None:
    spent, hours = budget.get("spent_usd"), budget.get("hours_elapsed")
    if spent is None:
        return None
    return f"{spent:.2f} USD" + ("" if hours is None else f" in {hours:.1f} hours") + ", for the whole run"


def _duration(seconds: float) -> str:
    for length, unit in ((3600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"


# ---- results ---------------------------------------------------------------------------------------------------------


def result_rows(model: Pretrained, run: Run) -> Rows:
    """The validation at this very step, and what evaluations found of it."""
    rows: Rows = {}
    labels = {"val/loss": "validation loss, nats a token", "val/perplexity": "validation perplexity",
              "val/bpb": "validation bits per byte"}  # fmt: skip
    for line in run.metrics():
        if line["step"] == model.step:
            rows |= {label: f"{line[name]:.4f}" for name, label in labels.items() if name in line}
    found = joined(run.evaluations(), model.step)
    if found is None:
        return rows
    for name, texts in found["texts"].items():
        if texts["bits_per_byte"] is not None:
            rows[f"bits per byte of {_public(name)}"] = f"{texts['bits_per_byte']:.4f}"
    for name, task in found["tasks"].items():
        low, high = task["interval"]
        rows[f"{name}, {task['num_fewshot']} shots"] = (
            f"{task['accuracy']:.1%} right (95 % interval {low:.1%} to {high:.1%}) of {task['items']:,}; guessing "
            f"gives {task['baseline']:.1%}"
        )
    if found["core"] is not None:
        rows["mean of the accuracies, each centred on guessing"] = f"{found['core']:.4f}"
    return rows

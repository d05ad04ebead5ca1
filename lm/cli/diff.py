"""`lm diff`: how two models differ in settings, weights and predictions, by the functions of `lm.inspection`."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from lm.cli.runs import to_json
from lm.data.text_files import read_documents
from lm.errors import RequestError
from lm.inference.pretrained import Pretrained, load_pretrained
from lm.inspection.weights import Change, Divergence, distribution_drift, kind_of, layer_of, weight_drift
from lm.runs import registry
from lm.runs.history import differences
from lm.runs.run import ROOT, Run
from lm.system.process import harmless
from lm.system.remote import is_remote
from lm.system.units import format_count, plural

MOST_CHANGED = 5  # weights that the page lists


def diff(
    models: list[str],
    texts: list[str] | None = None,
    device: str | None = None,
    json: bool = False,
    root: str = str(ROOT),
) -> None:
    """Show how two models of one shape and tokenizer differ: settings, weights and, on texts, predictions.

    Args:
        models: Two of: a run's name or folder, of which the best checkpoint is taken; the folder or URL of a
            checkpoint; a folder with a Hugging Face model. The second is compared with the first.
        texts: Files, folders, globs or URLs of text, on which the predictions of both are compared.
        device: Where to compute; the GPU if there is one.
        json: Print one JSON object instead of tables.
        root: Folder of the runs.
    """
    if len(models) != 2:
        raise RequestError("name two models: runs, checkpoints, or folders of Hugging Face models")
    before, after = (load_pretrained(_place(model, root), device) for model in models)
    found = compare_models(before, after, texts or [])
    if json:
        print(to_json(found))
    else:
        _print_page(found)


def _place(model: str, root: str) -> str | Path:
    known = is_remote(model) or Path(model).is_dir()
    return model if known else registry.find_run(model, root).path


def compare_models(before: Pretrained, after: Pretrained, texts: Sequence[str]) -> dict[str, Any]:
    """What `lm diff --json` prints.

    Raises:
        RequestError: the tokenizers or the shapes differ.
    """
    if before.tokenizer.sha256 != after.tokenizer.sha256:
        raise RequestError(f"{before.path} and {after.path} have different tokenizers: their rows are of other tokens")
    changes = weight_drift(before.decoder, after.decoder)
    runs = [Run.of(model.path) for model in (before, after)]
    configs = [asdict(model.config) for model in (before, after)]
    return {
        "models": [
            {"path": str(model.path), "run": run and run.name, "step": model.step}
            for model, run in zip((before, after), runs, strict=True)
        ],
        "parameters": sum(weight.numel() for weight in before.decoder.parameters()),
        "shape": configs[0],
        "settings": differences([run.settings() for run in runs] if all(runs) else [
            {"model": {"decoder": config}} for config in configs
        ]),
        "groups": [group._asdict() for group in group_changes(changes)],
        "weights": [change._asdict() for change in changes],
        "texts": summarize(distribution_drift(before, after, documents(texts))) if texts else None,
    }  # fmt: skip


def documents(texts: Sequence[str]) -> list[str]:
    """All documents of files, folders, globs or URLs."""
    return [text for _, text in read_documents(texts)]


class Group(NamedTuple):
    """How the weights of one kind have changed over the layers."""

    kind: str
    weights: int
    smallest: float  # relative change, as in `Change`
    median: float
    largest: float
    layer: int | None  # with the largest; None outside of the layers
    cosine: float  # the smallest


def group_changes(changes: Sequence[Change]) -> list[Group]:
    """The changes by kind of weight, in the order of the model."""
    kinds: dict[str, list[Change]] = {}
    for change in changes:
        kinds.setdefault(kind_of(change.name), []).append(change)
    groups = []
    for kind, same in kinds.items():
        relative, most = [change.relative for change in same], max(same, key=lambda change: change.relative)
        lowest = min(change.cosine for change in same)
        groups.append(
            Group(kind, len(same), min(relative), median(relative), max(relative), layer_of(most.name), lowest)
        )
    return groups


def summarize(found: Divergence) -> dict[str, Any]:
    """Means and quantiles over all predicted tokens; divergences in bits, as in `Divergence`."""
    each = {"kl": found.kl, "jensen_shannon": found.divergence}
    return {
        "tokens": len(found.tokens),
        "same_likeliest": float(found.agree.mean()),
        **{
            name: {"mean": float(values.mean()), "median": float(np.median(values)),
                   "quantile_95": float(np.quantile(values, 0.95)), "largest": float(values.max())}
            for name, values in each.items()
        },
        "bits_per_token": found.bits.mean(0).tolist(),
    }  # fmt: skip


# ---- the page --------------------------------------------------------------------------------------------------------


def _print_page(found: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)
    for letter, model in zip("AB", found["models"], strict=True):
        step = "" if model["step"] is None else f", step {model['step']:,}"
        console.print(f"{letter}  {harmless(model['path'])}{step}", soft_wrap=True)
    shape = found["shape"]
    console.print(f"{format_count(found['parameters'])} parameters, {shape['num_hidden_layers']} layers of "
                  f"{shape['hidden_size']}")  # fmt: skip
    _print_settings(console, found)
    _print_weights(console, found)
    if found["texts"]:
        _print_texts(console, found["texts"])


def _print_settings(console: Console, found: dict[str, Any]) -> None:
    console.print()
    if not found["settings"]:
        both = all(model["run"] for model in found["models"])
        console.print("the configs are the same" if both else "the shapes are the same")
        return
    table = _table("setting", "A", "B")
    for key, values in found["settings"].items():
        table.add_row(harmless(key), *("" if value is None else harmless(str(value)) for value in values))
    console.print(table)


def _print_weights(console: Console, found: dict[str, Any]) -> None:
    table = _table("relative change", "weights", "smallest", "median", "largest", "in layer", "smallest cosine")
    for group in found["groups"]:
        numbers = (f"{group[name]:.3g}" for name in ("smallest", "median", "largest"))
        layer = "" if group["layer"] is None else str(group["layer"])
        table.add_row(harmless(group["kind"]), str(group["weights"]), *numbers, layer, f"{group['cosine']:.4f}")
    console.print()
    console.print(table)
    most = sorted(found["weights"], key=lambda change: change["relative"], reverse=True)[:MOST_CHANGED]
    listed = ", ".join(f"{change['name']} {change['relative']:.3g}" for change in most)
    console.print(f"the most changed: {harmless(listed)}", soft_wrap=True)
    console.print("Frobenius norm of B - A over that of A; cosine of A and B as vectors; layers from 0")


def _print_texts(console: Console, found: dict[str, Any]) -> None:
    table = _table("bits", "mean", "median", "95 % below", "largest")
    for name, label in (("kl", "KL divergence of B from A"), ("jensen_shannon", "Jensen-Shannon divergence")):
        table.add_row(label, *(f"{found[name][part]:.4f}" for part in ("mean", "median", "quantile_95", "largest")))
    console.print()
    console.print(table)
    first, second = found["bits_per_token"]
    console.print(
        f"{plural(found['tokens'], 'token')}: {first:.4f} bits a token with A, {second:.4f} with B; both find the same "
        f"token the likeliest in {found['same_likeliest']:.1%}", soft_wrap=True,
    )  # fmt: skip


def _table(first: str, *names: str) -> Table:
    """A table of a name and values, without borders."""
    table = Table(first, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    return table

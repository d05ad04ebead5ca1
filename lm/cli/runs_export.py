"""`lm runs export`: a run for others: its manifest, its curves as tables and pictures, its config and its weights.

Nothing here imports torch.
"""

import csv
import json as jsonlib
import shutil
import time
from pathlib import Path
from typing import Any, Literal

from lm.cli.runs import summarize, to_json
from lm.cli.runs_compare import draw_curves
from lm.errors import LmError, RunError
from lm.runs import registry
from lm.runs.history import curve
from lm.runs.metrics import METRICS
from lm.runs.run import ROOT, Run
from lm.system.files import digest, load_checksummed, new_folder

FORMAT = 1
PICTURES = {  # file -> the metrics that it shows
    "loss.png": ("train/loss", "val/loss"),
    "grad_norm.png": ("optim/grad_norm",),
    "throughput.png": ("perf/tokens_per_second",),
}


def export(
    run: str, output: str | None = None, checkpoint: Literal["last", "best", "none"] = "last", root: str = str(ROOT)
) -> None:
    """Write a run to a folder for others: manifest, metrics, pictures, config, TensorBoard files and weights.

    Args:
        run: Name under the root or in the registry, or a path.
        output: The folder to make, which must be empty or not there; `exports/RUN` if not given.
        checkpoint: Whose weights to take; none leaves them out.
        root: Folder of the runs.
    """
    found = registry.find_run(run, root)
    target = Path("exports") / found.name if output is None else Path(output)
    with new_folder(target) as folder:
        write_export(found, None if checkpoint == "none" else found.checkpoint(checkpoint), folder)
    print(target)


def write_export(run: Run, checkpoint: Path | None, folder: Path) -> None:
    """Fill a folder with everything; the manifest, which has a digest of every other file, comes last.

    Raises:
        RunError: the weights are not those that the checkpoint was written with.
    """
    metrics = run.metrics()
    write_metrics(metrics, folder)
    draw_pictures(metrics, folder, run.name)
    if run.config.exists():
        shutil.copyfile(run.config, folder / "config.yaml")
    for events in run.path.glob("events.out.tfevents.*"):
        shutil.copy2(events, folder / events.name)
    if checkpoint is not None:
        copy_weights(checkpoint, folder / "final.safetensors")
    manifest = manifest_of(run, metrics, checkpoint)
    manifest["files"] = {path.name: digest(path) for path in sorted(folder.iterdir())}
    text = jsonlib.dumps(jsonlib.loads(to_json(manifest)), indent=2, ensure_ascii=False)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")


def manifest_of(run: Run, metrics: list[dict[str, Any]], checkpoint: Path | None) -> dict[str, Any]:
    """The manifest without its files: how the run was made, on what, at what cost, and where it ended."""
    described, facts = run.read("run.json"), registry.facts(run)
    finals = {name: summarize(metrics, name) for name in ("train/loss", "val/loss", "val/bpb")}
    return {
        "format": FORMAT,
        "run": run.name,
        "status": facts["status"], "reason": facts["reason"],
        "seed": run.settings().get("seed_everything"),
        "config_sha256": facts["config_sha256"],
        "versions": {"python": described.get("python"), **described.get("versions", {})},
        "git": described.get("git"),
        "command": described.get("command"),
        "machine": {name: described.get(name) for name in ("host", "device", "world_size")},
        "cost": run.read("budget.json") or None,
        "started": facts["started"],
        "last_logged": _utc(metrics[-1]["time"]) if metrics else None,
        "exported": _utc(time.time()),
        "steps": facts["step"],
        "tokens": facts["tokens"],
        "final": {
            name: {"last": curve["last"], "lowest": curve["lowest"], "lowest_step": curve["lowest_step"]}
            for name, curve in finals.items() if curve
        },
        "checkpoint": None if checkpoint is None else {
            "step": int(checkpoint.name.removeprefix("step-")), "sha256": weights_digest(checkpoint)
        },
    }  # fmt: skip


def write_metrics(metrics: list[dict[str, Any]], folder: Path) -> None:
    """Write `metrics.csv` and `metrics.parquet`: one row a step and name, by step; numbers are exact in both."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    values: dict[tuple[int, str], float] = {}
    for line in metrics:
        for name, value in line.items():
            if name != "step":
                values[line["step"], {"tokens": "data/tokens"}.get(name, name)] = float(value)
    rows = sorted((step, name, value) for (step, name), value in values.items())
    with open(folder / "metrics.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("step", "name", "value"))
        writer.writerows((step, name, repr(value)) for step, name, value in rows)
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    schema = pa.schema({"step": pa.int64(), "name": pa.string(), "value": pa.float64()})
    pq.write_table(pa.table([list(column) for column in columns], schema=schema), folder / "metrics.parquet")


def draw_pictures(metrics: list[dict[str, Any]], folder: Path, title: str) -> None:
    """Draw the `PICTURES` that there are values for."""
    for file, names in PICTURES.items():
        series = [curve(METRICS[name].label, metrics, name, "step") for name in names]
        series = [one for one in series if one.x]
        if series:
            draw_curves(folder / file, series, "optimizer step", METRICS[names[0]].unit, title)


def copy_weights(checkpoint: Path, target: Path) -> None:
    """Copy the checkpoint's weights, byte for byte.

    Raises:
        RunError: they are damaged, or the copy is.
    """
    shutil.copyfile(checkpoint / "model.safetensors", target)
    if digest(target) != weights_digest(checkpoint):
        raise RunError(f"{checkpoint / 'model.safetensors'} is damaged: its digest is not the one that was written")


def weights_digest(checkpoint: Path) -> str:
    """The digest of the weights that a checkpoint was written with.

    Raises:
        LmError: its trainer.json is damaged.
    """
    try:
        return load_checksummed((checkpoint / "trainer.json").read_bytes())["digests"]["model.safetensors"]
    except (ValueError, KeyError, TypeError) as error:
        raise LmError(f"{checkpoint / 'trainer.json'} is damaged; choose another with --checkpoint") from error


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))

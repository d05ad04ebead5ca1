"""`lm runs export`: a run for others: what it was made of, its curves as tables and pictures, and its weights.

The folder is complete or absent: it is made beside its place and renamed at the end. No torch is needed to read it.
"""

import csv
import hashlib
import json as jsonlib
import os
import shutil
import time
from pathlib import Path
from typing import Any, Literal

from lm import registry
from lm.commands.run_page import summarize
from lm.commands.runs import to_json
from lm.errors import LmError, RequestError, RunError
from lm.inspection.curves import Series, curve
from lm.runs import ROOT, Run
from lm.sealed import unseal

FORMAT = 1
PICTURES = {  # file -> label of the y axis, and the metrics that are drawn
    "loss.png": ("loss (nats a token)", {"training": "train/loss", "validation": "val/loss"}),
    "grad_norm.png": ("gradient norm", {"gradient norm": "optim/grad_norm"}),
    "throughput.png": ("tokens a second", {"tokens a second": "perf/tokens_per_second"}),
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
    folder = registry.find(run, root)
    target = Path("exports") / folder.name if output is None else Path(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RequestError(f"--output {target} is there already and not an empty folder; choose another")
    source = None if checkpoint == "none" else folder.checkpoint(checkpoint)
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        write(folder, source, temporary)
        os.rename(temporary, target)
    except OSError as error:
        raise RunError(f"could not write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(target)


def write(run: Run, checkpoint: Path | None, folder: Path) -> None:
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
    manifest = describe(run, metrics, checkpoint)
    manifest["files"] = {path.name: digest(path) for path in sorted(folder.iterdir())}
    text = jsonlib.dumps(jsonlib.loads(to_json(manifest)), indent=2, ensure_ascii=False)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")


def describe(run: Run, metrics: list[dict[str, Any]], checkpoint: Path | None) -> dict[str, Any]:
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


# ---- the files -------------------------------------------------------------------------------------------------------


def write_metrics(metrics: list[dict[str, Any]], folder: Path) -> None:
    """`metrics.csv` and `metrics.parquet`: one row a step and name, by step; numbers are exact in both."""
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
    """`PICTURES`, those of them that there are values for."""
    from lm.commands.pictures import draw

    for file, (label, names) in PICTURES.items():
        series: list[Series] = [curve(called, metrics, name, "step") for called, name in names.items()]
        series = [one for one in series if one.x]
        if series:
            draw(folder / file, series, "optimizer step", label, title)


def copy_weights(checkpoint: Path, target: Path) -> None:
    """The checkpoint's weights, byte for byte.

    Raises:
        RunError: they are damaged, or the copy is.
    """
    shutil.copyfile(checkpoint / "model.safetensors", target)
    if digest(target) != weights_digest(checkpoint):
        raise RunError(f"{checkpoint / 'model.safetensors'} is damaged: its digest is not the one that was written")


def weights_digest(checkpoint: Path) -> str:
    """The digest that a checkpoint was written with.

    Raises:
        LmError: it says none.
    """
    try:
        return unseal((checkpoint / "trainer.json").read_bytes())["digests"]["model.safetensors"]
    except (ValueError, KeyError, TypeError) as error:
        raise LmError(f"{checkpoint / 'trainer.json'} is damaged; choose another with --checkpoint") from error


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))

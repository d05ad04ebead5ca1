"""The results of a ladder: losses by size, the scaling law fitted to them over FLOPs, and predictions.

They are a dictionary (`ladder.json`), tables in the terminal and a page (`ladder.html`). Nothing here imports torch.
"""

import base64
import io
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from lm.cli.charts import plain_table
from lm.cli.report.page import render
from lm.runs import scaling_laws
from lm.runs.compute_multiplier import MIN_MULTIPLIER, Compared, Multipliers, compute_multipliers
from lm.runs.history import last_value
from lm.runs.run import Run
from lm.system.units import format_count, plural

HALF, AGAINST = "half", "against"  # recipes compared with the ladder's own, see `LadderRun.recipe`


class ModelSize(NamedTuple):
    """The size of a model of a ladder, and the length of its training."""

    depth: int
    parameters: int  # outside the embedding
    tokens: int
    flops: float  # of the run
    held_out: bool  # not used to fit the law


@dataclass(frozen=True)
class LadderRun:
    """One run of a ladder, which may not have begun."""

    size: ModelSize
    seed: int
    run: Run
    settings: dict[str, Any] = field(default_factory=dict)  # all options
    plan: dict[str, Any] = field(default_factory=dict)  # the facts of `lm plan`
    recipe: str = ""  # "": the ladder's own; HALF: the same at half the length; AGAINST: the one compared with it

    @property
    def file(self) -> Path:  # of the config
        return self.run.path.with_name(f"{self.run.name}.yaml")

    @property
    def log(self) -> Path:  # what it printed
        return self.run.path.with_name(f"{self.run.name}.log")

    @property
    def finished(self) -> bool:
        return self.run.status() == "finished"


def report(name: str, command: str, ladder_runs: Sequence[LadderRun], against: str | None = None) -> dict[str, Any]:
    """The results of the finished runs of a ladder, in the format of `ladder.json`."""
    ends = [last_losses(one.run) if one.finished else {} for one in ladder_runs]
    known = [end for end in ends if end]
    in_bits = all("val/bpb" in end for end in known)
    metric = "val/bpb" if in_bits else "val/loss"
    losses = [end.get(metric) for end in ends]
    results: dict[str, Any] = {
        "name": name,
        "command": command,
        "written": time.time(),
        "unit": "bits per byte" if in_bits else "nats a token",
        "runs": [describe_run(one, loss) for one, loss in zip(ladder_runs, losses, strict=True)],
        "sizes": describe_sizes(ladder_runs, losses),
        "laws": [],
        "predictions": [],
        "notes": [],
    }
    add_laws(results)
    if against is not None:
        results["against"] = {"recipe": against, **comparison(ladder_runs, losses)}
    if known and not any(size["seeds"] > 1 for size in results["sizes"]):
        results["notes"].append(
            "One seed: the noise between runs is not known, and fewer than five sizes have no interval; --seeds 3 "
            "trains the others too."
        )
    return results


def describe_run(one: LadderRun, loss: float | None) -> dict[str, Any]:
    status = one.run.status() if (one.run.path / "run.json").exists() else "to do"
    about = {"run": one.run.name, **one.size._asdict(), "recipe": one.recipe, "seed": one.seed}
    return {**about, "loss": loss, "status": status}


def describe_sizes(
    ladder_runs: Sequence[LadderRun], losses: Sequence[float | None], recipe: str = ""
) -> list[dict[str, Any]]:
    """The sizes of a recipe with the final losses of their runs by seed, which are none where no run has finished."""
    by_size: dict[ModelSize, list[float]] = {}
    for one, loss in zip(ladder_runs, losses, strict=True):
        if one.recipe == recipe:
            by_size.setdefault(one.size, []).extend([] if loss is None else [loss])
    sizes = []
    for size, known in by_size.items():
        mean = fmean(known) if known else None
        stderr = stdev(known) / len(known) ** 0.5 if len(known) > 1 else None
        sizes.append({**size._asdict(), "losses": known, "seeds": len(known), "mean": mean, "stderr": stderr})
    return sizes


def last_losses(run: Run) -> dict[str, float]:
    """The last finite `val/loss` (nats per token) and `val/bpb` (bits per byte, if the texts are known) of a run."""
    last = {name: last_value(run, name) for name in ("val/loss", "val/bpb")}
    return {name: value for name, value in last.items() if value is not None and math.isfinite(value)}


# ---- laws and predictions --------------------------------------------------------------------------------------------


def add_laws(results: dict[str, Any]) -> None:
    """Fit the loss as a function of FLOPs, predict the held-out sizes, and add both to the results."""
    fitted = [size for size in results["sizes"] if size["losses"] and not size["held_out"]]
    targets = [size for size in results["sizes"] if size["held_out"]]
    if len(fitted) < scaling_laws.MIN_SIZES:
        sizes = plural(len(fitted), "size")
        results["notes"].append(f"{sizes} finished; a scaling law needs {scaling_laws.MIN_SIZES}, so none is fitted.")
        return
    losses = [size["losses"] for size in fitted]
    x, beyond = ([float(size["flops"]) for size in sizes] for sizes in (fitted, targets))
    fit = scaling_laws.fit_sizes(x, losses)
    if fit.laws[0](max(x)) >= fit.laws[0](min(x)):
        results["notes"].append("The loss does not fall with FLOPs: no law is fitted.")
        return
    predicted, largest = scaling_laws.backtest(x, losses)
    curve = np.geomspace(min(x + beyond), max(x + beyond), 60).tolist()
    law = {
        "of": "operations",
        "laws": [law.formula() for law in fit.laws],
        "parameters": [list(map(float, vars(law).values())) for law in fit.laws],
        "backtest": {"depth": fitted[x.index(max(x))]["depth"], "predicted": predicted, "measured": largest},
        "curve": [[flops, *fit.predict(flops)[:3]] for flops in curve],
    }
    results["laws"].append(law)
    for size, flops in zip(targets, beyond, strict=True):
        predicted, mean = fit.predict(flops), size["mean"]
        prediction = {"depth": size["depth"], "of": "operations", **predicted._asdict(), "measured": mean}
        prediction |= {"times_largest": flops / max(x), "range": max(x) / min(x), "error": None, "within": None}
        if mean is not None:
            prediction["error"] = predicted.loss / mean - 1
            if predicted.low is not None and predicted.high is not None:
                prediction["within"] = predicted.low <= mean <= predicted.high
        results["predictions"].append(prediction)


# ---- another recipe --------------------------------------------------------------------------------------------------


def comparison(ladder_runs: Sequence[LadderRun], losses: Sequence[float | None]) -> dict[str, Any]:
    """The compute multiplier of the other recipe at each size, in tokens and in seconds, and a verdict in words."""
    own, *others = (describe_sizes(ladder_runs, losses, recipe) for recipe in ("", HALF, AGAINST))
    halves, changed = ({size["depth"]: size for size in sizes} for sizes in others)
    trios = [(halves[size["depth"]], size, changed[size["depth"]]) for size in own if not size["held_out"]]
    multipliers = compute_multipliers(
        [
            Compared(half["losses"], full["losses"], other["losses"], full["tokens"] / half["tokens"], full["flops"])
            for half, full, other in trios
        ]
    )
    sizes = []
    for (half, full, other), multiplier in zip(trios, multipliers.sizes, strict=True):
        rate, other_rate = (tokens_per_second(ladder_runs, recipe, full["depth"]) for recipe in ("", AGAINST))
        faster = full["tokens"] / rate / (other["tokens"] / other_rate) if rate and other_rate else None
        size = {"depth": full["depth"], "flops": full["flops"]}
        size |= {"half": half["losses"], "whole": full["losses"], "other": other["losses"]}
        size |= {"tokens": multiplier and multiplier._asdict()}
        sizes.append(size | {"in_seconds": multiplier and faster and multiplier.value * faster})
    return {
        "sizes": sizes,
        "mean": multipliers.mean and multipliers.mean._asdict(),
        "seeds_needed": multipliers.seeds_needed,
        "trend": multipliers.trend and multipliers.trend._asdict(),
        "verdict": verdict(multipliers),
    }


def tokens_per_second(ladder_runs: Sequence[LadderRun], recipe: str, depth: int) -> float | None:
    """The median throughput of a recipe's finished runs of one depth; None if there are none."""
    metric, rates = "perf/tokens_per_second", []
    for one in ladder_runs:
        if one.recipe == recipe and one.size.depth == depth and one.finished:
            rates += [line[metric] for line in one.run.metrics(metric)]
    return median(rates) if rates else None


def verdict(multipliers: Multipliers) -> str:
    """Whether the other recipe is better, in one sentence."""
    mean = multipliers.mean
    if mean is None:
        return (
            "Nothing can be told: where all runs of a size are finished, the ladder's recipe gains nothing from its "
            "second half."
        )
    told = f"the ladder's recipe needs {mean.value:.2f} times its tokens to reach the other one's loss"
    if mean.low is None or mean.high is None:
        return f"Nothing can be told from one seed: {told}, but noise may be all of it. Give --seeds 3."
    if mean.low <= 1 <= mean.high:
        seeds = plural(multipliers.seeds_needed, "seed")
        more = f"to tell a difference of {MIN_MULTIPLIER - 1:.0%} takes about {seeds}"
        return f"Not distinguishable: {told} ({mean.low:.2f} to {mean.high:.2f}); {more}."
    return f"The other recipe is {'better' if mean.low > 1 else 'worse'}: {told} ({mean.low:.2f} to {mean.high:.2f})."


# ---- words -----------------------------------------------------------------------------------------------------------


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def size_rows(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    heads = ["depth", "non-embedding", "tokens", "FLOPs", results["unit"], "seeds", "std. error"]
    rows = []
    for size in results["sizes"]:
        if not size["losses"]:
            continue
        depth = f"{size['depth']} (not fitted)" if size["held_out"] else str(size["depth"])
        counts = [format_count(float(size[name])) for name in ("parameters", "tokens")]
        losses = [f"{size['mean']:.4f}", str(size["seeds"]), _number(size["stderr"], ".2g")]
        rows.append([depth, *counts, f"{size['flops']:.2e}", *losses])
    return heads, rows


def comparison_rows(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    unit = results["unit"]
    heads = ["depth", f"{unit} at half length", "at full length", "other recipe", "token multiplier", "95 % interval"]
    rows = []
    for size in results.get("against", {}).get("sizes", []):
        losses = [f"{fmean(size[name]):.4f}" if size[name] else "" for name in ("half", "whole", "other")]
        times = size["tokens"] or {"value": None, "low": None}
        interval = "" if times["low"] is None else f"{times['low']:.2f} to {times['high']:.2f}"
        numbers = [_number(times["value"], ".2f"), interval, _number(size["in_seconds"], ".2f")]
        rows.append([str(size["depth"]), *losses, *numbers])
    return [*heads, "time multiplier"], rows


def compared_remarks(against: dict[str, Any] | None) -> Iterable[str]:
    """Sentences: the verdict on the recipe of `--against`, and how the multiplier changes with size."""
    if against is None:
        return
    yield f"Against {against['recipe'] or 'itself'}: {against['verdict']}"
    trend = against["trend"]
    if trend is not None and trend["low"] is not None:
        interval = f"{trend['low']:.2f} to {trend['high']:.2f}"
        yield f"With ten times the FLOPs the multiplier becomes {trend['value']:.2f} times as large ({interval})."


def prediction_rows(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    heads = ["depth", "predicted", "95 % interval", "measured", "error"]
    rows = []
    for one in results["predictions"]:
        interval = "not known" if one["low"] is None else f"{one['low']:.4f} to {one['high']:.4f}"
        outside = ", outside the interval" if one["within"] is False else ""
        measured = [_number(one["measured"], ".4f"), _number(one["error"], "+.2%") + outside]
        rows.append([str(one["depth"]), f"{one['loss']:.4f}", interval, *measured])
    return heads, rows


def remarks(results: dict[str, Any]) -> list[str]:
    """Sentences on how far to trust the predictions, and on missing results."""
    without_loss = [run for run in results["runs"] if run["loss"] is None and not run["held_out"]]
    diverged = [run["run"] for run in without_loss if run["status"] == "finished"]
    missing = [run["run"] for run in without_loss if run["status"] != "finished"]
    return [
        *compared_remarks(results.get("against")),
        *trust(results),
        *([f"Not finished: {', '.join(missing)}."] if missing else []),
        *([f"Without a finite loss at the end: {', '.join(diverged)}."] if diverged else []),
        *results["notes"],
    ]


def trust(results: dict[str, Any]) -> Iterable[str]:
    """Sentences on the backtest (the smaller sizes predict the largest) and on how far predictions extrapolate."""
    for law in results["laws"]:
        depth, predicted, measured = (law["backtest"][name] for name in ("depth", "predicted", "measured"))
        result = f"measured is {measured:.4f} ({predicted / measured - 1:+.2%})"
        yield f"The smaller sizes alone predict {predicted:.4f} for depth {depth}; {result}."
    for one in results["predictions"]:
        if one["times_largest"] > 1:
            far = "far; the form of the law decides more than the measurements"
            yield (
                f"Depth {one['depth']} takes {one['times_largest']:.3g} times the FLOPs of the largest size, and the "
                f"sizes differ by a factor of {one['range']:.3g}: "
                f"{far if one['distance'] > scaling_laws.FAR else 'not far'}."
            )


def print_report(console: Console, results: dict[str, Any]) -> None:
    for heads, rows in (size_rows(results), prediction_rows(results), comparison_rows(results)):
        if rows:
            console.print()
            console.print(plain_table(heads, "n" * len(heads), rows))
    console.print()
    for remark in remarks(results):
        console.print(remark, soft_wrap=True)


def page(results: dict[str, Any]) -> str:
    runs = results["runs"]
    return render(
        "ladder.html",
        kind="ladder",
        found=results,
        remarks=remarks(results),
        pictures=pictures(results),
        run_rows=[[run["run"], run["seed"], run["status"], _number(run["loss"], ".4f")] for run in runs],
        law_rows=[[text] for law in results["laws"] for text in law["laws"]],
        predictions=prediction_rows(results),
        compared=comparison_rows(results),
        sizes=size_rows(results),
    )


def pictures(results: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """The chart of the law, if there is one, as a title and an SVG in base64."""
    from lm.inspection.drawing import BLUE, figure, label_axes  # matplotlib takes half a second

    for law in results["laws"]:
        drawn, axes = figure()
        flops, middle, low, high = zip(*law["curve"], strict=True)
        axes.plot(flops, middle, color=BLUE, linewidth=1.4)
        if low[0] is not None:
            axes.fill_between(flops, low, high, color=BLUE, alpha=0.2, linewidth=0)
        for size in (size for size in results["sizes"] if size["losses"]):
            marker, fill = ("D", "none") if size["held_out"] else ("o", "full")
            x = [size["flops"]] * len(size["losses"])
            axes.plot(x, size["losses"], marker, color=BLUE, markersize=5, fillstyle=fill)
            place = size["flops"], max(size["losses"])
            axes.annotate(str(size["depth"]), place, (0, 6), textcoords="offset points", ha="center", fontsize=8)
        for one in results["predictions"]:
            size = next(size for size in results["sizes"] if size["depth"] == one["depth"])
            ends = None if one["low"] is None else [[one["loss"] - one["low"]], [one["high"] - one["loss"]]]
            axes.errorbar([size["flops"]], [one["loss"]], ends, fmt="x", color=BLUE, capsize=3)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter("{x:.3g}")
        title = "loss by FLOPs; numbers are depths, x is predicted, open marks are not fitted"
        label_axes(axes, title, "FLOPs", results["unit"])
        file = io.BytesIO()
        drawn.savefig(file, format="svg")
        yield "loss by FLOPs", base64.b64encode(file.getvalue()).decode()

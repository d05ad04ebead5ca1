"""The results of a ladder: losses by size, the scaling law fitted to them over operations, and predictions.

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

HALF, AGAINST = "half", "against"  # recipes compared with the ladder's own, see `Training.recipe`


class ModelSize(NamedTuple):
    """The size of a model of a ladder, and the length of its training."""

    depth: int
    parameters: int  # outside the embedding
    tokens: int
    flops: float  # floating-point operations of the run
    held_out: bool  # not used to fit the law


@dataclass(frozen=True)
class Training:
    """One run of a ladder, which may not have begun."""

    size: ModelSize
    seed: int
    run: Run
    config: str = ""  # YAML with all options
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


class Measured(NamedTuple):
    """A size and the final losses of its trainings."""

    size: ModelSize
    losses: list[float]  # by seed; empty where no training has finished


def report(name: str, command: str, trainings: Sequence[Training], against: str | None = None) -> dict[str, Any]:
    """The results of the finished trainings of a ladder, in the format of `ladder.json`."""
    ends = [last_losses(one.run) if one.finished else {} for one in trainings]
    known = [end for end in ends if end]
    bits = all("val/bpb" in end for end in known)
    metric, unit = ("val/bpb", "bits per byte") if bits else ("val/loss", "nats a token")
    ended = [(one, end.get(metric)) for one, end in zip(trainings, ends, strict=True)]
    by_recipe: dict[str, dict[int, Measured]] = {"": {}, HALF: {}, AGAINST: {}}  # by depth
    for one, loss in ended:
        size = by_recipe[one.recipe].setdefault(one.size.depth, Measured(one.size, []))
        size.losses.extend([] if loss is None else [loss])
    measured = list(by_recipe[""].values())
    found: dict[str, Any] = {
        "name": name, "command": command, "written": time.time(), "unit": unit,
        "runs": [
            {"run": one.run.name, **one.size._asdict(), "recipe": one.recipe, "seed": one.seed, "loss": loss,
             "status": one.run.status() if (one.run.path / "run.json").exists() else "to do"}
            for one, loss in ended
        ],
        "sizes": [
            {**one.size._asdict(), "losses": one.losses, "seeds": len(one.losses),
             "mean": fmean(one.losses) if one.losses else None,
             "stderr": stdev(one.losses) / len(one.losses) ** 0.5 if len(one.losses) > 1 else None}
            for one in measured
        ],
        "laws": [], "predictions": [], "notes": [],
    }  # fmt: skip
    add_laws(found, measured)
    if against is not None:
        found["against"] = {"recipe": against, **comparison(by_recipe, trainings)}
    if known and not any(len(one.losses) > 1 for one in measured):
        found["notes"].append("One seed: the noise between trainings is not known, and fewer than five sizes have no "
                              "interval; --seeds 3 trains the others too.")  # fmt: skip
    return found


def last_losses(run: Run) -> dict[str, float]:
    """The last finite `val/loss` (nats per token) and `val/bpb` (bits per byte, if the texts are known) of a run."""
    last = {name: last_value(run, name) for name in ("val/loss", "val/bpb")}
    return {name: value for name, value in last.items() if value is not None and math.isfinite(value)}


# ---- laws and predictions --------------------------------------------------------------------------------------------


def add_laws(found: dict[str, Any], measured: Sequence[Measured]) -> None:
    """Fit the loss as a function of operations, predict the held-out sizes, and add both to the report `found`."""
    fitted = [one for one in measured if one.losses and not one.size.held_out]
    targets = [one for one in measured if one.size.held_out]
    if len(fitted) < scaling_laws.MIN_SIZES:
        found["notes"].append(f"{plural(len(fitted), 'size')} finished, and a law takes {scaling_laws.MIN_SIZES}: "
                              "nothing is fitted.")  # fmt: skip
        return
    losses = [one.losses for one in fitted]
    x, beyond = ([float(one.size.flops) for one in some] for some in (fitted, targets))
    fit = scaling_laws.fit_sizes(x, losses)
    if fit.laws[0](max(x)) >= fit.laws[0](min(x)):
        found["notes"].append("The loss does not fall with operations: no law is fitted.")
        return
    predicted, largest = scaling_laws.backtest(x, losses)
    curve = np.geomspace(min(x + beyond), max(x + beyond), 60).tolist()
    found["laws"].append({
        "of": "operations", "laws": [law.formula("operations") for law in fit.laws],
        "parameters": [list(map(float, vars(law).values())) for law in fit.laws],
        "backtest": {"depth": fitted[x.index(max(x))].size.depth, "predicted": predicted, "measured": largest},
        "curve": [[at, *fit.predict(at)[:3]] for at in curve],
    })  # fmt: skip
    for one, at in zip(targets, beyond, strict=True):
        prediction, mean = fit.predict(at), fmean(one.losses) if one.losses else None
        low, high = prediction.low, prediction.high
        found["predictions"].append({
            "depth": one.size.depth, "of": "operations", **prediction._asdict(),
            "times_largest": at / max(x), "range": max(x) / min(x), "measured": mean,
            "error": None if mean is None else prediction.loss / mean - 1,
            "within": None if mean is None or low is None or high is None else low <= mean <= high,
        })  # fmt: skip


# ---- another recipe --------------------------------------------------------------------------------------------------


def comparison(measured: dict[str, dict[int, Measured]], trainings: Sequence[Training]) -> dict[str, Any]:
    """The compute multiplier of the other recipe at each size, in tokens and in seconds, and a verdict in words."""
    depths = [depth for depth, one in measured[""].items() if not one.size.held_out]
    half, whole, other = ([measured[recipe][depth] for depth in depths] for recipe in (HALF, "", AGAINST))
    found = compute_multipliers([
        Compared(a.losses, b.losses, c.losses, b.size.tokens / a.size.tokens, b.size.flops)
        for a, b, c in zip(half, whole, other, strict=True)
    ])  # fmt: skip
    sizes = []
    for a, b, c, each in zip(half, whole, other, found.sizes, strict=True):
        rate, of_other = (tokens_per_second(trainings, recipe, b.size.depth) for recipe in ("", AGAINST))
        faster = b.size.tokens / rate / (c.size.tokens / of_other) if rate and of_other else None
        sizes.append({
            "depth": b.size.depth, "flops": b.size.flops, "half": a.losses, "whole": b.losses, "other": c.losses,
            "tokens": each and each._asdict(), "in_seconds": each and faster and each.value * faster,
        })  # fmt: skip
    return {"sizes": sizes, "mean": found.mean and found.mean._asdict(), "seeds_needed": found.seeds_needed,
            "trend": found.trend and found.trend._asdict(), "verdict": verdict(found)}  # fmt: skip


def tokens_per_second(trainings: Sequence[Training], recipe: str, depth: int) -> float | None:
    """The median throughput of a recipe's finished trainings of one depth; None if there are none."""
    metric = "perf/tokens_per_second"
    rates = [line[metric] for one in trainings if one.recipe == recipe and one.size.depth == depth
             for line in (one.run.metrics(metric) if one.finished else ())]  # fmt: skip
    return median(rates) if rates else None


def verdict(found: Multipliers) -> str:
    """Whether the other recipe is better, in one sentence."""
    mean = found.mean
    if mean is None:
        return ("Nothing can be told: where all trainings of a size are finished, the ladder's recipe gains nothing "
                "from its second half.")  # fmt: skip
    told = f"the ladder's recipe needs {mean.value:.2f} times its tokens to reach the other one's loss"
    if mean.low is None or mean.high is None:
        return f"Nothing can be told from one seed: {told}, but noise may be all of it. Give --seeds 3."
    if mean.low <= 1 <= mean.high:
        more = f"to tell a difference of {MIN_MULTIPLIER - 1:.0%} takes about {plural(found.seeds_needed, 'seed')}"
        return f"Not distinguishable: {told} ({mean.low:.2f} to {mean.high:.2f}); {more}."
    return f"The other recipe is {'better' if mean.low > 1 else 'worse'}: {told} ({mean.low:.2f} to {mean.high:.2f})."


# ---- words -----------------------------------------------------------------------------------------------------------


def size_rows(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    several = any(size["seeds"] > 1 for size in found["sizes"])
    heads = ["depth", "non-embedding", "tokens", "operations", found["unit"], "seeds"]
    heads += ["std. error"] * several
    rows = []
    for size in found["sizes"]:
        if not size["losses"]:
            continue
        row = [f"{size['depth']}{' (not fitted)' * size['held_out']}"]
        row += [format_count(float(size["parameters"])), format_count(float(size["tokens"])), f"{size['flops']:.2e}"]
        row += [f"{size['mean']:.4f}", str(size["seeds"])]
        row += [f"{size['stderr']:.2g}" if size["stderr"] is not None else ""] if several else []
        rows.append(row)
    return heads, rows


def comparison_rows(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    heads = ["depth", f"half, {found['unit']}", "whole", "other", "times the tokens", "95 % interval",
             "times the seconds"]  # fmt: skip
    rows = []
    for size in found.get("against", {}).get("sizes", []):
        losses = [f"{fmean(size[name]):.4f}" if size[name] else "" for name in ("half", "whole", "other")]
        times, seconds = size["tokens"], size["in_seconds"]
        interval = "" if times is None or times["low"] is None else f"{times['low']:.2f} to {times['high']:.2f}"
        rows.append([str(size["depth"]), *losses, "" if times is None else f"{times['value']:.2f}", interval,
                     "" if seconds is None else f"{seconds:.2f}"])  # fmt: skip
    return heads, rows


def compared_remarks(against: dict[str, Any] | None) -> Iterable[str]:
    """Sentences: the verdict on the recipe of `--against`, and how the multiplier changes with size."""
    if against is None:
        return
    yield f"Against {against['recipe'] or 'itself'}: {against['verdict']}"
    trend = against["trend"]
    if trend is not None and trend["low"] is not None:
        yield (f"With ten times the operations the multiplier becomes {trend['value']:.2f} times as large "
               f"({trend['low']:.2f} to {trend['high']:.2f}).")  # fmt: skip


def prediction_rows(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    heads = ["depth", "predicted", "95 % interval", "measured", "error"]
    rows = []
    for one in found["predictions"]:
        interval = "not known" if one["low"] is None else f"{one['low']:.4f} to {one['high']:.4f}"
        outside = ", outside the interval" * (one["within"] is False)
        known = one["measured"] is not None
        measured = [f"{one['measured']:.4f}", f"{one['error']:+.2%}{outside}"] if known else ["", ""]
        rows.append([str(one["depth"]), f"{one['loss']:.4f}", interval, *measured])
    return heads, rows


def remarks(found: dict[str, Any]) -> list[str]:
    """Sentences on how far to trust the predictions, and on missing results."""
    without = [run for run in found["runs"] if run["loss"] is None and not run["held_out"]]
    diverged = [run["run"] for run in without if run["status"] == "finished"]
    missing = [run["run"] for run in without if run["status"] != "finished"]
    return [
        *compared_remarks(found.get("against")),
        *trust(found),
        *([f"Not finished: {', '.join(missing)}."] if missing else []),
        *([f"Without a finite loss at the end: {', '.join(diverged)}."] if diverged else []),
        *found["notes"],
    ]  # fmt: skip


def trust(found: dict[str, Any]) -> Iterable[str]:
    """Sentences on the backtest (the smaller sizes predict the largest) and on how far predictions extrapolate."""
    for law in found["laws"]:
        back = law["backtest"]
        yield (f"The smaller sizes alone predict {back['predicted']:.4f} for depth {back['depth']}; measured is "
               f"{back['measured']:.4f} ({back['predicted'] / back['measured'] - 1:+.2%}).")  # fmt: skip
    for one in found["predictions"]:
        if one["times_largest"] > 1:
            far = one["distance"] > scaling_laws.FAR
            yield (
                f"Depth {one['depth']} takes {one['times_largest']:.3g} times the operations of the largest size, "
                f"and the sizes differ by a factor of {one['range']:.3g}: "
                + ("far; the form of the law decides more than the measurements." if far else "not far.")
            )


def print_report(console: Console, found: dict[str, Any]) -> None:
    for heads, rows in (size_rows(found), prediction_rows(found), comparison_rows(found)):
        if rows:
            console.print()
            console.print(plain_table(heads, "n" * len(heads), rows))
    console.print()
    for remark in remarks(found):
        console.print(remark, soft_wrap=True)


# ---- the page --------------------------------------------------------------------------------------------------------


def page(found: dict[str, Any]) -> str:
    runs = [[run["run"], run["seed"], run["status"], "" if run["loss"] is None else f"{run['loss']:.4f}"]
            for run in found["runs"]]  # fmt: skip
    return render(
        "ladder.html", kind="ladder", found=found, remarks=remarks(found), pictures=pictures(found), run_rows=runs,
        law_rows=[[text] for law in found["laws"] for text in law["laws"]],
        predictions=prediction_rows(found), compared=comparison_rows(found), sizes=size_rows(found),
    )  # fmt: skip


def pictures(found: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """The chart of the law, if there is one, as a title and an SVG in base64."""
    from lm.inspection.drawing import BLUE, figure, label_axes  # matplotlib takes half a second

    for law in found["laws"]:
        drawn, axes = figure()
        at, middle, low, high = zip(*law["curve"], strict=True)
        axes.plot(at, middle, color=BLUE, linewidth=1.4)
        if low[0] is not None:
            axes.fill_between(at, low, high, color=BLUE, alpha=0.2, linewidth=0)
        for size in (size for size in found["sizes"] if size["losses"]):
            axes.plot([size["flops"]] * len(size["losses"]), size["losses"], "D" if size["held_out"] else "o",
                      color=BLUE, markersize=5, fillstyle="none" if size["held_out"] else "full")  # fmt: skip
            place = size["flops"], max(size["losses"])
            axes.annotate(str(size["depth"]), place, (0, 6), textcoords="offset points", ha="center", fontsize=8)
        for one in found["predictions"]:
            size = next(size for size in found["sizes"] if size["depth"] == one["depth"])
            ends = None if one["low"] is None else [[one["loss"] - one["low"]], [one["high"] - one["loss"]]]
            axes.errorbar([size["flops"]], [one["loss"]], ends, fmt="x", color=BLUE, capsize=3)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter("{x:.3g}")
        label_axes(axes, "loss by operations; numbers are depths, x is predicted, open marks are not fitted",
                   "operations", found["unit"])  # fmt: skip
        file = io.BytesIO()
        drawn.savefig(file, format="svg")
        yield "loss by operations", base64.b64encode(file.getvalue()).decode()

"""The folder `postmortem-<step>/` of a run: what is known of a moment when something went wrong.

| file | what |
|---|---|
| `postmortem.md` | the page, with two sections for a person to finish |
| `postmortem.json` | what is needed to close it, also by another process after a resume |
| `samples.txt` | every sample of the step as text, the worst first |
| `tokens.json` | the loss of each token of the worst samples |
| `norms.json` | norms inside the network, of the worst micro-batch and of an ordinary one |
| `loss.png`, `grad_norm.png` | the curves before, and when it is closed, after |

`callbacks/post_mortem` says when, `evidence` gathers what stands here, `post_mortem_page` puts it into words. Neither
page nor folder needs torch.
"""

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lm.incident import Evidence, Moment
from lm.post_mortem_page import page, utc
from lm.runs import Run, write_atomically

PICTURES = {"loss.png": ("train/loss", "loss", 1), "grad_norm.png": ("optim/grad_norm", "gradient norm", 2)}
OPEN = "Open: to be filled in when the loss is back where it was before, or when the run has ended without that."


def folder_of(run: Run, step: int) -> Path:
    """Where the post-mortem of a step is."""
    return run.path / f"postmortem-{step:08d}"


def all_of(run: Run) -> list[Path]:
    """The post-mortems of a run, by step."""
    return sorted(run.path.glob("postmortem-*"))


def steps_of(run: Run) -> list[int]:
    """The steps that have a post-mortem."""
    return [int(path.name.removeprefix("postmortem-")) for path in all_of(run)]


def still_open(run: Run) -> Moment | None:
    """The newest moment that was not closed."""
    moments = [facts for path in all_of(run) if (facts := Run(path).read("postmortem.json"))]
    return next((Moment(**facts) for facts in reversed(moments) if facts["closed"] is None), None)


def write(run: Run, moment: Moment, evidence: Evidence) -> Path:
    """Make the folder."""
    folder = folder_of(run, moment.step)
    folder.mkdir(exist_ok=True)
    _write_json(folder / "postmortem.json", asdict(moment))
    if evidence.samples:
        write_atomically(folder / "samples.txt", _as_text(evidence), durable=False)
        _write_json(folder / "tokens.json", _by_token(evidence))
    if evidence.worst:
        parts = {"worst": evidence.worst, "ordinary": evidence.ordinary}
        _write_json(folder / "norms.json", {**parts, "without_gradients": evidence.without_gradients})
    write_atomically(folder / "postmortem.md", page(moment, evidence, OPEN), durable=False)
    draw(folder, moment, [])
    return folder


def add_action(run: Run, moment: Moment, step: int, guard: str, action: str, message: str) -> None:
    """Add what a guard did later about the same trouble."""
    file = folder_of(run, moment.step) / "postmortem.md"
    before, heading, after = file.read_text(encoding="utf-8").partition("\n## Recovery\n")
    entry = f"- {utc(time.time())}, step {step}: `{guard}`, {action}: {message}\n"
    if heading:
        write_atomically(file, f"{before.rstrip()}\n{entry}{heading}{after}", durable=False)


def close(run: Run, moment: Moment, how: str, recovery: str) -> None:
    """Say how it went on. Only the section on the recovery is replaced: the rest may have been edited.

    Args:
        run: whose folder it is.
        moment: what happened.
        how: in a word.
        recovery: in sentences.
    """
    folder = folder_of(run, moment.step)
    moment.closed = how
    _write_json(folder / "postmortem.json", asdict(moment))
    file = folder / "postmortem.md"
    before, heading, after = file.read_text(encoding="utf-8").partition("\n## Recovery\n")
    if heading:
        _, following, rest = after.partition("\n## ")
        write_atomically(file, f"{before}{heading}\n{recovery}\n{following}{rest}", durable=False)
    draw(folder, moment, [line for line in run.metrics() if line.get("time", 0) > moment.time])


def draw(folder: Path, moment: Moment, after: list[dict[str, Any]]) -> None:
    """The curves, with the moment marked.

    Args:
        folder: where they go.
        moment: its log lines are the curve before.
        after: log lines since.
    """
    from matplotlib.figure import Figure  # takes half a second

    for name, (metric, label, column) in PICTURES.items():
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for lines, style in ((moment.lines, {"color": "tab:blue", "label": "log lines before"}),
                             ([*moment.lines[-1:], *after], {"color": "tab:green", "label": "log lines after"})):
            points = [(line["step"], line[metric]) for line in lines if math.isfinite(line.get(metric) or math.nan)]
            if len(lines) > 1 and points:
                axes.plot(*zip(*points, strict=True), marker=".", zorder=1, **style)
        steps = [(step[0], step[column]) for step in moment.steps if math.isfinite(step[column])]
        if steps:
            axes.plot(*zip(*steps, strict=True), ".", color="tab:orange", label="steps since the log line before")
        axes.axvline(moment.worst, color="tab:red", linestyle="--", label=f"step {moment.worst}, the worst")
        if metric == "train/loss" and moment.baseline is not None:
            axes.axhline(moment.baseline, color="tab:gray", linestyle=":", label=f"{moment.baseline:.3f}, as before")
        if metric == "optim/grad_norm":
            axes.set_yscale("log")
        axes.set(xlabel="optimizer step", ylabel=label, title=f"{moment.run}, step {moment.step}: {moment.guard}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(folder / name, dpi=110)


def _as_text(evidence: Evidence) -> str:
    parts = []
    for sample, text in zip(evidence.samples, evidence.texts, strict=True):
        where = "injected" if sample.shard is None else f"{sample.shard}, window {sample.window}"
        parts.append(f"==== sample {sample.index}, mean loss {sample.loss:.4f}, {where}\n{text}\n")
    return "\n".join(parts)


def _by_token(evidence: Evidence) -> list[dict[str, Any]]:
    """Each entry's lists are of one length: `losses` begins with None, since nothing predicts the first token."""
    return [
        {"sample": sample.index, "shard": sample.shard, "window": sample.window, "loss": sample.loss,
         "token_ids": sample.tokens, "tokens": pieces, "losses": [None, *sample.losses]}
        for sample, pieces in zip(evidence.samples, evidence.pieces)
    ]  # fmt: skip


def _write_json(path: Path, value: Any) -> None:
    """Numbers that are not finite become null: JSON has none."""
    write_atomically(path, json.dumps(_finite(value), ensure_ascii=False) + "\n", durable=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value

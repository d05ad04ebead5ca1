"""Post-mortems: the folder `postmortem-<step>/` of a run, about an incident in its training such as a loss spike.

| file | content |
|---|---|
| `postmortem.md` | the page, with two sections for a person to finish |
| `postmortem.json` | the incident, with which a later process closes the page after a resume |
| `samples.txt` | every sample of the step as text, the worst first |
| `tokens.json` | the loss of each token of the worst samples |
| `norms.json` | norms inside the network, of the worst micro-batch and of an ordinary one |
| `loss.png`, `grad_norm.png` | the curves before, and when the page is closed, after |

`training/callbacks/postmortem` notices the incident, and `training/probe` gathers the evidence. Nothing here imports
torch.
"""

import json
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from lm.runs.metrics import METRICS
from lm.runs.run import Run
from lm.system.files import finite_or_none, write_atomically

PICTURES = {"loss.png": ("train/loss", 1), "grad_norm.png": ("optim/grad_norm", 2)}  # metric, and index in a step
OPEN = "Open: to be filled in when the loss is as low as it was before, or when the run has ended."
LINES = 10  # log lines in a table
STEPS = 12  # optimizer steps in a table
SAMPLES = 5  # samples in a table
TOKENS = 10  # tokens in a table
BEFORE, AFTER = 12, 4  # tokens of context of a token
BEGINNING = 60  # characters of a sample

# ---- the records -----------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """A sample of the step, with its losses under the weights when the post-mortem is written."""

    index: int  # in the stream of samples
    shard: str | None  # None: injected
    window: int | None
    tokens: list[int]  # T + 1 of them
    losses: list[float]  # T of them, of tokens 1 to T

    @property
    def loss(self) -> float:
        """Mean over its tokens."""
        return sum(self.losses) / len(self.losses)


@dataclass
class Incident:
    """What happened; it can be written as JSON."""

    run: str
    step: int  # of the log line at which the guard acted
    time: float  # seconds since 1970
    guard: str
    action: str
    message: str
    tokens_per_step: int
    worst: int  # the step of this log line that stands out
    steps: list[tuple[int, float, float, bool]]  # of this log line: step, loss, gradient norm, whether it was applied
    baseline: float | None  # median loss of the log lines before
    injected: bool
    lines: list[dict[str, Any]] = field(default_factory=list)  # the log lines up to this one
    highest: tuple[int, float] | None = None  # the step with the highest finite loss so far, and that loss
    closed: str | None = None  # how it ended

    def __post_init__(self) -> None:
        nan = math.nan  # of which JSON makes null
        self.steps = [
            (step, nan if loss is None else loss, nan if norm is None else norm, applied)
            for step, loss, norm, applied in self.steps
        ]
        if self.highest is None:
            self.update_highest(self.steps)

    def update_highest(self, steps: Iterable[tuple]) -> None:
        """Update `highest` with more steps, tuples that begin with their number and loss."""
        for step, loss, *_ in steps:
            if math.isfinite(loss) and (self.highest is None or loss > self.highest[1]):
                self.highest = (step, loss)


@dataclass
class Evidence:
    """The samples of the step and their effect in the network; empty where they could not be read again."""

    samples: list[Sample] = field(default_factory=list)  # the worst first
    texts: list[str] = field(default_factory=list)  # of each sample
    pieces: list[list[str]] = field(default_factory=list)  # of the worst samples, the text of each token
    worst: dict[str, Any] | None = None  # the micro-batch: `what`, `activations`, `gradients`
    ordinary: dict[str, Any] | None = None  # the same of an ordinary micro-batch
    without_gradients: str | None = None  # why gradients are missing


# ---- the page, in Markdown -------------------------------------------------------------------------------------------


def markdown_page(incident: Incident, evidence: Evidence, recovery: str) -> str:
    """The whole page; `recovery` is the content of the section on the recovery."""
    acted = f"- {utc(incident.time)}, step {incident.step}: `{incident.guard}`, {incident.action}: {incident.message}"
    return "\n".join([
        f"# Post-mortem: run {incident.run}, step {incident.step}\n",
        _summary(incident, evidence),
        "\n## What happened\n",
        *_happened(incident),
        "\n## What the step saw\n",
        *_saw(incident, evidence),
        "\n## Where in the network\n",
        *_where(evidence),
        "\n## What was done\n",
        acted,
        f"\n## Recovery\n\n{recovery}\n",
        CAUSE,
    ])  # fmt: skip


CAUSE = """## Cause

_For a person to finish._ Questions that help:

- Would a reader call the worst samples broken: markup, another language, one phrase over and over, no text at all? Are
  they from one shard?
- Is it a few samples or all of them? A few point to the data, all of them to the weights or the learning rate.
- Did the gradient norm rise before the loss did? Then the cause is before this step.
- Is one layer out of line, or the whole network? Is it the embedding or the output?
- Was the learning rate at its peak, the warm-up just over, or the run just resumed (`run.json`, `log.txt`)?
- Does it come again from the checkpoint before? If so it is the data or the settings; if not, the machine.

## What will change

_For a person to finish: the data, the settings, the guards, or nothing and why._
"""


def _summary(incident: Incident, evidence: Evidence) -> str:
    step, loss, norm, applied = next(step for step in incident.steps if step[0] == incident.worst)
    usual = incident.baseline is not None and loss <= incident.baseline  # a guard that looks at something else
    text = f"Step {step} {'has the highest loss of its log line' if usual else 'stands out'}: loss {_number(loss)}"
    if incident.baseline is not None:
        text += f", where it was {_number(incident.baseline)} before"
    text += f"; gradient norm {_number(norm)}."
    if not applied:
        text += " It was not applied, so it changed no weight."
    if incident.injected:
        text += " **This was a drill**: its samples were replaced by rare tokens (`guards.inject_step`)."
    elif evidence.samples and incident.baseline is not None and math.isfinite(loss):
        now = fmean(sample.loss for sample in evidence.samples)
        text += f" Under the weights of now the loss of the same samples is {_number(now)}."
    return text


def _happened(incident: Incident) -> list[str]:
    text = f"At {utc(incident.time)}, in the log line of step {incident.step}, guard `{incident.guard}`: "
    text += incident.message
    if incident.baseline is not None:
        text += f"\n\nThe loss before is the median of the last log lines before: {_number(incident.baseline)}."
    index = [step for step, *_ in incident.steps].index(incident.worst)
    first = max(0, min(index - STEPS // 2, len(incident.steps) - STEPS))
    shown = incident.steps[first : first + STEPS]
    steps = [
        [f"**{step}**" if step == incident.worst else f"{step}", _number(loss), _number(norm), ("no", "yes")[applied]]
        for step, loss, norm, applied in shown
    ]
    names = ("train/loss", "optim/grad_norm", "optim/lr", "perf/tokens_per_second", "val/loss")
    columns = {METRICS[name].label: name for name in names}
    lines = [
        [str(line["step"]), *(_number(line[metric]) if metric in line else "" for metric in columns.values())]
        for line in incident.lines[-LINES - 1 :]
    ]
    title = f"Steps {shown[0][0]} to {shown[-1][0]}, one by one:"
    return [
        text, "", title, "", *_table(["step", "loss", "gradient norm", "applied"], steps), "",
        "The log lines up to this one (`metrics.jsonl`): the loss is the mean of their steps, the gradient norm that "
        "of the last one.", "",
        *_table(["step", *columns], lines), "",
        "![loss](loss.png) ![gradient norm](grad_norm.png)",
    ]  # fmt: skip


def _saw(incident: Incident, evidence: Evidence) -> list[str]:
    samples = evidence.samples
    if not samples:
        return ["The samples of the step could not be read again; the log of the run says why."]
    losses = [sample.loss for sample in samples]  # the worst first
    first = min(sample.index for sample in samples)
    source = (
        "sequences of rare tokens that were put in place of the text" if incident.injected
        else f"`lm data show --run {incident.run} --step {incident.worst}` prints them"
    )  # fmt: skip
    last = first + len(samples) - 1
    text = (
        f"Step {incident.worst} had {len(samples)} samples, {first} to {last} of the stream: {source}.\n\n"
        "All losses in this section and all norms in the next are **under the weights at the time of writing**, after "
        f"step {incident.step}, and without dropout. They show what is hard for the model now, not what was hard in "
        "the step itself.\n\n"
        f"Mean loss {_number(fmean(losses))}; the best sample {_number(losses[-1])}, the middle one "
        f"{_number(losses[len(losses) // 2])}, the worst {_number(losses[0])}. The worst {min(SAMPLES, len(samples))}:"
    )
    rows = [
        [str(sample.index), _number(sample.loss), sample.shard or "injected",
         "" if sample.window is None else str(sample.window), _code(beginning[:BEGINNING])]
        for sample, beginning in zip(samples[:SAMPLES], evidence.texts)
    ]  # fmt: skip
    return [
        text, "", *_table(["sample", "mean loss", "shard", "window", "begins with"], rows), "",
        f"The {TOKENS} tokens with the highest loss in the worst {len(evidence.pieces)} samples:", "",
        *_table(["loss", "sample", "position", "before", "token", "after"], _worst_tokens(evidence)), "",
        "All samples are in [samples.txt](samples.txt), the worst token by token in [tokens.json](tokens.json).",
    ]  # fmt: skip


def _worst_tokens(evidence: Evidence) -> list[list[str]]:
    found = [
        (loss, sample, pieces, position)
        for sample, pieces in zip(evidence.samples, evidence.pieces)
        for position, loss in enumerate(sample.losses, start=1)
    ]
    found.sort(key=lambda token: math.inf if math.isnan(token[0]) else token[0], reverse=True)
    return [
        [_number(loss), str(sample.index), str(position), _code("".join(pieces[max(0, position - BEFORE) : position])),
         f"**{_code(pieces[position])}**", _code("".join(pieces[position + 1 : position + 1 + AFTER]))]
        for loss, sample, pieces, position in found[:TOKENS]
    ]  # fmt: skip


def _where(evidence: Evidence) -> list[str]:
    worst, ordinary = evidence.worst, evidence.ordinary
    if worst is None:
        return ["The norms could not be measured."]
    text = f"{worst['what'].capitalize()}, the micro-batch with the highest loss."
    if ordinary:
        text += f" In brackets: the ratio to {ordinary['what']}, an ordinary micro-batch."
    reasons = [f"Gradients were left out: {evidence.without_gradients}."] if evidence.without_gradients else []
    heads = ["part", "gradient norm", "stream RMS", "stream max", "attention adds, RMS", "MLP adds, RMS"]
    rows = []
    for part in _parts(worst):
        cells = [_beside(_gradient(worst, part), ordinary and _gradient(ordinary, part))]
        stream = "embedding" if part == "embed_tokens" else f"{part}.stream"
        for name, kind in ((stream, "rms"), (stream, "max"), (f"{part}.attention", "rms"), (f"{part}.mlp", "rms")):
            values = [side and side["activations"].get(name, {}).get(kind) for side in (worst, ordinary)]
            cells.append(_beside(*values))
        rows.append([part, *cells])
    return [text, *reasons, "", *_table(heads, rows), "", NORMS]


NORMS = (
    "The stream is the residual stream, which attention and MLP add to. The gradient is that of the mean loss, "
    "before clipping. Every parameter is in [norms.json](norms.json)."
)


def _parts(side: dict[str, Any]) -> list[str]:
    """The embedding, each layer, the last norm, the output; in the order of the network."""
    names = [*(side["gradients"] or ()), "embed_tokens", *side["activations"]]
    layers = sorted({int(name.split(".")[1]) for name in names if name.startswith("layers.")})
    last = [part for part in ("norm", "lm_head") if f"{part}.weight" in (side["gradients"] or ())]
    return ["embed_tokens", *(f"layers.{index}" for index in layers), *last]


def _gradient(side: dict[str, Any], part: str) -> float | None:
    """The norm of a part's gradient: the root of the squares of its parameters'."""
    if side["gradients"] is None:
        return None
    return math.sqrt(sum(norm * norm for name, norm in side["gradients"].items() if name.startswith(f"{part}.")))


# ---- numbers, code and tables in Markdown ----------------------------------------------------------------------------


def utc(seconds: float) -> str:
    """A time for people, the same on every machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _number(value: float | None) -> str:
    """A number with four significant digits; large whole numbers in full."""
    if value is None:
        return "not finite"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _beside(value: float | None, ordinary: float | None) -> str:
    """A number, and its ratio to the ordinary one."""
    if value is None:
        return ""
    return _number(value) + (f" ({value / ordinary:.1f}x)" if ordinary else "")


def _code(text: str) -> str:
    """A piece of text as code in a table: on one line, without characters that mean something to Markdown."""
    shown = "".join("↵" if char == "\n" else char if char.isprintable() else "·" for char in text)
    shown = shown.replace("|", "¦").replace("`", "'")
    return f"`{shown}`" if shown else ""


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


# ---- the folder ------------------------------------------------------------------------------------------------------


def folder_of(run: Run, step: int) -> Path:
    """The folder of a step's post-mortem."""
    return run.path / f"postmortem-{step:08d}"


def steps_of(run: Run) -> list[int]:
    """The steps that have a post-mortem, in order."""
    names = [path.name.removeprefix("postmortem-") for path in run.path.glob("postmortem-*")]
    return sorted(int(name) for name in names if name.isdecimal())  # a person may have copied one


def still_open(run: Run) -> Incident | None:
    """The newest incident that was not closed; a damaged `postmortem.json` has none."""
    for step in reversed(steps_of(run)):
        with suppress(TypeError, ValueError):
            incident = Incident(**Run(folder_of(run, step)).read("postmortem.json"))
            if incident.closed is None:
                return incident
    return None


def write_postmortem(run: Run, incident: Incident, evidence: Evidence) -> Path:
    """Make the folder of a post-mortem."""
    folder = folder_of(run, incident.step)
    folder.mkdir(exist_ok=True)
    _write_json(folder / "postmortem.json", asdict(incident))
    if evidence.samples:
        write_atomically(folder / "samples.txt", _as_text(evidence), durable=False)
        _write_json(folder / "tokens.json", _by_token(evidence))
    if evidence.worst:
        parts = {"worst": evidence.worst, "ordinary": evidence.ordinary}
        _write_json(folder / "norms.json", {**parts, "without_gradients": evidence.without_gradients})
    write_atomically(folder / "postmortem.md", markdown_page(incident, evidence, OPEN), durable=False)
    draw_curves(folder, incident, [])
    return folder


def add_action(run: Run, incident: Incident, step: int, guard: str, action: str, message: str) -> None:
    """Add a later action of a guard about the same incident to the page."""
    file = folder_of(run, incident.step) / "postmortem.md"
    before, heading, after = file.read_text(encoding="utf-8").partition("\n## Recovery\n")
    entry = f"- {utc(time.time())}, step {step}: `{guard}`, {action}: {message}\n"
    if heading:
        write_atomically(file, f"{before.rstrip()}\n{entry}{heading}{after}", durable=False)


def close_postmortem(run: Run, incident: Incident, how: str, recovery: str) -> None:
    """Write how the incident ended, in a word and in sentences.

    Only the section on the recovery is replaced: people may have edited the rest.
    """
    folder = folder_of(run, incident.step)
    incident.closed = how
    _write_json(folder / "postmortem.json", asdict(incident))
    file = folder / "postmortem.md"
    before, heading, after = file.read_text(encoding="utf-8").partition("\n## Recovery\n")
    if heading:
        _, following, rest = after.partition("\n## ")
        write_atomically(file, f"{before}{heading}\n{recovery}\n{following}{rest}", durable=False)
    draw_curves(folder, incident, [line for line in run.metrics() if line.get("time", 0) > incident.time])


def draw_curves(folder: Path, incident: Incident, after: list[dict[str, Any]]) -> None:
    """Draw `PICTURES`, with the worst step marked: the log lines up to the incident, and those after it."""
    from matplotlib.figure import Figure  # takes half a second

    curves = ((incident.lines, "log lines before", "tab:blue"),
              ([*incident.lines[-1:], *after], "log lines after", "tab:green"))  # fmt: skip
    for name, (metric, column) in PICTURES.items():
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for lines, label, color in curves:
            points = [(line["step"], line[metric]) for line in lines if math.isfinite(line.get(metric) or math.nan)]
            if len(lines) > 1 and points:
                axes.plot(*zip(*points, strict=True), marker=".", zorder=1, color=color, label=label)
        steps = [(step[0], step[column]) for step in incident.steps if math.isfinite(step[column])]
        if steps:
            axes.plot(*zip(*steps, strict=True), ".", color="tab:orange", label="steps since the log line before")
        axes.axvline(incident.worst, color="tab:red", linestyle="--", label=f"step {incident.worst}, the worst")
        if metric == "train/loss" and incident.baseline is not None:
            label = f"{incident.baseline:.3f}, as before"
            axes.axhline(incident.baseline, color="tab:gray", linestyle=":", label=label)
        if metric == "optim/grad_norm":
            axes.set_yscale("log")
        axes.set(xlabel="optimizer step", ylabel=METRICS[metric].label)
        axes.set_title(f"{incident.run}, step {incident.step}: {incident.guard}")
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
    """The worst samples for `tokens.json`; `losses` begins with None, since nothing predicts the first token."""
    return [
        {"sample": sample.index, "shard": sample.shard, "window": sample.window, "loss": sample.loss,
         "token_ids": sample.tokens, "tokens": pieces, "losses": [None, *sample.losses]}
        for sample, pieces in zip(evidence.samples, evidence.pieces)
    ]  # fmt: skip


def _write_json(path: Path, value: Any) -> None:
    """Numbers that are not finite become null: JSON has none."""
    write_atomically(path, json.dumps(finite_or_none(value), ensure_ascii=False) + "\n", durable=False)

"""Post-mortems: the folder `postmortem-<step>/` of a run, about an incident in its training such as a loss spike.

| file | content |
|---|---|
| `postmortem.md` | the page, with two sections for a person to finish |
| `postmortem.json` | the incident, from which a later process finishes the page after a resume |
| `samples.txt` | every sample of the step as text, the worst first |
| `tokens.json` | the loss of each token of the worst samples |
| `norms.json` | norms inside the network, of the worst micro-batch and of an ordinary one |
| `loss.png`, `grad_norm.png` | the curves before, and when the page is closed, after |

`training/callbacks/postmortem` notices the incident, `training/probe` gathers the evidence, and `inspection/run_views`
draws the curves. Nothing here imports torch.
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

import jinja2

from lm.runs.metrics import METRICS
from lm.runs.run import Run
from lm.system.files import finite_or_none, write_atomically
from lm.system.units import utc

TEMPLATE = Path(__file__).with_suffix(".md")
OPEN = "Open: to be filled in when the loss is as low as it was before, or when the run has ended."
LINES = 10  # log lines in a table
STEPS = 12  # optimizer steps in a table
SAMPLES = 5  # samples in a table
TOKENS = 10  # tokens in a table
BEFORE, AFTER = 12, 4  # context tokens before and after a token
BEGINNING = 60  # characters of a sample

# ---- the records -----------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """A sample of the step, with its losses under the weights at the time of the post-mortem."""

    index: int  # in the stream of samples
    shard: str | None  # None: injected
    window: int | None
    tokens: list[int]  # T + 1 of them
    losses: list[float | None]  # T of them, of tokens 1 to T; None where a token is not a target

    @property
    def loss(self) -> float:
        counted = [loss for loss in self.losses if loss is not None]
        return sum(counted) / max(1, len(counted))


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
    worst: int  # the step of this log line with the worst values
    steps: list[tuple[int, float, float, bool]]  # of this log line: step, loss, gradient norm, whether it was applied
    baseline: float | None  # median loss of the log lines before
    injected: bool
    lines: list[dict[str, Any]] = field(default_factory=list)  # the log lines up to this one
    highest: tuple[int, float] | None = None  # the step with the highest finite loss so far, and that loss
    closed: str | None = None  # how it ended

    def __post_init__(self) -> None:
        # JSON has null for non-finite values.
        self.steps = [tuple(math.nan if part is None else part for part in step) for step in self.steps]
        self.lines = [{name: math.nan if value is None else value for name, value in line.items()}
                      for line in self.lines]  # fmt: skip
        if self.highest is None:
            self.update_highest(self.steps)

    def update_highest(self, steps: Iterable[tuple]) -> None:  # each begins with its number and loss
        for step, loss, *_ in steps:
            if math.isfinite(loss) and (self.highest is None or loss > self.highest[1]):
                self.highest = (step, loss)


@dataclass
class Evidence:
    """The samples of the step and norms inside the network; empty if the samples could not be read again."""

    samples: list[Sample] = field(default_factory=list)  # the worst first
    texts: list[str] = field(default_factory=list)  # of each sample
    pieces: list[list[str]] = field(default_factory=list)  # of the worst samples, the text of each token
    worst: dict[str, Any] | None = None  # the micro-batch: `what`, `activations`, `gradients`
    ordinary: dict[str, Any] | None = None  # the same for an ordinary micro-batch
    without_gradients: str | None = None  # why gradients are missing


# ---- the page, in Markdown -------------------------------------------------------------------------------------------


def markdown_page(incident: Incident, evidence: Evidence, recovery: str) -> str:
    """Render the page from the template `postmortem.md`; `recovery` is the content of the section on the recovery."""
    place = [step for step, *_ in incident.steps].index(incident.worst)
    worst = dict(zip(("step", "loss", "norm", "applied"), incident.steps[place], strict=True))
    first = max(0, min(place - STEPS // 2, len(incident.steps) - STEPS))
    steps = incident.steps[first : first + STEPS]
    names = ("train/loss", "optim/grad_norm", "optim/lr", "perf/tokens_per_second", "val/loss")
    templates = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    templates.filters |= {"number": _number, "utc": utc, "mean": fmean, "is_finite": math.isfinite}
    return templates.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        incident=incident, evidence=evidence, recovery=recovery, table=_table, most_tokens=TOKENS, steps=steps,
        worst=worst,
        usual=incident.baseline is not None and worst["loss"] <= incident.baseline,  # the guard looks at something else
        step_rows=[
            [f"**{step}**" if step == incident.worst else step, _number(loss), _number(norm), ("no", "yes")[applied]]
            for step, loss, norm, applied in steps
        ],
        line_heads=["step", *(METRICS[name].label for name in names)],
        line_rows=[
            [line["step"], *(_number(line[name]) if name in line else "" for name in names)]
            for line in incident.lines[-LINES - 1 :]
        ],
        losses=[sample.loss for sample in evidence.samples],
        first_sample=min((sample.index for sample in evidence.samples), default=0),
        sample_rows=[
            [sample.index, _number(sample.loss), sample.shard or "injected",
             "" if sample.window is None else sample.window, _code(beginning[:BEGINNING])]
            for sample, beginning in zip(evidence.samples[:SAMPLES], evidence.texts)
        ],
        token_rows=_worst_tokens(evidence),
        part_rows=_parts(evidence.worst, evidence.ordinary) if evidence.worst else [],
    )  # fmt: skip


def _worst_tokens(evidence: Evidence) -> list[list[str]]:
    found = [
        (loss, sample, pieces, position)
        for sample, pieces in zip(evidence.samples, evidence.pieces)
        for position, loss in enumerate(sample.losses, start=1)
        if loss is not None
    ]
    found.sort(key=lambda token: math.inf if math.isnan(token[0]) else token[0], reverse=True)
    return [
        [_number(loss), str(sample.index), str(position), _code("".join(pieces[max(0, position - BEFORE) : position])),
         f"**{_code(pieces[position])}**", _code("".join(pieces[position + 1 : position + 1 + AFTER]))]
        for loss, sample, pieces, position in found[:TOKENS]
    ]  # fmt: skip


def _parts(worst: dict[str, Any], ordinary: dict[str, Any] | None) -> list[list[str]]:
    """Norms of the embedding, each layer, the last norm and the output; in the order of the network."""
    names = [*(worst["gradients"] or ()), "embed_tokens", *worst["activations"]]
    layers = sorted({int(name.split(".")[1]) for name in names if name.startswith("layers.")})
    last = [part for part in ("norm", "lm_head") if f"{part}.weight" in (worst["gradients"] or ())]
    rows = []
    for part in ("embed_tokens", *(f"layers.{index}" for index in layers), *last):
        cells = [_with_ratio(_gradient(worst, part), ordinary and _gradient(ordinary, part))]
        stream = "embedding" if part == "embed_tokens" else f"{part}.stream"
        for name, kind in ((stream, "rms"), (stream, "max"), (f"{part}.attention", "rms"), (f"{part}.mlp", "rms")):
            values = [side and side["activations"].get(name, {}).get(kind) for side in (worst, ordinary)]
            cells.append(_with_ratio(*values))
        rows.append([part, *cells])
    return rows


def _gradient(side: dict[str, Any], part: str) -> float | None:
    if side["gradients"] is None:
        return None
    return math.sqrt(sum(norm * norm for name, norm in side["gradients"].items() if name.startswith(f"{part}.")))


# ---- numbers, code and tables in Markdown ----------------------------------------------------------------------------


def _number(value: float | None) -> str:
    """A number with four significant digits; large whole numbers in full."""
    if value is None:
        return "not finite"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _with_ratio(value: float | None, ordinary: float | None) -> str:
    if value is None:
        return ""
    return _number(value) + (f" ({value / ordinary:.1f}x)" if ordinary else "")


def _code(text: str) -> str:
    """Format text as code in a Markdown table: one line, without characters that are Markdown syntax."""
    shown = "".join("↵" if char == "\n" else char if char.isprintable() else "·" for char in text)
    shown = shown.replace("|", "¦").replace("`", "'")
    return f"`{shown}`" if shown else ""


def _table(heads: list[str], rows: list[list[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


# ---- the folder ------------------------------------------------------------------------------------------------------


def folder_of(run: Run, step: int) -> Path:
    return run.path / f"postmortem-{step:08d}"


def steps_of(run: Run) -> list[int]:
    names = [path.name.removeprefix("postmortem-") for path in run.path.glob("postmortem-*")]
    return sorted(int(name) for name in names if name.isdecimal())  # not copies that a person made


def still_open(run: Run) -> Incident | None:
    """The newest incident that is not closed, ignoring damaged `postmortem.json` files; None if there is none."""
    for step in reversed(steps_of(run)):
        with suppress(TypeError, ValueError):
            incident = Incident(**Run(folder_of(run, step)).read("postmortem.json"))
            if incident.closed is None:
                return incident
    return None


def write_postmortem(run: Run, incident: Incident, evidence: Evidence) -> Path:
    """Make the folder of a post-mortem, except its pictures."""
    folder = folder_of(run, incident.step)
    folder.mkdir(exist_ok=True)
    _write_json(folder / "postmortem.json", asdict(incident))
    if evidence.samples:
        parts = []
        for sample, text in zip(evidence.samples, evidence.texts, strict=True):
            where = "injected" if sample.shard is None else f"{sample.shard}, window {sample.window}"
            parts.append(f"==== sample {sample.index}, mean loss {sample.loss:.4f}, {where}\n{text}\n")
        write_atomically(folder / "samples.txt", "\n".join(parts), durable=False)
        _write_json(folder / "tokens.json", [
            {"sample": sample.index, "shard": sample.shard, "window": sample.window, "loss": sample.loss,
             "token_ids": sample.tokens, "tokens": pieces,
             "losses": [None, *sample.losses]}  # nothing predicts the first token
            for sample, pieces in zip(evidence.samples, evidence.pieces)
        ])  # fmt: skip
    if evidence.worst:
        parts = {"worst": evidence.worst, "ordinary": evidence.ordinary}
        _write_json(folder / "norms.json", {**parts, "without_gradients": evidence.without_gradients})
    write_atomically(folder / "postmortem.md", markdown_page(incident, evidence, OPEN), durable=False)
    return folder


def add_action(run: Run, incident: Incident, step: int, guard: str, action: str, message: str) -> None:
    """Add a later action of a guard about the same incident to the page."""
    file = folder_of(run, incident.step) / "postmortem.md"
    before, heading, after = file.read_text(encoding="utf-8").partition("\n## Recovery\n")
    entry = f"- {utc(time.time())}, step {step}: `{guard}`, {action}: {message}\n"
    if heading:
        write_atomically(file, f"{before.rstrip()}\n{entry}{heading}{after}", durable=False)


def close_postmortem(run: Run, incident: Incident, how: str, recovery: str) -> None:
    """Record how the incident ended; only the section on the recovery is replaced, as people may have edited others."""
    folder = folder_of(run, incident.step)
    incident.closed = how
    _write_json(folder / "postmortem.json", asdict(incident))
    file = folder / "postmortem.md"
    before, heading, after = file.read_text(encoding="utf-8").partition("\n## Recovery\n")
    if heading:
        _, following, rest = after.partition("\n## ")
        write_atomically(file, f"{before}{heading}\n{recovery}\n{following}{rest}", durable=False)


def _write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(finite_or_none(value), ensure_ascii=False) + "\n", durable=False)

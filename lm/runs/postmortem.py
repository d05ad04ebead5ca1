"""Post-mortems: the folder `postmortem-<step>/` of a run, about an incident in its training such as a loss spike.

| file | content |
|---|---|
| `postmortem.md` | the page, with a section for a person to finish |
| `postmortem.json` | the incident, from which a later process finishes the page after a resume |
| `samples.txt` | every sample of the step as text, the worst first |
| `tokens.json` | the loss of each token of the worst samples |
| `loss.png`, `grad_norm.png` | the curves around the step |

`training/callbacks/postmortem` notices the incident and reads its samples, and `inspection/run_views` draws the curves.
Nothing here imports torch.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import jinja2

from lm.runs.run import Run
from lm.system.files import write_atomically
from lm.system.parsing import to_json

TEMPLATE = Path(__file__).with_suffix(".md")
OPEN = "Open: to be filled in when the loss is as low as it was before, or when the run has ended."
SAMPLES = 8  # of the worst samples in tokens.json
TOKENS = 10  # of the worst tokens on the page
BEFORE, AFTER = 12, 4  # context tokens before and after a token


@dataclass
class Sample:
    """A sample of the step, with its losses under the weights at the time of the post-mortem."""

    index: int  # in the stream of samples
    origin: str  # the shard and its window, or `injected`
    tokens: list[int]  # T + 1 of them
    losses: list[float | None]  # of each token: inf for NaN; None for the first one, and where it is no target

    @property
    def loss(self) -> float:
        targets = [loss for loss in self.losses if loss is not None]
        return sum(targets) / max(1, len(targets))


@dataclass
class Incident:
    """What happened; it can be written as JSON."""

    run: str
    step: int  # of the log line at which the guard acted
    time: str  # in UTC
    guard: str
    action: str
    message: str
    worst: int  # the step of this log line with the worst values
    steps: list[tuple[int, float, float, bool]]  # of this log line: step, loss, gradient norm, whether it was applied
    baseline: float | None  # median loss of the log lines before
    injected: bool
    closed: str | None = None  # how it ended


def folder_of(run: Run, step: int) -> Path:
    return run.path / f"postmortem-{step:08d}"


def steps_of(run: Run) -> list[int]:
    names = [path.name.removeprefix("postmortem-") for path in run.path.glob("postmortem-*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())  # not copies that a person made


def still_open(run: Run) -> Incident | None:
    """The newest incident that is not closed, ignoring damaged `postmortem.json` files; None if there is none."""
    for step in reversed(steps_of(run)):
        with suppress(TypeError):
            incident = Incident(**Run(folder_of(run, step)).read("postmortem.json"))
            if incident.closed is None:
                return incident
    return None


def write_postmortem(run: Run, incident: Incident, samples: list[Sample], decode: Callable[[list[int]], str]) -> Path:
    """Make the folder of a post-mortem, except its pictures; `samples` are the worst first, and [] if not known."""
    folder = folder_of(run, incident.step)
    folder.mkdir(exist_ok=True)
    _write(folder / "postmortem.json", to_json(asdict(incident)))
    texts = [decode(sample.tokens) for sample in samples]
    pieces = [[decode([token]) for token in sample.tokens] for sample in samples[:SAMPLES]]
    if samples:
        heads = [f"==== sample {sample.index}, mean loss {sample.loss:.4f}, {sample.origin}" for sample in samples]
        _write(folder / "samples.txt", "\n".join(f"{head}\n{text}\n" for head, text in zip(heads, texts)))
        documents = []
        for sample, parts in zip(samples, pieces):
            facts = {"sample": sample.index, "origin": sample.origin, "loss": sample.loss}
            documents.append(facts | {"token_ids": sample.tokens, "tokens": parts, "losses": sample.losses})
        _write(folder / "tokens.json", to_json(documents))
    template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), trim_blocks=True, undefined=jinja2.StrictUndefined)
    tokens = worst_tokens(samples, pieces)
    _write(folder / "postmortem.md", template.render(incident=incident, samples=samples, tokens=tokens, recovery=OPEN))
    return folder


def close_postmortem(run: Run, incident: Incident, how: str, recovery: str) -> None:
    """Record how the incident ended; only the section on the recovery is replaced, as people may have edited others."""
    folder = folder_of(run, incident.step)
    incident.closed = how
    _write(folder / "postmortem.json", to_json(asdict(incident)))
    before, heading, after = (folder / "postmortem.md").read_text(encoding="utf-8").partition("\n## Recovery\n")
    if heading:
        _, next_heading, sections = after.partition("\n## ")
        _write(folder / "postmortem.md", f"{before}{heading}\n{recovery}\n{next_heading}{sections}".rstrip("\n"))


def worst_tokens(samples: list[Sample], pieces: list[list[str]]) -> list[tuple[float, int, int, str, str, str]]:
    """The tokens with the highest loss: loss, sample, position, and as Markdown the text before it, of it, after it."""
    tokens = []
    for sample, parts in zip(samples, pieces):
        for position, loss in enumerate(sample.losses):
            if loss is not None:
                before = "".join(parts[max(0, position - BEFORE) : position])
                after = "".join(parts[position + 1 : position + 1 + AFTER])
                tokens.append((loss, sample.index, position, _code(before), _code(parts[position]), _code(after)))
    return sorted(tokens, reverse=True)[:TOKENS]


def _code(text: str) -> str:
    """Format text as code in a Markdown table: one line, without characters that are Markdown syntax."""
    line = "".join(char if char.isprintable() else "·" for char in text.replace("\n", "↵"))
    line = line.replace("|", "¦").replace("`", "'")
    return f"`{line}`" if line else ""


def _write(path: Path, text: str) -> None:
    write_atomically(path, text + "\n", durable=False)

"""The page of a post-mortem, in Markdown: made of an `incident`, put into a folder by `post_mortem`."""

import math
import time
from statistics import fmean
from typing import Any

from lm.incident import Evidence, Moment

LINES = 10  # log lines in a table
STEPS = 12  # optimizer steps in a table
SAMPLES = 5  # samples in a table
TOKENS = 10  # tokens in a table
BEFORE, AFTER = 12, 4  # tokens around one
BEGINNING = 60  # characters of a sample


def page(moment: Moment, evidence: Evidence, recovery: str) -> str:
    """The whole page as Markdown.

    Args:
        moment: what happened.
        evidence: what was found.
        recovery: content of the section on the recovery.
    """
    acted = f"- {utc(moment.time)}, step {moment.step}: `{moment.guard}`, {moment.action}: {moment.message}"
    return "\n".join([
        f"# Post-mortem: run {moment.run}, step {moment.step}\n",
        _summary(moment, evidence),
        "\n## What happened\n",
        *_happened(moment),
        "\n## What the step saw\n",
        *_saw(moment, evidence),
        "\n## Where in the network\n",
        *_where(moment, evidence),
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
- Was the learning rate at its peak, the warm-up just over, or the run just gone on with (`run.json`, `log.txt`)?
- Does it come again from the checkpoint before? If so it is the data or the settings; if not, the machine.

## What will change

_For a person to finish: the data, the settings, the guards, or nothing and why._
"""


def _summary(moment: Moment, evidence: Evidence) -> str:
    step, loss, norm, applied = next(each for each in moment.steps if each[0] == moment.worst)
    text = f"Step {step} stands out: loss {_number(loss)}"
    if moment.baseline is not None:
        text += f", where it was {_number(moment.baseline)} before"
    text += f"; gradient norm {_number(norm)}."
    if not applied:
        text += " It was not applied, so it changed no weight."
    if moment.injected:
        text += " **This was a drill**: its samples were replaced by rare tokens (`guards.inject_step`)."
    elif evidence.samples and moment.baseline is not None and math.isfinite(loss):
        now = fmean(sample.loss for sample in evidence.samples)
        text += f" By the weights of now the same samples cost {_number(now)}."
    return text


def _happened(moment: Moment) -> list[str]:
    text = f"At {utc(moment.time)}, in the log line of step {moment.step}, guard `{moment.guard}`: {moment.message}"
    if moment.baseline is not None:
        text += f"\n\nThe loss before is the median of the last log lines before: {_number(moment.baseline)}."
    index = [step for step, *_ in moment.steps].index(moment.worst)
    first = max(0, min(index - STEPS // 2, len(moment.steps) - STEPS))
    shown = moment.steps[first : first + STEPS]
    steps = [
        [f"**{step}**" if step == moment.worst else str(step), _number(loss), _number(norm), "yes" if applied else "no"]
        for step, loss, norm, applied in shown
    ]
    columns = {"loss": "train/loss", "gradient norm": "optim/grad_norm", "learning rate": "optim/lr",
               "tokens/s": "perf/tokens_per_second", "validation loss": "val/loss"}  # fmt: skip
    lines = [
        [str(line["step"]), *(_number(line[metric]) if metric in line else "" for metric in columns.values())]
        for line in moment.lines[-LINES - 1 :]
    ]
    title = f"Steps {shown[0][0]} to {shown[-1][0]}, one by one:"
    return [
        text, "", title, "", *_table(["step", "loss", "gradient norm", "applied"], steps), "",
        "The log lines up to this one (`metrics.jsonl`): the loss is the mean of their steps, the gradient norm that "
        "of the last one.", "",
        *_table(["step", *columns], lines), "",
        "![loss](loss.png) ![gradient norm](grad_norm.png)",
    ]  # fmt: skip


def _saw(moment: Moment, evidence: Evidence) -> list[str]:
    samples = evidence.samples
    if not samples:
        return ["The samples of the step could not be looked at; the log of the run says why."]
    losses = [sample.loss for sample in samples]  # the worst first
    first = min(sample.index for sample in samples)
    source = (
        "sequences of rare tokens that were put in place of the text" if moment.injected
        else f"`lm data show --run {moment.run} --step {moment.worst}` prints them"
    )  # fmt: skip
    last = first + len(samples) - 1
    text = (
        f"Step {moment.worst} had {len(samples)} samples, {first} to {last} of the stream: {source}.\n\n"
        "All losses in this section and all norms in the next are **by the weights as they were when this was "
        f"written**, after step {moment.step}, and without dropout. They tell what is hard for the model now, not what "
        "it was for the step itself.\n\n"
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
    found.sort(key=lambda each: math.inf if math.isnan(each[0]) else each[0], reverse=True)
    return [
        [_number(loss), str(sample.index), str(position), _code("".join(pieces[max(0, position - BEFORE) : position])),
         f"**{_code(pieces[position])}**", _code("".join(pieces[position + 1 : position + 1 + AFTER]))]
        for loss, sample, pieces, position in found[:TOKENS]
    ]  # fmt: skip


def _where(moment: Moment, evidence: Evidence) -> list[str]:
    worst, ordinary = evidence.worst, evidence.ordinary
    if worst is None:
        return ["The norms could not be taken."]
    text = f"{worst['what'].capitalize()}, the one with the highest loss."
    if ordinary:
        text += f" In brackets: how many times what {ordinary['what']} gives, an ordinary one."
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
    return [text, *reasons, "", *_table(heads, rows), "", *_most_out_of_line(worst, ordinary), NORMS]


NORMS = (
    "The stream is what runs through all blocks; attention and MLP add to it. The gradient is that of the mean loss, "
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


def _most_out_of_line(worst: dict[str, Any], ordinary: dict[str, Any] | None) -> list[str]:
    """The parameters whose gradient has grown most."""
    if ordinary is None or not (worst["gradients"] and ordinary["gradients"]):
        return []
    times = {
        name: norm / ordinary["gradients"][name] if ordinary["gradients"][name] else math.nan
        for name, norm in worst["gradients"].items()
    }
    first = sorted(times, key=lambda name: -math.inf if math.isnan(times[name]) else times[name], reverse=True)[:3]
    named = ", ".join(f"`{name}` ({_number(worst['gradients'][name])}, {times[name]:.1f} times)" for name in first)
    return [f"The gradients that are most out of line: {named}.", ""]


# ---- small things ----------------------------------------------------------------------------------------------------


def utc(seconds: float) -> str:
    """A time for people, the same on every machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _number(value: float | None) -> str:
    """Four digits that count; large whole numbers in full."""
    if value is None:
        return "not finite"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _beside(value: float | None, ordinary: float | None) -> str:
    """A number, and how many times the ordinary one it is."""
    if value is None:
        return ""
    return _number(value) + (f" ({value / ordinary:.1f}x)" if ordinary else "")


def _code(text: str) -> str:
    """A piece of text for a table: in one line, and with nothing that means something to Markdown."""
    shown = "".join("↵" if sign == "\n" else sign if sign.isprintable() else "·" for sign in text)
    shown = shown.replace("|", "¦").replace("`", "'")
    return f"`{shown}`" if shown else ""


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]

"""The loss that a run is expected to end with: by a ladder of the user's, or by a published scaling law."""

from pathlib import Path
from typing import Any, NamedTuple

from lm.errors import RequestError
from lm.runs.run import ROOT, Run
from lm.runs.scaling_laws import MIN_SIZES, fit_sizes
from lm.system.parsing import DAMAGE_ERRORS, parse_json
from lm.system.units import plural

MIN_TOKENS = 1e9  # from which the published law says something: it is far off below (tests/benchmarks/README.md)
PUBLISHED = "on web text, vocabulary of 32,000 (law of Hoffmann et al., arXiv:2404.10102)"


class ExpectedLoss(NamedTuple):
    """An expected validation loss at the end of a run; None with the reason in `basis` if none is known."""

    loss: float | None
    low: float | None  # of the 95 % interval, if it is known
    high: float | None
    unit: str
    basis: str  # where it is from

    def __str__(self) -> str:
        if self.loss is None:
            return self.basis
        interval = "" if self.low is None else f" ({self.low:.3f} to {self.high:.3f})"
        return f"{self.loss:.3f} {self.unit}{interval} {self.basis}"


def expected_loss(
    parameters: float, tokens: float, flops: float, data: str | None, root: str | Path = ROOT
) -> ExpectedLoss:
    """The expected loss of a run: by the newest ladder under `root` on the same data, or by the published law.

    `parameters` are those outside the embedding; `tokens` and `flops` of the whole run; `data` is `data.path`.
    """
    for file in sorted(Path(root).glob("*/ladder.json"), key=lambda file: -file.stat().st_mtime):
        try:
            first = Run(file.parent / parse_json(file.read_bytes())["runs"][0]["run"])
            if data and first.settings()["data"]["path"] == data:
                return ladder_loss(file.parent, flops)
        except (RequestError, OSError, *DAMAGE_ERRORS):  # unfinished or damaged, or its runs were removed
            continue
    if tokens < MIN_TOKENS:
        advice = "`lm ladder --depths 2,3,4 --data DATA` measures one on your text"
        return ExpectedLoss(None, None, None, "", f"no published law covers so short a run: {advice}")
    return ExpectedLoss(published_loss(parameters, tokens), None, None, "nats per token", PUBLISHED)


def published_loss(parameters: float, tokens: float) -> float:
    """Expected loss on web text in nats per token after `tokens`.

    Besiroglu et al., 2024, arXiv:2404.10102, who fitted the law of Hoffmann et al. (arXiv:2203.15556) again.
    """
    return 1.8172 + 482.01 / parameters**0.3478 + 2085.43 / tokens**0.3658


def ladder_loss(folder: Path, flops: float) -> ExpectedLoss:
    """What the law of a ladder predicts for a run of so many FLOPs."""
    try:
        results: dict[str, Any] = parse_json((folder / "ladder.json").read_bytes())
    except (OSError, ValueError) as error:
        raise RequestError(f"--ladder {folder}: no ladder.json can be read: {error}; `lm ladder` makes it") from error
    sizes = [size for size in results["sizes"] if size["losses"]]
    if len(sizes) < MIN_SIZES:
        count = plural(len(sizes), "finished size")
        raise RequestError(f"--ladder {folder} has {count}, and a scaling law needs {MIN_SIZES}")
    law = fit_sizes([size["flops"] for size in sizes], [size["losses"] for size in sizes])
    loss, low, high, _ = law.predict(flops)
    beyond = flops / max(size["flops"] for size in sizes)
    far = f", with {beyond:.3g} times the FLOPs of its largest size" if beyond > 1 else ""
    return ExpectedLoss(loss, low, high, results["unit"], f"by the ladder {folder}{far}")

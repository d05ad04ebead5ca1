"""The ways in which a step can run, each measured by an `lm bench step` of its own and put side by side.

A process of its own keeps apart what modes would share: compiled code, memory peaks, the time of the first step.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from lm.errors import RequestError, RunError
from lm.quantities import format_count
from lm.runs import write_atomically

FORM = re.compile(r"(none|inductor|triton_free)(\+graphs)?(?:/(on|off))?")


class Mode(NamedTuple):
    """One way to run a step."""

    compile: str  # as `model.compile`
    cuda_graphs: bool
    kernels: str | None  # as `model.kernels`; None: as the config has it

    @classmethod
    def parse(cls, text: str) -> "Mode":
        """A mode as people write it: `triton_free`, `none+graphs`, `inductor+graphs/off`.

        Raises:
            RequestError: it is none.
        """
        match = FORM.fullmatch(text)
        if not match:
            raise RequestError(
                f"no mode {text!r}: write none, inductor or triton_free, then +graphs if CUDA graphs are wanted, then "
                f"/on or /off for our kernels; or `all`: {' '.join(map(str, ALL))}"
            )
        return cls(match[1], bool(match[2]), match[3])

    def __str__(self) -> str:
        return f"{self.compile}{'+graphs' * self.cuda_graphs}{f'/{self.kernels}' if self.kernels else ''}"

    @property
    def options(self) -> list[str]:
        """The same as options of a training."""
        kernels = ["--model.kernels", self.kernels] if self.kernels else []
        return ["--model.compile", self.compile, "--model.cuda_graphs", str(self.cuda_graphs).lower(), *kernels]


ALL = [Mode(compile, graphs, None) for graphs in (False, True) for compile in ("none", "triton_free", "inductor")]
ALL += [Mode(compile, False, "off") for compile in ("none", "inductor")]  # what our kernels are worth


def parse_modes(names: list[str]) -> list[Mode]:
    """The modes that a command line names, each once, in its order.

    Raises:
        RequestError: one of the names is no mode.
    """
    modes = [mode for name in names for mode in (ALL if name == "all" else [Mode.parse(name)])]
    return list(dict.fromkeys(modes))


def measure_modes(modes: list[Mode], arguments: list[str], output: Path | None) -> dict[str, Any]:
    """Measure each mode in a process of its own.

    Args:
        modes: to be measured, in this order.
        arguments: of `lm bench step`, without those about modes and output.
        output: file that has what is known so far after each of them, so that a run that is killed leaves it.

    Returns:
        What `lm bench step` says of each, under `modes` by name; where a mode cannot run, why, as `unavailable`.

    Raises:
        RequestError: no mode can run, because the request is wrong.
        RunError: no mode ran to its end.
    """
    found: dict[str, Any] = {}
    for mode in modes:
        with tempfile.TemporaryDirectory(prefix="lm-bench-") as folder:
            own = Path(folder) / "step.json"
            command = [sys.executable, "-m", "lm", "bench", "step", *arguments, *mode.options, "--output", str(own)]
            ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if ended.returncode == 0:
                found[str(mode)] = json.loads(own.read_text())
            else:
                reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
                found[str(mode)] = {"unavailable": reason.removeprefix("lm bench: ")}
        if output:
            write_atomically(output, json.dumps({"modes": found}, indent=2) + "\n")
    if all("unavailable" in result for result in found.values()):
        kind = RequestError if ended.returncode == RequestError.exit_code else RunError
        raise kind("; ".join(f"{name}: {result['unavailable']}" for name, result in found.items()))
    return {"modes": found}


def show_modes(found: dict[str, Any]) -> None:
    """The modes as a table on standard output; ratios are to the first that could run."""
    measured = {name: result for name, result in found["modes"].items() if "unavailable" not in result}
    first = next(iter(measured.values()))
    title = f"{first['config']}, {first['micro_batch_size']} x {first['seq_len']} tokens, {first['device']}"
    ratio = f"to {next(iter(measured))}"
    table = Table("mode", "ms a step", "tokens/s", ratio, "MFU", "peak MiB", "first step s", title=title)
    for name, result in found["modes"].items():
        if "unavailable" in result:
            continue
        loop, memory = result["lightning"], result["peak_memory_bytes"]
        mfu = "unknown" if loop["mfu"] is None else f"{loop['mfu']:.1%}"
        since_start = result["first_step_s"]
        table.add_row(
            name, f"{loop['ms_per_step']:.2f}", format_count(loop["tokens_per_second"]),
            f"{loop['tokens_per_second'] / first['lightning']['tokens_per_second']:.3f}x", mfu,
            "unknown" if memory is None else f"{memory / 2**20:,.0f}",
            "unknown" if since_start is None else f"{since_start:.1f}",
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(table)
    for name, result in found["modes"].items():
        if "unavailable" in result:
            console.print(f"{name} is unavailable: {result['unavailable']}")

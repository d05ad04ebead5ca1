"""A training step in each of the ways to compute it, side by side.

    python tests/benchmarks/bench_modes.py --config X [--modes MODE ...] [--output FILE] [options of `lm bench step`]

A mode is `none`, `inductor` or `triton_free` (as `model.compile`), then `/on` or `/off` for our kernels; not given: all
of `MODES`. Each is an `lm bench step` in a process of its own, so that compiled code, memory peaks and the time of the
first step are kept apart. A mode that cannot run here is shown with the reason.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from lm.system.files import write_atomically
from lm.system.units import format_count

FORM = re.compile(r"(none|inductor|triton_free)(?:/(on|off))?")


class Mode(NamedTuple):
    """One way to run a step."""

    compile: str  # as `model.compile`
    kernels: str | None = None  # as `model.kernels`; None: as the config has it

    @classmethod
    def parse(cls, text: str) -> "Mode":
        """A mode as people write it: `triton_free`, `inductor/off`."""
        match = FORM.fullmatch(text)
        if not match:
            raise ValueError(f"no mode {text!r}; these are some: {' '.join(map(str, MODES))}")
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return self.compile + (f"/{self.kernels}" if self.kernels else "")

    @property
    def options(self) -> list[str]:
        """The mode as options of a training."""
        kernels = ["--model.kernels", self.kernels] if self.kernels else []
        return ["--model.compile", self.compile, *kernels]


MODES = [Mode(compile) for compile in ("none", "triton_free", "inductor")]
MODES += [Mode(compile, kernels="off") for compile in ("none", "inductor")]  # what our kernels are worth


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare the ways to compute a training step.", allow_abbrev=False)
    parser.add_argument("--modes", nargs="+", type=Mode.parse, default=MODES, help="the modes; all if not given")
    parser.add_argument("--output", type=Path, help="file to write the JSON object to, after each mode")
    options, others = parser.parse_known_args(arguments)
    found: dict[str, Any] = {}
    for mode in options.modes:
        found[str(mode)] = measure_mode(mode, others)
        if options.output:
            write_atomically(options.output, json.dumps({"modes": found}, indent=2) + "\n")
    show_modes(found)
    return int(all("unavailable" in result for result in found.values()))


def measure_mode(mode: Mode, arguments: list[str]) -> dict[str, Any]:
    """The JSON object of `lm bench step` in this mode; where it cannot run the reason, as `unavailable`."""
    command = [sys.executable, "-m", "lm", "bench", "step", *arguments, *mode.options, "--json"]
    print(f"{mode}:", file=sys.stderr, flush=True)
    process = Popen(command, stdout=PIPE, stderr=PIPE, text=True)
    reason = ""
    for line in process.stderr:  # whole, since the last line alone seldom explains a failure
        sys.stderr.write(line)
        sys.stderr.flush()
        reason = line.strip() or reason
    printed = process.communicate()[0]
    if process.returncode == 0:
        return json.loads(printed)
    return {"unavailable": reason.removeprefix("lm bench step: ") or f"exit code {process.returncode}"}


def show_modes(found: dict[str, Any]) -> None:
    """Print the modes as a table; ratios are to the first that could run."""
    console = Console(highlight=False)
    measured = {name: result for name, result in found.items() if "unavailable" not in result}
    if measured:
        name, first = next(iter(measured.items()))
        title = f"{first['config']}, {first['micro_batch_size']} x {first['seq_len']} tokens, {first['device']}"
        columns = ("mode", "ms a step", "tokens/s", f"to {name}", "MFU", "full", "optimizer", "peak MiB")
        table = Table(*columns, "first step s", title=title)
        for name, result in measured.items():
            memory = result["peak_memory_bytes"]
            table.add_row(
                name, f"{result['ms_per_step']:.2f}", format_count(result["tokens_per_second"]),
                f"{result['tokens_per_second'] / first['tokens_per_second']:.3f}x",
                *("unknown" if mfu is None else f"{mfu:.1%}" for mfu in (result["mfu"], result["mfu_full_attention"])),
                f"{result['optimizer']['share']:.1%}",
                "unknown" if memory is None else f"{memory / 2**20:,.0f}", f"{result['first_step_s']:.1f}",
            )  # fmt: skip
        console.print(table)
        console.print("MFU: by what causal attention attends to; full: by its full length, as nanochat and PaLM count")
    for name, result in found.items():
        if "unavailable" in result:
            console.print(f"{name} is unavailable: {result['unavailable']}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

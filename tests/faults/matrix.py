"""The faults that are tried, and what must happen: the table of `tests/faults/README.md`.

    python tests/faults/matrix.py tests/faults/results.json

writes it, from what `pytest --fault-report` found.
"""

import json
import sys
from collections import Counter
from os.path import relpath
from pathlib import Path, PurePosixPath

HERE = PurePosixPath("tests/faults")
README = Path(__file__).resolve().parent / "README.md"
BEGIN, END = "<!-- faults -->\n", "<!-- /faults -->\n"

# number -> what goes wrong, what must happen
FAULTS = {
    1: ("SIGKILL at random steps, many seeds", "the losses and samples of a run that was never stopped, bit for bit"),
    2: ("SIGKILL in the middle of a save", "the checkpoint before loads; what was half written is cleared away"),
    3: ("the disk fills up in a save", "one line and exit 1; the checkpoint before is kept; `plan` and `fit` warn"),
    4: ("the checkpoint folder is read-only, or vanishes", "an error at once"),
    5: ("a flipped byte or a cut in any file of a checkpoint", "`auto` takes the newest whole one; by name: refused"),
    6: ("SIGTERM in a step, a validation, a compilation, a wait for data",
        "exit 75, `interrupted`; a checkpoint, or the newest stands where one thing outlasts `stop_within`"),
    7: ("Ctrl-C once, twice", "a checkpoint and exit 75; an end at once"),
    8: ("NaN or Inf on one rank of two", "no rank takes the step; the batch is kept for a look"),
    9: ("a loss spike", "seen and written up; a rollback leaves the bad stretch out, where asked"),
    10: ("a corrupt or cut shard met in a run", "file and row group named; the run resumes once it is whole"),
    11: ("a shard added, removed or changed before a resume", "refused, with the difference"),
    12: ("a tokenizer or vocabulary that does not match", "refused before the first step"),
    13: ("other ranks or another micro-batch on a resume", "the same samples in the same order"),
    14: ("another config on a resume", "shown; what would make it another run is refused unless forced"),
    15: ("a kill at an epoch's end or later, mid-accumulation, at a validation", "nothing twice, nothing lost"),
    16: ("out of memory at the first step", "the peak and a micro-batch that fits; checkpoints intact"),
    17: ("a file system that does not answer", "named after a bounded wait, exit 1"),
    18: ("one of two ranks dies", "the other ends within a bounded time"),
    19: ("two processes on one run", "the second is refused; the lock of a dead one is taken over"),
    20: ("a registry that is locked, damaged or read-only", "the training does not notice; `runs rebuild` works"),
    21: ("malice: pickles, paths that climb out", "refused; nothing runs"),
    22: ("an object store that fails, stalls or cuts answers", "bounded retries, then a stop that resumes"),
    23: ("a budget that the run would overspend", "a checkpoint and a stop under the cap"),
    24: ("the wall clock jumps", "time left, cost and heartbeat stay sane"),
    25: ("1,000 random configs and 1,000 mutated files", "one line or a right result; no traceback, no hang"),
    26: ("under torchrun a rank or a machine dies, leaves or joins", "a restart; the same samples and losses"),
}  # fmt: skip


def table(results: dict[str, dict[str, str]]) -> str:
    """The table in Markdown.

    Args:
        results: fault number -> test -> `passed`, `skipped` or `failed`.
    """
    lines = ["| | fault | what happens | tests that passed |", "|---:|---|---|---|"]
    for number, (fault, promise) in FAULTS.items():
        lines.append(f"| {number} | {fault} | {promise} | {_summary(results.get(str(number), {}))} |")
    return "\n".join(lines) + "\n"


def _summary(tests: dict[str, str]) -> str:
    """How many passed and where they are; what failed or was skipped is said."""
    if not tests:
        return "**not tried**"
    count = Counter(tests.values())
    files = sorted({test.partition("::")[0] for test in tests})
    links = ", ".join(f"[{PurePosixPath(file).stem.removeprefix('test_')}]({relpath(file, HERE)})" for file in files)
    bad = "".join(f", **{count[outcome]} {outcome}**" for outcome in ("failed", "skipped") if count[outcome])
    return f"{count['passed']}{bad}: {links}"


def write(readme: Path, results: dict[str, dict[str, str]]) -> None:
    """Put the table in its place in the README."""
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(before + BEGIN + table(results) + END + after, encoding="utf-8")


if __name__ == "__main__":
    write(README, json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))

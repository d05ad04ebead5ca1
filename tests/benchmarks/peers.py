"""The same decoder and batch in other projects, step by step beside ours.

    python tests/benchmarks/peers.py --config pretrain-350m.yaml [--litgpt PATH] [--nanogpt PATH] [--liger PATH]

Each contender lives in a process of its own, because some change the library they build on, and one that breaks takes
nobody with it. All are set up first, one after the other; then they take turns, one at a time, and the median counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PROJECTS = ("transformers", "liger", "litgpt", "nanogpt")
MODES = ("none", "triton_free", "inductor")
WARMUP = 5  # optimizer steps before anything is timed
FORMULAS = {
    "tokens_per_second": "tokens of an optimizer step / median over the turns of seconds a step",
    "mfu": "flops_per_token x tokens_per_second / dense peak of the device in this precision, with our decoder's "
    "flops_per_token; only where the architecture is the same",
    "mfu_full_attention": "the same with causal attention counted by its full length, as nanochat and PaLM count",
    "ratios": "median over the rounds of: seconds of the other's turn / seconds of ours in the same round",
    "peak_bytes": "most bytes that tensors held, or on a CPU the process, from the start to the end of the warm-up",
    "first_step_s": "from the start of the process to the end of the first optimizer step",
}


def main(arguments: list[str]) -> None:
    from lm.cli import request
    from lm.cli.brief_fit import find_vocab_size
    from lm.errors import RequestError
    from lm.system.files import write_atomically

    parser = argparse.ArgumentParser(
        "peers.py", description="Time a training step of a config's decoder here and in other projects, in turns."
    )
    parser.add_argument("--contenders", nargs="+", default=[], help="Some only: lm:MODE, PROJECT[+inductor].")
    for project in PROJECTS[1:]:
        parser.add_argument(f"--{project}", type=Path, help="Where its sources are.")
    parser.add_argument("--accumulate", type=int, default=1, help="Micro-batches of an optimizer step.")
    parser.add_argument("--steps", type=int, default=5, help="Optimizer steps of a turn.")
    parser.add_argument("--rounds", type=int, default=5, help="Turns of each contender.")
    parser.add_argument("--output", type=Path,
                        help="File to write the JSON object to, after each contender's setup and each round.")  # fmt: skip
    options, rest = parser.parse_known_args(arguments)
    try:
        config = request.read("plan", rest)
        decoder = vars(config.model.decoder) | {"vocab_size": find_vocab_size(config)}
    except RequestError as error:
        sys.exit(f"peers.py: {error}")
    folders = vars(options)
    task = {
        "config": config.run_name, "decoder": decoder, "seq_len": config.data.seq_len,
        "micro_batch_size": config.data.micro_batch_size, "accumulate": options.accumulate,
        "precision": str(config.trainer.precision), "steps": options.steps,
        "paths": {name: str(folders[name].resolve()) for name in PROJECTS[1:] if folders[name]},
    }  # fmt: skip
    if options.rounds < 1 or options.steps < 1:
        sys.exit("peers.py: --rounds and --steps must be at least 1")

    def write(found: dict[str, Any]) -> None:
        if options.output:
            write_atomically(options.output, json.dumps(found, indent=2) + "\n")

    show(compare(task, options.contenders or everyone(), options.rounds, write))


def everyone() -> list[str]:
    """All contenders, in the order of their turns."""
    import torch

    modes = MODES if torch.cuda.is_available() else MODES[:4]
    return [f"lm:{mode}" for mode in modes] + [f"{p}{c}" for p in PROJECTS for c in ("", "+inductor")]


def compare(
    task: dict[str, Any], names: list[str], rounds: int, write: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Let the contenders take turns, and report; one that breaks is out, and the others continue.

    `write` gets the report so far after each contender is set up and after each round.
    """
    contenders, unavailable = {}, {}
    turns: dict[str, list[float]] = {}

    def report_so_far() -> dict[str, Any]:
        found = report(task, {name: started for name, (_, started) in contenders.items()}, turns, unavailable)
        write(found)
        return found

    for name in names:
        process = Process(name, task)
        started = process.read()
        if "unavailable" in started:
            unavailable[name] = started["unavailable"]
        else:
            contenders[name], turns[name] = (process, started), []
        found = report_so_far()
    for _ in range(rounds):
        for name, (process, _) in list(contenders.items()):
            answer = process.turn()
            if "unavailable" in answer:
                unavailable[name] = f"ended in turn {len(turns.pop(name)) + 1}: {answer['unavailable']}"
                del contenders[name]
            else:
                turns[name].append(answer["seconds"])
        found = report_so_far()
    for process, _ in contenders.values():
        process.end()
    return found


def report(
    task: dict[str, Any], started: dict[str, dict], turns: dict[str, list[float]], unavailable: dict[str, str]
) -> dict[str, Any]:
    """The JSON object, of what each contender said when it was set up and of its seconds a step in each turn."""
    from lm.system.process import run_facts

    facts = run_facts()
    tokens = task["micro_batch_size"] * task["seq_len"] * task["accumulate"]
    figures = {}
    for name, said in started.items():
        flops, full, peak = (said[key] for key in ("flops_per_token", "full_flops", "peak_flops"))
        seconds = statistics.median(turns[name]) if turns[name] else None
        rate = tokens / seconds if seconds else None
        figures[name] = {
            "ms_per_step": seconds and seconds * 1e3, "tokens_per_second": rate,
            "mfu": rate * flops / peak if rate and peak and flops else None,
            "mfu_full_attention": rate * full / peak if rate and peak and full else None,
            **{key: said[key] for key in said if key not in ("flops_per_token", "full_flops", "peak_flops")},
        }  # fmt: skip
    ranked = ranking(turns, figures) if all(turns.values()) else {}
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **{key: value for key, value in task.items() if key != "paths"},
        "tokens_per_step": tokens, "rounds": max(map(len, turns.values()), default=0), "python": facts["python"],
        "versions": facts["versions"], "contenders": figures, "unavailable": unavailable, **ranked,
        "formulas": FORMULAS,
    }  # fmt: skip


def ranking(turns: dict[str, list[float]], figures: dict[str, Any]) -> dict[str, Any]:
    """Our fastest mode beside each peer, and beside the fastest of those with the same architecture."""
    mine = {name: figure for name, figure in figures.items() if name.startswith("lm:")}
    peers = {name: figure for name, figure in figures.items() if name not in mine}
    if not mine or not peers:
        return {}
    best = min(mine, key=lambda name: mine[name]["ms_per_step"])
    ratios = {
        name: statistics.median(theirs / ours for ours, theirs in zip(turns[best], turns[name], strict=True))
        for name in peers
    }
    same = [name for name in peers if peers[name]["same_architecture"]] or list(peers)
    rival = min(same, key=lambda name: peers[name]["ms_per_step"])
    return {
        "ours": best,
        "ratios": ratios,
        "best_peer": rival,
        "speed_to_best_peer": ratios[rival],
        "memory_to_best_peer": mine[best]["peak_bytes"] / peers[rival]["peak_bytes"],
    }


class Process:
    """A contender at work in its own process; a line of JSON is a request or an answer."""

    def __init__(self, name: str, task: dict[str, Any]) -> None:
        self._name, request = name, json.dumps(task | {"contender": name})
        self._errors = tempfile.TemporaryFile("w+")  # a pipe would fill up
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--as-contender", request], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True,
        )  # fmt: skip

    def read(self) -> dict[str, Any]:
        """The next answer; `unavailable` where the process is gone."""
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()
        print(f"{self._name}:\n{said}", file=sys.stderr, flush=True)
        lines = said.strip().splitlines()
        killed = code < 0 or not lines  # then the last line, if there is one, is about something else
        return {"unavailable": f"exit code {code}" if killed else lines[-1]}

    def turn(self) -> dict[str, Any]:
        """The answer to a turn: `seconds` a step."""
        with suppress(BrokenPipeError):  # it may be gone since its last turn, and `read` says why
            self._process.stdin.write("turn\n")
            self._process.stdin.flush()
        return self.read()

    def end(self) -> None:
        self._process.communicate()


def contend(task: dict[str, Any]) -> None:
    """What a contender's process does: set up, then a turn for each line it gets."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not an answer
    sys.path[:0] = [
        str(Path(__file__).parent),
        *(f"{path}{src}" for path in task["paths"].values() for src in ("", "/src")),
    ]

    import torch
    from peer_models import Training, build

    from lm.cli.bench_step import now, peak_memory
    from lm.model.config import DecoderConfig
    from lm.model.estimates import flops_per_token
    from lm.system.devices import peak_flops
    from lm.system.hardware import device_name, keep_freed_memory
    from lm.system.process import seconds_since_process_start

    half = {"bf16-mixed": torch.bfloat16, "32-true": None}
    if task["precision"] not in half:
        raise ValueError(f"peers are compared in bf16-mixed or 32-true, not {task['precision']}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        keep_freed_memory()  # for all of them: `lm fit` does so, and it is not the model's merit
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = DecoderConfig(**task["decoder"])
    shape = (task["accumulate"], task["micro_batch_size"], task["seq_len"] + 1)
    tokens = torch.randint(config.vocab_size, shape, device=device)
    precision = half[task["precision"]]
    contender = build(task["contender"], config, task["seq_len"], device, precision)
    batches = (tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous())
    training = Training(contender, batches, precision)
    first = float(training.step())
    age = seconds_since_process_start()
    for _ in range(WARMUP - 1):
        training.step()
    now(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the others want to be there, too
    name = device_name(device)
    answers.write(json.dumps({
        "device": name, "first_step_s": age, "first_loss": first, "peak_bytes": peak_memory(device),
        "same_architecture": contender.same, "parameters": sum(p.numel() for p in contender.model.parameters()),
        "flops_per_token": flops_per_token(config, task["seq_len"]) if contender.same else None,
        "full_flops": flops_per_token(config, task["seq_len"], full_attention=True) if contender.same else None,
        # fp32 products may use TF32 here, for all contenders.
        "peak_flops": peak_flops(name, "tf32" if task["precision"] == "32-true" else task["precision"]),
    }) + "\n")  # fmt: skip
    for _ in sys.stdin:
        begun = now(device)
        for _ in range(task["steps"]):
            training.step()
        answers.write(json.dumps({"seconds": (now(device) - begun) / task["steps"]}) + "\n")


def show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from lm.system.units import format_count

    title = f"{found['config']}, {found['micro_batch_size']} x {found['seq_len']} tokens, {found['precision']}"
    table = Table(title=title)
    for column in ("contender", "ms a step", "tokens/s", "MFU", "full", "peak MiB", "first step s", "parameters"):
        table.add_column(column, no_wrap=column == "contender")
    for name, figure in found["contenders"].items():
        mfu = ["unknown" if figure[key] is None else f"{figure[key]:.1%}" for key in ("mfu", "mfu_full_attention")]
        age = figure["first_step_s"]
        table.add_row(
            name, f"{figure['ms_per_step']:.1f}", format_count(figure["tokens_per_second"]), *mfu,
            f"{figure['peak_bytes'] / 2**20:,.0f}", "unknown" if age is None else f"{age:.1f}",
            format_count(figure["parameters"]) + ", others" * (not figure["same_architecture"]),
        )  # fmt: skip
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print("MFU: by what causal attention attends to; full: by its full length, as nanochat and PaLM count")
    for name, reason in found["unavailable"].items():
        console.print(f"{name} is unavailable: {reason}")
    if "best_peer" in found:
        console.print(
            f"{found['ours']} is {found['speed_to_best_peer']:.2f}x as fast as {found['best_peer']}, with "
            f"{found['memory_to_best_peer']:.2f}x of its peak memory"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-contender"]:
        contend(json.loads(sys.argv[2]))
    else:
        main(sys.argv[1:])

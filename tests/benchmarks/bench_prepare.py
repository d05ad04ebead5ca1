"""How long it takes from text to shards: `lm data prepare` beside other projects, with one vocabulary.

    python tests/benchmarks/bench_prepare.py --megabytes 200 --output tests/benchmarks/results/DATE-prepare-cpu.json

Each contender is a process of its own that reads JSON lines, encodes with two processes and writes all tokens. Of
several turns the fastest counts. It needs `pip install datasets tiktoken datatrove orjson`; what is not there is left
out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # lm, which may not be installed

from lm.data.config import PrepareOptions
from lm.data.prepare import prepare
from lm.system.units import Count

SPEECHES = Path(__file__).resolve().parents[2] / "lm/data/corpus/sotu.parquet"
PROCESSES = 2
# Contender -> its program; the arguments are the text, the folder of the tokenizer, and the folder to write.
CONTENDERS = {
    "lm": f"""
import sys
from lm.data.config import PrepareOptions
from lm.data.prepare import prepare
if __name__ == "__main__":
    prepare(PrepareOptions([sys.argv[1]], sys.argv[3] + "/out", sys.argv[2], workers={PROCESSES}))
""",
    "datasets.map, tokenizers": f"""
import sys
from datasets import load_dataset
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2] + "/tokenizer.json")
def encode(batch):
    return {{"input_ids": [one.ids + [0] for one in tokenizer.encode_batch_fast(batch["text"])]}}
if __name__ == "__main__":
    texts = load_dataset("json", data_files=sys.argv[1] + "/*.jsonl", split="train", cache_dir=sys.argv[3])
    options = dict(batched=True, remove_columns=["text"], num_proc={PROCESSES}, new_fingerprint="encoded")
    texts.map(encode, **options).to_parquet(sys.argv[3] + "/out.parquet")
""",
    "datasets.map, tiktoken": f"""
import json, sys
from datasets import load_dataset
import tiktoken
description = json.load(open(sys.argv[2] + "/tokenizer.json"))
visible = {{*range(33, 127), *range(161, 173), *range(174, 256)}}
hidden = [byte for byte in range(256) if byte not in visible]
alphabet = {{chr(byte if byte in visible else 256 + hidden.index(byte)): byte for byte in range(256)}}
ranks = {{bytes(alphabet[sign] for sign in token): number for token, number in description["model"]["vocab"].items()
         if number}}
pattern = description["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
encoding = tiktoken.Encoding("mine", pat_str=pattern, mergeable_ranks=ranks, special_tokens={{}})
def encode(batch):
    return {{"input_ids": [ids + [0] for ids in encoding.encode_ordinary_batch(batch["text"], num_threads=1)]}}
if __name__ == "__main__":
    texts = load_dataset("json", data_files=sys.argv[1] + "/*.jsonl", split="train", cache_dir=sys.argv[3])
    options = dict(batched=True, remove_columns=["text"], num_proc={PROCESSES}, new_fingerprint="encoded")
    texts.map(encode, **options).to_parquet(sys.argv[3] + "/out.parquet")
""",
    "datatrove": f"""
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
if __name__ == "__main__":
    tokens = DocumentTokenizer(sys.argv[3] + "/out", tokenizer_name_or_path=sys.argv[2] + "/tokenizer.json",
                               eos_token="<|endoftext|>", shuffle_documents=False)
    LocalPipelineExecutor([JsonlReader(sys.argv[1]), tokens], tasks={PROCESSES}, workers={PROCESSES},
                          logging_dir=sys.argv[3] + "/logs").run()
""",
}


def write_text(folder: Path, megabytes: float) -> int:
    """Write speeches as JSON lines, in two files, each copy with other numbers in it; returns the bytes of text."""
    speeches, written, copy = pq.read_table(SPEECHES)["text"].to_pylist(), 0, 0
    files = [open(folder / f"{number}.jsonl", "w") for number in range(PROCESSES)]
    while written < megabytes * 1e6:
        for number, speech in enumerate(speeches):
            text = speech.replace(". ", f". {copy}", 3)
            files[number % PROCESSES].write(json.dumps({"text": text}) + "\n")
            written += len(text.encode())
        copy += 1
    for file in files:
        file.close()
    return written


def measure(program: str, text: Path, tokenizer: Path, folder: Path) -> float:
    """Seconds of a process and its children."""
    (folder / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(SPEECHES.parents[3]), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "program.py", str(text), str(tokenizer), str(folder)]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--vocab_size", type=int, default=32_768)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        text, tokenizer = Path(place) / "text", Path(place) / "tokenizer"
        text.mkdir()
        size = write_text(text, options.megabytes)
        prepare(PrepareOptions(["embedded:sotu"], str(tokenizer), vocab_size=Count(options.vocab_size)))
        results: dict[str, float] = {}
        for _ in range(options.turns):
            for name, program in CONTENDERS.items():
                with tempfile.TemporaryDirectory(dir=place) as folder:
                    try:
                        found = measure(program, text, tokenizer, Path(folder))
                    except RuntimeError as error:
                        print(f"{name}: left out: {error}")
                        continue
                results[name] = min(found, results.get(name, found))
    for name, seconds in results.items():
        print(f"{name}: {seconds:.1f} s, {size / seconds / 1e6:.1f} MB/s")
    if options.output:
        date = time.strftime("%Y-%m-%d", time.gmtime())
        facts = {"date": date, "bytes": size, "processes": PROCESSES, "cores": os.cpu_count(), "seconds": results}
        options.output.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()

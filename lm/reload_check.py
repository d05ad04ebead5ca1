"""Whether a model folder is, to a process that knows nothing of this one, the model that it was made of.

The process that made the folder writes down what its own model computes; a new Python process loads the folder, with
transformers where that is installed, and compares: the tokenizer's ids and texts, logits in fp32, greedy tokens.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm.errors import RunError

if TYPE_CHECKING:
    from lm.model.decoder import Decoder
    from lm.pretrained import Pretrained

TEXTS = ("The", "In the beginning there was", "Zürich, naïve: 3.14 km²\n\tand 日本語.")
NEW_TOKENS = 16  # that are generated after each text
LAST = 32  # tokens whose logits are compared: those that have all others before them
MOST = 2048  # tokens of the sequence that they are of
# Of the largest logit: both sides multiply in fp32, in another order. Two tokens that are nearer to each other than
# this may change places, so greedy tokens are compared up to there.
TOLERANCE = 1e-4


class Reloaded(NamedTuple):
    """What the other process found.

    Args:
        loader: what it loaded the folder with, and its version.
        difference: between the logits, the largest, as a share of the largest logit.
        tokens: greedy tokens that were compared.
        problems: what is not the same, in words; empty where all is.
    """

    loader: str
    difference: float
    tokens: int
    problems: list[str]


def reload(folder: Path, model: "Pretrained", dtype: str) -> Reloaded:
    """Load a folder in a new process and compare it with the model that it was made of.

    Args:
        folder: a Hugging Face model.
        model: with the very weights that the folder is to have; they are widened to fp32 here, in place.
        dtype: which the folder's weights are to have: "float32", "bfloat16" or "float16".

    Raises:
        RunError: it could not be loaded, or anything differs.
    """
    with tempfile.TemporaryDirectory(prefix="lm-reload-") as place:
        expected, logits = expect(model, dtype)
        Path(place, "expected.json").write_text(json.dumps(expected), encoding="utf-8")
        save_file(logits, Path(place, "logits.safetensors"))
        package = str(Path(__file__).parent.parent)
        paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        quiet = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
        process = subprocess.run(
            # -P: nothing of the working directory is imported.
            [sys.executable, "-P", "-m", "lm.reload_check", str(folder.absolute()), place],
            capture_output=True, text=True, env={**os.environ, **quiet},
        )  # fmt: skip
    if process.returncode:
        reason = (process.stderr.strip() or "it said nothing").splitlines()[-1]
        raise RunError(f"a new process cannot load what was written: {reason}")
    found = Reloaded(**json.loads(process.stdout.splitlines()[-1]))
    if found.problems:
        raise RunError(f"what was written is another model to {found.loader}: {'; '.join(found.problems)}")
    return found


# ---- the process that knows the model --------------------------------------------------------------------------------


@torch.no_grad()
def expect(model: "Pretrained", dtype: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the other process is to find: for JSON, and `sequence` (T,) with its last `logits` (t, V)."""
    decoder, tokenizer = model.decoder.float().cpu(), model.tokenizer
    context = model.config.max_position_embeddings
    widest = max((window or 0 for window in model.config.windows), default=0)
    generator = torch.Generator().manual_seed(0)
    length = min(context, widest + 2 * LAST, MOST)
    sequence = torch.randint(tokenizer.vocab_size, (length,), generator=generator)  # (T,)
    logits = decoder(sequence[None])[0, -LAST:].clone()  # (t, V)
    near = TOLERANCE * logits.abs().max().item()
    texts = []
    for text in TEXTS:
        ids = tokenizer.encode(text) or [tokenizer.eos_id]
        prompt = ids[: max(1, context - NEW_TOKENS)]
        count = min(NEW_TOKENS, context - len(prompt))
        texts.append({
            "text": text, "ids": tokenizer.encode(text), "decoded": tokenizer.decode(tokenizer.encode(text)),
            "prompt": prompt, "count": count, "tokens": greedy(decoder, prompt, count, tokenizer.eos_id, near),
        })  # fmt: skip
    expected = {"dtype": dtype, "eos_id": tokenizer.eos_id, "eos_token": tokenizer.eos_token, "texts": texts}
    return expected, {"sequence": sequence, "logits": logits}


def greedy(decoder: "Decoder", prompt: list[int], count: int, eos_id: int, near: float = 0.0) -> list[int]:
    """The likeliest tokens after a prompt, with no cache, so that a wrong one cannot hide.

    Args:
        prompt: token ids.
        count: the most tokens.
        eos_id: ends them, and is the last.
        near: stops before a token whose lead over the next likeliest one is no larger than this.
    """
    ids, tokens = list(prompt), []
    while len(tokens) < count and (not tokens or tokens[-1] != eos_id):
        best = decoder(torch.tensor([ids]))[0, -1].float().topk(2)
        if best.values[0] - best.values[1] <= near:
            break
        tokens.append(int(best.indices[0]))
        ids.append(tokens[-1])
    return tokens


# ---- the process that does not ---------------------------------------------------------------------------------------


def main(folder: Path, place: Path) -> None:
    """Load, compare, and print a `Reloaded` as JSON."""
    expected = json.loads((place / "expected.json").read_text(encoding="utf-8"))
    tensors = load_file(place / "logits.safetensors")
    by_transformers = find_spec("transformers") is not None
    found = (_with_transformers if by_transformers else _with_lm)(folder, expected, tensors["sequence"])
    loader, logits, generated, problems = found
    difference = ((logits - tensors["logits"]).abs().max() / tensors["logits"].abs().max()).item()
    if not difference <= TOLERANCE:  # also where it is not a number
        problems.append(f"the logits differ by {difference:.1e} of the largest")
    for wanted, tokens in zip(expected["texts"], generated, strict=True):
        if tokens[: len(wanted["tokens"])] != wanted["tokens"]:
            problems.append(f"after {wanted['text']!r} the likeliest tokens are {tokens}, not {wanted['tokens']}")
    compared = sum(len(wanted["tokens"]) for wanted in expected["texts"])
    print(json.dumps(Reloaded(loader, difference, compared, problems)._asdict()))


def _with_transformers(folder: Path, expected: dict[str, Any], sequence: Tensor) -> tuple:
    import transformers

    problems = []
    transformers.utils.logging.disable_progress_bar()
    old = tuple(map(int, transformers.__version__.split(".")[:2])) < (4, 56)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **{"torch_dtype" if old else "dtype": "auto"}
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            problems.append(f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, report[kind]))[:3])}")
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype != expected["dtype"]:
        problems.append(f"the weights are {dtype}, not {expected['dtype']}")
    model = model.float().eval()
    with torch.no_grad():
        logits = model(sequence[None]).logits[0, -LAST:]
    generated = []
    for wanted in expected["texts"]:
        ids = torch.tensor([wanted["prompt"]])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=wanted["count"], do_sample=False)
        generated.append(out[0, ids.shape[1] :].tolist())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if extra := set(tokenizer(TEXTS[0])) - {"input_ids", "attention_mask"}:
        problems.append(f"the tokenizer gives {', '.join(sorted(extra))}, which the model does not take")
    for wanted in expected["texts"]:
        ids = tokenizer(wanted["text"], add_special_tokens=False)["input_ids"]
        problems += _tokens_differ(wanted, ids, tokenizer.decode(wanted["ids"]))
    eos_id, eos_token = expected["eos_id"], expected["eos_token"]
    ends = (tokenizer.eos_token_id, tokenizer(eos_token, add_special_tokens=False)["input_ids"])
    if ends != (eos_id, [eos_id]) or tokenizer.decode([eos_id]) != eos_token:
        problems.append(f"{eos_token} is {ends[1]} to the tokenizer, not the one id {eos_id}")
    return f"transformers {transformers.__version__}", logits, generated, problems


def _with_lm(folder: Path, expected: dict[str, Any], sequence: Tensor) -> tuple:
    from lm import __version__
    from lm.pretrained import load_pretrained

    problems = []
    model = load_pretrained(folder, device="cpu")
    if str(model.dtype) != f"torch.{expected['dtype']}":
        problems.append(f"the weights are {model.dtype}, not {expected['dtype']}")
    decoder = model.decoder.float()
    with torch.no_grad():
        logits = decoder(sequence[None])[0, -LAST:]
        generated = [
            greedy(decoder, wanted["prompt"], wanted["count"], expected["eos_id"]) for wanted in expected["texts"]
        ]
    for wanted in expected["texts"]:
        ids = model.tokenizer.encode(wanted["text"])
        problems += _tokens_differ(wanted, ids, model.tokenizer.decode(wanted["ids"]))
    return f"lm {__version__}", logits, generated, problems


def _tokens_differ(wanted: dict[str, Any], ids: list[int], decoded: str) -> list[str]:
    if list(ids) != wanted["ids"]:
        return [f"{wanted['text']!r} is {list(ids)} to the tokenizer, not {wanted['ids']}"]
    if decoded != wanted["decoded"]:
        return [f"{wanted['ids']} is {decoded!r} to the tokenizer, not {wanted['decoded']!r}"]
    return []


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

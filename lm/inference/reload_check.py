"""Whether an exported folder is the model that it was made of: a new process loads it and must compute the same.

The new process (`python -m lm.inference.reload_check`) uses transformers where that is installed, else this package.
Compared are the ids of some texts, and logits: of random ids, and of each text with the likeliest tokens after it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm import __version__
from lm.errors import RunError
from lm.inference.pretrained import Pretrained, load_pretrained

TEXTS = ("The", "In the beginning there was", "Zürich, naïve: 3.14 km²\n\tand 日本語.")
NEW_TOKENS = 16  # that follow each text
LAST = 32  # tokens of a sequence whose logits are compared: those that have all others before them
LONGEST = 2048  # sequence
# Of the largest logit: both sides multiply in fp32, in another order. Two tokens that are nearer to each other than
# this may change places, so such a place is not counted among the likeliest tokens.
TOLERANCE = 1e-4


class Reloaded(NamedTuple):
    """What a new process computed like the model itself.

    Args:
        loader: what it loaded the folder with, and its version.
        difference: between the logits, the largest, as a share of the largest logit.
        tokens: places after the texts whose likeliest token is the same.
    """

    loader: str
    difference: float
    tokens: int


def check_reload(folder: Path, model: Pretrained) -> Reloaded:
    """Load a folder in a new process and compare it with the model that it was made of.

    Args:
        folder: a Hugging Face model.
        model: with the very weights that the folder is to have; they are widened to fp32 here, in place.

    Raises:
        RunError: the folder could not be loaded, or anything differs.
    """
    sequences = choose_sequences(model)
    loader, ids, logits = _load_in_new_process(folder, sequences)
    return compare(model, sequences, loader, ids, logits)


@torch.no_grad()
def choose_sequences(model: Pretrained) -> list[Tensor]:
    """Random ids, so many that a wrong window shows, and each text with the likeliest tokens after it."""
    decoder, context = model.decoder.float().cpu(), model.config.max_position_embeddings
    widest = max((window or 0 for window in model.config.windows), default=0)
    length = min(context, widest + 2 * LAST, LONGEST)
    sequences = [torch.randint(model.tokenizer.vocab_size, (length,), generator=torch.Generator().manual_seed(0))]
    for text in TEXTS:
        ids = (model.tokenizer.encode(text) or [model.tokenizer.eos_id])[: max(1, context - NEW_TOKENS)]
        for _ in range(min(NEW_TOKENS, context - len(ids))):
            ids.append(int(decoder(torch.tensor([ids]))[0, -1].argmax()))
        sequences.append(torch.tensor(ids))
    return sequences


@torch.no_grad()
def last_logits(decoder: Callable[[Tensor], Tensor], sequences: list[Tensor]) -> list[Tensor]:
    """The logits `(LAST or fewer, V)` at the end of each sequence, by a function of ids `(1, T)`."""
    return [decoder(sequence[None])[0, -LAST:].clone() for sequence in sequences]


def compare(
    model: Pretrained, sequences: list[Tensor], loader: str, ids: list[list[int]], logits: list[Tensor]
) -> Reloaded:
    """Hold what was computed from a folder against the model.

    Args:
        model: that the folder was made of, in fp32.
        sequences: as `choose_sequences` gives them.
        loader: what loaded the folder.
        ids: of `TEXTS`, by the folder's tokenizer.
        logits: `last_logits` by the folder's model.

    Raises:
        RunError: anything differs.
    """
    problems = []
    for text, found in zip(TEXTS, ids, strict=True):
        if found != (wanted := model.tokenizer.encode(text)):
            problems.append(f"{text!r} is {found} to the tokenizer, not {wanted}")
    expected = last_logits(model.decoder, sequences)
    largest = max(wanted.abs().max().item() for wanted in expected)
    difference = max((a - b).abs().max().item() for a, b in zip(logits, expected, strict=True)) / largest
    if not all(found.isfinite().all() for found in logits) or difference > TOLERANCE:
        problems.append(f"the logits differ by {difference:.1e} of the largest")
    tokens = 0
    for text, found, wanted in zip(TEXTS, logits[1:], expected[1:], strict=True):
        best = wanted.topk(2)
        sure = (best.values[:, 0] - best.values[:, 1] > TOLERANCE * largest)[-NEW_TOKENS:]
        same = (found.argmax(-1) == best.indices[:, 0])[-NEW_TOKENS:]
        tokens += int((sure & same).sum())
        if (sure & ~same).any():
            problems.append(f"after {text!r} other tokens are the likeliest")
    if problems:
        raise RunError(f"what was written is another model to {loader}: {'; '.join(problems)}")
    return Reloaded(loader, difference, tokens)


# ---- the new process -------------------------------------------------------------------------------------------------


def _load_in_new_process(folder: Path, sequences: list[Tensor]) -> tuple[str, list[list[int]], list[Tensor]]:
    """Loader, ids of `TEXTS` and logits, as `compare` takes them."""
    package = str(Path(__file__).parent.parent.parent)
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    quiet = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    with tempfile.TemporaryDirectory(prefix="lm-reload-") as place:
        save_file({str(index): sequence for index, sequence in enumerate(sequences)}, Path(place, "sequences"))
        process = subprocess.run(
            # -P: nothing of the working directory is imported.
            [sys.executable, "-P", "-m", "lm.inference.reload_check", str(folder.absolute()), place],
            capture_output=True, text=True, env={**os.environ, **quiet},
        )  # fmt: skip
        if process.returncode:
            reason = (process.stderr.strip() or "it said nothing").splitlines()[-1]
            raise RunError(f"a new process cannot load what was written: {reason}")
        logits = load_file(Path(place, "logits"))
    return *json.loads(process.stdout.splitlines()[-1]), [logits[str(index)] for index in range(len(sequences))]


def load_folder(folder: Path) -> tuple[str, Callable[[str], list[int]], Callable[[Tensor], Tensor]]:
    """What loads a folder here, its tokenizer as text -> ids, and its model in fp32 as ids `(1, T)` -> logits."""
    if find_spec("transformers") is None:
        model = load_pretrained(folder, device="cpu", dtype=torch.float32)
        return f"lm {__version__}", model.tokenizer.encode, model.decoder
    import transformers

    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return (
        f"transformers {transformers.__version__}",
        lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
        lambda ids: theirs(ids).logits,
    )


def main(folder: Path, place: Path) -> None:
    """Compute what is compared: write the logits to `place`, and print the loader and the ids of `TEXTS`."""
    loader, encode, decoder = load_folder(folder)
    sequences = load_file(place / "sequences")
    logits = last_logits(decoder, [sequences[str(index)] for index in range(len(sequences))])
    save_file({str(index): found for index, found in enumerate(logits)}, place / "logits")
    print(json.dumps([loader, [encode(text) for text in TEXTS]]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

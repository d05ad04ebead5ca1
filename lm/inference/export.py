"""The parts of an export beside the weights: a model card, and the check that others load the same model.

The card's front matter is read by the Hugging Face Hub (https://huggingface.co/docs/hub/model-cards). Everything
else is tables of names and texts, from the folder of the model's run. Unknown values are left out, and no text has
folders of the machine or secrets of a URL, so that the card may be published.
"""

import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCardData
from torch import Tensor

from lm import __version__
from lm.data.chat import template_of
from lm.errors import RunError, first_line
from lm.inference.pretrained import Pretrained, load_pretrained
from lm.model.estimates import flops_per_token, parameters
from lm.model.huggingface import config_json
from lm.runs.checkpoint import read_progress
from lm.runs.evaluations import evaluation_rows, merge_evaluations
from lm.runs.metrics import METRICS
from lm.runs.run import Run
from lm.system.units import format_count, listed

Rows = dict[str, Any]  # name -> value of a table; None if not known
SHOWN_SOURCES = 12

USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{name}"  # this folder, or its name on the Hub
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer("The", return_tensors="pt")
tokens = model.generate(**prompt, max_new_tokens=50, do_sample=True, temperature=0.8)
print(tokenizer.decode(tokens[0]))
```"""
USE_CHAT = """```python
from transformers import pipeline

assistant = pipeline("text-generation", "{name}")  # this folder, or its name on the Hub
answer = assistant([{{"role": "user", "content": "Hello"}}], max_new_tokens=50)
print(answer[0]["generated_text"][-1]["content"])
```"""
USE_LLAMA_CPP = """```sh
llama-cli -m {file} {options}
ollama create {name} -f Modelfile && ollama run {name} "{prompt}"
```"""
BEGINNING = (
    "`{eos}` ends every document that the model was trained on, and so begins the next: put it before a prompt that is "
    "to be the beginning of a text."
)
LIMITS = (
    "The model repeats what its texts were like, their errors and prejudices included, and states falsehoods as "
    "fluently as facts. Check what it writes before you rely on it. It sees at most {:,} tokens."
)


@dataclass(frozen=True)
class Card:
    """What the publisher of a model decides."""

    name: str
    license: str = "unknown"  # as the Hub names it
    language: tuple[str, ...] = ()  # ISO 639 codes
    gguf: str | None = None  # the file for llama.cpp, in place of a Hugging Face folder


def model_card(model: Pretrained, card: Card) -> str:
    """The `README.md` of a model, with the history of the run that its folder is in, if any."""
    run = Run.of(model.path)
    sections = {}
    if run is not None:
        sections["Data"] = _table(data_rows(model, run))
        sections["Training"] = f"{_table(training_rows(model, run))}\n\n```yaml\n{training_options(run)}```"
        if results := result_rows(model, run):
            sections["Results"] = _table(results)
    chat = template_of(model.tokenizer) is not None
    options = {"options": "", "prompt": "Hello"} if chat else {"options": '-no-cnv -p "The"', "prompt": "The"}
    use = USE_LLAMA_CPP if card.gguf else USE_CHAT if chat else USE
    sections["Use"] = use.format(name=card.name, file=card.gguf, **options)
    if run is not None and not chat:
        sections["Use"] += "\n\n" + BEGINNING.format(eos=model.tokenizer.eos_token)
    sections["Limits"] = LIMITS.format(model.config.max_position_embeddings)
    text = "".join(f"\n## {title}\n\n{content}\n" for title, content in sections.items())
    head = f"# {card.name}\n\n{_opening(model, run)}\n"
    return f"---\n{_front_matter(model, card, run).to_yaml()}\n---\n\n{head}{text}"


def _front_matter(model: Pretrained, card: Card, run: Run | None) -> ModelCardData:
    names = [name for source in _options(run) for name in files_of(run, source)] if run else []
    matches = [re.match(r"hf://datasets/([^/@]+/[^/@]+)", name) for name in names]
    return ModelCardData(
        language=list(card.language) or None,
        license=card.license.lower(),
        library_name="gguf" if card.gguf else "transformers",
        pipeline_tag="text-generation",
        tags=[
            *(["conversational"] if template_of(model.tokenizer) else []),
            "causal-lm",
            config_json(model.config, model.tokenizer.eos_id, "float32")["model_type"],
        ],
        datasets=sorted({match[1] for match in matches if match}) or None,
    )


def _opening(model: Pretrained, run: Run | None) -> str:
    count = format_count(parameters(model.config)["total"])
    text = f"A language model of {count} parameters, a decoder that continues a text token by token."
    if run is None:
        return text
    began = "from the weights of another model" if run.read("run.json").get("began_from") else "from scratch"
    if _manifest(run).get("labels"):
        return f"{text} It was trained {began} on conversations, of which it learned the assistant's answers."
    return f"{text} It was trained {began} on plain text; it was not tuned to follow instructions or to chat."


def _table(rows: Rows) -> str:
    lines = ["|  |  |", "| --- | --- |"]
    for row in rows.items():
        if row[1] is not None:
            name, text = (str(cell).replace("\n", " ").replace("|", "\\|") for cell in row)
            lines.append(f"| {name} | {text} |")
    return "\n".join(lines)


# ---- data ------------------------------------------------------------------------------------------------------------


def data_rows(model: Pretrained, run: Run) -> Rows:
    """The training and validation data, the files of each source, and the tokenizer."""
    kind, rows = model.tokenizer.description["model"].get("type", ""), {}
    for source in _options(run):
        files = listed(list(dict.fromkeys(map(public_name, files_of(run, source)))), SHOWN_SOURCES)
        if source:  # of a mixture
            rows[f"source {source}"] = f"{_tokens(run, 'train', source):,} tokens: {files}"
        else:
            rows["sources"] = files or None
    return {
        **rows,
        "tokenizer": f"{'byte-level ' if model.tokenizer.byte_level else ''}{kind}, "
        f"{len(model.tokenizer.vocabulary):,} tokens",
        "training data": f"{_tokens(run, 'train'):,} tokens",
        "validation data": f"{held_out:,} tokens" if (held_out := _tokens(run, "val")) else None,
    }


def _shards(run: Run, split: str, source: str) -> list[list]:
    """The shards of a mixture's source, or all for an empty name: name, bytes, tokens and more."""
    shards = run.read("data.json").get(split, [])
    return [shard for shard in shards if not source or shard[0].startswith(f"{source}/")]


def _tokens(run: Run, split: str, source: str = "") -> int:
    return sum(shard[2] for shard in _shards(run, split, source))


def files_of(run: Run, source: str) -> list[str]:
    """The files or URLs that a source, or all data for an empty name, was made from; its shards if not known."""
    if manifest := _manifest(run, source):
        return [entry["name"] for entry in manifest.get("sources", [])]
    options = _options(run).get(source, {})
    files = options.get("train") or (options.get("prepare") or {}).get("input") or []
    return [files] if isinstance(files, str) else list(files)


def _options(run: Run) -> dict[str, dict[str, Any]]:
    """The options of each source of a mixture, by name; without a mixture, those of `data` under an empty name."""
    data = run.settings().get("data") or {}
    return {source["name"]: source for source in data.get("sources") or []} or {"": data}


def _manifest(run: Run, source: str = "") -> dict[str, Any]:
    """The manifest of `lm data prepare`; {} if it is missing, or the data was prepared again since."""
    try:
        folder = run.started_in() / _options(run)[source]["path"]
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        listed = {Path(shard["file"]).name: shard["size"] for shard in manifest["splits"]["train"]["shards"]}
        used = {Path(name).name: size for name, size, *_ in _shards(run, "train", source)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return manifest if listed == used else {}


def public_name(name: str) -> str:
    """A source's name without local or secret parts: the folders of a file, the user and the query of a URL."""
    if "://" in name and not name.startswith("file://"):
        return re.sub(r"//[^/]*@", "//", re.split(r"[?#]", name)[0])
    return name if name.startswith("embedded:") else Path(name).name


# ---- training --------------------------------------------------------------------------------------------------------


def training_rows(model: Pretrained, run: Run) -> Rows:
    """How the model was trained, beside its optimizer and schedule: steps, batch, hardware, FLOPs."""
    facts, (step, samples, *_), config = run.read("run.json"), read_progress(model.path), run.settings()
    seq_len = (config.get("data") or {}).get("seq_len") or model.config.max_position_embeddings
    planned, began_from = run.read("state.json").get("max_steps"), facts.get("began_from")
    batches = [entry["global_batch"] for entry in facts.get("stretches", []) if entry["step"] < step]
    return {
        "began from": f"the weights of {Path(began_from).name}" if began_from else None,
        "steps": f"{step:,}" + (f" of {planned:,}" if planned else ""),
        "tokens": f"{samples * seq_len:,}",
        "batch": f"{batches[-1] * seq_len:,} tokens: {batches[-1]:,} sequences of {seq_len:,}" if batches else None,
        "precision": (config.get("trainer") or {}).get("precision"),
        "hardware": f"{facts.get('world_size') or 1} x {facts['device']}" if facts.get("device") else None,
        "compute": f"{flops_per_token(model.config, seq_len) * samples * seq_len:.2e} floating-point operations: 6 a "
        "parameter and token, and those of attention",
        "seed": config.get("seed_everything"),
    }


def training_options(run: Run) -> str:
    """Optimizer and schedule as YAML, without what is not set."""
    model = run.settings().get("model") or {}
    options = _without_empty({name: model.get(name) for name in ("optimizer", "schedule")})
    return yaml.safe_dump(options, sort_keys=False, default_flow_style=None)


def _without_empty(options: Any) -> Any:
    if not isinstance(options, dict):
        return options
    given = {name: _without_empty(value) for name, value in options.items()}
    return {name: value for name, value in given.items() if value not in (None, {})}


# ---- results ---------------------------------------------------------------------------------------------------------


def result_rows(model: Pretrained, run: Run) -> Rows:
    """The validation at exactly this step, and the evaluations of it."""
    rows: Rows = {}
    if model.step is None:
        return rows
    for line in run.metrics():
        for name, metric in METRICS.items():
            if line["step"] == model.step and name.startswith("val/") and name in line:
                rows[f"{metric.label}, {metric.unit}".removesuffix(", ")] = metric.shown(line[name])
    evaluations = merge_evaluations(run.evaluations(), model.step)
    if evaluations is not None:
        rows |= {public_name(name): text for name, text in evaluation_rows(evaluations).items()}
        core = evaluations["core"]
        rows["mean of the accuracies, each centred on guessing"] = None if core is None else f"{core:.4f}"
    return rows


# ---- reload check ----------------------------------------------------------------------------------------------------

TEXTS = ("The", "In the beginning there was", "Zürich, naïve: 3.14 km²\n\tand 日本語.")  # compared by their ids
LAST = 32  # tokens at the end of a sequence whose logits are compared, with the most context
LONGEST = 2048  # tokens of a sequence
TOLERANCE = 1e-4  # of the largest logit: both sides compute in fp32, in different order


def check_reload(folder: Path, model: Pretrained) -> tuple[str, float]:
    """Load a folder as others do, and compare it with the model that it was exported from.

    It is loaded with transformers if installed, otherwise with this package. The ids of some texts are compared, and
    the logits of random ids; RunError if anything differs. The model's weights are converted to fp32, in place.

    Returns:
        The name and version of the loader, and the largest difference between logits, as a share of the largest logit.
    """
    widest = max((window or 0 for window in model.config.windows), default=0)
    length = min(model.config.max_position_embeddings, widest + 2 * LAST, LONGEST)  # long enough to show a wrong window
    ids = torch.randint(model.tokenizer.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    try:
        loader, texts, logits = _load_and_compute(folder, ids)
    except Exception as error:  # transformers may raise any kind
        raise RunError(f"what was written cannot be loaded: {first_line(error)}") from error
    problems = []
    for text, ids_of_text in zip(TEXTS, texts, strict=True):
        if ids_of_text != (expected_ids := model.tokenizer.backend.encode(text).ids):
            problems.append(f"{text!r} is {ids_of_text} to the tokenizer, not {expected_ids}")
    with torch.no_grad():
        expected = model.decoder.float().cpu()(ids)[0, -LAST:]
    difference = ((logits - expected).abs().max() / expected.abs().max()).item()
    if not difference <= TOLERANCE:  # NaN too
        problems.append(f"the logits differ by {difference:.1e} of the largest")
    if problems:
        raise RunError(f"what was written is another model to {loader}: {'; '.join(problems)}")
    return loader, difference


@torch.no_grad()
def _load_and_compute(folder: Path, ids: Tensor) -> tuple[str, list[list[int]], Tensor]:
    """The loader's name, the ids of `TEXTS`, and the logits `(LAST or fewer, V)` at the end of ids `(1, T)`."""
    if find_spec("transformers") is None:
        model = load_pretrained(folder, device="cpu", dtype=torch.float32)
        texts = [model.tokenizer.backend.encode(text).ids for text in TEXTS]
        return f"lm {__version__}", texts, model.decoder(ids)[0, -LAST:]
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).float().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = tokenizer(list(TEXTS))["input_ids"]
    return f"transformers {transformers.__version__}", texts, model(ids).logits[0, -LAST:]

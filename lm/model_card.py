"""The model card of an export: what the model is, what it was trained on and how, how good it is, how to use it.

`provenance` has the facts of the run. The front matter is what the Hugging Face Hub reads:
https://huggingface.co/docs/hub/model-cards.
"""

import re
from dataclasses import dataclass
from typing import Any

import yaml

from lm import __version__
from lm.model.accounting import parameters
from lm.model.huggingface import config_json
from lm.pretrained import Pretrained
from lm.provenance import Rows, data_rows, result_rows, sources, training_rows
from lm.quantities import format_count
from lm.runs import Run

# Identifiers that the Hub knows, of https://huggingface.co/docs/hub/repositories-licenses; it takes others by name.
LICENSES = set(
    "apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigcode-openrail-m afl-3.0 artistic-2.0 "
    "bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 "
    "cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 "
    "cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 wtfpl "
    "ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc "
    "lppl-1.3c ms-pl mpl-2.0 odc-by odbl osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl unknown other".split()
)

USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{name}"  # this folder, or its name on the Hub
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer("The", return_tensors="pt", add_special_tokens=False)
tokens = model.generate(**prompt, max_new_tokens=50, do_sample=True, temperature=0.8)
print(tokenizer.decode(tokens[0]))
```"""
BEGINNING = (
    "`{eos}` ends every document that the model was trained on, and so begins the next: put it before a prompt that is "
    "to be the beginning of a text."
)


@dataclass(frozen=True)
class Card:
    """What a person says of a model.

    Args:
        name: what the card calls it.
        license: an SPDX identifier, or "unknown".
        language: ISO 639 codes.
    """

    name: str
    license: str = "unknown"
    language: tuple[str, ...] = ()


def write_card(model: Pretrained, card: Card) -> str:
    """The text of the `README.md`.

    Args:
        model: in the number format of the export; the run that its folder is in, if any, tells how it was trained.
        card: what a person says of it.
    """
    run = Run.of(model.path)
    parts = [f"# {card.name}", _opening(model, run), "## Shape", _table(_shape(model))]
    if run is not None:
        parts += ["## Data", _table(data_rows(model, run)), "## Training", _table(training_rows(model, run))]
        if results := result_rows(model, run):
            parts += ["## Results", _table(results)]
    parts += ["## Use", USE.format(name=card.name)]
    if run is not None:
        parts.append(BEGINNING.format(eos=model.tokenizer.eos_token))
    parts += ["## Limits", _limits(model, card), "## Versions", _table(_versions(run))]
    front = yaml.safe_dump(_front_matter(model, card, run), sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n" + "\n\n".join(parts) + "\n"


def _front_matter(model: Pretrained, card: Card, run: Run | None) -> dict[str, Any]:
    known = card.license.lower() in LICENSES
    found = [re.match(r"hf://datasets/([^/@]+/[^/@]+)", name) for name in (sources(run) if run else [])]
    return {
        **({"language": list(card.language)} if card.language else {}),
        **({"license": card.license.lower()} if known else {"license": "other", "license_name": card.license}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["causal-lm", _architecture(model)["model_type"]],
        **({"datasets": sorted({match[1] for match in found if match})} if any(found) else {}),
    }


def _opening(model: Pretrained, run: Run | None) -> str:
    count = format_count(parameters(model.config)["total"])
    text = f"A language model of {count} parameters, a decoder that goes on with a text token by token."
    if run is None:
        return text
    began = "from the weights of another model" if run.read("run.json").get("began_from") else "from scratch"
    return f"{text} It was trained {began} on plain text; it was not tuned to follow instructions or to chat."


def _architecture(model: Pretrained) -> dict[str, Any]:
    return config_json(model.config, model.tokenizer.eos_id, str(model.dtype).removeprefix("torch."))


def _shape(model: Pretrained) -> Rows:
    config, counts = model.config, parameters(model.config)
    windows = [window for window in config.windows if window]
    normed = ", queries and keys normalised" if config.qk_norm else ""
    return {
        "architecture": _architecture(model)["architectures"][0],
        "parameters": f"{counts['total']:,}, of which {counts['non_embedding']:,} are not embedding or output",
        "layers": config.num_hidden_layers,
        "width": f"{config.hidden_size:,}; {config.intermediate_size:,} inside the MLP",
        "attention": f"{config.num_attention_heads} heads of {config.head_dim}, {config.num_key_value_heads} for keys "
        f"and values{normed}",
        "windows": f"{len(windows)} of the layers see {windows[0]:,} tokens" if windows else None,
        "context": f"{config.max_position_embeddings:,} tokens",
        "vocabulary": f"{config.vocab_size:,} tokens; the output matrix is "
        + ("the embedding" if config.tie_word_embeddings else "its own"),
        "weights": str(model.dtype).removeprefix("torch."),
    }


def _limits(model: Pretrained, card: Card) -> str:
    sentences = [
        "The model repeats what its texts were like, their errors and prejudices included, and states falsehoods as "
        "fluently as facts. Check what it writes before you rely on it.",
        f"It sees at most {model.config.max_position_embeddings:,} tokens.",
    ]
    if card.license.lower() == "unknown":
        sentences.append(
            "No licence was chosen yet: whoever publishes the model has to, and the licences of the texts may say "
            "which ones are possible."
        )
    return " ".join(sentences)


def _versions(run: Run | None) -> Rows:
    described = run.read("run.json") if run else {}
    packages = ", ".join(f"{name} {version}" for name, version in described.get("versions", {}).items())
    return {
        "trained with": f"python {described['python']}, {packages}" if described.get("python") else None,
        "revision": described.get("git"),
        "started": described.get("started"),
        "exported with": f"lm {__version__}",
    }


def _table(rows: Rows) -> str:
    """Rows of two columns; those without a value are left out."""
    known = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *known])


def _cell(value: Any) -> str:
    return str(value).replace("\n", " ").replace("|", "\\|")

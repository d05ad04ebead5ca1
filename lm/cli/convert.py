"""`lm export`: a model for others, as a Hugging Face folder with a model card. `lm import`: the way back.

An export is reloaded as others do and compared with its source. An import is a checkpoint without optimizer state, so
that a new run can start from its weights.
"""

import importlib.metadata
import json
import logging
import math
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory

import torch
import yaml
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError

from lm.cli.model_options import ExportOptions, ImportOptions
from lm.data.chat import DEFAULT_TEMPLATE, template_of
from lm.errors import RequestError, first_line
from lm.inference.export import Card, check_reload, model_card
from lm.inference.pretrained import Pretrained, load_pretrained
from lm.model.config import CUSTOM_MODEL_TYPE, DecoderConfig
from lm.model.huggingface import to_huggingface
from lm.runs.checkpoint import write_files
from lm.runs.facts import run_row
from lm.runs.resume import checkpoint_folder, chosen_model, hub_hint
from lm.runs.run import Run, is_of_a_run
from lm.system.arguments import typed_options
from lm.system.files import is_remote, new_folder
from lm.system.parsing import read_object
from lm.training.checkpoint_content import model_files
from lm.training.step_stats import StepStats

log = logging.getLogger(__name__)

# For Ollama, in Go's templates: a model that continues texts gets the prompt as it is; a chat model with our default
# template gets that one. What Ollama knows of other templates it reads from the file.
PROMPT_ALONE = "{{ .Prompt }}"
DEFAULT_CHAT = """\
{eos}{{{{ range .Messages }}}}{{{{ if eq .Role "assistant" }}}}Assistant:
{{{{ .Content }}}}{eos}{{{{ else if eq .Role "system" }}}}System:
{{{{ .Content }}}}
{{{{ else }}}}User:
{{{{ .Content }}}}
{{{{ end }}}}{{{{ end }}}}Assistant:
"""
SHARD_BYTES = 5 * 10**9  # the most in one file of weights
DESCRIBING = ("config.json", "generation_config.json")
# What else a checkpoint before the first step holds: Lightning counts from the beginning where there are no `loops`.
BEGINNING = {
    "epoch": 0,
    "global_step": 0,
    "pytorch-lightning_version": importlib.metadata.version("lightning"),
    "lr_schedulers": [],
    "cursor": {"consumed": 0},
    "ranks": [],
    "step_stats": StepStats().state_dict(),
}


def export(options: ExportOptions) -> None:
    """Make the folder, reload it as others do, and print its path."""
    output = options.output
    with new_folder(Path(output)) as folder:
        if options.run is None and is_of_a_run(options.ckpt_path):
            check_newest_is_meant(options.root)
        chosen = chosen_model(options.run, options.ckpt_path, options.root)
        described = Path(chosen) / "config.json"
        if described.exists() and read_object(described).get("model_type") == CUSTOM_MODEL_TYPE:
            raise RequestError(
                f"{chosen} holds a custom model, which Hugging Face's libraries do not have: give the folder to others "
                "with the file of its class"
            )
        quantized = options.dtype == "q8_0"
        model = load_pretrained(chosen, device="cpu", dtype="float32" if quantized else options.dtype)
        model.decoder.to(model.dtype)
        folder_name = Path(output).resolve().name
        card = Card(options.name or folder_name, options.license, tuple(options.language))
        if options.format == "gguf":
            file = folder / f"{folder_name}.gguf"
            write_for_llama_cpp(model, card, "q8_0" if quantized else dtype_name(model), file)
            log.info(
                "to run it: llama-cli -m %s, or ollama create NAME -f %s/Modelfile", Path(output, file.name), output
            )
        else:
            write_model(model, card, folder)
            loader, difference = check_reload(folder, model)
            log.info("loaded it with %s: logits in fp32 differ by %.1e of the largest", loader, difference)
    if options.license == "unknown":
        log.info("the model card says that the licence is unknown: choose one with --license before you publish it")
    log.info("to publish it: hf upload OWNER/NAME %s", quote(output))
    print(output)


def check_newest_is_meant(root: str) -> None:
    """Raise RequestError if the newest run may not be meant: it has not finished, or it is one of a sweep."""
    runs = Run.all(root)
    if not runs:
        return
    config = config_of_command(runs[-1])
    sweep = [run for run in runs if config and config_of_command(run) == config]
    name, status = runs[-1].name, runs[-1].status()
    if status != "finished":
        raise RequestError(f"the newest run, {name}, is {status}: name the one to export with --run")
    if len(sweep) > 1:
        names = [f"{run.name} ({run_row(run)['best_loss'] or math.nan:.4f})" for run in sweep]
        raise RequestError(
            f"there are {len(sweep)} runs of {config}: name the one to export with --run; with their lowest validation "
            f"losses: {', '.join(names)}"
        )


def config_of_command(run: Run) -> str | None:
    """The config that a run was started with."""
    command = run.read("run.json").get("command", [])
    if command[1:2] == ["fit"] and command[2:] and not command[2].startswith("-"):  # `lm fit tiny.yaml`
        return command[2]
    typed = typed_options(list(map(str, command)))
    return next((str(value) for option, value in typed if option in ("--config", "-c")), None)


def write_for_llama_cpp(model: Pretrained, card: Card, dtype: str, file: Path) -> None:
    """Write the file of a model for llama.cpp and, beside it, a Modelfile for Ollama and the model card."""
    from lm.inference.gguf import write_gguf

    about = {"name": card.name, "license": card.license, "languages": card.language}
    write_gguf(model, file, dtype, {name: value for name, value in about.items() if value})
    file.with_name("Modelfile").write_text(modelfile(model, file.name), encoding="utf-8")
    file.with_name("README.md").write_text(model_card(model, replace(card, gguf=file.name)), encoding="utf-8")


def modelfile(model: Pretrained, file_name: str) -> str:
    """What `ollama create` reads beside the file of a model."""
    template = template_of(model.tokenizer)
    texts = {None: PROMPT_ALONE, DEFAULT_TEMPLATE: DEFAULT_CHAT.format(eos=model.tokenizer.eos_token)}
    lines = [f"FROM ./{file_name}", f"PARAMETER num_ctx {model.config.max_position_embeddings}"]
    if template in texts:
        lines.append(f'TEMPLATE """{texts[template]}"""')
    else:
        log.info("the Modelfile has no TEMPLATE: Ollama looks for one that it knows by the chat template of the file")
    return "\n".join(lines) + "\n"


def dtype_name(model: Pretrained) -> str:
    return str(model.dtype).removeprefix("torch.")


def write_model(model: Pretrained, card: Card, folder: Path) -> None:
    """Fill an empty folder with weights, in the model's dtype, tokenizer and model card."""
    dtype = dtype_name(model)
    weights = to_huggingface(model.decoder.state_dict(), model.config)
    for weight_name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise RequestError(f"{weight_name} has values that are not finite in {dtype}; choose another --dtype")
    files = describing_files(model, dtype)
    files |= model.tokenizer.files(model.config.max_position_embeddings) | {"README.md": model_card(model, card)}
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    try:
        separate = {name: weight.clone() for name, weight in weights.items()}  # some are parts of a fused matrix
        save_torch_state_dict(separate, folder, max_shard_size=SHARD_BYTES, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    for path in folder.iterdir():  # safetensors makes files that only their owner may read
        path.chmod((folder / "README.md").stat().st_mode)


def describing_files(model: Pretrained, dtype: str) -> dict[str, str]:
    """Those of `model_files`, with what the model's own folder adds: BOS, all ends of a text, defaults of sampling."""
    files = model_files(model.config, model.tokenizer, dtype)
    documents = [read_object(file) if file.exists() else {} for file in (model.path / name for name in DESCRIBING)]
    config, generation = ({key: value for key, value in one.items() if value is not None} for one in documents)
    ids = {name: config[name] for name in config.keys() & {"bos_token_id", "eos_token_id", "pad_token_id"}}
    for name, more in zip(DESCRIBING, (ids, ids | generation), strict=True):
        about = json.loads(files[name]) | more
        ends = about["eos_token_id"] if isinstance(about["eos_token_id"], list) else [about["eos_token_id"]]
        if model.tokenizer.eos_id not in ends:
            about["eos_token_id"] = [model.tokenizer.eos_id, *ends]
        files[name] = json.dumps(about, indent=2) + "\n"
    return files


# ---- import ----------------------------------------------------------------------------------------------------------


def import_model(options: ImportOptions) -> None:
    """Make the folder and print its path, and how to train from it."""
    input, output = options.input, options.output
    source, target = checkpoint_folder(input) if is_remote(input) else Path(input), Path(output)
    packed = source.suffix == ".gguf" and source.is_file()
    if not source.is_dir() and not packed:
        hint = hub_hint(input) or "; give one with a config.json and safetensors in it"
        raise RequestError(f"--input {source} is not {'a folder' if source.exists() else 'there'}{hint}")
    if (source / "config.json").exists() and not (source / "tokenizer.json").exists():
        raise RequestError(
            f"{source} has no tokenizer.json; transformers makes one: "
            f"AutoTokenizer.from_pretrained({input!r}).save_pretrained({input!r})"
        )
    with TemporaryDirectory() as unpacked, new_folder(target) as folder:
        if packed:
            convert_gguf(source, Path(unpacked))
        model = load_pretrained(unpacked if packed else source, "cpu", torch.float32, eos_token=options.eos_token)
        weights = to_huggingface(model.decoder.state_dict(), model.config)
        weights = {name: weight.contiguous() for name, weight in weights.items()}
        files = describing_files(model, "float32")
        write_files(folder, {"state_dict": weights, "optimizer": {}, "files": files, **BEGINNING})
        # Without a digest in the checkpoint, so that a person may change it: another dropout or context is not damage.
        (folder / "model.yaml").write_text(describe_shape(model.config, source, target), encoding="utf-8")
    log.info("data for it: lm data prepare --input TEXTS --output DATA --tokenizer %s", target)
    shape = target / "model.yaml"
    log.info("train on:    lm fit --config YOURS.yaml --config %s --ckpt_path %s --run NAME", shape, target)
    print(target)


def convert_gguf(file: Path, folder: Path) -> None:
    """Fill a folder with a file of llama.cpp in Hugging Face's format: transformers makes fp32 of its weights."""
    try:
        from gguf import GGUFReader  # pyright: ignore[reportMissingImports]
        from transformers import AutoModelForCausalLM, AutoTokenizer  # takes a while to import

        place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        # transformers takes 128 for every Qwen3; other architectures may leave it out.
        fields = GGUFReader(file).fields
        lengths = [int(fields[name].contents()) for name in fields if name.endswith(".attention.key_length")]
        head_dim = {"head_dim": lengths[-1]} if lengths else {}
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, **head_dim)
        AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    except ImportError as error:
        raise RequestError(f"--input {file} needs `pip install transformers gguf accelerate`") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise RequestError(f"--input {file}: transformers cannot read it: {first_line(error)}") from error
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "quantization_config": None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_torch_state_dict(model.state_dict(), folder, metadata={"format": "pt"})


def describe_shape(config: DecoderConfig, source: Path, target: Path) -> str:
    """The decoder's shape as the YAML that `lm fit` reads after the config of the training, which has the dropout."""
    shape = json.loads(json.dumps(asdict(config)))  # plain numbers, which YAML takes, of those that were derived
    del shape["dropout"]
    head = (
        f"# The decoder of {source}. Give it after your config, whose shape it replaces:\n"
        f"# lm fit --config YOURS.yaml --config {target / 'model.yaml'} --ckpt_path {target} --run NAME\n"
    )
    return head + yaml.safe_dump({"model": {"decoder": shape}}, sort_keys=False)

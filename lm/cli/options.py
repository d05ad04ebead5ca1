"""The options of a training, read from the source of the classes that take them, which are not imported.

Importing Lightning takes seconds. Help, and the refusal of a name that does not exist, need the names, types, defaults
and docstrings alone. The values are checked by `cli/config`, whose parser is made of the classes themselves.
"""

import ast
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import docstring_parser

import lm
from lm.errors import RequestError
from lm.system.arguments import is_text, nearest_option, shown, unknown_options
from lm.system.files import flatten, parse_yaml

PACKAGE = Path(lm.__file__).parent
CONFIGS = (Path("configs"), PACKAGE.parent / "configs")
GROUPS = {
    "": "lm.training.callbacks.run_folder:RunOptions",  # not in a group
    "trainer": "lm.training.trainer:Trainer",
    "model": "lm.training.module:LanguageModule",
    "data": "lm.data.datamodule:DataModule",
    "guards": "lm.training.callbacks.standard:GuardsConfig",
    "samples": "lm.training.callbacks.evaluation:SamplesConfig",
    "evaluation": "lm.training.callbacks.evaluation:EvaluationConfig",
}
OWN = {"plan": "lm.cli.plan:PlanOptions", "bench step": "lm.cli.bench:BenchOptions",
       "profile": "lm.cli.profile:ProfileOptions"}  # fmt: skip
# Options that a first training needs; `--help all` shows the others too.
FREQUENT = [
    "trainer.max_steps", "trainer.max_tokens", "trainer.val_interval", "trainer.checkpoint_interval",
    "trainer.precision", "trainer.devices", "trainer.strategy",
    "model.decoder.hidden_size", "model.decoder.num_hidden_layers", "model.decoder.num_attention_heads",
    "model.decoder.max_position_embeddings", "model.optimizer.lr", "model.schedule.warmup_steps", "model.compile",
    "data.path", "data.prepare.input", "data.micro_batch_size", "data.global_batch_tokens", "data.val_tokens",
    "guards.alerts", "guards.budget.cap_usd", "samples.prompts", "evaluation.tasks",
]  # fmt: skip
FREQUENT_WITHOUT_FIT = ["trainer.precision", "trainer.accelerator", "data.val", "data.test", "data.texts",
                        "data.val_tokens", "data.micro_batch_size"]  # fmt: skip
BATCH = "give data.micro_batch_size, and data.global_batch_tokens for the optimizer step"
ACCUMULATION = "it follows from data.global_batch_tokens and data.micro_batch_size"
LOGS = "TensorBoard and metrics.jsonl are always written to the run folder; trainer.logger adds others"
EPOCHS = "give trainer.max_steps or trainer.max_tokens"
# The last part of what Lightning, Hugging Face, nanoGPT and others call an option -> what to use here.
SYNONYMS = {
    "accumulate_grad_batches": ACCUMULATION, "gradient_accumulation_steps": ACCUMULATION, "batch_size": BATCH,
    "per_device_train_batch_size": BATCH, "max_epochs": EPOCHS, "num_train_epochs": EPOCHS, "epochs": EPOCHS,
    "logger": LOGS, "report_to": LOGS, "wandb_log": LOGS, "wandb_project": LOGS,
    "bias": "leave it out; the decoder has no biases",
    "always_save_checkpoint": "every trainer.checkpoint_interval steps a checkpoint is saved, whatever its loss is",
    "warmup_ratio": "give --model.schedule.warmup_ratio, and --model.schedule.warmup_steps 0 if the config has some",
    "num_workers": "leave it out; threads of the training process read the data, which is faster",
} | {
    synonym: f"did you mean {option!r}?" for option, synonyms in {
        "trainer.max_steps": "max_iters num_steps train_steps total_steps",
        "trainer.val_interval": "val_check_interval eval_interval eval_every eval_steps val_every",
        "trainer.checkpoint_interval": "save_every save_interval save_steps ckpt_interval checkpoint_every",
        "trainer.keep_checkpoints": "save_total_limit save_top_k",
        "trainer.keep_every": "every_n_train_steps keep_period",
        "trainer.log_interval": "log_every_n_steps log_every logging_steps",
        "trainer.gradient_clip_val": "grad_clip gradient_clip max_grad_norm clip",
        "trainer.precision": "dtype mixed_precision amp bf16 fp16",
        "trainer.devices": "gpus num_gpus",
        "trainer.default_root_dir": "out_dir output_dir root",
        "model.optimizer.lr": "learning_rate max_lr peak_lr",
        "model.optimizer.weight_decay": "wd decay",
        "model.optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2",
        "model.schedule.name": "lr_scheduler lr_scheduler_type scheduler",
        "model.attention": "attn_implementation",
        "model.schedule.decay_steps": "lr_decay_iters",
        "model.schedule.warmup_steps": "warmup warmup_iters num_warmup_steps",
        "model.schedule.final_fraction": "min_lr min_lr_ratio",
        "model.decoder.hidden_size": "n_embd n_embed d_model dim embed_dim width",
        "model.decoder.num_hidden_layers": "n_layer n_layers num_layers depth",
        "model.decoder.num_attention_heads": "n_head n_heads num_heads",
        "model.decoder.num_key_value_heads": "n_kv_head n_kv_heads num_kv_heads",
        "model.decoder.intermediate_size": "ffn_dim d_ff mlp_dim n_inner",
        "model.decoder.max_position_embeddings": "context_length block_size max_seq_len sequence_len n_ctx context",
        "data.val_tokens": "limit_val_batches eval_iters",
        "data.path": "dataset data_path data_dir",
        "seed_everything": "seed",
        "ckpt_path": "resume resume_from_checkpoint checkpoint init_from",
    }.items() for synonym in synonyms.split()
}  # fmt: skip
USAGE = dict.fromkeys(("validate", "test", "predict"), "[--run NAME] [--ckpt_path PATH]")
# What the parser takes in addition to the options.
PARSERS_OWN = {"c", "h", "help", "print_config", "verbose", "weights_only", "return_predictions"}
COLUMN = 38  # where the help of an option begins
CLASS_KEYS = {"class_path", "init_args", "dict_kwargs", "help"}


class Option(NamedTuple):
    """An option as its class declares it."""

    name: str  # with dots, as on the command line
    kind: str  # its type in a word
    default: str | None  # None: it needs a value, or its default says nothing
    help: str


CONFIG = Option("config", "file", None, "A YAML file, looked up in configs/ too; of several the later ones amend it.")
SEED = Option("seed_everything", "int", "1337", "Seed of the weights and of the order of the samples; --seed too.")
SEED_ALIAS = re.compile("--seed(?==|$)")
FIT = [
    CONFIG,
    Option("run", "name", None, "Name of the run: if not given, the config's for `fit`, otherwise the newest of all. "
           "With a config, the newest of `mine`, `mine-2` and so on is resumed, validated or tested."),
    Option("ckpt_path", "path", None, "A checkpoint: `best`, `last`, a folder, a URL, or `auto`: the newest whole one, "
           "for `fit` else a fresh start."),
    Option("force", "bool", None, "Train although `lm plan` finds an error, and resume although the "
           "config or the data is not the run's any more."),
    SEED,
]  # fmt: skip


# ---- reading the source ----------------------------------------------------------------------------------------------


def training_options(command: str) -> list[Option]:
    """All options of a command: first its own, then those of a training."""
    found = [*_options_of(OWN[command], ""), CONFIG, SEED] if command in OWN else list(FIT)
    for group, kind in GROUPS.items():
        found += _options_of(kind, f"{group}." if group else "")
        if group == "model" and "lm.model.custom" in sys.modules:  # as it is where a class was given to `lm.run`
            found += _options_of_module_class({option.name for option in found})
    return found


def _options_of_module_class(known: set[str]) -> Iterator[Option]:
    """The options that a user's own subclass of `LanguageModule` adds."""
    kind = sys.modules["lm.model.custom"].module_class()
    parameters = {} if kind is None else inspect.signature(kind.__init__).parameters
    documented = docstring_parser.parse(inspect.getdoc(kind) or "").params if kind else ()
    helps = {parameter.arg_name: " ".join((parameter.description or "").split()) for parameter in documented}
    for name, parameter in list(parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        within = any(option.startswith(f"model.{name}.") for option in known)
        if f"model.{name}" not in known and not within:
            annotation = parameter.annotation
            word = getattr(annotation, "__name__", str(annotation)) if annotation is not parameter.empty else "value"
            default = None if parameter.default in (parameter.empty, None, False, "") else str(parameter.default)
            yield Option(f"model.{name}", word, default, helps.get(name, ""))


def _options_of(kind: str, prefix: str) -> Iterator[Option]:
    """The parameters of a class, those of the dataclasses among them in their place."""
    module, _, name = kind.partition(":")
    made = next(node for node in _parse(module).body if isinstance(node, ast.ClassDef) and node.name == name)
    documented = docstring_parser.parse(ast.get_docstring(made) or "").params
    helps = {parameter.arg_name: " ".join((parameter.description or "").split()) for parameter in documented}
    init = next((node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)
    if init is None:
        declared = [node for node in made.body if isinstance(node, ast.AnnAssign)]
        fields = [(node.target.id, node.annotation, node.value) for node in declared]
    else:
        arguments = init.args.args[1:]
        defaults = [None] * (len(arguments) - len(init.args.defaults)) + init.args.defaults
        fields = [(one.arg, one.annotation, value) for one, value in zip(arguments, defaults, strict=True)]
    for field, annotation, value in fields:
        inside = _dataclass(module, annotation)
        if inside:
            yield from _options_of(inside, f"{prefix}{field}.")
        else:
            yield Option(prefix + field, _kind(module, annotation), _default(module, value), helps.get(field, ""))


@cache
def _parse(module: str) -> ast.Module:
    return ast.parse((PACKAGE.parent / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8"))


def _definition(module: str, name: str) -> tuple[str, ast.stmt | None]:
    """The module and the statement that define a name which a module uses; no statement for a name of others."""
    for node in _parse(module).body:
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return _definition(node.module, name) if node.module.startswith("lm.") else (module, None)
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return module, node
    return module, None


def _dataclass(module: str, annotation: ast.expr) -> str | None:
    """The dataclass that an annotation names, alone or as one of several types, as `module:name`."""
    if isinstance(annotation, ast.BinOp):
        return _dataclass(module, annotation.left) or _dataclass(module, annotation.right)
    if isinstance(annotation, ast.Name):
        place, found = _definition(module, annotation.id)
        if isinstance(found, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in found.decorator_list):
            return f"{place}:{annotation.id}"
    return None


def _kind(module: str, annotation: ast.expr) -> str:
    """A type as a word: `count`, `auto|ddp`, `list of str`, `list of {name, weight}`."""
    if made := _dataclass(module, annotation) if isinstance(annotation, ast.Name) else None:
        return f"{{{', '.join(option.name for option in _options_of(made, ''))}}}"
    if isinstance(annotation, ast.Name):
        place, found = _definition(module, annotation.id)
        return _kind(place, found.value) if isinstance(found, ast.Assign) else annotation.id.lower()
    if isinstance(annotation, ast.BinOp):
        kinds = (_kind(module, annotation.left), _kind(module, annotation.right))
        return "|".join(kind for kind in kinds if kind != "None")
    if isinstance(annotation, ast.Subscript):
        inside = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if ast.unparse(annotation.value) == "Literal":
            return "|".join(str(ast.literal_eval(value)) for value in inside)
        return f"{ast.unparse(annotation.value)} of {', '.join(_kind(module, one) for one in inside)}"
    return ast.unparse(annotation)


def _default(module: str, value: ast.expr | None) -> str | None:
    if isinstance(value, ast.Name):
        place, found = _definition(module, value.id)
        return _default(place, found.value) if isinstance(found, ast.Assign) else None
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Count":
        value = value.args[0]
    if isinstance(value, ast.Constant) and value.value not in (None, False, ""):
        return str(value.value)
    return ast.unparse(value) if isinstance(value, ast.BinOp | ast.Tuple) else None


def changed_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a resolved config that are not the defaults, by their names with dots."""
    defaults = {option.name: option.default for option in training_options("fit")}
    return {
        name: value for name, value in flatten(config).items()
        if (value if (default := defaults.get(name)) is None else value != _value_of(default))
    }  # fmt: skip


def _value_of(default: str) -> Any:
    """The value that a default stands for, as YAML has it."""
    if factors := re.fullmatch(r"(\d+) \* (\d+) \*\* (\d+)", default):
        number, base, exponent = map(int, factors.groups())
        return number * base**exponent
    try:
        value = ast.literal_eval(default)
    except (SyntaxError, ValueError):
        return default
    return list(value) if isinstance(value, tuple) else value


# ---- help ------------------------------------------------------------------------------------------------------------


def print_options(command: str, what: str, chosen: str | None = None) -> None:
    """Print the help of a command that takes a training's options.

    Args:
        command: such as `fit`.
        what: it does, in a line.
        chosen: `all`, or the group to show, such as `data`; the frequent options if not given.

    Raises:
        RequestError: there is no such group.
    """
    if chosen not in (None, "all") and chosen not in _groups({option.name for option in training_options(command)}):
        raise RequestError(f"no group of options {chosen!r}: give all, or one of {', '.join(filter(None, GROUPS))}")
    width = min(110, shutil.get_terminal_size().columns)
    frequent = FREQUENT_WITHOUT_FIT if command in ("validate", "test", "predict") else FREQUENT
    print(f"lm {command}: {what}\n\nusage: lm {command} {USAGE.get(command, '--config FILE')} [--OPTION VALUE ...]\n")
    group = ""
    for option in training_options(command):
        own = option.name.partition(".")[0] not in GROUPS
        if chosen is None and not own and option.name not in frequent:
            continue
        if chosen not in (None, "all") and not option.name.startswith(f"{chosen}."):
            continue
        if not own and option.name.partition(".")[0] != group:
            group = option.name.partition(".")[0]
            print(f"\n{group}:")
        _print_option(option, width, short=chosen is None)
    if chosen is None:
        print(f"\nAll options: lm {command} --help all; those of a group: lm {command} --help data")
        print("In the YAML an option has the same name, with a level for each dot.")


def _print_option(option: Option, width: int, short: bool) -> None:
    """Print an option: with the first sentence of its help beside it, or with all that is known of it below."""
    default = "" if option.default is None else f" [{option.default}]"
    if not short:
        print(f"  --{option.name}{'' if option.kind == 'bool' else f' {option.kind}'}{default}")
        print(textwrap.fill(option.help, width, initial_indent=" " * 6, subsequent_indent=" " * 6))
        return
    sentence = option.help.partition(". ")[0].partition("; ")[0].removesuffix(".")
    left, *others = textwrap.wrap(sentence[:1].upper() + sentence[1:] + default, max(20, width - COLUMN))
    name = f"  --{option.name}"
    print(f"{name:<{COLUMN}}{left}" if len(name) < COLUMN - 1 else f"{name}\n{'':{COLUMN}}{left}")
    for line in others:
        print(f"{'':{COLUMN}}{line}")


# ---- names -----------------------------------------------------------------------------------------------------------


def refuse_unknown_options(command: str, arguments: list[str]) -> None:
    """Refuse names that no option has, in a command line and in the configs that it names.

    Raises:
        RequestError: a name is unknown, or a config is not there or is damaged.
    """
    if arguments and not arguments[0].startswith("-"):
        raise RequestError(f"{arguments[0]!r} is no option; did you mean `lm {command} --config {arguments[0]}`?")
    leaves = {option.name for option in (*training_options(command), *FIT)}  # a config may carry those of a fit
    unknown = {}
    files = [value for name, value in zip(arguments, arguments[1:]) if name in ("-c", "--config")]
    files += [argument.partition("=")[2] for argument in arguments if argument.startswith("--config=")]
    for path in map(find_config, files):
        found = [name for name in _keys(read_config(path), leaves) if not _is_known(name, leaves)]
        if found:
            unknown[f"config {path}: "] = found
    typed = [argument.removeprefix("--").partition("=")[0].removesuffix("+")
             for argument in arguments if argument.startswith("--")]  # fmt: skip
    if found := [name for name in typed if name not in PARSERS_OWN and not _is_known(name, leaves)]:
        unknown[""] = found
    if unknown:
        known = sorted(leaves | _groups(leaves))
        raise RequestError("; ".join(
            where + unknown_options({name: SYNONYMS.get(name.rpartition(".")[2]) or nearest_option(name, known)
                                     for name in names})
            for where, names in unknown.items()
        ))  # fmt: skip
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, _, argument = argument.removeprefix("--").partition("=")
        _refuse_doubled_keys(name, argument)
    if command == "fit" and not files and not any(one.startswith(("--data.", "--print_config")) for one in arguments):
        raise RequestError("give a config with --config, such as `lm fit --config tiny.yaml`")


def split_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """A command line as what is the command's own, and the options of a training among it, with their values."""
    of_a_training = {option.name for option in training_options("fit")} - {option.name for option in FIT}
    own: list[str] = []
    overrides: list[str] = []
    part = own
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.removeprefix("--").partition("=")[0]
            part = overrides if "." in name or name in of_a_training else own
        part.append(argument)
    return own, overrides


def _refuse_doubled_keys(name: str, value: str) -> None:
    """Refuse the value of an option with a key twice, of which YAML would keep the last one."""
    try:
        if ":" in value and not is_text(name):
            parse_yaml(value)
    except ValueError as error:  # any other is the parser's to say
        if "a second time" in str(error):
            raise RequestError(f"--{name}: {error}") from error


def _keys(document: dict[str, Any], leaves: set[str], place: str = "") -> Iterator[str]:
    """The names of a config's keys, with dots; below a name that is unknown there are no more."""
    for key, value in document.items():
        name = f"{place}{key}"
        yield name
        if isinstance(value, dict) and name not in leaves and _is_known(name, leaves):
            yield from _keys(value, leaves, f"{name}.")


def _is_known(name: str, leaves: set[str]) -> bool:
    """Whether a name is an option, a group of options, or within an option's value or a class by path."""
    parts = name.split(".")
    within = any(".".join(parts[:count]) in leaves for count in range(1, len(parts) + 1))
    return within or name in _groups(leaves) or bool(CLASS_KEYS & set(parts))


def _groups(leaves: Iterable[str]) -> set[str]:
    """The groups that options are in, such as `model` and `model.optimizer`."""
    return {".".join(leaf.split(".")[:count]) for leaf in leaves for count in range(1, leaf.count(".") + 1)}


# ---- configs ---------------------------------------------------------------------------------------------------------


def find_config(name: str) -> Path:
    """A config as typed, else under `configs/`.

    Raises:
        RequestError: it is in neither.
    """
    for path in (Path(name), *(folder / name for folder in CONFIGS), *(folder / f"{name}.yaml" for folder in CONFIGS)):
        if path.is_file():
            return path
    have = sorted({path.name for folder in CONFIGS for path in folder.glob("*.yaml")})
    here = Path(name).parent
    beside = {str(path) for path in (*here.glob("*.y*ml"), *here.parent.glob(f"*/{Path(name).name}"))}
    close = get_close_matches(name, [*sorted(beside), *have], 3, cutoff=0.75)
    hint = f"did you mean {' or '.join(close)}?" if close else f"configs/ has: {', '.join(have) or 'none'}"
    raise RequestError(f"no config {name!r} here or in configs/; {hint}")


def read_config(path: Path) -> dict[str, Any]:
    """The document of a config.

    Raises:
        RequestError: it is damaged, or has something else where a group of options belongs.
    """
    try:
        document = parse_yaml(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RequestError(f"config {path} cannot be read: {error}") from error
    if document is None:
        raise RequestError(f"config {path} is empty; configs/tiny.yaml is one to begin with")
    if not isinstance(document, dict):
        raise RequestError(f"config {path} holds {shown(document)} where options such as `trainer:` belong")
    for name in GROUPS:
        if not isinstance(document.get(name, {}), dict):
            raise RequestError(f"config {path}: {name} is a group of options and not {shown(document[name])}")
    return document

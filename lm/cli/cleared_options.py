"""What an option of a later config, or of the command line, clears of earlier ones: what means nothing any more."""

import logging
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from lm.training.builtin_optimizers import OptimizerName

log = logging.getLogger(__name__)

NULL = (None, "null")
# Of two options that say the same thing in different ways, the later one counts: option -> options of earlier configs
# that are left out. `--data.path` replaces all other data, for example.
SAME_THING = {
    "data.path": ("data.train", "data.sources", "data.phases", "data.prepare"),
    "data.train": ("data.path", "data.sources", "data.phases", "data.prepare"),
    "data.sources": ("data.path", "data.train", "data.val", "data.test", "data.tokenizer", "data.prepare"),
    "trainer.max_steps": ("trainer.max_tokens",), "trainer.max_tokens": ("trainer.max_steps",),
}  # fmt: skip
for _length in ("warmup", "decay"):
    _steps, _ratio = (f"model.schedule.{_length}_{unit}" for unit in ("steps", "ratio"))
    SAME_THING |= {_steps: (_ratio,), _ratio: (_steps,)}
for _group in ("matrices", "embedding", "output", "norms"):
    _lr, _ratio = (f"model.optimizer.groups.{_group}.{name}" for name in ("lr", "lr_ratio"))
    SAME_THING |= {_lr: (_ratio,), _ratio: (_lr,)}
OF_OPTIMIZER = ("groups", "betas", "eps", "momentum", "init_args")  # for the optimizer of the same config
TIED_RATIO = 2.67  # of the rate of a tied embedding, as in the presets
OF_SCHEDULE = ("decay_steps", "decay_ratio")
DECAYS = {"wsd": "at the end", "cosine": "until then", "linear": "until then"}  # what a length of the decay means


def clear_earlier(settings: Mapping[str, Any], options: Iterable[tuple[str, Any]]) -> list[str]:
    """The options of earlier configs, as nested `settings`, that these options with their dotted names clear.

    What is not obvious is logged: the settings of another optimizer, the decay of another schedule, the rate of a tied
    embedding.
    """
    later = {name: value for name, value in options if value not in NULL}
    given = {part for name, _ in options for part in (name, ".".join(name.split(".")[:2]))}
    cleared = [other for name in SAME_THING.keys() & later.keys() for other in SAME_THING[name] if other not in given]

    def clear(group: str, names: Iterable[str], why: str) -> None:
        names = [name for name in names if _value(settings, f"{group}.{name}") not in (*NULL, {})]
        names = [name for name in names if not any(f"{each}.".startswith(f"{group}.{name}.") for each in later)]
        if names:
            log.info("%s: left out of the config: %s", why, ", ".join(names))
            cleared.extend(f"{group}.{name}" for name in names)

    place = "model.optimizer"
    optimizer = _value(settings, place) or {}
    before = optimizer.get("class_path") or optimizer.get("name", "adamw")
    after = later.get(f"{place}.class_path") or later.get(f"{place}.name")
    is_known = after in get_args(OptimizerName) or f"{place}.class_path" in later
    if optimizer and is_known and after != before:
        clear(place, OF_OPTIMIZER, f"{place} is {after} and was {before}")
        if "lr" in optimizer and f"{place}.lr" not in later:
            third = float(optimizer["lr"]) / 3  # of what Muon's matrices take: configs/tiny.yaml
            fix = f"; --{place}.lr {third:.1e} is nearer to AdamW's" if (before, after) == ("muon", "adamw") else ""
            log.info("%s.lr stays %s, which was for %s%s", place, optimizer["lr"], before, fix)
        other = "class_path" if f"{place}.class_path" not in later else "name"
        cleared.append(f"{place}.{other}")  # a class_path counts before a name; a wrong name would be refused

    place = "model.schedule"
    schedule = _value(settings, place) or {}
    before, after = schedule.get("name", "cosine"), later.get(f"{place}.name")
    if after is not None and DECAYS.get(before) != DECAYS.get(after):
        clear(place, OF_SCHEDULE, f"{place}.name is {after} and was {before}")

    size, mlp = "model.decoder.hidden_size", "model.decoder.intermediate_size"
    if size in later and mlp not in given and (before := _value(settings, mlp)) and _value(settings, size):
        width = f"was for {size} {_value(settings, size)}; --{mlp} null makes it 8/3 of the new one"
        log.info(f"{mlp} stays {before}, which {width}")

    if str(later.get("model.decoder.tie_word_embeddings")).lower() == "true":
        ratio = "model.optimizer.groups.embedding.lr_ratio"
        if ratio not in later and (before := _value(settings, ratio) or 0) > TIED_RATIO:
            log.info(f"{ratio} {before} is for an untied embedding; --{ratio} {TIED_RATIO} is a rate for a tied one")
    folder, texts = str(later.get("data.path")), _value(settings, "data.prepare.input")
    is_new = not Path(folder).is_file() and not (Path(folder) / "manifest.json").exists()
    if "data.prepare" in cleared and "data.path" in later and texts and is_new:
        texts = shlex.join([texts] if isinstance(texts, str) else texts)
        log.info(f"data.path {folder} leaves data.prepare of the config out; --data.prepare.input {texts} keeps it")
    return cleared


def _value(settings: Any, name: str) -> Any:
    """An option, or a group of them, of nested settings; None where it is not there."""
    for part in name.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings

"""Differences between configs, and which of them a resume, a branch or a continued ladder allows."""

import shlex
from collections.abc import Sequence
from typing import Any

from lm.runs.run import Run
from lm.system.parsing import flatten

# Settings and groups of them, by dotted keys: those that must not change ("" is all), and exceptions, which may.
PURPOSES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # A change would make it another run: another model, other data, another order of the samples.
    "resume": ((
        "seed_everything", "model.decoder", "model.document_mask", "data.path", "data.train", "data.tokenizer",
        "data.prepare", "data.column", "data.pad_id", "data.seq_len", "data.shuffle_buffer", "data.reshuffle",
    ), ()),
    # Of the decoder, only settings that change no weight's shape or meaning may change.
    "branch": (
        ("seed_everything", "model.optimizer.name", "model.optimizer.class_path", "model.decoder"),
        ("model.decoder.max_position_embeddings", "model.decoder.rope_theta", "model.decoder.rope_scaling",
         "model.decoder.dropout", "model.decoder.window_pattern", "model.decoder.sliding_window",
         "model.decoder.initializer_range", "model.decoder.zero_init_residual"),
    ),
    # Only settings that do not change the loss, beyond the order of additions, may change.
    "ladder": (("",), (
        "trainer.default_root_dir", "trainer.devices", "trainer.log_interval", "trainer.val_interval",
        "trainer.checkpoint_interval", "trainer.keep_checkpoints", "trainer.keep_every", "trainer.stop_within",
        "data.micro_batch_size", "guards", "tags", "note", "on_event", "expect",
    )),
}  # fmt: skip


def differences(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The dotted keys in which configs differ, with the values of all configs; None if not set.

    The run's name is ignored, and so are options that are off and that one of the configs lacks (other versions of lm).
    """
    flat, differing = [flatten(config) for config in configs], {}
    for key in sorted(set().union(*flat) - {"run"}):
        values = [config.get(key) for config in flat]
        off = not any(values) and any(key not in config for config in flat)
        if not off and any(value != values[0] for value in values):
            differing[key] = values
    return differing


def not_allowed(purpose: str, differing: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Select those of `differences` that a purpose does not allow."""
    fixed, free = PURPOSES[purpose]
    return {key: values for key, values in differing.items() if _has(fixed, key) and not _has(free, key)}


def _has(names: Sequence[str], key: str) -> bool:
    return any(name in ("", key) or key.startswith(f"{name}.") for name in names)


def describe_changes(run: Run | None, changed: dict[str, list[Any]]) -> list[str]:
    """A line for each of the `differences` between a run's config and that of its resume."""
    lines = [f"changed since the run was started: {key}: {old} -> {new}" for key, (old, new) in changed.items()]
    of_model = [(key, old) for key, (old, _) in changed.items() if key.startswith("model.")]
    if run and of_model:  # a run's config.yaml is that of its last start
        earlier = [f"--{key}={'null' if old is None else old}" for key, old in of_model]
        lines.append(f"`{run.resume_command()} {shlex.join(earlier)}` resumes it with the earlier values")
    return lines

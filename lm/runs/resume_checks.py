"""Whether a run may be resumed with a changed config."""

from typing import Any

from lm.errors import RequestError
from lm.runs.config_diff import differences, not_allowed
from lm.runs.run import Run


def check_config_changes(run: Run, config: dict[str, Any], force: bool) -> dict[str, list[Any]]:
    """Compare a config with a run's: `{key: [before, now]}`; raise RequestError if a resume may not change a key."""
    settings = run.settings()
    if not force and not settings:
        raise RequestError(
            f"{run.config} is damaged, so it is not known what the run was trained with: put it back, or give --force "
            "to resume with the config of this command"
        )
    changed = {
        key: values
        for key, values in differences([settings, config]).items()
        if not key.startswith("data.prepare.") or values[1] is not None
    }  # null: then the shards are compared
    fixed = not_allowed("resume", changed)
    if fixed and not force:
        values = "; ".join(f"{key} was {before}, now {now}" for key, (before, now) in fixed.items())
        fix = "start a new run without --ckpt_path"
        if not any(key.startswith("model.decoder") for key in not_allowed("branch", fixed)):
            fix += ", or give --force"
        raise RequestError(f"run {run.path} cannot be resumed with another {', '.join(fixed)}: {values}; {fix}")
    return changed

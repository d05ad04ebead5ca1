"""Options that earlier versions had, so that an older config or run is read, or answered in one line."""

from typing import Any

# An option that is gone -> its default, with which an older config and an older run are read as before, and what to do.
REMOVED = {
    "rehearse": (False, "gone since 0.1: guards.budget.dry_run and guards.inject_step try the guards in a run"),
    "test_notify": (False, "gone since 0.1: `apprise -b test ADDRESS` sends a message"),
    "data.on_bad_shard": ("raise", "gone since 0.1: a damaged shard ends the run; restore it, or make the data anew"),
    "notify": ([], "gone since 0.1: `on_event: [sh, -c, 'apprise -t $LM_EVENT -b \"$LM_MESSAGE\" ADDRESS']`"),
    "model.z_loss": (0.0, "gone since 0.1, as it gained nothing: leave it out"),
    "model.cuda_graphs": (False, "gone since 0.1, as it gained nothing: leave it out"),
    "trainer.mirror": (None, "gone since 0.1: configs/launch/mirror.sh copies runs to a store and back"),
    "trainer.distributed.reshard": (None, "gone since 0.1: leave it out"),
    "trainer.histogram_interval": (
        None,
        "gone since 0.1: `lm.inspection.weights` draws the histograms of a checkpoint's weights",
    ),
    "trainer.fp8_keep": (None, "gone since 0.1: the last block stays in bf16; leave it out"),
    "trainer.detect_anomaly": (False, "gone since 0.1: call `torch.autograd.set_detect_anomaly(True)` in a callback"),
    "trainer.profiler": (None, "gone since 0.1: `lm profile` says where the time goes"),
}


def drop_removed(config: Any) -> None:
    """Remove from a parsed config the options that are gone and have their default."""
    for option, (default, _) in REMOVED.items():
        *groups, last = option.split(".")
        place = config
        for group in groups:
            place = place.get(group) if isinstance(place, dict) else None
        if isinstance(place, dict) and last in place and place[last] == default:
            del place[last]

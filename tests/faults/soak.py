"""Kills, corrupts and resumes real trainings at random until the time is up.

    python tests/faults/soak.py --minutes 60 --seed 1

One run after another is trained in many sessions. Each is ended at a random moment by a signal, a full disk or the
death of one of its processes, meets a second fit of the same run, or is let to its end; between two of them something
of the run's folder is broken, and the micro-batch or the ranks may change. Every session must
begin where the newest whole checkpoint stands, say what is wrong in one line where it does not resume, and leave no
process behind. A run that reached its end is compared with one that was never stopped: losses, validations, best
checkpoint, weights and optimizer bit for bit; where its division changed, the tokens of every step. Exit code 1 if
anything was wrong.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # lm, which may not be installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the test equipment

from soak_damage import Ballast
from soak_run import STEPS, OneRun, Wrong
from soak_watch import fold, kill_group, read_trace
from trainings import make_workplace, write_config

HERE = Path(__file__).resolve().parent
CONFIG = {"trainer.max_steps": STEPS, "trainer.val_interval": 8, "trainer.checkpoint_interval": 5,
          "trainer.keep_checkpoints": 3}  # fmt: skip
DISK = "64m"
PATIENCE = 300  # seconds that a session may take


class Soak:
    """A workplace under a folder, the run that was never stopped, and what was counted.

    With `small_disk` the runs are on a small disk of their own, to fill it up.
    """

    def __init__(self, folder: Path, small_disk: bool) -> None:
        self.folder, self.counts = folder, Counter()
        self.place = make_workplace(folder / "workplace")
        self.registry = folder / "registry" / "runs.db"
        # The package as it is now: what is edited during the soak does not disturb it.
        shutil.copytree(HERE.parent.parent / "lm", folder / "package" / "lm")
        write_config(self.place, "soak", **CONFIG)
        code, words = self.wait(self.start("uninterrupted"), "uninterrupted")
        if code:
            raise SystemExit(f"the run that is to be compared with failed: exit {code}\n{words}")
        self.straight = fold([read_trace(self.place)])
        (self.place / "checkpoints" / "soak").rename(folder / "uninterrupted")
        self.ballast = Ballast(self.place / "checkpoints") if small_disk else None
        if small_disk:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "soak", str(self.place / "checkpoints")]
            subprocess.run(mount, check=True)

    def start(self, name: str, *options: str) -> subprocess.Popen:
        """A session, in a group of its own, with what it says in `<name>.txt`."""
        places = os.pathsep.join(map(str, (self.folder / "package", HERE.parent, HERE)))
        environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1",
                       "LM_REGISTRY": str(self.registry)}  # fmt: skip
        command = [sys.executable, "-m", "lm", "fit", "--config", "soak.yaml", "--ckpt_path", "auto", *options]
        with open(self.folder / f"{name}.txt", "w") as words:
            return subprocess.Popen(command, cwd=self.place, env=environment, stdout=words, stderr=words,
                                    process_group=0)  # fmt: skip

    def wait(self, process: subprocess.Popen, name: str) -> tuple[int, str]:
        """Its exit code and its words."""
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)  # every process says where it is
            time.sleep(5)
            kill_group(process.pid)
            raise Wrong(f"a session did not end within {PATIENCE} s") from None
        return process.returncode, (self.folder / f"{name}.txt").read_text(errors="replace")


def soak(folder: Path, minutes: float, seed: int, small_disk: bool, first: int) -> int:
    """Run after run until the time is up; returns the exit code, 1 if anything was wrong."""
    print(f"seed {seed}, folder {folder}, the disk is {'filled up too' if small_disk else 'not filled up'}", flush=True)
    began, wrongs, index = time.monotonic(), [], first
    here = Soak(folder, small_disk)
    while time.monotonic() - began < minutes * 60:
        run = OneRun(here, index, Random(f"{seed}-{index}"))
        try:
            run.to_its_end(began + minutes * 60)
        except Wrong as wrong:
            run.end()
            kept = folder / f"wrong-{index:04d}"
            shutil.copytree(here.place / "checkpoints", kept / "checkpoints", symlinks=True)
            (kept / "history.txt").write_text("\n".join([*run.history, f"WRONG: {wrong}", ""]))
            wrongs.append(f"run {index} (--seed {seed} --first {index}): {wrong}; {kept}")
            print(f"WRONG {wrongs[-1]}", flush=True)
        finally:
            run.end()
        for path in (here.place / "checkpoints").iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        read_trace(here.place)
        index += 1
    minutes_taken = (time.monotonic() - began) / 60
    for name, count in sorted(here.counts.items(), key=lambda item: -item[1]):
        print(f"{count:6} {name}")
    print(f"{index - first} runs in {minutes_taken:.1f} minutes, {len(wrongs)} wrong; seed {seed}, folder {folder}")
    return 1 if wrongs else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill, corrupt and resume real trainings at random.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the run to begin with, to see one again")
    parser.add_argument("--folder", type=Path, help="a new folder for everything; a temporary one if not given")
    parser.add_argument("--mounted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.mounted and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0:
        # Mounts in here are nobody else's and go with the process.
        os.execvp("unshare", ["unshare", "-m", sys.executable, *sys.argv, "--mounted"])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # not without the sessions
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup: it stays so here, and not for the sessions
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="lm-soak-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return soak(folder, options.minutes, options.seed, options.mounted, options.first)


if __name__ == "__main__":
    sys.exit(main())

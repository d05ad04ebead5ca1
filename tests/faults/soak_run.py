"""One run of the soak: its sessions, how each is ended, and what must hold after it."""

import filecmp
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from random import Random
from typing import Any

from soak_damage import Damage, damage
from soak_watch import count_lines, fold, group, kill_group, kill_quietly, read_trace
from trainings import validations

from lm.runs.run import Run

STEPS, MICRO = 40, 2  # optimizer steps of a run, micro-batches of a step
DIVISIONS = [
    ("--data.micro_batch_size=2",), ("--data.micro_batch_size=8",), ("--trainer.devices=2",),
    ("--trainer.devices=2", "--data.micro_batch_size=2"), ("--data.micro_batch_size=1",),
]  # fmt: skip
GRACEFUL = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")


class Wrong(Exception):
    """A promise was broken."""


class OneRun:
    """One run from its first step to its last, in as many sessions as it takes; `soak` is a `soak.Soak`."""

    def __init__(self, soak: Any, index: int, random: Random) -> None:
        self.soak, self.index, self.random = soak, index, random
        self.path = soak.place / "checkpoints" / "soak"
        self.divided = random.random() < 0.3  # its micro-batch and ranks change
        self.damages: list[Damage] = []
        self.sessions: list[list[dict]] = []  # what each of them trained on
        self.metrics_whole = True
        self.groups: list[int] = []
        self.history: list[str] = []  # in words

    def note(self, words: str) -> None:
        self.history.append(f"{time.strftime('%H:%M:%S')} run {self.index} session {len(self.sessions)}: {words}")
        with open(self.soak.folder / "soak.log", "a") as file:
            file.write(self.history[-1] + "\n")

    def to_its_end(self, until: float) -> None:
        """Train, and break something, until the run is finished; after `until` nothing is broken any more.

        Raises:
            Wrong: what happened was not what must happen.
        """
        while True:
            calm = time.monotonic() > until or len(self.sessions) > 30
            found = None if calm or self.random.random() < 0.5 else damage(self.path, self.soak.registry, self.random)
            if found is not None:
                self.damages.append(found)
                self.metrics_whole &= not found.hides_metrics
                self.soak.counts["corruptions"] += 1
                self.note(found.what)
            if self.session(calm):
                return self.compare()

    def end(self) -> None:
        """Leave no process behind."""
        for leader in self.groups:
            kill_group(leader)

    # ---- one session --------------------------------------------------------------------------------------------

    def session(self, calm: bool) -> bool:
        """Whether it was the last one."""
        options = self.random.choice(DIVISIONS + [()] * 3) if self.divided else ()
        whole, last, entered = self.whole_checkpoints(), self.last(), self.says("entered")
        name = f"run-{self.index:04d}-session-{len(self.sessions):02d}"
        process = self.soak.start(name, *options)
        self.groups.append(process.pid)
        try:
            ending = None if calm else self.disturb(process)
            code, words = self.soak.wait(process, name)
        finally:
            if self.soak.ballast:
                self.soak.ballast.clear()
            self.sessions.append(read_trace(self.soak.place))
        line = next((line for line in reversed(words.splitlines()) if line.startswith("lm fit: ")), "")
        self.note(f"{' '.join(options)} ended by {ending}: exit {code}, {self.reach()} {line}")
        self.soak.counts["sessions"] += 1
        if "Traceback" in words or "--debug shows" in words:
            raise Wrong(f"an error that nobody foresaw: {line or name}")
        others = [path.name for path in self.path.parent.iterdir() if path.name != "soak"]
        if others:
            raise Wrong(f"it began anew as {others}")
        if code == 2:
            return self.refused(whole, line)
        self.began_rightly(whole, last)
        if self.sessions[-1]:  # it came as far as reading what was broken
            self.damages = [found for found in self.damages if found.checkpoint and not self.rewritten(found)]
        self.ended_rightly(ending, code, line, claimed=self.says("entered") != entered)
        if max(self.whole_checkpoints(), default=0) < self.least(whole, last):
            raise Wrong(f"a whole checkpoint was lost: {sorted(whole)} before, {sorted(self.whole_checkpoints())} now")
        self.nobody_left()
        return code == 0

    def disturb(self, process: subprocess.Popen) -> str | None:
        """End a session at a random moment; returns how."""
        kinds = ["SIGKILL"] * 4 + [*GRACEFUL] * 2 + ["twice SIGINT", "a process of it killed", "a second fit"] + [None]
        kind = self.random.choice(kinds + (["full disk"] * 2 if self.soak.ballast else []))
        if self.random.random() < 0.2:  # while it starts
            moment = time.monotonic() + self.random.uniform(0, 6)
            while time.monotonic() < moment and process.poll() is None:
                time.sleep(0.01)
        else:
            wanted = self.random.randrange(1, STEPS * MICRO)
            wanted = self.random.choice([wanted, wanted // 3 + 1])
            while process.poll() is None and count_lines(self.soak.place) < wanted:
                time.sleep(0.005)
            time.sleep(self.random.uniform(0, 0.05))
        if process.poll() is not None or kind is None:
            return None
        self.soak.counts[kind] += 1
        if kind == "full disk":
            self.soak.ballast.fill()
        elif kind == "twice SIGINT":
            process.send_signal(signal.SIGINT)
            time.sleep(self.random.uniform(0, 0.3))
            process.send_signal(signal.SIGINT)
        elif kind == "a process of it killed":
            kill_quietly(self.random.choice(group(process.pid) or [process.pid]))
        elif kind == "a second fit":
            self.intrude(process)
        else:
            process.send_signal(getattr(signal, kind))
        return kind

    def intrude(self, process: subprocess.Popen) -> None:
        """A second fit must be refused for as long as the first one trains, which stands still meanwhile."""
        if not count_lines(self.soak.place):
            return
        process.send_signal(signal.SIGSTOP)
        try:
            code, words = self.soak.wait(self.soak.start("second"), "second")
        finally:
            process.send_signal(signal.SIGCONT)
        if code != 2 and self.says("status") != "finished":
            raise Wrong(f"a second fit was not refused: exit {code}: {words.splitlines()[-1:]}")

    # ---- what must hold -----------------------------------------------------------------------------------------

    def whole_checkpoints(self) -> set[int]:
        """The steps of the checkpoints that are there and were not spoiled."""
        spoiled = {found.checkpoint for found in self.damages}
        return {int(path.name[5:]) for path in self.path.glob("step-*") if path.name not in spoiled}

    @staticmethod
    def least(whole: set[int], last: int) -> int:
        """The step to resume from. A kill between a checkpoint's last rename and the link to it leaves a step beyond
        `last`, which may be taken or not."""
        return max((step for step in whole if step <= last), default=max(whole, default=0))

    def last(self) -> int:
        link = self.path / "last"
        return int(os.readlink(link)[5:]) if link.is_symlink() else STEPS

    def rewritten(self, found: Damage) -> bool:
        """Whether a checkpoint that was spoiled is gone, or has been taken again since."""
        folder = self.path / found.checkpoint
        trainer = folder / "trainer.json"
        return not folder.exists() or (trainer.exists() and trainer.stat().st_mtime > found.when)

    def reach(self) -> str:
        steps = [entry["step"] for entry in self.sessions[-1]]
        return f"steps {min(steps)} to {max(steps)}" if steps else "no step"

    def refused(self, whole: set[int], line: str) -> bool:
        """A refusal is right where the run cannot be known, or nothing whole is left; all is put back then."""
        nothing_whole = not whole and any(found.checkpoint for found in self.damages)
        if not (nothing_whole or any(found.may_refuse for found in self.damages)):
            raise Wrong(f"refused without need: {line}")
        if not line:
            raise Wrong("refused without a word")
        self.soak.counts["refusals"] += 1
        for found in reversed(self.damages):
            found.undo()
        self.damages = []
        return False

    def began_rightly(self, whole: set[int], last: int) -> None:
        entries = self.sessions[-1]
        if not entries:
            return
        began = entries[0]["step"] - 1
        self.soak.counts["resumes"] += bool(began)
        before = max((entry["step"] for session in self.sessions[:-1] for entry in session), default=0)
        self.soak.counts["steps trained again"] += max(0, before - began)
        if began not in whole | {0} or began < self.least(whole, last):
            raise Wrong(f"it resumed from step {began}, and whole were {sorted(whole)}, last {last}")
        if began == 0 and any(found.checkpoint for found in self.damages) and not whole:
            raise Wrong("nothing whole was left, and it silently began anew")

    def ended_rightly(self, ending: str | None, code: int, line: str, claimed: bool) -> None:
        entries = self.sessions[-1]
        right = {
            None: (0,), "a second fit": (0,), "SIGKILL": (0, -signal.SIGKILL),
            "twice SIGINT": (0, 75, 130, -signal.SIGINT), "full disk": (0, 1),
            "a process of it killed": (0, 1, 75, -signal.SIGKILL),
        }.get(ending, (0, 75))  # fmt: skip
        if ending in GRACEFUL and not entries:  # before the interpreter has come to our first line
            right += (-getattr(signal, ending), 130)
        if code not in right:
            raise Wrong(f"ended by {ending} it left with {code}: {line}")
        if code in (1, 75) and not line:
            raise Wrong(f"exit {code} without a word")
        said = self.says("status")
        if code == 75 and claimed and said not in ("interrupted", None):
            raise Wrong(f"exit 75, and run.json says {said}")
        if ending in GRACEFUL and code == 75 and entries:
            newest = max(self.whole_checkpoints(), default=0)
            taken = max((entry["step"] for entry in entries), default=0)
            if newest < taken - 1:  # one step may be half done
                raise Wrong(f"{ending} lost steps: {taken} were taken, and the newest checkpoint is {newest}")

    def says(self, fact: str) -> Any:
        """What stands in run.json; None where it is spoiled or not there."""
        try:
            return json.loads((self.path / "run.json").read_text())[fact]
        except (OSError, ValueError, KeyError):
            return None

    def nobody_left(self) -> None:
        """Processes of a session may outlive it by some seconds, and no longer."""
        patience = time.monotonic() + 30
        while left := [pid for leader in self.groups for pid in group(leader)]:
            if time.monotonic() > patience:
                names = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:200] for pid in left]
                raise Wrong(f"processes outlived their session: {names}")
            time.sleep(0.1)
        self.groups = []

    def compare(self) -> None:
        """The finished run beside the one that was never stopped."""
        mine, straight = fold(self.sessions), self.soak.straight
        if {step: sorted(tokens) for step, (_, tokens) in mine.items()} != {
            step: sorted(tokens) for step, (_, tokens) in straight.items()
        }:
            raise Wrong("its steps saw other samples")
        if self.says("status") != "finished":
            raise Wrong(f"exit 0, and run.json says {self.says('status')}")
        self.soak.counts["finished runs"] += 1
        if not self.divided:
            self.compare_bits(mine)
        debris = [path.name for path in self.path.glob(".*")]
        if debris:
            raise Wrong(f"left behind: {debris}")

    def compare_bits(self, mine: dict[int, tuple[list[str], list]]) -> None:
        straight = self.soak.straight
        different = [step for step in straight if mine[step][0] != straight[step][0]]
        if different:
            raise Wrong(f"other losses at steps {different}")
        reference = self.soak.folder / "uninterrupted"
        for link in ("best", "last"):
            here, there = self.path / link, reference / link
            if os.readlink(here) != os.readlink(there):
                raise Wrong(f"{link} is {os.readlink(here)}, not {os.readlink(there)}")
            for name in ("model.safetensors", "optimizer.safetensors"):
                if not filecmp.cmp(here / name, there / name, shallow=False):
                    raise Wrong(f"{link}/{name} is not that of the uninterrupted run")
        if self.metrics_whole and validations(Run(self.path)) != validations(Run(reference)):
            raise Wrong("its validations are others")
        self.soak.counts["compared bit for bit"] += 1

"""The mirror of a run: a copy of its folder in an object store, for machines that may be taken away.

`<mirror>/<run>/` holds the files of the run folder but its lock. A checkpoint's `trainer.json` makes it complete: it is
uploaded last and removed first, so a kill never leaves an incomplete one that looks complete. The links `last` and
`best` are small objects with the name of a checkpoint. Nothing here imports torch.
"""

import hashlib
import io
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import pyarrow.fs as pafs

from lm.errors import LmError, RequestError, RunError, first_line
from lm.runs.run import LOCK, STEP, Run, session, valid_facts
from lm.system.files import atomic_folder, parse_json, refuse_url
from lm.system.remote import ARROW_SCHEMES, COPIED_AT_ONCE, call_within, open_file, open_filesystem
from lm.system.stop_signals import STOP

log = logging.getLogger(__name__)

MARKER = "trainer.json"  # the file that makes a checkpoint complete
LINKS = ("last", "best")
HEARTBEAT = "heartbeat.json"
BEAT = 10.0  # seconds between two uploads of the heartbeat
START_PATIENCE = 20.0  # seconds in which the store has to answer before a run starts
NO_ANSWER = 60.0  # seconds after which a request, of `COPIED_AT_ONCE` bytes at most, is given up
END_PATIENCE = 60.0  # seconds without an answer after which the end of a run stops waiting


class Mirror:
    """A folder of an object store with the mirrors of runs, by a URL as for `remote.open_filesystem`."""

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        if scheme not in (*ARROW_SCHEMES, "file") or not rest.strip("/") or (scheme == "file") != rest.startswith("/"):
            raise RequestError(f"trainer.mirror {url}: give s3://bucket/folder, gs://bucket/folder or file:///folder")
        self.name = re.sub("//[^/@]*@", "//", url.partition("?")[0]).rstrip("/")  # for messages: without credentials
        self.answered = 0.0  # when the store answered last, by `time.monotonic`
        self._url = url
        self._place: tuple[pafs.FileSystem, str] | None = None  # the file system and the path in it

    # ---- requests -----------------------------------------------------------------------------------------------

    def open(self) -> tuple[pafs.FileSystem, str]:
        """The file system, and the path of the mirror in it."""
        if self._place is None:
            filesystem, path, _ = self.call(lambda: open_filesystem(self._url), START_PATIENCE)
            self._place = filesystem, path.rstrip("/")
        return self._place

    def call(self, request: Callable[[], Any], seconds: float = NO_ANSWER) -> Any:
        """Make a request in a thread; if it takes longer than `seconds`, raise OSError and leave the thread running."""
        answer = call_within(seconds, request)
        self.answered = time.monotonic()
        return answer

    def files(self, run: str) -> dict[str, pafs.FileInfo]:
        """All files of a run's mirror, by their paths relative to it."""
        filesystem, path = self.open()
        selector = pafs.FileSelector(f"{path}/{run}", recursive=True, allow_not_found=True)
        found = self.call(lambda: filesystem.get_file_info(selector))
        return {file.path.removeprefix(f"{path}/{run}/"): file for file in found if file.type == pafs.FileType.File}

    def read(self, name: str) -> bytes:
        """The content of a small file; empty where there is none."""
        filesystem, path = self.open()

        def read() -> bytes:
            with suppress(FileNotFoundError), filesystem.open_input_stream(f"{path}/{name}") as stream:
                return stream.read()
            return b""

        return self.call(read)

    def has(self, run: str) -> bool:
        return bool(self._described(run))

    def _described(self, run: str) -> bytes:
        """The `run.json` of a run's mirror, empty where there is none; RunError where the store does not answer."""
        try:
            return self.read(f"{run}/run.json")
        except OSError as error:
            raise RunError(f"{self.name}/{run} cannot be read: {first_line(error)}") from error

    def facts(self, run: str) -> dict[str, Any]:
        """The facts of a mirror's `run.json`; empty where it is damaged or there is none."""
        try:
            return valid_facts("run.json", parse_json(self._described(run)))
        except ValueError:
            return {}

    def write(
        self, name: str, source: BinaryIO, seconds: float = NO_ANSWER, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Write a file; `meanwhile` is called between its parts."""
        filesystem, path = self.open()
        target, local = f"{path}/{name}", isinstance(filesystem, pafs.LocalFileSystem)
        if local:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
        temporary = f"{target}.part" if local else target  # an object store shows only complete objects
        stream = self.call(lambda: filesystem.open_output_stream(temporary), seconds)
        try:
            while part := source.read(COPIED_AT_ONCE):
                self.call(lambda part=part: (stream.write(part), stream.flush()), seconds)  # else all stays in memory
                meanwhile()
            self.call(stream.close, seconds)
        except BaseException:
            with suppress(OSError):
                call_within(0, stream.close)  # here, not when the garbage collector runs in a thread that must not wait
            raise
        if local:
            os.replace(temporary, target)

    def delete(self, name: str) -> None:
        filesystem, path = self.open()
        with suppress(FileNotFoundError):
            self.call(lambda: filesystem.delete_file(f"{path}/{name}"))

    def delete_checkpoint(self, name: str) -> None:
        """Delete a checkpoint, its marker first."""
        filesystem, path = self.open()
        self.delete(f"{name}/{MARKER}")
        with suppress(FileNotFoundError):
            self.call(lambda: filesystem.delete_dir(f"{path}/{name}"))

    def check(self, root: str) -> None:
        """Raise RequestError where the mirror cannot be written to, or is in `root`, the folder of the runs."""
        probe = f".write-test-{os.getpid()}"
        try:
            filesystem, path = self.open()
            local = isinstance(filesystem, pafs.LocalFileSystem)
            if local and Path(path).resolve().is_relative_to(Path(root).resolve()):
                raise RequestError(f"trainer.mirror {self.name} is in the folder of the runs: give one on another disk")
            self.write(probe, io.BytesIO(b"x"), START_PATIENCE)
            self.call(lambda: filesystem.delete_file(f"{path}/{probe}"), START_PATIENCE)
        except OSError as error:
            raise RequestError(
                f"trainer.mirror {self.name} cannot be written to ({first_line(error)}): are the bucket, its endpoint "
                "and the credentials right, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY?"
            ) from error

    # ---- bringing a run back ------------------------------------------------------------------------------------

    def bring_back(self, name: str, root: str, *, named: bool) -> None:
        """Copy the newest run with this name to this machine, into `root`, unless the run there is as new.

        If the name was `named` by `--run`, it means exactly that run, else the newest of `name`, `name-2` ...; a run
        that a process trains, here or elsewhere, is refused.
        """
        from filelock import FileLock

        try:
            filesystem, path = self.open()
            selector = pafs.FileSelector(path, allow_not_found=True)
            folders = [info.base_name for info in self.call(lambda: filesystem.get_file_info(selector))]
            wanted = re.compile(re.escape(name) + ("" if named else r"(-\d+)?"))
            found = {run: self.facts(run) for run in folders if wanted.fullmatch(run)}
            same = [run for run, facts in found.items() if facts and (named or facts.get("name") == name)]
            if not same:
                return
            newest = max(same, key=lambda run: found[run].get("entered", 0.0))
            Path(root).mkdir(parents=True, exist_ok=True)
            with FileLock(Path(root) / ".mirror.lock"):  # the other ranks wait, and then find the run here
                others = [] if named else [run for run in Run.all(root, name) if run.name != newest]
                if _is_newer(found[newest], Run(Path(root) / newest), others):
                    self._refuse_if_trained(newest)
                    self._download(newest, Path(root) / newest)
        except OSError as error:
            raise RunError(f"run {name} cannot be brought back from {self.name}: {first_line(error)}") from error

    def _refuse_if_trained(self, run: str) -> None:
        """Raise RequestError if a process trains the run: wait to see whether its heartbeat changes."""
        with TemporaryDirectory() as folder:
            copy = Run(folder)

            def refresh() -> None:
                for name in ("run.json", HEARTBEAT):
                    (copy.path / name).write_bytes(self.read(f"{run}/{name}"))

            refresh()
            if copy.beats(f"{self.name}/{run}", refresh):
                raise copy.is_being_trained(f"{self.name}/{run}")

    def _download(self, run: str, target: Path) -> None:
        files = self.files(run)
        whole = {step for step, _, name in (file.rpartition("/") for file in files) if name == MARKER}
        log.info("bringing back run %s from %s/%s", target, self.name, run)
        if target.exists():
            Run(target).refuse_if_trained()
            log.info("the folder that is here is older, and is replaced")
        filesystem, _ = self.open()
        with atomic_folder(target) as folder:
            for name, info in files.items():
                step = name.partition("/")[0]
                if name in (*LINKS, HEARTBEAT) or ".." in name.split("/"):
                    continue
                if STEP.fullmatch(step) and step not in whole:
                    log.warning("passing over %s/%s/%s: it was not uploaded to its end", self.name, run, step)
                    continue
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                remote = open_file(filesystem, info.path, f"{self.name}/{run}/{name}")
                with remote, open(folder / name, "wb") as file:
                    shutil.copyfileobj(remote, file, COPIED_AT_ONCE)
            for link in LINKS:
                if (step := self.read(f"{run}/{link}").decode(errors="replace")) in whole:
                    (folder / link).symlink_to(step)
            if Run(folder).read("run.json").get("status") == "running":  # its process is gone
                Run(folder).describe(status="interrupted", reason=f"brought back from {self.name}/{run}")

    def refuse_other(self, run: Run) -> None:
        """Raise RequestError where the mirror of another run with this one's name is."""
        started = self.facts(run.name).get("started")
        if started not in (None, run.read("run.json").get("started")):
            raise RequestError(
                f"{self.name}/{run.name} is the mirror of another run, which was started at {started}: give another "
                "--run or --trainer.mirror"
            )


def refuse_remote_root(root: str) -> None:
    """Raise RequestError for a URL as the folder of the runs."""
    cure = "give one of a local disk"
    if root.partition("://")[0] in ARROW_SCHEMES:
        cure = f"leave it out, and give --trainer.mirror {root} for a copy there"
    refuse_url("trainer.default_root_dir", root, cure)


def _is_newer(facts: dict[str, Any], local: Run, others: list[Run]) -> bool:
    """Whether the mirror with these facts of `run.json` is newer than the local folder and other runs with its name."""
    if any(run.entered()[1] >= facts.get("entered", 0.0) for run in others):
        return False
    here = local.read("run.json")
    if here and here.get("started") != facts.get("started"):
        return False  # another run, which `refuse_other` keeps apart from this one
    return local.entered() < session(facts)


class Uploads:
    """The thread that keeps the mirror of a run up to date. A failure is a warning, and the training continues.

    Start it once `run.json` describes this session, and after `Mirror.refuse_other`.
    """

    def __init__(self, mirror: Mirror, run: Run) -> None:
        self._mirror, self._run = mirror, run
        self.name = f"{mirror.name}/{run.name}"
        self._whole: dict[str, str | None] | None = None  # checkpoint there -> digest of its marker; None: incomplete
        self._sent: dict[str, tuple[int, int]] = {}  # small file -> its time and size when it was uploaded
        self._wanted = self._tried = 0  # numbers of the last request for an update, and of the last that was tried
        self._asked, self._ended = threading.Event(), False
        self._beaten, self._error = 0.0, ""  # time of the last heartbeat, and why the mirror is not up to date
        self._sessions: set[tuple[float, float]] = set()  # sessions that may have written `run.json` in the mirror
        log.info("mirror %s", self.name)
        self.update()
        threading.Thread(target=self._work, name="mirror", daemon=True).start()

    @property
    def newest(self) -> str | None:
        """The newest whole checkpoint in the mirror."""
        return max((step for step, digest in (self._whole or {}).copy().items() if digest), default=None)

    def update(self) -> int:
        """Request an update of the mirror, without waiting; returns the number of the request."""
        self._wanted += 1
        self._asked.set()
        return self._wanted

    def wait(self, stop_within: float) -> None:
        """Wait until the mirror is up to date with the run folder; log a warning if it is not at the end.

        After a signal, wait at most `stop_within` seconds; 0: as long as the store answers.
        """
        request, began = self.update(), time.monotonic()
        while (self._tried < request or self._error) and not self._ended:
            now = time.monotonic()
            late = STOP.received is not None and stop_within and now >= STOP.received_at + stop_within
            if late or now >= max(began, self._mirror.answered) + END_PATIENCE:
                when = f"{stop_within:g} s after {STOP.received.name} (trainer.stop_within)" if late else "the end"
                log.warning("the mirror %s is not complete at %s%s; its newest checkpoint is %s", self.name, when,
                            f": {self._error}" if self._error else "", self.newest or "none yet")  # fmt: skip
                return
            time.sleep(0.02)
            if self._tried >= request and self._error:
                time.sleep(0.5)
                request = self.update()

    def stop(self) -> None:
        """End the thread after its current request."""
        self._ended = True
        self._asked.set()

    def _work(self) -> None:
        while not self._ended:
            self._asked.wait(BEAT)
            self._asked.clear()
            request, asked = self._wanted, self._wanted > self._tried
            try:
                self._beat()
                if asked:
                    self._update()
            except Exception as error:  # whatever it is, the training continues
                foreseen = isinstance(error, OSError | LmError)
                self._describe(first_line(error) if foreseen else f"{type(error).__name__}: {error}")
            else:
                if asked:
                    self._describe("")
            if asked:
                self._tried = request

    def _describe(self, error: str) -> None:
        """Write the mirror's state to `run.json`; log a failure when it begins and when it ends."""
        if error and error != self._error:
            later = "nothing more is uploaded" if self._ended else "it is tried again with the next checkpoint"
            log.warning("the mirror %s is not up to date: %s; %s", self.name, error, later)
        elif self._error and not error:
            log.info("the mirror %s is up to date again", self.name)
        self._error = error
        state = {"url": self.name, "newest": self.newest, "time": time.time(), "error": error or None}
        if not self._ended:  # else another process may describe the run by now
            self._run.attempt(self._run.path / "run.json", lambda: self._run.describe(mirror=state))

    # ---- what is uploaded ---------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Upload the heartbeat of the training now and then, also between the parts of a large file."""
        if time.monotonic() - self._beaten < BEAT:
            return
        if self._run.read(HEARTBEAT).get("time", 0.0) < self._run.entered()[1]:
            return  # the heartbeat of the previous session
        self._beaten = time.monotonic()
        with suppress(FileNotFoundError), open(self._run.path / HEARTBEAT, "rb") as file:
            self._mirror.write(f"{self._run.name}/{HEARTBEAT}", file)

    def _send(self, name: str, file: BinaryIO) -> None:
        self._mirror.write(f"{self._run.name}/{name}", file, meanwhile=self._beat)

    def _update(self) -> None:
        """Upload what is new, the newest checkpoint first; then remove checkpoints that are not in the run folder."""
        there = self._mirror.facts(self._run.name)
        if self._whole is None:
            self._whole = self._checkpoints()
            self._sessions = {self._run.entered(), session(there)}
        if not there:  # the mirror is new, or somebody has emptied it
            self._sent.clear()
            self._whole = dict.fromkeys(self._whole)
        elif session(there) not in self._sessions:
            self._ended = True
            raise RunError(f"the run was resumed on {there.get('host')}, and the mirror is its now")
        self._send_files()
        steps = self._run.steps()
        for step in sorted(steps, reverse=True):
            self._send_checkpoint(steps[step], self._whole)
        for link in LINKS:
            if target := self._run.link(link):
                self._send(link, io.BytesIO(target.name.encode()))
        steps = self._run.steps()  # there may be a newer checkpoint by now
        if steps and self._whole.get(steps[max(steps)].name):
            for name in self._whole.keys() - {path.name for path in steps.values()}:
                self._mirror.delete_checkpoint(f"{self._run.name}/{name}")
                del self._whole[name]

    def _checkpoints(self) -> dict[str, str | None]:
        """The checkpoints in the mirror and the digests of their markers; None for an incomplete checkpoint."""
        names = [name.rpartition("/")[::2] for name in self._mirror.files(self._run.name)]
        found: dict[str, str | None] = {step: None for step, _ in names if STEP.fullmatch(step)}
        for step in [step for step, name in names if step in found and name == MARKER]:
            found[step] = _digest(self._mirror.read(f"{self._run.name}/{step}/{MARKER}"))
        return found

    def _send_files(self) -> None:
        """Upload changed files other than checkpoints, `run.json` last."""
        found = [path for path in self._run.path.rglob("*") if path.is_file() and not path.is_symlink()]
        names = {path.relative_to(self._run.path).as_posix(): path for path in found}
        for name, path in sorted(names.items(), key=lambda item: item[0] == "run.json"):
            first = name.partition("/")[0]
            if first.startswith(".") or STEP.fullmatch(first) or name in (LOCK, HEARTBEAT):
                continue
            with suppress(FileNotFoundError), open(path, "rb") as file:
                state = os.fstat(file.fileno())
                if self._sent.get(name) != (state.st_mtime_ns, state.st_size):
                    self._send(name, file)
                    self._sent[name] = (state.st_mtime_ns, state.st_size)
        self._sessions = {self._run.entered()}

    def _send_checkpoint(self, folder: Path, whole: dict[str, str | None]) -> None:
        """Upload a checkpoint that the mirror lacks; open files stay readable even if the run removes it meanwhile."""
        with ExitStack() as stack:
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, descriptor)
                opener = partial(os.open, dir_fd=descriptor)
                files = {name: stack.enter_context(open(name, "rb", opener=opener)) for name in os.listdir(descriptor)}
                marker = files.pop(MARKER).read()
            except (FileNotFoundError, KeyError):  # removed just now, after a newer one was written
                return
            if whole.get(folder.name) == _digest(marker):
                return
            whole[folder.name] = None
            self._mirror.delete(f"{self._run.name}/{folder.name}/{MARKER}")
            for name, file in files.items():
                self._send(f"{folder.name}/{name}", file)
            self._send_files()  # a resume needs the curves up to the checkpoint's step
            self._send(f"{folder.name}/{MARKER}", io.BytesIO(marker))
            whole[folder.name] = _digest(marker)


def _digest(marker: bytes) -> str:
    return hashlib.sha256(marker).hexdigest()

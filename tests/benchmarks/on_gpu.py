"""Everything that needs a GPU, in two scripts for a rented one: `tests/benchmarks/on_gpu.sh`, then `on_gpu.sh 2`.

Script 1 takes at most 500 s: what the device can do, tests, the speed of the 350M preset, and a training that is killed
and resumed. Script 2 takes at most 140 s: first what failed in script 1, then its own parts while time is left. Its
parts take longer than that in all, and one is begun only if at least half of its seconds are left. A part that hangs is
ended after 1.5 times its expected seconds, and one that fails stops no other.

After each part, all results so far are in one JSON file, DATE-gpu-DEVICE.json, and on one page, DATE-gpu-DEVICE.md;
these two, the logs and the trace are packed into one archive of less than 16 MB. Results stay in their folder for the
next script. Without a GPU everything runs in small sizes, to try the scripts themselves.

A machine without network needs the wheels of what it lacks in the folder wheels/. Beside torch, Lightning and pytest,
these are usually:
    pip download --no-deps --dest wheels jsonargparse docstring-parser typeshed-client
"""

import argparse
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

from on_gpu_page import page, verdict
from on_gpu_parts import CAPS, KILL_AFTER, PARTS, PREPARE, ROOT, SCRIPTS, words_of

HERE = Path(__file__).resolve().parent
BEGUN = float(os.environ.get("BEGUN") or time.time())  # when on_gpu.sh was started
PACKING = 8  # seconds of a script for ending its last part and packing
GRACE = 3  # seconds in which pytest prints its summary when it is cut
SAME = 0.02  # nats at most between the losses of a training and of one that was killed and resumed
MOST_BYTES = 16_000_000  # of the archive
TRACE = "trace.json.gz"
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What the commands need. A process that waits for the next command has imported them; importing does not use CUDA.
IMPORTS = ["torch", "lightning", "lm.cli.command", "lm.cli.fit", "lm.cli.bench_step", "lm.cli.data", "pytest"]


class Running(NamedTuple):
    """A command that was started."""

    name: str
    words: list[str]
    process: subprocess.Popen
    log: Path
    began: float


class Driver:
    """Runs parts, and keeps the results: in a folder that stays, and in an archive."""

    def __init__(self, top: Path, archives: Path, work: Path) -> None:
        self.archive = archives
        self.part: dict[str, Any] = {"seconds": 0}  # the one that runs
        self.runs = work / "runs"
        self._top, self._work = top, work
        self._alive: list[subprocess.Popen] = []
        self._preparing: subprocess.Popen | None = None
        self._waiting = self._preload()

    def check(self) -> str | None:
        """What cannot be imported; the process that looked is the one that runs the first command."""
        answer = self._waiting.stdout.readline()
        return json.loads(answer)["missing"] if answer else "it ended while it imported"

    def begin(self, device: str, anew: bool) -> None:
        """Open the results: new ones, or the newest of this device."""
        date = time.strftime("%Y-%m-%d", time.gmtime())
        self._cpu, self.label = device == "cpu", f"{date}-{'gpu-' * (device != 'cpu')}{device}"
        self.found: dict[str, Any] = {"device": device, "date": date, "parts": {}}
        before = sorted(self._top.glob(f"*-{device}/*-{device}.json"))
        if before and not anew:
            self.label, self.found = before[-1].stem, json.loads(before[-1].read_text())
        self.folder = self._top / self.label
        if anew:
            shutil.rmtree(self.folder, ignore_errors=True)
        for folder in (self.folder, self.archive):
            folder.mkdir(parents=True, exist_ok=True)
        self.archive /= f"on-gpu-{self.label}-{time.strftime('%H%M%S', time.gmtime())}.tar.gz"
        self.found["machine"] = machine()

    def prepare(self, until: float = 0) -> None:
        """Make shards of the small text, beside the first parts; wait for them until then."""
        if self._preparing is None and not (self._top / "data/manifest.json").exists():
            with open(self.folder / "prepare.log", "w") as log:
                self._preparing = self._popen(self._words("prepare", PREPARE), stdout=log, stderr=log)
        if self._preparing:
            with suppress(subprocess.TimeoutExpired):
                self._preparing.wait(max(0, until - time.time()))

    def run(self, name: str, chosen: list[str], limit: float, end: float) -> None:
        """Run some commands of a part: within the limit, and not after `end`."""
        part, began = PARTS[name], time.time()
        self.part = {"expected_s": part.seconds, "commands": self.found["parts"].get(name, {}).get("commands", {})}
        self.found["parts"][name] = self.part
        if any("{data}" in line for line in part.commands.values()):
            self.prepare(until=min(end, began + limit))
        if name == "fit":
            train_and_kill(self, min(end, began + limit))
        else:
            for number, command in enumerate(chosen, 1):
                # One that hangs leaves its part's other commands the time that they are expected to take.
                others = (len(chosen) - number) * limit / 1.5 / len(part.commands)
                self.finish(self.start(command, part.commands[command]), min(end, began + limit - others))
        commands = self.part["commands"].values()
        self.part |= {"seconds": round(time.time() - began, 1), "ok": all(one["ok"] for one in commands)}

    def start(self, name: str, line: str) -> Running:
        """Give a command to the process that waits for one, and start the next process that waits."""
        words, log = self._words(name, line), self.folder / f"{name}.log"
        if before := self.part["commands"].get(name):  # once more
            log = self.folder / f"{name}-again.log"
            if before.get("failed"):  # these tests alone, or first where the others were not all run
                words += ["--ff"] if before["exit"] == "cut" else ["--lf", "--lfnf", "none"]
            (self.folder / f"{name}.json").unlink(missing_ok=True)
        process, self._waiting = self._waiting, self._preload()
        with suppress(BrokenPipeError):  # its exit code tells
            process.stdin.write(json.dumps({"argv": words, "log": str(log)}) + "\n")
            process.stdin.close()
        return Running(name, words, process, log, time.time())

    def finish(self, running: Running, end: float, good: int | None = 0) -> None:
        """Wait for a command until `end`, then kill it and all that it started; record it, fine if it exits `good`."""
        process, cut = running.process, False
        try:
            process.wait(max(0, end - time.time()))
        except subprocess.TimeoutExpired:
            cut = good != -signal.SIGKILL
            if cut and running.words[:2] == ["-m", "pytest"]:
                os.killpg(process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
        kill(process)
        self._alive.remove(process)
        code = process.wait()
        log = running.log.read_text(errors="replace") if running.log.exists() else ""
        self.record(
            running.name,
            {
                "command": shlex.join(["python", *running.words]),
                "seconds": round(time.time() - running.began, 1),
                "exit": "cut" if cut else code,
                "ok": not cut and code == good,
                "said": (log.strip().splitlines() or [""])[-1][:200],
                "failed": re.findall(r"^(?:FAILED|ERROR) (\S+)", log, re.M),
                "result": self._result(running, log),
            },
        )
        if cut or code != good:
            print("\n".join(log.splitlines()[-15:]))

    def record(self, name: str, record: dict[str, Any]) -> None:
        print(f"{name}: {verdict(record)}", flush=True)
        self.part["commands"][name] = record

    def pack(self) -> None:
        """Write the JSON file and the page, and all there is so far into the archive."""
        for suffix, text_of in (("json", lambda found: json.dumps(found, indent=1)), ("md", page)):
            text = text_of(self.found)
            for folder in (self.folder, self.archive.parent):
                (folder / f"{self.label}.{suffix}").write_text(text + "\n")
        part = self.archive.with_suffix(".part")  # so that the archive is whole at any time
        for left_out in ("", TRACE):
            with tarfile.open(part, "w:gz") as tar:
                for path in sorted(self.folder.iterdir()):
                    if path.is_file() and path.name != left_out:
                        tar.add(path, f"{self.label}/{path.name}")
            if part.stat().st_size < MOST_BYTES:
                break
        part.replace(self.archive)

    def close(self) -> None:
        for process in self._alive:
            kill(process)

    def _words(self, name: str, line: str) -> list[str]:
        return words_of(line, name, self.folder, self._top / "data", self.runs, self._cpu)

    def _preload(self) -> subprocess.Popen:
        words = [str(HERE / "preloaded.py"), *IMPORTS]
        return self._popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def _popen(self, words: list[str], **pipes: Any) -> subprocess.Popen:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(ROOT), f"{self._work}/packages", os.environ.get("PYTHONPATH")])
            ),
            "COLUMNS": "160",  # of tables in the logs
            "LM_REGISTRY": f"{self._work}/runs.db",
            # No pool of compile processes: pytest's workers waited for its end until they were killed.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        if not Path("/dev/nvidiactl").exists():  # threads would wait for each other beside the next command's imports
            environment.setdefault("OMP_NUM_THREADS", "1")
        command = [sys.executable, *words]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipes)
        self._alive.append(process)
        return process

    def _result(self, running: Running, log: str) -> Any:
        """What a command measured: its JSON file, the JSON object that it printed, or the losses of its training.

        None where there is nothing, as it broke or was cut while it wrote.
        """
        with suppress(OSError, ValueError):
            file = self.folder / f"{running.name}.json"
            if file.exists():
                found = json.loads(file.read_text())
                found.pop("first_step_s", None)  # it would count the wait for the command
                return found
            if "--json" in running.words:
                printed = [line for line in log.splitlines() if line.startswith("{") and line.endswith("}")]
                return json.loads(printed[-1]) | kernel_times(self.folder / TRACE) if printed else None
            if "--trainer.default_root_dir" in running.words:
                run = Path(running.words[running.words.index("--trainer.default_root_dir") + 1])
                for path in run.glob("*/metrics.jsonl"):
                    shutil.copy(path, self.folder / f"{running.name}.jsonl")
                return {
                    key: value for line in metrics(run) for key, value in line.items() if key in ("step", "val/loss")
                }
        return None


# ---- a training that is killed and resumed ---------------------------------------------------------------------------


def train_and_kill(driver: Driver, end: float) -> None:
    """Train once whole and, beside it, once killed and resumed; the losses of all steps have to be the same."""
    lines, seconds = PARTS["fit"].commands, PARTS["fit"].seconds
    whole, killed = (driver.start(name, lines[name]) for name in ("whole", "killed"))
    run, until = driver.runs / "killed", min(end, time.time() + 0.6 * seconds)
    while killed.process.poll() is None and time.time() < until:
        if any(run.glob("*/last")) and max(losses(run), default=0) >= KILL_AFTER:
            break
        time.sleep(0.05)
    else:
        until = 0
    driver.finish(killed, 0, good=-signal.SIGKILL if until else None)
    resumed = driver.start("resumed", lines["resumed"])
    for running in (whole, resumed):
        driver.finish(running, end)
    driver.record("same", compare(losses(driver.runs / "whole"), losses(run)))


def compare(whole: dict[int, float], killed: dict[int, float]) -> dict[str, Any]:
    """The record of a comparison of losses by step."""
    apart = max((abs(whole[step] - killed[step]) for step in whole.keys() & killed.keys()), default=None)
    same = apart is not None and whole.keys() == killed.keys() and apart < SAME
    said = f"{len(whole)} and {len(killed)} steps, losses at most {apart} apart"
    return {"exit": int(not same), "ok": same, "seconds": 0, "said": said, "result": {"apart": apart}}


def losses(folder: Path) -> dict[int, float]:
    """The training loss of each step of the run in a folder; of a step that was trained twice, the second one."""
    return {line["step"]: line["train/loss"] for line in metrics(folder) if "train/loss" in line}


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in folder.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]  # the last may not be written to its end


# ---- the machine -----------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    query = "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm"
    return {
        "gpu": first_line("nvidia-smi", query, "--format=csv,noheader"),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "torch": version("torch"),
        "revision": first_line("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }


def find_device() -> str:
    """The GPU's name for file names, or `cpu`."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu')"
    name = (first_line(sys.executable, "-c", code) or "cpu").lower().removeprefix("nvidia ")
    return re.sub(r"[^a-z0-9]+", "-", name)


def first_line(*command: str) -> str | None:
    """The first line that a command prints; None if it fails or is missing."""
    with suppress(OSError, subprocess.CalledProcessError, IndexError):
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).splitlines()[0]
    return None


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def unpack_wheels(wheels: Path, target: Path) -> None:
    """Unpack the wheels of what is not installed; a wheel of pure Python needs no more."""
    target.mkdir()
    for wheel in sorted(wheels.glob("*.whl")):
        if version(wheel.name.split("-")[0]) is None:
            ZipFile(wheel).extractall(target)


def read_libraries() -> None:
    """Read the large libraries into the page cache as a whole: faster than page by page, when they are used."""
    spec = util.find_spec("torch")
    torch = Path(spec.origin).parent if spec and spec.origin else ROOT
    for path in [*torch.glob("lib/*.so*"), *torch.parent.glob("nvidia/**/lib/*.so*")]:
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            while file.read(2**24):
                pass


def kernel_times(trace: Path) -> dict[str, Any]:
    """Of each kernel in a trace of three steps: milliseconds and launches a step, the longest first."""
    found: dict[str, list[float]] = {}
    with suppress(OSError, ValueError):
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
                times = found.setdefault(event["name"][:80], [0.0, 0.0])
                times[0] += event["dur"] / 1e3 / 3
                times[1] += 1 / 3
    longest = sorted(found.items(), key=lambda item: -item[1][0])
    return {"kernels": dict(longest[:25]), "kernels_ms_per_step": sum(times[0] for times in found.values())}


def kill(process: subprocess.Popen) -> None:
    """End a process and all that it started; torchrun starts its workers in sessions of their own."""
    for pid in descendants(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            children.setdefault(int(stat.read_text().rpartition(") ")[2].split()[1]), []).append(int(stat.parent.name))
    found = children.get(pid, [])
    for one in found:  # grows meanwhile
        found += children.get(one, [])
    return found


# ---- the command line ------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    options = read_arguments(arguments)
    script = options.what[0] if options.what in (["1"], ["2"]) else None
    names = [name for what in options.what for name in SCRIPTS.get(what, [what])]
    top = (options.out or ROOT / "build/on_gpu").absolute()
    if options.dry:
        print_commands(script, names, top)
        return 0
    archives = Path(os.environ.get("OUT") or top).absolute()
    for one in STOPPING:
        signal.signal(one, stop)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        unpack_wheels(options.wheels.absolute(), Path(work) / "packages")
        driver = Driver(top, archives, Path(work))
        try:
            return run_parts(driver, script, names, options)
        except KeyboardInterrupt:
            return 130
        finally:
            driver.close()


def stop(*_: Any) -> None:
    """Called once, by the first signal."""
    for one in STOPPING:
        signal.signal(one, signal.SIG_IGN)
    raise KeyboardInterrupt


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    lists = SCRIPTS | {"others": [name for name in PARTS if name not in sum(SCRIPTS.values(), [])]}
    parts = "\n".join(
        f"  {number:<7} {name:<13} {PARTS[name].seconds:>4} s  {PARTS[name].tells}"
        for number, names in lists.items()
        for name in names
    )
    parser = argparse.ArgumentParser(
        "on_gpu.sh",
        description=__doc__,
        epilog=f"parts by script, with the seconds that they are expected to take:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", dest="dry", action="store_true", help="only print the commands, as they are on a GPU")
    parser.add_argument("-p", dest="python", help="the Python to use")
    parser.add_argument(
        "-w", dest="wheels", type=Path, default=ROOT / "wheels", help="a folder of wheels; wheels/ if not given"
    )
    parser.add_argument(
        "-o",
        dest="out",
        type=Path,
        help="where results go; otherwise to build/on_gpu, and the archive to the folder $OUT if that is set",
    )
    parser.add_argument(
        "what", nargs="*", default=["1"], metavar="1 | 2 | PART", help="a script or some parts; 1 if not given"
    )
    options = parser.parse_args(arguments)
    wrong = [what for what in options.what if what not in PARTS and what not in SCRIPTS]
    if wrong:
        sys.exit(refusal(f"no part {wrong[0]}: 1 or 2, or one of {' '.join(PARTS)}"))
    if len(options.what) > 1 and set(SCRIPTS) & set(options.what):
        sys.exit(refusal("give 1 or 2 alone, or parts by their names"))
    if options.python and shutil.which(options.python) and not same_file(options.python):
        sys.exit(refusal("give -p before what is to run"))  # on_gpu.sh has not seen it
    return options


def same_file(python: str) -> bool:
    """Whether this process is run by that Python."""
    found = shutil.which(python)
    return found is not None and os.path.realpath(found) == os.path.realpath(sys.executable)


def refusal(message: str) -> int:
    """Print why nothing is run; the exit code."""
    sys.stderr.write(f"on_gpu.sh: {message}\n")
    return 2


def print_commands(script: str | None, names: list[str], top: Path) -> None:
    """What `-n` prints."""
    if script:
        print(f"# script {script}: {sum(PARTS[name].seconds for name in names)} s expected, {CAPS[script]} s at most")
    commands = {"prepare": PREPARE}
    for name in names:
        print(f"# {name}: {PARTS[name].seconds} s")
        for command, line in (commands | PARTS[name].commands).items():
            words = words_of(line, command, top / "DATE-gpu-DEVICE", top / "data", top / "runs", cpu=False)
            print(shlex.join([sys.executable, *words]))
        commands = {}


def run_parts(driver: Driver, script: str | None, names: list[str], options: argparse.Namespace) -> int:
    threading.Thread(target=read_libraries, daemon=True).start()
    device, missing = find_device(), driver.check()
    if missing:
        return refusal(
            f"{sys.executable} cannot run this: {missing}; put its wheel into wheels/ with "
            "'pip download --no-deps --dest wheels NAME', or install it"
        )
    print(f"device: {device}", flush=True)
    if device == "cpu" and Path("/dev/nvidiactl").exists():
        return refusal(f"there is a GPU, and the torch of {sys.executable} does not see it: give another with -p")
    driver.begin(device, anew=script == "1")
    parts = driver.found["parts"]
    todo = {name: list(PARTS[name].commands) for name in names}
    if script == "2":
        todo = failed_commands(parts) | todo
    end = BEGUN + CAPS[script] - PACKING if script else float("inf")
    if any("{data}" in line for name in todo for line in PARTS[name].commands.values()):
        driver.prepare()
    try:
        for name, chosen in todo.items():
            part = PARTS[name]
            left, needed = end - time.time(), part.seconds * len(chosen) / len(part.commands)
            if left < needed / 2:
                said = f"not begun, as {max(0, left):.0f} s were left"
                print(f"{name}: {said}")
                parts[name] = (
                    {"expected_s": part.seconds, "commands": {}} | parts.get(name, {}) | {"ok": False, "said": said}
                )
                continue
            print(f"== {name}, {time.time() - BEGUN:.0f} s after the start", flush=True)
            driver.run(name, chosen, float(os.environ.get("PART_SECONDS") or 1.5 * part.seconds), end)
            driver.pack()
    except KeyboardInterrupt:
        driver.close()
        if "seconds" not in driver.part:
            driver.part |= {"ok": False, "said": "interrupted"}
        driver.pack()
        raise
    driver.pack()
    print(f"\n{page(driver.found)}\n\nall of it: {driver.archive}")
    failed = [name for name in todo if not parts[name]["ok"]]
    given = [
        word
        for flag, value in (("-p", options.python), ("-w", options.wheels), ("-o", options.out))
        if value and value != ROOT / "wheels"
        for word in (flag, str(value))
    ]
    again = shlex.join(["tests/benchmarks/on_gpu.sh", *given, *(["2"] if script == "1" else failed)])
    if failed:
        print(f"failed or not begun: {', '.join(failed)}")
    if script == "1":
        print(f"next, within 30 seconds: {again}")
    elif failed:
        print(f"once more, what did not end well: {again}")
    return int(bool(failed))


def failed_commands(parts: dict[str, Any]) -> dict[str, list[str]]:
    """Of each part of script 1 the commands that failed or were not run; a killed training is run as a whole.

    Nothing where script 1 has left no results.
    """
    todo = {}
    if not parts:
        return todo
    for name in SCRIPTS["1"]:
        part = parts.get(name, {"commands": {}})
        bad = [one for one in PARTS[name].commands if not part["commands"].get(one, {"ok": False})["ok"]]
        if bad or not part.get("ok"):
            todo[name] = list(PARTS[name].commands) if name == "fit" else bad or list(PARTS[name].commands)
    return todo


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

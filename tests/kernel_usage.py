"""What compiled kernels use of a multiprocessor, read from the compiler's log, and their instructions."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import nvidia

from lm.kernels import runtime


class Usage(NamedTuple):
    registers: int  # of a thread
    spilled_bytes: int  # of registers that did not fit, stored and loaded through memory


def kernel_usage(name: str, arch: str, **constants: object) -> dict[str, Usage]:
    """The usage of each kernel of a source, compiled now."""
    _, log = runtime.compile_source(name, arch, **constants)
    usage = {}
    for part in log.split("Compiling entry function ")[1:]:
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", part))
        usage[re.match(r"'(\w+)'", part)[1]] = Usage(int(re.search(r"Used (\d+) registers", part)[1]), spilled)
    assert usage, f"the log of {name}.cu names no kernel: {log}"
    return usage


def machine_code(name: str, arch: str, **constants: object) -> dict[str, list[str]]:
    """The instructions of each kernel of a source, such as `STG.E.128`, in their order in memory."""
    program = next(iter(sorted(Path(place, "cu13/bin/nvdisasm") for place in nvidia.__path__)))
    cubin, _ = runtime.compile_source(name, arch, **constants)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listed = subprocess.run([program, "-c", file.name], check=True, capture_output=True, text=True).stdout
    parts = (part for part in re.split(r"\.section\s+\.text\.", listed)[1:])
    instruction = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z0-9_.]+)")
    return {re.match(r"\w+", part)[0]: instruction.findall(part) for part in parts}

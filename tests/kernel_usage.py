"""What compiled kernels use of a multiprocessor, read from the compiler's log, and their instructions."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import nvidia

from lm.kernels import runtime

ENTRY = re.compile(r"Compiling entry function '(\w+)'(.*?)Used (\d+) registers", re.DOTALL)
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z0-9_.]+)")


class Usage(NamedTuple):
    registers: int  # of a thread
    spilled_bytes: int  # of registers that did not fit, stored and loaded through memory


def compiled(name: str, arch: str, constants: dict[str, object]) -> tuple[bytes, dict[str, Usage]]:
    """The machine code of a source, and the usage of each of its kernels."""
    cubin, log = runtime.compile_source(name, arch, **constants)
    spills = re.compile(r"(\d+) bytes spill")
    usage = {kernel: Usage(int(most), sum(map(int, spills.findall(text)))) for kernel, text, most in ENTRY.findall(log)}
    assert usage, f"the log of {name}.cu names no kernel: {log}"
    return cubin, usage


def instructions(cubin: bytes) -> dict[str, list[str]]:
    """The instructions of each kernel, such as `STG.E.128`, in their order in memory."""
    program = next(iter(sorted(Path(place, "cu13/bin/nvdisasm") for place in nvidia.__path__)))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listed = subprocess.run([program, "-c", "-ndf", file.name], check=True, capture_output=True, text=True).stdout
    return {
        re.match(r"\w+", part)[0]: INSTRUCTION.findall(part) for part in re.split(r"\.section\s+\.text\.", listed)[1:]
    }

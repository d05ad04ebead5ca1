"""What compiled kernels use of a multiprocessor, read from the compiler's log."""

import re
from typing import NamedTuple

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

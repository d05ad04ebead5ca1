"""CUDA sources to machine code by NVRTC, which torch installs: no nvcc, no headers, no GPU.

The result is for one architecture and one set of constants, and is kept on disk, so that a second start takes
milliseconds. Any number of processes may share the cache: a file in it is whole or absent. `launch` comes next.
"""

import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from lm.errors import RunError

SOURCES = Path(__file__).parent / "csrc"
PRELUDE = "prelude.cuh"
FLAGS = ("--std=c++17", "--ptxas-options=--verbose")


class Usage(NamedTuple):
    """What one kernel takes of a multiprocessor."""

    registers: int  # a thread
    spilled_bytes: int  # of registers that did not fit, stored and loaded through memory


def available() -> bool:
    """Whether CUDA sources can be compiled here."""
    try:
        from cuda.bindings import nvrtc

        return nvrtc.nvrtcVersion()[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS
    except (ImportError, RuntimeError, OSError):
        return False


def cubin(name: str, arch: str, **defines: object) -> bytes:
    """The machine code of a source, from the cache or compiled now.

    Args:
        name: of a file in `csrc/`, without its ending.
        arch: of the device, such as "sm_90".
        defines: preprocessor constants.

    Raises:
        RunError: NVRTC refuses it.
    """
    key = _key(name, arch, defines)
    path = cache_folder() / f"{name}-{arch}-{key[:24]}.cubin"
    try:
        digest, code = path.read_bytes().split(b"\n", 1)
        if digest == hashlib.sha256(code).hexdigest().encode():
            return code
    except (OSError, ValueError):  # absent, or not one of ours
        pass
    code, _ = compile_source(name, arch, **defines)
    _keep(path, hashlib.sha256(code).hexdigest().encode() + b"\n" + code)
    return code


def compile_source(name: str, arch: str, **defines: object) -> tuple[bytes, dict[str, Usage]]:
    """Compile a source now.

    Args:
        name, arch, defines: as for `cubin`.

    Returns:
        The machine code, and what each kernel in it uses.

    Raises:
        RunError: NVRTC refuses it; its log is in the message.
    """
    from cuda.bindings import nvrtc

    def done(result: tuple) -> object:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RunError(f"NVRTC failed on {name}.cu for {arch}: {result[0].name}")
        return result[1] if len(result) > 1 else None

    # As text in front, and not as options: NVRTC's own built-in header uses names like T.
    constants = "".join(f"#define {key} {value}\n" for key, value in defines.items()) + "#line 1\n"
    source = constants.encode() + (SOURCES / f"{name}.cu").read_bytes()
    prelude = (SOURCES / PRELUDE).read_bytes()
    program = done(nvrtc.nvrtcCreateProgram(source, f"{name}.cu".encode(), 1, [prelude], [PRELUDE.encode()]))
    try:
        options = [f"--gpu-architecture={arch}", *FLAGS]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytearray(done(nvrtc.nvrtcGetProgramLogSize(program)))
        done(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.decode(errors="replace").strip("\0\n ")
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RunError(f"{name}.cu does not compile for {arch} ({result.name}): {text}")
        code = bytearray(done(nvrtc.nvrtcGetCUBINSize(program)))
        done(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(code), _usage(text)


def cache_folder() -> Path:
    """Where compiled kernels are kept: `LM_KERNEL_CACHE`, else the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("LM_KERNEL_CACHE") or Path(cache) / "lm" / "kernels")


def _key(name: str, arch: str, defines: dict[str, object]) -> str:
    """A digest of everything that the machine code depends on."""
    from cuda.bindings import nvrtc

    digest = hashlib.sha256(repr((arch, FLAGS, sorted(defines.items()), nvrtc.nvrtcVersion()[1:])).encode())
    for file in (f"{name}.cu", PRELUDE):
        digest.update((SOURCES / file).read_bytes())
    return digest.hexdigest()


def _keep(path: Path, content: bytes) -> None:
    """Write a file of the cache in one step; a cache that cannot be written is done without."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError:
        return


def _usage(log: str) -> dict[str, Usage]:
    """What ptxas says of each kernel in its verbose log."""
    usage = {}
    for part in log.split("Compiling entry function ")[1:]:
        name = re.match(r"'(\w+)'", part)[1]
        spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", part))
        usage[name] = Usage(int(re.search(r"Used (\d+) registers", part)[1]), spilled)
    return usage

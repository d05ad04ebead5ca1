"""`python -m lm` and the console script `lm`."""

import codecs
import io
import json
import os
import sys
from typing import NoReturn

import lm

OTHER = ("lm: another project's package `lm` was installed or removed after this one, in the same folder: "
         "pip uninstall lm; pip install --force-reinstall --no-deps lm-pretrain")  # fmt: skip


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    if sys.platform == "win32":
        sys.exit("lm: it runs on Linux and macOS; on Windows, install it in WSL")
    if not hasattr(lm, "load_run"):
        sys.exit(OTHER)
    if sys.path[0] == os.getcwd():  # of `python -m lm`: a file there, such as random.py, is not to replace Python's own
        sys.path.append(sys.path.pop(0))
    write_any_character()
    expand_segments()
    from lm.cli.command import main as run
    from lm.system.process import code_for_launcher, leave
    from lm.system.stop_signals import STOP

    code = run(sys.argv[1:])
    STOP.ignore_signals()
    leave(code_for_launcher(code))


def expand_segments() -> None:
    """Let torch's CUDA allocator use expandable segments, which reduces fragmentation, unless the user has set it up.

    torch reads the setting when it is imported. In WSL the first allocation would fail (pytorch issue 192330).
    """
    in_wsl = "microsoft" in os.uname().release.lower()
    if not (in_wsl or any(name.endswith("ALLOC_CONF") for name in os.environ)):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def write_any_character() -> None:
    """Write characters that an output of another encoding than UTF-8 does not have as \\u2588, which JSON reads too."""

    def escape(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        return json.dumps(error.object[error.start : error.end])[1:-1], error.end

    codecs.register_error("escape", escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="escape")


if __name__ == "__main__":
    main()

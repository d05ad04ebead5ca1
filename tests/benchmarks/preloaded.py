"""A process that imports what a later command needs, and then waits for that command: `preloaded.py MODULE ...`.

It imports the modules, writes one line of JSON to standard output, and waits for one on standard input: `argv`, what
stands after `python` (`-m MODULE ...` or `FILE ...`), and `log`, the file for its output. On a GPU machine whose
disk is cold an import of PyTorch and Lightning takes longer than many measurements. CUDA is first used by the command.
"""

import json
import os
import runpy
import sys
from importlib import import_module


def load(modules: list[str]) -> str | None:
    """Import the modules; the first error, if there is one."""
    for name in modules:
        try:
            import_module(name)
        except Exception as error:  # a library that is missing, or a file of it
            return f"{type(error).__name__}: {error}"
    return None


def run(argv: list[str]) -> None:
    """Run a module or a script as `python` does."""
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, os.path.dirname(os.path.abspath(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")


def main() -> None:
    set_up_allocator()
    print(json.dumps({"missing": load(sys.argv[1:])}), flush=True)
    line = sys.stdin.readline()
    if not line:  # there is no command left
        return
    command = json.loads(line)
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, target in ((log, 1), (log, 2), (os.open(os.devnull, os.O_RDONLY), 0)):
        os.dup2(stream, target)
    run(command["argv"])


def set_up_allocator() -> None:
    """As `python -m lm` does before it imports PyTorch, which reads the setting at once."""
    import lm.__main__

    lm.__main__.expand_segments()
    del sys.modules["lm.__main__"]  # or runpy warns when it runs it


if __name__ == "__main__":
    main()

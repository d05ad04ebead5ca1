"""`python -m lm` and the console script `lm`."""

import sys

from lm.system.process import code_for_launcher, leave
from lm.system.stop_signals import STOP


def main() -> None:
    """Run the command line and exit with its code."""
    from lm.cli.main import main as run

    code = run(sys.argv[1:])
    STOP.ignore_signals()
    leave(code_for_launcher(code))


if __name__ == "__main__":
    main()

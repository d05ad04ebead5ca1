"""`python -m lm` and the console script `lm`."""

import sys

from lm.system.process import STOP, leave


def main() -> None:
    """Run the command line and exit with its code."""
    from lm.cli.main import main as run

    code = run(sys.argv[1:])
    STOP.over()
    leave(code)


if __name__ == "__main__":
    main()

"""`python -m lm` and the console script `lm`."""

import sys

from lm.leaving import leave


def main() -> None:
    """Run the command line and exit with its code."""
    from lm.cli import main as run

    leave(run(sys.argv[1:]))


if __name__ == "__main__":
    main()

"""Test equipment: `python call_in_rank.py FILE RANK` calls a function that `trainings.in_ranks` wrote down."""

import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    function, arguments = pickle.loads(Path(sys.argv[1]).read_bytes())
    function(int(sys.argv[2]), *arguments)

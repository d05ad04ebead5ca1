#!/usr/bin/env bash
# Train until the run is over: resume from the newest checkpoint whenever it was interrupted (75) or killed.
# As the command of a container, or in a terminal:
#
#     configs/launch/until_done.sh pretrain-350m.yaml --data.path data/mine-32k
#
# SIGTERM and Ctrl-C are passed on to the training, which saves a checkpoint; then this script exits with 75.
set -uo pipefail

stopped=
trap 'stopped=1; kill -TERM "$training" 2>/dev/null' TERM INT

while true; do
    python -m lm fit --config "$1" --ckpt_path auto "${@:2}" &
    training=$!
    wait "$training"
    code=$?
    while kill -0 "$training" 2>/dev/null; do # a signal ended `wait`, and the training still saves its checkpoint
        wait "$training"
        code=$?
    done
    if [ -n "$stopped" ] || { [ "$code" -ne 75 ] && [ "$code" -lt 128 ]; }; then exit "$code"; fi
    echo "exit code $code: training resumes in ${LM_PAUSE:=10} s" >&2
    sleep "$LM_PAUSE"
done

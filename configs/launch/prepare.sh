#!/usr/bin/env bash
# Make shards of a large text on many machines of a SLURM cluster. Start it in a folder that all machines see, with the
# number of tasks and the options of `lm data prepare`:
#
#     configs/launch/prepare.sh 32 --input texts/ --output data/large --tokenizer bpe
#
# Each task does its part of what is left, so a task that failed, or was preempted, can be repeated; a last job writes
# the manifest. On other clusters run the same five commands: the tasks of a stage in any order, one stage after another.
set -euo pipefail

tasks=$1
shift
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
job() { sbatch --parsable --job-name=lm-prepare --cpus-per-task=16 --requeue --open-mode=append "$@"; }
command=(python -m lm data prepare "$@")
each=$(printf '%q ' "${command[@]}")"--task \$SLURM_ARRAY_TASK_ID/$tasks"

"${command[@]}" --plan_only # the list of the work, and the tokenizer
encoded=$(job --array="0-$((tasks - 1))" --wrap "$each")
written=$(job --array="0-$((tasks - 1))" --dependency="afterok:$encoded" --wrap "$each")
job --dependency="afterok:$written" --wrap "$(printf '%q ' "${command[@]}")"

#!/usr/bin/env bash
# Train on two machines of a SLURM cluster, in as many jobs as needed. Submit it from a folder that all machines see:
#
#     sbatch configs/launch/slurm.sh pretrain-350m.yaml --data.path data/mine-32k --data.micro_batch_size 32
#
# Five minutes before the time limit the run saves a checkpoint and the job is requeued, as after a preemption or a node
# failure; it resumes from the checkpoint. A run that finished, failed or was stopped by a guard is not requeued. The
# run is named after the config, so give each run a config of its own.
#SBATCH --job-name=lm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail

config=$1
shift
run=$(basename "$config" .yaml)
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # without it torchrun's restarts fail (pytorch#135712)
# Seconds for the checkpoint after SIGTERM, from torch 2.13 on; 30 before. A process that waits in NCCL never handles
# SIGTERM: torchrun kills it after this time, so leave at least this much time between the signal and the job's end.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
# If machines have several networks, name the interface between them: ranks communicate over gloo and over NCCL.
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0

# One task per node: torchrun, which starts a process for each GPU, and restarts all of them when one dies. Without
# torchrun there are no restarts, and each GPU is a task: use `srun --ntasks-per-node=8 --kill-on-bad-exit=1` instead.
# Without the last option, when one task fails, the others wait for it until trainer.rank_timeout.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "${SLURM_GPUS_PER_NODE##*:}" --max_restarts 3 \
    --rdzv_backend c10d --rdzv_endpoint "$first:29500" --rdzv_id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    -m lm fit --config "$config" --ckpt_path auto "$@"
code=$?

# torchrun's exit code is only 0 or 1; the run's folder says how the run ended.
status=$(python -c 'import sys, lm; print(lm.load_run(sys.argv[1]).status())' "$run")
echo "run $run: $status"
if [ "$status" = interrupted ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 75
fi
exit "$code"

#!/usr/bin/env bash
#SBATCH --job-name=intraskill
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=48:00:00
#SBATCH --signal=B:TERM@120
# Trains on Slurm nodes with GPUs; SGLang runs on nodes of its own, or on the trainer's.
#
#   sbatch launch/pods/slurm_gpus.sh                      the first node serves (eight servers), the others train
#   SHARED=1 sbatch --nodes=1 launch/pods/slurm_gpus.sh   every node does both; servers lend their memory while the trainer updates
#   launch/pods/slurm_gpus.sh --dry_run                   prints the commands and runs none; with SHARED=1 too
#
# NOT RUN BY US: no GPU nodes were at hand. One training process a node with all of its GPUs; JAX takes the rest from Slurm's own variables.
# All paths lie on a file system that every node sees. A job that is killed, or whose time is up, goes on when it is submitted again.
#
# Memory where devices are shared (80 GB GPUs; the trainer's 16.8 GiB are calculated, docs/plan.md): while SGLang generates, parameters and moments of the
# trainer stay on the GPUs (6 GiB each at fsdp=8), so the servers may take 0.8 of the memory. They give it up before an update. That works only
# if JAX gives its memory back after one: hence the platform allocator, which is slower.
set -euo pipefail

DIRECTORY=${DIRECTORY:-$PWD}
CHECKPOINT=${CHECKPOINT:-$DIRECTORY/checkpoints/Qwen3.5-4B}
PYTHON=${PYTHON:-$DIRECTORY/.venv/bin/python}
SGLANG_PYTHON=${SGLANG_PYTHON:-$DIRECTORY/.venv-sglang/bin/python}
SHARED=${SHARED:-0}
GPUS=8
PORT=30000

dry_run=false
if [[ ${1:-} == --dry_run ]]; then
  dry_run=true
  nodes=(node001 node002)
  [[ $SHARED == 1 ]] && nodes=(node001)
else
  mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?submit this script with sbatch, or pass --dry_run}")
fi

run() {
  if $dry_run; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

if [[ $SHARED == 1 ]]; then
  servers=("${nodes[@]}") trainers=("${nodes[@]}")
  server_flags=(--enable-memory-saver --mem-fraction-static 0.8)
  export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform
else
  servers=("${nodes[0]}") trainers=("${nodes[@]:1}")
  server_flags=(--mem-fraction-static 0.9)
fi
[[ ${#trainers[@]} -gt 0 ]] || { echo "error: one node serves, so --nodes must be 2 or more; or set SHARED=1" >&2; exit 2; }

addresses=""
for node in "${servers[@]}"; do
  for ((gpu = 0; gpu < GPUS; gpu++)); do
    addresses+="'http://$node:$((PORT + gpu))',"
    # The variable of the GPU is set inside the step, which sees all of the node's.
    PYTHONPATH=$DIRECTORY run srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --gpus-per-node=$GPUS env CUDA_VISIBLE_DEVICES=$gpu \
      "$SGLANG_PYTHON" -m sglang.launch_server --model-path "$CHECKPOINT" --host 0.0.0.0 --port $((PORT + gpu)) \
      --custom-weight-loader intraskill.rollout.sglang_loader.load --enable-fp32-lm-head "${server_flags[@]}" &
    $dry_run && wait
  done
done
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

more=()
[[ $SHARED == 1 ]] && more+=(--config.engine.shares_memory=True)
[[ -f $DIRECTORY/runs/coevolve/config.json ]] && more+=(--resume)
devices=$((GPUS * ${#trainers[@]}))
cd "$DIRECTORY"
JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((GPUS - 1)))
export JAX_LOCAL_DEVICE_IDS
run srun --overlap --nodes=${#trainers[@]} --ntasks=${#trainers[@]} --ntasks-per-node=1 --gpus-per-node=$GPUS \
  --nodelist="$(IFS=,; echo "${trainers[*]}")" --kill-on-bad-exit=1 \
  "$PYTHON" launch/train.py --config=configs/coevolve.py --config.model.checkpoint="$CHECKPOINT" \
  --config.engine.addresses="($addresses)" --config.mesh.fsdp=$devices --config.grpo.rows_per_microbatch=$devices "${more[@]}"

#!/usr/bin/env bash
# Trains on a Cloud TPU slice of several hosts, with SGLang servers that run elsewhere (on GPUs of their own).
#
#   launch/pods/tpu_vm.sh --dry_run      prints every command and runs none
#   launch/pods/tpu_vm.sh create | install | train | resume | delete
#
# NOT RUN BY US: no slice was at hand. The commands' flags are checked by launch/pods/check.py as far as they are this project's.
# The slice is the one that docs/plan.md plans for: eight v5p chips are two hosts (the type counts cores, two a chip). JAX finds coordinator, number of
# processes and process id by itself, so every host gets the same command.
#
# Set before use, in the environment:
#   ENGINES     addresses of the SGLang servers: ('http://10.0.0.5:30000','http://10.0.0.6:30000')
#   SHARE       an NFS export that all TPU hosts and the servers mount at /mnt/intraskill: run directory, checkpoint and this repository lie there
#   PROJECT, ZONE
set -euo pipefail

NAME=${NAME:-intraskill}
ACCELERATOR=${ACCELERATOR:-v5p-16}
RUNTIME=${RUNTIME:-v2-alpha-tpuv5}
DIRECTORY=/mnt/intraskill

dry_run=false
if [[ ${1:-} == --dry_run ]]; then
  dry_run=true
  shift
  PROJECT=${PROJECT:-PROJECT} ZONE=${ZONE:-ZONE} SHARE=${SHARE:-SERVER:/EXPORT} ENGINES=${ENGINES:-"('http://HOST:30000',)"}
fi
: "${PROJECT:?set PROJECT}" "${ZONE:?set ZONE}" "${SHARE:?set SHARE}" "${ENGINES:?set ENGINES}"

run() {
  if $dry_run; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

everywhere() {
  run gcloud compute tpus tpu-vm ssh "$NAME" --project="$PROJECT" --zone="$ZONE" --worker=all --command="$1"
}

train() {
  everywhere "cd $DIRECTORY/repository && ~/venv/bin/python launch/train.py --config=configs/coevolve.py\
 --config.model.checkpoint=$DIRECTORY/Qwen3.5-4B --config.runs_directory=$DIRECTORY/runs --config.engine.addresses=\"$ENGINES\"\
 --config.mesh.fsdp=8 --config.grpo.rows_per_microbatch=8 $*"
}

step() {
  case $1 in
    create)
      run gcloud compute tpus queued-resources create "$NAME" --node-id="$NAME" --project="$PROJECT" --zone="$ZONE" \
        --accelerator-type="$ACCELERATOR" --runtime-version="$RUNTIME"
      run gcloud compute tpus queued-resources describe "$NAME" --project="$PROJECT" --zone="$ZONE" --format="value(state.state)"
      ;;
    install)
      everywhere "sudo mkdir -p $DIRECTORY && (mountpoint -q $DIRECTORY || sudo mount -t nfs $SHARE $DIRECTORY)"
      everywhere "python3.11 -m venv ~/venv && ~/venv/bin/python -m pip install --quiet -e '$DIRECTORY/repository[tpu]'"
      ;;
    train) train ;;
    resume) train --resume ;;
    delete) run gcloud compute tpus queued-resources delete "$NAME" --project="$PROJECT" --zone="$ZONE" --force ;;
    *)
      echo "error: $1 is no step: create, install, train, resume or delete" >&2
      exit 2
      ;;
  esac
}

if $dry_run && [[ $# -eq 0 ]]; then
  set -- create install train resume delete
fi
[[ $# -gt 0 ]] || { echo "error: name a step: create, install, train, resume or delete; or pass --dry_run" >&2; exit 2; }
for name in "$@"; do step "$name"; done

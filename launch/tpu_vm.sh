#!/usr/bin/env bash
# One run on every host of a Cloud TPU slice (one host or a pod).
#
#   NAME=my-tpu ZONE=us-central2-b launch/tpu_vm.sh setup
#   NAME=my-tpu ZONE=us-central2-b launch/tpu_vm.sh run \
#     python experiments/math_len.py \
#     --config=experiments/configs/math_len.py:r1_7b --config.mesh_fsdp=64 \
#     --run_dir=/mnt/shared/runs/r1
#   NAME=my-tpu ZONE=us-central2-b launch/tpu_vm.sh stop
#
# The run directory must be on a file system that all hosts share (NFS, a mounted
# bucket). setup copies this checkout to every host and installs it; run starts the same
# command everywhere; stop sends SIGTERM, after which the run saves and ends.
# The hosts find each other through the TPU's own metadata
# (GDPO_COORDINATOR=auto). Preempted or stopped, the same command continues.
set -euo pipefail

usage() {
  echo "usage: NAME=TPU ZONE=ZONE $0 setup | run COMMAND... | stop" >&2
  exit 2
}

[[ -n ${NAME:-} && -n ${ZONE:-} && $# -ge 1 ]] || usage
action=$1
shift
where=(--zone="$ZONE")
[[ -z ${PROJECT:-} ]] || where+=(--project="$PROJECT")

everywhere() {
  gcloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" --worker=all \
    --command="$1"
}

case $action in
  setup)
    root=$(cd "$(dirname "$0")/.." && pwd)
    archive=$(mktemp --suffix=.tar.gz)
    trap 'rm -f "$archive"' EXIT
    git -C "$root" archive --format=tar.gz --output="$archive" HEAD
    gcloud compute tpus tpu-vm scp "$archive" "$NAME:gdpo_jax.tar.gz" \
      "${where[@]}" --worker=all
    everywhere 'set -e
      mkdir -p gdpo_jax
      tar -xzf gdpo_jax.tar.gz -C gdpo_jax
      python3 -m venv .venv
      .venv/bin/pip install --quiet -e "./gdpo_jax[tpu]"'
    ;;
  run)
    [[ $# -ge 1 ]] || usage
    # Quoted here once, so that the hosts' shells see the same words.
    command=$(printf '%q ' "$@")
    everywhere "cd gdpo_jax && export PATH=\"\$HOME/.venv/bin:\$PATH\" \
      GDPO_COORDINATOR=auto && exec $command"
    ;;
  stop)
    # [p]: so that the pattern does not find the shell that looks for it
    everywhere "pkill -TERM -f '[p]ython experiments/' || true"
    ;;
  *) usage ;;
esac

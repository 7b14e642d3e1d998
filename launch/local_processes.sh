#!/usr/bin/env bash
# Several processes of one run on this machine.
#
#   launch/local_processes.sh 2 python experiments/math_len.py \
#     --config=experiments/configs/math_len.py:tiny --run_dir=runs/two
#
# DEVICES=k gives every process k CPU devices (default: what JAX finds).
# PORT is the coordinator's (default: a free one). When one process ends with
# an error, the others get GRACE seconds (default 90) to notice, then are
# stopped; the exit status is that of the first one that failed.
set -euo pipefail

if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: $0 NUM_PROCESSES COMMAND..." >&2
  exit 2
fi
n=$1
shift

free_port() {
  python3 -c 'import socket
with socket.socket() as s:
  s.bind(("localhost", 0))
  print(s.getsockname()[1])'
}

port=${PORT:-$(free_port)}
export GDPO_COORDINATOR="localhost:$port"
export GDPO_NUM_PROCESSES=$n
if [[ -n ${DEVICES:-} ]]; then
  export JAX_PLATFORMS=cpu
  export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$DEVICES"
fi

pids=()
stop() {
  local pid
  for pid in "${pids[@]}"; do
    kill "-$1" "$pid" 2>/dev/null || true
  done
}
# Asked to end, the processes finish their step, save, and leave.
trap 'stop TERM' TERM INT

for ((i = 0; i < n; i++)); do
  GDPO_PROCESS_ID=$i "$@" &
  pids+=("$!")
done

status=0
left=$n
while ((left > 0)); do
  code=0
  wait -n -p ended "${pids[@]}" || code=$?
  # A trapped signal ends the wait before any process has ended.
  [[ -n ${ended:-} ]] || continue
  remaining=()
  for pid in "${pids[@]}"; do
    [[ $pid == "$ended" ]] || remaining+=("$pid")
  done
  pids=("${remaining[@]}")
  left=$((left - 1))
  if ((code != 0 && status == 0)); then
    status=$code
    echo "$0: process $ended ended with status $code" >&2
    if ((left > 0)); then
      echo "$0: waiting ${GRACE:-90} s for the other $left to notice" >&2
      (
        sleep "${GRACE:-90}"
        stop KILL
      ) > /dev/null 2>&1 & # else a reader of our output waits for the sleep
      watcher=$!
    fi
  fi
  ended=
done
[[ -z ${watcher:-} ]] || kill "$watcher" 2> /dev/null || true
exit "$status"

#!/usr/bin/env bash
# A node that `accelerate launch` starts, on Redis. On each node:  ./accelerate.sh my-job-1   (next time: my-job-2)
# Options of Accelerate may follow:  ./accelerate.sh my-job-1 --mixed_precision=bf16
#
# `accelerate launch` hands the job to torchrun, but can pass on neither a run id nor a range of nodes: torchrun reads them
# from PET_… variables. Three options make that work:
#   --multi_gpu            goes through torchrun, on CPUs too, where Accelerate's own MULTI_CPU does not
#   --num_machines=1       leaves the number of nodes to PET_NNODES; --num_processes is then that of each node, at least 2
#   --main_process_port=0  keeps Accelerate from falling back to a job on this node alone when port 29500 is taken
set -euo pipefail
command -v accelerate >/dev/null || { echo "activate the virtual environment that accelerate is in" >&2; exit 1; }
(($#)) || { echo "usage: $0 RUN [OPTION…], with a RUN such as my-job-1" >&2; exit 2; }
script=(train_accelerate.py /shared/my-job) # yours, and its arguments

export PET_RDZV_ID=$1 PET_NNODES=${NNODES:-1:4} PET_RDZV_ENDPOINT=${REDIS_ADDRESS:-redis.example:6379}
exec accelerate launch --rdzv_backend=redis --multi_gpu --num_machines=1 --num_processes="${GPUS:-8}" --main_process_port=0 \
  --mixed_precision=no --dynamo_backend=no "${@:2}" "${script[@]}"

#!/usr/bin/env bash
# One job on hosts that you reach by SSH. On the first of them, best in tmux:  ./ssh.sh host1 host2 host3
# All have this folder and its virtual environment at the same place, and share the folder of the checkpoints. The first
# host logs in to each of them, itself included, without a prompt; when it is lost, so is the job.
set -euo pipefail
(($#)) || { echo "usage: $0 host1 host2 …, or, for a host that was lost: RUN=train-… $0 host2" >&2; exit 2; }
command -v redelastic >/dev/null || { echo "activate the virtual environment that redelastic is in" >&2; exit 1; }
run=${RUN:-train-$(date +%s)} # a run that has finished stays closed: each start is a run of its own, with a folder
script=(-m redelastic.cli.demo.train --checkpoint "$PWD/digits.pt" --pace "${PACE:-0}") # yours, and its arguments
nproc=1 # workers of each host: the number of its GPUs
port=${REDIS_PORT:-6379}

if [[ -n ${RUN:-} ]]; then
  # shellcheck source=/dev/null
  . "$run/redis.env"
else
  hosts=$#
  mkdir "$run"
  if [[ -z ${REDELASTIC_REDIS_URL:-} ]]; then # then the job has a Redis of its own on this host
    # It is told the password by its stdin, as the hosts are: it is on no command line. Ctrl-C must not reach it.
    password=$(python3 -c 'import secrets; print(secrets.token_hex())')
    setsid "$(python3 -c 'import redelastic.redis.server as s; print(s.find_binary())')" - >"$run/redis.log" <<<"
      port $port
      requirepass $password
      save ''
      maxmemory-policy noeviction" &
    redis=$!
    export REDELASTIC_REDIS_URL=redis://:$password@${1#*@}:$port
    if ! said=$(redelastic list 2>&1); then
      kill "$redis" 2>/dev/null || said="Redis did not start (REDIS_PORT names another port): $(tail -n 3 "$run/redis.log")"
      echo "$said" >&2
      exit 1
    fi
  fi
  trap 'redelastic events -n 10000 "$run" >"$run/events" || true # what happened stays in the folder
    rm -f "$run/redis.env"
    [[ -z ${redis:-} ]] || kill "$redis"' EXIT
  (umask 077 && echo "hosts=$hosts; export REDELASTIC_REDIS_URL=${REDELASTIC_REDIS_URL@Q}" >"$run/redis.env")
  echo "look at it from another terminal here: . $run/redis.env; redelastic status $run"
  echo "restart a host that was lost: RUN=$run $0 HOST"
fi

for host in "$@"; do
  name=${host#*@}
  node=("$(command -v redelastic)" run --rdzv-id="$run" --nnodes="1:$hosts" --nproc-per-node="$nproc" --max-job-restarts=10
    --node-name="$name" --local-addr="$name" --log-dir="$PWD/$run" --tee=3 "${script[@]}")
  ssh -o ServerAliveInterval=10 "$host" "cd ${PWD@Q} && read -r REDELASTIC_REDIS_URL && export REDELASTIC_REDIS_URL &&
    exec ${node[*]@Q}" <<<"$REDELASTIC_REDIS_URL" &
  nodes+=($!)
done
trap 'redelastic close "$run" --stop; wait "${nodes[@]}"' INT TERM # Ctrl-C stops all hosts

code=0 done=
for node in "${nodes[@]}"; do
  wait "$node" && done=yes || code=$? # one that ends with 0 has seen the training end, whoever was lost on the way
done
[[ $done ]] || exit $code

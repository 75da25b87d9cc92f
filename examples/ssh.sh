#!/usr/bin/env bash
# One job on hosts that you reach by SSH. On the first of them, best in tmux:  ./ssh.sh host1 host2 host3
# All have this folder and its virtual environment at the same place, and share the folder of the checkpoints. The first
# host logs in to each of them, itself too, without being asked for anything.
set -euo pipefail
command -v redelastic >/dev/null || { echo "activate the virtual environment that redelastic is in" >&2; exit 1; }
run=train-$(date +%s) # a run that has finished stays closed: each start is a run of its own
script=(-m redelastic.cli.demo.train --checkpoint "$PWD/digits.pt") # yours, and its arguments
nproc=1 # workers of each host: the number of its GPUs
port=${REDIS_PORT:-6379}

# Redis is told the password by its stdin, the hosts by theirs: it is on no command line. Ctrl-C must not reach Redis.
if [[ -z ${REDELASTIC_REDIS_URL:-} ]]; then # then the job has a Redis of its own on this host
  password=$(python3 -c 'import secrets; print(secrets.token_hex())')
  setsid "$(python3 -c 'import redelastic.server as s; print(s.find_binary())')" - >redis.log <<<"
    port $port
    requirepass $password
    save ''
    maxmemory-policy noeviction" &
  redis=$!
  trap 'kill "$redis"; rm -f redis.env' EXIT
  export REDELASTIC_REDIS_URL=redis://:$password@${1#*@}:$port
  (umask 077 && echo "export REDELASTIC_REDIS_URL=$REDELASTIC_REDIS_URL" >redis.env)
  echo "look at it from another terminal here: . ./redis.env; redelastic status $run"
fi

for host in "$@"; do
  name=${host#*@}
  node=("$(command -v redelastic)" run --rdzv-id="$run" --nnodes="1:$#" --nproc-per-node="$nproc" --max-job-restarts=10
    --node-name="$name" --local-addr="$name" "${script[@]}")
  ssh -o ServerAliveInterval=10 "$host" "cd ${PWD@Q} && read -r REDELASTIC_REDIS_URL && export REDELASTIC_REDIS_URL &&
    exec ${node[*]@Q}" <<<"$REDELASTIC_REDIS_URL" &
  nodes+=($!)
done
trap 'redelastic close "$run" --stop; wait "${nodes[@]}"' INT TERM # Ctrl-C stops all hosts

code=1
for node in "${nodes[@]}"; do
  wait "$node" && code=0 # one that ends with 0 has seen the training end, whoever was lost on the way
done
exit $code

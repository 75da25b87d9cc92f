#!/usr/bin/env bash
# A node of a job on a managed Redis, over TLS. On each node:  ./managed_redis.sh my-job-1   (next time: my-job-2)
#
# Once, in the service: maxmemory-policy noeviction, and a user `my-job` with a password and this access string, by
# which it reaches the runs my-job* and nothing else:
#
#   on ~redelastic:{my-job*}:* +ping +time +type +del +exists +get +mget +set +pexpire +pttl +eval +evalsha +hget +hmget
#   +hgetall +hset +hsetnx +hdel +hexists +hincrby +hkeys +hlen +sadd +srem +scard +sismember +smembers +zadd +zrem
#   +zremrangebyrank +zcard +zcount +zrange +zrangebyscore +zscore +xadd +xread +xrevrange +rpush +lpop +llen
set -euo pipefail
command -v redelastic >/dev/null || { echo "activate the virtual environment that redelastic is in" >&2; exit 1; }
(($#)) || { echo "usage: $0 RUN, such as my-job-1" >&2; exit 2; }
[[ -r ~/.redis-password ]] || { echo "put the password of the user my-job into ~/.redis-password (chmod 600)" >&2; exit 2; }
run=$1
address=${REDIS_ADDRESS:-redis.example:6379}
ca=${REDIS_CA:-} # a file, where the service's certificate is not signed by a CA that the system knows
script=(-m redelastic.cli.demo.train --checkpoint "$PWD/digits.pt") # yours, and its arguments

# The password is in a file that only you can read, and on no command line; %-encoded, it may contain any character.
password=$(python3 -c 'import sys, urllib.parse as u; print(u.quote(sys.stdin.readline().strip(), ""))' <~/.redis-password)
export REDELASTIC_REDIS_URL=rediss://my-job:$password@$address

redelastic doctor --run "$run" ${ca:+--ca-cert "$ca"} # says what to change; a problem ends this script
exec redelastic run --rdzv-id="$run" ${ca:+--rdzv-conf="ca_cert=$ca"} --nnodes=1:2 --nproc-per-node=1 "${script[@]}"

#!/usr/bin/env bash
# A node on a spot VM: it drains when the cloud says that the VM will be taken. In front of the node's own command:
#   ./spot.sh aws redelastic run --drain-timeout=90 …
#   ./spot.sh gcp redelastic run --drain-timeout=15 …     (half a minute's notice, not two; the same for azure)
set -euo pipefail
metadata=${METADATA:-http://169.254.169.254}
get() { curl --silent --fail --noproxy '*' --max-time 5 "$@"; }

case ${1:-} in
  aws) noticed() {
    token=$(get -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$metadata/latest/api/token") &&
      get -H "X-aws-ec2-metadata-token: $token" "$metadata/latest/meta-data/spot/instance-action"
  } ;;
  gcp) noticed() { get -H 'Metadata-Flavor: Google' "$metadata/computeMetadata/v1/instance/preempted" | grep TRUE; } ;;
  azure) noticed() { get -H 'Metadata: true' "$metadata/metadata/scheduledevents?api-version=2020-07-01" | grep Preempt; } ;;
  *) echo "usage: $0 aws|gcp|azure COMMAND…" >&2 && exit 2 ;;
esac
shift

while kill -0 $$ 2>/dev/null; do # the pid of this script, and from `exec` on the agent's
  if noticed >/dev/null; then
    kill -USR1 $$
    break
  fi
  sleep 2
done &
exec "$@"

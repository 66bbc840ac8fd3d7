#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Slurm's Epilog on each compute node: end the agent that the prolog has started, and leave nothing of the job behind.
#
# Runs as root, at most 10 s, and ends with 0 whatever happens: see prolog.sh.
set -u
PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none

say() { logger -s -t megascale-ops "job ${SLURM_JOB_ID:-?}: $*" || echo "megascale-ops: $*" >&2; }

settings=${MEGASCALE_OPS_SETTINGS:-/etc/megascale-ops/agent.env}
if [ -r "$settings" ]; then
  # shellcheck source=/dev/null
  . "$settings"
fi
root=${MEGASCALE_OPS_RUN:-/run/megascale-ops}
folder=$root/${SLURM_JOB_ID:-none}
[ -d "$folder" ] || exit 0

# Whether the process is the one that the prolog has started, not another one that got its pid since.
lives() {
  local now
  now=$(cut -d ' ' -f 3,22 "/proc/$pid/stat" 2>/dev/null) # state and start time
  [ -n "$start" ] && [ "${now#* }" = "$start" ] && [ "${now%% *}" != Z ]
}

pid='' start=''
read -r pid start 2>/dev/null <"$folder/agent.pid" || true
if lives; then
  kill -TERM "$pid" 2>/dev/null
  # 5 s: it says goodbye to the controller first, which takes it at most two.
  for _ in $(seq 50); do
    lives || break
    sleep 0.1
  done
  if lives; then
    say "the agent (process $pid) did not end within 5 s and is killed"
    kill -KILL "$pid" 2>/dev/null
  fi
elif [ -n "$pid" ]; then
  say "the agent had ended before the job: $(tail -n 1 "$folder/agent.log" 2>/dev/null)"
fi
uid=$(stat -c %u "$folder")
rm -rf -- "$folder"

# Black boxes take shared memory, which is the next job's. Another job of this user on this node still needs the folder.
for other in "$root"/*/; do
  [ -d "$other" ] && [ "$(stat -c %u "$other")" = "$uid" ] && exit 0
done
rm -rf -- "${MEGASCALE_OPS_BOXES:-/dev/shm/megascale-ops}-$uid"
exit 0

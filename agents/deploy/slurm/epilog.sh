#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Slurm's Epilog on each compute node: end the agent that the prolog has started, and leave nothing of the job behind.
#
# Runs as root, at most 10 s, and ends with 0 whatever happens: see prolog.sh. What it believes is in a folder that is
# root's alone, and what it does to things of the user (signals, black boxes) it does with the user's rights: so it can
# reach nothing that the user could not, whatever has changed between a look and a deed.
set -u
PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none

say() { logger -s -t megascale-ops "job ${SLURM_JOB_ID:-?}: $*" || echo "megascale-ops: $*" >&2; }

settings=${MEGASCALE_OPS_SETTINGS:-/etc/megascale-ops/agent.env}
if [ -r "$settings" ]; then
  # shellcheck source=/dev/null
  . "$settings"
fi
root=${MEGASCALE_OPS_RUN:-/run/megascale-ops}
[[ ${SLURM_JOB_ID:-} =~ ^[0-9]+$ ]] || exit 0
folder=$root/$SLURM_JOB_ID
[ -d "$folder" ] || exit 0

# Whether a folder is ours alone to write into: no link, no other owner.
is_ours() { [ ! -L "$1" ] && [ "$(stat -c %u "$1")" = "$(id -u)" ]; }

if ! is_ours "$root" || ! is_ours "$folder"; then
  say "$folder is not root's alone and is left as it is: the prolog of another version has made it, or a user"
  exit 0
fi
uid=$(cat "$folder/uid" 2>/dev/null)
if ! [[ $uid =~ ^[0-9]+$ ]]; then # the prolog came no further
  rm -rf -- "$folder"
  exit 0
fi

as_user=()
if [ "$(id -u)" != "$uid" ]; then
  as_user=(setpriv "--reuid=$uid" "--regid=$(id -g "$uid" 2>/dev/null || echo "$uid")" --clear-groups)
  as_user+=(--inh-caps=-all --bounding-set=-all --no-new-privs)
fi

# Whether the process is the one that the prolog has started, not another one that got its pid since: by start time and
# owner. In its line of /proc what stands before the last bracket is what the process calls itself.
lives() {
  local fields owner
  read -ra fields <<<"$(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null)"
  [ -n "$start" ] && [ "${fields[19]:-}" = "$start" ] && [ "${fields[0]}" != Z ] || return 1
  owner=$(sed -n 's/^Uid:\t\([0-9]*\).*/\1/p' "/proc/$pid/status" 2>/dev/null)
  [ "$owner" = "$uid" ]
}

pid='' start=''
read -r pid start 2>/dev/null <"$folder/agent.pid" || true
if [[ $pid =~ ^[0-9]+$ ]] && lives; then
  "${as_user[@]}" /bin/kill -TERM "$pid" 2>/dev/null
  # 5 s: it says goodbye to the controller first, which takes it at most two.
  for _ in $(seq 50); do
    lives || break
    sleep 0.1
  done
  if lives; then
    say "the agent (process $pid) did not end within 5 s and is killed"
    "${as_user[@]}" /bin/kill -KILL "$pid" 2>/dev/null
  fi
elif [ -n "$pid" ]; then
  # 300 signs that can be printed: the line is of a process of the user, and goes to the node's log.
  last=$(tail -c 4096 "$folder/agent.log" 2>/dev/null | tail -n 1 | tr -cd '[:print:]' | cut -c -300)
  say "the agent had ended before the job: $last"
fi
rm -rf -- "$folder"

# Black boxes take shared memory, which is the next job's. Another job of this user on this node still needs the folder.
for other in "$root"/*/; do
  [ "$(cat "$other/uid" 2>/dev/null)" = "$uid" ] && exit 0
done
# Those with something behind the number are where the first name was somebody else's: roots.py of the black boxes.
boxes=${MEGASCALE_OPS_BOXES:-/dev/shm/megascale-ops}-$uid
"${as_user[@]}" rm -rf -- "$boxes" "$boxes"-* 2>/dev/null
exit 0

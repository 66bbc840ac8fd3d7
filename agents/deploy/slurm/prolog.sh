#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Slurm's Prolog on each compute node: start an agent for the job, as the job's user.
#
# slurm.conf:  Prolog=/etc/megascale-ops/prolog.sh  Epilog=/etc/megascale-ops/epilog.sh
#              TaskProlog=/etc/megascale-ops/task_prolog.sh  PrologFlags=Alloc
#
# Runs as root. Ends with 0 whatever happens: Slurm drains a node whose prolog fails, and watching must not cost nodes.
# What went wrong is in the node's log (journalctl -t megascale-ops).
#
# The job's user runs on this node already when this script does (another job, a login), so it writes only into folders
# that are root's alone. The user gets one file there, the token, and the agent two open handles of the log.
set -u
PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none

say() { logger -s -t megascale-ops "job ${SLURM_JOB_ID:-?}: $*" || echo "megascale-ops: $*" >&2; }

settings=${MEGASCALE_OPS_SETTINGS:-/etc/megascale-ops/agent.env}
if ! [[ ${SLURM_JOB_ID:-} =~ ^[0-9]+$ && ${SLURM_JOB_UID:-} =~ ^[0-9]+$ ]]; then
  say "not started by Slurm: SLURM_JOB_ID or SLURM_JOB_UID is missing"
  exit 0
fi
if ! [ -r "$settings" ]; then
  say "no agent: $settings can't be read"
  exit 0
fi
set -a
# shellcheck source=/dev/null
. "$settings"
set +a

program=${MEGASCALE_OPS_PROGRAM:-/opt/megascale-ops/bin/megascale-ops}
root=${MEGASCALE_OPS_RUN:-/run/megascale-ops}
folder=$root/$SLURM_JOB_ID
uid=$SLURM_JOB_UID
gid=$(id -g "$uid" 2>/dev/null) || gid=${SLURM_JOB_GID:-$uid}

# Whether a folder is ours alone to write into: no link, no other owner.
is_ours() { [ -d "$1" ] && [ ! -L "$1" ] && [ "$(stat -c %u "$1")" = "$(id -u)" ]; }

umask 077
for one in "$root" "$folder"; do
  if ! mkdir -p "$one" || ! is_ours "$one" || ! chmod 711 "$one"; then
    say "no agent: $one can't be made, or belongs to somebody else"
    exit 0
  fi
done
# Whose job it is: the epilog acts with this user's rights, and counts the user's jobs by it.
echo "$uid" >"$folder/uid"

# The token as a file of the job's user: `megascale-ops run` in the job and the agent both refuse one of others. Where
# there is a folder of tokens by job, the job's own is handed over and never the cluster's.
token=${MEGASCALE_TOKEN_FILE:-}
if [ -n "${MEGASCALE_OPS_JOB_TOKENS:-}" ]; then
  token=$MEGASCALE_OPS_JOB_TOKENS/$SLURM_JOB_ID
fi
unset MEGASCALE_TOKEN_FILE
if [ -n "$token" ]; then
  if ! install -m 600 -o "$uid" -g "$gid" "$token" "$folder/token"; then
    say "no agent: the token $token can't be read"
    exit 0
  fi
  export MEGASCALE_TOKEN_FILE=$folder/token
fi
# By itself each user has black boxes in a folder of the user's own; an administrator may want them elsewhere.
if [ -n "${MEGASCALE_OPS_BOXES:-}" ]; then
  export MEGASCALE_BOX_ROOT=$MEGASCALE_OPS_BOXES-$uid
fi

as_user=()
if [ "$(id -u)" != "$uid" ]; then
  groups=--clear-groups
  id -un "$uid" >/dev/null 2>&1 && groups=--init-groups
  as_user=(setpriv "--reuid=$uid" "--regid=$gid" "$groups" --inh-caps=-all --bounding-set=-all --no-new-privs)
fi
cd / || exit 0
# 256 MiB for a file: the largest piece of evidence has a few; the log, which the user's process holds open, is in /run.
ulimit -f 262144
# In a session of its own and away from our pipes: slurmd waits until nobody holds them. The log is root's.
setsid "${as_user[@]}" "$program" agent </dev/null >>"$folder/agent.log" 2>&1 &
pid=$!
# Until it has dropped root's rights, 2 s at most (it takes 5 ms): the epilog ends only a process of the user.
for _ in $(seq 100); do
  [ "${#as_user[@]}" = 0 ] && break
  owner=$(sed -n 's/^Uid:\t\([0-9]*\).*/\1/p' "/proc/$pid/status" 2>/dev/null)
  [ "${owner:-$uid}" = "$uid" ] && break
  sleep 0.02
done
# Its start time too: by the epilog, days later, the pid may be another process's. What follows the last bracket of
# this file can't be forged; what is before it is the process's own name for itself.
read -ra fields <<<"$(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null)"
# Whether it stays is not waited for: jobs start meanwhile. One that ended is told of by the epilog.
echo "$pid ${fields[19]:-}" >"$folder/agent.pid"
exit 0

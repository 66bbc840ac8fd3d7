#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Slurm's Prolog on each compute node: start an agent for the job, as the job's user.
#
# slurm.conf:  Prolog=/etc/megascale-ops/prolog.sh  Epilog=/etc/megascale-ops/epilog.sh
#              TaskProlog=/etc/megascale-ops/task_prolog.sh  PrologFlags=Alloc
#
# Runs as root. Ends with 0 whatever happens: Slurm drains a node whose prolog fails, and watching must not cost nodes.
# What went wrong is in the node's log (journalctl -t megascale-ops).
set -u
PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none

say() { logger -s -t megascale-ops "job ${SLURM_JOB_ID:-?}: $*" || echo "megascale-ops: $*" >&2; }

settings=${MEGASCALE_OPS_SETTINGS:-/etc/megascale-ops/agent.env}
if [ -z "${SLURM_JOB_ID:-}" ] || [ -z "${SLURM_JOB_UID:-}" ]; then
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
gid=$(id -g "$SLURM_JOB_UID" 2>/dev/null) || gid=${SLURM_JOB_GID:-$SLURM_JOB_UID}

umask 077
if ! mkdir -p "$folder"; then
  say "no agent: $folder can't be made"
  exit 0
fi
chmod 711 "$root"

# The token as a file of the job's user: `megascale-ops run` in the job and the agent both refuse one of others.
if [ -n "${MEGASCALE_TOKEN_FILE:-}" ]; then
  if ! cat "$MEGASCALE_TOKEN_FILE" >"$folder/token"; then
    say "no agent: the token $MEGASCALE_TOKEN_FILE can't be read"
    exit 0
  fi
  export MEGASCALE_TOKEN_FILE=$folder/token
fi
# Black boxes of each user apart: the folder has mode 0700, and the next job's user could not write into it.
export MEGASCALE_BOX_ROOT=${MEGASCALE_OPS_BOXES:-/dev/shm/megascale-ops}-$SLURM_JOB_UID
touch "$folder/agent.log"

as_user=()
if [ "$(id -u)" != "$SLURM_JOB_UID" ]; then
  chown -R "$SLURM_JOB_UID:$gid" "$folder"
  as_user=(setpriv "--reuid=$SLURM_JOB_UID" "--regid=$gid" --init-groups --inh-caps=-all)
fi
cd / || exit 0
# In a session of its own and away from our pipes: slurmd waits until nobody holds them.
setsid "${as_user[@]}" "$program" agent </dev/null >>"$folder/agent.log" 2>&1 &
pid=$!
# Its start time too: by the epilog, days later, the pid may be another process's.
# Whether it stays is not waited for: jobs start meanwhile. One that ended is told of by the epilog.
echo "$pid $(cut -d ' ' -f 22 "/proc/$pid/stat" 2>/dev/null)" >"$folder/agent.pid"
exit 0

#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Slurm's TaskProlog: tell `megascale-ops run` in the job what the prolog has prepared.
#
# Runs as the job's user before each task; Slurm puts what is printed as "export NAME=value" into the task's environment.
set -u
PATH=/usr/sbin:/usr/bin:/sbin:/bin # Slurm sets none

settings=${MEGASCALE_OPS_SETTINGS:-/etc/megascale-ops/agent.env}
[ -r "$settings" ] || exit 0
# shellcheck source=/dev/null
. "$settings"
folder=${MEGASCALE_OPS_RUN:-/run/megascale-ops}/${SLURM_JOB_ID:-none}
[ -d "$folder" ] || exit 0

echo "export MEGASCALE_CONTROLLER=${MEGASCALE_CONTROLLER:-}"
[ -n "${MEGASCALE_OPS_BOXES:-}" ] && echo "export MEGASCALE_BOX_ROOT=$MEGASCALE_OPS_BOXES-$(id -u)"
[ -r "$folder/token" ] && echo "export MEGASCALE_TOKEN_FILE=$folder/token"
# A token of the job's own is issued for this name: the controller refuses it for any other.
[ -n "${MEGASCALE_OPS_JOB_TOKENS:-}" ] && echo "export MEGASCALE_RUN_JOB=slurm-$SLURM_JOB_ID"
exit 0

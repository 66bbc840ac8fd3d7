#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Unit tests, two at a time; options of pytest may follow. Of those that take turns (tests/turns.py) a third is drawn;
# --turn=2 holds the second one.
#
# Their 9,000 folders lie in memory where 4 GB of it are free (they take 0.6): on a disk a fifteenth of the CPU time is
# the file system's, and all of them are removed one by one. They go at the end, or stay where a test has failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

# What starts processes or needs a GPU is not even found: 140 files that each worker would read.
tests=(tests --ignore=tests/processes --ignore=tests/gpu -m "not gpu and not processes and not matrix" -n 2 --durations=10 --turn=draw)
least_kb=$((4 << 20))

free_kb() {
    local room memory
    room=$(df --output=avail -k /dev/shm 2>/dev/null | tail -1) || room=0
    memory=$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo 2>/dev/null) || memory=0
    [ "${room:-0}" -lt "${memory:-0}" ] && echo "${room:-0}" || echo "${memory:-0}"
}

# What a failure, or a machine that was switched off, left there three hours ago.
find /dev/shm -maxdepth 1 -name 'megascale-unit.*' -user "$(id -u)" -mmin +180 -exec rm -rf {} + 2>/dev/null

folder=
if [ "$(free_kb)" -ge $least_kb ]; then
    folder=$(mktemp -d /dev/shm/megascale-unit.XXXXXX) || folder=
fi
if [ -z "$folder" ]; then
    exec .venv/bin/pytest "${tests[@]}" "$@"
fi

code=2
# shellcheck disable=SC2317  # the trap calls it
leave() {
    if [ "$code" -eq 1 ]; then
        echo "the folders of the tests are in $folder, for three hours at least"
    else
        chmod -R u+rwx "$folder" 2>/dev/null
        rm -rf "$folder"
    fi
}
trap leave EXIT
.venv/bin/pytest "${tests[@]}" --basetemp="$folder/tests" "$@"
code=$?
exit $code

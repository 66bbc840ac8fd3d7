#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests with real processes: first eight at a time, then what is about time and waits for most of it (`calm`), five at a
# time, then what is about time and needs the cores, alone. Eight on two cores: with six at a time the cores were idle for
# a quarter of the time, since programs are forked and wait for each other more than they compute.
#
#     process-tests.sh           all of it
#     process-tests.sh beside    the first part alone, four at a time: beside the unit tests, which take what it leaves idle
#                                so that both end together: with six at a time unit tests were left alone for five minutes, in
#                                which a core was idle for a quarter of the time
#     process-tests.sh last      the rest, and what failed in either
#
# Some 850 tests each start a handful of programs on two cores that others may use too. A machine that stands still for
# ten seconds breaks promises about time that the code keeps. So what failed is held once more, with the machine to itself;
# what fails again has failed. More than eight files at once (tests of a file may share a run, and fail together) is no busy
# machine, and not held again. The first failure stays in the output, for whoever looks for a race: a test that comes up
# here twice has one. The last line names them all, so that nobody overlooks them.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

# Not all of `tests`: each worker would spend 7 s of a core on finding 10,000 tests that are none of these, and 3 s on the
# thousand of processes where a few are wanted. Files of unit tests with a few of them import torch, 2 s in each worker:
# one process holds them.
files() { grep -rlE --include='test_*.py' "mark\.$1" "${@:2}"; }
mapfile -t units < <(files processes tests/unit)
where=("${units[@]}" tests/processes)
mapfile -t calm < <(files calm "${where[@]}")
mapfile -t alone < <(files alone "${where[@]}")
most_files_again=8
cache=.pytest_cache/processes
pytest=(.venv/bin/pytest -o "cache_dir=$cache" --durations=20)
part=${1:-all}
workers=8
[ "$part" != beside ] || workers=4

hold() {
    "${pytest[@]}" "$@"
    local code=$?
    [ $code -le 1 ] || exit $code # interrupted, or pytest itself is broken: no test has failed
    [ $code -eq 0 ] || touch "$cache/failed"
}

if [ "$part" != last ]; then
    rm -rf "$cache"
    hold "${units[@]}" -m "processes and not alone and not calm and not gpu and not matrix" --turn=draw
    hold tests/processes -m "processes and not alone and not calm and not gpu and not matrix" -n $workers --dist loadgroup --turn=draw
    [ "$part" != beside ] || exit 0
fi
hold "${calm[@]}" -m "processes and calm and not gpu and not matrix" -n 5 --dist loadgroup
hold "${alone[@]}" -m "processes and alone and not gpu and not matrix" --turn=draw
[ -e "$cache/failed" ] || exit 0

again=$(.venv/bin/python -c "import json; print(len(json.load(open('$cache/v/cache/lastfailed'))))")
files=$(.venv/bin/python -c "import json; print(len({name.split('::')[0] for name in json.load(open('$cache/v/cache/lastfailed'))}))")
if [ "$files" -gt $most_files_again ]; then
    echo "$again tests failed in $files files, more than the $most_files_again that a busy machine explains: they are not held again"
    exit 1
fi
echo "$again tests failed; once more, alone:"
names=$(.venv/bin/python -c "import json; print(', '.join(json.load(open('$cache/v/cache/lastfailed'))))")
"${pytest[@]}" "${where[@]}" -m "processes and not gpu and not matrix" --last-failed -v
code=$?
outcome="passed then"
[ $code -eq 0 ] || outcome="not all passed then"
echo "$again tests needed a second try, and $outcome: $names"
exit $code

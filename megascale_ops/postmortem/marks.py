# SPDX-License-Identifier: Apache-2.0
"""Whose a line is by a mark that says which process wrote it, where another line says which rank that process is.

Ray's actors print their process before each line, NCCL its host and process, and either prints a rank in a few of them
at most. A process of which two ranks are told, and a rank of which two processes are (places in groups), tells nothing.

Whatever else stands before nearly all lines in one shape, with a number in it that differs, is a mark of processes as
well: a launcher's, a composer's of containers, a logger's. Where a word says that the number is a rank it counts as it
is; any other number counts where it is one of few that begin with 0.

Pure: lines in, ranks out.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from megascale_ops.diagnosis.exits.prefixes import COLOURS, TRACEBACK_BEGINS

# Ray's actor: "(RayTrainWorker pid=4121, ip=10.0.3.7) "; without an address it runs beside the driver.
RAYS = re.compile(
    r"^(?:\x1b\[[\d;]*m)?\(\w{1,60} pid=(?P<pid>\d{1,8})(?:, ip=(?P<ip>\S{1,60}?))?\)(?:\x1b\[[\d;]*m)? ?"
)
# An actor of itself, and of a file that has its rank's part; not of a peer or of a place in a group.
_SAYS = re.compile(
    r"(?<![\w-])(?<!local )(?<!node )(?<!peer )(?<!remote )(?<!from )(?<!to )(?<!for )(?<![A-Z]{2} )"
    r"(?:global[_ ]|world[_ ])?[Rr]ank(?:[=:] ?| )(\d{1,6})\b(?! (?:timed|failed|died|lost|did|was))"
    r"|\b[Ss]av(?:ed|ing)\b.{1,300}_rank_(\d{1,6})\.\w"
)
# NCCL: "host:process:thread [device] NCCL "; init.cc tells the rank.
_NCCLS = re.compile(r"^(?P<ip>\S{1,80}):(?P<pid>\d{1,8}):\d{1,8} \[\d{1,3}\] (?=.{0,80}\bNCCL )")
_OF_NCCL = re.compile(r"\bNCCL INFO .{0,200}?\brank (\d{1,6}) nranks \d{1,6}\b")
# A word, a number and a sign that ends them, behind nothing but times, levels, hosts and the like.
_HEAD = re.compile(
    r"^(?P<before>(?:[\[(]?[\w.,:/+-]{1,60}[\])]?(?: \||[ -]-|:)? {1,2}){0,6}?)(?P<open>[\[(<{]?)"
    r"(?P<name>[A-Za-z][\w./-]{0,60}?)?(?P<join>[ _:=#\[(-]{0,2})(?P<number>\d{1,6})(?:/[\w.]{1,40})?"
    r"(?:(?P<close>[\])>}]{1,2}:?)|(?P<sign>:(?= |$)| {0,20}\|(?= |$)|>(?= |$)| -(?= )))(?P<space> ?)"
)
_A_RANK = re.compile(r"(?:^|[^a-z])(?:(?:global|world|mpi)[_-]?)?rank$", re.IGNORECASE)
_OF_A_NODE = re.compile(r"(?:^|[^a-z])(?:gpu|cuda|device|local|local[_-]?rank|default)$", re.IGNORECASE)
# What numbers count that are no processes.
_NO_PROCESS = re.compile(
    r"(?:^|[^a-z])(?:step|iter(?:ation)?|epoch|layer|batch|line|loss|attempt|try|retry|round|node|host|pid|tid|port|job|v|version"
    r"|seed|shard|part|chunk|file|block|stage|phase|size|count|total|time|h|m|s|ms|day"
    r"|frame|item|entry|thread|level|index|slot|core|cpu|numa|channel|ring|tree|bucket|group|expert|head|token|row|col)s?$",
    re.IGNORECASE,
)
_LETTERS = re.compile(r"[a-z]{2}")
# Two words of a sentence, or an observer's note about a rank: no mark of it.
_SENTENCE = re.compile(r"\b[a-z]{2,20},? [a-z]{2,20}\b")
# NCCL's watchdogs tell places in groups, which ``pieces`` reads, and its lines devices of a node.
_OF_WATCHDOGS = "ProcessGroup"
_ABOUT = re.compile(r"Watchdog caught|Child process with PID \d|(?:\S{1,80} )?NCCL (?:INFO|WARN|TRACE)\b")
_DIGITS, _LEVEL = re.compile(r"\d+"), re.compile(r"\b[A-Z]{4,8}\b")
_IS_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL|error|critical|fatal)\b")
# 400 lines: enough to see that most have no mark.
_ASKED = 400
# 0.3 of the lines: records of a logger that names ranks, beside what is printed without one.
_SOME_LINES = 0.3
# 1.5 lines of each: what comes once each is a list.
_LINES_EACH = 1.5
# 2 lines: one alone may be a sentence about a rank.
_FEWEST = 2
# Numbers that begin with 0 and leave out one of two at most are of processes.
_SPARSE = 2
# A composer's line of a container's end.
_ENDED = re.compile(r"^([A-Za-z][\w.-]{0,60}?[_-])(\d{1,6}) exited with code [1-9]")
# Frames, the blank lines and the arrow by which loguru draws them; and what stands between two of a chain.
_IS_INSIDE = re.compile(r"  |$|> File ")
_IS_CHAINED = re.compile(r"$|(?:During handling of the above exception|The above exception was the direct cause)\b")
# What a launcher or a composer says itself, of no rank.
LAUNCHERS = re.compile(
    r"^[\s=*-]*$|^(?:srun|slurmstepd|sbatch|salloc|mpirun|mpiexec|prterun|prun|pdsh|clush|jsrun|aprun|yhrun|flux-job)\b"
    r"[^:\n]{0,80}: |^\d{1,9}\.\d{3}s: (?:flux-shell\[|job\.exception )"
    r"|^\S{1,80} exited with code \d{1,3}$|^Attaching to "
    r"|^\S{1,120}: rank \d{1,6} died from signal \d|^[WE]\d{4} .{0,60}torch/distributed/elastic/"
)
# 0.9 of all lines: a name and a bar before a few are no composer's.
MOST_LINES = 0.9

_Tagged = list[tuple[int, str]]


def known_rays(lines: Sequence[str], tagged: Sequence[tuple[int, str]]) -> dict[tuple[str, str], int]:
    """Return the ranks of Ray's actors, by address and process, as tags in some of their lines tell.

    Of an actor without a tag its own sentences do, where they name one rank alone.
    """
    homes: dict[tuple[str, str], set[int]] = {}
    said: dict[tuple[str, str], set[int]] = {}
    for line, (rank, _) in zip(lines, tagged, strict=True):
        if (one := RAYS.match(line)) is None:
            continue
        key = (one["ip"] or "", one["pid"])
        if rank >= 0:
            homes.setdefault(key, set()).add(rank)
        elif "ank" in line:
            said.setdefault(key, set()).update(int(number) for own in _SAYS.findall(line) for number in own if number)
    taken = {rank for ranks in homes.values() for rank in ranks}
    return _only({**{key: ranks for key, ranks in said.items() if ranks and taken.isdisjoint(ranks)}, **homes})


def of_nccl(lines: Sequence[str], tagged: Sequence[tuple[int, str]]) -> _Tagged:
    """Give NCCL's lines that have no tag to the rank that NCCL says the process is."""
    homes: dict[tuple[str, str], set[int]] = {}
    found = [_NCCLS.match(line) if ":" in line[:90] else None for line in lines]
    for line, one in zip(lines, found, strict=True):
        if one is not None and (told := _OF_NCCL.search(line)) is not None:
            homes.setdefault((one["ip"], one["pid"]), set()).add(int(told[1]))
    known = _only(homes)
    return [
        (known[key], bare)
        if rank < 0 and one is not None and (key := (one["ip"], one["pid"])) in known
        else (rank, bare)
        for one, (rank, bare) in zip(found, tagged, strict=True)
    ]


class Marked(NamedTuple):
    """Lines by rank, and whether the numbers are ranks of the job by their name and not places on a node."""

    lines: _Tagged
    is_global: bool


def of_any_shape(lines: Sequence[str]) -> Marked | None:
    """Return lines by the number in what stands before nearly all of them in one shape; None without such a one."""
    plain = [COLOURS.sub("", line) if "\x1b" in line else line for line in lines]
    own = [line for line in plain if LAUNCHERS.match(line) is None]
    asked = own[:: max(1, len(own) // _ASKED)]
    heads = (_HEAD.match(line) for line in asked)
    if not own or sum(one is not None and _shape_of(one) is not None for one in heads) < _SOME_LINES / 2 * len(asked):
        return None
    found = [_HEAD.match(line) for line in plain]
    shapes = Counter(_shape_of(one) for one in found if one is not None)
    shapes.pop(None, None)
    if not shapes:
        return None
    shape, count = shapes.most_common(1)[0]
    marks = [one if one is not None and _shape_of(one) == shape else None for one in found]
    name = shape[2] if shape is not None else ""
    says_rank = _A_RANK.search(name) is not None
    numbers = {int(one["number"]) for one in marks if one is not None}
    is_counted = 0 in numbers and len(numbers) > 1 and max(numbers) < _SPARSE * len(numbers)
    is_counted = is_counted and count >= _LINES_EACH * len(numbers)
    if (
        count < _FEWEST
        or count < (_SOME_LINES if says_rank else MOST_LINES) * len(own)
        or not (says_rank or is_counted)
    ):
        return None
    tagged = [
        (int(one["number"]), line[one.end() :]) if one is not None else (_ended_of(line, name, numbers), line)
        for line, one in zip(plain, marks, strict=True)
    ]
    whole = tagged if count >= MOST_LINES * len(own) else with_logged(plain, tagged)
    return Marked(whole, says_rank or _OF_A_NODE.search(name) is None)


def _ended_of(line: str, name: str, numbers: set[int]) -> int:
    """Return the number of the container or task of that name whose end a composer or an engine tells, -1 without."""
    found = _ENDED.search(line) if "exit" in line else None
    return int(found[2]) if found is not None and found[1].rstrip("_-") == name and int(found[2]) in numbers else -1


def _shape_of(one: re.Match[str]) -> tuple[str, ...] | None:
    """Return what stands before a line without its numbers and levels; None where that is no mark of a process."""
    name, is_open = one["name"] or "", bool(one["open"])
    is_closed = bool(one["close"]) and (is_open or one["close"] != ">")  # "worker3> " opens nothing
    if is_open != is_closed and "[" not in one["join"] and "(" not in one["join"]:
        return None
    if _NO_PROCESS.search(name.rstrip("./_-")) or name.startswith("pod/") or _SENTENCE.search(one["before"]):
        return None
    if _OF_WATCHDOGS in one["before"] or _ABOUT.match(one.string, one.end()):
        return None
    if not name and _LETTERS.search(one["before"]):
        return None
    before = _DIGITS.sub("#", _LEVEL.sub("L", one["before"]))
    return (before, one["open"], _DIGITS.sub("#", name), one["join"], one["close"] or "", (one["sign"] or "").strip())


def with_logged(lines: Sequence[str], tagged: _Tagged) -> _Tagged:
    """Give a traceback right below a record of an error to the rank that it is of, where only records have marks.

    What stands below a record of something else is of no rank.
    """
    return with_tracebacks(lines, tagged, of_errors_alone=True)


def with_tracebacks(lines: Sequence[str], tagged: _Tagged, *, of_errors_alone: bool = False) -> _Tagged:
    """Give a traceback, with those that it is chained to, to the rank before whose lines there is a mark.

    It ends with the line that raises; what follows is of no rank again.
    """
    whole: _Tagged = []
    owner, is_inside, is_behind = -1, False, False
    for line, (rank, bare) in zip(lines, tagged, strict=bool(tagged)):
        if rank >= 0:
            owner = rank if not of_errors_alone or _IS_ERROR.search(line[:200]) else -1
            is_inside, is_behind = bare.rstrip().endswith(TRACEBACK_BEGINS), False
        elif owner >= 0 and not is_inside and line.startswith(TRACEBACK_BEGINS):
            is_inside = True
        elif not is_inside and not (is_behind and _IS_CHAINED.match(line)):
            owner = -1
        is_theirs = is_inside or (is_behind and owner >= 0)
        whole.append((owner if is_theirs and rank < 0 else rank, bare))
        was_inside = is_inside
        is_inside = is_inside and (_IS_INSIDE.match(line) is not None or line.rstrip().endswith(TRACEBACK_BEGINS))
        is_behind = (was_inside and not is_inside) or (is_behind and owner >= 0 and not is_inside)
    return whole


def _only(homes: dict[tuple[str, str], set[int]]) -> dict[tuple[str, str], int]:
    """Return the rank of each process of which one is told, where it is no other's."""
    single = {key: next(iter(ranks)) for key, ranks in homes.items() if len(ranks) == 1}
    owners: dict[int, int] = {}
    for rank in single.values():
        owners[rank] = owners.get(rank, 0) + 1
    return {key: rank for key, rank in single.items() if owners[rank] == 1}

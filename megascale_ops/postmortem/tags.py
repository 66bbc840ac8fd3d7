# SPDX-License-Identifier: Apache-2.0
"""Whose a line of a merged log is, by what a launcher or a logger has put before it.

A tag with the global rank in it counts before one with a local rank, and any of them before a bare number, which is a
launcher's (``srun --label``) only where nearly all lines have one. What stands before a tag must be of the same kind
(a time, a host, a pod, another tag): a sentence that mentions ``[rank3]`` is not of that rank.

Pure: a text in, lines by rank out.
"""

import re
from itertools import pairwise
from typing import NamedTuple

from megascale_ops.diagnosis.exits.general_rows import RAY_SAYS
from megascale_ops.diagnosis.exits.prefixes import COLOURS, TRACEBACK_BEGINS
from megascale_ops.postmortem import marks, pods

# 160 characters: a time, a pod's full name and a stream's stand before the rank in the longest seen.
_ZONE = 160
# torch, Lightning, Determined; Ray's and vLLM's actors; Composer's loggers; SageMaker's mpirun.
_GLOBAL = (
    re.compile(r"(?<!\w)\[(?:rank|RANK)(?:[=:_-] ?| )?(\d{1,6})\]:? ?"),
    re.compile(r"\(\w{1,60}(?:\[rank=| rank=)(\d{1,6})\b[^()]{0,80}\) ?"),
    re.compile(r"\brank(\d{1,6})\[\d{1,8}\]\[\w{1,60}\]: ?"),
    # MVAPICH's own handler of signals.
    re.compile(r"^\[[\w.-]{1,80}:mpi_rank_(\d{1,6})\](?:\[\w{1,60}\])? ?"),
    re.compile(r"\[\d{1,6},mpirank:(\d{1,6}),[^\]\n]{1,60}\]<std(?:err|out)>: ?"),
    # With --timestamp-output a date stands before it, without a space.
    re.compile(r"^(?:\w{3} \w{3} {1,2}\d{1,2} [\d:]{8} \d{4})?\[(?:\d{1,6},)?(\d{1,6})\]<std(?:err|out)>: ?"),
    # A logger's field behind nothing but a time and a level; a sentence about a rank has another verb.
    re.compile(
        r"^(?:[\[(]?(?:[\d:.,TZ/+-]{1,40}|[A-Z]{4,8})[\])]?:?[ |]{1,12}){0,5}rank=(\d{1,6})\b[\]:,|]?"
        r"(?! ?(?:has|is|was|did|does|failed|died|lost|timed|never|not)\b) ?(?:\| )?"
    ),
)
# A field of a structured line: nothing of it is taken away, for its message is read where it stands.
_FIELD = re.compile(
    r"^\{.{0,400}?\"(?:global_?)?rank\" ?: ?\"?(\d{1,6})\b"
    r"|^(?=.{0,400}\b(?:level|lvl|msg)=).{0,400}?\brank=(\d{1,6})\b"
)
# Of Cloud Logging and of shippers of pods' logs: "workerpool1-0", "job-7".
_NAMED = re.compile(
    r"\"(?:task_name|pod(?:_?[nN]ame)?)\" ?: ?"
    r"\"(?P<job>[a-z][\w.-]{0,200}?)(?P<pool>(?<=pool)\d{1,3})?-(?P<number>\d{1,6})\""
)
# Ray Train tells at the start which process is which rank; its lines have the process.
_OF_RAY = re.compile(r"\bip=(\S{1,60}?), pid=(\d{1,8})\) world_rank=(\d{1,6})\b")
# Of its monitor of memory, and of its driver: which process on which host was ended.
_ENDED_BY_RAY = re.compile(
    r"Memory on the node \(IP: (?P<ip>[\w.:]{1,60}),[^\n]{0,300}?\bpid=(?P<pid>\d{1,8}), memory used="
)
# Of a node that is gone, with all workers on it.
_DEAD_NODE = re.compile(
    r"\bnode with node id: \S{1,80} and (?:address|ip): (?P<ip>[\w.:]{1,60}?),? .{0,200}marked dead"
)
# Of an actor that died, as its driver tells it: its process, its address, and what its end was.
_DEAD_ACTOR = re.compile(
    r"^\s{0,4}pid: (?P<pid>\d{1,8})\n(?:\s{1,4}\w{1,40}: [^\n]{0,200}\n){0,6}?\s{0,4}ip: (?P<ip>[\w.:]{1,60})\n"
    r"(?P<end>The actor (?:is dead|died) because its (?P<what>node|worker process) has died[^\n]*)",
    re.MULTILINE,
)
# What a raylet says of a worker that ended without a word, with all reasons that it can think of.
_DEAD_WORKER = re.compile(
    r"^\(raylet\b[^)]{0,80}\) (?P<end>A worker died or was killed\b).{0,2000}?"
    r"\bWorker IP address: (?P<ip>[\w.:]{1,60}) .{0,200}?\bWorker PID: (?P<pid>\d{1,8})\b"
)
# What others say where that was no end in order.
_FELT = re.compile(
    r"Watchdog caught|remote process exited|[Cc]onnection (?:closed|reset) by |\b(?:RayActor|ActorDied)Error\b"
)
_CARRIED_OF = re.compile(
    r"\bRayTaskError\(\w{1,80}\): ray::[^\n]{1,200}?\(pid=(?P<pid>\d{1,8}), ip=(?P<ip>[\w.:]{1,60})\b"
)
# torchrun's own tag has the local rank; torch_xla's launcher an address and the worker behind it.
_LOCAL = (
    re.compile(r"\[default(\d{1,6})\]: ?"),
    re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \d{1,3}(?:\.\d{1,3}){3} \[(\d{1,6})\] "),
)
# A line with both, and torchrun's report of both.
_BOTH = re.compile(r"^[^\n]{0,60}?\[default(\d{1,6})\]: ?\[rank(\d{1,6})\]", re.MULTILINE)
_REPORTED = re.compile(r"\brank {1,10}: (\d{1,6}) \(local_rank: (\d{1,6})\)")
# Places in parallel groups, by which engines mark processes: "[2026-05-10 10:00:00 TP3]", "(Worker_DP0_TP1 pid=7)".
_PLACES = re.compile(
    r"^(?:\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?P<groups>(?: [A-Z]{2,4}\d{1,4}){1,6})\]"
    r"|\(\w{1,40}?(?P<places>(?:[_ ][A-Z]{2,4}\d{1,4}){1,6}) pid=\d{1,8}\)) ?"
)
_PLACE = re.compile(r"([A-Z]{2,4})(\d{1,4})")
# torch_xla's launcher, of the process whose traceback follows.
_OF_A_DEVICE = re.compile(r"^Exception in device=(?:TPU|XLA|CUDA|GPU|NEURON):(\d{1,4}): ")
# torch_npu's head of a report; what it raised; CANN's codes.
_OF_ASCEND = re.compile(r"\(PID:\d{1,9}, Device:-?\d{1,4}, RankID:(\d{1,6})\)")
_RAISED, _BELOW_ASCENDS = re.compile(r"[\w.]{1,80}Error: "), re.compile(r"\s|E[A-Z]\d{4}: |\[Error\]: ")
# Pieces of which each form has one.
_GLOBAL_MARKS = ("[rank", "[RANK", "rank=", "][", "mpirank:", "]<std", ":mpi_rank_")
_LOCAL_MARKS = ("[default", "] ")
# kubectl logs --prefix, of Kubeflow's pods of one replica each: the master is rank 0.
_OF_POD = re.compile(r"^\[pod/(?P<job>[^\s/\]]{1,200})-(?P<role>master|worker)-(?P<number>\d{1,6})/[^\s\]]{1,63}\] ")
_NUMBERED = re.compile(r"^(?: {0,5}(?:(\d{1,6}):|\[(\d{1,6})\])|(?=\S*\d)[A-Za-z][\w.-]{3,120} (\d{1,6}):)(?: |$)")
# 20 lines: where a launcher labels lines, it labels the first ones.
_LABELS = 20
# Two words of a sentence: what stands before is a message, and no launcher's mark.
_SENTENCE = re.compile(r"\b[a-z]{2,20},? [a-z]{2,20}\b")
# A line of an observer about a rank is not that rank's.
_ABOUT = re.compile(r"Child process with PID \d")


class Tagged(NamedTuple):
    """Lines by rank, without their tags, by -1 those of none; and whether the tags have the ranks of the whole job."""

    lines: dict[int, list[str]]
    is_global: bool = False


def pods_in(text: str) -> dict[str, int]:
    """Return the ranks of pods whose names stand before the lines of a log."""
    lines = text.splitlines()
    return pods.ranks_by_prefix(lines, [_tagged(line, _GLOBAL) for line in lines])


def by_rank(text: str) -> Tagged:
    """Return the lines of each rank; none where no line has a tag."""
    lines = text.splitlines()
    if tagged := _of_fields(text, lines) or _of_ray(text, lines):
        return Tagged(_gathered(tagged), is_global=True)
    if text.startswith("{") and (tagged := _of_named_tasks(text, lines)):
        return Tagged(_gathered(tagged))
    for forms, pieces in ((_GLOBAL, _GLOBAL_MARKS), (_LOCAL, _LOCAL_MARKS)):
        if not any(piece in text for piece in pieces):  # a tenth of the time that asking each line takes
            continue
        tagged = [_tagged(line, forms) for line in lines]
        if any(rank >= 0 for rank, _ in tagged):
            if numbered := _labelled(lines, tagged, forms):
                return Tagged(_gathered(numbered))
            if forms is _GLOBAL:
                tagged = _with_marks(text, lines, tagged)
            is_global = forms is _GLOBAL
            if "[default" in text and (offset := _offset_of(text)) is not None:
                tagged, is_global = _with_locals(lines, tagged, offset, is_global=is_global), True
            return Tagged(_gathered(tagged), is_global)
    return _of_untagged(text, lines)


def _offset_of(text: str) -> int | None:
    """Return by how much ranks are more than the local ranks in torchrun's tags, by lines that have both; else None."""
    both = _BOTH.findall(text)
    offsets = {int(rank) - int(local) for local, rank in both} | {
        int(rank) - int(local) for rank, local in _REPORTED.findall(text)
    }
    return offsets.pop() if len(offsets) == 1 and min(offsets) >= 0 else None


def _with_locals(
    lines: list[str], tagged: list[tuple[int, str]], offset: int, *, is_global: bool
) -> list[tuple[int, str]]:
    """Return lines with local ranks alone by the ranks that these are."""
    whole: list[tuple[int, str]] = []
    for line, (rank, bare) in zip(lines, tagged, strict=True):
        local, rest = _tagged(line, _LOCAL[:1]) if rank < 0 or not is_global else (-1, bare)
        whole.append((local + offset, rest) if local >= 0 else (rank, bare))
    return whole


def _of_numbers(lines: list[str]) -> list[tuple[int, str]]:
    """Return the lines by the number before nearly all of them, as srun and PALS label tasks; nothing without."""
    numbered = [_numbered(line) for line in lines]
    own = sum(rank >= 0 or marks.LAUNCHERS.match(line) is None for rank, line in numbered)
    return numbered if own and sum(rank >= 0 for rank, _ in numbered) >= marks.MOST_LINES * own else []


def _labelled(
    lines: list[str], tagged: list[tuple[int, str]], forms: tuple[re.Pattern[str], ...]
) -> list[tuple[int, str]]:
    """Return the lines by their labels, where a label and a tag behind it say the same of all lines that have both.

    A label of agents is another number than the ranks of their processes.
    """
    if not any(map(_NUMBERED.match, lines[:_LABELS])) or not (numbered := _of_numbers(lines)):
        return []
    both = [(label, rank) for (label, _), (rank, _) in zip(numbered, tagged, strict=True) if rank >= 0]
    if any(label != rank for label, rank in both):
        return []
    return [(label, _tagged(bare, forms)[1]) for label, bare in numbered]


def _with_marks(text: str, lines: list[str], tagged: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Give lines without a tag to the ranks that what stands above them, or their processes, tell."""
    if TRACEBACK_BEGINS in text:
        tagged = marks.with_logged(lines, tagged)
    if "[pod/" in text:
        tagged = pods.with_prefixes(lines, tagged)
    if " pid=" in text and (known := marks.known_rays(lines, tagged)):
        tagged = _by_actors(text, lines, tagged, known)
    return marks.of_nccl(lines, tagged) if " nranks " in text else tagged


def _of_untagged(text: str, lines: list[str]) -> Tagged:
    """Return lines by what is no rank's tag: an engine's places (it may serve a job whose ranks have tags), numbers."""
    tagged = _of_pods(text, lines) or marks.with_tracebacks(lines, _of_places(lines))
    is_global = not tagged
    if not tagged:
        tagged = _of_actors(text, lines) or (_of_ascend(lines) if "RankID:" in text else [])
    if not tagged and "Exception in device=" in text:
        tagged, is_global = marks.with_tracebacks(lines, [_of_device(line) for line in lines]), False
    if tagged:
        return Tagged(_gathered(tagged), is_global)
    if numbered := _of_numbers(lines):
        return Tagged(_gathered(numbered))
    if marked := marks.of_any_shape(lines):
        return Tagged(_gathered(marked.lines), marked.is_global)
    return Tagged({})


def _of_actors(text: str, lines: list[str]) -> list[tuple[int, str]]:
    """Return lines of Ray's actors whose own sentences tell their ranks; nothing where one at most does."""
    untagged = [(-1, line) for line in lines]
    known = marks.known_rays(lines, untagged) if " pid=" in text else {}
    return _by_actors(text, lines, untagged, known) if len(known) > 1 else []


def _of_fields(text: str, lines: list[str]) -> list[tuple[int, str]]:
    """Return lines of a structured log with their ranks; nothing where they have no such field."""
    if not any(mark in text for mark in ('rank"', "rank=")):
        return []
    found = [_FIELD.match(line) for line in lines]
    if sum(one is not None for one in found) < marks.MOST_LINES * len(lines):
        return []
    return [(int(one[1] or one[2]) if one is not None else -1, line) for one, line in zip(found, lines, strict=True)]


def _of_named_tasks(text: str, lines: list[str]) -> list[tuple[int, str]]:
    """Return lines of a structured log by the task or pod in their fields, where its numbers are those of a whole job.

    Tasks of several pools count through, pool by pool; nothing where a number is missing, or ranks are told otherwise.
    """
    if "[rank" in text:
        return []
    found = [_NAMED.search(line) for line in lines]
    whose = [(one["job"], int(one["pool"] or 0), int(one["number"])) if one is not None else None for one in found]
    tasks = sorted({one for one in whose if one is not None})
    if not _are_whole(tasks) or sum(one is not None for one in whose) < marks.MOST_LINES * len(lines):
        return []
    ranks = {task: rank for rank, task in enumerate(tasks)}
    return [(ranks[one] if one is not None else -1, line) for one, line in zip(whose, lines, strict=True)]


def _are_whole(tasks: list[tuple[str, int, int]]) -> bool:
    """Return whether tasks in their order are all of one job: pools and the tasks of each count from 0.

    Workers beside a master that is not there are numbered from 0, too, and are not those ranks.
    """
    begins = sum(number == 0 for _, _, number in tasks)
    follows = all(
        number == (before[2] + 1 if before[1] == pool else 0) for before, (_, pool, number) in pairwise(tasks)
    )
    is_one = len({job for job, _, _ in tasks}) == 1 and not tasks[0][0].endswith("worker")
    return len(tasks) > 1 and is_one and tasks[0][2] == 0 and follows and len({pool for _, pool, _ in tasks}) == begins


def _of_ray(text: str, lines: list[str]) -> list[tuple[int, str]]:
    """Return the lines of Ray's workers with their ranks, where Ray has told them; nothing where it has not."""
    ranks = {(ip, pid): int(rank) for ip, pid, rank in _OF_RAY.findall(text)} if "world_rank=" in text else {}
    if not ranks:
        return []
    return _by_actors(text, lines, [(-1, line) for line in lines], ranks)


def _by_actors(
    text: str, lines: list[str], tagged: list[tuple[int, str]], ranks: dict[tuple[str, str], int]
) -> list[tuple[int, str]]:
    """Give lines without a tag to the ranks of the processes, by their addresses and numbers, that they name."""
    whole = []
    is_felt = "A worker died" in text and _FELT.search(text) is not None
    for line, (rank, bare) in zip(lines, tagged, strict=True):
        if rank >= 0:
            whole.append((rank, bare))
        elif (lost := _DEAD_NODE.search(line)) is not None:
            whole += [(rank, line) for (ip, _), rank in ranks.items() if ip == lost["ip"]] or [(-1, line)]
        elif (found := marks.RAYS.match(line)) is not None:
            owner = _owner(ranks, found["ip"], found["pid"])
            whole.append((owner, line[found.end() :] if owner >= 0 else bare))
        elif is_felt and (found := _DEAD_WORKER.search(line)) is not None:
            owner = _owner(ranks, found["ip"], found["pid"])
            whole.append((owner, f"{RAY_SAYS}{found['end']}" if owner >= 0 else bare))
        else:
            found = _ENDED_BY_RAY.search(line)
            whole.append((_owner(ranks, found["ip"], found["pid"]) if found is not None else -1, bare))
    return [*_with_carried(whole, ranks), *_of_dead_actors(text, ranks)]


def _owner(ranks: dict[tuple[str, str], int], ip: str | None, pid: str) -> int:
    """Return the rank of a process, -1 where it is none or several; beside the driver without an address."""
    found = ranks.get((ip or "", pid), -1)
    here = [rank for (at, number), rank in ranks.items() if number == pid and (not at or not ip)]
    return found if found >= 0 else here[0] if len(here) == 1 else -1


def _of_dead_actors(text: str, ranks: dict[tuple[str, str], int]) -> list[tuple[int, str]]:
    """Return how actors ended by their ranks; with a node all that were on it have."""
    ends: set[tuple[int, str]] = set()
    for one in _DEAD_ACTOR.finditer(text) if "has died" in text else ():
        whose = (
            [rank for (ip, _), rank in ranks.items() if ip == one["ip"]]
            if one["what"] == "node"
            else [_owner(ranks, one["ip"], one["pid"])]
        )
        ends |= {(rank, f"{RAY_SAYS}{one['end']}") for rank in whose if rank >= 0}
    return sorted(ends)


def _with_carried(tagged: list[tuple[int, str]], ranks: dict[tuple[str, str], int]) -> list[tuple[int, str]]:
    """Give a traceback that Ray carries to its driver to the worker that it names, up to the line that raises."""
    whole: list[tuple[int, str]] = []
    owner = -1
    for rank, line in tagged:
        carried = _CARRIED_OF.search(line) if rank < 0 else None
        if carried is not None:
            owner = ranks.get((carried["ip"], carried["pid"]), -1)
            whole.append((owner, TRACEBACK_BEGINS if owner >= 0 else line))
            continue
        is_theirs = owner >= 0 and rank < 0
        whole.append((owner, line) if is_theirs else (rank, line))
        owner = owner if is_theirs and line.startswith(" ") else -1
    return whole


def _of_pods(text: str, lines: list[str]) -> list[tuple[int, str]]:
    """Return the lines of the pods of one job with a master, whose worker N is rank N + 1; of others that tell it."""
    if "[pod/" not in text:
        return []
    found = [_OF_POD.match(line) for line in lines]
    jobs = {one["job"] for one in found if one is not None}
    if len(jobs) != 1 or not any(one is not None and one["role"] == "master" for one in found):
        is_told = len(pods.ranks_by_prefix(lines)) > 1
        return pods.with_prefixes(lines, [(-1, line) for line in lines]) if is_told else []
    return [
        (0 if one["role"] == "master" else int(one["number"]) + 1, pods.TIME.sub("", line[one.end() :]))
        if one is not None
        else (-1, line)
        for one, line in zip(found, lines, strict=True)
    ]


def _of_places(lines: list[str]) -> list[tuple[int, str]]:
    """Return the lines of an engine's processes by their places in its tensor parallel group, where one group is all.

    Nothing where a place belongs to several processes: there are stages of a pipeline, or replicas of the engine.
    """
    found = [_PLACES.match(line) for line in lines]
    places = [dict(_PLACE.findall(one["groups"] or one["places"])) if one is not None else {} for one in found]
    homes: dict[str, set[str]] = {}
    for place in places:
        homes.setdefault(place.get("TP", ""), set()).add(place.get("DP", ""))
    homes.pop("", None)
    if not homes or any("PP" in place for place in places) or any(len(several) > 1 for several in homes.values()):
        return []
    return [
        (int(place["TP"]), line[one.end() :]) if one is not None and "TP" in place else (-1, line)
        for place, one, line in zip(places, found, lines, strict=True)
    ]


def _of_device(line: str) -> tuple[int, str]:
    found = _OF_A_DEVICE.match(line)
    return (int(found[1]), line[found.end() :]) if found is not None else (-1, line)


def _of_ascend(lines: list[str]) -> list[tuple[int, str]]:
    """Return the lines of Ascend's reports by the rank in their heads; nothing where one rank alone has such a head.

    What was raised stands right above the head, codes of CANN and indented lines below it.
    """
    tagged: list[tuple[int, str]] = []
    owner = -1
    for line in lines:
        head = _OF_ASCEND.search(line)
        if head is not None:
            owner = int(head[1])
            if tagged and tagged[-1][0] < 0 and _RAISED.match(tagged[-1][1]):
                tagged[-1] = (owner, tagged[-1][1])
        elif not _BELOW_ASCENDS.match(line):
            owner = -1
        tagged.append((owner, line))
    return tagged if len({rank for rank, _ in tagged} - {-1}) > 1 else []


def _tagged(line: str, forms: tuple[re.Pattern[str], ...]) -> tuple[int, str]:
    if "[" not in line and "rank" not in line:
        return -1, line
    plain = COLOURS.sub("", line) if "\x1b" in line else line
    for form in forms:
        found = form.search(plain, 0, _ZONE)
        if found is not None and not _SENTENCE.search(plain, 0, found.start()) and not _ABOUT.match(plain, found.end()):
            return int(found[1]), plain[found.end() :]
    return -1, line


def _numbered(line: str) -> tuple[int, str]:
    found = _NUMBERED.match(line)
    return (int(found[1] or found[2] or found[3]), line[found.end() :]) if found is not None else (-1, line)


def _gathered(tagged: list[tuple[int, str]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for rank, line in tagged:
        found.setdefault(rank, []).append(line)
    return found

# SPDX-License-Identifier: Apache-2.0
"""Pods of a job on Kubernetes: which rank each is, and whose their events and descriptions are.

Kubeflow numbers the pods of one replica each: the master is rank 0 and worker N is rank N + 1. Of any other job the
pod is the rank whose log has its name.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from megascale_ops.postmortem.piece import Piece

# A line of Kubernetes' events, or of a kubelet's log; its object is a pod, whose log is named by the whole of its name
# or the end of it.
_EVENT = re.compile(
    r"^\S{1,20} +(?:Warning +\S{1,60}|Normal +Killing) +pod/(\S{1,253})\s"
    r"|^.{0,120}\b[EW]\d{4} [\d:.]{8,15} .{0,4000}\bpod=\"(?:[^\"/\s]{1,63}/)?([^\"/\s]{1,253})\""
)
# What tells that a pod began after all.
_BEGAN = re.compile(r"^\S{1,20} +Normal +(?:Started|Pulled) +pod/(\S{1,253})\s", re.MULTILINE)
_NO_IMAGE = "Failed to pull image"
# Pods of one replica each: Kubeflow's master is rank 0 and its workers follow.
_POD = re.compile(r"^(.{0,200}?)-(master|worker)-(\d{1,6})(?=[._/]|$)")
# How kubectl describe begins what it tells of an object; and how a list of objects does, as YAML.
_DESCRIBED = re.compile(r"^Name: {2,40}(\S{1,253})$", re.MULTILINE)
_ITEM = re.compile(r"^[- ]{0,8}kind: Pod$", re.MULTILINE)
_NAMED = re.compile(r"^ {2,12}name: [\"']?([a-z0-9][\w.-]{0,252})[\"']?$", re.MULTILINE)

# What kubectl logs --timestamps puts before lines.
TIME = re.compile(r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)? ")
# kubectl logs --prefix; and a variable of a pod's command, which it echoes.
_PREFIX = re.compile(r"^\[pod/([^\s/\]]{1,253})/[^\s\]]{1,63}\] ")
_VARIABLE = re.compile(r"(?<![A-Z_])RANK=(\d{1,6})\b")


def ranks_by_prefix(lines: Sequence[str], tagged: Sequence[tuple[int, str]] = ()) -> dict[str, int]:
    """Return the rank of each pod of which the lines that its name stands before tell one.

    A tag in them tells it, and else a variable of its command or the number of a job that has a master: those count
    where each pod that has a tag, too, says the same, and one of them that is not rank 0: the number of a pod with
    several ranks is no rank, and rank 0 often speaks for all.

    Args:
        lines: of a log, with their prefixes.
        tagged: the same with the ranks that their tags tell.
    """
    by_tag: dict[str, set[int]] = {}
    by_variable: dict[str, set[int]] = {}
    for at, line in enumerate(lines):
        if (found := _PREFIX.match(line)) is None:
            continue
        told = by_tag.setdefault(found[1], set())
        told |= {tagged[at][0]} - {-1} if tagged else set()
        if (variable := _VARIABLE.search(line)) is not None:
            by_variable.setdefault(found[1], set()).add(int(variable[1]))
    masters = {one[1] for name in by_tag if (one := _POD.match(name)) is not None and one[2] == "master"}
    by_number = {name: {rank} for name in by_tag if (rank := _rank_of(name, masters, {})) >= 0}
    known = {name: told for name, told in by_tag.items() if told}
    for more in (by_variable, by_number):
        both = [told == more[name] for name, told in known.items() if name in more]
        if all(both) and (not known or any(told != {0} for name, told in known.items() if name in more)):
            known = {**more, **known}
    owners = Counter(rank for told in known.values() for rank in told)
    return {name: min(told) for name, told in known.items() if len(told) == 1 and owners[min(told)] == 1}


def with_prefixes(lines: Sequence[str], tagged: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Give lines without a tag to the rank of the pod whose name stands before them."""
    known = ranks_by_prefix(lines, tagged)
    found = [_PREFIX.match(line) if rank < 0 else None for line, (rank, _) in zip(lines, tagged, strict=True)]
    return [
        (known[one[1]], TIME.sub("", line[one.end() :])) if one is not None and one[1] in known else (rank, bare)
        for line, one, (rank, bare) in zip(lines, found, tagged, strict=True)
    ]


def numbered(pieces: Sequence[Piece]) -> list[Piece]:
    """Number the pods of a job that has a master: it is rank 0, and worker N is rank N + 1."""
    found = [_POD.match(piece.path.name) or _POD.match(piece.path.parent.name) for piece in pieces]
    jobs = {one[1] for one in found if one is not None and one[2] == "master"}
    return [
        piece._replace(rank=0 if one[2] == "master" else int(one[3]) + 1)
        if one is not None and piece.rank < 0 and one[1] in jobs
        else piece
        for piece, one in zip(pieces, found, strict=True)
    ]


def described(pieces: Sequence[Piece], prefixed: Mapping[str, int]) -> list[Piece]:
    """Give what ``kubectl describe``, or a list of pods as YAML, tells of each pod to the rank that its name tells.

    The pods of a job count where its master has a log or is described, too, and else those that have logs.

    Args:
        pieces: of all files.
        prefixed: ranks of pods whose names stand before lines of a log.
    """
    whole: list[Piece] = []
    blocks = {
        at: _items(piece.text) if b"containerStatuses:" in piece.data else _blocks(piece.text)
        for at, piece in enumerate(pieces)
        if piece.rank < 0 and (b"Containers:" in piece.data or b"containerStatuses:" in piece.data)
    }
    if not any(blocks.values()):
        return list(pieces)
    names = [piece.path.name for piece in pieces] + [name for found in blocks.values() for name, _ in found]
    masters = {one[1] for name in names if (one := _POD.match(name)) is not None and one[2] == "master"}
    stems: dict[str, set[int]] = {}
    for piece in pieces:
        stems.setdefault(piece.path.name.partition(".")[0], set()).add(piece.rank)
    stems |= {name: {rank} for name, rank in prefixed.items()}
    for at, piece in enumerate(pieces):
        own: dict[int, list[str]] = {}
        for name, text in blocks.get(at, ()):
            own.setdefault(prefixed.get(name, _rank_of(name, masters, stems)), []).append(text)
        whole += [piece._replace(rank=rank, data="".join(texts).encode()) for rank, texts in own.items()]
        whole += [] if own else [piece]
    return whole


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return the descriptions of pods in a text, each with the pod's name."""
    begins = [*_DESCRIBED.finditer(text)]
    ends = [one.start() for one in begins[1:]] + [len(text)]
    return [
        (one[1], text[one.start() : end])
        for one, end in zip(begins, ends, strict=True)
        if "\nContainers:" in text[one.start() : end]
    ]


def _items(text: str) -> list[tuple[str, str]]:
    """Return the pods of a list of objects as YAML, each with the first name in it, which is the pod's."""
    parts = _ITEM.split(text)[1:]
    return [(named[1], part) for part in parts if (named := _NAMED.search(part)) is not None]


def _rank_of(name: str, masters: set[str], stems: Mapping[str, set[int]]) -> int:
    found = _POD.match(name)
    if found is not None and found[1] in masters:
        return 0 if found[2] == "master" else int(found[3]) + 1
    ranks = stems.get(name, set())
    return next(iter(ranks)) if len(ranks) == 1 else -1


def with_events(pieces: Sequence[Piece], prefixed: Mapping[str, int]) -> list[Piece]:
    """Give events of pods to the ranks of the logs that are named by them; those of several jobs are of no rank.

    A pod of a job with a master that has no log and whose image does not come is the rank that its name tells.
    """
    stems: dict[str, set[int]] = {}
    masters = {one[1] for piece in pieces if (one := _POD.match(piece.path.name)) is not None and one[2] == "master"}
    for piece in pieces:
        stems.setdefault(piece.path.name.partition(".")[0], set()).add(piece.rank)
    stems |= {name: {rank} for name, rank in prefixed.items()}
    whole: list[Piece] = []
    for piece in pieces:
        has_events = piece.rank < 0 and any(mark in piece.data for mark in (b"pod/", b' pod="'))
        lines = piece.text.splitlines() if has_events else []
        told = [_pod_of(line) for line in lines]
        pods = {*told} - {""}
        began = {*_BEGAN.findall(piece.text)} if lines else set()
        homes: dict[str, list[str]] = {}
        for pod in pods:
            for stem in stems:
                if pod == stem or (pod.endswith(f"-{stem}") and not stem.isdigit()):
                    homes.setdefault(stem, []).append(pod)
        owners = {
            named[0]: next(iter(stems[stem]))
            for stem, named in homes.items()
            if len(named) == 1 and len(stems[stem]) == 1 and min(stems[stem]) >= 0
        }
        absent = {pod: 1 + int(one[3]) for pod in pods - {*owners} - began if (one := _is_of(pod, masters)) is not None}
        # Who has a log has had its image in the end, and the image of another job's pod is no matter of this one.
        had = {*owners, *began} if not masters else pods - {*absent}
        kept = [line for line, pod in zip(lines, told, strict=True) if _NO_IMAGE not in line or pod not in had]
        shown = piece if len(kept) == len(lines) else piece._replace(data="\n".join(kept).encode())
        lines, owners = kept, {**owners, **absent}
        ranks = [owners.get(_pod_of(line), -1) for line in lines]
        for rank in sorted({*ranks} - {-1}):
            own = [line for line, whose in zip(lines, ranks, strict=True) if whose == rank]
            whole.append(Piece(piece.path, rank, "\n".join(own).encode()))
        rest = "\n".join(line for line, whose in zip(lines, ranks, strict=True) if whose < 0)
        if not {*ranks} - {-1}:
            whole.append(shown)
        elif rest.strip():
            whole.append(piece._replace(data=rest.encode()))
    return whole


def _pod_of(line: str) -> str:
    found = _EVENT.match(line)
    return (found[1] or found[2]) if found is not None else ""


def _is_of(pod: str, masters: set[str]) -> re.Match[str] | None:
    """Return how a pod is named where it is a worker of a job that has a master, None for any other one."""
    found = _POD.match(pod)
    return found if found is not None and found[1] in masters and found[2] == "worker" else None

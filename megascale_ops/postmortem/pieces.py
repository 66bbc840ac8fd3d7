# SPDX-License-Identifier: Apache-2.0
"""From files and folders to what each rank left, and to which rank it is that left it.

A file's rank stands in its name, in its folder (torchrun: ``attempt_0/3/stderr.log``), before its lines (``[rank3]:``
of torch, ``[default3]:`` of torchrun, ``3: `` of srun, ``[1,3]<stderr>:`` of mpirun), or in the command that a stack
begins with. Numbers that come twice in different folders are local ranks of nodes, in the order of the nodes' names.
What is a dump, a stack or a log is told by what is in it, never by its name.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megascale_ops.diagnosis.exits.last_words import weight_of
from megascale_ops.errors import UsageError
from megascale_ops.postmortem import pods, reading, tags
from megascale_ops.postmortem.piece import Piece

# 64 MB of all logs, and 256 KB of each at least: a log's end counts, and 16 MB take two to three seconds.
_MOST_OF_ALL, _LEAST_EACH = 64 * 1024 * 1024, 256 * 1024
# 2 files: the output and the errors of all ranks, as batch systems write them.
_FEW = 2
# 4 KB: dates stand in the first lines, where a log has any.
_BEGIN = 4096
# 16,384 files: a rank each of a job of 12,288 with room.
MOST_FILES = 16_384

_NAMED = (
    re.compile(r"(?:global|world)[_\-.]?rank[_\-.=]?(\d{1,6})", re.IGNORECASE),
    re.compile(r"(?<!local[_\-.])(?<!local)(?<!node[_\-.])rank[_\-. =]{0,2}(\d{1,6})", re.IGNORECASE),
    re.compile(r"(?:^|[_\-.])r(\d{1,6})(?=[_\-.]|$)"),
    re.compile(r"(?:local[_\-.]?rank|task|proc|worker|gpu|device)[_\-.=]?(\d{1,6})", re.IGNORECASE),
    re.compile(r"(?:trace|dump|stacks?)[_\-.]?(\d{1,4})(?=[_\-.]|$)", re.IGNORECASE),
    re.compile(r"^(\d{1,4})(?=[_\-.]|$)"),
    re.compile(r"(?:^|[_\-.])(\d{1,4})$"),
)
_BARE = 5  # from here on nothing but the number tells it
_ENDINGS = re.compile(r"\.(?:txt|log|out|err|stderr|stdout|stacks?|json|dump|pickle|pkl|bt|gdb|trace|pyspy|py-spy)+$")
# What was packed and what was put by when a log grew too long: rank3.log.2.gz is older than rank3.log.1.
_PACKED = re.compile(r"\.(?:gz|bz2|xz)$")
_ROTATED = re.compile(r"\.(?:log|txt|out|err)[.\-](\d{1,4})(?:\.(?:gz|bz2|xz))?$")
# A try of all ranks; torchrun and others keep the logs of each.
_ATTEMPT = re.compile(r"^(?:attempt|restart|try)[_\-]?(\d{1,6})$")
_FOLDER = re.compile(r"^(?:(?:rank|local_rank|worker|task)[_\-.]?)?(\d{1,6})$", re.IGNORECASE)
_OF_COMMAND = re.compile(r"(?<!local.)(?<!node.)\b(?:rank=|--rank )(\d{1,6})\b|\bRANK=(\d{1,6})\b")
# A folder of a rank, above those of its nodes or tries; and the five signs that Kubernetes appends to pods' names.
_OF_A_RANK = re.compile(r"(?:global[_-]?)?rank[_\-.=]?(\d{1,6})", re.IGNORECASE)
_OF_A_POD = re.compile(r"(?<=\d)-(?=.{0,4}[a-z])[bcdfghjklmnpqrstvwxz2456789]{5}$")
_COMMAND, _MOST_OF_COMMAND = re.compile(r"python|^Process \d|RANK="), 3
# torch before 2.3 says it within the line alone, as the place within a group.
_OF_WATCHDOG = re.compile(r"\[(?:PG [^\]]{0,120})?Rank (\d{1,6})\]")
_NODE = re.compile(
    r"(?:^|[_\-./])((?:node|host|worker|n|gpu-?node)[_\-]?\d{1,6}|ip(?:[_-]\d{1,3}){4}|\d{1,3}(?:\.\d{1,3}){3})"
    r"(?=[_\-./]|$)",
    re.IGNORECASE,
)
_WATCHDOG = re.compile(r"[Ww]atchdog|ProcessGroup|Timeout at NCCL")
_OF_ASCEND = re.compile(r"\bRankID:(\d{1,6})\b")
# A job's number, which Slurm writes into the name of a log that all ranks share.
_OF_JOB = re.compile(r"^slurm-\d{1,12}$")
# submitit writes the job's number before the task's; the outer script's log has no task.
_OF_SUBMITIT = re.compile(r"^\d{1,12}_(?:(\d{1,6})_)?log$")
# A number that stands where names of files differ.
_A_NUMBER = re.compile(r"\d{1,6}")
# 2 files of a shape whose lines tell that the rank is the number, or the number and as much each time.
_FEWEST_ALIKE = 2
# "step 7 loss 2.0 rank 5", as scripts print it; 256 KiB of a log's end are asked.
_SAYS_RANK = re.compile(r"(?<![\w-])(?:global_)?rank[=: ]{1,2}(\d{1,6})\b(?! ?/| of )")
_SAID_IN = 1 << 18
# Lightning, Megatron and others; fairseq; detectron2; variables of torchrun, Slurm and MPI; "rank 3 of 8"; Orbax, JAX.
_SAYS_ITSELF = re.compile(
    r"\b(?:GLOBAL_RANK|[Gg]lobal[ _-][Rr]ank|WORLD_RANK|[Ww]orld[ _-][Rr]ank)\b['\"]?[=: ]{1,3}(\d{1,6})\b"
    r"|\b(?:distributed init \(|initiali[sz]ed host \S{1,120} as |[Rr]ank of current process: )(?:rank )?(\d{1,6})\b"
    r"|(?:^|[\s;])(?:export )?(?:RANK|SLURM_PROCID|(?:OMPI_COMM_WORLD|PMIX?)_RANK)=(\d{1,6})\b"
    r"|(?<!local )(?<!node )\b(?:[Rr]ank|[Pp]rocess)[ =:]{0,2}(\d{1,6}) ?(?:/|of) ?\d{1,6}\b"
    r"|\[process=(\d{1,6})\]|\bprocess_index(?:\(\))?['\"]?[=: ]{1,3}(\d{1,6})\b"
)
# TensorFlow's and JAX's names of processes.
_A_TASK = re.compile(r"/job:(\w{1,80})/(?:replica:\d{1,9}/)?task:\d{1,9}")
# What JAX's logs have in them, and no others.
_OF_JAX = ("/job:jax_worker", "jax/_src/", "jaxlib.", "JAX distributed service", "xla_bridge.py")
# What numbers that are no ranks stand behind: nodes, and tries of the same rank.
_NO_RANK = re.compile(
    r"(?:node|host|worker|attempt|try|restart|epoch|step|version|run|round|part|port|iter)s?[_\-.]?$", re.IGNORECASE
)
_ONE_NUMBER = re.compile(r"^(\D{0,80})(\d{1,6})(\D{0,80})$")
# How a pickle, an object of JSON and a list of them begin; a log may begin with "[rank0]:", a date or {'loss': 2.0}.
_OTHER = re.compile(rb"\x80|\s*\{\s*[\"}]|\s*\[\s*[\[{\]]")


class Gathered(NamedTuple):
    """All pieces, and sentences about what could not be read or was guessed."""

    pieces: tuple[Piece, ...]
    notes: tuple[str, ...]
    begins: dict[Path, str]  # of each file, with all that stands before its lines


def find(paths: Sequence[Path]) -> list[Path]:
    """Return the files among paths and below folders, each once, in the order of their names.

    Raises:
        UsageError: a path that does not exist, or more files than a job leaves.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is nothing at {path}: give a file or a folder")
        inside = path.rglob("*") if path.is_dir() else [path]
        for one in sorted(inside, key=_order):
            if not one.is_dir() and not one.name.startswith("."):
                found[one] = None
            if len(found) > MOST_FILES:
                raise UsageError(f"{path} holds more than {MOST_FILES} files: give the folder of one job")
    return list(found)


def gather(files: Iterable[Path]) -> Gathered:
    """Read files, and tell whose they are."""
    pieces: list[Piece] = []
    notes: list[str] = []
    files, left = _newest(files)
    notes += left
    most = max(_LEAST_EACH, min(reading.MOST_BYTES, _MOST_OF_ALL // max(1, len(files))))
    cut: list[Path] = []
    binary: list[Path] = []
    read: dict[Path, bytes] = {}
    for path in files:
        try:
            data, is_cut, is_binary = reading.read(path, most)
        except OSError as error:
            notes.append(f"{path} can't be read: {error.strerror or error}")
            continue
        cut += [path] if is_cut else []
        binary += [path] if is_binary else []
        if data.strip() and not is_binary:
            read[path] = data
    names = _named_apart(list(read))
    for path, data in read.items():
        pieces += _split(path, data, names[path], is_alone=len(files) <= _FEW)
    if len(read) > 1 and _is_one_each(pieces):
        pieces = [piece for path, data in read.items() for piece in _split(path, data, names[path], is_alone=False)]
    notes += [f"of {_first_of(cut)} the last {most / 1e6:.1f} MB were read"] if cut else []
    notes += [f"left out, for no text and no dump: {_first_of(binary)}"] if binary else []
    prefixed = _prefixed(read.values())
    pieces = _as_their_likes(_by_their_lines(_as_tasks(pods.numbered(pods.described(pieces, prefixed)))))
    ranked, more = _with_nodes(_by_siblings(pods.with_events(pieces, prefixed)))
    begins = {path: data[:_BEGIN].decode("utf-8", "replace") for path, data in read.items()}
    return Gathered(tuple(ranked), (*notes, *more), begins)


def _prefixed(files: Iterable[bytes]) -> dict[str, int]:
    """Return the ranks of pods whose names stand before lines of logs."""
    texts = (data.decode("utf-8", "replace") for data in files if b"[pod/" in data)
    return {name: rank for text in texts for name, rank in tags.pods_in(text).items()}


def _is_one_each(pieces: Sequence[Piece]) -> bool:
    """Return whether each file has the lines of one rank, another in each: then what has no tag is that rank's, too."""
    ranks: dict[Path, set[int]] = {piece.path: set() for piece in pieces}
    for piece in pieces:
        ranks[piece.path] |= {piece.rank} - {-1}
    found = [next(iter(told)) for told in ranks.values() if len(told) == 1]
    return len(found) == len(ranks) == len(set(found))


def _first_of(paths: Sequence[Path]) -> str:
    return f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}"


def put_by(path: Path) -> int:
    """Return how often a log was put by since it was written, by its name; 0 for the one that is still written."""
    found = _ROTATED.search(path.name)
    return int(found[1]) if found is not None else 0


def _newest(files: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Return the files of the last attempt alone, where folders have one for each, and a sentence about the others."""
    files = list(files)
    tries = {
        path: max((int(found[1]) for part in path.parts if (found := _ATTEMPT.match(part))), default=-1)
        for path in files
    }
    last = max(tries.values(), default=-1)
    older = sorted({number for number in tries.values() if 0 <= number < last})
    kept = [path for path in files if tries[path] in (-1, last)]
    return kept, [f"only attempt {last} was judged: what came before it is over"] if older else []


def rank_of(path: Path) -> int:
    """Return the rank that a name tells, -1 where it tells none."""
    name = _bare_name(path)
    if _OF_JOB.match(name):
        return -1
    if found := _OF_SUBMITIT.match(name):
        return int(found[1] or -1)
    for form in _NAMED[:3]:
        if found := form.search(name):
            return int(found[1])
    folder = _FOLDER.match(path.parent.name)
    above = (_OF_A_RANK.fullmatch(part) for part in path.parts[-4:-2])
    told = folder if folder and not re.search(r"\d", name) else next((one for one in above if one is not None), None)
    if told is not None:
        return int(told[1])
    without_node = _NODE.sub("_", name)
    for at, form in enumerate(_NAMED[3:], 3):
        if found := form.search(without_node):
            is_counted = at >= _BARE and _NO_RANK.search(without_node[: found.start(1)]) is not None
            return -1 if is_counted else int(found[1])
    return int(folder[1]) if folder else -1


def _bare_name(path: Path) -> str:
    """Return a file's name without what tells its kind, and without what Kubernetes appends to a pod's."""
    name = _PACKED.sub("", path.name)
    while (shorter := _ENDINGS.sub("", name)) != name:
        name = shorter
    return _OF_A_POD.sub("", name)


def _named_apart(paths: Sequence[Path]) -> dict[Path, int]:
    """Return the rank that each name tells, -1 where it tells none.

    A number that all files of one shape share is no rank, as of a job or of how many ranks there are: then the one by
    which they differ is, where it counts from 0 and is not a node's or an attempt's.
    """
    found = {path: rank_of(path) for path in paths}
    alike: dict[str, list[Path]] = {}
    for path in paths:
        alike.setdefault(_shape(path), []).append(path)
    for files in alike.values():
        told = {found[path] for path in files}
        if len(files) < _FEWEST_ALIKE or len(told) > 1:
            continue
        numbers = {path: _A_NUMBER.findall(path.name) for path in files}
        before = _A_NUMBER.split(files[0].name)
        counted = [
            at
            for at in range(len(before) - 1)
            if {int(own[at]) for own in numbers.values()} == set(range(len(files))) and not _NO_RANK.search(before[at])
        ]
        for path in files:
            found[path] = int(numbers[path][counted[0]]) if len(counted) == 1 else -1
    return found


def _split(path: Path, data: bytes, named: int, *, is_alone: bool) -> list[Piece]:
    """Cut a log of several ranks apart, by what stands before its lines; a job's only files are those of all ranks."""
    is_other = _OTHER.match(data) is not None and b"\n{" not in data  # lines of JSON are a log
    text = "" if is_other else data.decode("utf-8", "replace")
    lines, is_global = tags.by_rank(text)
    ranks = sorted(rank for rank in lines if rank >= 0)
    if ranks == [named]:
        return [Piece(path, named, "\n".join(_untagged(text, lines)).encode())]
    if len(ranks) > 1 or (ranks and is_alone and (named < 0 or is_global)):  # the rest is the launcher's
        return [Piece(path, rank, "\n".join(lines[rank]).encode()) for rank in lines if "".join(lines[rank])]
    if ranks and (named < 0 or is_global):
        return [Piece(path, ranks[0], "\n".join(_untagged(text, lines)).encode())]
    if named < 0 and text:
        named = _of_command(text)
    if named < 0 and text:
        return _of_watchdogs(path, data, text, is_alone=is_alone)
    return [Piece(path, named, data)]


def _untagged(text: str, lines: dict[int, list[str]]) -> Iterator[str]:
    """Yield all lines of a text in their order, without the tags of the one rank that it is of."""
    bare = {rank: iter(found) for rank, found in lines.items()}
    (rank,) = (rank for rank in lines if rank >= 0)
    others = list(lines.get(-1, ()))
    at = 0
    for line in text.splitlines():
        if at < len(others) and others[at] == line:
            at += 1
            yield line
        else:
            yield next(bare[rank], line)


def _of_command(text: str) -> int:
    """Return the rank by the command that a log begins with, or by Ascend's errors, -1 without."""
    for line in text[:4096].splitlines()[:_MOST_OF_COMMAND]:
        if _COMMAND.search(line) and (told := _OF_COMMAND.search(line)) is not None:
            return int(told[1] or told[2])
    ascend = {int(number) for number in _OF_ASCEND.findall(text)} if "RankID:" in text else set()
    return ascend.pop() if len(ascend) == 1 else -1


def _of_watchdogs(path: Path, data: bytes, text: str, *, is_alone: bool) -> list[Piece]:
    """Cut a log apart by the ranks that NCCL's watchdogs name themselves, where nothing else does."""
    spoke: dict[int, list[str]] = {}
    for line in text.splitlines() if _WATCHDOG.search(text) else ():
        found = _OF_WATCHDOG.search(line) if _WATCHDOG.search(line) else None
        spoke.setdefault(int(found[1]) if found is not None else -1, []).append(line)
    ranks = [rank for rank in spoke if rank >= 0]
    if not ranks or (len(ranks) == 1 and not is_alone):
        return [Piece(path, ranks[0] if ranks else -1, data)]
    return [Piece(path, rank, "\n".join(lines).encode()) for rank, lines in sorted(spoke.items())]


def _as_tasks(pieces: Sequence[Piece]) -> list[Piece]:
    """Take the number behind the name of a job of TensorFlow's or JAX's for a rank, where the logs name its tasks."""
    jobs = {job for piece in pieces if piece.rank < 0 for job in _A_TASK.findall(piece.text)}
    names = {"host", "worker", "process", "task"} if _is_of_jax(pieces) else set()
    if len(jobs) + len(names) == 0 or len(jobs) > 1:
        return list(pieces)
    form = re.compile(rf"^(?:{'|'.join(sorted(jobs | names))})[_\-.]?(\d{{1,6}})\.\w{{1,8}}$", re.IGNORECASE)
    found = [form.match(piece.path.name) if piece.rank < 0 else None for piece in pieces]
    return [
        piece._replace(rank=int(one[1])) if one is not None else piece for piece, one in zip(pieces, found, strict=True)
    ]


def _is_of_jax(pieces: Sequence[Piece]) -> bool:
    """Return whether all logs are of JAX, which runs one process on a host: a host's number is its rank."""
    return all(piece.rank < 0 for piece in pieces) and any(words in piece.text for piece in pieces for words in _OF_JAX)


def _by_their_lines(pieces: Sequence[Piece]) -> list[Piece]:
    """Take for a log's rank what its own lines say: "rank 5" in lines of progress, or a sentence about itself.

    Only where no file has a rank otherwise, and each that says one says another, always the same.
    """
    if len(pieces) < _FEWEST_ALIKE or any(piece.rank >= 0 for piece in pieces):
        return list(pieces)
    for said_in in (_said_of_steps, _said_of_itself):
        told = [said_in(piece.text[-_SAID_IN:]) for piece in pieces]
        numbers = [next(iter(own)) for own in told if len(own) == 1]
        is_one_each = len(numbers) >= _FEWEST_ALIKE and len(set(numbers)) == len(numbers)
        if is_one_each and all(len(own) <= 1 for own in told):
            return [piece._replace(rank=next(iter(own), -1)) for piece, own in zip(pieces, told, strict=True)]
    return list(pieces)


def _said_of_steps(text: str) -> set[int]:
    """Return the ranks that lines of progress carry."""
    found = ((_SAYS_RANK.search(line), line) for line in text.splitlines() if "ank" in line)
    return {int(one[1]) for one, line in found if one is not None and weight_of(line) > 1}


def _said_of_itself(text: str) -> set[int]:
    """Return the ranks of the job that sentences and variables of frameworks and launchers tell."""
    return {int(one) for found in _SAYS_ITSELF.findall(text) for one in found if one}


def _as_their_likes(pieces: Sequence[Piece]) -> list[Piece]:
    """Take the number in a file's name for its rank where lines of its likes tell that theirs is, each of one rank."""
    ranks: dict[Path, set[int]] = {}
    for piece in pieces:
        ranks.setdefault(piece.path, set()).add(piece.rank)
    apart: dict[str, list[tuple[int, set[int]]]] = {}
    for path, told in ranks.items():
        if len(numbers := _A_NUMBER.findall(path.name)) == 1:
            apart.setdefault(_shape(path), []).append((int(numbers[0]), told))
    told_by: dict[str, int] = {}
    for shape, files in apart.items():
        known = [(number, told - {-1}) for number, told in files if told != {-1}]
        steps = {next(iter(own)) - number if len(own) == 1 else None for number, own in known}
        if len(known) >= _FEWEST_ALIKE and len(steps) == 1 and (step := steps.pop()) is not None:
            told_by[shape] = step
    return [
        piece._replace(rank=int(_A_NUMBER.findall(piece.path.name)[0]) + told_by[_shape(piece.path)])
        if piece.rank < 0 and ranks[piece.path] == {-1} and _shape(piece.path) in told_by
        else piece
        for piece in pieces
    ]


def _shape(path: Path) -> str:
    """Return the name of a file without its numbers, and where it lies."""
    return f"{path.parent}/{_A_NUMBER.sub('#', path.name)}"


def _by_siblings(pieces: Sequence[Piece]) -> list[Piece]:
    """Take the number in which the folders of files differ for their rank, where nothing at all tells one."""
    if len(pieces) < 2 or any(piece.rank >= 0 for piece in pieces):
        return list(pieces)
    found = [_ONE_NUMBER.match(piece.path.parent.name) for piece in pieces]
    shapes = {(one[1], one[3]) if one is not None else None for one in found}
    numbers = {one[2] for one in found if one is not None}
    if len(shapes) != 1 or None in shapes or len(numbers) < 2 or any(_NO_RANK.search(one[1]) for one in found if one):
        return list(pieces)
    return [piece._replace(rank=int(one[2])) for piece, one in zip(pieces, found, strict=True) if one is not None]


def _with_nodes(pieces: Sequence[Piece]) -> tuple[list[Piece], list[str]]:
    """Number local ranks through, where the same ones come from several nodes."""
    homes: dict[int, set[str]] = {}
    for piece in pieces:
        if piece.rank >= 0:
            homes.setdefault(piece.rank, set()).add(_home(piece.path))
    nodes = sorted({home for found in homes.values() for home in found}, key=lambda name: _order(Path(name)))
    is_local = len(nodes) > 1 and all(len(found) == len(nodes) for found in homes.values())
    if not is_local or "" in nodes:
        return list(pieces), []
    per_node = max(homes) + 1
    numbered = [
        piece._replace(rank=nodes.index(_home(piece.path)) * per_node + piece.rank) if piece.rank >= 0 else piece
        for piece in pieces
    ]
    return numbered, [f"ranks are numbered by node and local rank, {per_node} on each of {', '.join(nodes[:4])}"]


def _home(path: Path) -> str:
    """Return the node that a path names, "" for none."""
    found = _NODE.search(path.name) or _NODE.search(str(path.parent))
    return found[1].lower() if found else ""


def _order(path: Path) -> list[tuple[int, str]]:
    """Return a key by which names sort as people count."""
    parts = re.split(r"(\d{1,12})", str(path))
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]

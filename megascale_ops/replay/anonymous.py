# SPDX-License-Identifier: Apache-2.0
"""Make a recording anonymous: no name, path, address, serial number or text of the user's is left in it.

Every string of every message is replaced unless a rule says why not, so a field that is new is replaced too. The same
string becomes the same other one everywhere: node-1 stays the same node, ranks keep their numbers. Of free text the
words stay that our judges know (``vocabulary``), with its line structure and punctuation; any other word becomes w1, w2
and so on, and numbers of more than seven digits are counted likewise. Times, durations and counts stay.
"""

import re
import string
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from megascale_ops.controller.embedded import JobRecord
from megascale_ops.replay.files import Recording, jobs_of
from megascale_ops.replay.vocabulary import vocabulary
from megascale_ops.schema.health import HostReading
from megascale_ops.schema.identity import Mesh
from megascale_ops.schema.messages import Heartbeat
from megascale_ops.schema.progress import StepWork, Trail
from megascale_ops.schema.recording.entries import Beat, Entry, Header, Start

T = TypeVar("T")

JOB = "job"
# Eight digits and more name something: a serial number, a telephone number, a user. Counts of collectives have fewer.
_MOST_DIGITS = 7
_FEW_DIGITS = 4  # of a rank, a device, an error's number
_FEW = re.compile(r"[0-9]{1,4}")
# A path of at least two parts, an address, a word.
_PATH = r"(?<![\w/])(?:~|\.{1,2})?/(?:[\w.@+-]+/)+[\w.@+-]+"
_NO_NAME = r"\d{1,3}(?:\.\d{1,3}){3}|\w+"
# Of a path of a library what stands behind these tells a judge that it is none of the script's.
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|/third_party/|/torch/csrc/|/(?:aten|ATen|c10)/")
_SUFFIXES = (".py", ".so", ".cpp", ".cc", ".cu", ".h", ".log", ".pt")
_IPV4 = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
_ADDRESS = re.compile(r"(?P<host>\[[^\]]*\]|[^:]*)(?::(?P<port>\d{1,5}))?")  # what is neither is one host
# A thing may be as long as it was, or this: shorter than any field of the schema.
_LEAST_ROOM = 100
_ORDER = re.compile(r"(?P<job>.{1,110}):(?P<round>\d{1,10}):(?P<rest>outdated|superseded|\d{1,12}\.[0-9a-f]{1,16})")
_INCIDENT = re.compile(r"(?P<job>.{1,110})-(?P<number>\d{1,7})")
_SIZES = re.compile(r"\[[\d\[\], ]*\]|")
_VERSION = re.compile(r"\d{1,4}\.\d{1,4}(?:\.\d{1,4})?")  # an address has four parts
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0")  # noqa: S104  a name that stays
# 3 letters: a known name that is shorter is too common in texts to be looked for there.
_LEAST_NAME = 3

Rule = Callable[["Anonymiser", str], str]


class Anonymiser:
    """What became of each string, so that the same one becomes the same again. Owned by one recording."""

    def __init__(self, nodes: Mapping[str, None]) -> None:
        self._kept = vocabulary()
        self._names: dict[str, dict[str, str]] = {}  # by prefix
        for node in nodes:
            self.name("node-", node)
        self._known: dict[str, str] = {}
        self._tokens = re.compile(f"{_PATH}|{_NO_NAME}")

    def know(self, jobs: list[str]) -> None:
        """Take names that are replaced wherever they stand, in texts as well: jobs, and the nodes known by now."""
        for number, job in enumerate(jobs, start=1):
            self._names.setdefault(JOB, {})[job] = JOB if number == 1 else f"{JOB}{number}"
        for names in (self._names.get("node-", {}), self._names.get(JOB, {})):
            self._known.update({old: new for old, new in names.items() if len(old) >= _LEAST_NAME})
        if self._known:
            longest = sorted(self._known, key=len, reverse=True)
            any_name = r"(?<!\w)(?:" + "|".join(map(re.escape, longest)) + r")(?!\w)"
            self._tokens = re.compile(f"{_PATH}|{any_name}|{_NO_NAME}")

    def name(self, prefix: str, value: str) -> str:
        """Return the name that stands for another one: prefix and number, by when it was first met."""
        if not value:
            return value
        known = self._names.setdefault(prefix, {})
        if value not in known:
            known[value] = f"{prefix}{len(known) + 1}"
        return known[value]

    def job(self, value: str) -> str:
        """Return the name of a job."""
        known = self._names.setdefault(JOB, {})
        if value and value not in known:
            known[value] = f"{JOB}{len(known) + 1}"
        return known[value] if value else value

    def word(self, value: str) -> str:
        """Return a word of a table as it is, piece by piece where it has pieces; any other becomes a counted one."""
        if value in self._kept or not value:
            return value
        if all(piece in self._kept or _FEW.fullmatch(piece) for piece in value.split("_")):
            return value
        return self.name("word-", value)

    def order(self, value: str) -> str:
        """Return the name of an order; what the controller makes up of a job and a round is still that."""
        found = _ORDER.fullmatch(value)
        if found is None:
            return self.name("order-", value)
        rest = found["rest"]
        number, dot, epoch = rest.partition(".")
        rest = f"{number}.{self.name('', epoch)}" if dot else rest
        return f"{self.job(found['job'])}:{found['round']}:{rest}"

    def incident(self, value: str) -> str:
        """Return the name of an incident: its job's and its number."""
        found = _INCIDENT.fullmatch(value)
        return f"{self.job(found['job'])}-{found['number']}" if found is not None else self.name("incident-", value)

    def address(self, value: str) -> str:
        """Return an address, HOST or HOST:PORT: another host, the same port."""
        if not value:
            return value
        found = _ADDRESS.fullmatch(value)
        host, port = (found["host"], found["port"]) if found is not None else (value, None)
        return self._host(host.strip("[]")) + (f":{port}" if port is not None else "")

    def _host(self, host: str) -> str:
        if host in _LOOPBACK:
            return host
        known = self._names.setdefault("host", {})
        if host not in known:
            number = len(known) + 1
            known[host] = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        return known[host]

    def path(self, value: str) -> str:
        """Return a path: one that names nothing."""
        return self.name("/path-", value)

    def sizes(self, value: str) -> str:
        """Return sizes of a tensor as they are; what is none is text."""
        return value if _SIZES.fullmatch(value) else self.text(value)

    def text(self, value: str) -> str:
        """Return a text with the words that judges know, its numbers and its structure."""
        return self._tokens.sub(self._token, value)[: max(len(value), _LEAST_ROOM)]

    def _token(self, found: re.Match[str]) -> str:
        token = found[0]
        if "/" in token:
            return self._path_in_text(token)
        if token in self._known or token in self._kept:
            return self._known.get(token, token)
        if _IPV4.fullmatch(token):
            return self._host(token)
        if token.isascii() and token.isdigit():
            return token if len(token) <= _MOST_DIGITS else self._number(token)
        return token if self._is_made_of_words(token) else self.name("w", token)

    def _is_made_of_words(self, token: str) -> bool:
        """Return whether it is a known word with a small number behind it (rank3), or known words (all_reduce)."""
        bare = token.rstrip("0123456789")
        if bare in self._kept and len(token) - len(bare) <= _FEW_DIGITS:
            return True
        pieces = [piece for piece in token.split("_") if piece]
        return "_" in token and bool(pieces) and all(piece in self._kept for piece in pieces)

    def _path_in_text(self, path: str) -> str:
        """Return a path that names nothing, with what shows that it is a library's, and its kind of file."""
        library = _LIBRARY.search(path)
        if library is not None:
            return "/usr" + library[0] + re.sub(r"\w+", self._token, path[library.end() :])
        suffix = next((one for one in _SUFFIXES if path.endswith(one)), "")
        return self.path(path.removesuffix(suffix)) + suffix

    def _number(self, digits: str) -> str:
        """Return a counted number of as many digits."""
        known = self._names.setdefault("#", {})
        if digits not in known:
            known[digits] = str(10 ** (len(digits) - 1) + len(known) + 1)
        return known[digits]


def _name(prefix: str) -> Rule:
    return lambda one, value: one.name(prefix, value)


def _drop(_one: Anonymiser, _value: str) -> str:
    return ""


def _gpu(one: Anonymiser, value: str) -> str:
    return one.name("GPU-", value)


# By field; where the same field means two things, by struct and field. Any other string is a text.
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("job", "only_job"), Anonymiser.job),
    **dict.fromkeys(("node", "nodes"), _name("node-")),
    **dict.fromkeys(("agent_id", "runner_id", "runners", "join_id", "job_id", "process", "serves"), _name("id-")),
    **dict.fromkeys(("order", "done_orders", "after"), Anonymiser.order),
    "Order.id": Anonymiser.order,
    "Incident.id": Anonymiser.incident,
    **dict.fromkeys(("incident", "ended_incident"), Anonymiser.incident),
    **dict.fromkeys(("addr", "local", "remote", "addresses"), Anonymiser.address),
    "metrics": _drop,
    **dict.fromkeys(("run_dir", "path", "folder"), Anonymiser.path),
    **dict.fromkeys(("gpu", "gpus", "uuid"), _gpu),
    **dict.fromkeys(("serial", "serials"), _name("serial-")),
    **dict.fromkeys(("sizes", "outputs"), Anonymiser.sizes),
    **dict.fromkeys(
        (
            "fault", "kind", "state", "phase", "phases", "pattern", "severity", "check", "cause", "action", "outcome",
            "function", "dtype", "output_dtype", "marks", "last_words", "sure_of", "unit", "before",
        ),
        Anonymiser.word,
    ),
    "HardwareFinding.name": Anonymiser.word,
    "Finding.name": Anonymiser.word,
    "BadHardware.reason": Anonymiser.word,
    **dict.fromkeys(("Restart.cause", "StateFailure.cause"), Anonymiser.text),  # a class, or with its place
    "sending_to": Anonymiser.address,
    "Header.program": lambda one, value: value if _VERSION.fullmatch(value) else one.text(value),
    "Header.thinned": Anonymiser.word,
    }  # fmt: skip

# What has no text in it, and is most of a recording.
_NUMBERS_ONLY = (StepWork, HostReading, Mesh)


def anonymiser_of(recording: Recording) -> Anonymiser:
    """Return an anonymiser that knows the recording's job and nodes."""
    one = Anonymiser(_nodes(recording))
    one.know(_jobs(recording))
    return one


def anonymise(recording: Recording, one: Anonymiser | None = None) -> Recording:
    """Return a recording without anything that names the user's jobs, machines, people or code."""
    one = one or anonymiser_of(recording)
    header = msgspec.structs.replace(_walk(one, recording.header, ""), is_anonymous=True)
    assert isinstance(header, Header)
    return Recording(header, tuple(_entry(one, entry) for entry in recording.entries))


def _entry(one: Anonymiser, entry: Entry) -> Entry:
    changed = _walk(one, entry, "")
    if isinstance(changed, Start) and changed.records:
        made = {one.job(name): msgspec.Raw(_record(one, bytes(raw))) for name, raw in changed.records.items()}
        return msgspec.structs.replace(changed, records=made)
    return changed


def _record(one: Anonymiser, raw: bytes) -> bytes:
    """Return a job's record as the journal has it, without what names anything."""
    return msgspec.json.encode(_walk(one, msgspec.json.decode(raw, type=JobRecord), ""))


def _walk(one: Anonymiser, value: T, field: str, struct: str = "") -> T:
    """Return a value with every string in it replaced by its field's rule."""
    made: Any = value
    if isinstance(value, _NUMBERS_ONLY):
        return value
    if isinstance(value, msgspec.Struct):
        name = type(value).__name__
        changes = {}
        for key in value.__struct_fields__:
            old = getattr(value, key)
            if (new := _walk(one, old, key, name)) is not old:
                changes[key] = new
        if isinstance(value, Trail):
            changes["path"] = value.path if _is_trail(value) else ""
        made = msgspec.structs.replace(value, **changes) if changes else value
    elif isinstance(value, str):
        made = _rule(struct, field)(one, value)
    elif isinstance(value, tuple):
        items = tuple(_walk(one, item, field, struct) for item in value)
        made = items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    elif isinstance(value, dict) and field != "records":
        made = {_walk(one, key, f"{field}.key", struct): _walk(one, item, field, struct) for key, item in value.items()}
    return made  # type: ignore[no-any-return]  # of the same type


def _is_trail(trail: Trail) -> bool:
    """Return whether a path is letters of its phases and digits of its groups, and no text."""
    letters = string.ascii_lowercase[: len(trail.phases)]
    return set(trail.path) <= {*letters, *letters.upper(), *string.digits[: len(trail.groups)]}


@lru_cache(maxsize=1024)
def _rule(struct: str, field: str) -> Rule:
    return _RULES.get(f"{struct}.{field}") or _RULES.get(field) or Anonymiser.text


def _nodes(recording: Recording) -> dict[str, None]:
    """Return all nodes by the lowest rank that they ever had, so that node-1 has rank 0."""
    lowest: dict[str, int] = {}
    for heartbeat in _heartbeats(recording):
        ranks = [rank.rank for report in heartbeat.jobs for rank in report.ranks]
        lowest[heartbeat.node] = min([lowest.get(heartbeat.node, 1 << 30), *ranks])
    return dict.fromkeys(sorted(lowest, key=lambda node: (lowest[node], node)))


def _heartbeats(recording: Recording) -> Iterator[Heartbeat]:
    for entry in recording.entries:
        if isinstance(entry, Beat):
            yield entry.m
        elif isinstance(entry, Start):
            yield from (agent.m for agent in entry.agents)


def _jobs(recording: Recording) -> list[str]:
    named = [recording.header.job] if recording.header.job else []
    return [*named, *sorted(jobs_of(recording) - set(named))]

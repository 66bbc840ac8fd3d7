# SPDX-License-Identifier: Apache-2.0
"""Flight recorder dumps of several ranks, as torch writes them, from the bytes to the verdict.

``[given]``: ``version`` and ``form`` (json, pickle) of the dumps, ``groups`` (who is in each, as ``pg_config`` tells),
``ranks``: by "0-2", "3" or "0,4" what their recorders hold. An entry has ``name``, ``seq`` (or ``p2p``), ``in`` and
``out`` (sizes; ``out`` is as ``in`` unless told), ``dtype`` and ``out_dtype``, ``group``, ``started`` and ``ended``
(ns), and ``state`` where it has not ended. ``elsewhere`` says of ranks that wait in no collective what marks their
stack has. ``own_groups``: a dump tells only the groups its rank is in, as torch does; ``without`` and ``renamed`` are
keys that a version did not have or called otherwise.

``[right]``: ``fault``, ``ranks``, and if told ``least`` (confidence), ``most``, and ``says``, words of the sentence.
"""

import itertools
import json
import pickle
from collections import Counter
from typing import Any

import msgspec
import pytest
from megascale_agents.evidence import flight_recorder

from megascale_ops.schema.messages import EvidenceItem
from tests.fakes import drawn_hang
from tests.fakes.hung_job import judge_job, rank_view, stack_of
from tests.real.cases import Case, rows


def _ranks(text: str) -> list[int]:
    """Read "0-2" or "0,4"."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def _entry(number: int, told: dict[str, Any], form: str) -> dict[str, Any]:
    """One entry with all the keys that torch gives it."""
    group = told.get("group", "0")
    state = told.get("state", "completed")
    is_p2p = "p2p" in told
    started = told.get("started", 0) or (None if form == "pickle" else 0)
    sizes = told.get("in", [[8]])
    made = told.get("out", sizes)
    kind = told.get("dtype", "Float")
    return {
        "frames": [{"name": "step", "filename": "train.py", "line": 40}],
        "record_id": number,
        "pg_id": 0,
        "process_group": [group, told.get("desc", "default_pg" if group == "0" else "undefined")],
        "thread_name": "python",
        "thread_id": "140609723292544",
        "collective_seq_id": told.get("seq", 0),
        "p2p_seq_id": told.get("p2p", 0),
        "op_id": number + 1,
        "profiling_name": told["name"],
        "time_created_ns": 1_795_610_829_759_203_967 + number,
        "input_sizes": sizes,
        "input_dtypes": [kind] * len(sizes),
        "output_sizes": made,
        "output_dtypes": [told.get("out_dtype", kind)] * len(made),
        "state": state,
        "time_discovered_started_ns": started,
        "time_discovered_completed_ns": told.get("ended", 0) or (None if form == "pickle" else 0),
        "retired": told.get("retired", state == "completed" and not told.get("piece")),
        "timeout_ms": 600_000,
        "is_p2p": is_p2p,
        **{key: told[key] for key in ("input_split_sizes", "output_split_sizes") if key in told},
    }


def _keys_of_then(given: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """The same entry with the keys that the version of torch had."""
    names = given.get("renamed", {})
    return {names.get(key, key): value for key, value in entry.items() if key not in given.get("without", ())}


def _dump(given: dict[str, Any], rank: int, entries: list[dict[str, Any]]) -> bytes:
    """One rank's dump in its form."""
    form = given.get("form", "json")
    own = given.get("own_groups", False)
    groups = {name: ranks for name, ranks in given.get("groups", {}).items() if rank in ranks or not own}
    dump = {
        "version": given.get("version", "2.10"),
        "pg_config": {
            name: {"name": name, "desc": "default_pg" if name == "0" else "undefined", "ranks": str(ranks)}
            for name, ranks in groups.items()
        }
        or {"": {"name": "", "desc": "", "ranks": "[]"}},
        "pg_status": {"0": {"last_enqueued_collective": "41", "last_completed_collective": "40"}},
        "entries": [_keys_of_then(given, _entry(number, told, form)) for number, told in enumerate(entries)],
    }
    return pickle.dumps(dump, protocol=2) if form == "pickle" else json.dumps(dump).encode()


def _evidence(given: dict[str, Any]) -> list[EvidenceItem]:
    """What agents hand in of all ranks."""
    items = []
    elsewhere = {rank: marks for text, marks in given.get("elsewhere", {}).items() for rank in _ranks(text)}
    for text, entries in given["ranks"].items():
        for rank in _ranks(text):
            found = flight_recorder.parse(_dump(given, rank, entries))
            recorded = EvidenceItem("flight_recorder", ok=True, collectives=found.collectives, groups=found.groups)
            marks = elsewhere.get(rank, ["in_collective"])
            frames = ("load (train.py:12)",) if rank in elsewhere else ()
            items += [msgspec.structs.replace(one, rank=rank) for one in (recorded, stack_of(*marks, frames=frames))]
    return items


@pytest.mark.parametrize("case", rows("flight_recorder"))
def test_dumps_of_others_are_judged_right(case: Case) -> None:
    """From the bytes of every rank's dump to class and ranks."""
    evidence = _evidence(case.given)
    ranks = sorted({item.rank for item in evidence} | set(range(case.given.get("world", 0))))
    absent = {rank for text in case.given.get("elsewhere", {}) for rank in _ranks(text)}

    found = judge_job([rank_view(rank, waits=rank not in absent, known=False) for rank in ranks], evidence).verdict

    assert (found.fault, found.culprits) == (case.right["fault"], tuple(case.right["ranks"])), found.reason
    assert case.right.get("least", 0.0) <= found.confidence <= case.right.get("most", 1.0), found.reason
    assert case.right.get("says", "") in found.reason


def test_there_are_enough_of_them() -> None:
    """At least 25 inputs of several ranks each, and a good part of them of jobs in which no rank is to blame."""
    all_of_them = rows("flight_recorder")

    assert len(all_of_them) >= 25
    assert all(len({rank for text in row.values[0].given["ranks"] for rank in _ranks(text)}) > 1 for row in all_of_them)
    assert sum(not row.values[0].right["ranks"] for row in all_of_them) >= 8


def test_dumps_of_drawn_jobs_are_judged_right() -> None:
    """Most of 150; a wrong rank is named for sure only where it left no dump, or a short history misleads."""
    score: Counter[str] = Counter()
    drawn = filter(None, map(drawn_hang.draw, range(7_000, 8_000)))
    for hang in itertools.islice(drawn, 150):
        absent = {int(rank) for rank in hang.given["elsewhere"]}
        views = [rank_view(rank, waits=rank not in absent, known=False) for rank in range(hang.world)]
        found = judge_job(views, _evidence(hang.given)).verdict
        if found.culprits == (hang.culprit,) and found.fault in hang.classes:
            score["right"] += 1
        elif found.confidence >= 0.9 and found.culprits:
            score["without a dump" if found.culprits == (hang.without_dump,) else "wrong"] += 1

    assert score["right"] >= 128, score
    assert score["wrong"] <= 2, score
    assert score["without a dump"] <= 3, score

# SPDX-License-Identifier: Apache-2.0
"""Pickled flight recorder dumps are read, and nothing that stands in one is run or fills the memory."""

import json
import os
import pickle
import struct
from typing import Any

import pytest
from megascale_agents.evidence import dump_pickle, flight_recorder

ENTRY = {
    "profiling_name": "nccl:all_reduce",
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 7,
    "input_sizes": [[4, 4]],
    "input_dtypes": ["Float"],
    "time_discovered_started_ns": None,
    "retired": False,
    "time_created_ns": 1_795_610_829_759_203_967,
    "frames": [{"name": "step", "filename": "train.py", "line": 40}],
}


class Runs:
    """Unpickled by the plain pickle module it makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_tells_the_same_as_json(protocol: int) -> None:
    """Tuples, None and large numbers included."""
    dump = {"version": "2.4", "pg_config": {"0": {"name": "0", "ranks": "[0, 1]"}}, "entries": [ENTRY]}

    pickled = flight_recorder.parse(pickle.dumps(dump, protocol=protocol))

    assert pickled == flight_recorder.parse(json.dumps(dump).encode())
    assert [(fact.function, fact.seq) for fact in pickled.collectives] == [("all_reduce", 7)]


def test_what_a_pickle_names_is_not_run(tmp_path: pytest.TempPathFactory) -> None:
    """The rank's user may write what he likes; the agent may be root."""
    wanted = f"{tmp_path}/made"

    with pytest.raises(ValueError, match="which no flight recorder's dump has"):
        flight_recorder.parse(pickle.dumps({"entries": [Runs(wanted)]}, protocol=2))

    assert not os.path.exists(wanted)  # noqa: PTH110  one look


def test_three_bytes_reserve_no_memory() -> None:
    """A place far beyond in what is remembered would have all up to there allocated: 32 GB."""
    bomb = b"\x80\x02]r" + struct.pack("<I", 2**31 - 1) + b"."

    with pytest.raises(ValueError, match="as number 2147483647"):
        dump_pickle.as_json(bomb)


def test_a_list_of_lists_of_itself_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty lists of ten times the one before are some hundred bytes, and 10^20 values."""
    monkeypatch.setattr(dump_pickle, "MOST_VALUES", 40_000)  # a hundredth: 4 million are seconds of counting
    grown: list[Any] = [1]
    for _ in range(20):
        grown = [grown] * 10
    around: list[Any] = []
    around.append(around)

    with pytest.raises(ValueError, match="more than 40000 values"):
        dump_pickle.as_json(pickle.dumps({"entries": grown}))
    with pytest.raises(ValueError, match="it stands in itself"):
        dump_pickle.as_json(pickle.dumps({"entries": around}))


@pytest.mark.parametrize("cut", range(1, 120, 7))
def test_a_pickle_cut_short_is_no_dump(cut: int) -> None:
    """A full disk, a rank that died while it wrote."""
    whole = pickle.dumps({"entries": [ENTRY]}, protocol=2)

    with pytest.raises(ValueError, match="not a flight recorder dump"):
        flight_recorder.parse(whole[:cut] if whole[:cut] != whole else b"")

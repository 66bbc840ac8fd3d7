# SPDX-License-Identifier: Apache-2.0
"""The same timeline as Chrome's JSON: complete events that nest, arrows with both ends, names for all tracks."""

import json
from pathlib import Path
from typing import Any

import msgspec

from megascale_ops.trace.rank_records import make_rank_records
from megascale_ops.trace.writing import write
from tests.fakes.recorded_job import recorded_job
from tests.unit.trace.test_perfetto_file import picture


def loaded(folder: Path, nodes: str = "ab", **job: Any) -> dict[str, Any]:  # noqa: ANN401  as recorded_job
    """Write a job and read the JSON, refusing what JSON does not know."""
    all_records = recorded_job(nodes, **job)
    all_records[0] = make_rank_records(
        all_records[0].identity,
        [msgspec.structs.replace(all_records[0].steps[0], loss=float("nan")), *all_records[0].steps[1:]],
        all_records[0].spans,
    )
    path = folder / "toy.json"
    write(path, "chrome", picture(all_records).draw, range(len(all_records)), 20, 10**9)
    found: dict[str, Any] = json.loads(
        path.read_text(), parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name))
    )
    return found


def test_every_arrow_has_both_its_ends_inside_a_slice(tmp_path: Path) -> None:
    """They begin (s) on the last rank and end (f) on a victim, forward in time, each within a slice of its thread."""
    events = loaded(tmp_path, "aabb", steps=10)["traceEvents"]

    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(begins) == 10 * 3
    assert begins.keys() == ends.keys()
    slices = [event for event in events if event["ph"] == "X"]
    for event in (*begins.values(), *ends.values()):
        assert any(
            one["tid"] == event["tid"] and one["ts"] <= event["ts"] <= one["ts"] + one["dur"] + 0.001 for one in slices
        )
    assert all(ends[number]["ts"] >= begin["ts"] for number, begin in begins.items())
    assert all(ends[number]["pid"] != begin["pid"] for number, begin in begins.items())


def test_groups_and_tracks_have_names_and_an_order(tmp_path: Path) -> None:
    """Processes are ranks, threads their tracks; counters name themselves."""
    events = loaded(tmp_path)["traceEvents"]

    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert [names[pid].partition(" (")[0] for pid in sorted(order, key=lambda pid: order[pid])] == [
        "job toy", "rank 0", "rank 1",
    ]  # fmt: skip
    threads = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in events if event["ph"] in "Xisf"} <= threads
    assert {event["name"] for event in events if event["ph"] == "C"} == {"step time", "waiting share", "loss"}


def test_waiting_and_moving_lie_within_their_collective(tmp_path: Path) -> None:
    """Times are microseconds with three decimals, so nothing sticks out by rounding."""
    events = loaded(tmp_path, steps=3, late={0: 0.0, 1: 20.0})["traceEvents"]

    mine = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    outer = [event for event in mine if event["name"] == "all_reduce"]
    inner = [event for event in mine if event["name"] in ("waiting", "moving") and event["tid"] == outer[0]["tid"]]
    assert [event["dur"] for event in inner] == [20_000.0, 2_000.0] * 3
    for place, whole in enumerate(outer):
        waiting, moving = inner[2 * place : 2 * place + 2]
        assert waiting["ts"] == whole["ts"]
        assert round(moving["ts"] + moving["dur"], 3) == round(whole["ts"] + whole["dur"], 3)
        assert whole["args"] == {
            "communicator": "0", "bytes": 4096, "last arrival": "rank 1", "seen on ranks": 2, "seq": place,
        }  # fmt: skip


def test_what_it_is_about_stands_in_it(tmp_path: Path) -> None:
    """Clocks and choice, as in the other format."""
    other = loaded(tmp_path, steps=5)["otherData"]

    assert other["ranks"] == "ranks 0-1 (asked for)"
    assert other["clock residual p99, ns"] == 0

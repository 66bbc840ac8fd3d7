# SPDX-License-Identifier: Apache-2.0
"""Nodes that measure the ways between them: threads of one process that meet in a real store, over real sockets."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from megascale_ops.cli.main import main
from megascale_ops.diagnostics.between import meeting
from megascale_ops.diagnostics.between.meeting import Measure, Place, take_part
from megascale_ops.diagnostics.between.streams import SECRET_BYTES, Listener, Way, measure
from megascale_ops.diagnostics.report import PairsReport
from megascale_ops.errors import MegascaleError
from tests.processes.launch import free_port

pytestmark = pytest.mark.processes
NODES = 6
GOOD = Way(10e9, 10e9, 20e-6)


@pytest.fixture(autouse=True)
def _environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a node sets for its own process would have this worker's later programs started cold."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")


def meet(measuring: Callable[[str], Measure], switches: tuple[str, ...] = ("",) * NODES) -> list[PairsReport]:
    """Let nodes n0, n1, ... take their parts at once; ``measuring`` gives what a node measures with, by its name."""
    port = free_port()
    places = [
        Place(("127.0.0.1", port), rank, len(switches), f"n{rank}", switch, f"127.0.0.{rank + 1}", 0.05)
        for rank, switch in enumerate(switches)
    ]
    with ThreadPoolExecutor(len(places)) as threads:
        parts = [threads.submit(take_part, one, lambda *_: None, measuring(one.name)) for one in places]
        return [part.result(90) for part in parts]


def host_of(name: str) -> str:
    """Return the address of a node."""
    return f"127.0.0.{int(name[1:]) + 1}"


def test_the_way_between_two_sides_is_measured() -> None:
    """Bytes go there and come back, and a byte's round trip is a time; one without the secret is given nothing."""
    secret = os.urandom(SECRET_BYTES)
    listener = Listener(secret, 30.0)
    try:
        way = measure(("127.0.0.1", listener.port), secret, 0.05, 30.0)
        with pytest.raises((OSError, ValueError)):
            measure(("127.0.0.1", listener.port), os.urandom(SECRET_BYTES), 0.05, 30.0)
    finally:
        listener.close()

    assert way.there_bytes_s > 0
    assert way.back_bytes_s > 0
    assert 0 < way.round_trip_s < 1
    with pytest.raises(OSError, match="refused"):
        measure(("127.0.0.1", listener.port), secret, 0.05, 5.0)


def test_six_good_nodes_need_one_round() -> None:
    """Over real sockets; every node hears the same, with a figure of each pair."""
    reports = meet(lambda _name: lambda *given: GOOD._replace(round_trip_s=measure(*given).round_trip_s))

    assert all(report == reports[0] for report in reports)
    assert (reports[0].rounds, reports[0].tests) == (1, 3)
    assert (reports[0].bad_nodes, reports[0].bad_links, reports[0].unclear, reports[0].failed) == ((), (), {}, {})
    assert len([one for one in reports[0].figures if one.name == "pair_rate"]) == 3


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "slow"])
def test_a_node_whose_ways_are_bad_is_named(is_cut: bool) -> None:
    """Whether nothing comes through or half as much: it alone, on every node's report."""

    def measuring(name: str) -> Measure:
        def look(address: tuple[str, int], *_given: object) -> Way:
            if "n2" not in (name, next(f"n{at}" for at in range(NODES) if host_of(f"n{at}") == address[0])):
                return GOOD
            if is_cut:
                raise TimeoutError("timed out")
            return Way(5e9, 10e9, 20e-6)

        return look

    reports = meet(measuring)

    for report in reports:
        assert (report.bad_nodes, report.bad_links) == (("n2",), ())
        assert bool(report.failed) == is_cut


def test_a_way_that_was_bad_for_a_moment_is_measured_again() -> None:
    """Between two good nodes a bad way is named when it stays bad; the first time may be anything's fault."""

    def measuring_for(times: int) -> Callable[[str], Measure]:
        seen: list[str] = []

        def measuring(name: str) -> Measure:
            def look(address: tuple[str, int], *_given: object) -> Way:
                if {name, f"n{int(address[0].rpartition('.')[2]) - 1}"} != {"n0", "n1"} or len(seen) >= times:
                    return GOOD
                seen.append(name)
                return Way(2e9, 2e9, 20e-6)

            return look

        return measuring

    passing, lasting = meet(measuring_for(1))[0], meet(measuring_for(99))[0]

    assert (passing.bad_links, passing.bad_nodes) == ((), ())
    assert (lasting.bad_links, lasting.bad_nodes) == ((("n0", "n1"),), ())
    assert passing.tests < lasting.tests


def test_a_node_that_does_not_come_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number, after the time that it has; and a follower whose node 0 is not there ends, too."""
    monkeypatch.setattr(meeting, "_COMING_S", 1.0)
    place = Place(("127.0.0.1", free_port()), 0, 3, "n0", "", "127.0.0.1", 0.05)
    before = set(threading.enumerate())  # other tests' in this worker

    with pytest.raises(MegascaleError, match=r"2 of 3 nodes did not come within 1 s \(--node-rank 1, 2\)"):
        take_part(place, lambda *_: None)
    with pytest.raises(MegascaleError, match="is node 0 there"):
        take_part(place._replace(host=("127.0.0.1", free_port()), rank=1), lambda *_: None)
    assert len(set(threading.enumerate()) - before) < 20


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--between", "nowhere"), "is no HOST:PORT"),
        (("--between", "a:0"), "is no HOST:PORT"),
        (("--between", "127.0.0.1:7000"), "needs --nnodes N and --node-rank N"),
        (("--between", "127.0.0.1:7000", "--nnodes", "2", "--node-rank", "2"), "is not below --nnodes 2"),
        (("--between", "127.0.0.1:7000", "--check", "cpu"), "leave --check out"),
    ],
)
def test_a_wrong_line_is_one_sentence(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, before anything is measured."""
    monkeypatch.delenv("SLURM_NNODES", raising=False)
    monkeypatch.delenv("SLURM_NODEID", raising=False)

    assert main(["diagnose", *arguments]) == 2

    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1

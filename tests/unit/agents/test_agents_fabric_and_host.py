# SPDX-License-Identifier: Apache-2.0
"""Adapters, pressure, processes that hang, disks: read from a tree of files, judged with their numbers."""

import os
from pathlib import Path

import pytest
from megascale_agents.collectors import blocked, disks, infiniband, pressure
from megascale_agents.collectors.collector import NotHereError, Place
from megascale_agents.collectors.disks import Space
from megascale_agents.hardware.fabric_watch import PortWatch
from megascale_agents.hardware.findings import HELD_S
from megascale_agents.hardware.watches import CollectorWatch

from tests.fakes.hardware import FakeMachine


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    """Two adapters that are up."""
    return FakeMachine(tmp_path)


def test_a_port_is_told_in_base_units(machine: FakeMachine) -> None:
    """Octets, not words of four; bytes a second, not gigabits."""
    machine.port("mlx5_0", port_rcv_data=100, port_xmit_data=200, symbol_error=3, np_cnp_sent=4, link_downed=2)

    port, other = infiniband.parse(infiniband.read(str(machine.sys)).ports)

    assert (port.device, port.port, port.is_up, port.state) == ("mlx5_0", "1", True, "ACTIVE")
    assert port.rate_bytes_s == 50e9
    assert (port.received_bytes, port.transmitted_bytes, port.downed) == (400, 800, 2)
    assert (port.errors["symbol"], port.congestion["cnp_sent"]) == (3, 4)
    assert other.device == "mlx5_1"


def test_counters_that_an_adapter_does_not_have_are_left_out(machine: FakeMachine) -> None:
    """Adapters of other makers have other files; what one of them can't tell is unknown, and not zero."""
    at = machine.sys / "class/infiniband/mlx5_0/ports/1"
    (at / "hw_counters/np_cnp_sent").unlink()
    (at / "counters/symbol_error").write_text("N/A\n")
    (at / "rate").write_text("\n")

    port, _ = infiniband.parse(infiniband.read(str(machine.sys)).ports)

    assert "cnp_sent" not in port.congestion
    assert port.congestion["out_of_sequence"] == 0
    assert "symbol" not in port.errors
    assert port.rate_bytes_s is None


def test_a_port_that_was_up_is_missed_and_one_that_never_was_is_not(machine: FakeMachine) -> None:
    """Unused ports are down on every node; a link that dies in a job is a failure."""
    machine.port("mlx5_1", state="1: DOWN")
    watch = PortWatch(str(machine.sys))
    quiet = watch.ingest_reading(watch.read(), 0.0)
    machine.port("mlx5_0", state="1: DOWN")

    (found,) = watch.ingest_reading(watch.read(), 10.0)

    assert quiet == []
    assert (found.severity, found.text) == ("fail", "mlx5_0 port 1 is DOWN (Polling) and was active before")


def test_a_link_that_went_down_and_came_back_is_told_for_ten_minutes(machine: FakeMachine) -> None:
    """Then it is forgotten by itself; what it counted before the agent began is none of it."""
    machine.port("mlx5_0", link_downed=7)
    watch = PortWatch(str(machine.sys))
    before = watch.ingest_reading(watch.read(), 0.0)
    machine.port("mlx5_0", link_downed=9)
    flapped = watch.ingest_reading(watch.read(), 10.0)
    machine.port("mlx5_0", link_downed=10)
    again = watch.ingest_reading(watch.read(), 400.0)

    later = watch.ingest_reading(watch.read(), 10.0 + HELD_S + 1.0)
    over = watch.ingest_reading(watch.read(), 400.0 + HELD_S + 1.0)

    assert (before, over) == ([], [])
    assert [one.text.split(" went ")[1].split(" in ")[0] for one in (*flapped, *again, *later)] == [
        "down 2 times", "down 3 times", "down 1 times",
    ]  # fmt: skip


def test_a_node_without_adapters_has_nothing_to_look_at(tmp_path: Path) -> None:
    """The check is off; that is no failure."""
    with pytest.raises(NotHereError, match="no InfiniBand"):
        PortWatch(str(tmp_path)).read()


def test_pressure_is_a_share_and_kills_are_counted(machine: FakeMachine) -> None:
    """A fifth of the time waiting for memory is a finding, a busy processor is none."""
    machine.pressure(memory=35.0, oom_kills=4)
    value = pressure.parse(pressure.read(Place(str(machine.proc))))

    (found,) = pressure.judge(value, 5.0)

    assert value == pressure.Pressure({"memory": 0.35, "io": 0.015, "cpu": 0.2}, 4)
    assert found.text == "processes of this host waited for memory in 35% of the last 10 s"


def test_a_kernel_without_pressure_counts_kills_all_the_same(machine: FakeMachine, tmp_path: Path) -> None:
    """psi=0 takes the shares away, nothing else; no /proc at all is no check."""
    for name in ("memory", "io", "cpu"):
        (machine.proc / "pressure" / name).unlink()

    assert pressure.parse(pressure.read(Place(str(machine.proc)))) == pressure.Pressure({}, 0)
    assert pressure.parse({"vmstat": "nr_free_pages 1\n"}).oom_kills == -1
    with pytest.raises(NotHereError):
        pressure.read(Place(str(tmp_path / "none")))


def test_only_who_is_still_in_state_d_hangs(machine: FakeMachine) -> None:
    """Every write passes through D; a pid that was given to another process is another process."""
    watch = CollectorWatch("blocked", lambda: Place(str(machine.proc)))
    machine.process(10, "dd", "D")
    machine.process(11, "python (x) y", "D")
    machine.process(12, "sleep", "S")
    first = watch.ingest_reading(watch.read(), 0.0)
    machine.process(10, "dd", "R")
    stat = machine.proc / "12" / "stat"
    machine.process(12, "nfs", "D")

    (found,) = watch.ingest_reading(watch.read(), 15.0)
    stat.write_text(stat.read_text().replace(" 1012 ", " 9999 "))
    again = watch.ingest_reading(watch.read(), 30.0)

    assert first == []
    assert found.text == "python (x) y (11) in state D at two looks 15 s apart"
    assert found.pids == (11,)
    assert [one.pids for one in again] == [(11,)]
    assert watch.samples == (("megascale_host_blocked_processes", (), 2.0),)
    assert set(blocked.parse(blocked.read(Place(str(machine.proc))), None).now.values()) == {"python (x) y", "nfs"}


def test_a_collector_whose_source_is_not_there_is_off() -> None:
    """No file, no check: a collector of the table need not say so itself."""
    with pytest.raises(NotHereError, match="there is no /none"):
        CollectorWatch("blocked", lambda: Place("/none")).read()


def test_this_machine_can_be_walked_through() -> None:
    """A real /proc: nothing raises, and we are not blocked."""
    found = blocked.parse(blocked.read(Place()), None)

    assert os.getpid() not in {pid for pid, _ in found.now}
    with pytest.raises(OSError, match="none"):
        blocked.read(Place("/none"))


@pytest.mark.parametrize(
    ("left", "inodes", "severities"),
    [
        (0.5, 0.5, []),
        (0.049, 0.5, ["warn"]),
        (0.009, 0.5, ["fail"]),
        (0.5, 0.02, ["warn"]),
        (0.001, 0.001, ["fail", "fail"]),
        (0.5, -1.0, []),
    ],
)
def test_little_space_is_told_before_there_is_none(left: float, inodes: float, severities: list[str]) -> None:
    """Bytes and inodes apart: a run folder of small files runs out of the second first."""
    found = disks.judge([Space("run", "/runs/a", left, inodes)], 10.0)

    assert [one.severity for one in found] == severities
    assert all("/runs/a" in one.text for one in found)


def test_real_disks_have_shares(tmp_path: Path) -> None:
    """Of the run folder once there is one; a folder that is not there yet is left out."""
    place = Place(box_root=str(tmp_path / "not-yet"))

    before = disks.parse(disks.read(place))
    spaces = disks.parse(disks.read(place._replace(run_dir=str(tmp_path))))

    assert {space.kind for space in before} == {"root"}
    assert {space.kind for space in spaces} == {"root", "run"}
    assert all(0.0 <= space.bytes_free <= 1.0 for space in spaces)
    assert disks.parse({}) == ()

# SPDX-License-Identifier: Apache-2.0
"""What the checks of the host say of numbers, and what they read of a machine that is not this one."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Self, cast

import pytest

from megascale_ops.diagnostics import child
from megascale_ops.diagnostics.check import CheckModule, Reading, Task, UnmeasuredError
from megascale_ops.diagnostics.host import (
    clock,
    control_group,
    cpu,
    disk,
    file_systems,
    kernel_log,
    limits,
    memory,
    numa,
    rdma,
    swap,
)
from megascale_ops.diagnostics.judgement import result_of
from megascale_ops.diagnostics.report import CheckFinding, Fact, Figure


def reading(*figures: Figure, facts: tuple[Fact, ...] = ()) -> Reading:
    """Return a reading of these."""
    return Reading(figures, facts)


def of_node(**values: float) -> Reading:
    """Return a reading of the node's figures."""
    return Reading(tuple(Figure(name, "node", value) for name, value in values.items()))


def severities(findings: list[CheckFinding]) -> list[str]:
    """Return how bad each is."""
    return [one.severity for one in findings]


def test_a_slow_core_is_named_and_a_busy_one_is_noted() -> None:
    """A core at half the others' rate is a warning; one that other work shares is none."""
    cores = [Figure("cpu_hash", f"CPU {number}", 2e9, (2e9,) * 5, "EPYC") for number in range(7)]
    slow = Figure("cpu_hash", "CPU 7", 1e9, (1e9,) * 5, "EPYC")
    shares = [Figure("cpu_share", f"CPU {number}", 0.3 if number == 2 else 1.0) for number in range(8)]

    result = result_of(cpu.CHECK, reading(*cores, slow, *shares), cpu.judge, 1.0)

    assert (result.status, severities(list(result.findings))) == ("warn", ["warn", "note"])
    assert (
        "CPU 7: SHA-256 on one core 1 GB/s, 50.0% less than the median of the 7 others, 2 GB/s"
        in result.findings[0].text
    )
    assert "CPU 2 gave the check 30%" in result.findings[1].text


def test_cores_that_seem_slow_are_measured_again() -> None:
    """By their best: one bad sample is nothing; of many that are slow the slowest go first."""
    rates = {core: [2.0, 2.0] for core in range(60)} | {60: [1.0, 1.99], 61: [1.5, 1.2], 62: [0.5, 1.4], 63: []}

    assert cpu.seems_slow(rates) == [62, 61]
    assert cpu.seems_slow({0: []}) == []


def test_memory_that_others_used_meanwhile_is_not_compared() -> None:
    """Its figure has no peers then, and a note says why."""
    found = memory.judge(reading(Figure("cpu_share", "NUMA node 1", 0.4)))

    assert severities(found) == ["note"]
    assert "60% of a core" in found[0].text
    assert memory.judge(reading(Figure("cpu_share", "NUMA node 1", 0.99))) == []


def test_damage_and_slowness_of_a_disk() -> None:
    """One damaged block is bad; 50 MB/s, and syncs of 3 s, are warnings; a good disk is neither."""
    good = (Figure("disk_write", "/d", 2e9), Figure("disk_damaged", "/d", 0.0), Figure("disk_sync_p99", "/d", 0.01))

    assert disk.judge(reading(*good)) == []
    assert severities(disk.judge(reading(good[0], Figure("disk_damaged", "/d", 1.0)))) == ["bad"]
    found = disk.judge(reading(Figure("disk_write", "/d", 50e6), Figure("disk_sync_p99", "/d", 3.0)))
    assert severities(found) == ["warn", "warn"]
    assert "100 GB of a checkpoint need 33 min" in found[0].text


def test_a_disk_is_measured_within_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written comes back, nothing is left, and a folder that is not there is said, not judged."""
    monkeypatch.setattr(disk, "_QUICK", disk.Amount(16 << 20, 5.0, 3))

    found = disk.measure(Task(paths=(str(tmp_path),)))

    assert found.values("disk_damaged") == {str(tmp_path): 0.0}
    assert found.values("disk_write")[str(tmp_path)] > 0
    assert found.values("disk_sync")[str(tmp_path)] > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UnmeasuredError, match="No such file or directory"):
        disk.measure(Task(paths=(str(tmp_path / "none"),)))


def test_a_block_that_comes_back_changed_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a disk that gives back one other byte."""
    monkeypatch.setattr(disk, "_QUICK", disk.Amount(16 << 20, 5.0, 3))
    real = disk.os.preadv

    def damaged(handle: int, buffers: list, offset: int) -> int:
        count = real(handle, buffers, offset)
        if offset == 4 << 20:
            buffers[0][77] ^= 1
        return count

    monkeypatch.setattr(disk.os, "preadv", damaged)

    assert disk.measure(Task(paths=(str(tmp_path),))).values("disk_damaged") == {str(tmp_path): 1.0}


@pytest.mark.parametrize(
    ("rate", "used", "said"), [(0.0, 0.0, []), (0.0, 5e9, ["note"]), (5e6, 5e9, ["warn"]), (1e5, 0.0, [])]
)
def test_swap_counts_while_pages_move(rate: float, used: float, said: list[str]) -> None:
    """What was swapped out once and sleeps costs nothing."""
    assert severities(swap.judge(of_node(swap_rate=rate, swap_used=used))) == said


def test_a_clock_that_is_off_or_free() -> None:
    """120 ms are a warning, so is a clock that nothing keeps; chrony knows better than the kernel."""

    def told(offset_s: float, synced: str) -> list[CheckFinding]:
        return clock.judge(
            reading(Figure("clock_offset", "node", offset_s), facts=(Fact("clock_synced", "node", synced),))
        )

    assert told(0.001, "yes") == []
    assert "0.120 s behind" in told(-0.12, "yes")[0].text
    assert "nothing keeps the clock right" in told(0.0, "no")[0].text
    assert clock.offset_of("System time     : 0.250000000 seconds slow of NTP time\n", 0.0) == -0.25
    assert clock.offset_of("System time     : 0.000100000 seconds fast of NTP time\n", 0.0) == 0.0001
    assert clock.offset_of("506 Cannot talk to daemon\n", 0.5) == 0.5


LOG = (
    "6,1,1000000,-;Linux version 6.12.0\n"
    "3,2,50000000,-;NVRM: Xid (PCI:0000:18:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
    "3,3,50000500,-;NVRM: Xid (PCI:0000:18:00): 31, pid=77, name=python, Ch 00000008, intr 00000000. MMU Fault\n"
    "4,4,60000000,-;EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0\n"
    "4,5,61000000,-;EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0\n"
)


def test_the_kernel_s_log_is_read_by_the_agent_s_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU off the bus a minute ago is bad, corrected errors are not; two days later it is only told."""
    path = tmp_path / "kmsg"
    path.write_text(LOG)
    monkeypatch.setattr(kernel_log, "_PATH", str(path))

    monkeypatch.setattr(kernel_log.time, "monotonic", lambda: 110.0)
    fresh = kernel_log.judge(kernel_log.measure(Task()))
    monkeypatch.setattr(kernel_log.time, "monotonic", lambda: 110.0 + 2 * 86400)
    old = kernel_log.judge(kernel_log.measure(Task()))

    assert [one.severity for one in fresh if "79" in one.of] == ["bad"]
    assert "0000:18:00" in fresh[0].of
    assert not [one for one in fresh if "CE" in one.text]
    assert {one.severity for one in old} == {"note"}


def test_a_log_that_may_not_be_read_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to do about it."""
    monkeypatch.setattr(kernel_log, "_PATH", str(tmp_path / "none"))

    with pytest.raises(UnmeasuredError, match="dmesg_restrict"):
        kernel_log.measure(Task())


@pytest.mark.parametrize(
    ("free", "share", "said"), [(500e9, 0.5, []), (500e9, 0.04, []), (5e9, 0.04, ["warn"]), (0.5e9, 0.001, ["bad"])]
)
def test_file_systems_that_fill(free: float, share: float, said: list[str]) -> None:
    """4 % of a large one are plenty; a full one that nothing here writes into makes no node bad."""
    space = (Figure("space_free", "/d", free), Figure("space_free_share", "/d", share))

    of_the_run = file_systems.judge(reading(*space, facts=(Fact("writable", "/d", "yes"),)))
    of_others = file_systems.judge(reading(*space, facts=(Fact("writable", "/runs", "yes"),)))

    assert severities(of_the_run) == said
    assert severities(of_others) == ["warn"] * len(said)


@pytest.mark.parametrize("place", ["/", "/tmp", "/dev/shm"])
def test_what_every_program_writes_into_is_bad_when_full(place: str) -> None:
    """Wherever the run's own folders are."""
    full = reading(Figure("space_free", place, 0.0), Figure("space_free_share", place, 0.0))

    assert severities(file_systems.judge(full)) == ["bad"]


def test_file_systems_without_inodes_or_right() -> None:
    """No inodes are a warning; read-only where runs write is bad; a folder of another user is none."""
    assert severities(file_systems.judge(reading(Figure("inodes_free_share", "/d", 0.001)))) == ["warn"]
    assert severities(file_systems.judge(reading(facts=(Fact("writable", "/d", "read-only"),)))) == ["bad"]
    assert file_systems.judge(reading(facts=(Fact("writable", "/d", "no right"),))) == []


def test_file_systems_of_this_machine(tmp_path: Path) -> None:
    """A folder that is there has free space, one that is not is said."""
    found = file_systems.measure(Task(paths=(str(tmp_path), "/no/such")))

    assert found.values("space_free")[str(tmp_path)] > 0
    assert found.texts("writable")[str(tmp_path)] == "yes"
    assert found.unmeasured == ("/no/such: No such file or directory",)


def test_limits_that_end_jobs() -> None:
    """Each with its number; memory that may be locked matters where there is RDMA alone."""
    low = of_node(limit_files=1024, limit_memlock=65536, shm_size=64 << 20, cgroup_throttled=0.2, cgroup_cpus=4,
                  cgroup_memory=8 << 30, cgroup_memory_free=1 << 30)  # fmt: skip
    with_rdma = Reading(low.figures, (Fact("rdma", "node", "yes"),))

    texts = " ".join(one.text for one in limits.judge(with_rdma))

    for part in ("1,024 files", "64 MiB: NCCL", "20.0%", "1.0 of 8.0 GiB", "RDMA locks buffers"):
        assert part in texts
    assert "RDMA" not in " ".join(one.text for one in limits.judge(low))
    assert limits.judge(of_node(limit_files=1048576, shm_size=32 << 30)) == []


def _group(folder: Path, version: int, cpus: int, memory: int) -> None:
    """Make a control group's files; 0: no limit."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.stat").write_text("nr_periods 100\nnr_throttled 7\n")
    if version == 2:
        (folder / "cpu.max").write_text(f"{cpus * 100000 or 'max'} 100000\n")
        (folder / "memory.max").write_text(f"{memory or 'max'}\n")
        (folder / "memory.current").write_text(f"{5 << 30}\n")
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {1 << 29}\nactive_file {1 << 29}\n")
        return
    (folder / "cpu.cfs_quota_us").write_text(f"{cpus * 100000 or -1}\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (folder / "memory.limit_in_bytes").write_text(f"{memory or 9223372036854771712}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{5 << 30}\n")
    (folder / "memory.stat").write_text(f"cache 7\ntotal_inactive_file {1 << 29}\ntotal_active_file {1 << 29}\n")


@pytest.mark.parametrize(
    ("trees", "own", "version"),
    [
        (("",), "0::/slice/job\n", 2),
        (("cpu", "memory"), "4:memory:/slice/job\n1:cpu:/slice/job\n0::/\n", 1),
        (("cpu,cpuacct", "memory"), "4:memory:/slice/job\n1:cpu,cpuacct:/slice/job\n", 1),
        (("unified",), "1:name=systemd:/\n0::/slice/job\n", 2),
    ],
    ids=["2", "1", "1 of several", "both"],
)
def test_the_tightest_control_group_counts(tmp_path: Path, trees: tuple[str, ...], own: str, version: int) -> None:
    """A group inherits the limits of those above it; pages of files are given back, so they count as free."""
    for tree in trees:
        _group(tmp_path / tree / "slice", version, 4, 8 << 30)
        _group(tmp_path / tree / "slice" / "job", version, 0, 0)
    named = tmp_path / "own"
    named.write_text(own)

    found = control_group.limits(tmp_path, named)

    assert found == control_group.Limits(4.0, 0.07, 8 << 30, 4 << 30)


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_own_root_is_its_group(tmp_path: Path, version: int) -> None:
    """It is named as the host sees it, by a path that is not here; one that leads out of the tree is not followed."""
    for tree in ("cpu", "memory") if version == 1 else ("",):
        _group(tmp_path / tree, version, 2, 6 << 30)
    named = tmp_path / "own"

    found = []
    for path in ("/docker/4f5c", "/../../etc"):
        named.write_text(f"4:memory:{path}\n1:cpu:{path}\n" if version == 1 else f"0::{path}\n")
        found.append(control_group.limits(tmp_path, named))

    assert found == [control_group.Limits(2.0, 0.07, 6 << 30, 2 << 30)] * 2


def test_no_control_groups_limit_nothing(tmp_path: Path) -> None:
    """Neither where there is no file nor where it holds nonsense."""
    nonsense = tmp_path / "own"
    nonsense.write_bytes(b"\xff\n:::\n")

    assert control_group.limits(tmp_path / "none", tmp_path / "none") == control_group.Limits()
    assert control_group.limits(tmp_path / "none", nonsense) == control_group.Limits()


def test_a_moment_in_which_others_use_memory_makes_no_node_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of several bursts counts, of those that got their cores; what holds back all of them is seen."""
    bursts = iter([([20e9] * 6, 0.99), ([39e9] * 6, 0.98), ([60e9] * 6, 0.3), ([40e9] * 6, 0.99)])
    monkeypatch.setattr(memory, "_copy", lambda *_: next(bursts))
    monkeypatch.setattr(memory.time, "sleep", lambda _s: None)

    best = memory._best_of([0], 1 << 24, thorough=False)
    bursts = iter([([20e9 + number] * 6, 0.2) for number in range(4)])
    shared = memory._best_of([0], 1 << 24, thorough=False)

    assert best == ([40e9] * 6, 0.99)
    assert shared == ([20e9 + 3] * 6, 0.2)


def test_a_burst_lasts_long_enough_and_each_copy_has_its_rate() -> None:
    """At least so many copies and a tenth of a second, on this machine's first core."""
    rates, share = memory._copy([min(os.sched_getaffinity(0))], 1 << 24, 7)

    assert len(rates) >= 6
    assert min(rates) > 0
    assert 0 < share <= 1.05


def test_what_a_process_may_use_is_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No memory, no descriptors, a file system that is read-only, a container that hides its memory: not measured."""

    def raising(error: Exception) -> CheckModule:
        def measure(_task: Task) -> Reading:
            raise error

        return cast("CheckModule", SimpleNamespace(CHECK=memory.CHECK, measure=measure, judge=memory.judge))

    errors = (MemoryError(), OSError(errno.ENOMEM, "no"), OSError(errno.EMFILE, "no"), OSError(errno.EROFS, "no", "/x"))
    answers = [child.answer_of(raising(error), Task()) for error in errors]

    def unknown() -> None:
        raise KeyError(b"MemTotal:")

    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(memory.psutil, "virtual_memory", unknown)
    monkeypatch.setattr(disk.os, "open", read_only)

    assert all(one.unmeasured and not one.error for one in answers)
    assert child.answer_of(raising(RuntimeError("no")), Task()).error  # the control: anything else is told as a failure
    with pytest.raises(UnmeasuredError, match="does not tell here how much memory"):
        memory.measure(Task())
    with pytest.raises(UnmeasuredError, match="Read-only file system, so its disk is not measured"):
        disk.measure(Task(paths=(str(tmp_path),)))


def test_numa_nodes_are_read_and_compared(tmp_path: Path) -> None:
    """A node with a memory module less is named; processors that are out, and devices without a place, are told."""
    for node, (cpus, kilobytes) in enumerate((("0-1", 1000), ("2,3", 1000), ("4-5", 1000), ("6-7", 900))):
        folder = tmp_path / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal:       {kilobytes} kB\nNode {node} MemFree: 1 kB\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "online").write_text("0-6\n")
    (tmp_path / "cpu" / "present").write_text("0-7\n")
    gpu = tmp_path / "pci" / "0000:18:00.0"
    gpu.mkdir(parents=True)
    for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", "-1")):
        (gpu / name).write_text(text)

    found = Reading(tuple(numa._figures(tmp_path, 8)), tuple(numa._facts(tmp_path, tmp_path / "pci")))
    result = result_of(numa.CHECK, found, numa.judge, 0.1)

    assert numa.numa_nodes(tmp_path)[1] == {2, 3}
    texts = [one.text for one in result.findings]
    assert any(text.startswith("NUMA node 3: memory ") for text in texts)
    assert any("1 of 8 processors are not online" in text for text in texts)
    assert any("GPU at 0000:18:00.0" in text for text in texts)
    assert numa.cpus_of("0-2,7, x,y-9") == {0, 1, 2, 7}


PERFTEST = """
                    RDMA_Write BW Test
 Dual-port       : OFF          Device         : mlx5_0
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 1048576    20000            0.00               392.16               0.046749
---------------------------------------------------------------------------------------
"""


def test_perftest_s_table_is_read() -> None:
    """Its average in bytes a second; an error message has none."""
    assert rdma.average_of(PERFTEST) == pytest.approx(49.02e9)
    assert rdma.average_of("Couldn't connect to 127.0.0.1:18515\n Unable to init the socket connection\n") is None
    assert rdma.average_of("") is None


@pytest.mark.parametrize("works", [True, False])
def test_perftest_is_run_as_server_and_client(monkeypatch: pytest.MonkeyPatch, *, works: bool) -> None:
    """The client finds the server's port and device; where it fails its last line is told, and is no verdict."""
    calls = []

    class Server:
        """Stands for the server's process."""

        def __init__(self, command: list[str], **_options: object) -> None:
            calls.append(command)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_error: object) -> None:
            """Be gone."""

        def kill(self) -> None:
            calls.append(["killed"])

        def poll(self) -> int:
            return 1

    def client(command: list[str], **_options: object) -> object:
        calls.append(command)
        return type("Done", (), {"stdout": PERFTEST if works else "no gid\nFailed to modify QP to RTR\n"})

    monkeypatch.setattr(rdma.subprocess, "Popen", Server)
    monkeypatch.setattr(rdma.subprocess, "run", client)
    a, b = (rdma.Port(f"mlx5_{at}", "1", *(True, "ACTIVE", "LinkUp", "IB", False, "", 5e10, 4, 0, 0, 0, {}, {}, {}))
            for at in range(2))  # fmt: skip

    assert [(name, one.device, other.device) for name, one, other in rdma._ways([a, b])] == [
        *(("rdma_loopback", "mlx5_0", "mlx5_0"), ("rdma_loopback", "mlx5_1", "mlx5_1")),
        *(("rdma_next", "mlx5_0", "mlx5_1"), ("rdma_next", "mlx5_1", "mlx5_0")),
    ]
    if works:
        assert rdma._write(a, b, thorough=False) == pytest.approx(49.02e9)
    else:
        with pytest.raises(
            UnmeasuredError, match=r"mlx5_0 to mlx5_1: ib_write_bw measured nothing .Failed to modify QP"
        ):
            rdma._write(a, b, thorough=False)
    server, asked, killed = calls
    assert killed == ["killed"]
    assert server[server.index("-d") + 1] == "mlx5_1"
    assert asked[asked.index("-d") + 1] == "mlx5_0"
    assert server[server.index("-p") + 1] == asked[asked.index("-p") + 1]
    assert asked[-1] == "127.0.0.1"


def test_a_link_at_a_lower_rate_and_one_that_is_down() -> None:
    """By ports of the same kind: half the rate is bad, a port that is down where others are up a warning."""
    rates = [Figure("port_rate", f"mlx5_{at} port 1", 25e9 if at == 3 else 50e9, peers="IB MT_838") for at in range(4)]
    states = [Fact("port_state", f"mlx5_{at} port 1", "DOWN" if at == 5 else "ACTIVE", "IB MT_838") for at in range(6)]

    result = result_of(rdma.CHECK, Reading(tuple(rates), tuple(states)), rdma.judge, 1.0)

    assert [(one.severity, one.of) for one in result.findings] == [("bad", "mlx5_3 port 1"), ("warn", "mlx5_5 port 1")]
    assert rdma.judge(Reading((), (Fact("port_state", "eth", "DOWN", "Ethernet x"),))) == []

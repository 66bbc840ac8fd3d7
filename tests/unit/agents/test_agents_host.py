# SPDX-License-Identifier: Apache-2.0
"""What the host looks like, from two samples."""

import os
from pathlib import Path

import psutil
import pytest
from megascale_agents.collectors import host
from megascale_agents.collectors.host import HostSample

BEFORE = HostSample(
    cpu_total_s=1000.0,
    cpu_idle_s=900.0,
    load_1m=1.234,
    memory_total_bytes=1000,
    memory_available_bytes=600,
    swap_total_bytes=0,
    swap_used_bytes=0,
    shm_free_bytes=11,
    disk_free_bytes=22,
    cores=8,
)


def test_shares_are_of_the_time_between_two_samples() -> None:
    """One busy core of two is a half, whatever the hours before were."""
    now = BEFORE._replace(cpu_total_s=1002.0, cpu_idle_s=901.0)

    reading = host.parse(now, BEFORE)

    assert reading.cpu_busy == pytest.approx(0.5)
    assert reading.memory_used == pytest.approx(0.4)
    assert (reading.shm_free_bytes, reading.disk_free_bytes, reading.cores) == (11, 22, 8)


def test_the_first_sample_stands_for_the_time_since_boot() -> None:
    """There is a number from the first heartbeat on."""
    assert host.parse(BEFORE, None).cpu_busy == pytest.approx(0.1)


def test_nothing_is_divided_by_nothing() -> None:
    """Two samples in the same tick, no swap, counters that went backwards: zeros, within bounds."""
    assert host.parse(BEFORE, BEFORE).cpu_busy == 0.0
    assert host.parse(BEFORE, BEFORE).swap_used == 0.0
    assert 0.0 <= host.parse(BEFORE._replace(cpu_total_s=1001.0, cpu_idle_s=890.0), BEFORE).cpu_busy <= 1.0


def test_guests_are_not_counted_twice_and_waiting_for_a_disk_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guest time is inside user time; what the kernel tells in KiB is kept in bytes; a container may have no swap."""
    (tmp_path / "stat").write_text("cpu  400 100 300 5000 200 10 20 30 77 7\ncpu0 1 2 3\n")
    (tmp_path / "meminfo").write_text(
        "MemTotal: 1000 kB\nMemFree: 300 kB\nMemAvailable: 600 kB\nBuffers: 1 kB\nCached: 1 kB\nShmem: 1 kB\n"
        "Active: 1 kB\nInactive: 1 kB\nSwapTotal: 200 kB\nSwapFree: 50 kB\n"
    )
    (tmp_path / "vmstat").write_text("pswpin 0\npswpout 0\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))

    sample = host.read(str(tmp_path), "")

    ticks_per_s = os.sysconf("SC_CLK_TCK")
    assert sample.cpu_total_s * ticks_per_s == pytest.approx(6060)
    assert sample.cpu_idle_s * ticks_per_s == pytest.approx(5200)
    assert (sample.memory_total_bytes, sample.memory_available_bytes) == (1_024_000, 614_400)
    assert (sample.swap_total_bytes, sample.swap_used_bytes) == (204_800, 153_600)


def test_a_real_host_can_be_read(tmp_path: Path) -> None:
    """This machine has cores, memory and disks."""
    reading = host.parse(host.read(str(tmp_path), str(tmp_path)), None)

    assert reading.cores >= 1
    assert reading.memory_available_bytes > 0
    assert reading.shm_free_bytes == pytest.approx(reading.disk_free_bytes, rel=0.05)


def test_a_missing_folder_costs_only_its_own_number(tmp_path: Path) -> None:
    """Before the first job there is no run folder, and maybe no box root."""
    sample = host.read(str(tmp_path / "none"), "")

    reading = host.parse(sample, None)
    assert (sample.shm_free_bytes, sample.disk_free_bytes) == (None, None)
    assert (reading.has_shm, reading.has_disk) == (False, False)
    assert sample.memory_total_bytes > 0

# SPDX-License-Identifier: Apache-2.0
"""What is reported of a killed rank: the kernel's log, its control group, and what can't be known."""

from pathlib import Path

import pytest
from megascale_agents.evidence.kill_traces import of_kill

KMSG = (
    "6,1001,52000000,-;usb 1-1: new device\n"
    "4,1002,53000000,-;oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=4711,uid=1000\n"
    " SUBSYSTEM=memory\n"
    "3,1003,53000100,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:9000kB, anon-rss:800kB\n"
    "6,1004,54000000,-;Killed process 47110 (other)\n"
)


def group(root: Path, path: str, **files: str) -> None:
    """Write a control group's files; two underscores stand for a dot."""
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_a_kill_for_memory_is_quoted_from_the_kernel_s_log(tmp_path: Path) -> None:
    """The lines about this process as they are, and no other's: 47110 is not 4711."""
    log = tmp_path / "kmsg"
    log.write_text(KMSG)

    told = of_kill((4711,), {}, str(log), str(tmp_path))

    assert "kernel log: oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=4711,uid=1000" in told
    assert "kernel log: Memory cgroup out of memory: Killed process 4711 (python)" in told
    assert "47110" not in told


def test_a_log_without_it_is_said_and_so_is_one_that_can_t_be_read(tmp_path: Path) -> None:
    """The negative controls: another process's kill is not this one's, and silence of no log proves nothing."""
    log = tmp_path / "kmsg"
    log.write_text(KMSG)

    assert "no line names process 99, so the kernel did not kill it for memory" in of_kill((99,), {}, str(log))
    assert "can't be read (no such file or directory)" in of_kill((99,), {}, str(tmp_path / "none"))
    assert "not read by this agent" in of_kill((99,), {}, "")


@pytest.mark.parametrize("hierarchy", ["", "memory"])
def test_the_limit_that_binds_first_is_told_with_what_was_used(tmp_path: Path, hierarchy: str) -> None:
    """Of either version of control groups: the least limit on the way up, its peak, its kills."""
    if hierarchy:
        names = ("memory__limit_in_bytes", "memory__max_usage_in_bytes", "memory__oom_control")
    else:
        names = ("memory__max", "memory__peak", "memory__events")
    root = tmp_path / hierarchy
    kills = "oom_kill_disable 0\nunder_oom 0\noom_kill 2" if hierarchy else "low 0\nmax 7\noom 3\noom_kill 2"
    unlimited = str((1 << 63) - 4096) if hierarchy else "max"
    group(root, "slurm/job_7", **dict(zip(names, (str(64 << 30), str(63 << 30), kills), strict=True)))
    group(root, "slurm/job_7/step", **dict(zip(names, (unlimited, "5", "oom_kill 0"), strict=True)))

    told = of_kill((1,), {hierarchy: "/slurm/job_7/step"}, "", str(tmp_path))

    assert (
        "control group /slurm/job_7/step: may have 64.0 GiB of memory, has had 63.0 GiB at most, "
        "2 of its processes were killed for memory since it was made"
    ) in told


def test_inside_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    """A path that leads out of what is mounted is not followed."""
    group(tmp_path, "memory", memory__limit_in_bytes=str(2 << 30), memory__usage_in_bytes=str(1 << 30))

    told = of_kill((1,), {"memory": "/../../elsewhere"}, "", str(tmp_path))

    assert "may have 2.0 GiB of memory, has 1.0 GiB now" in told


def test_no_limit_and_no_group_are_said(tmp_path: Path) -> None:
    """What can't be told is said to be so."""
    group(tmp_path, "free", memory__max="max", memory__peak=str(3 << 30))

    assert "control group /free: no limit of memory, has had 3.0 GiB at most" in of_kill(
        (1,), {"": "/free"}, "", str(tmp_path)
    )
    assert "none that tells of memory" in of_kill((1,), {"cpu": "/x"}, "", str(tmp_path))


def test_nobody_knows_who_sent_a_signal(tmp_path: Path) -> None:
    """That is reported, since it is the first question."""
    assert "Linux keeps no record of it" in of_kill((1,), {}, "", str(tmp_path))

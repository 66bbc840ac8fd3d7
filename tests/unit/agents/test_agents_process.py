# SPDX-License-Identifier: Apache-2.0
"""What /proc/<pid>/stat says, and how a process that stops, resumes or dies is noticed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from megascale_agents.collectors import process
from megascale_agents.collectors.process import ProcessCollector

# Linux 6.1, a Python process with an unfriendly name, 250 ms of user and 50 ms of system time, 4 threads.
RUNNING = (
    b"4242 (a) R (b) S) S 1 4242 4242 0 -1 4194304 2100 0 0 0 25 5 0 0 20 0 4 0 123456 25600000 2048 "
    b"18446744073709551615 1 1 0 0 0 0 0 16781312 134235650 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n"
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as started:
        yield started
        started.kill()


def test_fields_are_found_behind_any_name() -> None:
    """A process may call itself what it wants, parentheses and spaces included."""
    stat = process.parse(RUNNING)

    assert stat.state == "S"
    assert stat.start_ticks == 123456
    assert stat.cpu_s == pytest.approx(30 / os.sysconf("SC_CLK_TCK"))
    assert stat.rss_bytes == 2048 * os.sysconf("SC_PAGE_SIZE")
    assert stat.threads == 4
    assert stat.group == 4242


def test_a_dying_process_is_gone_before_its_memory_is_freed() -> None:
    """PF_EXITING counts as gone, although the letter still says that it runs."""
    dying = RUNNING.replace(b" 4194304 ", b" 4194308 ")

    assert process.parse(dying).state == ""


@pytest.mark.parametrize("letter", [b"Z", b"X"])
def test_a_zombie_is_gone(letter: bytes) -> None:
    """A zombie does not train."""
    assert process.parse(RUNNING.replace(b") S 1", b") " + letter + b" 1")).state == ""


@pytest.mark.parametrize("junk", [b"", b"4242 (x", b"4242 (x) S 1 2 3", b")", b"\xff" * 50])
def test_what_is_no_stat_line_is_refused(junk: bytes) -> None:
    """Anything else is a ValueError, not an IndexError far away."""
    with pytest.raises(ValueError, match=r"stat|substring|subsection"):
        process.parse(junk)
    with pytest.raises(ValueError, match=r"stat|substring|subsection"):
        process.state_of(junk)


def test_stopping_resuming_and_dying_are_each_told_once(child: subprocess.Popen[bytes]) -> None:
    """A look is urgent when the process was stopped, resumed or went away, and only then."""
    looked = ProcessCollector(child.pid)

    assert not looked.poll_process(1.0)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert looked.poll_process(2.0)
    assert not looked.poll_process(3.0)
    assert looked.reading(3.0).stopped_since_mono_s == 2.0
    os.kill(child.pid, signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOWAIT)
    assert looked.poll_process(4.0)
    assert looked.reading(4.0).stopped_since_mono_s == 0.0
    child.kill()
    child.wait()
    assert looked.poll_process(5.0)
    assert not looked.poll_process(6.0)
    assert looked.reading(6.0).state == ""


def test_only_the_state_decides_whether_a_look_is_like_the_one_before() -> None:
    """The head of a line ends behind the flags: what comes later changes all the time."""
    state, head = process.state_of(RUNNING)

    exiting = process.state_of(RUNNING.replace(head.split()[-1], b"4194308", 1))

    assert state == "S"
    assert RUNNING.startswith(head)
    assert len(head[head.rindex(b")") + 2 :].split()) == 7
    assert exiting[0] == ""
    assert not RUNNING.startswith(exiting[1])


def test_what_a_process_used_last_is_kept_when_it_has_gone() -> None:
    """A look reads the state alone; the rest of the same line is there when it is asked for, also after the end."""
    with subprocess.Popen([sys.executable, "-c", "import time; sum(range(3_000_000)); time.sleep(60)"]) as child:
        looked = ProcessCollector(child.pid)
        while looked.stat.cpu_s < 0.02 or looked.state != "S":
            assert child.poll() is None, "it has ended before it was seen asleep"
            looked.poll_process(1.0)
        memory = looked.stat.rss_bytes
        looked.poll_process(2.0)
        child.kill()

    assert looked.poll_process(3.0)
    assert (looked.state, looked.stat.state, looked.reading(3.0).state) == ("", "", "")
    assert looked.stat.cpu_s >= 0.02
    assert looked.stat.rss_bytes == memory > 0


def test_a_process_that_was_stopped_before_is_stopped_from_the_first_look_on(child: subprocess.Popen[bytes]) -> None:
    """An agent that is started again must not take it for one that was stopped when the clock began."""
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    looked = ProcessCollector(child.pid)

    urgent = [looked.poll_process(now_s) for now_s in (7.0, 8.0)]

    assert urgent == [False, False]
    assert looked.reading(8.0).stopped_since_mono_s == 7.0


def test_a_reused_pid_is_another_process(child: subprocess.Popen[bytes]) -> None:
    """The same pid with another start time means that ours is gone."""
    ticks = process.read_once(child.pid).start_ticks

    other = ProcessCollector(child.pid, ticks - 1)

    assert other.stat.state == ""
    assert ProcessCollector(child.pid, ticks).stat.state != ""


def test_a_process_that_is_not_there_is_gone() -> None:
    """No process, no complaint."""
    nobody = ProcessCollector(2**22 + 1)

    assert not nobody.poll_process(1.0)
    assert nobody.reading(1.0).state == ""


def test_cpu_share_is_measured_over_a_whole_window() -> None:
    """A heartbeat sent out of turn does not turn the share into noise."""
    looked = ProcessCollector(os.getpid())
    looked._stat = looked.stat._replace(cpu_s=10.0)

    looked.reading(100.0)
    looked._stat = looked.stat._replace(cpu_s=10.5)
    early = looked.reading(100.1)
    late = looked.reading(101.0)

    assert early.cpu_busy == 0.0
    assert late.cpu_busy == pytest.approx(0.5)


def test_reading_does_not_leak_handles(child: subprocess.Popen[bytes]) -> None:
    """A thousand watches that are closed leave no open file."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  a count

    for _ in range(1000):
        ProcessCollector(child.pid).close()

    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208  a count


def test_how_long_a_process_wanted_a_core_in_vain(
    child: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a share of the time between two looks, by the second number of schedstat; a kernel without it tells 0."""
    told = tmp_path / "schedstat"
    monkeypatch.setattr(process, "Path", lambda path: told if str(path).endswith("schedstat") else Path(path))
    told.write_text("5000000 1000000000 7\n")
    watched = ProcessCollector(child.pid)
    watched.reading(10.0)

    told.write_text("6000000 1600000000 9\n")
    starved = watched.reading(12.0).starved
    told.unlink()
    unknown = watched.reading(14.0).starved
    watched.close()

    assert (starved, unknown) == (0.3, 0.0)

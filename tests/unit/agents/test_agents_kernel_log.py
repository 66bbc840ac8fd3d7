# SPDX-License-Identifier: Apache-2.0
"""What the kernel tells is counted once, whatever form it has and however often the agent is started."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megascale_agents.collectors import kernel_log
from megascale_agents.collectors.gpu_values import Identity
from megascale_agents.collectors.kernel_events import KernelEvent, LineReader, pci_key
from megascale_agents.collectors.kernel_log import KernelLog, parse
from megascale_agents.collectors.xid_table import ACTIONS, BAD_ACTIONS, XIDS, meaning_of
from megascale_agents.hardware.checks import Status
from megascale_agents.hardware.kernel_findings import HELD_S
from megascale_agents.hardware.kernel_log_watch import KernelWatch

from tests.fakes.hardware import FakeMachine

BOOT = "boot-a"

# Lines as drivers of several years wrote them.
LINES = {
    "4,1,1000000,-;NVRM: Xid (PCI:0000:18:00): 79, pid=123, name=python, GPU has fallen off the bus.": (
        "xid", "0000:18:00", 79,
    ),
    "4,2,1000000,-;NVRM: Xid (0000:03:00): 14, Channel 00000001": ("xid", "0000:03:00", 14),
    "4,3,1000000,-;NVRM: Xid (PCI:0001:00:00): 48, pid='<unknown>', name=<unknown>, DBE": ("xid", "0001:00:00", 48),
    "12,4,1000000,-;NVRM: Xid (PCI:0000:c1:00): 145, RLW_CTRL Nonfatal XC0 i0 Link 05 (0x1 0x2)": (
        "xid", "0000:c1:00", 145,
    ),
    "4,5,1000000,-;NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.": ("xid", "0000:18:00", 79),
    "4,6,1000000,-;nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO": (
        "sxid", "0000:c1:00", 28006,
    ),
    "3,7,1000000,-;Memory cgroup out of memory: Killed process 4243 (python) total-vm:1kB, anon": ("oom_kill", "", 0),
    "3,8,1000000,-;Out of memory: Killed process 77 (pt_data_worker) total-vm:1kB": ("oom_kill", "", 0),
}  # fmt: skip


@pytest.mark.parametrize(("line", "told"), LINES.items())
def test_every_form_of_a_line_is_read(line: str, told: tuple[str, str, int]) -> None:
    """Old and new drivers, with and without a process, of GPUs and of switches."""
    (event,) = LineReader().read(parse(f"{line}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:18:00.0\n".encode()))

    assert (event.kind, event.pci, event.number) == told
    assert event.mono_s == 1.0


@pytest.mark.parametrize(
    ("said", "pid", "text"),
    [
        ("pid=123, name=python, GPU has fallen off the bus.", 123, "GPU has fallen off the bus."),
        ("pid='<unknown>', name=<unknown>, DBE", 0, "DBE"),
        ("pid=77, Row Remapper: New row marked", 77, "Row Remapper: New row marked"),
        ("pid=77", 77, ""),
        ("Channel 00000001", 0, "Channel 00000001"),
    ],
)
def test_whose_work_it_was_is_told_apart_from_what_happened(said: str, pid: int, text: str) -> None:
    """The process leads to its rank; the sentence stays short."""
    (event,) = LineReader().read(parse(f"4,1,1,-;NVRM: Xid (PCI:0000:18:00): 79, {said}\n".encode()))

    assert (event.pid, event.text) == (pid, text)


def test_other_lines_say_nothing() -> None:
    """Not lines of other drivers, not the user's own words, not garbage."""
    raw = b"6,1,1,-;usb 1-1: new device\n4,2,2,-;NVRM: loading\n4,x,2,-;NVRM: Xid (PCI:0000:18:00): 79\nXid\n\xff;Xid\n"

    assert LineReader().read(parse(raw)) == []


@pytest.mark.parametrize("text", ["00000000:18:00.0", "0000:18:00", "PCI:0000:18:00", "18:00.0", "0000:18:00.0"])
def test_an_address_has_one_name(text: str) -> None:
    """NVML, the driver and the kernel write it in their own ways."""
    assert pci_key(text) == "0000:18:00"


def test_one_fall_off_the_bus_is_one_event(tmp_path: Path) -> None:
    """The driver tells it twice, in either order, also when a look comes between."""
    machine = FakeMachine(tmp_path)
    log = KernelLog(str(machine.kernel_log), "", BOOT)
    log.poll_log()

    machine.log("NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.")
    first = log.poll_log()
    machine.xid(3, 79, "GPU has fallen off the bus.")
    machine.xid(4, 79, "GPU has fallen off the bus.")
    second = log.poll_log()

    assert [event.pci for event in first] == ["0000:1b:00"]
    assert [event.pci for event in second] == ["0000:1c:00"]
    log.close()


def test_a_restarted_agent_counts_nothing_twice_and_misses_nothing(tmp_path: Path) -> None:
    """What was there before the first start is no news; what came while no agent ran is."""
    machine, memory = FakeMachine(tmp_path), str(tmp_path / "boxes" / ".kernel-log")
    machine.xid(0, 31)
    first = KernelLog(str(machine.kernel_log), memory, BOOT)
    old = first.poll_log()
    machine.xid(0, 48)
    new = first.poll_log()
    first.close()
    machine.xid(0, 95)

    second = KernelLog(str(machine.kernel_log), memory, BOOT)
    missed = second.poll_log()
    second.close()

    assert (old, [event.number for event in new], [event.number for event in missed]) == ([], [48], [95])


def test_a_place_for_its_memory_that_is_full_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel's words count though /dev/shm takes no file; that they may count twice later is told once."""

    def refuse(*_what: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kernel_log.files, "write_whole", refuse)
    path, oom = tmp_path / "kmsg", "3,{0},{0}000000,-;Out of memory: Killed process {0}77 (python) total-vm:1kB\n"
    path.write_text(oom.format(7))
    log = KernelLog(str(path), str(tmp_path / "memory.json"), BOOT)
    log.poll_log()

    with path.open("a") as file:
        file.write(oom.format(8))
    first = log.poll_log()
    with path.open("a") as file:
        file.write(oom.format(9))
    second = log.poll_log()

    assert [len(first), len(second)] == [1, 1]
    assert caplog.text.count("No space left on device") == 1


def test_the_memory_of_another_boot_is_void(tmp_path: Path) -> None:
    """Sequence numbers begin anew with the kernel, and a damaged memory is none."""
    machine, memory = FakeMachine(tmp_path), tmp_path / ".kernel-log"
    memory.write_text(f'{{"path": "{machine.kernel_log}", "boot": "boot-z", "seq": 100000}}')
    log = KernelLog(str(machine.kernel_log), str(memory), BOOT)
    log.poll_log()
    machine.xid(0, 79)
    told = log.poll_log()
    log.close()
    memory.write_text("{")
    again = KernelLog(str(machine.kernel_log), str(memory), BOOT)
    damaged = again.poll_log()
    again.close()
    memory.write_text(f'{{"path": "/dev/other", "boot": "{BOOT}", "seq": 100000}}')
    other = KernelLog(str(machine.kernel_log), str(memory), BOOT)
    other.poll_log()
    machine.xid(0, 95)

    assert ([event.number for event in told], damaged) == ([79], [])
    assert [event.number for event in other.poll_log()] == [95]
    other.close()


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    """A log that is piped in may be read in the middle of a line."""
    path = tmp_path / "kmsg"
    path.write_bytes(b"")
    log = KernelLog(str(path), "", BOOT)
    log.poll_log()

    with path.open("ab") as file:
        file.write(b"4,1,1,-;NVRM: Xid (PCI:0000:18:00): 7")
        file.flush()
        half = log.poll_log()
        file.write(b"4, pid=1\n")
        file.flush()
        whole = log.poll_log()

    assert (half, [event.number for event in whole]) == ([], [74])
    log.close()


def test_a_record_that_the_kernel_overwrote_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The device says so once and goes on with the oldest that is left."""
    answers = [BrokenPipeError(), b"4,9,1,-;NVRM: Xid (PCI:0000:18:00): 95, x\n", BlockingIOError()]
    path = tmp_path / "kmsg"
    path.write_bytes(b"")
    log = KernelLog(str(path), "", BOOT)
    log.poll_log()

    def give(_handle: int, _size: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(kernel_log.os, "read", give)

    assert [event.number for event in log.poll_log()] == [95]
    monkeypatch.undo()
    log.close()


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="this kernel's log may not be read here")
def test_the_real_log_can_be_followed() -> None:
    """Nothing in it is news, and a look without news takes no time to speak of."""
    log = KernelLog("/dev/kmsg", "", BOOT)

    assert log.poll_log() == []
    assert log.poll_log() == []
    log.close()


def test_application_class_xids_never_speak_against_hardware() -> None:
    """13, 31, 43, 45 and 109 are what a job with a bug writes; a GPU is not remembered for them."""
    for number in (13, 31, 43, 45, 70, 85, 105, 109, 130, 139):
        assert meaning_of(number).group == "application"
    for row in XIDS.values():
        assert row.group != "application" or row.action in ("none", "restart_app")
        assert row.group != "application" or row.action not in BAD_ACTIONS


def test_every_row_says_what_to_do_and_where_it_is_from() -> None:
    """The table is data: known words, no number twice, and an unknown number is told as such."""
    for number, row in XIDS.items():
        assert (row.number, row.action in ACTIONS, row.source in ("catalog", "ours")) == (number, True, True)
    assert {79, 48, 63, 64, 74, 92, 94, 95, 119, 120, 140, *range(144, 151), 154} <= XIDS.keys()
    assert (meaning_of(999).number, meaning_of(999).action) == (999, "contact_support")


class Watched:
    """A watch over a fake log, with a wall clock that is wound."""

    def __init__(self, folder: Path) -> None:
        self.machine = FakeMachine(folder)
        self.wall_s = 1_000_000.0
        gpu = Identity(3, "GPU-three", pci="0000:1b:00")
        source = KernelLog(str(self.machine.kernel_log), "", BOOT)
        self.watch = KernelWatch(source, {gpu.pci: gpu}.get, lambda: self.wall_s)
        self.watch.poll_log(1.0)


def test_what_was_told_stays_for_ten_minutes(tmp_path: Path) -> None:
    """Counted for ever, a finding for as long as a verdict may need it; repeated, it is one finding with its count."""
    watched = Watched(tmp_path)
    watched.machine.xid(3, 79, "GPU has fallen off the bus.")
    watched.machine.xid(5, 31)
    watched.machine.xid(5, 31)

    found = watched.watch.poll_log(2.0) or []
    watched.wall_s += HELD_S + 10.0
    later = watched.watch.poll_log(20.0)

    by_name = {one.name: one for one in found}
    assert (by_name["xid_79"].gpu, by_name["xid_79"].severity, by_name["xid_79"].is_bad) == ("GPU-three", "fail", True)
    assert (by_name["xid_31"].severity, by_name["xid_31"].count, by_name["xid_31"].is_bad) == ("note", 2, False)
    assert later == []
    assert watched.watch._happened == {}
    # The fifth GPU is not known by its index, so its address stands in.
    assert watched.watch.xids == {("3", 79, "restart_node"): 1, ("0000:1d:00", 31, "restart_app"): 2}
    watched.watch.close()


def test_a_switch_says_itself_whether_it_is_fatal(tmp_path: Path) -> None:
    """The line carries the word; a table of hundreds of numbers would say no more."""
    watched = Watched(tmp_path)
    watched.machine.log("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 3 egress")
    watched.machine.log("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20001, Fatal, Link 3 TX Replay Error")

    found = watched.watch.poll_log(2.0) or []

    assert {one.name: one.severity for one in found} == {"sxid_12028": "note", "sxid_20001": "fail"}
    assert watched.watch.sxids == {(12028, "none"): 1, (20001, "reset_gpu"): 1}
    watched.watch.close()


def test_the_worst_that_was_told_outlives_a_flood_of_crashes(tmp_path: Path) -> None:
    """A program that crashes a thousand times must not hide that a GPU is lost, nor take memory without end."""
    watched = Watched(tmp_path)
    watched.machine.xid(3, 79, "GPU has fallen off the bus.")
    for pid in range(1000):
        watched.machine.log(f"tool[{pid + 1}]: segfault at 0 ip 0 sp 0 error 4 in tool[55d0+c0000]")

    found = watched.watch.poll_log(2.0) or []

    assert len(found) == 256
    assert "xid_79" in {one.name for one in found}
    assert watched.watch.others == {("segfault", "note"): 1000}
    watched.watch.close()


def test_a_thread_that_is_gone_stands_for_its_process(tmp_path: Path) -> None:
    """The kernel names threads; who has ended can't be asked whose it was."""
    watched = Watched(tmp_path)
    watched.machine.log("INFO: task python:4242424242 blocked for more than 120 seconds.")

    (found,) = watched.watch.poll_log(2.0) or []

    assert (found.name, found.pids) == ("hung_task", (4242424242,))
    watched.watch.close()


def test_a_report_over_two_looks_is_one_report(tmp_path: Path) -> None:
    """The address of a GPU that left the bus may come with the look before its sentence."""
    watched = Watched(tmp_path)
    watched.machine.log("NVRM: The NVIDIA GPU 0000:1b:00.0")
    first = watched.watch.poll_log(2.0)
    watched.machine.log("NVRM: (PCI ID: 10de:2330) installed in this system has")
    watched.machine.log("NVRM: fallen off the bus and is not responding to commands.")

    (found,) = watched.watch.poll_log(2.1) or []

    assert first is None
    assert (found.name, found.gpu) == ("xid_79", "GPU-three")
    watched.watch.close()


def test_an_nvml_without_the_log_tells_no_more_than_a_number(tmp_path: Path) -> None:
    """Of numbers whose line decides nothing is known then: the GPU is not remembered for them."""
    watch = KernelWatch(KernelLog(str(tmp_path / "none"), "", BOOT), lambda _: None, lambda: 0.0)
    told = [KernelEvent("xid", 1.0, "NVML told of Xid", pci="0000:1b:00", number=number) for number in (149, 154, 95)]

    found = watch.hear(told, 1.0) or []

    assert [(one.name, one.severity, one.is_bad) for one in found] == [
        ("xid_149", "warn", False),
        ("xid_154", "warn", False),
        ("xid_95", "fail", True),
    ]
    assert {action for _, _, action in watch.xids} == {"follow_driver", "reset_gpu"}
    watch.close()


def test_a_log_that_may_not_be_read_is_no_log_of_ours(tmp_path: Path) -> None:
    """An agent without the permission has no such check and no finding, and takes the log up when it may."""
    path = tmp_path / "kmsg"
    watch = KernelWatch(KernelLog(str(path), "", BOOT), lambda _: None, lambda: 0.0)

    before = (watch.poll_log(1.0), watch.poll_log(2.0), watch.is_read)
    path.write_bytes(b"")
    watch.poll_log(62.0)

    assert before == (None, None, False)
    assert watch.is_read
    assert watch.error == ""
    watch.close()


def test_a_log_that_ceases_to_be_readable_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on nothing is known of Xids; when it can be read again, that is over."""
    watched = Watched(tmp_path)

    def fail(_handle: int, _size: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(kernel_log.os, "read", fail)
    first, second = watched.watch.poll_log(2.0), watched.watch.poll_log(3.0)
    status = watched.watch.status([])
    monkeypatch.undo()
    third = watched.watch.poll_log(70.0)

    assert [one.name for one in first or []] == ["no_answer_kernel_log"]
    assert (second, status, third) == (None, Status.UNKNOWN, [])
    watched.watch.close()


def test_an_agent_that_starts_compiles_no_pattern_of_a_line_that_never_came() -> None:
    """All of them are 15 ms of CPU on each node; the control: a line that asks for some has these compiled."""
    line = "Out of memory: Killed process 77 (pt_data_worker) total-vm:1kB"
    probe = (
        "import re, sys\n"
        "compiled, compile_it = [], re.compile\n"
        "re.compile = lambda words, *flags: compiled.append(words) or compile_it(words, *flags)\n"
        "from megascale_agents.collectors import kernel_events, kernel_rules\n"
        "rules = {rule.words for rule in kernel_events.RULES}\n"
        "print(len(rules & set(compiled)))\n"
        "record = kernel_events.Record(1, 1.0, sys.argv[1])\n"
        "print(*[event.pid for event in kernel_events.LineReader().read([record])])\n"
        "print(0 < len(rules & set(compiled)) < 10)\n"
    )

    done = subprocess.run([sys.executable, "-c", probe, line], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.split() == ["0", "77", "True"]

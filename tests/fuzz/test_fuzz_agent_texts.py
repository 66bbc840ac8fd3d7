# SPDX-License-Identifier: Apache-2.0
"""Texts and dumps that ranks, kernels and tools write are read or refused, however they are damaged."""

import contextlib
import os
from pathlib import Path
from socket import AF_INET, AF_INET6

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megascale_agents.collectors import infiniband, pressure, process, sockets, unsent
from megascale_agents.collectors.kernel_events import LineReader
from megascale_agents.collectors.kernel_log import KernelLog, parse
from megascale_agents.evidence import flight_recorder, py_spy, stacks, tracebacks
from megascale_agents.evidence.flight_recorder import NoAnswerError
from megascale_agents.hardware.kernel_log_watch import KernelWatch
from megascale_agents.ownership.rights import myself
from megascale_agents.ranks.blackboxes import ROUND_SUFFIX, read_round
from megascale_agents.ranks.stderr_scanner import LogScanner

from megascale_ops.diagnosis.exits.last_words import match, strip_prefix
from megascale_ops.errors import MegascaleError
from megascale_ops.runner.ranks.leftovers import read_round_file
from megascale_ops.schema.identity import RankProcess, RoundFile
from megascale_ops.schema.version import MESSAGE_VERSION
from tests.fakes.mutations import fuzzed, mutated

FLIGHT = b"""{"version": "2.10", "pg_config": {}, "pg_status": {"0": {"last_enqueued_collective": "6"}},
 "entries": [{"record_id": 0, "collective_seq_id": 5, "p2p_seq_id": 0, "process_group": ["0", "default_pg"],
 "profiling_name": "nccl:all_reduce", "input_sizes": [[4, 8]], "input_dtypes": ["Float"], "is_p2p": false,
 "state": "scheduled", "retired": true}, {"record_id": 1, "collective_seq_id": 6, "process_group": ["0", "x"],
 "profiling_name": "nccl:coalesced", "input_sizes": [[1]], "input_dtypes": ["Float"], "state": "scheduled"}]}"""
SPIED = b"""[{"pid": 1, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 11, "active": true,
 "owns_gil": true, "frames": [{"name": "inner", "filename": "train.py", "line": 6, "module": null},
 {"name": "f", "filename": "a", "line": 7}]}]"""
STACKS = b"""Thread 0x00007f1c (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f2a (most recent call first):
  File "/train.py", line 12 in step
  File "/train.py", line ?? in <module>
"""
KERNEL = b"""4,1,1000000,-;NVRM: Xid (PCI:0000:18:00): 79, pid=123, name=python, GPU has fallen off the bus.
4,5,1000000,-;NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.
4,6,1000000,-;nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO
3,7,1000000,-;Memory cgroup out of memory: Killed process 4243 (python) total-vm:1kB, anon-rss
 SUBSYSTEM=pci
4,8,1000000,-;NVRM: Xid (PCI:0000:18:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x002001c6 0x00000000 0x0)
4,9,1000000,-;NVRM: Xid (PCI:0000:18:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)
4,10,1000000,-;NVRM: The NVIDIA GPU 0000:1b:00.0\\x0aNVRM: (PCI ID: 10de:2330)\\x0aNVRM: fallen off the bus and is not
3,11,1000000,-,caller=T77;rcu: INFO: rcu_sched self-detected stall on CPU
4,12,1000000,-;CPU: 18 PID: 990 Comm: pt_main_thread Tainted: P           OE     6.8.0-40-generic
3,13,1000000,-;mlx5_core 0000:5c:00.0 ens1np0: Link down
3,14,1000000,-;mlx5_core 0000:5c:00.0 ens1np0: Link up
3,15,1000000,-;mce: [Hardware Error]: CPU 40: Machine Check Exception: 5 Bank 1: bd80000000100134
3,16,1000000,-;python[77]: segfault at 10 ip 00007f33ab sp 00007ffd error 6 in libnccl.so.2[7f3300000000+4a000000]
"""
LOG = b"""[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 1, in <module>
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
\rstep 5 of 9\rstep 6 of 9
RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1
Fatal Python error: Segmentation fault
"""
STAT = b"7 (a b) S 1 7 7 0 -1 0 0 0 0 0 5 5 0 0 20 0 3 0 99 1000 4 0 1 2 3\n"
TCP = b"""  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 0200007F:A1B2 01 00000010:00000000 01:00000014 00000003  1000        0 4711 2 0 20 4 30 10 -1
   1: 00000000000000000000000001000000:1F90 00000000000000000000000001000000:A1B2 02 00000010:0 01:14 3 0 0 4712
"""
ROUND = msgspec.json.encode(
    RoundFile(MESSAGE_VERSION, "job", "n", 2, 10, 20, "/run", (RankProcess(0, 0, 11, 21, "/out", "/err"),))
)


@fuzzed
@given(data=mutated([FLIGHT]))
def test_a_flight_recorder_dump_is_told_or_refused(data: bytes) -> None:
    """What can be told fits into a message; ValueError is the only way out."""
    with contextlib.suppress(ValueError):
        summary = flight_recorder.parse(data)
        msgspec.json.encode(summary.collectives)


@fuzzed
@given(data=mutated([SPIED, STACKS, b""]))
def test_stacks_are_told_or_refused(data: bytes) -> None:
    """py-spy's JSON, faulthandler's text."""
    with contextlib.suppress(NoAnswerError):
        msgspec.json.encode(py_spy.parse(data, 11))
    msgspec.json.encode(tracebacks.main_frames(data))
    tracebacks.parse(data)
    with contextlib.suppress(ValueError):
        stacks.catches(data.decode(errors="replace"), 10)


@fuzzed
@given(data=mutated([KERNEL]))
def test_the_kernels_log_is_counted_whatever_stands_in_it(tmp_path: Path, data: bytes) -> None:
    """Also where the log comes from another machine as a plain file."""
    LineReader().read(parse(data))
    log, memory = tmp_path / "kmsg", tmp_path / "memory"
    log.write_bytes(b"")
    watch = KernelWatch(KernelLog(str(log), str(memory), "boot"), lambda _: None, lambda: 1e9)
    watch.poll_log(1.0)
    log.write_bytes(data)

    found = watch.poll_log(2.0)

    assert watch.is_read
    assert not watch.error
    msgspec.json.encode(found)
    watch.close()


@fuzzed
@given(data=mutated([b'{"path": "kmsg", "boot": "boot", "seq": 5}']))
def test_what_is_remembered_of_a_log_may_be_anything(tmp_path: Path, data: bytes) -> None:
    """Then it is a log of which nothing is remembered."""
    log, memory = tmp_path / "kmsg", tmp_path / "memory"
    log.write_bytes(KERNEL)
    memory.write_bytes(data)
    source = KernelLog(str(log), str(memory), "boot")

    source.poll_log()

    source.close()


@fuzzed
@given(data=mutated([LOG]))
def test_last_words_of_any_kind_fit_into_a_heartbeat(tmp_path: Path, data: bytes) -> None:
    """300 bytes each, without what a terminal would act on."""
    path = tmp_path / "stderr"
    path.write_bytes(data)
    scanner = LogScanner(str(path))

    scanner.poll_stderr()

    for words in scanner.last_words:
        assert len(words.line.encode()) <= 300
        assert words.line.isprintable()
    scanner.tail()
    scanner.close()


@fuzzed
@given(line=st.text(max_size=300) | st.from_regex(r"(?s)[\w.: \[\]()'/-]{0,300}"))
def test_no_line_takes_the_patterns_long(line: str) -> None:
    """No pattern goes back over a line again and again: 40 times as much of it is still one look."""
    match(strip_prefix(line * 40), ends_traceback=True)


@fuzzed
@given(data=mutated([STAT, TCP]))
def test_files_of_proc_are_read_or_refused(data: bytes) -> None:
    """As other kernels, containers and sandboxes write them."""
    text = data.decode(errors="replace")
    for read in (process.parse, process.state_of):
        with contextlib.suppress(ValueError):
            read(data)
    for family in (AF_INET, AF_INET6):
        for one in sockets.parse(text, family).values():
            with contextlib.suppress(ValueError):
                sockets.host_of(one)
        msgspec.json.encode(unsent.parse([(text, family)], frozenset({4711, 4712})))
    pressure.parse({"pressure/memory": text, "vmstat": text})
    infiniband.parse({("mlx5_0", "1"): {"state": text, "rate": text, "counters/port_rcv_data": text}})


@fuzzed
@given(data=mutated([ROUND]))
def test_a_round_file_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    """The agent says so in one sentence, the next runner does as if there were none."""
    path = tmp_path / f"n{ROUND_SUFFIX}"
    path.write_bytes(data)

    read_round_file(path)
    with contextlib.suppress(MegascaleError):
        read_round(str(tmp_path), "n", myself())


def test_what_is_whole_is_read(tmp_path: Path) -> None:
    """Negative control: each of the corpora tells what it holds."""
    path = tmp_path / f"n{ROUND_SUFFIX}"
    path.write_bytes(ROUND)

    assert len(flight_recorder.parse(FLIGHT).collectives) == 2
    assert py_spy.parse(SPIED, 11).frames[0].function == "inner"
    assert [frame.function for frame in tracebacks.main_frames(STACKS)] == ["step", "<module>"]
    assert [event.kind for event in LineReader().read(parse(KERNEL))] == [
        *("xid", "sxid", "oom_kill", "xid", "xid", "xid", "rcu_stall"),
        *("nic_link_down", "nic_link_up", "machine_check", "segfault"),
    ]
    assert process.parse(STAT).start_ticks == 99
    assert len(sockets.parse(TCP.decode(), AF_INET)) == 1
    assert read_round(str(tmp_path), "n", myself()) == read_round_file(path)


@pytest.mark.timeout(60)
def test_no_round_file_holds_an_agent_up(tmp_path: Path) -> None:
    """A FIFO without a writer, a link to an endless device: none of ours."""
    os.mkfifo(tmp_path / f"n{ROUND_SUFFIX}")
    (tmp_path / f"m{ROUND_SUFFIX}").symlink_to("/dev/zero")

    for node in ("n", "m"):
        with contextlib.suppress(MegascaleError):
            assert read_round(str(tmp_path), node, myself()) is None
        assert read_round_file(tmp_path / f"{node}{ROUND_SUFFIX}") is None

# SPDX-License-Identifier: Apache-2.0
"""Stacks as the tools of others write them: whose they are, which thread is the main one, and where it is."""

import pytest
from megascale_agents.evidence.stack_places import where
from megascale_agents.evidence.stack_texts import looks

from tests.fakes.drawn_stacks import TOOLS, stacks_of

PLACES = {
    "waits_for_event": "in_lock", "waits_for_thread": "in_lock", "waits_for_queue": "in_lock",
    "waits_for_child": "in_child", "waits_for_server": "in_network", "loader": "in_data_loader",
    "loader0": "in_data_loader", "saves": "in_storage", "compiles": "in_compiler",
    "dist_all_reduce": "in_collective", "dist_barrier": "in_collective", "dist_object": "in_collective",
    "dist_recv": "in_collective", "dist_rendezvous": "in_rendezvous",
}  # fmt: skip
OF_C = {
    "waits_in_lock": "in_lock", "sleeps": "in_sleep", "waits_for_child": "in_child", "waits_for_server": "in_network",
    "reads_fifo": "in_storage", "dist_wait": "in_collective", "dist_barrier": "in_collective",
    "dist_rendezvous": "in_rendezvous", "spins": "in_native",
}  # fmt: skip
PYSTACK = """Traceback for thread 4242 (python) [] (most recent call last):
    (Python) File "/job/train.py", line 88, in <module>
    (Python) File "/job/train.py", line 40, in step
    (Python) File "/opt/site-packages/torch/distributed/distributed_c10d.py", line 2810, in all_reduce
"""
EU_STACK = """PID 77 - process
TID 77:
#0  0x00007f2a in __futex_abstimed_wait
#1  0x00007f2b c10d::Work::wait(std::chrono::duration<long>)
TID 78:
#0  0x00007f2a in poll
"""
FATAL = """Fatal Python error: Segmentation fault

Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/job/train.py", line 12 in load
  File "/job/train.py", line 90 in <module>

Extension modules: numpy.core._multiarray_umath (total: 1)
"""
CPP = """frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f in /opt/libc10.so)
frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<long>) + 0x282 (0x7f in /opt/libtorch_cuda.so)
"""


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if tool != "gdb"])
@pytest.mark.parametrize("way", sorted(PLACES))
def test_python_frames_tell_the_place(tool: str, way: str) -> None:
    """Real processes that hang in known ways, by each tool that shows Python."""
    (look,) = looks(stacks_of(tool)[way])

    assert where(look.main.frames).place == PLACES[way]


@pytest.mark.parametrize("way", sorted(OF_C))
def test_frames_of_c_tell_the_place(way: str) -> None:
    """The same processes by gdb."""
    (look,) = looks(stacks_of("gdb")[way])

    assert where(look.main.frames).place == OF_C[way]


@pytest.mark.parametrize("text", [PYSTACK, EU_STACK])
def test_other_tools(text: str) -> None:
    """Pystack, whose frames come the other way round, and eu-stack."""
    (look,) = looks(text)

    assert where(look.main.frames).place == "in_collective"


def test_a_fatal_error_has_the_main_thread_last() -> None:
    """Also where the thread that met it is the main one."""
    (look,) = looks(FATAL)

    assert look.main.frames[0].function == "load"
    assert look.others == 1


def test_dumps_that_follow_each_other_are_looks() -> None:
    """The main thread comes again: faulthandler repeats itself without a line between."""
    text = stacks_of("faulthandler")["waits_for_thread"]

    found = looks(text + text + text)

    assert [(look.main.frames[-1].function, look.others) for look in found] == [("<module>", 1)] * 3


def test_a_loaded_module_is_an_import() -> None:
    """DistributedDataParallel's constructor loads the compiler: nothing is compiled."""
    (look,) = looks(stacks_of("faulthandler")["dist_ddp"])

    assert where(look.main.frames).place == "in_import"


@pytest.mark.parametrize(
    "text", ["", "step 1 loss 2.0\n", CPP, "[1, 2", "[]", "{}", "Thread 12", "#0 ", "Thread 1 (idle"]
)
def test_what_is_no_stack_is_none(text: str) -> None:
    """Logs, torch's C++ frames of its watchdog's thread, and torn texts."""
    assert not [look for look in looks(text) if look.main.frames and look.main.frames[0].function]

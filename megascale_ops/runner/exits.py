# SPDX-License-Identifier: Apache-2.0
"""The meaning of an exit status, and what /proc shows of a process that is asked to exit. Pure.

Statuses are written as ``subprocess`` writes them: 0..255 for an exit, ``-N`` for death by signal N.
"""


def decode_wait_status(status: int) -> int:
    """Turn a raw wait status (as ``waitpid`` and field 52 of /proc/PID/stat give it) into a return code."""
    signal_number = status & 0x7F
    return -signal_number if signal_number else (status >> 8) & 0xFF


def status_in_words(code: int | None) -> str:
    """Return a return code as people read it; None is an unseen status."""
    if code is None:
        return "its exit status was not seen"
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def read_stat(text: str) -> tuple[str, int, int, int]:
    """Return ``(state, flags, start ticks, wait status)`` from the text of /proc/PID/stat.

    The name in parentheses may contain anything, so fields are counted from the last ``)``.
    Source: proc_pid_stat(5), fields 3, 9, 22 and 52.

    Raises:
        ValueError: when the text is not a stat line.
    """
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[6]), int(fields[19]), int(fields[49])


def is_of_the_kernel(flags: int) -> bool:
    """Return whether the flags of /proc/PID/stat are a kernel thread's (PF_KTHREAD, include/linux/sched.h)."""
    return bool(flags & 0x0020_0000)


def is_exiting(flags: int) -> bool:
    """Return whether the flags of /proc/PID/stat show that the process is dying (PF_EXITING, include/linux/sched.h).

    The kernel sets it before it frees the memory, which takes 64 ms for every touched GB; only then does ``waitpid``
    return. A restart need not wait for that.
    """
    return bool(flags & 0x4)


def early_code(flags: int, status: int) -> int | None:
    """Return the return code of a process that has begun to die, or None while only ``waitpid`` knows.

    A status of 0 is no evidence yet: the kernel writes it after the flag (do_exit, kernel/exit.c), so for a moment
    every process seems to end well; and one whose main thread alone has ended seems so as long as the others run.
    """
    return decode_wait_status(status) if is_exiting(flags) and status else None


def handles(status: str, number: int) -> bool:
    """Return whether a process catches or ignores a signal, by the text of /proc/PID/status: it won't die of it."""
    masks = (line.split()[1] for line in status.splitlines() if line.startswith(("SigCgt:", "SigIgn:")))
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def place_of(syscall: str) -> tuple[str, ...] | None:
    """Return a thread's place in the kernel, from the text of /proc/PID/syscall: call, stack and code pointer.

    None when it has none: it is running, or the kernel hides it. Source: proc_pid_syscall(5).
    """
    fields = syscall.split()
    # Nine fields inside of a system call, three where it is blocked outside of one (a page fault).
    return (fields[0], *fields[-2:]) if len(fields) in (3, 9) else None

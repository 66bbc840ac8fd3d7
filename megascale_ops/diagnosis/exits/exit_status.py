# SPDX-License-Identifier: Apache-2.0
"""The meaning of an exit status alone, also where a shell, a container or a batch system has translated it.

A shell whose child dies of signal N leaves with 128 + N, and so do ``bash -c``, Docker, Kubernetes and Slurm's steps.
A rank behind one of them ends with 137, and the signal itself is not seen. Python scripts leave with such codes of
their own accord next to never, so the sentence names the translation, with less certainty.

Pure: a number in, a signal, a class and words out.
"""

import signal

# Any other signal came from outside.
SIGNAL_FAULTS = {
    int(signal.SIGSEGV): "segfault",
    int(signal.SIGBUS): "segfault",
    int(signal.SIGILL): "segfault",
    int(signal.SIGFPE): "segfault",
    int(signal.SIGABRT): "aborted",
}
# Those that mean the same wherever they come from; 128 + 1 (129) and the like are codes of programs.
_TRANSLATED = (*SIGNAL_FAULTS, int(signal.SIGKILL), int(signal.SIGTERM), int(signal.SIGINT))
# How launchers stop the ranks that are left when one has failed.
ASKED = frozenset({int(signal.SIGTERM), int(signal.SIGINT), int(signal.SIGHUP)})
# 0.8: a script may have chosen such a code itself.
TRANSLATED_SURE = 0.8


def signal_of(code: int) -> int:
    """Return the number of the signal behind an exit status, 0 without one."""
    if code < 0:
        return -code
    return code - 128 if code - 128 in _TRANSLATED else 0


def told_by(code: int) -> str:
    """Return a clause naming the program that translated the signal; "" where the kernel reported it itself."""
    if code < 0 or not signal_of(code):
        return ""
    return f"exit code {code}, by which a shell, a container or a batch system tells of it"


def signal_name(number: int) -> str:
    """Return a signal's name, or its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

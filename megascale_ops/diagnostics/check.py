# SPDX-License-Identifier: Apache-2.0
"""What a check is: a row about it, ``measure``, which looks, and ``judge``, which is pure.

A check is one file with these three names. ``measure(task)`` runs in a process of its own, which is killed at the
deadline, and answers with numbers and texts; ``judge(reading)`` turns these into findings, in the program that asked,
and may be asked again later. What equals of one node or the figures of a model say of them is judged for all checks
alike (``judgement.py``): a check's own ``judge`` has the rest.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from megascale_ops.diagnostics.report import CheckFinding, Fact, Figure, Severity


class UnmeasuredError(Exception):
    """There is nothing to measure, or no right or tool for it: one sentence. Says nothing against the node."""


def doing(what: str) -> None:
    """Say what begins (``reading from /mnt``): where it hangs, this is what is told."""
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()


class Check(NamedTuple):
    """What is known of a check before it is made.

    Attributes:
        name: For options, reports and tables.
        about: What it measures, a few words.
        needs: What has to be there: ``gpu``, ``gpus`` (two or more), ``torch``.
        quick_s: Deadline of its work with ``--quick``; 0: not part of it.
        full_s: Deadline with ``--full``.
        alone: It measures a rate: nothing else of ours runs meanwhile.
        severity: What it means when the check hangs, or its process dies.
        a_path: It is made once for each path.
        process: Checks with the same word here share a process, so that what it has set up is set up once; a
            check that fails costs the next one a new process. "": a process of its own.
    """

    name: str
    about: str
    needs: tuple[str, ...] = ()
    quick_s: float = 5.0
    full_s: float = 10.0
    alone: bool = False
    severity: Severity = "bad"
    a_path: bool = False
    process: str = ""


class Task(msgspec.Struct, frozen=True):
    """What a check is told.

    Attributes:
        thorough: ``--full``: longer, larger, more often.
        paths: Folders whose disks are measured.
        deadline_s: When its process will be killed.
    """

    thorough: bool = False
    paths: tuple[str, ...] = ()
    deadline_s: float = 10.0


class Reading(msgspec.Struct, frozen=True):
    """What a check has measured, and sentences about what it could not measure."""

    figures: tuple[Figure, ...] = ()
    facts: tuple[Fact, ...] = ()
    unmeasured: tuple[str, ...] = ()

    def values(self, name: str) -> dict[str, float]:
        """Return the values of one figure by what they are of."""
        return {one.of: one.value for one in self.figures if one.name == name}

    def texts(self, name: str) -> dict[str, str]:
        """Return the texts of one fact by what they are of."""
        return {one.of: one.value for one in self.facts if one.name == name}


class CheckModule(Protocol):
    """The file of a check."""

    CHECK: Check

    @staticmethod
    def measure(task: Task) -> Reading:
        """Look.

        Raises:
            UnmeasuredError: there is nothing to look at.
        """

    @staticmethod
    def judge(reading: Reading) -> Sequence[CheckFinding]:
        """Return what is to be said of it, beside what its equals and its model say."""

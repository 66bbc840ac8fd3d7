# SPDX-License-Identifier: Apache-2.0
"""The order to check this node: ``megascale-ops diagnose`` is run, and what it found goes to the controller.

A program of its own: it loads torch and asks drivers that may hang, and the agent does neither. It has the agent's
rights, and an order names checks and a depth, never a path or a command. One at a time; a second order waits its turn,
since two would measure each other. At its deadline it is killed with all that it started, and that is its result. It
dies with the agent, too.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from megascale_agents.orders.background import Background
from megascale_ops.foreign import UNREADABLE
from megascale_ops.schema.health import DEADLINES_S, CheckAsk, SelfCheck
from megascale_ops.schema.messages import DIAGNOSE, SELF_CHECK, Evidence, EvidenceItem, Order

log = logging.getLogger(__name__)

_PROGRAM = (sys.executable, "-P", "-m", "megascale_ops.cli", "diagnose")
# 128 KiB: half a message; a summary of a node with 16 GPUs has 12 KB.
_MOST_BYTES = 128 * 1024
_MOST_WORDS = 400
_LEAST_S = 1.0
# 64 orders: a controller has one of a node at a time.
_REMEMBERED = 64
# 2 s: a killed process of a well kernel is gone in milliseconds.
_GIVEN_UP_S = 2.0
_BAD = 1  # the exit code of a check that found something bad


class Reports(Protocol):
    """Takes what was found to the controller."""

    async def report_evidence(self, evidence: Evidence) -> None:
        """Hand in evidence."""


class SelfChecks:
    """Checks this node when it is ordered to.

    Args:
        node: this node's name.
        speaker: takes the result to the controller.
        count: called with the kind and the outcome (obeyed, failed, refused) of each order.
        program: what makes the check; options follow.
    """

    def __init__(
        self, node: str, speaker: Reports, count: Callable[[str, str], None], program: Sequence[str] = _PROGRAM
    ) -> None:
        self._node = node
        self._speaker = speaker
        self._count = count
        self._program = program
        self._background = Background(_REMEMBERED)
        self._turn = asyncio.Lock()

    def ingest_order(self, order: Order) -> None:
        """Take an order; one that is known already is not executed again."""
        if self._background.begin(order, self._obey):
            log.info("order %s: %s (%s)", order.id, order.kind, order.reason, extra={"node": self._node})

    async def close(self) -> None:
        """Kill what runs; the controller says that no answer came."""
        await self._background.close()

    async def _obey(self, order: Order) -> None:
        """Check, and answer in any case."""
        ask = order.ask or CheckAsk()
        outcome = "obeyed"
        if order.node != self._node:
            outcome, found = "refused", self._without(ask, f"this is node {self._node}, the order is for {order.node}")
        else:
            limit_s = min(DEADLINES_S["full"], max(_LEAST_S, order.deadline_s))
            try:
                async with self._turn:
                    found = await self._check(ask, limit_s)
            except OSError as error:
                found = self._without(ask, f"the self-check can't be started: {error.strerror or error}")
            except Exception as error:  # an order that fails must not stop the agent; it is reported and logged
                log.exception("order %s: %s failed", order.id, order.kind, extra={"node": self._node})
                found = self._without(ask, f"the self-check failed by a fault of the agent's: {error!r}")
            outcome = "failed" if found.trouble else outcome
        self._count(DIAGNOSE, outcome)
        item = EvidenceItem(SELF_CHECK, ok=not found.trouble, text=found.trouble, took_s=found.seconds, check=found)
        await self._speaker.report_evidence(
            Evidence(node=self._node, job=order.job, incident="", order=order.id, items=(item,))
        )

    async def _check(self, ask: CheckAsk, limit_s: float) -> SelfCheck:
        """Run the program and return what it says.

        Raises:
            OSError: it can't be started.
        """
        command = [*self._program, f"--{ask.depth}", "--json", "--summary-for", str(os.getpid()), "--name", self._node]
        command += [f"--check={name}" for name in ask.checks]
        began_s = asyncio.get_running_loop().time()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # what it starts is killed with it
        )
        told = asyncio.create_task(process.communicate(), name="self-check")
        try:
            async with asyncio.timeout(limit_s):
                out, words = await asyncio.shield(told)
        except TimeoutError:
            took_s = asyncio.get_running_loop().time() - began_s
            text = f"the self-check was killed at its deadline of {limit_s:g} s"
            return msgspec.structs.replace(self._without(ask, text), status="bad", seconds=took_s)
        finally:
            await _end(process, told)
        seconds = asyncio.get_running_loop().time() - began_s
        try:
            if process.returncode not in (0, _BAD) or len(out) > _MOST_BYTES:
                raise ValueError("no summary")  # noqa: TRY301  told as one that can't be read
            found = msgspec.json.decode(out, type=SelfCheck)
        except (*UNREADABLE, ValueError):
            last = next(reversed(words.decode("utf-8", "replace").strip().splitlines()), "")[:_MOST_WORDS]
            how = f"exit code {process.returncode}{f': {last}' if last else ''}"
            text = f"the self-check ended without a report ({how})"
            return msgspec.structs.replace(self._without(ask, text), seconds=seconds)
        return msgspec.structs.replace(found, node=self._node)

    def _without(self, ask: CheckAsk, trouble: str) -> SelfCheck:
        return SelfCheck(self._node, ask.depth, "unmeasured", trouble=trouble)


async def _end(process: asyncio.subprocess.Process, told: "asyncio.Task[tuple[bytes, bytes]]") -> None:
    """Kill what still runs, and wait a moment: one that the kernel holds is left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(_GIVEN_UP_S):
            await asyncio.shield(told)
    told.cancel()

# SPDX-License-Identifier: Apache-2.0
"""The order to check this node: what is run, what counts as an answer, and that a check that hangs is killed."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from megascale_agents.orders.self_checks import SelfChecks

from megascale_ops.schema.health import CheckAsk, SelfCheck
from megascale_ops.schema.messages import DIAGNOSE, SELF_CHECK, Evidence, EvidenceItem, Order

GOOD = SelfCheck("whatever", "quick", "good", seconds=1.0, made=3)


class Told:
    """What was handed in, and the outcomes that were counted."""

    def __init__(self) -> None:
        self.evidence: asyncio.Queue[Evidence] = asyncio.Queue()
        self.outcomes: list[str] = []

    async def report_evidence(self, evidence: Evidence) -> None:
        """Take it."""
        self.evidence.put_nowait(evidence)

    async def item(self) -> EvidenceItem:
        """Return the next answer."""
        async with asyncio.timeout(20.0):
            (item,) = (await self.evidence.get()).items
        assert item.kind == SELF_CHECK
        assert item.check is not None
        return item


Made = Callable[[str], tuple[SelfChecks, Told]]


@pytest.fixture
async def made() -> AsyncIterator[Made]:
    """An executor whose program is the given Python, closed whatever the test does."""
    all_of_them = []

    def make(program: str) -> tuple[SelfChecks, Told]:
        told = Told()
        checks = SelfChecks("n1", told, lambda _kind, outcome: told.outcomes.append(outcome),
                            (sys.executable, "-c", program))  # fmt: skip
        all_of_them.append(checks)
        return checks, told

    yield make
    for checks in all_of_them:
        await checks.close()


def order(node: str = "n1", deadline_s: float = 20.0, name: str = "self_check-1") -> Order:
    """Return an order to check."""
    ask = CheckAsk("full", ("cpu", "gemm"))
    return Order(name, "job", node, DIAGNOSE, 0, reason="a test", deadline_s=deadline_s, ask=ask)


async def test_the_verb_is_run_with_what_was_asked_and_its_summary_comes_back(made: Made, tmp_path: Path) -> None:
    """Depth and checks as options, this process as the parent to die with, the agent's own name for the node; once."""
    given = tmp_path / "given"
    answer = msgspec.json.encode(GOOD).decode()
    checks, told = made(f"import sys; open({str(given)!r}, 'a').write(' '.join(sys.argv[1:])); print({answer!r})")

    checks.ingest_order(order())
    checks.ingest_order(order())
    item = await told.item()

    assert item.ok
    assert item.check == msgspec.structs.replace(GOOD, node="n1")
    words = given.read_text().split()
    assert words[:2] == ["--full", "--json"]
    assert words[-4:] == ["--name", "n1", "--check=cpu", "--check=gemm"]
    assert told.outcomes == ["obeyed"]


async def test_a_check_that_hangs_is_killed_with_all_that_it_started_and_that_is_the_result(
    made: Made, tmp_path: Path
) -> None:
    """The result is bad and says after how long; its children are gone, too."""
    child = tmp_path / "child"
    checks, told = made(
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']);"
        f"open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(100)"
    )

    checks.ingest_order(order(deadline_s=2.0))
    item = await told.item()

    assert item.check is not None
    assert (item.ok, item.check.status) == (False, "bad")
    assert item.text == "the self-check was killed at its deadline of 2 s"
    await _await_end(int(child.read_text()))
    assert told.outcomes == ["failed"]


async def _await_end(pid: int) -> None:
    """Wait until a process is gone: the signal that kills it is sent before it has died."""
    async with asyncio.timeout(20.0):
        while _lives(pid):  # noqa: ASYNC110  the kernel tells nobody
            await asyncio.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('no module named click')", "exit code 1: no module named click"),
        ("print('nonsense')", "exit code 0"),
        ("print('{}')", "exit code 0"),
        ("print('x' * 200_000)", "exit code 0"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
    ],
)
async def test_without_a_report_there_is_no_verdict(made: Made, program: str, said: str) -> None:
    """The last words say why."""
    checks, told = made(program)

    checks.ingest_order(order())
    item = await told.item()

    assert item.check is not None
    assert (item.ok, item.check.status) == (False, "unmeasured")
    assert item.text == f"the self-check ended without a report ({said})"


async def test_an_order_for_another_node_starts_nothing(made: Made, tmp_path: Path) -> None:
    """It is refused with a sentence."""
    checks, told = made(f"open({str(tmp_path / 'ran')!r}, 'w')")

    checks.ingest_order(order(node="n2"))
    item = await told.item()

    assert item.text == "this is node n1, the order is for n2"
    assert told.outcomes == ["refused"]
    assert not (tmp_path / "ran").exists()


async def test_closing_kills_what_runs(made: Made, tmp_path: Path) -> None:
    """An agent that ends leaves no check behind."""
    place = tmp_path / "pid"
    checks, _ = made(f"import os, time; open({str(place)!r}, 'w').write(str(os.getpid())); time.sleep(100)")
    checks.ingest_order(order())
    async with asyncio.timeout(20.0):
        while not place.exists() or not place.read_text():  # noqa: ASYNC110  it is another process's
            await asyncio.sleep(0.02)  # it writes a file, and tells nobody

    await checks.close()

    await _await_end(int(place.read_text()))

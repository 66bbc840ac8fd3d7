# SPDX-License-Identifier: Apache-2.0
"""A GPU that failed is kept by its UUID until an operator reports the repair."""

import logging
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from megascale_ops.cli.bad_hardware import bad_hardware, lines_of
from megascale_ops.controller.detectors.bad_hardware import MOST_ENTRIES, SAME_S, BadBook
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import open_store
from megascale_ops.errors import RefusedError
from megascale_ops.link import Link
from megascale_ops.schema.health import BadHardware, HardwareFinding
from megascale_ops.schema.messages import Heartbeat
from tests.fakes.controlled_job import World
from tests.fakes.served_controller import serve_controller

T0 = 1_795_288_699.0
XID = HardwareFinding("xid_79", "GPU 3: Xid 79", "kernel_log", "fail", "GPU-3", T0, T0, is_bad=True)
HOT = HardwareFinding("throttled_hw_thermal", "GPU 3: hot", "gpu", gpu="GPU-3")


def at(wall_s: float, finding: HardwareFinding = XID) -> HardwareFinding:
    """Return the finding as it happened then."""
    return msgspec.structs.replace(finding, since_wall_s=wall_s, last_wall_s=wall_s)


def test_each_reason_is_counted_once_for_each_time_it_happens() -> None:
    """A burst, and what is told again with every full heartbeat, is one occurrence."""
    book = BadBook()

    first = book.ingest_findings("a", [XID, HOT])
    burst = book.ingest_findings("a", [XID, at(T0 + SAME_S - 1.0)])
    again = book.ingest_findings("b", [at(T0 + 3600.0)])

    assert [(one.reason, one.count) for one in first] == [("xid_79", 1)]
    assert burst == ()
    assert book.entries() == (BadHardware("GPU-3", "xid_79", "b", "GPU 3: Xid 79", T0, T0 + 3600.0, 2),)
    assert again == book.entries()


def test_a_gpu_that_was_mended_begins_anew() -> None:
    """What still stands from before is not taken in again; what happens from then on is."""
    book = BadBook()
    book.ingest_findings("a", [XID])

    gone = book.mend("GPU-3", T0 + 100.0)
    still = book.ingest_findings("a", [XID])
    anew = book.ingest_findings("a", [at(T0 + 200.0)])

    assert [(one.uuid, one.count) for one in gone] == [("GPU-3", 0)]
    assert still == ()
    assert [one.count for one in anew] == [1]
    assert book.mend("GPU-9", T0) == ()


def test_a_gpu_is_known_by_the_number_on_its_label_too() -> None:
    """The board that turns up under another UUID is the same board; one without a number is no other's."""
    book = BadBook()
    (entry,) = book.ingest_findings("a", [XID], {"GPU-3": "1650924"})
    book.ingest_findings("b", [msgspec.structs.replace(XID, gpu="GPU-4")])

    assert entry.serial == "1650924"
    assert [one.uuid for one in book.of(["GPU-new"], ["1650924"])] == ["GPU-3"]
    assert book.of(["GPU-new"], [""]) == []
    assert lines_of([entry])[0] == "GPU-3, serial number 1650924, on a"


async def test_serial_numbers_come_with_heartbeats() -> None:
    """Once told beside the UUIDs they are known when a finding comes; the job that gets the board again hears it."""
    world = World()
    world.loop.heartbeat(
        Heartbeat("z", "x", 1, 1.0, T0, full=True, gpus=("GPU-3",), serials=("1650924",), findings=(XID,))
    )
    world.loop.heartbeat(Heartbeat("z", "x", 2, 2.0, T0, gpus=("GPU-3", "GPU-4"), serials=("1650924",)))

    assert [one.serial for one in world.loop.hardware.book.entries()] == ["1650924"]


def test_the_book_is_bounded() -> None:
    """The longest quiet is forgotten first."""
    book = BadBook(BadHardware(f"GPU-{n}", "xid_79", "a", "", T0, T0 + n) for n in range(MOST_ENTRIES))

    changed = book.ingest_findings("a", [at(T0 + 1e6, msgspec.structs.replace(XID, gpu="GPU-new"))])

    assert [(one.uuid, one.count) for one in changed] == [("GPU-new", 1), ("GPU-0", 0)]
    assert len(book.entries()) == MOST_ENTRIES


async def test_a_job_that_gets_a_bad_gpu_again_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    """Across a restart of the controller, on another node, once for each round."""
    caplog.set_level(logging.WARNING)
    world = World()
    world.findings["z"] = (XID,)
    world.beat("z")
    world.restart_controller()
    world.gpus["a"] = ("GPU-1", "GPU-3")
    await world.up("a")
    world.beat("a")
    await world.settle()

    told = [event for event in world.memory.events if event.kind == "bad_hardware"]
    assert len(told) == 1
    assert told[0].node == "a"
    assert "GPU-3, which is remembered as bad (GPU 3: Xid 79; once, then in z)" in told[0].text
    assert "megascale-ops bad-hardware forget GPU-3" in told[0].text
    assert sum("is remembered as bad (" in line.message for line in caplog.records) == 1


def test_the_journal_keeps_it(tmp_path: Path) -> None:
    """Also when it could not be written at once, and until it is mended."""
    store = open_store(f"sqlite:///{tmp_path}/ops.db")
    entry = BadHardware("GPU-3", "xid_79", "a", "GPU 3: Xid 79", T0, T0)
    store.submit(Batch(hardware=(entry, msgspec.structs.replace(entry, reason="gpu_lost"))))
    store.submit(Batch(hardware=(msgspec.structs.replace(entry, count=2),)))
    store.close()
    again = open_store(f"sqlite:///{tmp_path}/ops.db")
    kept = again.hardware()
    again.submit(Batch(hardware=tuple(msgspec.structs.replace(one, count=0) for one in kept)))
    again.flush()
    left = again.hardware()
    again.close()

    assert {(one.reason, one.count) for one in kept} == {("xid_79", 2), ("gpu_lost", 1)}
    assert left == ()


def test_a_journal_of_an_older_program_is_taken_over(tmp_path: Path) -> None:
    """It has no such table: it gets one when it is written to, and is read as it is."""
    url = f"sqlite:///{tmp_path}/ops.db"
    open_store(url).close()
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("DROP TABLE hardware"))

    reader = open_store(url, readonly=True)
    before = reader.hardware()
    reader.close()
    writer = open_store(url)
    writer.submit(Batch(hardware=(BadHardware("GPU-3", "xid_79", "a", "x", T0, T0),)))
    writer.flush()
    after = writer.hardware()
    writer.close()

    assert (before, len(after)) == ((), 1)


async def test_people_ask_and_clear_over_http(tmp_path: Path) -> None:
    """An unknown GPU is refused in one sentence."""
    async with serve_controller(tmp_path) as served, Link(served.url) as link:
        await link.heartbeat(Heartbeat("a", "x", 1, 1.0, T0, full=True, findings=(XID,)))
        known = await link.hardware()
        await link.mend_hardware("GPU-3")
        left = await link.hardware()
        with pytest.raises(RefusedError, match="nothing bad is remembered of GPU 'GPU-3'"):
            await link.mend_hardware("GPU-3")

    assert [one.uuid for one in known.entries] == ["GPU-3"]
    assert left.entries == ()


def test_people_read_one_headline_for_each_gpu(tmp_path: Path) -> None:
    """From the journal of a run that is over, too, where no controller is left that could forget one."""
    store = open_store(f"sqlite:///{tmp_path}/journal.db")
    store.submit(Batch(hardware=(BadHardware("GPU-3", "xid_79", "a", "GPU 3: Xid 79", T0, T0),)))
    store.close()

    shown = CliRunner().invoke(bad_hardware, ["list", "--run-dir", str(tmp_path)])
    twice = lines_of([BadHardware("GPU-3", reason, "a", "text", T0, T0, 3) for reason in ("xid_79", "gpu_lost")])

    assert shown.exit_code == 0
    assert "GPU-3 on a\n" in shown.output
    assert "GPU 3: Xid 79 (xid_79, once)" in shown.output
    assert "forget" not in shown.output
    assert [line.startswith("    ") for line in twice] == [False, True, True]
    assert "3 times since" in twice[1]

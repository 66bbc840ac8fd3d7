# SPDX-License-Identifier: Apache-2.0
"""A controller that hands its incidents over: what a judge finds arrives, and nothing of it waits."""

import asyncio
from pathlib import Path

import pytest

from megascale_ops.controller.config import ControllerConfig
from megascale_ops.controller.notifying import Notifying, page_address
from megascale_ops.errors import UsageError
from megascale_ops.notify.config import NotifyConfig, Secret, Target
from megascale_ops.schema.health import Verdict
from tests.fakes.notified import WebTarget
from tests.fakes.training_job import Training

HASH = "#incident="


def config_of(web: WebTarget, **settings: object) -> ControllerConfig:
    """Return a controller that tells one web server."""
    target = Target(kind="webhook", url=Secret(web.url), **settings)  # type: ignore[arg-type]  # settings of a target
    return ControllerConfig(notify=NotifyConfig(targets={"hook": target}))


@pytest.fixture
async def world() -> Training:
    """A job of four ranks that has made some steps."""
    world = Training(nproc=4)
    await world.up("a", step=-1)
    for _ in range(10):
        world.second()
    return world


async def test_a_killed_rank_is_told_with_its_card_and_a_link(world: Training) -> None:
    """From the loop's book to a real server, and once more when training is back."""
    with WebTarget() as web:
        notifying = Notifying(config_of(web, solved=True), world.loop)
        notifying.begin("http://127.0.0.1:7070")
        await world.crash()
        notifying.poll()
        first = await asyncio.to_thread(web.wait_for, 1)
        for _ in range(30):
            world.second()
            notifying.poll()
        both = await asyncio.to_thread(web.wait_for, 2)
        await notifying.close()

    assert [one["event"] for one in both] == ["opened", "solved"]
    assert first[0]["fault"] == "killed"
    assert first[0]["severity"] == "error"
    assert first[0]["link"] == f"http://127.0.0.1:7070/{HASH}{first[0]['incident']}"
    assert notifying.counts["sent"] == {"webhook": 2}


async def test_a_warning_below_the_severity_sends_nothing(world: Training) -> None:
    """The negative control on the whole way: a straggler is judged, and the server hears no word."""
    with WebTarget() as web:
        notifying = Notifying(config_of(web, severity="error"), world.loop)
        notifying.begin("")
        job = world.loop.jobs["job"]
        world.loop.transitions.warn(job, "straggler:1", Verdict("straggler", "slow", 0.9, culprits=(1,), round=1))
        notifying.poll()
        await notifying.close()

    assert [incident.state for incident in world.loop.incidents.values()] == ["watching"]
    assert web.paths == []


async def test_a_target_that_never_answers_delays_no_look(world: Training) -> None:
    """A thousand looks and two hundred warnings beside it take less than its first attempt may; the rest is counted."""
    with WebTarget() as web:
        web.hangs.set()
        notifying = Notifying(config_of(web, per_hour=150, timeout_s=120.0), world.loop)
        notifying.begin("")
        job = world.loop.jobs["job"]
        for number in range(200):
            verdict = Verdict("straggler", "slow", 0.9, culprits=(1,), round=1)
            world.loop.transitions.warn(job, f"straggler:{number}", verdict)
        for _ in range(1000):
            notifying.poll()
        await asyncio.to_thread(notifying._outbox.stop, 0.0)

    # 200 warnings, of which 150 fit into the hour, of which 100 or 101 fit into the queue.
    assert notifying.counts["left_out"]["webhook"] in (99, 100)
    assert notifying.counts["sent"] == {}


async def test_without_a_target_nothing_is_started(world: Training) -> None:
    """No thread, no count: most controllers have no targets."""
    notifying = Notifying(ControllerConfig(), world.loop)

    notifying.begin("")
    notifying.poll()
    await notifying.close()

    assert not notifying._outbox._thread.is_alive()
    assert notifying.kinds == ()


async def test_a_secret_that_can_t_be_read_is_said_before_anything_is_served(world: Training, tmp_path: Path) -> None:
    """As with a token: at the start, when a user looks, and not when it would have been needed."""
    target = Target(kind="slack", url_file=tmp_path / "nowhere")

    with pytest.raises(UsageError, match=r"address file .*nowhere can't be read"):
        Notifying(ControllerConfig(notify=NotifyConfig(targets={"a": target})), world.loop)


def test_links_lead_to_where_the_page_is_listened_for() -> None:
    """By name where all addresses are listened on, since those are no address to go to."""
    assert page_address("127.0.0.1:7070", 7171, is_tls=False) == "http://127.0.0.1:7171"
    assert page_address("[::1]:0", 7171, is_tls=True) == "https://[::1]:7171"
    assert "0.0.0.0" not in page_address("0.0.0.0:7070", 7070, is_tls=False)  # noqa: S104  nothing is bound here

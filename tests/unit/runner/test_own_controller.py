# SPDX-License-Identifier: Apache-2.0
"""Which controller a run speaks to, and with which token: held against real controllers that ask for one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from megascale_ops.errors import MegascaleError, RefusedError, UsageError
from megascale_ops.link.token_files import write_token_file
from megascale_ops.link.whereabouts import Whereabouts, link_of, write_whereabouts
from megascale_ops.runner.config import RunConfig
from megascale_ops.runner.meeting import Meeting
from megascale_ops.runner.services import companions, own_controller
from megascale_ops.runner.services.own_controller import Found, find_controller
from megascale_ops.schema.tokens import new_token
from tests.fakes.served_controller import Served, serve_controller


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """A controller of another run of this user, which says in its folder where it is and which token it asks for."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("MEGASCALE_TOKEN", "MEGASCALE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(own_controller, "_MEETING_S", 0.0)
    token = new_token()
    async with serve_controller(tmp_path, token) as one:
        folder = tmp_path / "state" / "megascale-ops" / "first"
        folder.mkdir(parents=True)
        write_token_file(folder / "controller.token", token)
        write_whereabouts(folder, Whereabouts(one.url, token_file=str(folder / "controller.token")))
        yield one


async def _find(config: RunConfig, meeting: Meeting, run_dir: Path) -> Found:
    return await asyncio.to_thread(find_controller, config, meeting, run_dir, {})


async def test_a_runner_of_the_same_line_finds_the_token(served: Served, tmp_path: Path) -> None:
    """Where they meet, and as ``--controller``: of the same user on the same machine nothing has to be given."""
    file = str(tmp_path / "state" / "megascale-ops" / "first" / "controller.token")

    met = await _find(RunConfig(), Meeting(served.url, in_place=True), tmp_path / "mine")
    given = await _find(RunConfig(controller=served.url), Meeting(served.url), tmp_path / "mine")

    assert met == given == Found(served.url, file)


async def test_a_controller_that_is_given_is_waited_for_as_long_as_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--controller-wait 0`` asks once; where runners of one line meet they have at least their minute."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    granted: list[float] = []

    def wait(url: str, token_file: str, _run_dir: Path, deadline_s: float, *, makes_token: bool) -> Found:
        granted.append(deadline_s)
        return Found(url, token_file if not makes_token else "made")

    monkeypatch.setattr(own_controller, "wait_for_controller", wait)
    url = "http://127.0.0.1:1"

    given = await _find(RunConfig(controller=url, controller_wait_s=0.0), Meeting(url), tmp_path)
    met = await _find(RunConfig(controller_wait_s=0.0), Meeting(url, in_place=True), tmp_path)

    assert granted == [0.0, 60.0]
    assert (given, met) == (Found(url, ""), Found(url, "made"))


async def test_a_token_that_is_not_to_be_found_is_asked_for(served: Served, tmp_path: Path) -> None:
    """The sentence says what to do; a folder that tells of another controller is no help."""
    folder = tmp_path / "state" / "megascale-ops" / "first"
    write_whereabouts(folder, Whereabouts("http://127.0.0.1:1", token_file=str(folder / "controller.token")))

    with pytest.raises(UsageError, match="give all runs of this job the same --token-file FILE"):
        await _find(RunConfig(controller_wait_s=0.0), Meeting(served.url, in_place=True), tmp_path / "mine")


async def test_a_wrong_token_is_said_at_once(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user gave it, so waiting for another one is in vain."""
    monkeypatch.setattr(own_controller, "_MEETING_S", 3600.0)
    wrong = tmp_path / "wrong"
    write_token_file(wrong, new_token())

    with pytest.raises(RefusedError, match="wants a token of its own"):
        await _find(RunConfig(token_file=str(wrong)), Meeting(served.url, in_place=True), tmp_path / "mine")


@pytest.mark.parametrize("is_taken", [True, False])
async def test_of_two_that_start_at_once_the_second_goes_to_the_first(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    """Both saw a free port and one got it. Where neither has it, its own error is shown."""
    address = served.url.removeprefix("http://")
    looks = iter([True, not is_taken])
    monkeypatch.setattr(own_controller, "is_free", lambda _port: next(looks))

    def fail(*_: object) -> None:
        raise MegascaleError("the controller of this run did not start: the port is taken")

    monkeypatch.setattr(companions, "start_controller", fail)
    meeting = Meeting(served.url, serve=address, in_place=True)

    if is_taken:
        assert (await _find(RunConfig(), meeting, tmp_path / "mine")).own is None
    else:
        with pytest.raises(MegascaleError, match="did not start"):
            await _find(RunConfig(), meeting, tmp_path / "mine")


async def test_a_link_to_a_run_carries_its_token(served: Served, tmp_path: Path) -> None:
    """For programs of ours that have started a run; a folder that tells of none is one sentence."""
    folder = tmp_path / "state" / "megascale-ops" / "first"

    with link_of(folder) as link:
        status = await asyncio.to_thread(link.status)

    assert status.jobs == ()
    assert served.loop.rejected["unauthorised"] == 0
    with pytest.raises(MegascaleError, match="tells of no controller"):
        link_of(tmp_path)

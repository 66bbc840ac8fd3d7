# SPDX-License-Identifier: Apache-2.0
"""Tokens and certificates are changed while the controller serves, and what is void afterwards is refused."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from megascale_agents.uplink.http_link import LightLink

from megascale_ops.cli.main import main
from megascale_ops.controller.config import ControllerConfig
from megascale_ops.controller.entrance import Entrance
from megascale_ops.controller.journal.store import open_store
from megascale_ops.controller.loop import Loop
from megascale_ops.controller.server.api import Api
from megascale_ops.controller.server.listen import listening
from megascale_ops.errors import ControllerUnreachableError, MegascaleError, RefusedError, UsageError
from megascale_ops.link import BlockingLink, Link
from megascale_ops.link.tls import ClientTls
from megascale_ops.link.token_files import end_rotation, read_token_file, rotate, write_token_file
from megascale_ops.schema.tokens import Grant, issue, new_token
from tests.fakes.certificates import make_certificate


def _certificate(folder: Path) -> Path:
    folder.mkdir()
    return make_certificate(folder)


@contextlib.asynccontextmanager
async def _serving(entrance: Entrance, folder: Path) -> AsyncIterator[str]:
    """Serve behind an entrance; yield host and port."""
    store = open_store(f"sqlite:///{folder}/ops.db")
    events = asyncio.get_running_loop()

    def post(callback: Callable[[], None]) -> None:
        events.call_soon_threadsafe(callback)

    loop = Loop(store, clock=time.monotonic, wall=time.time, post=post)
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        async with listening(Api(loop, store, entrance.access), listener, entrance.context):
            yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        store.close()


async def _may(link: Link) -> bool:
    try:
        await link.status()
    except RefusedError:
        return False
    return True


async def test_two_tokens_are_valid_during_a_change_and_one_after_it(tmp_path: Path) -> None:
    """What was derived from the old one is as valid as that; a client with a file takes the new one by itself."""
    file, old = tmp_path / "token", new_token()
    write_token_file(file, old)
    derived = issue(old, Grant("read"))
    entrance = Entrance(ControllerConfig(token_file=file, store="sqlite:///x"))
    seen: list[tuple[bool, bool, bool]] = []
    async with _serving(entrance, tmp_path) as where, Link(f"http://{where}", read_token_file(file)) as follows:

        async def look() -> None:
            given = (old, derived, str(read_token_file(file)))
            links = [Link(f"http://{where}", token) for token in given]
            answers = [await _may(link) for link in links]
            for link in links:
                await link.close()
            seen.append((answers[0], answers[1], answers[2]))
            assert await _may(follows)

        await look()
        rotate(file, new_token())
        entrance.poll()
        await look()
        end_rotation(file)
        entrance.poll()
        await look()

    assert seen == [(True, True, True), (True, True, True), (False, False, True)]


async def test_agent_and_runner_read_their_token_again_when_they_are_refused(tmp_path: Path) -> None:
    """The agent's link and the blocking one; a token that was given as a word stays refused."""
    file = tmp_path / "token"
    write_token_file(file, new_token())
    entrance = Entrance(ControllerConfig(token_file=file, store="sqlite:///x"))
    async with _serving(entrance, tmp_path) as where:
        url, before = f"http://{where}", read_token_file(file)
        with BlockingLink(url, before) as runner, BlockingLink(url, str(before)) as word:
            agent = LightLink(url, before)
            file.unlink()
            write_token_file(file, new_token())
            entrance.poll()

            runner_may = bool(await asyncio.to_thread(runner.status))
            agent_may = await _may(agent)
            with pytest.raises(RefusedError, match="not valid here"):
                await asyncio.to_thread(word.status)
            await agent.close()

    assert runner_may
    assert agent_may


def test_what_can_not_be_read_changes_nothing(tmp_path: Path) -> None:
    """A file that others may read, an empty one, and none: told with one sentence, and the token stays."""
    file, token = tmp_path / "token", new_token()
    write_token_file(file, token)
    entrance = Entrance(ControllerConfig(token_file=file, store="sqlite:///x"))
    headers = {"Authorization": f"Bearer {token}"}

    def is_refused(text: str | None, mode: int, why: str) -> bool:
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
            file.chmod(mode)
        with pytest.raises(UsageError, match=why):
            entrance.poll()
        return entrance.access.grant(headers).is_everything

    assert is_refused(new_token(), 0o644, "chmod 600")
    assert is_refused("\n\n", 0o600, "is empty")
    assert is_refused(None, 0, "can't be read")


def test_the_verb_changes_a_token_and_ends_the_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once begun it is not begun again, and what was not begun is not ended."""
    file = tmp_path / "token"
    assert main(["token", "new", str(file)]) == 0
    old = str(read_token_file(file))

    codes = [main(["token", "rotate", str(file)]) for _ in range(2)]
    former = str(read_token_file(tmp_path / "token.former"))
    ends = [main(["token", "rotate", "--end", str(file)]) for _ in range(2)]
    told = capsys.readouterr().err

    assert codes == [0, 2]
    assert ends == [0, 2]
    assert former == old != str(read_token_file(file))
    assert "is under way already" in told
    assert "no change of the token" in told
    assert old not in told


async def test_clients_show_a_certificate_where_one_is_asked_for(tmp_path: Path) -> None:
    """Mutual TLS: with the authority's certificate in; with another one, or with none, out."""
    server, client, other = (_certificate(tmp_path / name) for name in ("server", "client", "other"))
    config = ControllerConfig(store="sqlite:///x", tls_cert=server, tls_client_ca=client)
    async with _serving(Entrance(config), tmp_path) as where:

        async def may(shown: str) -> bool:
            link = LightLink(f"https://{where}")
            tls = ClientTls(str(server), shown)
            link._clients = {link.url: type(link._clients[link.url])(link.url, {}, tls=tls.context)}
            try:
                return await _may(link)
            except ControllerUnreachableError:
                return False
            finally:
                await link.close()

        answers = [await may(str(one)) for one in (client, other)] + [await may("")]

    assert answers == [True, False, False]


async def test_the_environment_says_what_all_clients_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent, runner and verbs alike; without it the server's certificate is not trusted."""
    server, client = (_certificate(tmp_path / name) for name in ("server", "client"))
    config = ControllerConfig(store="sqlite:///x", tls_cert=server, tls_client_ca=client)
    async with _serving(Entrance(config), tmp_path) as where:
        url = f"https://{where}"
        with pytest.raises(ControllerUnreachableError):
            async with Link(url) as link:
                await link.status()
        monkeypatch.setenv("MEGASCALE_TLS_CA", str(server))
        monkeypatch.setenv("MEGASCALE_TLS_CERT", str(client))
        with BlockingLink(url) as blocking:
            is_told = bool(await asyncio.to_thread(blocking.status))
        async with Link(url) as link:
            is_told &= await _may(link)
        agent = LightLink(url)
        is_told &= await _may(agent)
        await agent.close()

    assert is_told


async def test_a_renewed_certificate_counts_from_the_next_connection_on(tmp_path: Path) -> None:
    """No restart; a file that is no certificate changes nothing."""
    first, second = (_certificate(tmp_path / name) for name in ("first", "second"))
    used = tmp_path / "used.pem"
    used.write_text(first.read_text())
    entrance = Entrance(ControllerConfig(store="sqlite:///x", tls_cert=used))
    async with _serving(entrance, tmp_path) as where:

        async def trusted(by: Path) -> bool:
            try:
                async with Link(f"https://{where}", ca_file=by) as link:
                    return await _may(link)
            except ControllerUnreachableError:
                return False

        before = await trusted(first), await trusted(second)
        used.write_text(second.read_text())
        entrance.poll()
        after = await trusted(first), await trusted(second)
        used.write_text("no certificate")
        with pytest.raises(UsageError, match="can't be used"):
            entrance.poll()
        still = await trusted(second)

    assert before == (True, False)
    assert after == (False, True)
    assert still


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tls_client_ca": Path("/nonexistent")}, "of no use without tls_cert"),
        ({"tls_cert": Path("/nonexistent")}, "certificate /nonexistent can't be used"),
    ],
)
def test_what_can_not_be_served_with_is_refused(given: dict[str, Path], why: str) -> None:
    """One sentence each."""
    with pytest.raises(UsageError, match=why):
        Entrance(ControllerConfig(store="sqlite:///x", **given))  # type: ignore[arg-type]  # fields


def test_a_clients_certificate_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    """Files that are not there, and a key without a certificate."""
    missing = str(tmp_path / "none.pem")

    with pytest.raises(UsageError, match=r"client certificate .*none.pem can't be used"):
        ClientTls(certificate=missing)
    with pytest.raises(UsageError, match=r"certificate file .*none.pem can't be used"):
        ClientTls(missing)
    with pytest.raises(UsageError, match="MEGASCALE_TLS_KEY is of no use"):
        ClientTls(key=missing)


def test_a_token_file_that_takes_its_place_later_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a run does with its own controller's: nothing is told, and a change at the new place counts."""
    first, place = tmp_path / ".made.new", tmp_path / "controller.token"
    write_token_file(first, new_token())
    before = read_token_file(first)
    entrance = Entrance(ControllerConfig(token_file=first))

    first.rename(place)
    entrance.poll()
    told = list(caplog.records)
    rotate(place, new_token())
    entrance.poll()

    assert not told
    for token in (before, read_token_file(place)):
        assert entrance.access.grant({"Authorization": f"Bearer {token}"}) is not None


def test_a_token_file_that_is_gone_is_told_and_no_other_file_takes_its_place(tmp_path: Path) -> None:
    """The negative control: another secret of the folder is none of ours, and the token goes on being valid."""
    first = tmp_path / "token"
    write_token_file(first, new_token())
    before = read_token_file(first)
    entrance = Entrance(ControllerConfig(token_file=first))

    first.unlink()
    write_token_file(tmp_path / "of-another", new_token())
    other = read_token_file(tmp_path / "of-another")
    with pytest.raises(UsageError, match="can't be read"):
        entrance.poll()

    assert entrance.access.grant({"Authorization": f"Bearer {before}"}) is not None
    with pytest.raises(MegascaleError):
        entrance.access.grant({"Authorization": f"Bearer {other}"})

# SPDX-License-Identifier: Apache-2.0
"""What a controller refuses to be started with, one sentence each."""

import socket
from pathlib import Path

import pytest

from megascale_ops.controller.config import ControllerConfig, check_token, parse_listen, require_recording
from megascale_ops.controller.entrance import Entrance
from megascale_ops.controller.main import serve
from megascale_ops.errors import UsageError
from megascale_ops.schema.tokens import new_token


@pytest.mark.parametrize(
    ("listen", "parsed"),
    [("127.0.0.1:7070", ("127.0.0.1", 7070)), ("[::1]:0", ("::1", 0)), ("localhost:80", ("localhost", 80))],
)
def test_addresses(listen: str, parsed: tuple[str, int]) -> None:
    """HOST:PORT, also for IPv6."""
    assert parse_listen(listen) == parsed


@pytest.mark.parametrize("listen", ["", "7070", ":7070", "host:", "host:x", "host:70000", "host:-1"])
def test_what_is_no_address_is_refused(listen: str) -> None:
    """One sentence with an example."""
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_listen(listen)


@pytest.mark.parametrize("listen", ["0.0.0.0:7070", "[::]:7070", "10.1.2.3:7070", "example.org:7070"])
def test_beyond_loopback_a_token_is_needed(listen: str) -> None:
    """Any client that reaches an open controller could stop jobs."""
    with pytest.raises(UsageError, match="refusing to listen"):
        serve(ControllerConfig(listen=listen))


@pytest.mark.parametrize("listen", ["127.0.0.1:7070", "127.9.9.9:1", "[::1]:7070", "localhost:7070"])
def test_loopback_needs_none(listen: str) -> None:
    """On one machine nothing has to be set up."""
    check_token(ControllerConfig(listen=listen))


def test_a_token_file_must_be_private(tmp_path: Path) -> None:
    """Readable by others, empty or missing: refused, and the token is never shown."""
    path = tmp_path / "token"
    config = ControllerConfig(listen="0.0.0.0:7070", token_file=path)
    with pytest.raises(UsageError, match="can't be read"):
        Entrance(config)
    token = new_token()
    path.write_text(f"{token}\n")
    path.chmod(0o644)

    with pytest.raises(UsageError, match="chmod 600") as refused:
        Entrance(config)
    path.chmod(0o600)

    assert token not in str(refused.value)
    assert Entrance(config).access.grant({"Authorization": f"Bearer {token}"}).is_everything
    path.write_text("\n")
    with pytest.raises(UsageError, match="empty"):
        Entrance(config)


def test_a_taken_port_is_said_before_anything_is_opened(tmp_path: Path) -> None:
    """One sentence, and no journal is created."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"

        with pytest.raises(UsageError, match="port is taken"):
            serve(ControllerConfig(listen=listen, store=f"sqlite:///{tmp_path}/ops.db"))

    assert list(tmp_path.iterdir()) == []


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    """TLS is checked before anything else happens."""
    path = tmp_path / "cert.pem"
    path.write_text("no certificate")

    with pytest.raises(UsageError, match="certificate"):
        serve(ControllerConfig(listen="127.0.0.1:0", tls_cert=path))


def test_an_unknown_host_is_refused() -> None:
    """An unknown name is a mistake of the user."""
    config = ControllerConfig(listen="127.0.0.1:0")

    assert config.store == "sqlite:///ops.db"
    with pytest.raises(UsageError, match=r"refusing|no such host"):
        serve(ControllerConfig(listen="no.such.host.invalid:0"))


@pytest.mark.parametrize(
    ("record", "words"),
    [("taken", "taken is no folder"), ("taken/below", "taken is no folder"), ("dangling", "dangling is no folder"),
     ("loop", "loop is no folder"), ("n" * 300, "File name too long"), ("a\0b", "null"), ("/proc/recording", "/proc")],
)  # fmt: skip
def test_a_recording_that_can_not_be_is_refused_before_anything_is_served(
    tmp_path: Path, record: str, words: str
) -> None:
    """One sentence that says why; the journal is not even made."""
    (tmp_path / "taken").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "missing" / "place")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    journal = tmp_path / "ops.db"

    with pytest.raises(UsageError, match="nothing can be recorded in") as refused:
        serve(ControllerConfig(listen="127.0.0.1:0", store=f"sqlite:///{journal}", record=tmp_path / record))

    assert words in str(refused.value)
    assert not journal.exists()


def test_a_recording_that_nobody_asked_for_keeps_no_controller_from_serving(tmp_path: Path) -> None:
    """The control: beside the journal it is our default, and a folder that can be made is made, with what is above."""
    (tmp_path / "recording").touch()
    beside = f"sqlite:///{tmp_path}/ops.db"

    require_recording(ControllerConfig(store=beside))
    require_recording(ControllerConfig(store=beside, record=tmp_path / "recording", record_mb=0))
    require_recording(ControllerConfig(store=beside, record=tmp_path / "a" / "b"))

    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_bounds_of_a_recording_are_looked_at_before_anything_is_served() -> None:
    """Not when a standby has its turn at last."""
    with pytest.raises(UsageError, match="record_mb = -1"):
        serve(ControllerConfig(listen="127.0.0.1:0", record_mb=-1))

# SPDX-License-Identifier: Apache-2.0
"""Messages as a version once sent them, every field set: later versions must read them with nothing lost.

``tests/golden/messages/VERSION`` is never written anew. Fields are only ever added, so today's types read every frozen
message; a field that was renamed, removed or given another type is caught here, before an agent of the week before
meets a controller of today.
"""

from pathlib import Path

import msgspec
import pytest

from megascale_ops.schema.events import Incident, Status
from megascale_ops.schema.messages import (
    ErrorReply,
    Evidence,
    Heartbeat,
    HeartbeatReply,
    Join,
    JoinReply,
    Leave,
    OrdersReply,
    PolicyChange,
    PolicyView,
)
from megascale_ops.schema.version import MESSAGE_VERSION

FROZEN = Path(__file__).parents[2] / "golden" / "messages"
TYPES = (
    *(ErrorReply, Evidence, Heartbeat, HeartbeatReply, Incident, Join, JoinReply, Leave, OrdersReply, PolicyChange),
    *(PolicyView, Status),
)
CASES = [(version, one) for version in (MESSAGE_VERSION - 1, MESSAGE_VERSION) if version > 0 for one in TYPES]


@pytest.mark.parametrize(("version", "kind"), CASES, ids=[f"{one.__name__} {version}" for version, one in CASES])
def test_what_was_sent_is_read_with_nothing_lost(version: int, kind: type) -> None:
    """Decoded by today's type and encoded again, all that was there is there."""
    raw = (FROZEN / str(version) / f"{kind.__name__}.json").read_bytes()

    read = msgspec.json.decode(raw, type=kind)

    missing = list(lost(msgspec.json.decode(raw), msgspec.to_builtins(read), kind.__name__))
    assert missing == []


def lost(then: object, now: object, where: str) -> list[str]:
    """Return what of ``then`` is not, or is otherwise, in ``now``."""
    if isinstance(then, dict) and isinstance(now, dict):
        found = [f"{where}.{key}" for key in then if key not in now]
        return found + [one for key in then if key in now for one in lost(then[key], now[key], f"{where}.{key}")]
    if isinstance(then, list) and isinstance(now, list | tuple) and len(then) == len(now):
        return [
            one for place, pair in enumerate(zip(then, now, strict=True)) for one in lost(*pair, f"{where}[{place}]")
        ]
    return [] if then == now else [f"{where}: {then!r} is {now!r}"]


def test_a_lost_field_is_noticed() -> None:
    """The control."""
    then = {"a": 1, "b": [{"c": 2, "d": 3}], "e": [1]}

    assert lost(then, {"a": 1, "b": [{"c": 2}], "e": [1, 2]}, "x") == ["x.b[0].d", "x.e: [1] is [1, 2]"]


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat("a", "x", 1, 1.0, 1.0),
        Evidence("a", "job", "job-1", "o"),
        Join("job", "a", "r", "j", 1, 1, 1, "127.0.0.1", 4000, 1.0),
        Leave("job", "a", "r", "succeeded"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_is_sent_says_its_version(message: msgspec.Struct) -> None:
    """Also the one that this program speaks: what is not said would be taken for the reader's own."""
    assert msgspec.json.decode(msgspec.json.encode(message))["version"] == MESSAGE_VERSION


def test_every_kind_of_message_is_frozen() -> None:
    """And no file there is unread."""
    assert {path.stem for path in (FROZEN / str(MESSAGE_VERSION)).iterdir()} == {kind.__name__ for kind in TYPES}

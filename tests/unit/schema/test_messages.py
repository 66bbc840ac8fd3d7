# SPDX-License-Identifier: Apache-2.0
"""What travels between programs: sizes, unknown fields of newer neighbours, and nothing lost on the way."""

import importlib
import pkgutil

import msgspec
import pytest

from megascale_ops import schema
from megascale_ops.schema.fault_classes import FAULTS
from megascale_ops.schema.identity import Mesh, RankProcess, RoundFile
from megascale_ops.schema.messages import MAX_BODY_BYTES, Heartbeat, HeartbeatReply, JobReport, Join, Order
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.progress import (
    PHASES,
    CollectivePosition,
    LastWords,
    ProcessReading,
    Progress,
    RankError,
    RankReport,
)


def structs() -> list[type[msgspec.Struct]]:
    """Return every struct of the vocabulary."""
    found = []
    for module in pkgutil.iter_modules(schema.__path__):
        names = vars(importlib.import_module(f"megascale_ops.schema.{module.name}"))
        found += [
            item
            for item in names.values()
            if isinstance(item, type)
            and issubclass(item, msgspec.Struct)
            and item.__module__ == f"megascale_ops.schema.{module.name}"
        ]
    return found


def full_report(rank: int) -> RankReport:
    """Return a report with every field at its longest."""
    return RankReport(
        rank=rank,
        local_rank=rank % 64,
        pid=4_194_304,
        round=1000,
        world_size=98_304,
        mesh=Mesh(7, 15, 127, 7),
        progress=Progress("running", 10**9, step_is_absolute=True, steps_seen=10**9, phase="p" * 31),
        collective=CollectivePosition(10**9, 10**9, "n" * 63),
        process=ProcessReading("D", 123456.789, 123456.789, 15.9, 10**12, 4096),
        error=RankError("E" * 100, "m" * 300, "w" * 100, 10**9),
        last_words=(LastWords("pattern", "fault", "x" * 300),),
    )


@pytest.mark.parametrize("struct", structs(), ids=lambda struct: struct.__name__)
def test_every_struct_is_frozen(struct: type[msgspec.Struct]) -> None:
    """A message that was sent or received is never changed."""
    assert struct.__struct_config__.frozen


def test_a_full_heartbeat_of_a_crowded_node_fits_the_bound() -> None:
    """64 ranks, each with its longest words, stay below half of what the controller accepts."""
    heartbeat = Heartbeat(
        node="n" * 100,
        agent_id="a" * 32,
        seq=10**9,
        mono_s=1.0,
        wall_s=1.0,
        full=True,
        jobs=(JobReport("j" * 100, 1000, "/" + "d" * 200, tuple(full_report(rank) for rank in range(64))),),
    )

    encoded = msgspec.json.encode(heartbeat)

    assert len(encoded) < MAX_BODY_BYTES / 2
    assert msgspec.json.decode(encoded, type=Heartbeat) == heartbeat


def test_an_idle_heartbeat_is_small() -> None:
    """What did not change is not sent: a heartbeat without news stays below 150 bytes."""
    assert len(msgspec.json.encode(Heartbeat("node-a", "a1b2c3d4", 7, 12345.678, 1790000000.123))) < 150


def test_fields_of_a_newer_neighbour_are_passed_over() -> None:
    """An unknown field does no harm."""
    reply = msgspec.json.decode(b'{"send_full": true, "invented_later": [1, 2]}', type=HeartbeatReply)

    assert reply == HeartbeatReply(send_full=True)


def test_fields_of_an_older_neighbour_have_defaults() -> None:
    """What an older program does not send yet is at its default."""
    order = msgspec.json.decode(b'{"id": "1", "job": "gpt", "node": "a", "kind": "stop", "round": 3}', type=Order)

    assert (order.ranks, order.deadline_s) == ((), 5.0)


def test_a_policy_with_an_unknown_key_is_refused() -> None:
    """A threshold that is spelled wrongly must not be silently ignored."""
    with pytest.raises(msgspec.ValidationError, match="silence_flor_s"):
        msgspec.json.decode(b'{"silence_flor_s": 3}', type=JobPolicy)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"null", b'{"job": 3}', b'{"job":"x","nproc":"two"}', b"\xff"])
def test_a_malformed_message_never_becomes_a_struct(body: bytes) -> None:
    """Rubbish is an error of its own kind at the border, and nowhere later."""
    with pytest.raises(msgspec.MsgspecError):
        msgspec.json.decode(body, type=Join)


def test_every_fault_has_its_sentence() -> None:
    """Each class of fault is a word for programs and a sentence for people."""
    for name, row in FAULTS.items():
        assert name.isidentifier()
        assert row.name == name
        for sentence in (row.meaning, row.says, row.why):
            assert sentence
            assert not sentence.endswith(".")


def test_phases_fit_their_place_in_the_black_box() -> None:
    """A phase's name has 31 bytes in the black box."""
    assert all(0 < len(phase.encode()) <= 31 for phase in PHASES)


def test_the_round_file_survives_the_disk() -> None:
    """What the runner writes for the agent is read back as it was."""
    written = RoundFile(1, "gpt", "node-a", 3, 10, 11, "/runs/gpt", (RankProcess(0, 0, 12, 13, "o", "e"),), 14, 15)

    assert msgspec.json.decode(msgspec.json.encode(written), type=RoundFile) == written

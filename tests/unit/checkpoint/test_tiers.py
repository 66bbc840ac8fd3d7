# SPDX-License-Identifier: Apache-2.0
"""The tier on the nodes, as far as one process shows it: settings, folders, copies over a connection of its own."""

import logging
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from megascale_ops.checkpoint import CheckpointManager, LocalTier, latest, storage
from megascale_ops.checkpoint.manifest import FileEntry, Manifest
from megascale_ops.checkpoint.tiers import copies, identity, node_folder, sets
from megascale_ops.checkpoint.tiers.copies import Receiver, Sender
from megascale_ops.checkpoint.tiers.settings import is_due
from megascale_ops.errors import CheckpointError, UsageError
from megascale_ops.whole_file import write_whole
from tests.fakes.checkpoints import Crash, count_down, sealed

TOKEN = b"t" * 32
WAIT_S = 20.0


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"every": 0}, r"LocalTier\(every=0\): save every step at most, so 1 at least"),
        (
            {"keep": 1},
            r"LocalTier\(keep=1\): while the newest is sent to the buddy the one before counts, so 2 at least",
        ),
        ({"keep": 0, "buddy": False}, r"LocalTier\(keep=0\): one at least must stay, so 1 at least"),
        ({"room": 1.0}, r"LocalTier\(room=1.0\): a share of the file system"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(tmp_path: Path, given: dict[str, float], sentence: str) -> None:
    """In one sentence, before anything is made."""
    with pytest.raises(UsageError, match=sentence):
        CheckpointManager(tmp_path, local=LocalTier("/nowhere/at/all", **given))


def test_a_local_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """It is a file."""
    (tmp_path / "file").write_text("")

    with pytest.raises(UsageError, match=r"cannot write checkpoints to .*/file/local: Not a directory"):
        CheckpointManager(tmp_path / "shared", local=tmp_path / "file" / "local")


def test_shared_every_is_a_number_of_steps(tmp_path: Path) -> None:
    """One at least."""
    with pytest.raises(UsageError, match="shared_every is 0"):
        CheckpointManager(tmp_path, shared_every=0)


@pytest.mark.parametrize(
    ("steps", "every", "due"),
    [
        ([1, 2, 3], 1, [1, 2, 3]),
        ([0, 5, 10, 15, 20], 10, [0, 10, 20]),
        ([7, 14, 21, 28], 10, [7, 14, 21]),
        ([100, 50, 60, 120], 100, [100, 50, 120]),  # a job that went back to an earlier step saves at once
    ],
)
def test_a_tier_is_due_at_the_first_and_at_every_multiple(steps: list[int], every: int, due: list[int]) -> None:
    """Also of a script whose steps hit no multiple."""
    last, found = -1, []
    for step in steps:
        if is_due(step, last, every):
            found.append(step)
            last = step

    assert found == due


def test_saves_go_where_they_are_due_and_a_restart_takes_the_newest_of_both(tmp_path: Path) -> None:
    """Every second step on the node, every fifth in the shared folder; the last one everywhere."""
    local = LocalTier(tmp_path / "node", every=2, keep=2)
    manager = CheckpointManager(tmp_path / "shared", local=local, shared_every=5)
    for step in range(1, 9):
        manager.save(step, {"a": torch.full((3,), float(step))})
    there = [sorted(path.name for path in (tmp_path / each).glob("**/step-*")) for each in ("node", "shared")]
    state = {"a": torch.zeros(3)}

    assert there == [["step-00000006", "step-00000008"], ["step-00000001", "step-00000005"]]
    assert CheckpointManager(tmp_path / "shared", local=local, shared_every=5).restore(state) == 8
    assert state["a"].tolist() == [8.0] * 3
    assert CheckpointManager(tmp_path / "shared").restore(state) == 5
    manager.save(9, state, everywhere=True)
    assert CheckpointManager(tmp_path / "shared").restore(state) == 9


def test_a_shared_folder_that_begins_anew_has_no_sets_on_the_nodes(tmp_path: Path) -> None:
    """A person who deletes it means to begin at step 0; what the nodes have goes with it."""
    first = CheckpointManager(tmp_path / "shared", local=tmp_path / "node")
    first.save(3, {"a": 1})
    first.close()
    for path in sorted((tmp_path / "shared").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()

    assert CheckpointManager(tmp_path / "shared", local=tmp_path / "node").restore({"a": 0}) == -1
    assert [path.name for path in (tmp_path / "node").glob("*/step-*")] == []


def test_an_identity_is_drawn_once_and_nothing_else_is_taken_for_one(tmp_path: Path) -> None:
    """It stays as long as its folder does."""
    assert identity.of_folder(tmp_path) == identity.of_folder(tmp_path)
    (tmp_path / identity.FILE_NAME).write_text("../../etc")

    with pytest.raises(CheckpointError, match=r"\.identity does not hold an identity"):
        identity.of_folder(tmp_path)


def test_without_room_a_local_set_is_left_out_with_one_sentence_and_the_shared_one_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Told once, not at each of the saves; the sets before stay."""
    local = LocalTier(tmp_path / "node", room=0.9999999)
    manager = CheckpointManager(tmp_path / "shared", local=local)

    with caplog.at_level(logging.WARNING, "megascale_ops.checkpoint"):
        for step in (1, 2):
            manager.save(step, {"a": torch.ones(1000)})

    said = [record.message for record in caplog.records if record.name == "megascale_ops.checkpoint"]
    assert len(said) == 1
    assert said[0].startswith("step 1 is not saved on the nodes: saving step 1 to the local tier")
    assert " kB are needed and " in said[0]
    assert " GB are free" in said[0]
    assert len(storage.candidates(tmp_path / "shared")) == 2


def test_older_sets_make_room_but_for_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set that goes frees what it took."""
    for step in (1, 2, 3):
        sealed(tmp_path, step)
    real = os.statvfs(tmp_path)

    def small(path: Path) -> os.statvfs_result:
        sets_left = len(storage.candidates(path))
        return os.statvfs_result((1, 1, 100, 0, 40 - 10 * sets_left, *real[5:]))

    monkeypatch.setattr(os, "statvfs", small)

    node_folder.require_room(tmp_path, 20, 0.0, keep=1)
    assert [storage.step_of(path) for path in storage.candidates(tmp_path)] == [3, 2]
    with pytest.raises(OSError, match=r"0\.03 kB are needed and 0\.03 kB are free"):
        node_folder.require_room(tmp_path, 31, 0.0, keep=1)
    assert [storage.step_of(path) for path in storage.candidates(tmp_path)] == [3]


def test_an_inventory_says_which_files_of_a_set_are_here(tmp_path: Path) -> None:
    """One that is gone and one of another size are not; a set whose manifest can't be believed is none."""
    folder, other = sealed(tmp_path, 1), sealed(tmp_path, 2)
    (folder / "__0_0.distcp").unlink()
    with (folder / "__1_0.distcp").open("ab") as file:
        file.write(b"more")
    (other / "manifest.json").write_text("{}")

    (held,) = node_folder.inventory(tmp_path)

    assert (held.step, [held.names[number] for number in held.present]) == (1, [".metadata"])
    (candidate,) = sets.candidates([[held]], [])
    assert sets.incomplete_sentence(candidate) == (
        "the local checkpoint of step 1 is not whole: __0_0.distcp and 1 more of 3 files on no node that is here"
    )


# -- cut off ----------------------------------------------------------------------------------------------------------


def save_on_two_nodes(nodes: list[Path], step: int) -> None:
    """What two ranks, each a node of its own, do with their files in one save, and the copies that follow."""
    folders = [storage.begin(root, step, 1) for root in nodes]
    for number, folder in enumerate(folders):
        (folder / f"__{number}_0.tensors").write_bytes(f"{number} at {step} ".encode() * 50)
    (folders[0] / "plan.msgpack").write_bytes(b"plan")
    files = [storage.digest(folders[0] / "plan.msgpack")]
    files += [storage.digest(folder / f"__{number}_0.tensors") for number, folder in enumerate(folders)]
    described = Manifest(step=step, world_size=2, written_wall_s=float(step), files=tuple(files))
    for root in nodes:
        node_folder.seal(root, described, b"plan", 1)
    for root in nodes:
        node_folder.keep_newest(root, step, 2)
    for number, root in enumerate(nodes):
        name = f"__{number}_0.tensors"
        data = (storage.final_folder(root, step) / name).read_bytes()
        write_whole(storage.final_folder(nodes[1 - number], step) / name, data, durably=True)


def loadable(nodes: list[Path]) -> int:
    """The newest step of which every file is on a node as it was sealed; -1: none."""
    for one in sets.candidates([node_folder.inventory(root) for root in nodes], []):
        if one.missing:
            continue
        for name, holders in one.holders.items():
            for number in holders:
                folder = storage.final_folder(nodes[number], one.step)
                (entry,) = (each for each in manifest_of(folder).files if each.name == name)
                assert storage.observe(folder, entry).digest == entry.digest
        return one.step
    return -1


def test_a_crash_at_any_file_operation_leaves_a_set_that_survives_the_loss_of_any_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third save is cut off at every operation in turn; the one before is whole, also without either node."""
    found = set()
    for moment in range(200):
        nodes = [tmp_path / str(moment) / f"node{number}" for number in range(2)]
        for root in nodes:
            root.mkdir(parents=True)
        for step in (1, 2):
            save_on_two_nodes(nodes, step)
        with monkeypatch.context() as patched:
            left = count_down(patched, moment)
            with suppress(Crash):
                save_on_two_nodes(nodes, 3)

        steps = {loadable(nodes), *(loadable([root]) for root in nodes)}
        assert steps <= {2, 3}
        found.add(frozenset(steps))
        if left[0]:
            assert steps == {3}
            break
    assert {frozenset({2}), frozenset({2, 3}), frozenset({3})} <= found, "the cuts did not reach every stage"


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Path, Path, Receiver]]:
    """A node with a whole set, one with its manifest alone, and who receives there."""
    folder, there = sealed(tmp_path / "from", 7), tmp_path / "to" / "step-00000007"
    there.mkdir(parents=True)
    (there / "manifest.json").write_bytes((folder / "manifest.json").read_bytes())
    receiver = Receiver(tmp_path / "to", "127.0.0.1", TOKEN)
    yield folder, there, receiver
    receiver.close(0.0)


def test_a_receiver_that_closes_while_a_connection_comes_waits_for_its_thread(
    pair: tuple[Path, Path, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is known before it runs: to close meanwhile failed the job's end."""
    _, _, receiver = pair
    starting, go_on, start = threading.Event(), threading.Event(), threading.Thread.start

    def begin(thread: threading.Thread) -> None:
        if thread.name == "checkpoint-copy-in":
            starting.set()
            assert go_on.wait(WAIT_S)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    with socket.create_connection(receiver.address, WAIT_S), ThreadPoolExecutor(1) as closing:
        assert starting.wait(WAIT_S)
        closed = closing.submit(receiver.close, 0.0)
        with pytest.raises(TimeoutError):
            closed.result(0.05)
        go_on.set()
        closed.result(WAIT_S)


def manifest_of(folder: Path) -> Manifest:
    """A manifest that can be believed."""
    found = latest.read_manifest(folder)
    assert isinstance(found, Manifest)
    return found


def sent(folder: Path, receiver: Receiver, token: bytes = TOKEN, set_id: str = "") -> Sender:
    """Send all files of a set, and wait for the end."""
    found = manifest_of(folder)
    sender = Sender(receiver.address, token, "the buddy")
    sender.send(folder, found.step, set_id or node_folder.set_id_of(found), found.files)
    assert sender.wait(WAIT_S)
    return sender


def test_a_copy_is_the_same_byte_for_byte(pair: tuple[Path, Path, Receiver]) -> None:
    """All files of the set, and nothing half received beside them."""
    folder, there, receiver = pair

    assert sent(folder, receiver).failure == ""
    assert all((there / path.name).read_bytes() == path.read_bytes() for path in folder.iterdir())
    assert not list(there.glob("*.partial"))


def test_bytes_that_are_not_those_of_the_manifest_are_not_taken(pair: tuple[Path, Path, Receiver]) -> None:
    """A file that was damaged before it was sent."""
    folder, there, receiver = pair
    shard = folder / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes().replace(b"first", b"First"))

    assert sent(folder, receiver).failure == "its digest differs from that of the manifest"
    assert not (there / shard.name).exists()
    assert not list(there.glob("*.partial"))


def test_another_set_of_the_same_step_is_not_mixed_in(pair: tuple[Path, Path, Receiver]) -> None:
    """Sets are named by their manifest, not by their step."""
    folder, there, receiver = pair

    assert sent(folder, receiver, set_id="0" * 64).failure == "it keeps no such set any more"
    assert [path.name for path in there.iterdir()] == ["manifest.json"]


def test_a_connection_without_the_token_leaves_nothing(pair: tuple[Path, Path, Receiver]) -> None:
    """It is closed, whatever else it says; and what is no message ends nothing but itself."""
    folder, there, receiver = pair
    with socket.create_connection(receiver.address, timeout=WAIT_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):  # closed before all of it was read
            assert connection.recv(1) == b""

    assert sent(folder, receiver, token=b"w" * 32).failure
    assert [path.name for path in there.iterdir()] == ["manifest.json"]
    assert sent(folder, receiver).failure == ""


def test_a_buddy_that_is_not_there_costs_one_warning(
    pair: tuple[Path, Path, Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    """Not one at each save."""
    folder, _, receiver = pair
    receiver.close(0.0)
    found = manifest_of(folder)
    sender = Sender(receiver.address, TOKEN, "the buddy")

    with caplog.at_level(logging.WARNING, "megascale_ops.checkpoint"):
        for _ in range(2):
            sender.send(folder, found.step, "", found.files)
            assert sender.wait(WAIT_S)

    assert sender.failure == "Connection refused"
    assert [record.message for record in caplog.records] == ["no copy of step 7 on the buddy: Connection refused"]


def test_a_buddy_that_takes_nothing_is_given_up(
    pair: tuple[Path, Path, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts the connection and stands still."""
    folder, _, _ = pair
    monkeypatch.setattr(copies, "_STALLED_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = Sender(silent.getsockname(), TOKEN, "the buddy")
        sender.send(folder, 7, "", manifest_of(folder).files)

        assert sender.wait(WAIT_S)
    assert sender.failure == "timed out"


def test_names_in_a_request_lead_nowhere_else(pair: tuple[Path, Path, Receiver]) -> None:
    """Only what the receiver's own manifest promises is written."""
    folder, there, receiver = pair
    (folder.parent / "outside").write_bytes(b"x")
    found = manifest_of(folder)
    sender = Sender(receiver.address, TOKEN, "the buddy")

    sender.send(folder, 7, node_folder.set_id_of(found), [FileEntry("../outside", 1, "sha256:ab")])

    assert sender.wait(WAIT_S)
    assert sender.failure == "it keeps no such set any more"
    assert not (there.parent / "outside").exists()

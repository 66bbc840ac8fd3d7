# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a restart would find."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megascale_ops import foreign
from megascale_ops.checkpoint import latest, storage
from megascale_ops.checkpoint.manifest import FILE_NAME, MOST_BYTES
from megascale_ops.checkpoint.trust.file_digests import digest_of
from tests.fakes.checkpoints import sealed


def test_the_newest_is_taken_when_it_verifies(tmp_path: Path) -> None:
    """Nothing is passed over without a reason."""
    sealed(tmp_path, 10)
    sealed(tmp_path, 20)

    choice = latest.newest(tmp_path)

    assert choice.newest is not None
    assert (choice.newest.step, choice.skipped) == (20, ())


def test_damaged_ones_are_passed_over_with_their_reasons(tmp_path: Path) -> None:
    """The reasons stand in the order of the steps, newest first."""
    sealed(tmp_path, 10)
    (sealed(tmp_path, 20) / "__1_0.distcp").unlink()
    (sealed(tmp_path, 30) / FILE_NAME).unlink()

    choice = latest.newest(tmp_path)

    assert choice.newest is not None
    assert choice.newest.step == 10
    assert [fault.sentence() for report in choice.skipped for fault in report.faults] == [
        "manifest.json is missing",
        "__1_0.distcp is missing",
    ]


def test_a_former_checkpoint_still_counts_while_its_step_is_saved_again(tmp_path: Path) -> None:
    """A crash between the two renames of a replacement loses nothing; the sealed one goes first when both stand."""
    sealed(tmp_path, 10).rename(tmp_path / ".step-00000010.replaced")

    alone = latest.newest(tmp_path).newest
    sealed(tmp_path, 10)
    both = latest.newest(tmp_path).newest

    assert alone is not None
    assert alone.path.endswith(".replaced")
    assert both is not None
    assert both.path.endswith("step-00000010")


def test_shares_of_the_work_add_up_to_all_of_it(tmp_path: Path) -> None:
    """Three ranks see together what one sees alone."""
    folder = sealed(tmp_path, 10)
    (folder / "__0_0.distcp").write_bytes(b"other")
    (folder / "__1_0.distcp").unlink()

    alone = latest.inspect(folder).faults
    shares = [latest.inspect(folder, part=part, parts=3).faults for part in range(3)]

    assert {fault for share in shares for fault in share} == set(alone)
    assert len(alone) == 2


def test_a_folder_in_the_place_of_a_file_is_a_fault_not_an_exception(tmp_path: Path) -> None:
    """Whatever lies there, a report comes back."""
    folder = sealed(tmp_path, 10)
    (folder / FILE_NAME).unlink()
    (folder / FILE_NAME).mkdir()

    assert [report.faults[0].kind for report in latest.verify(tmp_path)] == ["unreadable"]


def stand_in(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    kept = path.with_name("kept")
    path.rename(kept)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path.symlink_to({"link to an endless device": "/dev/zero", "link to itself": path, "link": kept}[kind])


@pytest.mark.timeout(60)  # what this is about would never end
@pytest.mark.parametrize("name", [FILE_NAME, "__1_0.distcp", ".metadata"])
@pytest.mark.parametrize("kind", ["link to an endless device", "link to itself", "link", "FIFO", "socket"])
def test_what_is_no_regular_file_is_told_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """Endless devices, FIFOs without a writer, links to a good copy: one sentence each, and the one before is taken."""
    monkeypatch.chdir(sealed(tmp_path, 20))  # a socket's path has at most 107 bytes
    sealed(tmp_path, 10)

    stand_in(Path(name), kind)
    choice = latest.newest(tmp_path)

    assert choice.newest is not None
    assert choice.newest.step == 10
    what = {"FIFO": "a FIFO", "socket": "a socket"}.get(kind, "a link")
    assert choice.skipped[0].sentence() == (
        f"checkpoint of step 20 is damaged: {name} is unreadable (it is {what}, not a regular file) "
        f"({tmp_path / 'step-00000020'})"
    )


def test_an_endless_device_itself_is_not_read() -> None:
    """Not only behind a link: whoever may make devices may put one there."""
    with pytest.raises(OSError, match=r"^it is a device, not a regular file$"):
        foreign.read(Path("/dev/zero"), 100)


def test_a_manifest_without_measure_is_not_read(tmp_path: Path) -> None:
    """A terabyte of zeros takes no memory; the reason names what it has and what it may have."""
    folder = sealed(tmp_path, 20)
    os.truncate(folder / FILE_NAME, 1 << 40)

    (report,) = latest.verify(tmp_path)

    assert [fault.sentence() for fault in report.faults] == [
        f"manifest.json is unreadable (it has {1 << 40} bytes, more than the {MOST_BYTES} that it may have)"
    ]


def test_a_shard_that_grows_is_read_as_far_as_it_was_promised(tmp_path: Path) -> None:
    """Somebody appends to it without end while it is verified."""
    path = tmp_path / "shard"
    path.write_bytes(b"12345678")

    taken = storage.digest(path)
    with foreign.opened(path) as handle:
        assert storage.digested(handle, 5, taken.digest) == (5, digest_of(b"12345", taken.digest))
    with pytest.raises(OSError, match="it has 8 bytes, more than the 7"):
        foreign.read(path, 7)
    assert foreign.read(path, 8) == b"12345678"


def test_nothing_there_is_no_checkpoint_and_no_error(tmp_path: Path) -> None:
    """The first start of a job is not an incident."""
    assert latest.newest(tmp_path / "never made") == latest.Choice(None)
    assert latest.verify(str(tmp_path)) == []


def test_asking_needs_no_torch() -> None:
    """An agent or a command line can verify checkpoints without paying for torch."""
    code = "import sys, megascale_ops.checkpoint as c; c.verify('/nonexistent'); sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a restart would find."""

import subprocess
import sys
from pathlib import Path

from megascale_ops.checkpoint import latest
from megascale_ops.checkpoint.manifest import FILE_NAME
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


def test_nothing_there_is_no_checkpoint_and_no_error(tmp_path: Path) -> None:
    """The first start of a job is not an incident."""
    assert latest.newest(tmp_path / "never made") == latest.Choice(None)
    assert latest.verify(str(tmp_path)) == []


def test_asking_needs_no_torch() -> None:
    """An agent or a command line can verify checkpoints without paying for torch."""
    code = "import sys, megascale_ops.checkpoint as c; c.verify('/nonexistent'); sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

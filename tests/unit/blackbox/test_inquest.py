# SPDX-License-Identifier: Apache-2.0
"""Black boxes of the dead say what each rank last did, and who was behind when the others waited."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from megascale_ops.blackbox.inquest import sentences, summary
from megascale_ops.blackbox.last_moments import LastMoments, find, read
from megascale_ops.blackbox.layout import COLLECTIVES, FILE_BYTES, GPU_STEPS, HEADER, PULSE, STEPS, Ring
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.blackbox.records import BoxIdentity, CollectiveRecord, GpuStepRecord, StepRecord
from megascale_ops.blackbox.writer import BoxWriter
from megascale_ops.cli.main import main
from megascale_ops.schema.progress import CollectivePosition, Progress, RankError

SECOND = 1_000_000_000
AT_S = 100.0  # when the box's story begins


def write(folder: Path, rank: int, seqs: int, *, waits: bool, world_size: int = 4, error: str = "") -> Path:
    """Write the box of a rank that ended ``seqs`` collectives and, if it ``waits``, entered one more."""
    identity = BoxIdentity(
        job="j", node=f"n{rank}", rank=rank, local_rank=0, world_size=world_size, pid=10 + rank, start_ticks=1, round=2
    )
    box = BoxWriter.create(folder, identity)
    box.set_state("running")
    for seq in range(1, seqs + 1):
        at = int((AT_S + seq) * SECOND)
        box.add_collective(CollectiveRecord("0", "all_reduce", seq, 4096, at, at, at + SECOND // 10))
        box.add_step(StepRecord(seq, AT_S + seq + 0.2, 1.0))
    box.set_now(seqs, "backward", now_mono_s=AT_S + seqs + 0.5)
    if waits:
        at = int((AT_S + seqs + 1) * SECOND)
        box.add_collective(CollectiveRecord("0", "all_reduce", seqs + 1, 4096, at, at))
    box.set_error(RankError(type=error, message="broken", where="train.py:7 step", step=seqs)) if error else None
    box.close()
    return folder / f"{rank}.box"


def boxes(folder: Path) -> list[LastMoments]:
    """Read all boxes of a folder."""
    return [read(path) for path in find((folder,))]


def test_a_rank_that_died_waiting_says_where(tmp_path: Path) -> None:
    """The collective without an end is named with its number, group and size; the steps before it are shown."""
    text = "\n".join(sentences(read(write(tmp_path, 0, 40, waits=True))))

    assert "rank 0 of 4 on n0, job j, round 2, pid 10: running" in text
    assert "after step 40, for " in text
    assert "in all_reduce #41 of group 0 (4096 bytes), entered 0.000 s before" in text
    assert "last steps: 38: 1.000 s, 39: 1.000 s, 40: 1.000 s" in text


@pytest.mark.parametrize(
    ("position", "waits", "said"),
    [
        ((41, 40, "0"), True, "in all_reduce #41 of group 0"),
        ((41, 41, "0"), True, "in no collective, but handed over and not ended is all_reduce #41 of group 0"),
        ((7, 6, "pp"), False, "waits in a collective of pp: it has entered 7, and 6 have ended"),
        ((40, 40, "0"), False, "in no collective; the last that ended was all_reduce #40"),
    ],
)
def test_who_waits_is_as_a_verdict_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: tuple[int, int, str], waits: bool, said: str
) -> None:
    """A controller judges by the last beat: what it saw as no wait is none here, and what it saw as one is one."""
    path = write(tmp_path, 0, 40, waits=waits)
    monkeypatch.setattr(BoxReader, "collective", lambda _self, **_: CollectivePosition(*position))
    progress = BoxReader.progress

    def beaten(self: BoxReader) -> Progress:
        return msgspec.structs.replace(progress(self), beat_mono_s=AT_S + 45.0)

    monkeypatch.setattr(BoxReader, "progress", beaten)

    moments = read(path)

    assert any(line.strip().startswith(said) for line in sentences(moments))


def test_the_rank_that_never_came_is_named(tmp_path: Path) -> None:
    """Three wait in number 41, one ended number 40 and went elsewhere: look there first."""
    for rank in (0, 1, 3):
        write(tmp_path, rank, 40, waits=True)
    write(tmp_path, 2, 40, waits=False)

    lines = summary(boxes(tmp_path))

    assert "  0-1,3: in all_reduce #41 of group 0 (4096 bytes); 2: running, in phase backward" in lines
    assert "  rank 2 never entered #41 of group 0, in which 3 waited: look there first" in lines


def test_nobody_is_blamed_when_all_wait_alike(tmp_path: Path) -> None:
    """All in the same collective: a network is as likely as any rank."""
    for rank in range(4):
        write(tmp_path, rank, 40, waits=True)

    lines = summary(boxes(tmp_path))

    assert "  every rank had entered #41 of group 0: the boxes blame nobody" in lines


def test_a_missing_box_is_told(tmp_path: Path) -> None:
    """The culprit's own box is often the one that is missing."""
    write(tmp_path, 0, 40, waits=True)
    write(tmp_path, 3, 40, waits=True)

    assert "  no box of ranks 1-2" in summary(boxes(tmp_path))


def damage(path: Path, ring: Ring, field: str, value: float) -> None:
    """Write over one number of a box."""
    found = ring.field(field)
    with path.open("r+b") as file:
        file.seek(ring.offset + found.offset)
        file.write(struct.pack(f"<{found.code}", value))


def test_a_size_that_no_job_has_costs_nothing(tmp_path: Path) -> None:
    """A damaged header's two thousand million ranks are told as the range that they are."""
    damage(write(tmp_path, 0, 40, waits=True), HEADER, "world_size", 2**31 - 1)
    write(tmp_path, 3, 40, waits=True)

    assert f"  no box of ranks 1-2,4-{2**31 - 2}" in summary(boxes(tmp_path))


def test_a_stamp_that_no_clock_shows_is_passed_over(tmp_path: Path) -> None:
    """The last moment is the newest stamp of the others."""
    path = write(tmp_path, 0, 40, waits=True)
    damage(path, PULSE, "moved_mono_s", 1e305)

    text = "\n".join(sentences(read(path)))

    assert "in all_reduce #41 of group 0 (4096 bytes), entered 0.000 s before" in text


def test_a_folder_whose_name_is_no_text_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Linux allows any bytes in names, JSON and terminals do not: those that are no UTF-8 are shown by their number."""
    path = write(tmp_path / os.fsdecode(b"caf\xe9"), 0, 40, waits=True)

    codes = [main(["inspect", str(path)]), main(["inspect", str(path), "--json"])]

    text, _, data = capsys.readouterr().out.partition("[")
    assert codes == [0, 0]
    assert "caf\\xe9/0.box)" in text
    assert json.loads(f"[{data}")[0]["path"].endswith("caf\\xe9/0.box")


def test_what_a_box_holds_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    """Lines of an exception become one, and control characters of a damaged box do not reach the terminal."""
    told = RankError(type="CUDAError", message="broken\nfor \x1b[31mgood\x07", where="t.py:7", step=1)
    path = write(tmp_path, 0, 40, waits=False)
    with_error = BoxWriter.create(tmp_path, read(path).identity)
    with_error.set_error(told)
    with_error.beat(1, 1, "")
    with_error.begin_collective(b"\x1b]0;x\x07", b"all\treduce", 1, 5, SECOND, SECOND)
    with_error.close()

    moments = read(path)
    lines = [*sentences(moments), *summary([moments, moments])]

    assert all(line.isprintable() for line in lines)
    assert "  died of CUDAError: broken for \\x1b[31mgood\\x07 at t.py:7" in lines


def test_an_exception_is_quoted(tmp_path: Path) -> None:
    """What the rank died of stands in its box."""
    moments = read(write(tmp_path, 1, 3, waits=False, error="ValueError"))

    assert sentences(moments)[-1] == "  died of ValueError: broken at train.py:7 step"


def test_the_command_shows_what_can_be_read_and_names_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A torn box costs itself and exit code 1, not the others."""
    write(tmp_path, 0, 5, waits=False)
    (tmp_path / "1.box").write_bytes(b"MEGA")

    code = main(["inspect", str(tmp_path)])

    out, err = capsys.readouterr()
    assert code == 1
    assert "rank 0 of 4" in out
    assert "not read: " in err
    assert "1.box is no black box: 4 bytes" in err


@pytest.mark.parametrize("ring", [PULSE, COLLECTIVES, STEPS, GPU_STEPS])
def test_a_box_that_was_cut_short_says_what_it_still_holds(
    tmp_path: Path, ring: Ring, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy on a disk that was full: what was there is shown, of a ring's half nothing, and that it is torn."""
    path = write(tmp_path, 0, 40, waits=True)
    os.truncate(path, ring.offset + ring.size - 8)

    code = main(["inspect", str(path)])

    out, err = capsys.readouterr()
    assert code == 1
    assert "rank 0 of 4 on n0, job j, round 2, pid 10: " in out
    assert ("in phase backward" in out) == (ring is not PULSE)
    assert ("last steps: 38" in out) == (ring not in (PULSE, STEPS))
    assert ("in all_reduce #41" in out) == (ring is GPU_STEPS)
    size = path.stat().st_size
    assert f"not read: {path} is a torn black box: {size} of {FILE_BYTES} bytes; what it still holds is shown" in err


def test_nobody_is_blamed_for_what_was_cut_off(tmp_path: Path) -> None:
    """A torn box knows of no collective: that its rank came late is not among what it says."""
    for rank in range(4):
        write(tmp_path, rank, 40, waits=True)
    os.truncate(tmp_path / "2.box", COLLECTIVES.offset + COLLECTIVES.size // 2)

    assert "  every rank had entered #41 of group 0: the boxes blame nobody" in summary(boxes(tmp_path))


def test_the_command_speaks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Programs get every field."""
    write(tmp_path, 0, 5, waits=True)

    assert main(["inspect", str(tmp_path / "0.box"), "--json"]) == 0

    (found,) = json.loads(capsys.readouterr().out)
    assert found["identity"]["rank"] == 0
    assert found["unfinished"][0]["seq"] == 6


@pytest.mark.parametrize(("name", "words"), [("missing", "there is nothing at"), ("", "there is no black box")])
def test_nothing_to_read_is_one_sentence(
    tmp_path: Path, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong path ends with 2 and says what to give."""
    assert main(["inspect", str(tmp_path / name)]) == 2

    assert words in capsys.readouterr().err


@pytest.mark.parametrize("which", ["", "0.box"])
def test_a_folder_without_rights_is_named(tmp_path: Path, which: str) -> None:
    """Boxes lie in folders of mode 0700: a user without access to one gets that message, not that it is empty."""
    write(tmp_path / "mine", 0, 5, waits=False)
    write(tmp_path / "closed", 1, 5, waits=False).parent.chmod(0o000)
    # Read without the capability by which root reads anything.
    plain = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--") if os.geteuid() == 0 else ()
    paths = (str(tmp_path / "mine"), str(tmp_path / "closed" / which))

    done = subprocess.run(
        [*plain, sys.executable, "-m", "megascale_ops.cli.main", "inspect", *paths],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip

    assert done.returncode == 1, done.stderr
    assert "rank 0 of 4" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"not read: no black box at {paths[1]} ")
    assert "Permission denied" in line


def test_a_name_that_no_file_can_have_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the system refuses to look for is named with its reason; the others are shown."""
    known = write(tmp_path, 0, 5, waits=False)

    code = main(["inspect", str(known), "x" * 300])

    out, err = capsys.readouterr()
    assert (code, "rank 0 of 4" in out) == (1, True)
    assert "File name too long" in err


def test_what_the_gpu_needed_is_told(tmp_path: Path) -> None:
    """Of the last step that it was seen to have passed, with the phase that the script declared."""
    path = write(tmp_path, 0, 3, waits=False)
    other = BoxWriter.create(tmp_path, read(path).identity)
    for step in (1, 2):
        other.add_gpu_step(GpuStepRecord(step, step, 0.5, 0.01, 0.1, 0.2, 0.03, phases=(("sample", 0.16),)))
    other.close()

    text = "\n".join(sentences(read(path)))

    parts = "data 0.010 s, forward 0.100 s, backward 0.200 s, optimizer 0.030 s, sample 0.160 s"
    assert f"the GPU needed 0.500 s for step 2: {parts}" in text

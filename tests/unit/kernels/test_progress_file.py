# SPDX-License-Identifier: Apache-2.0
"""A board in a file: made in one step, seen by other processes, kept after its writer is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from megascale_kernels.progress import BoardCopier, map_board, read_board, writer_lives
from megascale_kernels.progress.__main__ import main as progress_main
from megascale_kernels.progress.board_format import HOST_FIELDS, HOST_WORD, PROGRESS_WORDS

from tests.fakes.boards import FakeBoard

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[3]
MODULE = [sys.executable, "-m", "megascale_kernels.progress"]

KILLED = """
import os, signal, sys
from megascale_kernels.progress import map_board
board = map_board(sys.argv[1], rank=1, world_size=2)
board.words[3:11] = board.words.new_tensor([3, 8, 4, 16, 64, 64, 64, 0])
board.words[32] = 8 << 20 | 6
os.kill(os.getpid(), signal.SIGKILL)
"""


def save(board: FakeBoard, path: Path) -> str:
    """Put a fake board into a file."""
    with map_board(path) as mapped:
        mapped.words.copy_(torch.tensor(board.words, dtype=torch.int64).to(torch.int32))
    return str(path)


def test_a_fresh_board_names_its_rank_and_its_writer(tmp_path: Path) -> None:
    """What the host knows is there before the first launch; nobody else may read it."""
    with map_board(tmp_path / "board", rank=2, world_size=8) as board:
        view = read_board(board.path)

        assert board.words.shape == (PROGRESS_WORDS,)
        assert (view.rank, view.world_size, view.launch, view.pid) == (2, 8, 0, os.getpid())
        assert writer_lives(view)
        assert board.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["board"]


def test_stores_are_seen_through_the_file(tmp_path: Path) -> None:
    """The tensor is the file."""
    with map_board(tmp_path / "board") as board:
        board.words[3:6] = torch.tensor([4, 5, 1])
        board.words[32] = 5 << 20 | 18

        assert read_board(board.path).roles[0].tile == 17
    assert int(board.words[4]) == 5  # still readable, though no longer the GPU's


def test_a_new_board_replaces_the_old_one_in_one_step(tmp_path: Path) -> None:
    """A reader of the old file keeps it; the new one begins empty."""
    with map_board(tmp_path / "board", rank=1) as old, map_board(tmp_path / "board", rank=2) as new:
        old.words[1] = 7

        assert int(new.words[1]) == 2
        assert read_board(new.path).rank == 2


def test_a_bare_name_lies_in_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name without a folder is a file of /dev/shm."""
    monkeypatch.setattr("megascale_kernels.progress.board_file.FOLDER", tmp_path)

    with map_board("job.rank0") as board:
        assert board.path == tmp_path / "job.rank0"


def test_no_folder_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    """What cannot be made raises."""
    with pytest.raises(FileNotFoundError):
        map_board(tmp_path / "none" / "board")


def test_a_board_takes_no_device_s_place(tmp_path: Path) -> None:
    """A name that belongs to a pipe, a device or a folder is refused, and what has it is left alone."""
    os.mkfifo(tmp_path / "pipe")

    for name in ("pipe", "."):
        with pytest.raises(OSError, match="no plain file"):
            map_board(tmp_path / name)

    assert (tmp_path / "pipe").is_fifo()


def shown(board: torch.Tensor, rank: int) -> SimpleNamespace:
    """A workspace of ranks 4 to 7 of a job, as far as a copier looks at it."""
    agreement = SimpleNamespace(number=99)
    return SimpleNamespace(board=board, rank=rank, world_size=4, agreement=agreement, members=[4, 5, 6, 7])


@pytest.mark.processes
def test_a_copier_follows_the_workspace(tmp_path: Path) -> None:
    """The words of the kernels are copied, those of the host stay, and the time of the copy is told."""
    fake = FakeBoard(rank=3)
    fake.tile(0, 4)
    words = torch.tensor(fake.words, dtype=torch.int32)
    workspace = shown(words, rank=3)

    with BoardCopier(workspace, tmp_path / "board", every_s=0.001):  # type: ignore[arg-type]
        words[32] = 41 << 20 | 12
        deadline = time.monotonic() + 60
        while not read_board(tmp_path / "board").roles and time.monotonic() < deadline:
            time.sleep(0.001)
    view = read_board(tmp_path / "board")

    assert (view.rank, view.roles[0].tile, view.pid) == (3, 11, os.getpid())
    assert (view.group, view.members) == (99, (4, 5, 6, 7))
    assert abs(view.copied_s - time.time()) < 60


def test_a_copier_that_fails_says_why_and_spares_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The board's trouble must not become the job's, but it is told."""
    workspace = shown(torch.zeros(5, dtype=torch.int32), rank=0)

    with BoardCopier(workspace, tmp_path / "board", every_s=0.001) as copier:  # type: ignore[arg-type]
        copier._thread.join(60)

    assert copier.error is not None
    assert "no longer updated" in caplog.text


def test_a_copier_needs_a_pause(tmp_path: Path) -> None:
    """No pause would be a busy thread."""
    with pytest.raises(ValueError, match="must be positive"):
        BoardCopier(SimpleNamespace(), tmp_path / "board", every_s=0)  # type: ignore[arg-type]


def test_one_file_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 0, and the text names the writer when it is gone."""
    fake = FakeBoard()
    fake.host(2**22 + 1, 5)  # beyond the largest process number of Linux

    assert progress_main([save(fake, tmp_path / "board")]) == 0
    assert "is gone: this is the last it showed" in capsys.readouterr().out


def test_several_files_are_set_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The chain stands first; JSON says the same."""
    waits = FakeBoard(rank=0)
    waits.tile(0, 4)
    waits.wait(0, 4, 1, 0)
    files = [save(FakeBoard(rank=1), tmp_path / "rank1"), save(waits, tmp_path / "rank0")]

    assert progress_main(files) == 0
    assert capsys.readouterr().out.startswith("first suspect: rank 1 waits for nobody, and rank 0 waits for it")
    assert progress_main([*files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["blame"]["suspects"] == [1]
    assert found["boards"][0]["board"]["roles"][0]["wait"]["peer"] == 1


def test_bad_files_cost_one_sentence_each_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad file does not hide the good ones."""
    good = save(FakeBoard(), tmp_path / "good")
    again = save(FakeBoard(), tmp_path / "again")
    (tmp_path / "bad").write_text("x")

    code = progress_main([good, again, str(tmp_path / "bad"), str(tmp_path / "missing")])

    out, err = capsys.readouterr()
    assert code == 2
    assert out.startswith("rank 0 of 4: ag_gemm launch 41")
    assert [line.split(str(tmp_path))[1][:9] for line in err.splitlines()] == ["/again is", "/bad is n", "/missing "]


@pytest.mark.processes
def test_watching_survives_a_name_that_is_no_text(tmp_path: Path) -> None:
    """The sentence about a file whose name is no UTF-8 is shown, its bytes spelled out, and watching goes on."""
    path = save(FakeBoard(), tmp_path / "board")
    odd = os.fsencode(tmp_path) + b"/odd\xff"

    with subprocess.Popen(
        [*MODULE, path, odd, "--watch"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    ) as watching:  # fmt: skip
        assert watching.stdout is not None
        told = [next(line for line in watching.stdout if "cannot be read" in line) for _ in range(2)]
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=90)

    assert (watching.returncode, err) == (0, "")
    assert all(line.startswith(f"{tmp_path}/odd\\udcff cannot be read") for line in told)


@pytest.mark.processes
def test_a_full_disk_costs_one_sentence(tmp_path: Path) -> None:
    """Output that cannot be written is no traceback."""
    path = save(FakeBoard(), tmp_path / "board")

    with Path("/dev/full").open("w") as full:
        shown = subprocess.run(
            [*MODULE, path], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=180, check=False
        )

    assert (shown.returncode, shown.stderr) == (2, "the boards cannot be shown: No space left on device\n")


@pytest.mark.processes
def test_a_killed_writer_leaves_its_board(tmp_path: Path) -> None:
    """SIGKILL leaves what was stored, and the reader says that the writer is gone."""
    path = tmp_path / "board"

    killed = subprocess.run([sys.executable, "-c", KILLED, path], cwd=ROOT, timeout=180, check=False)
    shown = subprocess.run([*MODULE, path], cwd=ROOT, capture_output=True, text=True, timeout=180, check=True)

    assert killed.returncode == -signal.SIGKILL
    assert shown.stdout.startswith("rank 1 of 2: ag_gemm launch 8, M per rank 64, N 64, K 64, slot 0 (its process")
    assert "1 run" in shown.stdout


@pytest.mark.processes
@pytest.mark.parametrize(
    "shell", [[], ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]], ids=["as usual", "SIGINT ignored"]
)
def test_watching_ends_cleanly_with_ctrl_c(tmp_path: Path, shell: list[str]) -> None:
    """The exit code is 0, nothing is printed about it, and a file that vanished was no reason to end."""
    path = save(FakeBoard(), tmp_path / "board")

    with subprocess.Popen(
        [*shell, *MODULE, path, "--watch"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        first = watching.stdout.readline()
        Path(path).unlink()
        while "cannot be read" not in watching.stdout.readline():
            pass
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=90)

    assert first.startswith("rank 0 of 4")
    assert (watching.returncode, err) == (0, "")


@pytest.mark.processes
def test_a_reader_needs_neither_torch_nor_triton() -> None:
    """The agent of a node has no torch: importing and reading must not ask for it."""
    code = "import sys, megascale_kernels.progress, megascale_kernels.tracing; print(*sys.modules)"

    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=180, check=True
    )

    assert not {"torch", "triton", "numpy"} & set(found.stdout.split())


def test_words_of_the_host_lie_behind_those_of_the_kernels() -> None:
    """The copy leaves them alone."""
    assert HOST_WORD >= 11
    assert HOST_WORD + len(HOST_FIELDS) <= 32

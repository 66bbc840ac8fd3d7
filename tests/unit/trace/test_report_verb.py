# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops report`` on what a run left: the page, the numbers, and one clear sentence for every mistake."""

import json
import os
from pathlib import Path

import pytest

from megascale_ops.cli.main import main
from megascale_ops.controller.history.files import write_history
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import open_store
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.health import Verdict
from megascale_ops.schema.history import encode, history_file
from tests.fakes.step_histories import ORIGIN_S, history_of

HISTORY = history_of(4, 40, slow=(2,), slow_steps=range(20, 40))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the finished run gpt, with a warning and one incident of an earlier start."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("MEGASCALE_CONTROLLER", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    made = tmp_path / "megascale-ops" / "gpt"
    made.mkdir(parents=True)
    store = open_store(f"sqlite:///{made / 'journal.db'}")
    record = {
        "job": "gpt", "state": "finished", "round": 1, "started_wall_s": ORIGIN_S, "since_wall_s": ORIGIN_S + 50,
        "policy": {"silence_floor_s": 9.0}, "tuned": {"silence_floor_s": "9"},
    }  # fmt: skip
    verdict = Verdict("straggler", "it is slow", 0.95, culprits=(2,), nodes=("node-0",))
    incidents = (
        Incident("gpt-1", "gpt", 1, "ended", Marks(detected=ORIGIN_S - 9000), verdict),
        Incident("gpt-2", "gpt", 1, "over", Marks(detected=ORIGIN_S + 30), verdict, done="nothing was done"),
    )
    store.submit(Batch(job="gpt", record=json.dumps(record).encode(), incidents=incidents))
    store.close()
    write_history(history_file(made, "gpt"), HISTORY)
    return made


def test_the_page_and_what_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file, with the card's text, and its size is told."""
    code = main(["report", "gpt", "-o", "r.html"])

    out, err = capsys.readouterr()
    page = (folder.parents[1] / "r.html").read_text()
    assert code == 0
    assert out.startswith("r.html: ")
    assert "MB, open it in any browser" in out
    assert "incidents of earlier starts of this job that are left out: 1" in err
    assert "it is slow" in page
    assert "nothing was done" in page
    assert "silence_floor_s" in page


def test_a_folder_takes_the_page_under_the_jobs_name(folder: Path) -> None:
    """``-o .`` and no -o at all."""
    assert main(["report", "gpt", "-o", str(folder)]) == 0
    assert main(["report", "gpt"]) == 0

    assert (folder / "gpt-report.html").exists()
    assert Path("gpt-report.html").exists()


@pytest.mark.usefixtures("folder")
def test_the_numbers_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """The ledger adds up to the wall time; without a FILE nothing is written."""
    code = main(["report", "--json"])

    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert told["wall_s"] == 50.0
    assert round(sum(told["ledger_s"].values()), 6) == 50.0
    assert told["ledger_s"]["straggle"] == pytest.approx(20 * 0.22, abs=0.3)
    assert told["slowest"][0]["rank"] == 2
    assert (told["ranks"], told["step"], told["incidents"]) == (4, 39, ["gpt-2"])
    assert not list(Path.cwd().glob("*.html"))


def test_a_page_that_can_not_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, and exit code 2."""
    (folder / "file").write_text("")

    code = main(["report", "gpt", "-o", str(folder / "file" / "r.html")])

    assert code == 2
    assert "r.html can't be written: Not a directory" in capsys.readouterr().err


def test_a_device_is_not_replaced_by_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-o /dev/null, say, to test whether it can be made."""
    os.mkfifo(folder / "pipe")

    code = main(["report", "gpt", "-o", str(folder / "pipe")])

    assert code == 2
    assert "pipe is a device or a pipe: give a file" in capsys.readouterr().err
    assert (folder / "pipe").is_fifo()


@pytest.mark.usefixtures("folder")
def test_a_job_that_does_not_exist(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """The nearest is named; a folder that is none of a run's says so too."""
    assert main(["report", "gtp", "--run-dir", str(folder)]) == 2
    assert "unknown job 'gtp': did you mean 'gpt'?" in capsys.readouterr().err

    assert main(["report", "gtp"]) == 2
    assert "unknown job 'gtp': did you mean 'gpt'?" in capsys.readouterr().err

    assert main(["report", "nobody"]) == 1
    assert "unknown job 'nobody' (`megascale-ops jobs` lists the runs of this machine" in capsys.readouterr().err

    assert main(["report", "gpt", "--job", "other"]) == 2
    assert "two jobs are named" in capsys.readouterr().err


def test_a_run_without_a_history(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rest is shown, and the page says what is missing."""
    history_file(folder, "gpt").unlink()

    code = main(["report", "gpt", "-o", "r.html"])

    assert code == 0
    assert "no history of steps was kept" in capsys.readouterr().err
    assert "There is no picture" in Path("r.html").read_text()


@pytest.mark.parametrize("kept", [100, -10])
def test_a_damaged_history(folder: Path, capsys: pytest.CaptureFixture[str], kept: int) -> None:
    """Cut in its head or in its body: told in one sentence, and what can still be read is shown."""
    history_file(folder, "gpt").write_bytes(encode(HISTORY)[:kept])

    code = main(["report", "gpt", "-o", "r.html"])

    assert code == 0
    assert "history-gpt.bin is damaged" in capsys.readouterr().err
    page = Path("r.html").read_text()
    assert "is damaged" in page
    assert ("4 on 1" in page) == (kept == -10)


def test_a_history_of_another_start(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not mixed with this one."""
    from msgspec.structs import replace

    write_history(history_file(folder, "gpt"), HISTORY._replace(facts=replace(HISTORY.facts, life=7)))

    code = main(["report", "gpt", "-o", "r.html"])

    assert code == 0
    assert "is of another start of this job" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_a_picture_without_a_browser(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence with the remedy; the page is there all the same."""
    monkeypatch.setenv("PATH", os.devnull)

    code = main(["report", "gpt", "-o", "r.html", "--png", "r.png"])

    assert code == 1
    assert "a picture needs Chromium or Chrome, and none is on PATH" in capsys.readouterr().err
    assert Path("r.html").exists()


@pytest.mark.usefixtures("folder")
def test_a_browser_that_fails_or_hangs_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With its last words, or after its deadline."""
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\necho no display >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    assert main(["report", "gpt", "-o", "r.html", "--png", "r.png"]) == 1
    assert "failed with status 3: no display" in capsys.readouterr().err

    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr("megascale_ops.trace.browser.DEADLINE_S", 0.2)
    assert main(["report", "gpt", "-o", "r.html", "--png", "r.png"]) == 1
    assert "did not show r.html within" in capsys.readouterr().err

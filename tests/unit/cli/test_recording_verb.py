# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops recording`` as a user meets it: export, show, anonymize, replay, and mistakes."""

import json
import shutil
from pathlib import Path

import pytest

from megascale_ops.cli.main import main
from megascale_ops.replay.cutting import Block, cut
from megascale_ops.replay.files import write_recording
from megascale_ops.sim.machine import JOB
from tests.fakes.recorded_cluster import record

KILLED = Path(__file__).parents[2] / "real" / "recordings" / "killed.recording"
NOTHING = KILLED.with_name("long_evaluation.recording")


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave logging as it is; no run of this machine is looked at."""
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Block]]:
    """The folder of a run with its recordings, and these: rank 8 is killed."""
    folder = tmp_path_factory.mktemp("run")
    return folder, record(folder, ["killed@0.025"])[0]


def run(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str, str]:
    """Run one command line; return exit code, stdout and stderr."""
    code = main(["recording", *line])
    out, err = capsys.readouterr()
    return code, out, err


def test_an_incident_becomes_a_file_whose_contents_are_listed(
    capsys: pytest.CaptureFixture[str], recorded: tuple[Path, list[Block]]
) -> None:
    """By default the newest one, anonymous and thinned; the file is not called by the job's name."""
    code, out, err = run(capsys, "export", "--run-dir", str(recorded[0]))

    assert (code, err) == (0, "")
    assert Path("incident.recording").stat().st_size < 16_000
    assert "incident.recording: " in out
    assert "16 ranks on 3 nodes" in out
    assert "names, paths, addresses and texts are replaced; thinned: ends" in out
    assert "recorded: killed of rank 8 on node-2, restart" in out
    assert "replayed: killed of rank 8 on node-2, restart" in out


def test_a_job_is_exported_as_it_is_for_programs(
    capsys: pytest.CaptureFixture[str], recorded: tuple[Path, list[Block]]
) -> None:
    """All that is kept of it, with its names, as JSON."""
    code, out, _ = run(
        capsys, "export", JOB, "--from", str(recorded[0] / "recording"), "--as-it-is", "--whole", "--json"
    )

    told = json.loads(out)
    assert code == 0
    assert told["file"] == f"{JOB}.recording"
    assert told["contents"]["job"] == JOB
    assert told["contents"]["span_s"] > 140
    assert "node-00001" in told["contents"]["nodes"]
    assert told["recorded"] == told["replayed"]


def test_a_replay_prints_what_is_said_now_and_that_it_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """As `why` does; with how long it took."""
    code, out, err = run(capsys, "replay", str(KILLED), "--expect")

    assert (code, err) == (0, "")
    assert "incident job-1" in out
    assert "rank 1 on node-1, job job, round 1" in out
    assert "times as fast as it happened" in out
    assert out.rstrip().endswith("the same as was recorded")
    assert run(capsys, "replay", str(NOTHING), "--expect")[1].rstrip().endswith("nothing, as was recorded")


def test_another_policy_shows_what_differs_and_expect_exits_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --expect a difference is no failure."""
    line = ("replay", str(KILLED), "--policy", "killed=stop")

    code, out, _ = run(capsys, *line)
    expected, _, _ = run(capsys, *line, "--expect")
    told = json.loads(run(capsys, *line, "--json")[1])

    assert "recorded, and not said now: killed of rank 1 on node-1, restart" in out
    assert "said now, and not recorded: killed of rank 1 on node-1, stop" in out
    assert (code, expected) == (0, 1)
    assert told["same"] is False
    assert told["replayed"][0]["action"] == "stop"


def test_a_file_is_shown_and_made_anonymous_later(
    capsys: pytest.CaptureFixture[str], recorded: tuple[Path, list[Block]], tmp_path: Path
) -> None:
    """In its place, or into another one; what it holds is printed to the last text."""
    path = tmp_path / "named.recording"
    write_recording(path, cut(recorded[1], JOB))

    before = run(capsys, "show", str(path), "--texts")[1]
    code, out, _ = run(capsys, "anonymize", str(path))
    after = run(capsys, "show", str(path), "--texts")[1]

    assert code == 0
    assert "without names and texts" in out
    assert "NOT anonymous" in before
    assert "node-00001" in before
    assert "node-00001" not in after
    assert "recorded: killed of rank 8 on node-2" in after


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("replay", "nothing.recording"), "the recording nothing.recording can't be read: No such file"),
        (("replay", str(KILLED), "--policy", "silence=3"), "unknown policy 'silence'"),
        (("replay", str(KILLED), "--speed", "0"), "0"),
        (("show", __file__), "is no recording"),
        (("export",), "nothing is recorded in"),
        (("export", "--from", "nowhere"), "there is no folder nowhere"),
        (("export", "job-77", "--from", "RUN"), "unknown recorded incident or job 'job-77'"),
        (("export", "--job", "other", "--from", "RUN"), "unknown recorded incident or job 'other'"),
        (
            ("export", "--from", "RUN", "--out", "no/such/file"),
            "no/such/file: there is no such folder",
        ),
        (("repla", "x"), "replay"),
    ],
)
def test_a_mistake_gets_one_sentence(
    capsys: pytest.CaptureFixture[str], recorded: tuple[Path, list[Block]], line: tuple[str, ...], said: str
) -> None:
    """Two as exit code, and no traceback."""
    folder = str(recorded[0] / "recording")

    code, out, err = run(capsys, *(folder if word == "RUN" else word for word in line))

    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_folder_without_blocks_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And one with something else in them."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong").mkdir()
    shutil.copy(__file__, tmp_path / "wrong" / "1.jsonl.gz")

    code, _, err = run(capsys, "export", "--from", "empty")
    wrong, _, told = run(capsys, "export", "--from", "wrong")

    assert (code, wrong) == (1, 2)
    assert "nothing is recorded in empty" in err
    assert "wrong/1.jsonl.gz is no recording" in told

# SPDX-License-Identifier: Apache-2.0
"""``jobs``, ``logs`` and ``clean``: runs of this machine are listed, read and removed by what they left behind."""

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from megascale_ops.cli.main import main
from megascale_ops.cli.sources import retention
from megascale_ops.cli.sources.locate import Place, Wanted, run_folders
from megascale_ops.cli.sources.rank_logs import Follower, log_files, parse_rank_list, tail
from megascale_ops.controller.journal.rows import Batch
from megascale_ops.controller.journal.store import open_store
from megascale_ops.controller.record.job_record import JobRecord
from megascale_ops.errors import UsageError
from megascale_ops.runner.ranks.leftovers import hold_place

DAY_S = 86_400.0
NOW_S = 1_790_000_000.0


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("MEGASCALE_CONTROLLER", raising=False)
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    monkeypatch.setattr("time.time", lambda: NOW_S)
    monkeypatch.setattr("megascale_ops.cli.sources.runs.roots_of", lambda _uid: [])
    folder = tmp_path / "megascale-ops"
    folder.mkdir()
    return folder


@pytest.fixture
def listening() -> Iterator[str]:
    """Return the address of something that listens and is no controller."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def left_behind(root: Path, record: JobRecord, *, checkpoint: int = 0) -> Path:
    """Leave what a run leaves: a journal, output of two ranks in two rounds, perhaps a checkpoint."""
    folder = root / record.job
    folder.mkdir()
    store = open_store(f"sqlite:///{folder / 'journal.db'}")
    store.submit(Batch(job=record.job, record=msgspec.json.encode(record)))
    store.close()
    for round_, rank in ((1, 0), (1, 1), (2, 0), (2, 1), (10, 0)):
        logs = folder / "logs" / f"round-{round_}" / f"rank-{rank}"
        logs.mkdir(parents=True)
        (logs / "stdout.log").write_text(f"step {round_} of rank {rank}\nloss 3.5\n")
        (logs / "stderr.log").write_text("")
    if checkpoint:
        (folder / "checkpoints" / "step-00000040").mkdir(parents=True)
        (folder / "checkpoints" / "step-00000040" / "data").write_bytes(b"w" * checkpoint)
    age(folder, record.since_wall_s)
    return folder


def age(folder: Path, wall_s: float) -> None:
    """Let all in a folder have been written at a moment."""
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (wall_s, wall_s), follow_symlinks=False)


def ended(job: str, state: str, days_ago: float, **more: object) -> JobRecord:
    """Return what the journal says of a job that took an hour."""
    end_s = NOW_S - days_ago * DAY_S
    facts = {"best_step": 90, "furthest": 120, "restarted": {"killed": 2}, "incidents": 3, **more}
    return JobRecord(job=job, state=state, started_wall_s=end_s - 3600, since_wall_s=end_s, **facts)  # type: ignore[arg-type]


def test_jobs_tell_the_newest_first_with_their_result(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Finished, failed with its reason, and one whose controller went without a word."""
    left_behind(root, ended("old", "finished", 9.0))
    left_behind(root, ended("bad", "failed", 5.0, reason="SyntaxError in train.py"))
    left_behind(root, ended("cut", "running", 1.0))
    left_behind(root, ended("ctrlc", "finished", 0.5, exit_code=130, reason="stopped by hand on vm"))

    code = main(["jobs", "--json"])
    found = json.loads(capsys.readouterr().out)
    main(["jobs"])
    table = capsys.readouterr().out

    assert code == 0
    assert [(run["job"], run["result"]) for run in found] == [
        *(("ctrlc", "stopped"), ("cut", "lost"), ("bad", "failed"), ("old", "finished"))
    ]
    assert {(run["step"], run["restarts"], run["incidents"]) for run in found} == {(120, 2, 3)}
    assert table.index("ctrlc") < table.index("cut") < table.index("bad") < table.index("old")
    assert "SyntaxError in train.py" in table


def test_what_is_asked_after_a_run_has_ended_is_answered_of_that_run(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``status``, ``incidents`` and ``why`` without arguments speak of the newest one, and say how it ended."""
    left_behind(root, ended("old", "finished", 9.0))
    left_behind(root, ended("ctrlc", "stopped", 0.5, exit_code=130, reason="stopped by hand on vm"))
    # Its state is the same as after a Ctrl-C; what ended it is the reason's to tell.
    left_behind(root, ended("pods", "stopped", 0.7, exit_code=143, reason="its engine has taken all nodes away"))
    main(["status", "--watch", "--job", "pods"])
    by_engine = capsys.readouterr().out

    codes = [main(["status"])]
    status = capsys.readouterr().out
    codes.append(main(["status", "--watch"]))
    watched = capsys.readouterr().out
    codes.append(main(["incidents"]))
    incidents = capsys.readouterr().out
    codes.append(main(["why"]))
    why = capsys.readouterr().err

    assert "job pods is over: stopped (its engine has taken all nodes away), at step 120" in by_engine
    assert "by hand" not in by_engine
    assert codes == [0, 0, 0, 1]
    assert status.startswith("job ctrlc · stopped · round 0 · 0 ranks · step 120 · 2 restarts · 3 incidents")
    end = "job ctrlc is over: stopped by hand on vm, at step 120"
    assert watched.splitlines()[-1] == f"{end}; `megascale-ops report ctrlc` tells the rest"
    assert incidents == f"no incidents ({end})\n"
    assert f"({end})" in why


def test_status_watch_ends_when_the_controller_ended_with_its_run(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last word is in the journal: it is shown, and a sentence ends what would else try for ever."""
    folder = left_behind(root, ended("gpt", "failed", 0.1, reason="rank 1 was killed"))
    place = Place(url="http://127.0.0.1:9", folder=folder)
    monkeypatch.setattr("megascale_ops.cli.status.find_place", lambda *_, **__: place)

    code = main(["status", "--watch"])

    out = capsys.readouterr().out
    assert code == 0
    assert "failed" in out
    assert out.splitlines()[-1].startswith("job gpt is over: failed (rank 1 was killed), at step 120; ")


def test_a_journal_that_cannot_be_read_costs_its_own_row_only(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are listed; of it is said why."""
    left_behind(root, ended("well", "finished", 1.0))
    folder = left_behind(root, ended("torn", "finished", 2.0))
    (folder / "journal.db").write_bytes(b"no database" * 999)

    main(["jobs", "--json"])

    found = {run["job"]: run for run in json.loads(capsys.readouterr().out)}
    assert found["well"]["result"] == "finished"
    assert found["torn"]["result"] == "unknown"
    assert found["torn"]["reason"]


def test_looking_at_an_old_run_does_not_make_it_the_newest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list of runs, or an old one's explanation, still names the newest when no run is named."""
    for job, days_ago in (("old", 9.0), ("new", 1.0)):
        left_behind(root, ended(job, "finished", days_ago))
    main(["incidents", "--job", "old"])
    main(["jobs"])
    capsys.readouterr()

    newest = [folder.name for folder in run_folders(Wanted())]

    assert newest == ["new", "old"]


def test_no_run_at_all_is_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And how to start one."""
    said = f"no run has left a folder in {root}: `megascale-ops run -- SCRIPT` starts one"

    assert main(["jobs"]) == 0
    assert said in capsys.readouterr().out
    assert main(["logs"]) == 2
    assert said in capsys.readouterr().err


def test_the_last_lines_of_the_newest_round_are_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Round 10 is newer than round 2; empty output is left out; an older round on request."""
    left_behind(root, ended("gpt", "finished", 1.0))

    main(["logs", "-n", "1"])
    newest = capsys.readouterr().out
    main(["logs", "gpt", "--round", "2", "--rank", "1", "--stream", "stdout"])
    older = capsys.readouterr().out

    assert newest == "==> rank 0, round 10, stdout <==\nloss 3.5\n"
    assert older == "==> rank 1, round 2, stdout <==\nstep 2 of rank 1\nloss 3.5\n"


def test_a_search_goes_over_all_rounds(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line with its round, rank and number."""
    left_behind(root, ended("gpt", "finished", 1.0))

    main(["logs", "--grep", r"step \d+ of rank 1"])

    assert capsys.readouterr().out.splitlines() == [
        "round 1 rank 1 stdout:1: step 1 of rank 1",
        "round 2 rank 1 stdout:1: step 2 of rank 1",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rank", "9"], "no output of rank 9 is kept in"),
        (["--rank", "3-1"], "--rank '3-1' can't be read: give ranks as in 0,3 or 0-3"),
        (["--round", "7"], "there is no round 7 in"),
        (["--grep", "("], "--grep '(' is no regular expression"),
        (["gtp"], "unknown job 'gtp': did you mean 'gpt'?"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    """With exit code 2."""
    left_behind(root, ended("gpt", "finished", 1.0))

    code = main(["logs", *arguments])

    error = capsys.readouterr().err
    assert code == 2
    assert sentence in error
    assert error.count("\n") == 1


def test_ranks_are_read_one_by_one_and_in_ranges() -> None:
    """As in a printer's dialogue."""
    assert parse_rank_list("") == frozenset()
    assert parse_rank_list("0-3, 8") == {0, 1, 2, 3, 8}
    with pytest.raises(UsageError):
        parse_rank_list("all")


@pytest.mark.parametrize("lines", [1, 3, 5000, 20_000])
def test_the_tail_of_a_long_file_is_its_last_lines(tmp_path: Path, lines: int) -> None:
    """Whatever lies where a piece of the file begins; without a newline at its end, too."""
    text = [f"line {number} " + "é" * (number % 90) for number in range(12_000)]
    (tmp_path / "log").write_text("\n".join(text), encoding="utf-8")

    assert tail(tmp_path / "log", lines).splitlines() == text[-lines:]


def test_following_reads_whole_lines_and_later_rounds(root: Path) -> None:
    """A line that is half written waits for its end; a new round's files are read from their start."""
    folder = left_behind(root, ended("gpt", "running", 1.0))
    follower = Follower(folder, (), ("stdout",))
    log = folder / "logs" / "round-10" / "rank-0" / "stdout.log"

    with log.open("a") as file:
        file.write("half a ")
        file.flush()
        first = list(follower.fresh())
        file.write("line\n")
    later = folder / "logs" / "round-11" / "rank-0"
    later.mkdir(parents=True)
    (later / "stdout.log").write_text("begun anew\n")
    second = [(file.round, line) for file, line in follower.fresh()]

    assert first == []
    assert second == [(10, "half a line"), (11, "begun anew")]


def test_what_is_followed_is_neither_missed_nor_shown_twice(root: Path) -> None:
    """The half line of now is the follower's; a line that will have no end is shown when the run is over."""
    folder = left_behind(root, ended("gpt", "running", 1.0))
    log = folder / "logs" / "round-10" / "rank-0" / "stdout.log"
    with log.open("a") as file:
        file.write("half a ")
    follower = Follower(folder, (0,), ("stdout",))
    (newest,) = [file for file in log_files(folder, (0,), ("stdout",)) if file.round == 10]

    shown = tail(newest.path, 9, follower.end_of(newest))
    searched = list(newest.matches(re.compile("half"), follower.end_of(newest)))
    with log.open("a") as file:
        file.write("line\nand a prompt> ")
    followed = [line for _, line in follower.fresh()]
    ended_with = [line for _, line in follower.fresh(ending=True)]

    assert shown == "step 10 of rank 0\nloss 3.5"
    assert searched == []
    assert (followed, ended_with) == (["half a line"], ["and a prompt> "])


def test_a_round_that_is_begun_anew_is_read_from_its_start(root: Path) -> None:
    """The same job again, while its output is followed: files of the life before are set aside."""
    folder = left_behind(root, ended("gpt", "running", 1.0))
    follower = Follower(folder, (0,), ("stdout",))

    (folder / "logs" / "round-10" / "rank-0" / "stdout.log").write_text("anew\n")

    assert [line for _, line in follower.fresh()] == ["anew"]


def test_output_of_several_nodes_is_found_in_their_folders(tmp_path: Path) -> None:
    """Where nodes share a disk each writes into a folder of its own; what no runner writes is left alone."""
    for name in ("node-a/round-1/rank-0", "node-b/round-1/rank-1", "node-b/round-x/rank-1"):
        (tmp_path / "logs" / name).mkdir(parents=True)
        (tmp_path / "logs" / name / "stdout.log").write_text("here\n")

    assert [(file.node, file.rank) for file in log_files(tmp_path, (), ("stdout",))] == [("node-a", 0), ("node-b", 1)]


def test_clean_removes_what_is_old_and_keeps_checkpoints(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest stay by --keep, the others by age; a checkpoint goes only when that is said."""
    old = left_behind(root, ended("old", "finished", 40.0), checkpoint=50_000)
    new = left_behind(root, ended("new", "finished", 2.0))

    code = main(["clean", "--older-than", "30"])
    said = capsys.readouterr().out
    listed = main(["jobs", "--json"])
    left = {run["job"]: run["result"] for run in json.loads(capsys.readouterr().out)}

    assert code == listed == 0
    assert "checkpoints stay" in said
    assert sorted(path.name for path in old.iterdir()) == [".cleaned", "checkpoints"]
    assert left == {"new": "finished", "old": "cleaned"}
    assert main(["clean", "old", "--checkpoints"]) == 0
    assert not old.exists()
    assert new.exists()


def test_a_dry_run_removes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what would go, and how much that is."""
    folder = left_behind(root, ended("old", "failed", 40.0))

    main(["clean", "--keep", "0", "--dry-run"])

    said = capsys.readouterr().out
    assert "would be removed" in said
    assert str(folder) in said
    assert (folder / "journal.db").exists()


def test_the_newest_are_kept(root: Path) -> None:
    """--keep counts runs that are over, from the newest."""
    folders = [left_behind(root, ended(f"run{age}", "finished", float(age))) for age in (1, 2, 3)]

    main(["clean", "--keep", "2"])

    assert [folder.exists() for folder in folders] == [True, True, False]


def test_a_run_that_may_live_is_never_touched(root: Path, listening: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where something answers at its controller's address, or a process of ours has its runner's number."""
    answers = left_behind(root, ended("answers", "running", 50.0))
    (answers / "controller.json").write_text(json.dumps({"url": listening, "pid": 1, "runner_pid": 0}))
    age(answers, NOW_S - 50 * DAY_S)
    lives = left_behind(root, ended("lives", "running", 50.0))
    (lives / "controller.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "runner_pid": os.getpid()}))
    age(lives, NOW_S - 50 * DAY_S)

    by_age, by_name = main(["clean", "--keep", "0"]), main(["clean", "lives"])

    said = capsys.readouterr()
    assert (by_age, by_name) == (0, 1)
    assert "nothing to remove" in said.out
    assert "lives still runs, and nothing was removed" in said.err
    assert (answers / "journal.db").exists()
    assert (lives / "journal.db").exists()


def without_journal(root: Path, job: str, written_s: float) -> Path:
    """Leave the folder of a run whose controller is elsewhere: output and checkpoints."""
    folder = left_behind(root, ended(job, "running", 50.0), checkpoint=9_000)
    for path in folder.glob("journal.db*"):
        path.unlink()
    age(folder, written_s)
    return folder


def test_a_run_of_a_controller_elsewhere_may_live(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No journal here tells how it stands, so what was written to of late stays, checkpoints above all."""
    folder = without_journal(root, "away", NOW_S - 600.0)

    by_age, by_name = main(["clean", "--keep", "0", "--checkpoints"]), main(["clean", "away", "--checkpoints"])

    said = capsys.readouterr()
    assert (by_age, by_name) == (0, 1)
    assert "away may still run, on another node or under another controller" in said.err
    assert "10 min 0 s ago" in said.err
    assert (folder / "checkpoints" / "step-00000040" / "data").exists()
    assert (folder / "logs" / "round-1").exists()


def test_a_run_on_another_node_of_a_shared_disk_may_live(root: Path) -> None:
    """Its journal is here and says that it runs; its controller's loopback address and process are the other node's."""
    folder = left_behind(root, ended("shared", "running", 0.1), checkpoint=9_000)
    (folder / "controller.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "runner_pid": 0}))
    age(folder, NOW_S - 3_600.0)

    main(["clean", "--keep", "0", "--checkpoints"])

    assert (folder / "checkpoints" / "step-00000040" / "data").exists()


def test_a_new_life_of_a_name_that_ended_may_live(root: Path) -> None:
    """The journal of the life before says finished; what is written since says otherwise."""
    folder = left_behind(root, ended("again", "finished", 20.0), checkpoint=9_000)
    log = folder / "logs" / "round-1" / "rank-0" / "stdout.log"
    os.utime(log, (NOW_S - 60.0, NOW_S - 60.0))

    main(["clean", "--older-than", "3", "--checkpoints"])

    assert log.exists()
    assert (folder / "checkpoints" / "step-00000040" / "data").exists()


def test_a_lock_that_a_runner_holds_is_life_enough(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the journal says and however old all of it is; given back, the folder may go."""
    monkeypatch.setenv("MEGASCALE_BOX_ROOT", str(tmp_path))
    folder = left_behind(root, ended("held[1]", "failed", 50.0))
    held = hold_place(tmp_path, "held[1]", "node-a", others=False)

    main(["clean", "--keep", "0"])
    was_there = folder.exists()
    held.release()
    main(["clean", "--keep", "0"])

    assert was_there
    assert not folder.exists()


def test_what_nobody_has_written_to_for_a_day_is_over(root: Path) -> None:
    """A power cut leaves no last word, and the folder must not stay for ever."""
    cut, away = left_behind(root, ended("cut", "running", 2.0)), without_journal(root, "away", NOW_S - 2 * DAY_S)

    main(["clean", "--keep", "0", "--checkpoints"])

    assert not cut.exists()
    assert not away.exists()


def test_links_in_a_run_folder_lead_nowhere(root: Path, tmp_path: Path) -> None:
    """A link goes; what it points to stays."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "weights").write_text("w")
    folder = left_behind(root, ended("old", "finished", 40.0))
    (folder / "outputs").symlink_to(precious)

    main(["clean", "old"])

    assert not folder.exists()
    assert (precious / "weights").read_text() == "w"


def test_clean_without_a_word_of_what_removes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, exit code 2."""
    folder = left_behind(root, ended("old", "finished", 40.0))

    code = main(["clean"])

    assert code == 2
    assert "say what to remove" in capsys.readouterr().err
    assert folder.exists()


def test_old_runs_go_by_themselves_but_for_their_checkpoints(root: Path) -> None:
    """By age and by number, once a day, never what may live; with nothing to keep for, nothing goes."""
    old = left_behind(root, ended("old", "finished", 100.0), checkpoint=9_000)
    middle = left_behind(root, ended("middle", "failed", 20.0))
    new = left_behind(root, ended("new", "finished", 2.0))
    lives = left_behind(root, ended("lives", "running", 0.1))

    assert retention.tidy(0.0, 0).runs == 0
    by_age = retention.tidy(90.0, 0)
    again = retention.tidy(90.0, 1)
    os.utime(root / ".retention", (NOW_S - 2 * DAY_S, NOW_S - 2 * DAY_S))
    by_number = retention.tidy(0.0, 1)

    assert (by_age.runs, again.runs, by_number.runs) == (1, 0, 1)
    assert by_age.size_bytes > 0
    assert sorted(path.name for path in old.iterdir()) == [".cleaned", "checkpoints"]
    assert not middle.exists()
    assert (new / "journal.db").exists()
    assert (lives / "journal.db").exists()


def test_sizes_are_told_by_kind(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints, logs, incidents and journals of all runs: what takes the room is seen before anything is removed."""
    folder = left_behind(root, ended("gpt", "finished", 1.0), checkpoint=900_000)
    (folder / "incidents" / "gpt-1").mkdir(parents=True)
    (folder / "incidents" / "gpt-1" / "rank-0.box").write_bytes(b"x" * 200_000)

    assert main(["jobs"]) == 0
    told = capsys.readouterr().out.splitlines()[-1]

    assert " in all: checkpoints " in told
    assert told.index("checkpoints") < told.index("incidents") < told.index("logs")
    assert "journals" in told

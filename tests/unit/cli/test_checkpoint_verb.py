# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops checkpoint``: what is printed, the exit codes, and that nothing is deleted that should stay."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megascale_ops.checkpoint import lock_files, processes, readers, storage, writer_lock
from megascale_ops.checkpoint import manifest as manifests
from megascale_ops.checkpoint.interval import daly
from megascale_ops.checkpoint.state.layout import Layout
from megascale_ops.checkpoint.trust import alarms
from megascale_ops.checkpoint.trust.alarms import Findings
from megascale_ops.checkpoint.trust.verdicts import Alarm
from megascale_ops.cli.main import main
from megascale_ops.cli.sources import measured
from megascale_ops.ledger import ROWS, Ledger, StepTime
from megascale_ops.schema.events import Incident, Marks
from megascale_ops.schema.history import Facts, History
from megascale_ops.trace.report_facts import Gathered, Report, Told
from tests.fakes.checkpoints import sealed

README_COMMANDS = (
    "megascale-ops checkpoint plan --stall 30 --write 90 --between-failures 86400 --restart 300 --step 2.5",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four checkpoints; of step 30 a byte is flipped, of step 20 a shard is missing."""
    for step in (10, 20, 30, 40):
        sealed(tmp_path, step)
    (tmp_path / "step-00000020" / "__1_0.distcp").unlink()
    flipped = tmp_path / "step-00000030" / "__0_0.distcp"
    flipped.write_bytes(b"X" + flipped.read_bytes()[1:])
    return tmp_path


def steps(root: Path) -> list[int]:
    """What stands there, newest first."""
    return [storage.step_of(path) for path in storage.candidates(root)]


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Run a line; exit code, stdout, stderr."""
    code = main(["checkpoint", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out, told.err


def numbers(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    """Run a line with ``--json``; exit code and what it printed."""
    code, out, _ = said(capsys, *words, "--json")
    return code, json.loads(out)


def test_the_list_says_what_manifests_and_sizes_tell(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped byte is not seen without reading; ``--json`` has the digest of every file."""
    with readers.reading(folder, 0, 1) as reader:
        reader.mark(10)
        code, out, _ = said(capsys, "ls", folder)
        _, listed = numbers(capsys, "ls", folder)

    assert code == 0
    assert "damaged: __1_0.distcp is missing" in out
    assert "sealed, being read" in out
    assert f" in {folder}\nstep 10 is read by a process (rank 0, pid {os.getpid()} on " in out
    assert [one["step"] for one in listed["checkpoints"]] == [40, 30, 20, 10]
    assert [len(one["faults"]) for one in listed["checkpoints"]] == [0, 0, 1, 0]
    assert [len(one["readers"]) for one in listed["checkpoints"]] == [0, 0, 0, 1]
    assert all(file["digest"].startswith("xxh3_128:") for file in listed["checkpoints"][0]["files"])
    assert len(listed["checkpoints"][0]["sha256"]) == 64


def test_the_mesh_is_told_by_the_names_of_its_dimensions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of those that know it; for programs with all that its manifest has."""
    mesh = Layout(("pp", "tp"), (2, 4))
    for step in (10, 20):
        folder = sealed(tmp_path, step)
        path = folder / manifests.FILE_NAME
        known = manifests.decode(path.read_bytes())
        path.write_bytes(manifests.encode(msgspec.structs.replace(known, mesh=mesh if step == 20 else msgspec.UNSET)))

    _, out, _ = said(capsys, "ls", tmp_path)
    _, listed = numbers(capsys, "ls", tmp_path)
    _, verified, _ = said(capsys, "verify", tmp_path)
    _, told = numbers(capsys, "verify", tmp_path)

    assert "mesh" in out
    assert out.count("pp=2 tp=4") == 1
    expected = [{"names": ["pp", "tp"], "sizes": [2, 4], "ranks": []}, None]
    assert [one["mesh"] for one in listed["checkpoints"]] == expected
    assert [one["mesh"] for one in told["checkpoints"]] == expected
    assert verified.splitlines()[:2] == [
        "step 20: whole, 515 B, saved by 2 ranks (pp=2 tp=4)",
        "step 10: whole, 515 B",
    ]


def test_a_single_one_is_listed_with_its_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong stands first."""
    _, out, _ = said(capsys, "ls", folder / "step-00000020")

    files = [line.split() for line in out.splitlines() if "distcp" in line and "damaged" not in line]
    assert files[0][0] == "__1_0.distcp"
    assert "is missing" in " ".join(files[0])


def test_verify_fails_when_one_is_damaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All are looked at, each fault is said, and what a restart would load."""
    code, out, _ = said(capsys, "verify", folder)
    also, told = numbers(capsys, "verify", folder)
    alone = said(capsys, "verify", folder / "step-00000040")

    assert (code, also) == (1, 1)
    assert out.splitlines()[1:5] == [
        "step 30: damaged",
        "  __0_0.distcp digest differs",
        "step 20: damaged",
        "  __1_0.distcp is missing",
    ]
    assert out.endswith("2 of 4 whole; a restart loads step 40\n")
    assert [(one["step"], one["ok"]) for one in told["checkpoints"]] == [
        (40, True),
        (30, False),
        (20, False),
        (10, True),
    ]
    assert alone[:2] == (0, "step 40: whole, 515 B\n")


def test_verify_tells_what_a_save_has_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Alarms, and parameters that stand still; neither is damage."""
    alarm = Alarm("silent_corruption", (3,), "rank 3 holds other values")
    found = Findings(40, 8, 12, (alarm,), 30, ("model.a", "model.b"))
    sealed(tmp_path, 40, {"__0_0.distcp": b"x", "trust.json": alarms.encode(found)})

    code, out, _ = said(capsys, "verify", tmp_path)
    _, told = numbers(capsys, "verify", tmp_path)

    assert code == 0
    assert out.splitlines()[1:3] == [
        "  when it was saved: rank 3 holds other values",
        "  2 parameters that train have not changed since step 30: model.a, model.b",
    ]
    assert "sealed; told at its save: silent corruption" in " ".join(said(capsys, "ls", tmp_path)[1].split())
    (one,) = told["checkpoints"]
    assert (one["alarms"][0]["ranks"], one["unchanged"], one["since"]) == ([3], ["model.a", "model.b"], 30)


def test_prune_deletes_what_nothing_keeps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run says the same and deletes nothing; a flipped byte makes no newest one."""
    _, planned = numbers(capsys, "prune", folder, "--keep", 1, "--dry-run")
    assert steps(folder) == [40, 30, 20, 10]

    code, out, _ = said(capsys, "prune", folder, "--keep", 1)

    assert code == 0
    assert steps(folder) == [40]
    assert [one["step"] for one in planned["checkpoints"] if not one["reasons"]] == [30, 20, 10]
    assert out.splitlines()[-1].startswith("3 of 4 checkpoints, ")
    assert out.splitlines()[-1].endswith(" deleted")


def test_prune_never_deletes_the_newest_whole_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest is damaged in a way that only its digest shows; of none that is whole, nothing goes."""
    newest = folder / "step-00000040" / "__0_0.distcp"
    newest.write_bytes(b"X" + newest.read_bytes()[1:])

    assert said(capsys, "prune", folder, "--keep", 1)[0] == 0
    assert steps(folder) == [40, 30, 20, 10]  # whole is step 10 alone

    (folder / "step-00000010" / "manifest.json").write_bytes(b"{}")
    code, _, error = said(capsys, "prune", folder, "--keep", 1)
    assert (code, steps(folder)) == (1, [40, 30, 20, 10])
    assert error == f"megascale-ops: nothing was deleted: none of the 4 checkpoints in {folder} is whole\n"


def test_prune_keeps_every_so_many_steps_and_what_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--keep-every`` alone keeps the newest, too."""
    for step in range(10, 70, 10):
        sealed(tmp_path, step)

    with readers.reading(tmp_path, 0, 1) as reader:
        reader.mark(20)
        assert said(capsys, "prune", tmp_path, "--keep-every", 30)[0] == 0

    assert steps(tmp_path) == [60, 30, 20]


def test_prune_refuses_a_folder_that_a_living_job_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence names it; when it has ended, the folder can be pruned at once."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom megascale_ops.checkpoint import writer_lock\n"
        "writer_lock.lock_of(Path(sys.argv[1])).hold(0, 1)\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "held\n"
        dry = said(capsys, "prune", folder, "--keep", 1, "--dry-run")
        code, _, error = said(capsys, "prune", folder, "--keep", 1)
        _, listed = numbers(capsys, "ls", folder)
    finally:
        job.kill()
        job.communicate(timeout=30)

    assert (code, error.count("\n"), steps(folder)) == (1, 1, [40, 30, 20, 10])
    assert error.startswith("megascale-ops: nothing was deleted: a process (rank 0, pid ")
    assert error.endswith(f") writes to {folder} and keeps what its own `keep` says; end it first\n")
    assert (dry[0], "without --dry-run it would be refused" in dry[2]) == (0, True)
    assert f"pid {job.pid}" in listed["held_by"]
    assert said(capsys, "prune", folder, "--keep", 1)[0] == 0


def test_a_holder_of_another_machine_is_living_while_it_renews(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only time tells: a renewal that is seen refuses at once, a lease without one lets go."""
    me = processes.describe_writer(0, 1)
    other = msgspec.structs.replace(me, lease_s=0.1, process=msgspec.structs.replace(me.process, host="node-b"))
    assert lock_files.create(folder, 1, other)
    now = [100.0]
    monkeypatch.setattr(writer_lock.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(writer_lock.time, "sleep", lambda seconds: now.append(now.pop() + seconds))

    assert writer_lock.living_writer(folder) == ""

    def renew(seconds: float) -> None:
        os.utime(lock_files.path_of(folder, 1), ns=(1, 1))
        now.append(now.pop() + seconds)

    monkeypatch.setattr(writer_lock.time, "sleep", renew)
    assert writer_lock.living_writer(folder) == other.who()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ls", "{0}/none"], "there is no {0}/none: give a folder of checkpoints, one of them, or a run folder"),
        (["verify", "{0}/file"], "{0}/file is no folder: give a folder of checkpoints, one of them, or a run folder"),
        (["ls", "{0}/empty"], "no checkpoint is in {0}/empty: one is a folder step-00000120 that CheckpointManager"),
        (["prune", "{0}"], "say what to keep: --keep N, --keep-every K or --keep-best N"),
        (["prune", "{0}/step-00000040", "--keep=1"], "{0}/step-00000040 is one checkpoint: give the folder that holds"),
        (["prune", "{0}", "--keep=0"], "invalid value for '--keep': 0 is not in the range"),
        (["diff", "{0}/step-00000040"], "{0}/step-00000040 is one checkpoint: give a second one, or the folder that"),
        (["plan", "--stall=nan"], "'nan' is no finite number"),
        (["plan", "--stall=1"], "give --between-failures SECONDS, or a JOB: no run of this machine shows them"),
        (["plan", "--stall=1", "--between-failures=0"], "the time between two failures must be more than that"),
        (["show"], "unknown command 'show'"),
    ],
)
def test_what_is_given_wrongly_is_one_sentence(
    folder: Path,
    words: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With exit code 2, and nothing is deleted."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.delenv("MEGASCALE_CONTROLLER", raising=False)
    (folder / "file").write_text("")
    (folder / "empty").mkdir()

    code, _, error = said(capsys, *(word.format(folder) for word in words))

    assert (code, error.count("\n")) == (2, 1)
    assert sentence.format(folder) in error
    assert steps(folder) == [40, 30, 20, 10]


def test_diff_needs_whole_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of a damaged one is loaded; the first reason is said."""
    code, _, error = said(capsys, "diff", folder / "step-00000030", folder)

    assert code == 1
    assert "no whole checkpoint is in" in error
    assert "step 30 is damaged: __0_0.distcp digest differs" in error


def test_diff_shows_what_changed_from_one_to_the_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two newest of a folder, or two that are named; the mark of its reading is gone afterwards."""
    import torch

    from megascale_ops.checkpoint import CheckpointManager

    manager = CheckpointManager(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        manager.save(step, {"w": torch.tensor([3.0, 4.0 + step]), "lr": 0.1 / step})

    _, out, _ = said(capsys, "diff", tmp_path)
    _, told = numbers(capsys, "diff", manager.path / "step-00000001", manager.path / "step-00000003")

    assert out.startswith(f"from {manager.path}/step-00000002\nto   {manager.path}/step-00000003\n")
    assert "1 of 1 tensors changed; 1 of 1 values differ" in out
    assert [(one["name"], one["largest"], one["changed"]) for one in told["changed"]] == [("w", 2.0, 0.5)]
    assert list(manager.path.glob(".reader-*")) == []


def test_a_plan_shows_its_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    """From options alone, no run is needed."""
    given = README_COMMANDS[0].split()[3:]

    code, out, _ = said(capsys, "plan", *given)
    _, told = numbers(capsys, "plan", *given)

    assert code == 0
    assert "37 min 37 s (every 903 steps)" in out
    assert "between failures   24 h 0 min" in out
    assert told["plan"]["interval_s"] == pytest.approx(daly(30, 86400))
    assert told["inputs"]["restart"] == {"seconds": 300.0, "source": "given", "is_bound": False}
    assert told["plan"]["lost_share"] < min(told["lost_share_at"].values())


def test_what_bounds_a_plan_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A stall of nothing: the write is what bounds it, and half of that can't be done."""
    given = ("--stall", 0, "--write", 60, "--between-failures", 3600)

    _, out, _ = said(capsys, "plan", *given)
    _, told = numbers(capsys, "plan", *given)

    assert "1 min 0 s, as long as a write takes" in out
    assert "not given: counts as 0" in out
    assert list(told["lost_share_at"]) == ["twice"]
    assert told["inputs"]["restart"]["seconds"] is None


def record(incidents: int, steps: list[StepTime]) -> Report:
    """Return a job of 1000 s that failed so often, with its account of time."""
    facts = Facts("gpt", began_wall_s=5000.0, costs=tuple(tuple(one) for one in steps), known_wall_s=5000.0, step_s=0.5)
    told = tuple(Told(Incident(f"gpt-{n}", "gpt", 1, marks=Marks(stopped=5100.0 + n)), ()) for n in range(incidents))
    warned = Told(Incident("gpt-w", "gpt", 1, marks=Marks(detected=5050.0)), ())
    gathered: dict[str, Any] = {
        "job": "gpt", "state": "finished", "began_wall_s": 5000.0, "until_wall_s": 6000.0, "history": History(facts),
        "told": (*told, warned), "settings": (), "notes": (), "source": "", "version": "", "made_wall_s": 0.0,
        "zone": None,
    }  # fmt: skip
    rows = dict.fromkeys(ROWS, 0) | {"detect": 2_000_000, "restart": 6_000_000, "start": 9_000_000}
    return Report(Gathered(**gathered), Ledger(1_000_000_000, rows), None, None, (), (), 0.0, is_named=False)


def test_the_costs_of_a_job_come_from_its_record() -> None:
    """Ten saves in 500 s of steps, two failures that stopped it; a warning stopped nothing."""
    steps = [StepTime(5000.0 + n, 5001.0 + n, 1.0, 0.0, 0.4 if n % 50 == 49 else 0.0) for n in range(500)]

    by_blocks = measured.measure(record(2, steps), [])
    by_files = measured.measure(record(2, steps), [4000.0, 5400.0, 5450.0, 5500.0])
    unharmed = measured.measure(record(0, steps), [])
    busy = measured.measure(record(0, [one._replace(checkpoint_s=0.1) for one in steps]), [])

    assert by_blocks.stall.seconds == pytest.approx(0.4)
    assert by_blocks.now.seconds == pytest.approx(49.6)
    assert by_files.stall.seconds == pytest.approx(0.4)
    assert by_files.now.seconds == pytest.approx(49.6)
    assert (by_blocks.between_failures.seconds, by_blocks.restart.seconds, by_blocks.step.seconds) == (500.0, 4.0, 0.5)
    assert unharmed.between_failures.is_bound
    assert unharmed.between_failures.source.startswith("no failure in 16 min 40 s")
    assert unharmed.restart == measured.Input(9.0, "as long as the first start")
    assert busy.stall.seconds is None

# SPDX-License-Identifier: Apache-2.0
"""The self-check with real processes: one that hangs is killed at its deadline, one that dies says how, none stays."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from megascale_ops.diagnostics import examination
from megascale_ops.diagnostics.check import Task
from megascale_ops.diagnostics.children import Child, Outcome, Planned, end_all, run_together
from megascale_ops.diagnostics.examination import Plan, Progress, examine, look_at
from megascale_ops.diagnostics.report import NodeReport
from megascale_ops.errors import MegascaleError
from megascale_ops.runner.node_check import check_node, recheck_node
from tests.fakes.sick_check import CHECK

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0
README_COMMANDS = ("megascale-ops diagnose --quick --check limits --check numa",)


@pytest.fixture(autouse=True)
def _finds_the_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check's process imports it by its name."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def asked() -> Iterator[list[Child]]:
    """Processes that are gone afterwards, whatever the test does."""
    children: list[Child] = []
    yield children
    end_all(children)


def wish(*paths: str, deadline_s: float = DEADLINE_S) -> Planned:
    """Return a check that does so."""
    return Planned("tests.fakes.sick_check", CHECK, Task(paths=paths, deadline_s=deadline_s))


def outcomes(asked: list[Child], wishes: list[Planned]) -> list[Outcome]:
    """Make all at once, a process each; return their outcomes in their order."""
    asked += [Child() for _ in wishes]
    found = dict(run_together(asked, wishes))
    return [found[one] for one in wishes]


def await_end(pid: int) -> None:
    """Wait until a process is gone: a signal that kills is sent before it has."""
    end_s = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        assert time.monotonic() < end_s, f"{pid} still lives"
        time.sleep(0.05)


def test_each_ending_is_told_and_none_holds_up_another(asked: list[Child]) -> None:
    """Seven checks at once, one hangs with a process of its own: all others answer, and nothing of it is left."""
    names = ("absent", "fail", "forbidden", "broken", "die", "leave", "measure")
    wishes = [wish("hang", deadline_s=3.0), *(wish(name, "CPU 0") for name in names)]

    hung, absent, failed, forbidden, broken, died, left, measured = outcomes(asked, wishes)

    assert hung.answer is None
    assert hung.trouble.startswith("was killed at its deadline of 3 s while it measured (asking /mnt/gone and started ")
    started = int(hung.trouble.split("started ")[1].split(")")[0])
    await_end(started)
    assert absent.answer is not None
    assert absent.answer.unmeasured == "there is no such part here"
    assert failed.answer is not None
    assert failed.answer.error == "RuntimeError: uncorrectable ECC error encountered"
    assert forbidden.answer is not None
    assert forbidden.answer.unmeasured == "/dev/part: Permission denied"
    assert broken.answer is not None
    assert broken.answer.error == "/dev/part: Input/output error"
    assert (died.answer, died.trouble) == (None, "ended without an answer (by SIGSEGV)")
    assert (left.answer, left.trouble) == (None, "ended without an answer (exit code 3: no memory left)")
    assert measured.answer is not None
    assert measured.answer.reading is not None
    assert measured.answer.reading.values("cpu_hash") == {"CPU 0": os.getpid()}


def test_a_check_that_cannot_be_loaded_says_so(asked: list[Child]) -> None:
    """Its process ends before it is ready, and its last line is the reason."""
    gone = Planned("tests.fakes.no_such_check", CHECK, Task())

    assert outcomes(asked, [gone])[0].trouble.startswith("ended without an answer (exit code 1: ModuleNotFoundError")


def test_checks_share_a_process_until_one_fails(asked: list[Child]) -> None:
    """The second check of a process is made by it; after one that failed it is of no use, after one that hung gone."""
    child = Child()
    asked.append(child)
    wishes = [
        wish("measure", "first"),
        wish("absent"),
        wish("measure", "second"),
        wish("fail"),
        wish("hang", deadline_s=1.0),
    ]

    found, usable = [], []
    for one in wishes:
        found += [outcome for _, outcome in run_together([child], [one])]
        usable.append(child.is_usable)
        if one.task.paths[0] == "fail":
            child.outcome = None  # to be asked all the same

    assert usable == [True, True, True, False, False]
    assert [bool(one.answer) for one in found] == [True, True, True, True, False]
    assert child.answers == -1


def test_checks_die_with_the_program_that_started_them(tmp_path: Path) -> None:
    """Also when it is killed: a check that hangs must not stay on the node."""
    script = tmp_path / "starter.py"
    script.write_text(
        "import time\n"
        "from tests.fakes.sick_check import CHECK\n"
        "from megascale_ops.diagnostics.check import Task\n"
        "from megascale_ops.diagnostics.children import Child, Planned, await_ready\n"
        "child = Child()\n"
        "await_ready([child])\n"
        "child.ask(Planned('tests.fakes.sick_check', CHECK, Task(paths=('hang',))))\n"
        "print(child._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.send_signal(signal.SIGKILL)

    await_end(pid)


def test_this_machine_is_examined(tmp_path: Path) -> None:
    """The verb as a user types it: reports as JSON and as a file, a disk that is measured and left as it was."""
    out, disk = tmp_path / "node.json", tmp_path / "disk"
    disk.mkdir()
    options = ["--json", "--out", str(out), "--path", str(disk), "--name", "n1"]
    checks = [f"--check={name}" for name in ("disk", "limits", "numa", "gemm", "gpu_health")]

    done = subprocess.run(
        [sys.executable, "-m", "megascale_ops.cli", "diagnose", *options, *checks],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip

    assert done.returncode in (0, 1), done.stderr
    report = msgspec.json.decode(done.stdout, type=NodeReport, strict=True)
    assert msgspec.json.decode(out.read_bytes(), type=NodeReport) == report
    results = {one.check: one for one in report.results}
    assert report.node == "n1"
    assert results.keys() == {"disk", "limits", "numa", "gemm", "gpu_health"}
    rates = {one.name: one.value for one in results["disk"].figures if one.of == str(disk)}
    assert rates["disk_write"] > 0
    assert rates["disk_damaged"] == 0
    assert list(disk.iterdir()) == []
    assert done.stderr == ""


@pytest.mark.parametrize("most_s", [0.0, 105.0])
def test_a_check_that_would_end_too_late_is_not_begun(monkeypatch: pytest.MonkeyPatch, most_s: float) -> None:
    """It is told as not measured, with what to do; those that are made beside each other, and in time, are made."""
    monkeypatch.setattr(examination, "_QUICK_S", most_s)
    begun: list[str] = []
    plan = Plan("n1", thorough=False, paths=(), names=("cpu", "limits"), program="test")

    report = examine(plan, Progress(begun.extend, lambda _: None))

    results = {one.check: one for one in report.results}
    assert results["limits"].status != "unmeasured"
    assert ("cpu" in begun) == bool(results["cpu"].figures) == bool(most_s)
    assert bool(re.search("--check NAME", " ".join(results["cpu"].unmeasured))) != bool(most_s)


def test_the_command_of_the_page_works() -> None:
    """A card at its end, whatever this machine's limits are."""
    words = README_COMMANDS[0].split()[1:]

    done = subprocess.run(
        [sys.executable, "-m", "megascale_ops.cli", *words],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert re.match(r"self-check \S+ · quick\n  what +node \S+ is good.*: 2 checks made in ", done.stdout)


def says(text: str, code: int = 0) -> list[str]:
    """Return a program in place of the verb that prints this and ends so."""
    return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({code})"]


def test_a_bad_node_does_not_join(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is one sentence; a node whose check could not be made joins, with a warning."""
    finding = '{"severity": "bad", "text": "GPU 3: 20 % slow"}'
    bad = f'{{"seconds": 24.0, "results": [{{"findings": [{finding}]}}]}}'

    with pytest.raises(
        MegascaleError, match=r"n1 is kept out of the job: GPU 3: 20 % slow. .*preflight-n1.json has all"
    ):
        check_node("quick", "n1", tmp_path, [str(tmp_path)], says(bad, 1))
    check_node("quick", "n1", tmp_path, [str(tmp_path)], says("Traceback", 1))
    check_node("quick", "n1", tmp_path, [str(tmp_path)], ["/no/such/program"])

    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(warned) == 2
    assert all("could not be measured" in text for text in warned)


def test_a_node_is_measured_between_two_rounds_and_no_run_ends_for_it(tmp_path: Path) -> None:
    """Good, bad with its reason and its report, or not measured: a result for the controller, never an exception."""
    finding = '{"severity": "bad", "text": "GPU 3: 20 % slow"}'
    folders = [str(tmp_path)]

    report = f'{{"seconds": 24.0, "results": [{{"findings": [{finding}]}}]}}'
    bad = recheck_node("n1", tmp_path, folders, program=says(report, 1))
    good = recheck_node("n1", tmp_path, folders, program=says('{"seconds": 24.0, "results": []}', 0))
    broken = recheck_node("n1", tmp_path, folders, program=says("Traceback", 1))
    missing = recheck_node("n1", tmp_path, ["/no/such/folder"], program=says("", 0))

    assert (bad.outcome, bad.text, bad.path) == ("bad", "GPU 3: 20 % slow", str(tmp_path / "check-n1.json"))
    assert (good.outcome, good.text) == ("good", "")
    assert (broken.outcome, missing.outcome) == ("unmeasured", "unmeasured")
    assert "/no/such/folder" in missing.text


@pytest.mark.matrix
def test_a_run_measures_its_node_first(tmp_path: Path) -> None:
    """Before its script is started, which finds the report in the run's folder; the disk measured is the run's own."""
    script = tmp_path / "script.py"
    script.write_text("import pathlib, sys\nprint(pathlib.Path(sys.argv[1], 'preflight-n1.json').exists())\n")
    run_dir = tmp_path / "run"

    done = subprocess.run(
        [sys.executable, "-m", "megascale_ops.cli", "run", "--preflight=quick", "--node=n1", f"--run-dir={run_dir}",
         f"--box-root={tmp_path}", "--", str(script), str(run_dir)],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("True")
    assert "this node is good" in done.stderr
    report = msgspec.json.decode((run_dir / "preflight-n1.json").read_bytes(), type=NodeReport)
    assert [one.facts[0].of for one in report.results if one.check == "disk"] == [str(run_dir)]


def test_folders_are_looked_at_in_processes_of_their_own(tmp_path: Path) -> None:
    """One that is there, one that is not, one that is a file, and all of them at once."""
    file = tmp_path / "file"
    file.touch()

    found = look_at([str(tmp_path), str(tmp_path / "none"), str(file)])

    assert found[str(tmp_path)] == ("fine", str(tmp_path.stat().st_dev))
    assert found[str(tmp_path / "none")] == found[str(file)] == ("not a folder", "")


def test_ctrl_c_ends_it_and_all_of_its_processes(tmp_path: Path) -> None:
    """At once, with the exit code of an interrupt; the disk's file is gone with its process."""
    options = ("--full", "--check=disk", f"--path={tmp_path}")
    with subprocess.Popen([sys.executable, "-m", "megascale_ops.cli", "diagnose", *options]) as program:
        end_s = time.monotonic() + DEADLINE_S
        while not (below := psutil.Process(program.pid).children(recursive=True)):
            assert time.monotonic() < end_s
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)
        assert program.wait(DEADLINE_S) == 130

    for one in below:
        await_end(one.pid)
    assert list(tmp_path.iterdir()) == []

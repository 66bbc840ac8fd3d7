# SPDX-License-Identifier: Apache-2.0
"""``megascale-ops trace`` as a user meets it: with boxes, without, with torn ones, and with mistakes."""

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from megascale_ops.blackbox.layout import EFFORTS, HEADER, PULSE, STEPS, Ring
from megascale_ops.cli.main import main
from megascale_ops.schema.version import BOX_VERSION
from megascale_ops.trace.perfetto import PerfettoWriter
from tests.fakes.boxes import box
from tests.fakes.decoded_trace import assert_arrows_whole, decode


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder with a state root and a box root of its own."""
    monkeypatch.setattr("megascale_ops.cli.terminal.logs.configure", lambda *_: None)
    for name in ("MEGASCALE_CONTROLLER", "MEGASCALE_TOKEN", "MEGASCALE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MEGASCALE_BOX_ROOT", str(tmp_path / "boxes"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str, str]:
    """Run one command line; return exit code, stdout and stderr."""
    code = main(["trace", *line])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_ranks_of_a_running_job_are_drawn(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last 20 steps of both ranks, into a file named after the job; what was chosen and how good the clocks are."""
    for rank in range(2):
        box(here / "boxes" / "toy", rank)

    code, out, err = run(capsys, "toy")

    assert (code, err) == (0, "")
    assert out.startswith("toy.pftrace: 2 of 2 ranks, steps 10 to 29, ")
    assert "clocks: one node, one clock; ends of the same collective lie within 0.0 us of their median" in out
    assert "https://ui.perfetto.dev" in out
    trace = decode(Path("toy.pftrace").read_bytes())
    assert [one.name for one in trace.on("rank 0", "steps")] == [f"step {step}" for step in range(10, 30)]
    assert assert_arrows_whole(trace) == 20


def test_a_program_gets_the_same_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was written, who was chosen and why, each node's clock, what could not be read."""
    for rank in range(2):
        box(here / "boxes" / "toy", rank)

    code, out, _ = run(capsys, "toy", "--json", "--format=chrome", "-o", "x.json", "--last=3", "--ranks=1")

    found = json.loads(out)
    assert code == 0
    assert found["written"]["path"] == "x.json"
    assert (found["written"]["first_step"], found["written"]["last_step"]) == (27, 29)
    assert found["written"]["size_bytes"] == Path("x.json").stat().st_size
    assert found["chosen"] == [{"rank": 1, "why": "asked for"}]
    assert found["clocks"]["nodes"][0]["method"] == "reference"
    assert json.loads(Path("x.json").read_text())["otherData"]["waiting and moving"].startswith(
        "measured against all 2"
    )


def test_waiting_is_measured_against_ranks_that_are_not_drawn(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 2 came last: it is named although only rank 0 is asked for."""
    for rank in range(3):
        box(here / "boxes" / "toy", rank, world=3)

    run(capsys, "toy", "--ranks=0")

    trace = decode(Path("toy.pftrace").read_bytes())
    assert {one.args["last arrival"] for one in trace.on("rank 0", "group 0 (host calls)") if not one.depth} == {
        "rank 2"
    }
    assert assert_arrows_whole(trace) == 0


def test_boxes_that_cannot_be_read_are_named_and_the_rest_is_drawn(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A torn one, one of another version, one that is none, one that is missing: a sentence each, and exit code 1."""
    folder = here / "kept"
    for rank in range(5):
        box(folder, rank, world=6)
    os.truncate(folder / "1.box", 9000)
    with (folder / "2.box").open("r+b") as file:
        file.seek(HEADER.field("version").offset)
        file.write((BOX_VERSION + 7).to_bytes(4, "little"))
    (folder / "3.box").write_bytes(b"no box" * 2000)

    code, out, err = run(capsys, "--boxes", str(folder))

    assert code == 1
    assert "2 of 2 ranks" in out
    assert "note: no black box of ranks 1-3,5 here" in out
    assert len(err.splitlines()) == 3
    assert "is a torn black box: 9000 of" in err
    assert f"version {BOX_VERSION + 7}" in err
    assert "does not begin with MGSCLBOX" in err


@pytest.mark.parametrize("number", [1e300, -1e300, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("ring", "field"),
    [
        (STEPS, "data_s"),
        (STEPS, "ended_mono_s"),
        (HEADER, "started_mono_s"),
        (PULSE, "moved_mono_s"),
        (EFFORTS, "gc_s"),
    ],
)
def test_a_time_that_no_clock_shows_costs_no_more_than_itself(
    here: Path, capsys: pytest.CaptureFixture[str], ring: Ring, field: str, number: float
) -> None:
    """A damaged number in one box: all ranks are drawn in both formats, and a prediction is no traceback."""
    for rank in range(3):
        box(here / "boxes" / "toy", rank, world=3)
    with (here / "boxes" / "toy" / "1.box").open("r+b") as file:
        file.seek(ring.offset + min(27, ring.slots - 1) * ring.stride + ring.field(field).offset)
        file.write(struct.pack("<d", number))

    codes = [run(capsys, "toy", f"--format={name}", "-o", name)[0] for name in ("perfetto", "chrome")]
    main(["whatif", "toy"])

    assert codes == [0, 0]
    trace = decode(Path("perfetto").read_bytes())
    assert [len(trace.on(f"rank {rank}", "steps")) for rank in (0, 2)] == [20, 20]
    assert len(trace.on("rank 1", "group 0 (host calls)")) >= 20
    assert json.loads(Path("chrome").read_text())["traceEvents"]


def test_a_step_number_that_cannot_be_hides_nobodys_steps(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest record of one rank is damaged: it is left out and counted, the last steps of all are drawn."""
    for rank in range(2):
        box(here / "boxes" / "toy", rank)
    with (here / "boxes" / "toy" / "1.box").open("r+b") as file:
        file.seek(STEPS.offset + 29 * STEPS.stride + STEPS.field("step").offset)
        file.write(((1 << 62) + 5).to_bytes(8, "little"))

    _, out, _ = run(capsys, "toy")

    assert "steps 10 to 29" in out
    assert "note: rank 1: 1 record with impossible times or numbers left out" in out
    assert assert_arrows_whole(decode(Path("toy.pftrace").read_bytes())) == 20


def test_a_box_of_a_rank_that_cannot_be_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its header is damaged; the other ranks are drawn, and the prediction is made of them."""
    for rank in range(3):
        box(here / "boxes" / "toy", rank, world=3)
    with (here / "boxes" / "toy" / "1.box").open("r+b") as file:
        file.seek(HEADER.field("rank").offset)
        file.write((-7).to_bytes(4, "little", signed=True))

    code, out, err = run(capsys, "toy")
    predicted = main(["whatif", "toy"])

    assert (code, predicted) == (1, 0)
    assert "2 of 2 ranks" in out
    assert "1.box is a damaged black box: it says that it is of rank -7" in err


def test_boxes_of_an_earlier_round_are_left_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that has not come back has a box of the round before: its collectives are none of this round's."""
    box(here / "boxes" / "toy", 0, round_=3)
    box(here / "boxes" / "toy", 1, round_=2)

    code, out, _ = run(capsys, "toy")

    assert code == 0
    assert "1 of 1 rank," in out
    assert "note: boxes of rounds before 3 are left out: rank 1" in out


def test_kept_boxes_of_an_incident_are_drawn_without_anybody_to_ask(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal is gone; the boxes still tell what happened."""
    for rank in range(2):
        box(here / "state" / "megascale-ops" / "toy" / "incidents" / "toy-1" / "a", rank)

    code, out, err = run(capsys, "toy", "--incident=toy-1")

    assert (code, err) == (0, "")
    assert out.startswith("toy-1.pftrace: 2 of 2 ranks")


def test_a_job_name_that_does_not_exist_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the nearest name that does, and where was looked."""
    box(here / "boxes" / "llama", 0, job="llama", world=1)

    code, out, err = run(capsys, "lama")

    assert (code, out) == (2, "")
    assert err.startswith("megascale-ops: unknown job 'lama': did you mean 'llama'?; looked in ")


def test_a_run_that_is_over_points_to_what_was_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Black boxes go with the run; those of its last incident stay."""
    folder = here / "state" / "megascale-ops" / "toy"
    box(folder / "incidents" / "toy-4" / "a", 0)
    (folder / "journal.db").touch()

    code, _, err = run(capsys, "toy")

    assert code == 1
    assert err == (
        "megascale-ops: no rank of job 'toy' runs on this machine: black boxes go when a run ends, "
        "of toy-4 they are kept: --incident toy-4\n"
    )


def test_boxes_of_several_jobs_want_a_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks of two jobs beside each other would be no timeline."""
    box(here / "kept" / "one", 0, job="one")
    box(here / "kept" / "two", 0, job="two")

    code, _, err = run(capsys, "--boxes", str(here / "kept"))
    named, out, _ = run(capsys, "two", "--boxes", str(here / "kept"))
    wrong, _, wrong_err = run(capsys, "three", "--boxes", str(here / "kept"))

    assert (code, named, wrong) == (2, 0, 2)
    assert err == "megascale-ops: these black boxes are of several jobs (one, two): name one of them\n"
    assert out.startswith("two.pftrace")
    assert wrong_err == "megascale-ops: these black boxes are not of job 'three' but of one, two\n"


def test_the_only_job_here_needs_no_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With none, and with several that might be meant, a sentence says so and what to give."""
    none, _, none_err = run(capsys)
    box(here / "boxes" / "toy", 0)
    one, out, _ = run(capsys)
    box(here / "boxes" / "ant", 0, job="ant")
    several, _, several_err = run(capsys)

    give = "give a JOB, --run-dir DIR, --incident ID or --boxes DIR"
    assert (none, one, several) == (2, 0, 2)
    assert out.startswith("toy.pftrace")
    assert none_err == f"megascale-ops: whose black boxes? no job's ranks live on this machine: {give}\n"
    assert several_err == f"megascale-ops: whose black boxes? ranks of ant, toy live here: {give}\n"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["toy", "--boxes=nowhere"], "there is no folder nowhere: --boxes takes a folder with black boxes"),
        (["--boxes=."], "there is no black box (*.box) in ."),
        (["toy", "-o", "gone/x"], "there is no folder gone to write x into"),
        (["toy", "-o", "."], ". is a folder: -o takes a file, such as toy.pftrace"),
        (["toy", "--ranks=9"], "there is no black box of rank 9 here; there are those of ranks 0-1"),
        (["toy", "--last=0"], "invalid value for '--last': 0 is not in the range x>=1"),
        (["toy", "--format=svg"], "invalid value for '--format': 'svg' is not one of 'perfetto', 'chrome'"),
        (["toy", "--limit-mb=0"], "invalid value for '--limit-mb': 0.0 is not in the range x>0"),
        (["toy", "--limit-mb=nan"], "invalid value for '--limit-mb': 'nan' is no finite number"),
        (["toy", "--limit-mb=inf"], "invalid value for '--limit-mb': 'inf' is no finite number"),
    ],
)
def test_a_mistake_is_one_sentence(
    line: list[str], sentence: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and no file."""
    for rank in range(2):
        box(here / "boxes" / "toy", rank)

    code, out, err = run(capsys, *line)

    assert (code, out, err) == (2, "", f"megascale-ops: {sentence}\n")
    assert list(Path().iterdir()) == []


def test_without_perfetto_the_remedy_is_named(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is not installed: one sentence; Chrome's JSON needs nothing."""
    box(here / "boxes" / "toy", 0, world=1)
    monkeypatch.setitem(sys.modules, "perfetto", None)

    code, _, err = run(capsys, "toy")
    chrome, _, _ = run(capsys, "toy", "--format=chrome")

    remedy = "pip install 'megascale-ops[report]'"
    assert (code, chrome) == (1, 0)
    assert err == f"megascale-ops: `megascale-ops` needs perfetto, which is not installed: {remedy}\n"


def test_ctrl_c_leaves_nothing_behind(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the file is written: exit code 130, the file of before is there, and nothing beside it."""
    for rank in range(2):
        box(here / "boxes" / "toy", rank)
    Path("toy.pftrace").write_bytes(b"of before")
    opening = PerfettoWriter.opening

    def interrupted(self: PerfettoWriter) -> bytes:
        os.kill(os.getpid(), signal.SIGINT)
        return opening(self)

    monkeypatch.setattr(PerfettoWriter, "opening", interrupted)

    code, _, _ = run(capsys, "toy")

    assert code == 130
    assert [(one.name, one.read_bytes()) for one in Path.cwd().iterdir()] == [("toy.pftrace", b"of before")]


def test_chromes_json_needs_no_extra(here: Path) -> None:
    """A node with the plain install can write it: neither Perfetto's package nor NumPy, torch or plotly is there."""
    box(here / "boxes" / "toy", 0)
    script = (
        "import sys\n"
        "for name in ('perfetto', 'numpy', 'plotly', 'torch'):\n"
        "    sys.modules[name] = None\n"
        "from megascale_ops.cli.main import main\n"
        "sys.exit(main(['trace', 'toy', '--format=chrome']))\n"
    )

    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(Path("toy.json").read_text())["traceEvents"]

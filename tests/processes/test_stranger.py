# SPDX-License-Identifier: Apache-2.0
"""Another user of the machine finds a run's controller on loopback: they read nothing, change nothing, end no job."""

import encodings.ascii
import encodings.idna  # noqa: F401  both loaded by the first request, when root's home can't be read any more
import json
import os
import shutil
import signal
import stat
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from megascale_ops.schema.messages import Heartbeat, JobReport, PolicyChange
from megascale_ops.schema.progress import ProcessReading, RankReport
from tests.processes.launch import ENDLESS, PLAIN, Launch, acted_upon, until

pytestmark = pytest.mark.processes
NOBODY = 65534
SENTENCE = "this controller wants a token: give --token-file or set MEGASCALE_TOKEN_FILE"


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that everybody may enter, as a shared file system has them, and the umask of most accounts."""
    before = os.umask(0o022)
    folder = Path(tempfile.mkdtemp(prefix="megascale-shared-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
    os.umask(before)


def attack(launch: Launch, run_dir: Path) -> list[tuple[str, str, bytes | None]]:
    """Return what ended the job of another user: a policy that stops it, and five words of a frozen rank."""
    found = until(launch.round_file, "the ranks to start")
    now_s = time.monotonic()
    frozen = ProcessReading(state="T", stopped_since_mono_s=now_s)
    ranks = tuple(RankReport(one.rank, one.local_rank, one.pid, found.round, process=frozen) for one in found.ranks)
    beats = [
        Heartbeat(
            found.node, "stranger", seq, now_s + 2.0 * seq, time.time(), full=True,
            jobs=(JobReport("toy", found.round, str(run_dir), ranks),),
        )
        for seq in range(1, 6)
    ]  # fmt: skip
    policy = ("POST", "/v1/jobs/toy/policy", msgspec.json.encode(PolicyChange({"frozen": "stop"})))
    return [policy, *(("POST", "/v1/heartbeat", msgspec.json.encode(beat)) for beat in beats)]


def ask(url: str, token: str, requests: list[tuple[str, str, bytes | None]]) -> list[tuple[int, str]]:
    """Send requests in order; return status and text of each answer."""
    answers = []
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    for method, path, body in requests:
        asked = urllib.request.Request(url + path, body, headers, method=method)  # noqa: S310  our own controller
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310  same
                answers.append((answer.status, answer.read().decode()))
        except urllib.error.HTTPError as error:
            answers.append((error.code, error.read().decode()))
    return answers


def listeners() -> list[int]:
    """Return the loopback ports on which somebody listens, as every user may read them."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    return [int(line[1].partition(":")[2], 16) for line in lines if line[3] == "0A" and line[1].startswith("0100007F")]


def as_nobody(run_dir: Path, requests: list[tuple[str, str, bytes | None]], url: str) -> dict[str, object]:
    """Be uid 65534 in a child of ours, whose own interpreter it could not start; return what it got."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            found = urlsplit(url).port in listeners()
            may_list = os.access(run_dir, os.R_OK) or os.access(run_dir, os.X_OK)
            told = {"found": found, "may_list": may_list, "answers": ask(url, "", requests)}
            os.write(writing, json.dumps(told).encode())
        except BaseException as error:  # noqa: BLE001  nothing of this process may run on in its copy
            os.write(writing, json.dumps({"error": repr(error)}).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = json.loads(pipe.read() or b"{}")
    os.waitpid(child, 0)
    return told


def open_files(folder: Path) -> list[str]:
    """Return what of ours somebody else could read, were the run folder open; checkpoints are the script's."""
    return [
        f"{path.relative_to(folder)} {stat.S_IMODE(path.stat().st_mode):04o}"
        for path in sorted(folder.rglob("*"))
        if "checkpoints" not in path.parts and path.stat().st_mode & 0o077
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_another_user_ends_no_job(launch: Launch, open_place: Path) -> None:
    """401 with one sentence for each forged message; training, a warm restart and a new controller go on as ever.

    The same messages with the token do end the job, so they would have without one.
    """
    run_dir = open_place / "run"
    (launch.state / "megascale-ops").mkdir(parents=True)
    launch.run_dir().symlink_to(run_dir)
    run = launch.run(*ENDLESS, options=(f"--run-dir={run_dir}", "--warm"), script=PLAIN)
    launch.until_step(5)
    whereabouts = launch.controller()
    assert whereabouts is not None
    url = str(whereabouts["url"])
    reads = [("GET", path, None) for path in ("/v1/status", "/v1/incidents", "/metrics", "/v1/live/snapshot")]

    told = as_nobody(run_dir, [*attack(launch, run_dir), *reads], url)
    os.kill(int(whereabouts["pid"]), signal.SIGKILL)
    os.kill(launch.pid(1), signal.SIGKILL)
    until(lambda: any(one.marks.stepped for one in launch.incidents()), "the recovery under a new controller")
    told_later = as_nobody(run_dir, reads[:1], url)
    status = launch.until_more_steps(15)
    incidents = [one.verdict.fault for one in acted_upon(launch.incidents()) if one.verdict is not None]
    policy = launch.command("policy", "show", "toy", "--json", f"--run-dir={run_dir}")

    refused = [401, json.dumps({"error": SENTENCE}, separators=(",", ":"))]
    assert told == {"found": True, "may_list": False, "answers": [refused] * 10}
    assert [answer[0] for answer in told_later["answers"]] == [401]  # type: ignore[attr-defined]  # a list
    assert (incidents, status.round) == (["killed"], 2)
    assert policy.returncode == 0
    assert "stop" not in json.loads(policy.stdout).get("changed", {}).values()
    assert open_files(run_dir) == []
    # The script's own file, written every ten steps, is as open as the user's umask makes it.
    assert stat.S_IMODE((run_dir / "checkpoints" / "plain.txt").stat().st_mode) == 0o644
    assert "token" not in launch.output().replace("--token-file", "")

    token = (run_dir / "controller.token").read_text(encoding="ascii").strip()
    answers = ask(url, token, attack(launch, run_dir))
    assert [code for code, _ in answers] == [200] * 6
    assert launch.finish(run) == 1, launch.output()
    assert not (run_dir / "controller.token").exists()

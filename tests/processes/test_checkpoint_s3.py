# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in S3 as s3fs speaks it, against a server of moto's: real requests, real conditional writes."""

import json
import logging
import os
import re
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import urllib3

from megascale_ops import __version__
from megascale_ops.checkpoint import CheckpointManager
from megascale_ops.checkpoint.processes import describe_writer
from megascale_ops.checkpoint.tiers.filesystems import Store
from megascale_ops.checkpoint.tiers.store_names import StoreNames
from megascale_ops.cli.main import main
from megascale_ops.errors import CheckpointError, UsageError
from tests.needed import late
from tests.processes.launch import Launch
from tests.processes.warmed import Ahead, start_module

torch, s3fs = late("torch"), late("s3fs")
pytestmark = pytest.mark.processes

README_COMMANDS = (
    "megascale-ops run --nproc-per-node 2 --checkpoint-dir s3://bucket/run7 train.py",
    "megascale-ops checkpoint ls s3://bucket/run7",
    "megascale-ops checkpoint verify s3://bucket/run7",
    "megascale-ops checkpoint diff s3://bucket/run7",
    "megascale-ops checkpoint prune s3://bucket/run7 --keep 1 --dry-run",
)

BEHIND = "tests.fixtures.checkpoint_behind_store"
ROOT = Path(__file__).parents[2]
USER = Path(__file__).parents[1] / "fixtures" / "checkpoint_user.py"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server on a port of its own."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    moto_backends, moto_server = import_module("moto.backends"), import_module("moto.server")  # they have no types
    known = list(moto_backends.list_of_moto_modules())  # each request would list its 150 folders
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    s3fs.S3FileSystem.clear_instance_cache()  # once: a client reads a megabyte of JSON before its first request
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(moto_backends, "list_of_moto_modules", lambda: known)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


@pytest.fixture
def url(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket, found as a user's would be: by AWS's own variables."""
    for name, value in (("ENDPOINT_URL", endpoint), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"b{uuid.uuid4().hex}"
    s3fs.S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}/run7"


def states(seed: int) -> dict[str, Any]:
    """12 MB, so that more than one block is read, and a number."""
    return {"large": torch.randn(3_000_000, generator=torch.Generator().manual_seed(seed)), "tokens": seed}


def test_a_state_comes_back_and_what_is_damaged_is_passed_over(url: str) -> None:
    """Saved twice, one byte of the newer changed in the store."""
    with closing(CheckpointManager(url)) as manager:
        for step in (1, 2):
            manager.save(step, states(step))
    state = states(0)
    with closing(CheckpointManager(url)) as later:
        assert later.restore(state) == 2
    assert torch.equal(state["large"], states(2)["large"])
    files = s3fs.S3FileSystem()
    (shard,) = files.glob(f"{url}/step-00000002/*/*.tensors")
    files.pipe_file(shard, b"\0" + files.cat_file(shard)[1:])

    with closing(CheckpointManager(url)) as last:
        assert last.restore(state) == 1
    assert torch.equal(state["large"], states(1)["large"])
    assert [fault.kind for report in last.skipped for fault in report.faults] == ["digest differs"]


def test_only_the_newest_few_stay(url: str) -> None:
    """And nothing of those that went."""
    with closing(CheckpointManager(url, keep=1)) as manager:
        for step in (1, 2):
            manager.save(step, {"tokens": step})

    names = s3fs.S3FileSystem().find(url)
    assert not [name for name in names if "step-00000001" in name]
    assert len([name for name in names if name.endswith("manifest.json")]) == 1


def test_of_many_that_take_the_lock_one_gets_it(url: str) -> None:
    """By a conditional write: all see the same number free."""
    names, writers = StoreNames(Store(url)), [describe_writer(rank, 1) for rank in range(6)]

    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda writer: names.create(1, writer), writers))

    assert got.count(True) == 1
    assert names.read_lock().writer == writers[got.index(True)]


def test_a_bucket_that_is_not_there_is_one_sentence(url: str) -> None:
    """At once, when the manager is made; and a save to one that went away names what failed."""
    with pytest.raises(UsageError, match=r"cannot write checkpoints to s3://no-such-bucket-here/run7: "):
        CheckpointManager("s3://no-such-bucket-here/run7")
    with closing(CheckpointManager(url)) as manager:
        s3fs.S3FileSystem().rm(url.rpartition("/")[0], recursive=True)

        with pytest.raises(CheckpointError, match=r"saving step 1 to s3://.* failed: "):
            manager.save(1, states(1))


class Waiting(logging.Handler):
    """Keeps what is said; a stopped writer process goes on when somebody says that it is waited for, and not before."""

    def __init__(self, writer: int) -> None:
        super().__init__()
        self._writer, self.said = writer, ""

    def emit(self, record: logging.LogRecord) -> None:
        """Called with each line that is logged."""
        self.said += f"{record.getMessage()}\n"
        if record.getMessage().startswith("waiting for the checkpoint"):
            os.kill(self._writer, signal.SIGCONT)


def restored_while_written(url: str, step_in_flight: int, writer: int) -> dict[str, Any]:
    """What a restart finds whose predecessor's writer process, stopped till it is waited for, goes on."""
    s3fs.S3FileSystem.clear_instance_cache()
    sealed = s3fs.S3FileSystem(use_listings_cache=False).glob(f"{url}/step-{step_in_flight:08d}/*/manifest.json")
    state = {"large": torch.zeros(3_000_000), "small": torch.zeros(3), "step": 0}
    waiting = Waiting(writer)
    log = logging.getLogger("megascale_ops.checkpoint")
    log.addHandler(waiting)
    try:
        # One that is left open renews its lease behind the tests that come after.
        with closing(CheckpointManager(url)) as manager:
            step = manager.restore(state)
    finally:
        log.removeHandler(waiting)
    return {
        "in flight": step_in_flight,
        "sealed before": sealed,
        "restored": step,
        "whole": bool((state["large"] == step).all()),
        "said": waiting.said,
    }


@pytest.fixture(scope="module")
def behind(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a training process reports of its saves in the background; it was killed with one in flight."""
    bucket, environment = f"b{uuid.uuid4().hex}", {"AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
    environment |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    s3fs.S3FileSystem.clear_instance_cache()
    url = f"s3://{bucket}/run7"
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        s3fs.S3FileSystem().mkdir(bucket)
    env = {**os.environ, **environment, "OMP_NUM_THREADS": "1", "MEGASCALE_RECORDER": "0"}
    told, said = os.pipe()
    errors = tmp_path_factory.mktemp("behind") / "stderr.log"
    with os.fdopen(told, encoding="utf-8") as lines:
        with os.fdopen(said, "wb") as out, errors.open("wb") as err:
            training = start_module(BEHIND, [url], env, out, err)
        ending = threading.Timer(600.0, training.kill)  # beside ten busy processes it took 200 s
        ending.start()
        try:
            line, last = lines.readline(), lines.readline()
            training.kill()
            assert last, errors.read_text()
            step, writer = map(int, re.findall(r"\d+", last))
            try:
                # At once: a request that is stopped for a minute is given up by the client.
                with pytest.MonkeyPatch.context() as patched:
                    for name, value in environment.items():
                        patched.setenv(name, value)
                    orphan = restored_while_written(f"{url}/orphan", step, writer)
            finally:
                with suppress(OSError):
                    os.kill(writer, signal.SIGKILL)
            yield {**json.loads(line), "orphan": orphan}
        finally:
            ending.cancel()
            training.kill()
            training.wait(60.0)


def test_what_is_saved_behind_the_training_is_the_state_at_the_call(behind: dict[str, Any]) -> None:
    """Overwritten right after each call. The two newest stay, and nothing by which the writers met."""
    report = behind["changed"]

    assert report["restored"] == [3, True]
    assert report["code"] == __version__
    assert report["parent"] in {1, 2}, "the newest that is known to be sealed when the copy is made"
    assert report["steps"] == ["step-00000002", "step-00000003"]
    assert set(report["names"]) == {"__0_0.msgpack", "__0_0.tensors", "__0_1.tensors", "manifest.json", "plan.msgpack"}


def test_a_writer_process_that_is_killed_costs_its_save_and_no_other(behind: dict[str, Any]) -> None:
    """Told by ``wait``; what it has left is no checkpoint, and the next save clears it away."""
    report = behind["killed"]

    assert report["error"].startswith("the save of step 2 failed: the writer process ")
    assert report["error"].endswith(" was killed by signal 9")
    assert report["found"] == [1, True]
    assert report["restored"] == [3, True]
    assert report["left"] == 2 * 5


def test_a_store_that_hangs_costs_the_save_that_waits_for_it(behind: dict[str, Any]) -> None:
    """Given up after the deadline, by a save that then goes well."""
    assert behind["hangs"] == {"restored": [3, True], "failed": 1, "sealed": 3}


def test_a_bucket_that_goes_away_is_one_sentence(behind: dict[str, Any]) -> None:
    """The training goes on."""
    assert behind["gone"]["error"].startswith("the save of step 2 failed: ")
    assert "\n" not in behind["gone"]["error"]


def test_a_restart_waits_for_what_an_orphan_still_writes(behind: dict[str, Any]) -> None:
    """The training process was killed when its copy was complete: its writer process seals, and that is restored."""
    orphan = behind["orphan"]

    assert orphan["sealed before"] == []
    assert orphan["restored"] == orphan["in flight"], orphan["said"]
    assert orphan["whole"]
    assert "waiting for the checkpoint that is still written to s3://" in orphan["said"]


def test_a_job_whose_rank_is_killed_goes_on_from_the_bucket(launch: Launch, tmp_path: Path, endpoint: str) -> None:
    """The commands of the page, as they stand there: rank 1 dies after step 3, and both go on from what is sealed."""
    shutil.copy(USER, tmp_path / "train.py")
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    launch.env |= {"AWS_ENDPOINT_URL": endpoint, **keys, "COLUMNS": "200"}
    launch.ahead = Ahead(("megascale_ops.checkpoint", "torch.distributed.checkpoint", "s3fs"), ("train.py",))
    with pytest.MonkeyPatch.context() as patched:
        for name in ("AWS_ENDPOINT_URL", *keys):
            patched.setenv(name, launch.env[name])
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")

    first, *others = (line.split()[1:] for line in README_COMMANDS)
    run = launch.command(*first, cwd=tmp_path)
    launch.ahead = None
    ls, verify, diff, prune = (launch.command(*line, cwd=tmp_path) for line in others)

    assert run.returncode == 0, run.stderr
    began = [int(found) for found in re.findall(r"begins with step (\d+)", run.stdout + run.stderr)]
    assert began[:2] == [0, 0]
    assert began[2] == began[3] >= 2, "a save before the one in flight was sealed"
    assert ls.returncode == verify.returncode == diff.returncode == prune.returncode == 0
    assert "3 checkpoints" in ls.stdout
    assert ls.stderr == ""
    assert "3 of 3 whole; a restart loads step 5" in verify.stdout
    assert "model.weight" in diff.stdout
    assert "2 of 3 checkpoints" in prune.stdout


def test_the_command_line_looks_at_a_bucket(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Lists, verifies by digests, compares and deletes; a bucket that is not there, and no keys, are one sentence."""
    with closing(CheckpointManager(url, keep=5)) as manager:
        for step in (1, 2, 3):
            manager.save(step, states(step))
    files = s3fs.S3FileSystem()
    (shard,) = files.glob(f"{url}/step-00000003/*/__0_0.tensors") or files.glob(f"{url}/step-00000003/*/__0_1.tensors")
    files.pipe_file(shard, b"\0" + files.cat_file(shard)[1:])

    assert main(["checkpoint", "ls", url]) == 0
    assert f" in {url}\n" in capsys.readouterr().out
    assert main(["checkpoint", "verify", url]) == 1
    assert "2 of 3 whole; a restart loads step 2" in capsys.readouterr().out
    assert main(["checkpoint", "diff", url]) == 0
    assert "1 of 1 tensors changed" in capsys.readouterr().out
    assert main(["checkpoint", "prune", url, "--keep", "1"]) == 0
    assert "1 of 3 checkpoints" in capsys.readouterr().out
    assert main(["checkpoint", "ls", "s3://no-such-bucket-here/run7"]) != 0
    assert "there is no s3://no-such-bucket-here: s3://no-such-bucket-here/run7 names" in capsys.readouterr().err


def test_a_bucket_that_the_keys_may_not_see_is_one_sentence(
    endpoint: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store checks them from now on, and these are none of its own."""
    reset = f"{endpoint}/moto-api/reset-auth"
    assert urllib3.request("POST", reset, body=b"0", timeout=30).status == 200
    try:
        s3fs.S3FileSystem.clear_instance_cache()
        code = main(["checkpoint", "ls", url])
        err = capsys.readouterr().err
        with pytest.raises(UsageError, match=f"cannot write checkpoints to {url}: ") as caught:
            CheckpointManager(url)
    finally:
        urllib3.request("POST", reset, body=b"1000000", timeout=30)
        s3fs.S3FileSystem.clear_instance_cache()

    assert code != 0
    assert f"{url} can't be read: " in err
    assert len(err.strip().splitlines()) == 1
    assert "\n" not in str(caught.value)

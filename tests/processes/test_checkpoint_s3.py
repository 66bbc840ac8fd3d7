# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in S3 as s3fs speaks it, against a server of moto's: real requests, real conditional writes."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib import import_module
from typing import Any

import pytest
import torch

from megascale_ops.checkpoint import CheckpointManager
from megascale_ops.checkpoint.processes import describe_writer
from megascale_ops.checkpoint.tiers.filesystems import Store
from megascale_ops.checkpoint.tiers.store_names import StoreNames
from megascale_ops.errors import CheckpointError, UsageError

# By name: neither has types.
moto_server, s3fs = import_module("moto.server"), import_module("s3fs")
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server on a port of its own."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
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
    s3fs.S3FileSystem.clear_instance_cache()
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
    assert CheckpointManager(url).restore(state) == 2
    assert torch.equal(state["large"], states(2)["large"])
    files = s3fs.S3FileSystem()
    (shard,) = files.glob(f"{url}/step-00000002/*/*.tensors")
    files.pipe_file(shard, b"\0" + files.cat_file(shard)[1:])

    assert manager.restore(state) == 1
    assert torch.equal(state["large"], states(1)["large"])
    assert [fault.kind for report in manager.skipped for fault in report.faults] == ["digest differs"]


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
    manager = CheckpointManager(url)
    s3fs.S3FileSystem().rm(url.rpartition("/")[0], recursive=True)

    with pytest.raises(CheckpointError, match=r"saving step 1 to s3://.* failed: "):
        manager.save(1, states(1))

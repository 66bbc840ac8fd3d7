# SPDX-License-Identifier: Apache-2.0
"""Lines of the rows of the table of last words that are of no single library, each with a near miss."""

from typing import NamedTuple


class Sample(NamedTuple):
    """``line`` must be named ``name``; ``near_miss`` must not."""

    name: str
    line: str
    near_miss: str
    ends_traceback: bool = False


# fmt: off
GENERAL = (
    Sample(
        "loss_not_finite",
        "[rank: 0] Monitored metric train_loss = nan is not finite. Previous best value was 2.113.",
        "Monitored metric nan_rate did not improve in the last 3 records. Best score: 0.300.",
    ),
    Sample(
        "ray_node_dead",
        "The node with node id: bb07 and address: 10.7.6.3 and node name: 10.7.6.3 has been marked dead because the "
        "detector has missed too many heartbeats from it.",
        "a worker is marked dead when the detector has missed heartbeats of it (health_check_failure_threshold)",
    ),
    Sample(
        "generic_wait",
        "TimeoutError: timed out waiting for 4 ranks at barrier save-900, 3 came",
        "TimeoutError: timed out waiting for the lock of /ck/index",
        ends_traceback=True,
    ),
    Sample(
        "generic_peer",
        "RuntimeError: NVSHMEM error: peer 3 did not respond, timeout",
        "RuntimeError: failed to fetch s3://c/0812.tar: Generic S3 error: connection error: Connection reset by peer",
        ends_traceback=True,
    ),
    Sample(
        "loader_asked",
        "RuntimeError: DataLoader worker (pid 3312) is killed by signal: Terminated. ",
        "RuntimeError: DataLoader worker (pid 3312) is killed by signal: Killed. ",
        ends_traceback=True,
    ),
    Sample(
        "poisoned_page",
        "[188988.765862] Memory failure: 0x1840200: Sending SIGBUS to python3:33395 due to hardware memory corruption",
        "Memory failure: 0x1840200: recovery action for dirty LRU page: Recovered",
    ),
    Sample(
        "never_began",
        "9m  Warning  Failed  pod/gpt-worker-1  Failed to pull image r/gpt:v7: rpc error: code = Unknown desc = 401",
        "Normal  Pulled  pod/gpt-worker-1  Successfully pulled image r/gpt:v7; nothing failed",
    ),
    Sample(
        "probe_failed",
        "2m  Normal  Killing  pod/gpt-2  Container trainer failed liveness probe, will be restarted",
        "1m  Normal  Killing  pod/gpt-2  Stopping container trainer",
    ),
    Sample(
        "ray_worker_dead",
        "Ray says of its actor: The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR",
        "The actor is dead because its worker process has died, so says a driver of somebody",
    ),
    Sample(
        "not_built_in",
        "torch.distributed.DistStoreError: use_libuv was requested but PyTorch was built without libuv support, run",
        "INFO PyTorch was built without MKL",
    ),
    Sample(
        "no_threads",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 63 of 64: Resource temporarily unavailable",
        "BlockingIOError: [Errno 11] Resource temporarily unavailable",
    ),
    Sample(
        "no_address",
        "torch.distributed.DistNetworkError: The IPv4 network addresses of (m, 29500) cannot be retrieved (gai error: "
        "-2 - Name or service not known).",
        "urllib3.exceptions.NameResolutionError: Failed to resolve 'hub' ([Errno -2] Name or service not known)",
        ends_traceback=True,
    ),
)
# fmt: on

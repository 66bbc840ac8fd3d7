# SPDX-License-Identifier: Apache-2.0
"""Pages of metrics as our programs expose them, without the programs: for what only NCCL, kernels or many nodes have.

    with Exposition(lambda: page(metrics, Cluster("job", nodes=64), moment_s())) as served: ...

Every row of the table of metrics can be had. Series belong to what their labels name: each rank to its node, each GPU
and port to its node; counters grow by the second, gauges stay within what their unit allows, and of a metric that is a
fact each rank or GPU has one. Values follow from names alone, so two pages of one moment are the same.
"""

import http.server
import itertools
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from megascale_agents.collectors.table import COLLECTORS

from megascale_ops.schema.metrics import Kind, Metric

# What labels can be that belong to nothing in particular, by the documentation of the metrics.
WORDS: dict[str, tuple[str, ...]] = {
    "op": ("all_reduce", "all_gather", "reduce_scatter"),
    "size_class": ("le64k", "le1m", "le16m", "le256m", "more"),
    "kernel": ("ag_gemm", "gemm_rs"),
    "peer": ("1", "3"),
    "group": ("all",),
    "judged": ("ok", "slow", "suspect", "lost"),
    "window": ("now", "hour", "job"),
    "class": ("train", "straggle", "detect", "diagnose", "restart", "reload", "recompute", "checkpoint", "idle"),
    "stage": ("detect", "diagnose", "restart", "reload", "recompute"),
    "check": ("gpu", "fabric", "kernel_log", *COLLECTORS),
    "mount_kind": ("run", "root", "shm"),
    "direction": ("transmitted", "received"),
    "type": ("corrected", "uncorrected"),
    "device": ("mlx5_0", "mlx5_1"),
    "port": ("1",),
    "part": ("data", "forward", "backward", "optimizer", "checkpoint"),
}
REASONS = {
    "megascale_gpu_throttle_seconds_total": ("sw_power_cap", "hw_thermal", "sw_thermal", "power_brake", "sync_boost"),
    "megascale_records_dropped_total": ("late", "busy", "no_box", "no_context", "unsampled", "untimed", "chain"),
}
CLASSES = {"megascale_incidents_total": ("recovered", "warned")}
KINDS = {
    "megascale_gpu_nvlink_errors_total": ("crc_flit", "crc_data", "replay", "recovery"),
    "megascale_ib_errors_total": ("symbol", "recovery", "receive", "transmit_discard"),
    "megascale_ib_congestion_total": ("cnp_sent", "cnp_handled", "ecn_marked", "out_of_sequence"),
}
# Facts: one word for each rank, GPU or job, not all words for each. So it is for a label that stands nowhere here.
FACTS = {
    "phase": ("forward", "backward", "optimizer"),
    "state": ("running",),
    "action": ("none", "none", "none", "reset"),
    "model": ("NVIDIA H200",),
    "driver": ("580.95", "580.95", "580.82"),
    "vbios": ("96.00",),
    "xid": ("48", "79"),
    "sxid": ("20034",),
    "version": ("0.1.0",),
    "component": ("agent",),
    "cause": ("compute", "input", "gc"),
    "fault": ("killed",),
    "verdict": ("silent",),
    "kind": ("collect",),
    "outcome": ("obeyed",),
    "collector": ("host",),
    "pattern": ("oom",),
    "reason": ("xid_79",),
    "how": ("signal",),
}
# The controller names no more suspects than these.
TOP = 20


class Cluster(NamedTuple):
    """What is there: one job, on all ranks of all nodes. ``names`` are the nodes' own names, where they matter."""

    job: str
    nodes: int = 1
    ranks_per_node: int = 8
    names: Sequence[str] = ()

    def node(self, number: int) -> str:
        """Return a node's name."""
        return self.names[number] if self.names else f"node-{number:04d}"


def page(metrics: Iterable[Metric], cluster: Cluster, age_s: float, now_wall_s: float) -> str:
    """Return a page of ``metrics`` as a cluster exposes them ``age_s`` seconds after it began."""
    lines: list[str] = []
    for metric in metrics:
        lines.append(f"# TYPE {metric.name} {'gauge' if metric.kind is Kind.INFO else metric.kind.value}")
        for place in _places(metric, cluster):
            for labels in _with_words(metric, place):
                lines.extend(_samples(metric, labels, age_s, now_wall_s))
    return "\n".join([*lines, ""])


def _places(metric: Metric, cluster: Cluster) -> Iterator[dict[str, str]]:
    """Yield what the series of a metric belong to: ranks, GPUs, nodes, the job or the program."""
    of_job = {"job": cluster.job} if "job" in metric.labels else {}
    if "rank" in metric.labels:
        everybody = range(cluster.nodes * cluster.ranks_per_node)
        for rank in everybody[:TOP] if "verdict" in metric.labels or "cause" in metric.labels else everybody:
            yield {**of_job, "rank": str(rank), **_where(metric, cluster, rank)}
    elif "node" in metric.labels:
        per_node = cluster.ranks_per_node if {"gpu", "uuid"} & set(metric.labels) else 1
        for number, local in itertools.product(range(cluster.nodes), range(per_node)):
            whole = {"gpu": str(local), "uuid": f"GPU-{number}-{local}"}
            own = {name: word for name, word in whole.items() if name in metric.labels}
            yield {**of_job, "node": cluster.node(number), **own}
    else:
        yield of_job


def _where(metric: Metric, cluster: Cluster, rank: int) -> dict[str, str]:
    number, local = divmod(rank, cluster.ranks_per_node)
    known = {
        "node": cluster.node(number),
        "local_rank": str(local),
        "tp": str(local),
        "pp": str(number % 4),
        "dp": str(number // 4),
        "ep": "",
        "gpu_uuid": f"GPU-{number}-{local}",
    }
    return {name: known[name] for name in metric.labels if name in known}


def _with_words(metric: Metric, place: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield the labels of every series at a place."""
    choices: list[tuple[str, ...]] = []
    free = [name for name in metric.labels if name not in place]
    for name in free:
        words = {"reason": REASONS, "kind": KINDS, "class": CLASSES}.get(name, {}).get(metric.name) or WORDS.get(name)
        if words is None:
            facts = FACTS.get(name, ("this", "that"))
            words = (facts[_hash(metric.name, place, name) % len(facts)],)
        choices.append(words)
    for words in itertools.product(*choices):
        yield {**place, **dict(zip(free, words, strict=True))}


def _samples(metric: Metric, labels: dict[str, str], age_s: float, now_wall_s: float) -> Iterator[str]:
    part = _hash(metric.name, labels, "") % 1000 / 1000.0
    if metric.kind is Kind.HISTOGRAM:
        total = 20.0 * age_s
        for place, bound in enumerate((*metric.buckets, float("inf"))):
            share = min(1.0, (place + 1) / len(metric.buckets))
            bucket = {**labels, "le": "+Inf" if bound == float("inf") else f"{bound:g}"}
            yield f"{metric.name}_bucket{_braces(bucket)} {total * share:g}"
        yield f"{metric.name}_sum{_braces(labels)} {total * metric.buckets[len(metric.buckets) // 2]:g}"
        yield f"{metric.name}_count{_braces(labels)} {total:g}"
        return
    yield f"{metric.name}{_braces(labels)} {_value(metric, part, age_s, now_wall_s):.10g}"


def _value(metric: Metric, part: float, age_s: float, now_wall_s: float) -> float:
    """Return a value that the metric can have; ``part`` in 0..1 is the series' own."""
    if metric.kind is Kind.INFO:
        return 1.0
    if metric.kind is Kind.COUNTER:
        speed = {"bytes": 1e9, "joules": 600.0}.get(metric.unit, 0.3)
        return speed * (0.5 + part) * (10.0 + age_s)
    if "timestamp" in metric.name:
        return now_wall_s - 5.0 * part
    if metric.name.endswith("health_check_status"):
        return float(max(0, round(part * 40) - 37))  # one in ten is not well
    if metric.name.endswith(("_up", "_links", "_pending", "_failed", "_open", "_suspected")):
        return 18.0 - (part > 0.9) if metric.name.endswith("_links") else float(part > 0.1)
    scale = {"celsius": 90.0, "hertz": 2e9, "watts": 700.0, "bytes": 1e11, "bytes_per_second": 5e10, "ratio": 1.0}
    return scale.get(metric.unit, 10.0) * (0.3 + 0.7 * part)


def _hash(name: str, labels: dict[str, str], more: str) -> int:
    return zlib.crc32(f"{name}{sorted(labels.items())}{more}".encode())


def _braces(labels: dict[str, str]) -> str:
    inner = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{{{inner}}}" if inner else ""


class Exposition:
    """A server on a loopback port of its own that answers every request with a page made for it."""

    def __init__(self, make: Callable[[], str]) -> None:
        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = make().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing: a scrape a second is no news."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self.target = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        """Serve."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop within a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

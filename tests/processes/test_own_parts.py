# SPDX-License-Identifier: Apache-2.0
"""Our own parts break: killed in any order, a journal that is damaged or can't be written, two runners of one name.

Training goes on or comes back each time, and a part that lost something reports it.
"""

import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import time
import urllib.request
from contextlib import closing, suppress

import pytest

from tests.fakes.relay import Relay
from tests.processes.launch import PATIENCE_S, PLAIN, until
from tests.processes.nodes import Cluster, Clusters, Node

pytestmark = pytest.mark.processes

PARTS = ("controller", "agent a", "agent b", "runner a", "runner b", "rank a", "rank b")


def _ask(cluster: Cluster, path: str) -> str:
    with urllib.request.urlopen(cluster.controller.url + path, timeout=PATIENCE_S) as answer:  # noqa: S310  our own controller
        return str(answer.read().decode())


def _health(cluster: Cluster) -> dict[str, object]:
    found: dict[str, object] = json.loads(_ask(cluster, "/healthz"))
    return found


def _runner_age_s(cluster: Cluster, node: str) -> float:
    """Return since when a node's runner was not heard, which the controller does not wait for."""
    status = cluster.status()
    return next((one.runner_age_s for one in status.nodes if one.node == node), -1.0) if status is not None else -1.0


def _kill(cluster: Cluster, part: str, dice: random.Random) -> None:
    """Kill one part; the test restarts it a moment later where no other part does."""
    kind, _, name = part.partition(" ")
    if kind == "controller":
        cluster.controller.kill()
        time.sleep(dice.uniform(0.0, 1.5))
        cluster.controller.start()
        return
    node = cluster[name]
    if kind == "runner":
        node.kill()
        time.sleep(dice.uniform(0.0, 1.5))
        node.start()
        return
    found = node.round_file()
    pids = [] if found is None else [found.agent_pid] if kind == "agent" else [rank.pid for rank in found.ranks]
    for pid in pids:
        with suppress(ProcessLookupError):  # it was just being replaced
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("seed", "kills"), [(1, 5), pytest.param(2, 10, marks=pytest.mark.matrix)])
def test_any_part_is_killed_at_any_moment_in_any_order(clusters: Clusters, seed: int, kills: int) -> None:
    """Several kills, some while the one before is being recovered from; the job trains again and ends well."""
    dice = random.Random(seed)  # noqa: S311  the same schedule in every run
    cluster = clusters("a", "b", nnodes="1:2")
    cluster.start()
    cluster.until_more_steps()
    told = []

    for number in range(kills):
        part = dice.choice(PARTS)
        told.append(part)
        _kill(cluster, part, dice)
        if dice.random() < 0.3 and number < kills - 1:
            time.sleep(dice.uniform(0.0, 1.0))  # the next one hits a recovery under way
            continue
        try:
            cluster.until_more_steps()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, after {told}: {error}") from None
    furthest = cluster.until_more_steps().step
    cluster.finish()

    assert furthest > 0, f"seed {seed}: {told}"
    assert not cluster["a"].pids() + cluster["b"].pids(), f"seed {seed}: {told}"


@pytest.mark.parametrize(
    "what",
    ["a page", *(pytest.param(what, marks=pytest.mark.matrix) for what in ("all but the first page", "the head"))],
)
def test_a_damaged_journal_is_put_aside_and_training_goes_on(clusters: Clusters, what: str) -> None:
    """Bytes flip while the controller is down: one sentence, the file is kept, and what breaks afterwards is mended."""
    cluster = clusters("a", nnodes="1", nproc=2, script=PLAIN)
    cluster.start()
    cluster.until_more_steps()
    os.kill(cluster["a"].rank_pids()[1], signal.SIGKILL)
    cluster.until_status("running", round_=2)
    cluster.until_more_steps()
    cluster.controller.kill()
    journal = cluster.controller.journal
    wal = journal.with_name("ops.db-wal")
    if what == "a page":  # one that only the database has: pages of the log that lies before it would hide the damage
        with closing(sqlite3.connect(journal)) as opened:
            opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for path in (journal, wal):
        raw = bytearray(path.read_bytes()) if path.exists() else bytearray()
        first, last = {"a page": (4096 * 3, 4096 * 4), "all but the first page": (4096, len(raw)), "the head": (0, 99)}[
            what
        ]
        for place in range(first, min(last, len(raw))):
            raw[place] ^= 0x5A
        path.write_bytes(raw)
    pids = cluster["a"].rank_pids()

    cluster.controller.start()
    time.sleep(2.0)
    same = cluster["a"].rank_pids()
    health, metrics = _health(cluster), _ask(cluster, "/metrics")
    os.kill(same[0], signal.SIGKILL)
    after = cluster.until_status("running", round_=3)
    cluster.finish()

    assert same == pids
    assert after.round == 3
    assert len(list(journal.parent.glob("ops.db*.damaged-1"))) == 1
    assert cluster.controller.output().count("was damaged") == 1
    assert (health["status"], "was damaged" in str(health["journal"])) == ("degraded", True)
    assert "megascale_controller_journal_damaged 1.0" in metrics


def test_a_journal_on_a_full_disk_stops_nothing(clusters: Clusters) -> None:
    """Told in the log, in /healthz and in the metrics; a killed rank is recovered; with room again all is written."""
    cluster = clusters("a", nnodes="1", nproc=2, script=PLAIN)
    disk = cluster.launch.tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("needs the right to mount a small tmpfs; the test with a limit on file sizes needs none")
    try:
        cluster.controller.journal = disk / "ops.db"
        cluster.start()
        cluster.until_more_steps()
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))

        os.kill(cluster["a"].rank_pids()[1], signal.SIGKILL)
        cluster.until_status("running", round_=2)
        health = until(lambda: found if (found := _health(cluster))["status"] != "ok" else None, "the full disk")
        metrics = _ask(cluster, "/metrics")
        (disk / "filler").unlink()
        until(lambda: _health(cluster)["status"] == "ok", "the journal to be written again")
        kinds = [event.kind for event in cluster.events()]
        cluster.finish()
        cluster.controller.kill()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)

    assert health["status"] == "degraded"
    assert "full" in str(health["journal"])
    assert "megascale_controller_journal_failing 1.0" in metrics
    assert "the journal can't be written" in cluster.controller.output()
    assert {"rank_failed", "verdict_restart"} <= set(kinds)


@pytest.mark.matrix  # to a job the same as the full disk above
def test_a_controller_that_may_write_no_file_at_all_stops_nothing(clusters: Clusters) -> None:
    """A limit on file sizes fails every write, its log's too: training goes on, a killed rank is recovered."""
    cluster = clusters("a", nnodes="1", nproc=2, script=PLAIN)
    cluster.start()
    cluster.until_more_steps()
    assert cluster.controller.proc is not None
    _, hard = resource.prlimit(cluster.controller.proc.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(cluster.controller.proc.pid, resource.RLIMIT_FSIZE, (0, hard))

    os.kill(cluster["a"].rank_pids()[1], signal.SIGKILL)
    cluster.until_status("running", round_=2)
    health = _health(cluster)
    resource.prlimit(cluster.controller.proc.pid, resource.RLIMIT_FSIZE, (hard, hard))
    until(lambda: _health(cluster)["status"] == "ok", "the journal to be written again")
    cluster.finish()

    assert health["status"] == "degraded"
    assert cluster.faults() == ["killed"]


def test_a_second_machine_with_the_same_name_is_refused(clusters: Clusters) -> None:
    """One sentence and exit code 1; the first, with its ranks, is not disturbed."""
    cluster = clusters("a", nnodes="1", script=PLAIN)
    cluster.start()
    cluster.until_more_steps()
    double = Node(cluster, "a", folder="double")
    cluster.nodes["double"] = double

    double.start()

    assert double.finish() == 1
    assert "already has a living runner on node a" in double.output().strip().splitlines()[-1]
    assert double.rank_pids() == []
    cluster.until_more_steps()
    cluster.finish("a")
    assert "in round 2" not in cluster["a"].output()


def test_a_machine_whose_place_was_taken_while_it_was_cut_off_stops_its_ranks(clusters: Clusters) -> None:
    """Of two that both believe to be node a, the one that was thought dead ends as soon as it is told so."""
    cluster = clusters("a", nnodes="1", script=PLAIN)
    cluster.controller.start()
    double = Node(cluster, "a", folder="double")
    with Relay(cluster.controller.port) as relay:
        cluster["a"].controller_url = relay.url
        cluster["a"].start()
        cluster.until_known(cluster["a"])
        cluster.until_more_steps()
        relay.cut()
        # A broken connection is given one second to come back.
        until(lambda: _runner_age_s(cluster, "a") > 1.5, "the controller to take the first runner for dead")
        cluster.nodes["double"] = double
        double.start()
        cluster.until_status(round_=2)
        relay.heal()

        code = cluster["a"].finish()
        cluster.until_more_steps()
        cluster.finish("double")

    assert code == 1
    assert "is served by another runner now" in cluster["a"].output()
    assert cluster["a"].pids() == []

# SPDX-License-Identifier: Apache-2.0
"""What ranks printed, by a controller that shares no disk with them: real agents read it where it lies."""

import os
import signal
from subprocess import CompletedProcess

import pytest

from megascale_ops.link.http_client import HttpClient
from megascale_ops.schema.tokens import new_token
from tests.processes.launch import PLAIN, until
from tests.processes.nodes import Cluster, Clusters
from tests.processes.test_versions import make_other

pytestmark = pytest.mark.processes


def logs(cluster: Cluster, *arguments: str) -> CompletedProcess[str]:
    """Ask the controller for what ranks printed to stdout."""
    token = cluster.controller.token_file
    given = (f"--token-file={token}",) if token is not None else ()
    return cluster.launch.command(
        "logs", cluster.job, f"--controller={cluster.controller.url}", "--stream=stdout", *given, *arguments
    )


def status_of(cluster: Cluster, token: str = "") -> int:
    """Return the status with which HTTP answers who asks for the log of rank 3."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    client = HttpClient(cluster.controller.url, headers)
    query = {"rank": "3", "stream": "stdout"}
    try:
        return client.ask("GET", f"/v1/jobs/{cluster.job}/logs", query=query, body=None, patience_s=30.0)[0]
    finally:
        client.close()


def test_what_ranks_of_two_nodes_print_is_read_searched_and_followed(clusters: Clusters) -> None:
    """Rank 3 on node b is killed; its log of both rounds is read, and another one followed until the job is over."""
    cluster = clusters("a", "b", nnodes="2", nproc=2, script=PLAIN)
    token = new_token()
    cluster.controller.token_file = cluster.launch.tmp_path / "token"
    cluster.controller.token_file.write_text(token)
    cluster.controller.token_file.chmod(0o600)
    cluster.start()
    cluster.until_status("running", step=20)

    both = logs(cluster, "--rank=0,3")
    follower = cluster.launch.spawn(
        *("logs", "--controller", cluster.controller.url, f"--token-file={cluster.controller.token_file}"),
        *("--rank=0", "--stream=stdout", "--lines=1", "--follow"),
        log="follow.log",
    )
    until(lambda: "begins at step 0" in cluster.launch.output("follow.log"), "the first lines")
    os.kill(cluster["b"].rank_pids()[1], signal.SIGKILL)
    cluster.until_status("running", round_=2)
    until(lambda: "in round 2" in cluster.launch.output("follow.log"), "a line of the next round")

    def of_both_rounds() -> CompletedProcess[str] | None:
        told = logs(cluster, "--rank=3", "--grep=rank 3 .*in round")
        return told if len(told.stdout.splitlines()) >= 2 else None

    found = until(of_both_rounds, "rank 3, which does not wait for the others, to have printed as well")
    nowhere = logs(cluster, "--rank=4")
    allowed = [status_of(cluster, given) for given in ("", new_token(), token)]
    cluster.finish()

    assert both.returncode == 0, both.stderr
    assert both.stdout.splitlines() == [
        "==> rank 0 on a, round 1, stdout <==",
        "rank 0 begins at step 0 in round 1",
        "==> rank 3 on b, round 1, stdout <==",
        "rank 3 begins at step 0 in round 1",
    ]
    lines = found.stdout.splitlines()
    assert [line.partition(" begins")[0] for line in lines] == [f"round {at} rank 3 stdout: rank 3" for at in (1, 2)]
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert "there is no rank 4: job toy has ranks 0-3" in nowhere.stderr
    assert allowed == [401, 401, 200]
    assert follower.wait(90) == 0
    assert "--- round 2 ---\n[0] rank 0 begins at step" in cluster.launch.output("follow.log")


@pytest.mark.matrix
def test_an_agent_that_cannot_read_is_told_and_costs_the_other_nodes_lines_nothing(clusters: Clusters) -> None:
    """That of node b is a version behind, and does not know the order; then it stands still."""
    cluster = clusters("a", "b", nnodes="2", script=PLAIN)
    make_other(cluster["b"], -1)
    cluster.start()
    cluster.until_status("running", step=20)

    old = logs(cluster, "--rank=0-1")
    file = cluster["b"].round_file()
    assert file is not None
    os.kill(file.agent_pid, signal.SIGSTOP)
    silent = logs(cluster, "--rank=0-1")
    os.kill(file.agent_pid, signal.SIGCONT)
    cluster.finish()

    assert old.stdout == silent.stdout == "==> rank 0 on a, round 1, stdout <==\nrank 0 begins at step 0 in round 1\n"
    assert old.stderr.startswith("megascale-ops: the agent of node b is too old to read logs: update it, or `megascale")
    assert silent.stderr.startswith("megascale-ops: the agent of node b has not answered within 6 s: `megascale-ops ")
    assert old.stderr.count("\n") == silent.stderr.count("\n") == 1

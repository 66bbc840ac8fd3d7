# SPDX-License-Identifier: Apache-2.0
"""Networks that are cut, held up or slow: between a node and the controller, and between the nodes themselves.

The way to the controller leads through a relay in user space, so these tests need no right of any kind. To cut the
ranks off from each other each node must have a network of its own; that needs network namespaces.
"""

import errno
import os
import secrets
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

from megascale_ops.schema.events import JobStatus
from tests.fakes.relay import Relay
from tests.processes.launch import until
from tests.processes.nodes import Cluster, Clusters, Controller, Node

pytestmark = pytest.mark.processes


def _behind_relay(cluster: Cluster, name: str) -> Relay:
    """Start the controller and both nodes, one of them behind a relay."""
    cluster.controller.start()
    relay = Relay(cluster.controller.port)
    cluster[name].controller_url = relay.url
    for node in cluster.nodes.values():
        node.start()
        cluster.until_known(node)
    cluster.until_status("running", step=20)
    return relay


def _furthest(status: JobStatus) -> int:
    """Return the step of the rank that is seen furthest: the job's own step counts all, those of cut nodes too."""
    return max(rank.report.progress.step for rank in status.ranks if rank.report.progress is not None)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        # Silence instead of a closed connection: the test with lost packets has that, of node b.
        ("a", "cut"),
        pytest.param("b", "hold", marks=pytest.mark.matrix),
        pytest.param("a", "hold", marks=pytest.mark.matrix),
        pytest.param("b", "cut", marks=pytest.mark.matrix),
    ],
)
def test_a_node_cut_off_from_the_controller_only_goes_on_training(clusters: Clusters, name: str, how: str) -> None:
    """Nobody restarts while all make steps together, however long: a warning says so, and ends when it is healed."""
    cluster = clusters("a", "b", nnodes="1:2")
    with _behind_relay(cluster, name) as relay:
        (relay.cut if how == "cut" else relay.hold)()
        until(lambda: cluster.faults(warnings=True), "the warning that a node is not heard")
        before = _furthest(cluster.until_status())
        time.sleep(8.0)  # more than the patience again
        after = cluster.until_status()
        warning = cluster.incidents()[0]
        relay.heal()
        until(lambda: cluster.incidents()[0].state == "over", "the warning to end")
        cluster.finish()

    assert (after.state, after.round) == ("running", 1)
    assert _furthest(after) > before + 20
    assert warning.verdict is not None
    assert (warning.state, warning.verdict.fault, warning.verdict.nodes) == ("watching", "node_lost", (name,))
    assert cluster.faults() == []
    assert "in round 2" not in cluster["a"].output() + cluster["b"].output()


def test_a_node_that_dies_behind_a_cut_is_lost(clusters: Clusters) -> None:
    """The opposite: what is cut off and dead is replaced by going on alone, and is taken back when it is whole."""
    cluster = clusters("a", "b", nnodes="1:2")
    with _behind_relay(cluster, "b") as relay:
        relay.cut()
        cluster["b"].kill_whole()
        alone = cluster.until_status("degraded", round_=2)
        relay.heal()
        cluster["b"].start()
        cluster.until_status("running", round_=3)
        cluster.finish()

    assert alone.world_size == 1
    assert cluster.faults() == ["node_lost", "membership"]
    assert cluster.incidents()[0].verdict.nodes == ("b",)  # type: ignore[union-attr]  # it has one


def test_a_rank_that_fails_behind_a_cut_costs_one_restart_and_its_node_comes_back(clusters: Clusters) -> None:
    """While b can't be asked, the others go on without it; healed, its runner asks by itself and is taken in again."""
    cluster = clusters("a", "b", nnodes="1:2")
    with _behind_relay(cluster, "b") as relay:
        relay.cut()
        os.kill(cluster["b"].rank_pids()[0], 9)
        cluster.until_status("degraded", round_=2)
        relay.heal()
        together = cluster.until_status("running", round_=3)
        cluster.finish()

    assert together.world_size == 2
    assert cluster.faults()[-1] == "membership"
    assert "begins at step 0 in round 3" not in cluster["a"].output()


def test_a_slow_way_to_the_controller_is_no_loss(clusters: Clusters) -> None:
    """A delay of 0.3 s a chunk and 20 KB/s: late heartbeats accuse nobody and nothing is restarted."""
    cluster = clusters("a", "b", nnodes="1:2")
    with _behind_relay(cluster, "b") as relay:
        relay.delay_s, relay.bytes_per_s = 0.3, 20_000
        cluster.finish()

    assert cluster.faults(warnings=True) == []
    assert "in round 2" not in cluster["a"].output()


class Networks:
    """Two networks of our own: one that leads to the controller, one between the ranks; an interface of each a node."""

    def __init__(self, *names: str) -> None:
        self.mark = f"mo{uuid.uuid4().hex[:5]}"
        # Of their own each time: of two bridges with one address, one would take the other's answers.
        self._second, self._third = 64 + secrets.randbelow(128), 2 * secrets.randbelow(127)
        self.names = names

    def address(self, net: str, number: int = 1) -> str:
        """Return an address on one of the networks: c leads to the controller, d joins the ranks; 1 is outside."""
        return f"10.{self._second}.{self._third + 'cd'.index(net)}.{number}"

    def make(self) -> None:
        """Make namespaces, interfaces and bridges.

        Raises:
            subprocess.CalledProcessError: this machine has no right or no kernel for it.
        """
        for net in "cd":
            bridge = f"{self.mark}{net}"
            _ip("link", "add", bridge, "type", "bridge")
            _ip("addr", "add", f"{self.address(net)}/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
        for number, name in enumerate(self.names, start=2):
            _ip("netns", "add", self.namespace(name))
            _ip("-n", self.namespace(name), "link", "set", "lo", "up")
            for net in "cd":
                outer, inner = f"{self.mark}{name}{net}", f"{net}0"
                _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", self.namespace(name))
                _ip("link", "set", outer, "master", f"{self.mark}{net}", "up")
                _ip("-n", self.namespace(name), "addr", "add", f"{self.address(net, number)}/24", "dev", inner)
                _ip("-n", self.namespace(name), "link", "set", inner, "up")

    def until_up(self) -> None:
        """Wait until every node reaches the outside: the kernel takes its time to let a new bridge forward."""
        knock = "import socket, sys; s = socket.socket(); s.settimeout(1); print(s.connect_ex((sys.argv[1], 9)))"
        for name in self.names:
            for net in "cd":
                command = ["ip", "netns", "exec", self.namespace(name), sys.executable, "-c", knock, self.address(net)]

                def answered(command: list[str] = command) -> bool:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
                    return done.stdout.strip() == str(errno.ECONNREFUSED)  # nobody listens there, and says so

                until(answered, f"{name} to reach {self.address(net)}")

    def namespace(self, name: str) -> str:
        """Return the name of a node's namespace."""
        return f"{self.mark}-{name}"

    def join(self, node: Node) -> None:
        """Let a node live in its namespace."""
        node.prefix = ("ip", "netns", "exec", self.namespace(node.name))
        node.local_addr = self.address("d", self.names.index(node.name) + 2)
        node.env["GLOO_SOCKET_IFNAME"] = "d0"

    def set(self, name: str, net: str, state: str) -> None:
        """Take a node's cable out (``down``) or put it back (``up``): packets are lost, nobody is told."""
        _ip("link", "set", f"{self.mark}{name}{net}", state)

    def remove(self) -> None:
        """Remove what was made."""
        for name in self.names:
            _ip("netns", "del", self.namespace(name), check=False)
        for net in "cd":
            _ip("link", "del", f"{self.mark}{net}", check=False)


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, timeout=10)


# A network takes the machine a while to make and to forget: one worker for the tests that make them.
ONE_AT_A_TIME = pytest.mark.xdist_group("networks")


@pytest.fixture
def networks() -> Iterator[Networks]:
    """Networks for nodes a and b, where this machine lets us make them."""
    made = Networks("a", "b")
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2 for network namespaces")
    try:
        made.make()
    except (subprocess.CalledProcessError, OSError) as error:
        made.remove()
        pytest.skip(f"needs the right and the kernel for network namespaces: {error}")
    try:
        made.until_up()
        yield made
    finally:
        made.remove()


def _with_networks(cluster: Cluster, networks: Networks) -> None:
    """Start a controller on the one network, and both nodes with a place on each."""
    token = cluster.launch.tmp_path / "token"
    token.write_text("a-token-of-this-test\n")
    token.chmod(0o600)
    cluster.controller = Controller(cluster, host=networks.address("c"))
    cluster.controller.token_file = token
    for node in cluster.nodes.values():
        networks.join(node)


@ONE_AT_A_TIME
def test_ranks_cut_off_from_each_other_hang_and_go_on_when_it_is_healed(clusters: Clusters, networks: Networks) -> None:
    """Both nodes are heard, so none is lost; the hang is seen, and training comes back by itself with the network."""
    cluster = clusters("a", "b", nnodes="2", policy=("silence_floor_s=3", "silence_factor=5"))
    _with_networks(cluster, networks)
    cluster.start()
    cluster.until_status("running", step=20)

    networks.set("b", "d", "down")
    until(lambda: cluster.until_status().round > 1 or cluster.faults(), "the hang to be seen")
    networks.set("b", "d", "up")
    cluster.finish(deadline_s=150.0)

    assert "node_lost" not in cluster.faults()
    assert cluster.incidents()[0].state in ("recovered", "ended", "harmless")
    assert cluster["a"].output().count("done at step") == 1


@ONE_AT_A_TIME
def test_a_node_in_its_own_network_cut_off_from_the_controller_goes_on(clusters: Clusters, networks: Networks) -> None:
    """As behind a relay, but with lost packets instead of closed connections."""
    cluster = clusters("a", "b", nnodes="1:2")
    _with_networks(cluster, networks)
    cluster.start()
    cluster.until_status("running", step=20)

    networks.set("b", "c", "down")
    until(lambda: cluster.faults(warnings=True), "the warning that a node is not heard")
    time.sleep(4.0)
    during = cluster.until_status()
    networks.set("b", "c", "up")
    cluster.finish()

    assert (during.state, during.round) == ("running", 1)
    assert cluster.faults() == []

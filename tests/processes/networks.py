# SPDX-License-Identifier: Apache-2.0
"""Networks of our own for nodes: a namespace each, with one interface to the controller and one to the other ranks.

Packets can be lost between them as behind a cable that was taken out, without notice. Needs iproute2, and the right
and the kernel for network namespaces; where one of them is missing the tests that ask for it are skipped.
"""

import errno
import secrets
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megascale_ops.schema.tokens import new_token
from tests.fakes.wire import Wire
from tests.processes.launch import until
from tests.processes.nodes import Cluster, Controller, Node


class Networks:
    """Two networks of our own: one that leads to the controller, one between the ranks; an interface of each a node."""

    def __init__(self, *names: str, wired: str = "") -> None:
        self.wired = wired  # the node whose way to the other ranks leads through a wire in user space
        self.wire: Wire | None = None
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
                if (name, net) == (self.wired, "d"):
                    far = f"{self.mark}far"
                    self.wire = Wire(outer, far)
                    _ip("link", "set", far, "netns", self.namespace(name), "name", inner)
                else:
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
                    return done.stdout.strip() == str(errno.ECONNREFUSED)  # no listener there: refused

                until(answered, f"{name} to reach {self.address(net)}")

    def namespace(self, name: str) -> str:
        """Return the name of a node's namespace."""
        return f"{self.mark}-{name}"

    def join(self, node: Node) -> None:
        """Let a node live in its namespace."""
        node.netns = self.namespace(node.name)
        node.local_addr = self.address("d", self.names.index(node.name) + 2)
        node.env["GLOO_SOCKET_IFNAME"] = "d0"

    def set(self, name: str, net: str, state: str) -> None:
        """Take a node's cable out (``down``) or put it back (``up``): packets are lost without notice."""
        _ip("link", "set", f"{self.mark}{name}{net}", state)

    def remove(self) -> None:
        """Remove what was made."""
        for name in self.names:
            _ip("netns", "del", self.namespace(name), check=False)
        for net in "cd":
            _ip("link", "del", f"{self.mark}{net}", check=False)
        if self.wire is not None:
            self.wire.close()


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, timeout=60)


@contextmanager
def made(*names: str, wired: str = "") -> Iterator[Networks]:
    """Yield networks for these nodes, where this machine lets us make them; skip the test where it does not."""
    networks = Networks(*names, wired=wired)
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2 for network namespaces")
    try:
        networks.make()
    except (subprocess.CalledProcessError, OSError) as error:
        networks.remove()
        pytest.skip(f"needs the right and the kernel for network namespaces and TAP devices: {error}")
    try:
        networks.until_up()
        yield networks
    finally:
        networks.remove()


def with_networks(cluster: Cluster, networks: Networks) -> None:
    """Start a controller on the one network, and both nodes with a place on each."""
    token = cluster.launch.tmp_path / "token"
    token.write_text(f"{new_token()}\n")
    token.chmod(0o600)
    cluster.controller = Controller(cluster, host=networks.address("c"))
    cluster.controller.token_file = token
    for node in cluster.nodes.values():
        networks.join(node)

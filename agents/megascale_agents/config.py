# SPDX-License-Identifier: Apache-2.0
"""The options of ``megascale-ops agent``, with the reason for every default."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from megascale_ops.errors import UsageError
from megascale_ops.schema.identity import check_name


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section ``[agent]`` of the configuration; every field is an option of ``megascale-ops agent``.

    ``controller`` is the only one without a useful default. An empty ``node`` means this host's name.
    """

    controller: str = ""
    node: str = ""
    # "": the folder of the agent's user in /dev/shm; an agent run as root also reads those of all others.
    box_root: str = ""
    token_file: str = ""
    metrics_token_file: str = ""  # required for scrapes from beyond loopback; "": the token above
    # HOST:PORT; "auto": 127.0.0.1:7071, or any free port when that is taken (agents of several nodes on one machine);
    # "": no metrics.
    metrics_listen: str = "auto"
    exit_with_parent: int = 0  # pid; the agent ends when that process does; 0: it stays
    # 0.1 s: a frozen rank is evidence within 0.1 s; eight ranks at this pace cost half a percent of a core.
    look_interval_s: float = 0.1
    # 1 s: 15 in the time after which a node counts as lost; 12,500 nodes should send one in 8 s.
    heartbeat_interval_s: float = 1.0
    # Where the node's own /sys and /proc are: in a container that watches its host they are mounted elsewhere.
    sys_root: str = "/sys"
    proc_root: str = "/proc"
    # Adapters and counters that are never read, between commas: "mlx5_4,*/counters/symbol_error". On HGX boards some
    # functions are the fabric manager's, and each read of their counters writes a line into the kernel's log.
    fabric_exclude: str = ""
    kernel_log: str = "/dev/kmsg"  # "": it is not read (Xids, kills for memory, disks, ...)


class Address(msgspec.Struct, frozen=True):
    """Where ``/metrics`` is served. ``any_port``: another free port will do when this one is taken."""

    host: str
    port: int
    any_port: bool = False

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can ask."""
        return self.host in _LOOPBACK


_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MOST_SHOWN = 100
_METRICS_PORT = 7071  # beside the controller's 7070


def effective_node(config: AgentConfig) -> str:
    """Return the node's name: the one given, else the host's.

    Raises:
        UsageError: when it can't be a name.
    """
    return check_name("node", config.node or socket.gethostname())


def check(config: AgentConfig) -> None:
    """Refuse what cannot work, with one sentence.

    Raises:
        UsageError: no controller, intervals out of bounds.
    """
    if not config.controller:
        raise UsageError("no controller given: --controller http://HOST:PORT says where heartbeats go")
    if not 0.01 <= config.look_interval_s <= 10.0:
        raise UsageError(f"look_interval_s = {config.look_interval_s:g} can't be used: take 0.01 to 10 seconds")
    if not config.look_interval_s <= config.heartbeat_interval_s <= 60.0:
        raise UsageError(
            f"heartbeat_interval_s = {config.heartbeat_interval_s:g} can't be used: take look_interval_s "
            f"({config.look_interval_s:g}) to 60 seconds"
        )


def check_roots(config: AgentConfig) -> None:
    """Refuse places of /sys and /proc that are none on this node: every check of the host would be off without a word.

    Raises:
        UsageError: one of them is no folder.
    """
    for name, root in (("sys_root", config.sys_root), ("proc_root", config.proc_root)):
        if not _is_folder(root):
            raise UsageError(f"{name} {_shown(root)} is no folder: it is where the node's own /{name[:-5]} is mounted")


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def _shown(path: str) -> str:
    """Return a path for a sentence: 100 characters are enough to recognise it."""
    return repr(path) if len(path) <= _MOST_SHOWN else f"{path[:_MOST_SHOWN]!r}... ({len(path)} characters)"


def metrics_address(config: AgentConfig) -> Address | None:
    """Return where to serve metrics, None for nowhere.

    Beyond loopback a token is asked for, as everywhere in this project.

    Raises:
        UsageError: not HOST:PORT, or beyond loopback without a token.
    """
    text = config.metrics_listen
    if not text:
        return None
    if text == "auto":
        return Address("127.0.0.1", _METRICS_PORT, any_port=True)
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or port is None:
        raise UsageError(f'--metrics-listen {text!r} can\'t be used: give HOST:PORT, auto, or "" for no metrics')
    if not Address(parts.hostname, port).is_loopback and not (config.token_file or config.metrics_token_file):
        raise UsageError(f"--metrics-listen {text} is beyond this machine: give --token-file as well")
    return Address(parts.hostname, port)


def reachable(url: str, controller: str) -> str:
    """Return HOST:PORT as others reach what is served at ``url``.

    A server on all addresses is reached by the one from which this node reaches its controller. Nothing is sent: a
    connected UDP socket only asks the routing table. Without a route the node's name has to do.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in ("0.0.0.0", "::"):  # noqa: S104  compared with, not bound
        there = urlsplit(controller.partition(",")[0])  # of several the first
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                there.hostname, there.port or 80, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                host = probe.getsockname()[0]
        except OSError:
            host = socket.gethostname()
    return f"[{host}]:{parts.port}" if ":" in host else f"{host}:{parts.port}"

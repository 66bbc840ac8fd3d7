# SPDX-License-Identifier: Apache-2.0
"""A real sshd on a port of its own, with keys of its own, for this user: hosts are addresses of the loopback.

Needs Debian's openssh-server. It runs as whoever runs the tests, reads nothing of /etc/ssh, and ends with the block.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.fakes.servers import free_ports, until

_SSHD = "/usr/sbin/sshd"
# AcceptEnv takes nothing, as a rule; SetEnv is for the test, which finds its processes by that.
_CONFIGURATION = """
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized
PidFile {folder}/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
SetEnv XDG_STATE_HOME={state}
"""
# Hosts of several kinds by their names: `node-a` and `node-b` are two machines that let this user in.
_CLIENT = """
Host node-a
  HostName 127.0.0.1
Host node-b
  HostName 127.0.0.2
Host closed
  HostName 127.0.0.1
  Port {closed}
Host stranger
  HostName 127.0.0.1
  IdentityFile {folder}/other_key
Host changed
  HostName 127.0.0.1
  UserKnownHostsFile {folder}/other_hosts
Host !stranger *
  IdentityFile {folder}/user_key
Host *
  Port {port}
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


class Sshd:
    """The daemon, and a configuration of ssh that leads to it.

    Args:
        folder: Where all of it is.
        state: What sessions get as XDG_STATE_HOME.
        within: What it, and ssh to it, is started by: the way into a network of its own.
    """

    def __init__(self, folder: Path, state: Path, within: Sequence[str] = ()) -> None:
        if not Path(_SSHD).exists() or shutil.which("ssh-keygen") is None:
            pytest.skip("needs sshd (Debian: openssh-server), which make test installs")
        self.folder = folder
        folder.mkdir()
        port, self._closed = free_ports(2)
        for name in ("host_key", "user_key", "other_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        (folder / "authorized").write_bytes((folder / "user_key.pub").read_bytes())
        for name, key in (("known_hosts", "host_key"), ("other_hosts", "other_key")):
            kind, text = (folder / f"{key}.pub").read_text().split()[:2]
            lines = (f"[{host}]:{port} {kind} {text}\n" for host in ("127.0.0.1", "127.0.0.2"))
            (folder / name).write_text("".join(lines))
        (folder / "sshd_config").write_text(_CONFIGURATION.format(port=port, folder=folder, state=state))
        (folder / "config").write_text(_CLIENT.format(port=port, closed=self._closed, folder=folder))
        self.ssh = f"ssh -F {folder / 'config'}"
        self._within = within
        self._daemon: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it, and wait until it listens."""
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        with (self.folder / "sshd.log").open("wb") as log:
            self._daemon = subprocess.Popen(
                [*self._within, _SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        until(self._listens, "sshd listens", why=(self.folder / "sshd.log").read_text)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        assert self._daemon is not None
        self._daemon.terminate()
        self._daemon.wait(30)

    def let_in(self, host: str, *, is_open: bool) -> None:
        """Let ssh find the daemon at a host's address, or nothing: as a machine that is away, and is back."""
        path = self.folder / "config"
        away = f"Host {host}\n  Port {self._closed}\n"
        text = path.read_text().replace(away, "")
        path.write_text(text if is_open else away + text)

    def _listens(self) -> bool:
        asked = [*self._within, *self.ssh.split(), "-o", "ConnectTimeout=10", "node-a", "true"]
        done = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
        return done.returncode == 0


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)

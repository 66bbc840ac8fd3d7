# SPDX-License-Identifier: Apache-2.0
"""What is asked of ssh, and what its words mean. Pure."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megascale_ops.runner.hosts.hostfile import Host

# Of ssh itself: no question on a terminal that is not there, 10 s for a connection, and a dead peer is noticed in 60 s.
OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4", "-T"),
)
BY_SSH = 255  # its own exit code; all others are those of what it has started
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_LOOK = (
    "import importlib.metadata as m\n"
    "try: print('ours', m.version('megascale-ops'))\n"
    "except m.PackageNotFoundError: print('ours none')"
)
_WHY_NOT = (
    (re.compile(r"HOST IDENTIFICATION HAS CHANGED|Host key verification failed|No .* host key is known"),
     "its host key is not the one that this machine knows: compare it, then `ssh-keygen -R {name}` and `ssh {target}`"),
    (re.compile(r"Permission denied|Too many authentication failures"),
     "it takes none of this user's keys: `ssh {target} true` has to work without a question"),
    (re.compile(r"Could not resolve hostname"), "there is no host of that name"),
    (re.compile(r"Connection timed out|Operation timed out|No route to host|Network is unreachable"),
     "it does not answer"),
    (re.compile(r"Connection refused"), "no sshd listens there"),
)  # fmt: skip


class There(NamedTuple):
    """What a host has told: the address that it sees us at, and our version there."""

    seen_from: str
    version: str


def command(ssh: Sequence[str], host: Host, python: str, env: Mapping[str, str], arguments: Sequence[str]) -> list[str]:
    """Return the line that starts Python on a host.

    Args:
        ssh: The user's ssh, with options.
        host: Where.
        python: The interpreter there.
        env: Variables that Python needs before its first line.
        arguments: Python's.
    """
    words = ["env", *(f"{name}={value}" for name, value in env.items()), python, *arguments]
    return [*ssh, *OPTIONS, host.target, f"echo seen-from $SSH_CONNECTION; exec {shlex.join(words)}"]


def look(ssh: Sequence[str], host: Host, python: str, env: Mapping[str, str]) -> list[str]:
    """Return the line that asks a host who we are there."""
    return command(ssh, host, python, env, ("-c", _LOOK))


def read_look(output: str) -> There:
    """Return what a host told; whatever its shell has printed before is passed over."""
    seen = re.search(r"^seen-from (\S+)", output, re.MULTILINE)
    ours = re.search(r"^ours (\S+)", output, re.MULTILINE)
    return There(seen[1] if seen else "", ours[1] if ours else "")


def why_not(host: Host, python: str, version: str, code: int, output: str, errors: str) -> str:
    """Return why nothing can be started on a host, one sentence; "" where all is well.

    Args:
        host: Which.
        python: The interpreter that was asked for.
        version: Ours here.
        code: ssh's exit code.
        output: What came from there.
        errors: ssh's words, and those from there.
    """
    there = read_look(output)
    if code == 0 and there.version == version and there.seen_from:
        return ""
    words = [line.strip() for line in errors.splitlines() if line.strip()]
    last = words[-1] if words else f"exit code {code}"
    if code == BY_SSH:
        found = (sentence for pattern, sentence in _WHY_NOT if pattern.search(errors))
        sentence = next(found, "ssh could not connect").format(name=host.name, target=host.target)
        why = f"{sentence} (ssh: {last})"
    elif code in (_NOT_FOUND, _NOT_EXECUTABLE):
        why = f"there is no {python} that can be run; name the interpreter there with --remote-python PATH"
    elif code == 0 and there.version == "none":
        why = f"{python} has no megascale-ops; install {version} there, the version of this machine"
    elif code == 0 and there.version:
        why = f"megascale-ops is {there.version} there and {version} here; all hosts need one version"
    else:
        why = f"{python} does not run there: {last}"
    return f"line {host.line}: {host.target}: {why}"

# SPDX-License-Identifier: Apache-2.0
"""Hosts by a file, and what ssh's words mean."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_ops.errors import UsageError
from megascale_ops.runner.hosts.hostfile import Host, choose, read_hosts
from megascale_ops.runner.hosts.ssh import BY_SSH, why_not

HOSTS = (Host("a", 8, 1), Host("me@b", 0, 2))


def test_what_mpirun_and_deepspeed_read_is_read() -> None:
    """Slots, comments, users, addresses, blank lines."""
    text = "# two racks\nnode-1 slots=8\n\nme@10.0.0.2 slots=4 max-slots=8 # old\nfd00::7\nn3.cluster\n"

    assert read_hosts(text, "hosts") == (
        Host("node-1", 8, 2),
        Host("me@10.0.0.2", 4, 4),
        Host("fd00::7", 0, 5),
        Host("n3.cluster", 0, 6),
    )
    assert [one.name for one in read_hosts(text, "hosts")] == ["node-1", "10.0.0.2", "fd00--7", "n3.cluster"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "hosts names no host: write one a line"),
        ("# a\n\n", "hosts names no host"),
        ("a\n-oProxyCommand=x\n", "hosts, line 2: '-oProxyCommand=x' is no name or address of a host"),
        ("a;b\n", "hosts, line 1: 'a;b' is no name or address of a host"),
        ("a slots=x\n", "hosts, line 1: 'slots=x' can't be read behind a: write slots=N, or nothing"),
        ("a 8\n", "hosts, line 1: '8' can't be read behind a"),
        ("a slots=0\n", "hosts, line 1: a has slots=0, so nothing could run there"),
        ("a\nb\n\na slots=2\n", "hosts, line 4: a stands in line 1 already"),
        ("a\nme@a\n", "hosts, line 2: a stands in line 1 already"),
    ],
)
def test_a_bad_line_is_named(text: str, sentence: str) -> None:
    """File, number of the line, what is wrong, and what to write."""
    with pytest.raises(UsageError) as raised:
        read_hosts(text, "hosts")

    assert sentence in str(raised.value)


@given(st.text(max_size=40))
def test_any_text_is_hosts_or_a_sentence(text: str) -> None:
    """No line becomes an option of ssh, and nothing else is raised."""
    try:
        found = read_hosts(text, "hosts")
    except UsageError:
        return
    assert found
    assert not any(one.target.startswith("-") for one in found)


def test_ranks_are_the_slots_or_what_is_asked_for() -> None:
    """`--nproc-per-node` counts for more; where neither says anything, the run there decides."""
    assert [one.slots for one in choose(HOSTS, "hosts", most_nodes=0, nproc="")] == [8, 0]
    assert [one.slots for one in choose(HOSTS, "hosts", most_nodes=2, nproc="4")] == [4, 4]
    assert [one.slots for one in choose(HOSTS, "hosts", most_nodes=1, nproc="gpu")] == [0, 0]


def test_more_than_there_is_is_refused() -> None:
    """Nodes beyond the hosts, ranks beyond a host's slots."""
    with pytest.raises(UsageError, match="--nnodes asks for 3 nodes, and hosts names 2"):
        choose(HOSTS, "hosts", most_nodes=3, nproc="")
    with pytest.raises(UsageError, match="hosts, line 1: a has 8 slots, and --nproc-per-node asks for 9"):
        choose(HOSTS, "hosts", most_nodes=2, nproc="9")


@pytest.mark.parametrize(
    ("errors", "sentence"),
    [
        ("me@a: Permission denied (publickey).", "takes none of this user's keys: `ssh a true` has to work"),
        ("@@@\nREMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.", "`ssh-keygen -R a`"),
        ("ssh: Could not resolve hostname a: Name or service not known", "there is no host of that name"),
        ("ssh: connect to host a port 22: Connection timed out", "it does not answer (ssh: ssh: connect"),
        ("ssh: connect to host a port 22: No route to host", "it does not answer"),
        ("ssh: connect to host a port 22: Connection refused", "no sshd listens there"),
        ("kex_exchange_identification: banner line", "ssh could not connect (ssh: kex_exchange_identification: banner"),
        ("", "ssh could not connect (ssh: exit code 255)"),
    ],
)
def test_what_ssh_says_becomes_a_sentence(errors: str, sentence: str) -> None:
    """With the line of the host and ssh's last words."""
    told = why_not(HOSTS[0], "/py", "1.0", BY_SSH, "", errors)

    assert told.startswith("line 1: a: ")
    assert sentence in told


def test_a_host_of_one_version_with_us_is_well() -> None:
    """The control; what a login shell prints before is passed over."""
    assert why_not(HOSTS[0], "/py", "1.0", 0, "welcome\nseen-from 10.0.0.1 5 10.0.0.2 22\nours 1.0\n", "motd") == ""

# SPDX-License-Identifier: Apache-2.0
"""Which ranks ran on a host that was lost is known by what they, or a launcher, said at the start."""

import pytest

from megascale_ops.postmortem.homes import gone, ranks_on

LOST = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error"
PEER = "socketProgress: Connection closed by remote peer {}<41202>"


@pytest.mark.parametrize(
    "says",
    [
        "[init] host={} local_rank=0 world=4", '{{"hostname": "{}", "step": 3}}', "Running on node {}.cl.example",
        "SLURMD_NODENAME={}", "Launched on {}\nloss 2.0 at epoch 3",
        "{}:600:700 [0] NCCL INFO Bootstrap : Using eth0", "hostname {}",
    ],
)  # fmt: skip
def test_a_rank_says_where_it_runs(says: str) -> None:
    """In any of the ways that scripts and libraries do, with its domain or without."""
    logs = {rank: says.format(f"n{rank // 2}") for rank in range(4)}

    assert ranks_on(["n1"], logs, "") == (2, 3)


@pytest.mark.parametrize("lists", ["rank {0} on host {1}", "task {0}: {1}", "srun: error: {1}: tasks {0}: Terminated"])
def test_a_launcher_lists_hosts(lists: str) -> None:
    """Whatever ranks say themselves."""
    listed = "\n".join(lists.format(rank, f"n{rank // 2}") for rank in range(4))

    assert ranks_on(["n1"], {0: "hostname n1"}, listed) == (2, 3)


@pytest.mark.parametrize(
    ("logs", "ranks"),
    [
        ({0: "host=n1", 1: "host=n1"}, ()),  # a store's, or all that there is
        ({0: "host=n0", 1: "host=n0\nhost=n1", 2: "host=n1"}, (2,)),  # a peer's of rank 1
        ({0: "connecting to host=n1", 1: "host=n0"}, ()),
        ({0: "host=n0", 1: "host=n2"}, ()),  # the lost one is none of them
    ],
)
def test_what_may_be_anothers_host_names_none(logs: dict[int, str], ranks: tuple[int, ...]) -> None:
    """A host that all name, a second one, a peer's; and a lost one that none names."""
    found = ranks_on(["n1"], logs, "")

    assert found == ranks


def test_a_host_that_others_lost_is_that_of_the_silent_ranks() -> None:
    """Where its ranks told so, or are as many as each other host has; a host that spoke itself is not gone."""
    logs = {rank: f"host: n{rank // 2}\n{LOST}\n{PEER.format('n1')}" for rank in (0, 1, 4, 5)}
    silent = {2: "step 3", 3: "step 3"}
    spoke = {rank: f"host: n1\n{LOST}\n{PEER.format('n0')}" for rank in (2, 3)}

    found = gone({**logs, **silent}, "2026-05-05 compute.instances.preempted n1")

    assert found is not None
    assert (found.host, found.ranks, "preempted" in found.notice) == ("n1", (2, 3), True)
    assert gone({**logs, 2: "step 3"}, "") is None
    assert gone({**logs, **spoke}, "") is None
    assert gone({**logs, **silent, 6: "step 3", 7: "host: n3"}, "") is None

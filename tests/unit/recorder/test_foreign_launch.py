# SPDX-License-Identifier: Apache-2.0
"""Which rank a process is that another launcher has started, and which world is watched."""

import os
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megascale_ops.recorder.foreign_launch.hooks import rebind
from megascale_ops.recorder.foreign_launch.rank_names import by_environment, by_process_group
from megascale_ops.recorder.foreign_launch.world_claim import Claim, World, claim, join, stat_of
from megascale_ops.recorder.recording.config import FoundRank

ENV = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
# Lightning's own launcher: no RANK, and the rest for the children only.
LIGHTNING = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}
NOBODY = 2**22 + 7  # above the kernel's largest pid


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        ({"backend": "gloo"}, ENV, FoundRank(3, 1, 8, "n1:29500")),
        ({"backend": "gloo", "init_method": "env://"}, ENV, FoundRank(3, 1, 8, "n1:29500")),
        ({"rank": 1, "world_size": 2}, LIGHTNING, FoundRank(1, 1, 2, "n1:1")),
        ({"rank": 0}, LIGHTNING, FoundRank(0, 1, 2, "n1:1")),
        ({"init_method": "tcp://h:7", "rank": 1, "world_size": 4}, {}, FoundRank(1, -1, 4, "tcp://h:7")),
        ({"init_method": "tcp://h:7?rank=2&world_size=4"}, {}, FoundRank(2, -1, 4, "tcp://h:7")),
        ({"init_method": "file:///f/s?rank=2&world_size=4"}, {}, FoundRank(2, -1, 4, "file:///f/s")),
        ({"store": object(), "rank": 1, "world_size": 2}, ENV, FoundRank(1, 1, 2, "store")),
        ({"backend": "mpi"}, {}, None),
        ({"rank": 2, "world_size": 2}, {}, None),
        ({"init_method": "tcp://h:7"}, ENV, None),
        ({"rank": "one", "world_size": 2}, {}, None),
    ],
)
def test_a_process_says_its_rank_to_the_process_group(
    given: dict[str, object], environ: dict[str, str], expected: FoundRank | None
) -> None:
    """In each of torch's ways; what will fail, or what only the backend knows, names no rank."""
    assert by_process_group(given, environ) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, FoundRank(0, 0, 1, "alone")),
        (ENV, FoundRank(3, 1, 8, "RANK")),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            FoundRank(1, 1, 2, "OMPI_COMM_WORLD_RANK"),
        ),
        ({"PMI_RANK": "5", "PMI_SIZE": "6"}, FoundRank(5, -1, 6, "PMI_RANK")),
        ({"PMI_RANK": "5"}, FoundRank(0, 0, 1, "alone")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, FoundRank(0, 0, 1, "alone")),  # of the batch script, too
    ],
)
def test_who_trains_without_a_process_group_is_known_by_its_launcher(
    environ: dict[str, str], expected: FoundRank
) -> None:
    """MPI's variables name it; without any it is the only rank there is."""
    assert by_environment(environ) == expected


def me(rank: int) -> Claim:
    """Return a claim of this process."""
    return Claim(rank, os.getpid(), stat_of(os.getpid())[0])


def neighbour(rank: int) -> Claim:
    """Another process that lives: our parent."""
    return Claim(rank, os.getppid(), stat_of(os.getppid())[0])


def dead(rank: int) -> Claim:
    """Return a claim of a process that is gone."""
    return Claim(rank, NOBODY, 1)


FOUND = FoundRank(1, 1, 2, "a:1")


@pytest.mark.parametrize(
    ("known", "refused"),
    [
        (None, ""),
        (World(1, "a:1", 2, (neighbour(0),)), ""),
        (World(1, "a:1", 2, (neighbour(1),)), f"process {os.getppid()} is rank 1 already"),
        (World(1, "a:1", 2, (dead(1), neighbour(0))), ""),
        (World(1, "b:1", 2, (neighbour(0),)), "watched on this node"),
        (World(1, "a:1", 4, (neighbour(0),)), "watched on this node"),
        (World(1, "b:1", 2, (dead(0), dead(1))), ""),
        (World(0, "b:1", 2, (neighbour(0),)), ""),
    ],
)
def test_one_world_is_watched_and_each_rank_of_it_once(known: World | None, refused: str) -> None:
    """As long as one of its ranks lives; what is left of another round or of ended runs blocks none."""
    world, said = join(known, 1, FOUND, me(1))

    assert (refused in said) if refused else said == ""
    assert (me(1) in world.claims) is (said == "")
    assert sum(one.rank == 1 for one in world.claims) <= 1


def test_a_claim_outlives_its_call_and_a_damaged_file(tmp_path: Path) -> None:
    """The next one reads what the first wrote; a file that is cut short stands for nothing."""
    first = claim(tmp_path, "n", 1, FoundRank(0, 0, 2, "a:1"), neighbour(0))
    second = claim(tmp_path, "n", 1, FoundRank(0, 0, 2, "a:1"), me(0))
    (tmp_path / "n.world.json").write_bytes(b'{"round": 1, "wor')
    third = claim(tmp_path, "n", 1, FoundRank(0, 0, 2, "a:1"), me(0))

    assert (first, third) == ("", "")
    assert "is rank 0 already" in second


def test_names_that_were_taken_before_lead_to_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """``from torch.distributed import all_reduce`` in a script's first lines is bound anew, an equal value is not."""

    def plain() -> None: ...

    def hooked() -> None: ...

    script, odd = ModuleType("script_of_mine"), SimpleNamespace(reduce=plain)
    vars(script).update(reduce=plain, other=hooked, number=7)
    monkeypatch.setitem(__import__("sys").modules, "script_of_mine", script)
    monkeypatch.setitem(__import__("sys").modules, "odd_of_mine", odd)

    rebind({id(plain): (plain, hooked)})

    assert vars(script)["reduce"] is hooked
    assert odd.reduce is hooked
    assert vars(script)["number"] == 7

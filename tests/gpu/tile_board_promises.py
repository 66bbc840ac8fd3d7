# SPDX-License-Identifier: Apache-2.0
"""What a supervisor sees of kernels that hang on a GPU, for `tests/fixtures/kernel_group.py`.

The boards are read by the code that an agent and a controller use, from files, while kernels spin.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from megascale_kernels import Config, TileTimeout, Unsupported, Workspace, ag_gemm, gemm_rs
from megascale_kernels.progress import map_board
from megascale_kernels.progress.publish import COPY_EVERY_S, FOLDER_VARIABLE
from megascale_kernels.progress.view import process_started
from torch import Tensor

from megascale_ops.blackbox import boards
from megascale_ops.diagnosis.exits.tile_timeouts import missed_of
from megascale_ops.diagnosis.hangs.tile_graph import edges_of, follow, standing
from megascale_ops.schema.progress import RankError
from megascale_ops.schema.tiles import TileFact
from tests.fixtures.kernel_group import Place

KERNELS = (Config(block_n=128, stages=3), Config(kernel="hopper"))
ROWS, K, N = 512, 1024, 768
PATIENCE_S = 30.0  # a rank that shares a GPU waits for its turn


def published(place: Place, deadline_s: float) -> tuple[Path, Workspace]:
    """A workspace whose board lies where a supervisor looks."""
    folder = place.folder / "boards"
    folder.mkdir(exist_ok=True)
    os.environ[FOLDER_VARIABLE] = str(folder)
    try:
        workspace = Workspace(
            max_rows=4096, max_gather_cols=K, max_scatter_cols=K, deadline_s=deadline_s, adaptive=False
        )
    finally:
        del os.environ[FOLDER_VARIABLE]
    (place.folder / f"pid.{place.rank}").write_text(str(os.getpid()))
    dist.barrier()
    return folder, workspace


def facts_of(place: Place, folder: Path, group: int) -> dict[int, list[TileFact]]:
    """What an agent reads of each rank's living process."""
    found = {}
    for rank in range(place.world_size):
        pid = int((place.folder / f"pid.{rank}").read_text())
        start = process_started(pid) or 0
        here = [board for board in boards.of_process(folder, str(rank), pid, start) if board.group == group]
        assert all(boards.is_current(board, pid, start, time.time()) for board in here)
        found[rank] = [boards.fact_of(board, place.world_size) for board in here]
    return found


def until(what: Callable[[], bool], why: str) -> None:
    """Wait for something that comes within seconds."""
    end = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end, why
        time.sleep(0.05)


def a_hanging_kernel_is_read_from_its_board(place: Place) -> None:
    """All but one rank launch and spin; the boards name that one, twice alike; when it comes all are done and move."""
    folder, workspace = published(place, deadline_s=120.0)
    absent = place.world_size - 1
    x, w = torch.randn(ROWS, K, device="cuda").bfloat16(), torch.randn(N, K, device="cuda").bfloat16().T
    whole = torch.randn(ROWS * place.world_size, K, device="cuda").bfloat16()
    for config in KERNELS:
        calls: list[tuple[str, Callable[[], Tensor]]] = [
            ("ag_gemm", lambda c=config: ag_gemm(x, w, workspace, config=c)),  # type: ignore[misc]
            ("gemm_rs", lambda c=config: gemm_rs(whole, w, workspace, config=c)),  # type: ignore[misc]
        ]
        for name, call in calls:
            wanted = call().clone()
            torch.cuda.synchronize()
            launch = workspace.launches + 1
            dist.barrier()
            torch.cuda.synchronize()
            looked = place.folder / f"looked.{name}.{config.kernel}.{launch}"
            if place.rank != absent:
                out = call()  # spins until the absent rank comes
                until(looked.exists, "the absent rank has looked")
            else:
                _look_twice(place, folder, workspace.agreement.number, (name, launch))
                looked.touch()
                out = call()
            torch.cuda.synchronize()
            workspace.check()
            assert torch.equal(out, wanted)
            until(
                lambda here=launch: all(  # type: ignore[misc]
                    fact.launch == here and fact.is_over and not fact.waits
                    for facts in facts_of(place, folder, workspace.agreement.number).values()
                    for fact in facts
                ),
                "boards show the end",
            )
            dist.barrier()
    workspace.close()
    dist.barrier()
    assert list(folder.glob("*.board")) == []


def _look_twice(place: Place, folder: Path, group: int, expected: tuple[str, int]) -> None:
    """As the absent rank: the others wait for us, at the same tiles in two looks, and we have not launched."""
    others = [rank for rank in range(place.world_size) if rank != place.rank]

    def waiting() -> dict[int, list[TileFact]]:
        return {rank: facts for rank, facts in facts_of(place, folder, group).items() if edges_of(rank, facts)}

    until(lambda: sorted(waiting()) == others, "all others wait")
    time.sleep(2 * COPY_EVERY_S)  # all thread blocks have come to their waits
    first = waiting()
    time.sleep(2 * COPY_EVERY_S)
    again = waiting()
    assert first == again
    edges = {rank: edges_of(rank, facts) for rank, facts in again.items()}
    ends = follow(edges, lambda rank: [edge.peer for edge in edges.get(rank, ())])
    assert ends.ranks == (place.rank,), ends
    own = facts_of(place, folder, group)[place.rank]
    for found in edges.values():
        edge = next(edge for edge in found if edge.peer == place.rank)
        assert (edge.fact.operator, edge.fact.launch) == expected
        assert edge.wait.tile >= 0
        text, explains = standing(own, edge)
        assert explains, text
        assert "has not come to" in text


def _words_of(call: Callable[[], Tensor], workspace: Workspace) -> str:
    """Call and synchronize; what the time-out says."""
    try:
        call()
        workspace.check()
    except TileTimeout as error:
        return str(error)
    raise AssertionError("nobody was missed")


def words_of_a_real_time_out_name_the_absent_rank(place: Place) -> None:
    """What kernels raise after their deadline is what the judge of exits reads."""
    _, workspace = published(place, deadline_s=1.0)
    absent = place.world_size - 1
    x, w = torch.randn(ROWS, K, device="cuda").bfloat16(), torch.randn(N, K, device="cuda").bfloat16().T
    ag_gemm(x, w, workspace, config=KERNELS[0])
    workspace.check()
    dist.barrier()
    torch.cuda.synchronize()
    if place.rank != absent:
        said = _words_of(lambda: ag_gemm(x, w, workspace, config=KERNELS[0]), workspace)
        missed = missed_of(place.rank, RankError("megascale_kernels.errors.TileTimeout", said))
        assert {one.peer for one in missed if one.waiter == place.rank} == {absent}, said
        assert missed[0].where.startswith("ag_gemm launch")
    workspace.reset()
    workspace.close()


def graphs_are_captured_beside_a_board_that_is_copied(place: Place) -> None:
    """The thread that copies the board spoils no capture, in the strictest mode, and the replays are right."""
    folder, workspace = published(place, deadline_s=60.0)
    x, w = torch.randn(ROWS, K, device="cuda").bfloat16(), torch.randn(N, K, device="cuda").bfloat16().T
    wanted = ag_gemm(x, w, workspace, config=KERNELS[0]).clone()
    torch.cuda.synchronize()
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            out = ag_gemm(x, w, workspace, config=KERNELS[0])
            time.sleep(2 * COPY_EVERY_S)  # at least one copy begins and ends meanwhile
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        workspace.check()
        assert torch.equal(out, wanted)
    until(
        lambda: all(
            fact.is_over for facts in facts_of(place, folder, workspace.agreement.number).values() for fact in facts
        ),
        "boards follow replays",
    )
    dist.barrier()
    workspace.close()


def a_refused_mapping_leaves_no_error_behind(place: Place) -> None:
    """Where the GPU may not map a file (one on a disk), that is said once, and the job's next launch is in order."""
    refusal = ""
    try:
        map_board(place.folder / f"direct.{place.rank}.board").close()
    except Unsupported as error:
        refusal = str(error)
    out = torch.ones(4, device="cuda") + 1
    torch.cuda.synchronize()

    assert float(out.sum()) == 8.0
    assert not refusal or "/dev/shm" in refusal
    print(f"rank {place.rank}: {refusal or 'the mapping was granted'}")

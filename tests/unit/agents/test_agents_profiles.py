# SPDX-License-Identifier: Apache-2.0
"""The order to profile: asked by a file, answered by a file, kept in the run folder, never waited for too long."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from megascale_agents.orders import executor

from megascale_ops.schema.kernels import MOST_KERNELS, KernelTime, ProfileRequest, RankKernels
from megascale_ops.schema.messages import MAX_BODY_BYTES, EvidenceItem, Order
from tests.fakes.obeying import Obeying

ROWS = (KernelTime("gemm", 4, 400.0, 100.0, 98.0), KernelTime("norm", 8, 80.0, 10.0, 9.0))


@pytest.fixture
def obeying(tmp_path: Path) -> Iterator[Obeying]:
    """A node to give orders to."""
    made = Obeying(tmp_path)
    yield made
    made.close()


def wanted(obeying: Obeying, **more: object) -> Order:
    """Return an order as the controller gives it."""
    return obeying.order("profile", **{"id": "20260101-000000:node-a", "incident": "", "steps": 2, **more})


async def profiled(obeying: Obeying, order: Order) -> list[EvidenceItem]:
    """Have an order obeyed; what it brought."""
    await obeying.obey(order)
    async with asyncio.timeout(20):
        while order.id not in obeying.obedience.done():  # noqa: ASYNC110  as the speaker looks at it
            await asyncio.sleep(0.005)
    return list(obeying.speaker.evidence[-1].items)


async def answer(obeying: Obeying, rank: int, name: str = "") -> ProfileRequest:
    """Do what a recorder does: take the request, write the answer."""
    path = obeying.node.job_folder / f"{rank}.profile.json"
    async with asyncio.timeout(20):
        while not path.exists():  # noqa: ASYNC110  a small file of another process
            await asyncio.sleep(0.005)
    request = msgspec.json.decode(path.read_bytes(), type=ProfileRequest)
    found = RankKernels(name or request.id, "gpu", request.steps, 7, 0.1, 0.002, ROWS)
    beside = obeying.node.job_folder / f"new-{rank}"
    beside.write_bytes(msgspec.json.encode(found))
    beside.replace(obeying.node.job_folder / f"{rank}.kernels.json")
    return request


async def test_each_rank_is_asked_and_its_answer_is_kept(obeying: Obeying) -> None:
    """Both answers come back; no request and no answer is left; the files are below the run folder."""
    obeying.start(2)
    order = wanted(obeying)

    items, *requests = await asyncio.gather(profiled(obeying, order), answer(obeying, 0), answer(obeying, 1))

    assert [(request.id, request.steps) for request in requests] == [(order.id, 2)] * 2
    assert [(item.rank, item.kind, item.ok) for item in items] == [(0, "profile", True), (1, "profile", True)]
    assert all(item.kernels is not None and item.kernels.kernels == ROWS for item in items)
    assert obeying.counted == {("profile", "obeyed"): 1}
    kept = obeying.node.run_dir / "profiles" / "20260101-000000" / "rank-1.json"
    assert items[1].path == str(kept)
    assert msgspec.json.decode(kept.read_bytes(), type=RankKernels).first_step == 7
    left = {path.name for path in obeying.node.job_folder.iterdir() if "profile" in path.name or "kernels" in path.name}
    assert left == set()


async def test_a_rank_that_does_not_answer_costs_the_other_nothing(obeying: Obeying) -> None:
    """Its silence is told, with where it is; an answer to an order before is not taken for one to this."""
    obeying.start(2)
    order = wanted(obeying, deadline_s=1.0)

    items, *_ = await asyncio.gather(
        profiled(obeying, order), answer(obeying, 0), answer(obeying, 1, name="20200101-000000:node-a")
    )

    assert [item.ok for item in items] == [True, False]
    assert items[1].text.startswith("no answer in 1 s: it is in phase startup before its first step, and last moved ")


async def test_who_cannot_answer_is_not_asked(obeying: Obeying) -> None:
    """A stopped process, one that is gone, one without a black box, one that is not on this node."""
    obeying.start(3)
    obeying.node.freeze(0)
    obeying.node.children[1].kill()
    obeying.node.children[1].wait()
    obeying.rounds.current["job"].ranks[2].box = None

    items = await profiled(obeying, wanted(obeying, ranks=(0, 1, 2, 9), deadline_s=30.0))

    texts = {item.rank: item.text for item in items}
    assert texts[0] == "no answer: its process is stopped"
    assert texts[1] == "its process is gone"
    assert texts[2].startswith("it has no black box")
    assert texts[9] == "the rank is not on this node"
    assert obeying.counted == {("profile", "failed"): 1}


async def test_a_profile_does_not_stand_in_the_way_of_a_stop(obeying: Obeying) -> None:
    """No rank answers for 30 s; the order to kill is executed at once."""
    obeying.start()
    obeying.obedience.ingest_orders([wanted(obeying, deadline_s=30.0)])
    await asyncio.sleep(0)

    await obeying.obey(obeying.order("kill"))

    assert obeying.node.children[0].wait(5) < 0
    await obeying.obedience.close()
    assert not (obeying.node.job_folder / "0.profile.json").exists()


async def test_what_was_sampled_is_read_without_a_profile(obeying: Obeying) -> None:
    """Rank 0 has sampled, rank 1 has a broken file: no request is written."""
    obeying.start(2)
    sampled = RankKernels("1000", "cpu", 1, 1000, 0.05, 0.001, ROWS)
    (obeying.node.job_folder / "0.sampled.json").write_bytes(msgspec.json.encode(sampled))
    (obeying.node.job_folder / "1.sampled.json").write_bytes(b"{")

    items = await profiled(obeying, wanted(obeying, steps=0))

    assert items[0].kernels == sampled
    assert "--profile-every" in items[1].text


async def test_a_run_folder_that_cannot_be_written_costs_the_file_only(obeying: Obeying) -> None:
    """The timings travel all the same, and it is said."""
    obeying.start()
    (obeying.node.run_dir / "profiles").write_text("in the way")

    items, _ = await asyncio.gather(profiled(obeying, wanted(obeying)), answer(obeying, 0))

    assert items[0].ok
    assert items[0].path == ""
    assert items[0].text.startswith("not kept: ")


def test_sixty_four_ranks_fit_into_one_message() -> None:
    """With 40 long names each: the shortest kernels are left out and counted."""
    rows = tuple(KernelTime("k" * 110 + f"{n:010}", 1000, 1e6 - n, 1000.123, 999.123) for n in range(MOST_KERNELS))
    found = RankKernels("p:n", "gpu", 2, 7, 0.1, 0.002, rows, 5, 100.0)
    items = [EvidenceItem("profile", ok=True, rank=rank, kernels=found) for rank in range(64)]

    fitted = executor._fit(items)

    assert len(msgspec.json.encode(fitted)) < MAX_BODY_BYTES
    cut = fitted[0].kernels
    assert cut is not None
    assert len(cut.kernels) >= 10
    assert cut.left_out == 5 + MOST_KERNELS - len(cut.kernels)
    assert cut.kernels[0] == rows[0]

# SPDX-License-Identifier: Apache-2.0
"""A whole MoE layer recorded on emulated ranks: every tile and job, and arrows from what arrived to who waited."""

import importlib.util
from array import array
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.6")

from megascale_kernels.moe import launch as moe_launch  # noqa: E402 - after the skips
from megascale_kernels.moe.trace_shapes import layer_shapes  # noqa: E402
from megascale_kernels.tracing.chrome import chrome_trace, slices_of_rank  # noqa: E402
from megascale_kernels.tracing.clock import Offset  # noqa: E402
from megascale_kernels.tracing.dump import Chunk, Shape, TraceDump, parse_dump, render_dump  # noqa: E402
from megascale_kernels.tracing.flows import arrows  # noqa: E402

from tests.fakes.emulated_ranks import EmulatedRanks  # noqa: E402
from tests.fakes.moe_cases import Layer, given  # noqa: E402

SCRIPT = Path(__file__).parents[3] / "kernels" / "benchmarks" / "moe_trace.py"
LAYER = Layer((19, 14), 2, 2, 40, 24)
SPLITS = LAYER.config.splits


@pytest.fixture(scope="module")
def dumps() -> dict[int, TraceDump]:
    """The traces of both ranks, as they come back from their files; a copy has been timed for each unit."""
    ranks = EmulatedRanks(2, LAYER.dtype, data_bytes=1 << 14, channels=64, trace=True)
    operands = given(LAYER, 3)
    outs = [torch.full(mine.x.shape, float("nan"), dtype=LAYER.dtype) for mine in operands]
    plans: list[Any] = []

    def host(workspace: Any) -> None:  # noqa: ANN401 (an emulated workspace)
        mine, out = operands[workspace.rank], outs[workspace.rank]
        plan = moe_launch.planned(*mine, out, LAYER.sizes, workspace, LAYER.config)
        plan.run(*mine, out)
        plans.append(plan)

    ranks.call(host)
    ranks.run()
    found = {}
    for rank, (workspace, plan) in enumerate(zip(ranks.workspaces, plans, strict=True)):
        shapes = layer_shapes(plan.buffers.routing, LAYER.sizes, plan.config, rank, workspace.launches - 2)
        chunks = [Chunk(workspace.launches - 1, 1 - rank, unit, 0, 1) for unit in range(SPLITS)]
        words = array("i", workspace.trace_words.tolist())
        found[rank] = parse_dump(render_dump(words, rank, 2, Offset(), shapes, chunks))
    return found


def test_every_tile_and_job_is_in_the_trace(dumps: dict[int, TraceDump]) -> None:
    """All tiles of both products once each, and every job of layer 1."""
    for rank, dump in dumps.items():
        slices = slices_of_rank(dump)
        assert not [one for one in slices if one.flaw]
        for operator in ("moe_dispatch", "moe_combine"):
            shape = next(shape for shape in dump.shapes.values() if shape.operator == operator)
            tiles = sorted(one.tile for one in slices if (one.operator, one.kind) == (operator, "tile"))
            assert tiles == list(range(shape.tiles))
        jobs = sorted(one.tile for one in slices if (one.operator, one.kind) == ("moe_combine", "wait"))
        combine = next(shape for shape in dump.shapes.values() if shape.operator == "moe_combine")
        assert jobs == list(range(len(combine.units)))
        sent = [one for one in slices if (one.operator, one.kind) == ("moe_combine", "push")]
        assert all(combine.units[one.tile][0] == one.peer == 1 - rank for one in sent)


def test_arrows_lead_from_copies_to_tiles_and_from_jobs_to_the_owner_s(dumps: dict[int, TraceDump]) -> None:
    """A tile with a peer's tokens has one arrow, from the copy it needed last; an owner's job one from each peer."""
    slices = {rank: slices_of_rank(dump) for rank, dump in dumps.items()}
    found = arrows(dumps, slices)

    for rank, dump in dumps.items():
        units = next(shape for shape in dump.shapes.values() if shape.operator == "moe_dispatch").units
        wanted = {tile: unit for tile, (source, unit) in enumerate(units) if source != rank}
        drawn = {
            arrow.wait.tile: arrow.notice.tile
            for arrow in found
            if arrow.target == rank and arrow.wait.operator == "moe_dispatch"
        }
        assert drawn == wanted
        assert wanted
        jobs = next(shape for shape in dump.shapes.values() if shape.operator == "moe_combine").units
        results = [arrow for arrow in found if arrow.target == rank and arrow.wait.operator == "moe_combine"]
        assert {arrow.wait.tile for arrow in results} == {job for job, (owner, _) in enumerate(jobs) if owner == rank}
        for arrow in results:
            assert arrow.source == 1 - rank
            sender = next(one for one in dumps[arrow.source].shapes.values() if one.operator == "moe_combine").units
            assert sender[arrow.notice.tile] == jobs[arrow.wait.tile]
            # The peer's rows were sent before this rank's wait for them ended: the kernel's order, not the model's.
            assert arrow.notice.begin_ns <= arrow.wait.end_ns + 1000


def test_a_job_that_is_sent_beside_products_has_its_arrow(dumps: dict[int, TraceDump]) -> None:
    """The warp-specialised layer's multiplying warps note a send in the ring of their tiles, where it takes no time."""
    slices = {rank: slices_of_rank(dump) for rank, dump in dumps.items()}
    beside = {
        rank: [one._replace(kind="notify", role="compute") if one.kind == "push" else one for one in found]
        for rank, found in slices.items()
    }
    apart, together = (
        {(arrow.source, arrow.notice.tile, arrow.wait.tile) for arrow in arrows(dumps, each)}
        for each in (slices, beside)
    )

    assert any(one.kind == "notify" and one.operator == "moe_combine" for found in beside.values() for one in found)
    assert together == apart


def test_a_launch_whose_tables_are_gone_gets_no_arrow(dumps: dict[int, TraceDump]) -> None:
    """The control: without shapes nothing is claimed, and the trace says how many arrows it has."""
    bare = {rank: dump._replace(shapes={}) for rank, dump in dumps.items()}
    slices = {rank: slices_of_rank(dump) for rank, dump in bare.items()}

    assert not [arrow for arrow in arrows(bare, slices) if arrow.wait.operator.startswith("moe")]
    whole = chrome_trace(dumps.values())
    assert whole["otherData"]["arrows"] > 0
    assert chrome_trace(bare.values())["otherData"]["arrows"] == 0
    assert any("job" in event["args"] for event in whole["traceEvents"] if event.get("ph") == "X")


def test_flags_of_a_layer_may_be_many_and_units_of_a_gather_not() -> None:
    """A foreign file's numbers stay within what they can be."""

    def render(operator: str) -> bytes:
        return render_dump(array("i"), 0, 2, Offset(), {3: Shape(operator, 1, ((0, 8191),))}, [])

    assert parse_dump(render("moe_combine")).shapes[3].units == ((0, 8191),)
    with pytest.raises(ValueError, match="from 0 to 4096"):
        parse_dump(render("ag_gemm"))


def test_a_recorded_layer_is_drawn(dumps: dict[int, TraceDump]) -> None:
    """The picture has a row for each copy engine and program, tiles and arrows; other traces are refused."""
    spec = importlib.util.spec_from_file_location("moe_trace", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    trace = chrome_trace(dumps.values())

    picture = ET.fromstring(script.draw(trace, programs=3, title="a < b"))  # noqa: S314 (our own)

    texts = [one.text for one in picture.iter() if one.tag.endswith("text")]
    assert "a < b" in texts
    assert {"rank 0: copy engine to rank 1", "rank 1: compute CTA 0"} <= set(texts)
    # Which programs get a job of the queue is a matter of the schedule.
    assert {text.rpartition(" ")[0] for text in texts if "communicate" in text} == {
        f"rank {rank}: communicate CTA" for rank in (0, 1)
    }
    fills = [one.get("fill") for one in picture.iter() if one.tag.endswith("rect")]
    assert all(fills.count(colour) > 1 for colour in set(script.COLOURS.values()))
    assert [one for one in picture.iter() if one.tag.endswith("circle")]
    with pytest.raises(ValueError, match="no tile of a MoE layer"):
        script.draw({"traceEvents": []})

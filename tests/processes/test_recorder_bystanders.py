# SPDX-License-Identifier: Apache-2.0
"""What the recorder leaves be: other processes, people's start-up code, compiled graphs, scripts whose hooks fail."""

import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.matrix import wide
from tests.processes.ranks import BOOTSTRAP, SOON, TRAIN_SOON, Ranks

pytestmark = pytest.mark.processes


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Ranks]:
    """Return a function that starts a rank."""
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.close()


def test_an_existing_sitecustomize_still_runs(start: Ranks, tmp_path: Path) -> None:
    """The one that ours hides runs, is the one that ``import sitecustomize`` gives, and fails as it always did."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("print('theirs')\nvalue = 5\n")
    path = f"{BOOTSTRAP}:{theirs}"

    good = start("import sitecustomize\nprint(sitecustomize.value)", PYTHONPATH=path)
    assert good.end() == (0, "theirs\n5\n", "")

    (theirs / "sitecustomize.py").write_text("raise KeyError('theirs')\n")
    bad = start(TRAIN_SOON, rank=1, PYTHONPATH=path)
    alone = start("", rank=2, PYTHONPATH=str(theirs))
    assert bad.end()[2] == alone.end()[2]
    assert bad.box().progress().steps_seen == 10


def test_it_can_be_switched_off(start: Ranks) -> None:
    """MEGASCALE_RECORDER=0, a missing rank, isolated mode: the script runs and there is no box."""
    short = "import sys"  # a box is made before the script's first line
    ranks = [
        start.forked(TRAIN_SOON, rank=0, MEGASCALE_RECORDER="0"),
        start(short, rank=1, RANK=""),
        start(short, rank=2, flags=("-I",)),
        start(short, rank=3, MEGASCALE_CLAIMED_BY="1"),
        start(short, rank=4, MEGASCALE_RECORDER="0"),
    ]

    assert [rank.end() for rank in ranks] == [(0, "", "")] * 5
    assert not ranks[0].box_dir.exists()


def test_without_a_place_for_the_box_the_script_still_succeeds(start: Ranks, tmp_path: Path) -> None:
    """A folder that cannot be is said once for each piece that steps aside, and that is all."""
    (tmp_path / "file").write_text("")

    rank = start.forked(TRAIN_SOON + "print('done')", MEGASCALE_BOX_DIR=str(tmp_path / "file" / "box"))

    code, out, err = rank.end()
    lines = err.splitlines()
    assert (code, out) == (0, "done\n")
    assert len(lines) == 2
    assert all(line.startswith("megascale-ops recorder: ") and " steps aside: " in line for line in lines)


def test_a_failing_hook_says_so_once_and_the_script_succeeds(start: Ranks) -> None:
    """A torch that has changed below us costs one line for the piece concerned; the others go on."""
    rank = start.forked("""
        import sys
        import megascale_ops.blackbox.writer as writer
        def broken(*_):
            raise RuntimeError("no ink")
        writer.BoxWriter.end_step = broken
        import torch.optim.optimizer
    """ + textwrap.indent(TRAIN_SOON + "print('done')\n", "        "))  # fmt: skip

    code, out, err = rank.end()

    assert (code, out) == (0, "done\n")
    assert err == "megascale-ops recorder: the optimizer hook steps aside: RuntimeError: no ink\n"
    assert rank.box().progress().state == "exited"


@pytest.mark.matrix
def test_garbage_of_the_scripts_own_is_found_as_ever(start: Ranks) -> None:
    """The collector is on after the import of torch, and leaves out torch, which lives on, and nothing of a function's.

    A script that has switched the collector off finds it off.
    """
    make = """
        import gc, weakref
        class Node: pass
        def cycle():
            node = Node()
            node.itself = node
            return weakref.ref(node)
    """
    at_top = start(make + """
        import torch
        node = cycle()
        gc.collect()
        print(gc.isenabled(), gc.get_freeze_count() > 100_000, node())
    """)  # fmt: skip
    in_function = start(make + """
        def main():
            node = cycle()
            import torch
            gc.collect()
            print(gc.isenabled(), gc.get_freeze_count() > 100_000, node())
        main()
    """, rank=1)  # fmt: skip
    by_hand = start(
        """
        import gc
        gc.disable()
        import torch
        print(gc.isenabled())
    """,
        rank=2,
    )

    assert at_top.end() == (0, "True True None\n", "")
    assert in_function.end() == (0, "True False None\n", "")
    assert by_hand.end() == (0, "False\n", "")


@pytest.mark.parametrize("method", wide(["fork", "spawn"], keep=["fork"]))
def test_data_loader_workers_stay_out(start: Ranks, method: str) -> None:
    """Workers, a forked child and a program use torch and even the explicit API: none of it reaches the rank's box."""
    another = """os.system("python -c 'import torch' >/dev/null 2>&1")""" if method == "fork" else ""
    rank = start.forked(f"""
        import os, torch; {SOON}
        from megascale_ops.recorder import recorder
        from torch.utils.data import DataLoader, Dataset
        class Numbers(Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                recorder.step(9999)
                with recorder.phase("eval"):
                    parameter = torch.nn.Parameter(torch.ones(1))
                    torch.optim.SGD([parameter], lr=0.1).step()
                return torch.full((4,), float(index))
        if __name__ == "__main__":
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for x in DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="{method}"):
                model(x).sum().backward()
                optimizer.step()
            child = os.fork()
            if child == 0:
                raise SystemExit(0)
            os.waitpid(child, 0)
            {another}
            print(os.path.exists("box/0.sock"))
    """, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # fmt: skip

    code, out, err = rank.end()

    found = rank.box().progress()
    assert (code, out) == (0, "True\n"), err
    assert (found.state, found.step, found.steps_seen) == ("exited", 3, 4)
    assert not (rank.box_dir / "0.box.old").exists()


def test_torch_compile_does_not_recompile(start: Ranks) -> None:
    """Model, optimizer and a collective inside a compiled function compile as often as without us."""
    script = """
        import os, torch
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        graphs = []
        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        @torch.compile(backend=backend)
        def reduce(x):
            dist.all_reduce(x)
            return x + 1
        for _ in range(12):
            loss = compiled(torch.randn(2, 8)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            reduce(torch.ones(2))
        print(len(graphs), torch._dynamo.utils.counters["recompiles"])
        dist.destroy_process_group()
    """
    with_us = start.forked(script, rank=0)
    without = start.forked(script, rank=1, MEGASCALE_RECORDER="0")

    seen, expected = with_us.end(), without.end()

    assert seen[:2] == expected[:2], seen[2]
    assert seen[0] == 0
    assert with_us.box().progress().steps_seen == 12

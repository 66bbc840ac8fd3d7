# SPDX-License-Identifier: Apache-2.0
"""Unchanged torch scripts are recorded, in processes of their own, and behave as if they were not."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.ranks import SOON, TRAIN, TRAIN_SOON, Ranks

pytestmark = pytest.mark.processes


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Ranks]:
    """Return a function that starts a rank."""
    ranks = Ranks(tmp_path)
    yield ranks
    ranks.close()


def test_an_unchanged_script_is_recorded(start: Ranks) -> None:
    """Steps, their parts and the exit are in the box, and neither output nor exit status has changed."""
    rank = start(TRAIN + "print('done')")

    assert rank.end() == (0, "done\n", "")

    found, who = rank.box().progress(), rank.box().identity()
    assert (found.state, found.step, found.steps_seen, found.phase) == ("exited", 9, 10, "other")
    assert (who.job, who.node, who.round, who.rank, who.pid) == ("gpt", "n1", 2, 0, rank.process.pid)
    for step in rank.box().steps()[1:]:
        assert min(step.data_s, step.forward_s, step.backward_s, step.optimizer_s) > 0
        assert step.data_s + step.forward_s + step.backward_s + step.optimizer_s <= step.wall_s
    assert sorted(file.name for file in rank.box_dir.iterdir()) == ["0.box", "0.stacks"]


def test_an_exception_is_written_down_and_shown_as_ever(start: Ranks) -> None:
    """Type, message, place and step are in the box; the traceback and exit status 1 are the script's."""
    rank = start.forked(TRAIN_SOON + "def fail():\n    raise ValueError('loss is nan')\nfail()\n")

    code, _, err = rank.end()

    error = rank.box().error()
    assert code == 1
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith("ValueError: loss is nan\n")
    assert error is not None
    assert (error.type, error.message, error.step) == ("ValueError", "loss is nan", 9)
    assert error.where.endswith("script0.py:11 fail")


def test_an_exception_is_found_behind_a_foreign_hook(start: Ranks) -> None:
    """A script that replaces sys.excepthook without calling ours loses nothing."""
    rank = start(TRAIN_SOON + "import sys\nsys.excepthook = lambda *_: print('mine')\n1 / 0\n")

    code, out, err = rank.end()

    error = rank.box().error()
    assert (code, out, err) == (1, "mine\n", "")
    assert error is not None
    assert error.type == "ZeroDivisionError"


def test_exit_statuses_are_the_scripts_own(start: Ranks) -> None:
    """sys.exit(7) is 7, without an error in the box; a SIGKILL and a crash leave the last thing done."""
    told = start.forked(TRAIN_SOON + "import sys\nsys.exit(7)\n", rank=0)
    killed = start.forked(TRAIN_SOON + "import os\nos.kill(os.getpid(), 9)\n", rank=1)
    crashed = start.forked(TRAIN_SOON + "import ctypes\nctypes.string_at(0)\n", rank=2)
    left = start.forked(TRAIN_SOON + "import os\nos._exit(3)\n", rank=3)

    codes = [rank.end()[0] for rank in (told, killed, crashed, left)]

    assert codes == [7, -signal.SIGKILL, -signal.SIGSEGV, 3]
    assert [rank.box().progress().state for rank in (told, killed, crashed, left)] == ["exited"] + ["running"] * 3
    assert [rank.box().progress().step for rank in (told, killed, crashed, left)] == [9] * 4
    assert [rank.box().error() for rank in (told, killed, crashed, left)] == [None] * 4


def test_a_plain_python_script_has_no_box(start: Ranks) -> None:
    """Without torch and without our API there is nothing to record, only stacks to be asked for."""
    rank = start("import sys\nprint('plain', 'mmap' in sys.modules, 'msgspec' in sys.modules)")

    assert rank.end() == (0, "plain False False\n", "")

    assert [file.name for file in rank.box_dir.iterdir()] == ["0.stacks"]


def test_the_explicit_api_needs_no_torch(start: Ranks, tmp_path: Path) -> None:
    """The first call makes the box; numbers and phases are the script's own."""
    rank = start("""
        import os, sys, time
        from megascale_ops.recorder import recorder
        for number in range(100, 103):
            recorder.step(number)
        with recorder.phase("eval"):
            print("torch" in sys.modules, flush=True)
            while not os.path.exists("seen"):
                time.sleep(0.01)
    """)
    inside = rank.wait_until(lambda box: box.progress().phase == "eval").progress()
    (tmp_path / "seen").touch()

    assert inside.step == 102
    assert rank.end() == (0, "False\n", "")

    found = rank.box().progress()
    assert (found.state, found.step, found.step_is_absolute, found.steps_seen) == ("exited", 102, True, 3)
    assert found.beat_mono_s > 0


def test_the_explicit_api_and_the_hooks_count_once(start: Ranks) -> None:
    """A loop that calls recorder.step() after its optimizer makes one step each; eval makes none."""
    rank = start.forked(f"""
        import torch; {SOON}
        from megascale_ops.recorder import recorder
        from torch.utils.data import DataLoader, TensorDataset
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batches = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=4)
        for (x,) in batches:
            model(x).sum().backward()
            optimizer.step()
            recorder.step()
        with recorder.phase("eval"), torch.no_grad():
            for (x,) in batches:
                model(x)
    """)

    assert rank.end() == (0, "", "")

    assert rank.box().progress().steps_seen == 5


def test_saving_is_a_phase(start: Ranks) -> None:
    """torch.save, distributed checkpoints and ours show the phase "checkpoint" while they run."""
    rank = start.forked(TRAIN_SOON + """
import sys
import torch.distributed.checkpoint as dcp
from megascale_ops.blackbox.reader import BoxReader
from megascale_ops.checkpoint import notify
from pathlib import Path
box = BoxReader(Path("box/0.box"))
class Slow:
    def __reduce__(self):
        print(box.progress().phase)
        return (int, ())
torch.save({"x": Slow()}, "a.pt")
print(box.progress().phase)
notify.tell("save_begin", 500)
print(box.progress().phase, box.progress().step, box.progress().step_is_absolute)
notify.tell("save_end", 500)
class Writer(dcp.FileSystemWriter):
    def write_data(self, *args):
        print(box.progress().phase)
        return super().write_data(*args)
dcp.save({"x": torch.ones(1)}, storage_writer=Writer("dcp"), no_dist=True)
print(box.progress().phase)
""", PYTHONWARNINGS="ignore")  # fmt: skip

    code, out, _ = rank.end()

    assert (code, out.split("\n")[:3]) == (0, ["checkpoint", "other", "checkpoint 500 True"])
    assert out.split("\n")[3:5] == ["checkpoint", "other"]


def test_exports_and_compilations_are_phases(start: Ranks) -> None:
    """Their phases last as long as they do; a load the distributed way, which steps the optimizer, makes no step."""
    rank = start.forked("""
        import os, torch
        from pathlib import Path
        from megascale_ops.blackbox.reader import BoxReader
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
        box = BoxReader(Path("box/0.box"))
        class Model(torch.nn.Linear):
            def forward(self, x):
                if torch.compiler.is_exporting():
                    os.write(1, f"export {box.progress().phase}\\n".encode())
                return super().forward(x)
        def backend(graph, inputs):
            print("compile", box.progress().phase, flush=True)
            return graph
        model, x = Model(4, 1), torch.ones(2, 4)
        optimizer = torch.optim.Adam(model.parameters())
        state = {"state": {}, "param_groups": [{"params": ["weight", "bias"], **optimizer.defaults}]}
        for name in ("weight", "bias"):
            like = model.get_parameter(name)
            state["state"][name] = {"step": torch.tensor(40.0), "exp_avg": like * 0, "exp_avg_sq": like * 0}
        set_optimizer_state_dict(model, optimizer, state)
        print("loaded", box.progress().steps_seen, flush=True)
        torch.export.export(model, (x,))
        compiled = torch.compile(model, backend=backend)
        for _ in range(3):
            compiled(x).sum().backward()
            optimizer.step()
        print("end", box.progress().phase, box.progress().step, box.progress().step_is_absolute)
    """, PYTHONWARNINGS="ignore")  # fmt: skip

    code, out, err = rank.end()

    assert (code, err) == (0, "")
    assert out.splitlines() == ["loaded 0", "export export", "compile compile", "end forward 42 True"]


# Common ways to evaluate; each sleeps for what it would compute, and prints how long it has slept.
EVALUATIONS = """
@torch.no_grad()
def by_loader():
    for (x,) in batches:
        forward(x)
def by_mode_and_loader():
    model.eval()
    for (x,) in batches:
        with torch.no_grad():
            forward(x)
    model.train()
@torch.no_grad()
def by_mode():
    model.eval()
    for _ in range(5):
        forward(torch.ones(4, 4))
    model.train()
def never():
    pass
"""


@pytest.mark.parametrize(
    ("way", "shown", "is_training"),
    [
        ("by_loader", {"forward", "eval"}, False),
        ("by_mode_and_loader", {"forward", "eval"}, False),
        ("by_mode", {"other"}, False),
        ("never", {"forward"}, True),
    ],
)
def test_an_evaluation_that_nobody_declares_is_no_step(
    start: Ranks, way: str, shown: set[str], is_training: bool
) -> None:
    """Its time is in no step; what a training step does with gradients off (its batch, a teacher) stays the step's."""
    begin = start if way == "by_loader" else start.forked
    rank = begin(f"""
import time, torch; {SOON}
from pathlib import Path
from megascale_ops.blackbox.reader import BoxReader
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=4)
box, slept, shown = BoxReader(Path("box/0.box")), 0.0, set()
def forward(x):
    global slept
    shown.add(box.progress().phase)
    began = time.monotonic()
    time.sleep(0.02)
    model(x)
    slept += time.monotonic() - began
{EVALUATIONS}
for number in range(4):
    with torch.no_grad():
        (x,) = next(iter(batches))
        forward(x) if {is_training} else None
    model(x).sum().backward()
    if number == 0:
        began, slept = time.monotonic(), 0.0  # before the step ends, or a pause between the two were in step 1 alone
    optimizer.step()
    if number < 3:
        {way}()
print(*sorted(shown), slept, time.monotonic() - began)
""")

    code, out, err = rank.end()

    *phases, slept, took = out.split()
    steps_s = sum(step.wall_s for step in rank.box().steps()[1:])
    assert (code, err, set(phases)) == (0, "", shown)
    assert (steps_s > float(took) - float(slept)) is is_training

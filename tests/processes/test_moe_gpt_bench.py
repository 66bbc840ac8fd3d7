# SPDX-License-Identifier: Apache-2.0
"""The example with experts beside the same model on torch's collectives: same losses, a line each, wrong ones told."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.needed import needs
from tests.processes.launch import free_port
from tests.processes.warmed import play_ranks

needs("torch")
needs("triton", "3.6")
pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[2] / "examples" / "bench_moe_gpt.py"
SMALL = (
    "--batch-size=4",
    "--sequence-length=32",
    "--layers=2",
    "--width=32",
    "--heads=4",
    "--kv-heads=2",
    "--experts=4",
)


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module."""
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("bench_moe_gpt", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(SCRIPT.parent))
    return module


def test_both_train_alike_on_two_ranks(tmp_path: Path) -> None:
    """On a CPU: the same losses to three digits, tokens a second of both, and what needs a GPU says so."""
    env = os.environ | {"MEGASCALE_RECORDER": "0", "OMP_NUM_THREADS": "1"}
    out = tmp_path / "table.txt"

    options = ["--rounds=1", "--steps=1", "--loss-steps=4", f"--out={out}"]

    all_done = play_ranks(SCRIPT, [*SMALL, *options], env, 2, free_port(), 400, has_compiler=True)

    assert not any(done.returncode for done in all_done), [done.stdout + done.stderr for done in all_done]
    rows = {line.split()[0]: line for line in out.read_text().splitlines() if line.split()[:1]}
    numbers = {name: re.findall(r"\d+\.\d+", rows[name]) for name in ("collectives", "ours")}
    assert numbers["collectives"][-2:] == numbers["ours"][-2:]
    assert all(float(found[0]) > 0 for found in numbers.values())
    assert all(rows[name].endswith("it needs a GPU") for name in ("compiled", "async-tp"))


def test_losses_that_differ_are_told(bench: ModuleType) -> None:
    """Within noise is one curve; beyond it, or not a number, the line says wrong."""
    nan = float("nan")
    lines = [
        bench.Line("collectives", 0.1, [5.0, 4.0], ""), bench.Line("compiled", nan, [], "it needs a GPU"),
        bench.Line("async-tp", 0.1, [5.0, nan], "8 fused"), bench.Line("ours", 0.05, [5.01, 4.3], ""),
    ]  # fmt: skip

    notes = [line.note for line in bench.judged(lines)]

    assert notes[:2] == ["", "it needs a GPU"]
    assert notes[2].startswith("8 fused; wrong")
    assert notes[3] == "wrong: losses 0.300 away"
    assert bench.judged([lines[0], lines[3]._replace(losses=[5.01, 4.05])])[1].note == ""


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--variants=fast", "choose from collectives, compiled, async-tp, ours"),
        ("--sequence-length=33", "can't be cut into 2 equal parts"),
        ("--rounds=0", "positive numbers"),
        ("--top-k=9", "fewer than --top-k 9"),
        ("--width=31", "each divides the one before it"),
        ("--layers=1", "no ranks: start it with torchrun"),
    ],
)
def test_a_wrong_request_gets_one_sentence(
    option: str, said: str, bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard error, with exit code 2, before a rank waits."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *SMALL, option])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    assert bench.main() == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1

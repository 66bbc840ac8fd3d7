# SPDX-License-Identifier: Apache-2.0
"""A new source is one file and one line in a table: CONTRIBUTING's examples are put into a copy of the tree, and work.

Where a second place were needed (a list of words, of labels, of modules, in a program, a test or a contract), what is
asked of the copy here would fail, for nothing is done to it but what the examples say.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
_SECTION = re.compile(r"^## Add a source\n(.*?)^## ", re.MULTILINE | re.DOTALL)
_EXAMPLE = re.compile(r"^### (?:A|An) (.*?)\n(.*?)(?=^### |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(
    r"^(?:`(?P<table>\w+)` in |(?P<end>The end of ))?`(?P<path>[\w/]+\.py)`[^\n]*:\n\n"
    r"```(?:python)?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
EXAMPLES = {"collector of the agent", "class of fault", "metric", "verb"}
# They go through the tables row by row, or hold what is shown against them.
TESTS = (
    "tests/unit/agents/test_agents_hardware.py",
    "tests/unit/agents/test_agents_metrics.py",
    "tests/unit/cli/test_cards.py",
    "tests/unit/cli/test_main.py",
    "tests/unit/controller/test_controller_metrics.py",
    "tests/unit/controller/test_exit_verdicts.py",
    "tests/unit/controller/test_live_words.py",
    "tests/unit/controller/test_restart_policy.py",
    "tests/unit/schema/test_messages.py",
    "tests/unit/schema/test_policy.py",
)
_PAGE = """
import sys, time
from pathlib import Path
from megascale_agents.config import AgentConfig
from megascale_agents.counters import Tally
from megascale_agents.hardware.hardware import Hardware
from megascale_agents.metrics.page import AgentCollector
from megascale_ops.exposition import encoded

folder = Path(sys.argv[1])
config = AgentConfig(box_root=str(folder), sys_root=str(folder), proc_root=str(folder), kernel_log="")
hardware = Hardware(config, "node-a", lambda name, error: print("failed:", name, error))
ends_s = time.monotonic() + 60.0
shown = ()
while not {"open_files", "blocked"} <= set(shown) and time.monotonic() < ends_s:
    hardware.poll_checks(time.monotonic())
    shown = [check.name for check in hardware.checks()]
    time.sleep(0.01)
page = AgentCollector("node-a", list, lambda: None, Tally("node-a"), (), lambda: hardware).page()
print(encoded(page).body.decode())
print([finding.text for finding in hardware.findings])
"""
_FAULT = """
from megascale_ops.cli.policy import _print_policy
from megascale_ops.cards import plain_incident
from megascale_ops.controller.live.words import what
from megascale_ops.controller.policy.actions import rule_for
from megascale_ops.diagnosis.exits.classify import Ended
from megascale_ops.diagnosis.exits.first_cause import judge_exits
from megascale_ops.schema.events import Incident
from megascale_ops.schema.messages import PolicyView, RankExit
from megascale_ops.schema.policy import JobPolicy
from megascale_ops.schema.policy_settings import apply_settings, read_settings

ended = [Ended("n0", RankExit(one, one, 100, code, 0.0, by_us=not one), 0.1) for one, code in enumerate((-15, -24))]
verdict = judge_exits(ended, world_size=2, missing=(), reports={}, hosts={}, round_=1, wall_s=1e6)
print(plain_incident(Incident("job-1", "job", 1, "ended", verdict=verdict)))
print(what(verdict))
print(rule_for(JobPolicy(), verdict.fault))
own = apply_settings(JobPolicy(), read_settings(["cpu_limit=restart"]))
_print_policy(PolicyView("job", own, {"actions.cpu_limit": "restart"}, {}, ()), as_json=False)
"""


class Block(NamedTuple):
    """A piece of code of an example, and where it belongs: a file of its own, the end of a table or of a file."""

    path: str
    text: str
    table: str
    is_end: bool


def examples(document: str) -> dict[str, list[Block]]:
    """Return the blocks of each example."""
    section = _SECTION.search(document)
    assert section is not None, "CONTRIBUTING has no section that shows how a source is added"
    return {
        name: [
            Block(found["path"], found["text"], found["table"] or "", bool(found["end"]))
            for found in _BLOCK.finditer(text)
        ]
        for name, text in _EXAMPLE.findall(section[1])
    }


def put(tree: Path, block: Block) -> None:
    """Write a block where it belongs."""
    path = tree / block.path
    if not block.table and not block.is_end:
        assert not path.exists(), f"{block.path} is there already: an example is a file of its own"
        path.write_text(block.text, encoding="utf-8")
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    at = len(lines) if block.is_end else _last_line(path, block.table) - 1
    path.write_text("".join([*lines[:at], block.text, *lines[at:]]), encoding="utf-8")


def _last_line(path: Path, table: str) -> int:
    """Return the number of the line that closes a table."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if [ast.unparse(target) for target in targets] == [table]:
            assert node.end_lineno is not None
            return node.end_lineno
    raise AssertionError(f"{path} has no table {table}")


def asked(tree: Path, *command: str, where: Path = ROOT) -> str:
    """Run Python with the copy before everything else; return what it prints."""
    places = (tree, tree / "agents", ROOT / "kernels", ROOT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False, cwd=where, env=environment
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what is ours, and put all examples into it."""
    made = tmp_path_factory.mktemp("tree")
    for folder in ("megascale_ops", "agents/megascale_agents"):
        shutil.copytree(ROOT / folder, made / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".importlinter", "pyproject.toml"):
        shutil.copy(ROOT / name, made / name)
    for blocks in examples((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")).values():
        for block in blocks:
            put(made, block)
    return made


def test_each_example_is_one_file_and_one_line_in_a_table() -> None:
    """Two places each, of which one is a table; there is an example of each of the four."""
    found = examples((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))

    assert found.keys() == EXAMPLES
    for name, blocks in found.items():
        assert len({block.path for block in blocks}) == len(blocks) == 2, name
        assert any(block.table for block in blocks), name


def test_the_numbers_of_a_new_collector_and_a_new_metric_are_on_the_agents_page(tree: Path, tmp_path: Path) -> None:
    """With their help; what the collector judges is told, its check has a status, and it has a deadline."""
    (tmp_path / "sys" / "fs").mkdir(parents=True)
    (tmp_path / "sys" / "fs" / "file-nr").write_text("950\t0\t1000\n", encoding="ascii")

    page = asked(tree, "-c", _PAGE, str(tmp_path))

    assert "# HELP megascale_host_open_files_ratio Open files, of those that the kernel allows.\n" in page
    assert 'megascale_host_open_files_ratio{node="node-a"} 0.95\n' in page
    assert 'megascale_health_check_status{check="open_files",node="node-a"} 1.0\n' in page
    assert 'megascale_health_check_timeouts_total{check="open_files",node="node-a"} 0.0\n' in page
    assert "['95% of all files are open']" in page
    assert "# HELP megascale_host_hung_processes Processes in state D at two looks.\n" in page
    assert 'megascale_host_hung_processes{node="node-a"} 0.0\n' in page


@pytest.mark.parametrize(
    ("left", "told"),
    [(None, "\n[]\n"), ("nonsense", "the check open_files failed: invalid literal for int()")],
)
def test_what_a_new_collector_can_not_see_is_told_for_it(
    tree: Path, tmp_path: Path, left: str | None, told: str
) -> None:
    """No file is no check; a file that makes no sense is a finding and a check of unknown status."""
    (tmp_path / "sys" / "fs").mkdir(parents=True)
    if left is not None:
        (tmp_path / "sys" / "fs" / "file-nr").write_text(left, encoding="ascii")
    patient = _PAGE.replace('{"open_files", "blocked"} <= set(shown)', "hardware.findings").replace("60.0", "1.0")

    page = asked(tree, "-c", patient if left is None else patient.replace("1.0", "60.0"), str(tmp_path))

    assert told in page
    assert "megascale_host_open_files_ratio" not in page
    assert ('check="open_files",node="node-a"} 3.0\n' in page) == (left is not None)


def test_a_new_class_of_fault_is_known_to_judge_policy_card_and_page(tree: Path) -> None:
    """Found, told in its own words, acted upon by its own row, and set otherwise by ``policy set``."""
    told = asked(tree, "-c", _FAULT)

    card = " ".join(told.split())
    assert "cpu_limit: the kernel ended the rank, which has used up the CPU time that it may take (SIGXCPU)" in card
    assert "\nRank 1 used up its CPU time\n" in told
    assert "Rule(action='stop', why='the next process would have no more', own=False)" in told
    assert re.search(r"^ *actions\.cpu_limit +restart  \(changed while it lives\)", told, re.MULTILINE)


def test_a_new_verb_answers_help_and_runs(tree: Path) -> None:
    """It is listed with its line, explains itself, runs, and finds the new class."""
    listed = asked(tree, "-m", "megascale_ops.cli.main", "--help")
    explained = asked(tree, "-m", "megascale_ops.cli.main", "classes", "--help")
    ran = asked(tree, "-m", "megascale_ops.cli.main", "classes")

    assert re.search(r"^  classes +List the classes of fault", listed, re.MULTILINE)
    assert explained.startswith("Usage: megascale-ops classes")
    assert "cpu_limit: the kernel ended the rank" in ran


def test_the_tests_of_the_tables_the_contracts_and_ruff_are_content(tree: Path) -> None:
    """No test lists what a table has, no contract a verb or a collector; what CONTRIBUTING shows may be copied."""
    asked(tree, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", where=tree)
    files = sorted(
        {block.path for blocks in examples((ROOT / "CONTRIBUTING.md").read_text()).values() for block in blocks}
    )
    asked(tree, "-m", "ruff", "check", "--no-cache", *files, where=tree)
    asked(tree, "-m", "ruff", "format", "--no-cache", "--check", *files, where=tree)

    held = asked(tree, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "pythonpath=", *TESTS)

    assert "test_every_verb_explains_itself[classes] PASSED" in held
    assert "test_a_collector_of_the_table_is_whole[open_files] PASSED" in held
    assert "test_every_class_of_fault_has_a_sentence[cpu_limit] PASSED" in held


def test_the_copy_is_what_is_asked(tree: Path) -> None:
    """The control: without it all of this would be said of the tree itself, where nothing is new."""
    where = asked(tree, "-c", "import megascale_ops, megascale_agents as a; print(megascale_ops.__file__, a.__file__)")

    assert [Path(path).is_relative_to(tree) for path in where.split()] == [True, True]


def test_an_example_that_needs_a_second_place_is_seen() -> None:
    """The control: a third block is a third place, and a block that belongs to no known place is none at all."""
    text = "## Add a source\n\n### A verb\n\n`a.py`:\n\n```python\nx\n```\n\n`T` in `b.py`, too:\n\n```\ny\n```\n\n"

    two = examples(text + "## Next\n")
    three = examples(text + "The end of `c.py`:\n\n```python\nz\n```\n\n## Next\n")

    assert two == {"verb": [Block("a.py", "x\n", "", is_end=False), Block("b.py", "y\n", "T", is_end=False)]}
    assert three["verb"][2:] == [Block("c.py", "z\n", "", is_end=True)]

# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, and what judgement may touch.

The floors themselves are contracts of import-linter (``.importlinter``), checked by ``make lint``. Here stands what it
can't see: what is really loaded at run time, and which names the pure modules use.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "numpy", "triton", "megascale_kernels", "aiohttp", "prometheus_client"}
LIGHT_FOLDERS = {
    "megascale_ops/schema": "megascale_ops.schema",
    "megascale_ops/blackbox": "megascale_ops.blackbox",
    "megascale_ops/link": "megascale_ops.link",
    "agents/megascale_agents": "megascale_agents",
}
FORBIDDEN_TO_JUDGES = {"time", "os", "socket", "subprocess", "threading", "random", "logging", "torch"}
PURE = {
    "megascale_ops": ("distribution", "exposition", "ledger"),
    "megascale_ops/engines/slurm": ("answers",),
    "megascale_ops/diagnosis": (
        "watchdog",
        "rank_view",
        "hardware",
        "own_checks",
        "exits",
        "hangs",
        "skew",
        "stragglers",
    ),
    "megascale_ops/diagnosis/statistics": ("accumulated_cost", "cooperative", "false_alarms", "noise", "sampling"),
    "megascale_ops/controller/cluster": ("registry", "node_clocks"),
    "megascale_ops/controller/record": ("state_machine",),
    "megascale_ops/controller/policy": (
        "actions",
        "answer",
        "decision",
        "eviction",
        "replay",
        "ski_rental",
    ),
    "megascale_ops/controller/leadership": ("hearing", "rule"),
    "megascale_ops/controller/nodes": ("book", "evidence", "life", "limits"),
    "megascale_ops/controller/recovery": ("formation",),
    "megascale_ops/controller/history": ("step_history", "step_costs", "goodput"),
    "megascale_ops/controller/metrics": ("job_samples", "service_discovery"),
    "megascale_ops/controller/live": ("feed", "headline", "heatmap", "ranks", "words"),
    "megascale_ops/controller/server": ("origin",),
    "megascale_ops/diagnostics": ("card", "equals", "expected", "figures", "judgement", "pairs"),
    "megascale_ops/runner": ("plan", "meeting", "exits"),
    "megascale_ops/trace": ("arrows", "choosing", "clocks", "matching", "rank_plan", "scene", "timeline"),
    "megascale_ops/checkpoint": ("interval", "manifest", "retention", "writers"),
    "megascale_ops/checkpoint/background": ("flight",),
    "megascale_ops/checkpoint/loading": ("progress", "ranges", "schedule"),
    "megascale_ops/checkpoint/tiers": ("nodes", "sets", "settings"),
    "megascale_ops/checkpoint/trust": ("freshness", "verdicts"),
    "megascale_ops/schema": tuple(path.stem for path in (ROOT / "megascale_ops" / "schema").glob("*.py")),
}


def light_modules() -> list[str]:
    """Return the names of all modules that must stay light."""
    names = ["megascale_ops.errors"]
    for folder, package in LIGHT_FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if path.stem != "__main__":
                names.append(".".join((package, *(part for part in parts if part != "__init__"))))
    return names


def pure_files() -> list[Path]:
    """Return the files of judgement; a judge may also be a package of files.

    Raises:
        FileNotFoundError: a judge has moved away from where it is looked for, and would not be checked.
    """
    found: list[Path] = []
    for folder, names in PURE.items():
        for name in names:
            files = [path for path in (ROOT / folder / f"{name}.py",) if path.exists()]
            files += (ROOT / folder / name).glob("*.py")
            if not files:
                raise FileNotFoundError(f"PURE names {folder}/{name}, which is not there: name where it is now")
            found += files
    return found


def imported_names(tree: ast.AST) -> set[str]:
    """Return the top-level names that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
    return names


def test_light_modules_load_nothing_heavy() -> None:
    """Importing every module of schema, blackbox, link and the agent loads none of HEAVY: torch alone takes 200 MB.

    One process imports them one after the other and names the first that brought something heavy along.
    """
    probe = (
        "import importlib, sys\n"
        f"for name in {light_modules()!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = {HEAVY!r} & set(sys.modules)\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
    )

    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr


def impurities(text: str) -> set[str]:
    """Return what a judge's file imports and must not."""
    return imported_names(ast.parse(text)) & FORBIDDEN_TO_JUDGES


def test_judgement_is_pure() -> None:
    """A judge is told the time and given a view; it imports nothing that could look for itself."""
    files = pure_files()
    impure = {str(path.relative_to(ROOT)): found for path in files if (found := impurities(path.read_text("utf-8")))}

    assert not impure, impure


def test_a_judge_that_moved_away_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a name in the table that leads nowhere would be a rule that holds whatever the judge does."""
    monkeypatch.setitem(PURE, "megascale_ops/nowhere", ("policy",))

    with pytest.raises(FileNotFoundError, match="megascale_ops/nowhere/policy, which is not there"):
        pure_files()


def test_a_judge_that_looks_for_itself_is_seen() -> None:
    """The control: inside a function, too, and by whatever name; a module of ours may be called like one of theirs."""
    assert impurities("import json\nfrom megascale_ops.trace import clocks\nfrom . import time\n") == set()
    assert impurities("def now():\n    import time as clock\n    return clock.time()\n") == {"time"}
    assert impurities("from os.path import exists\nimport logging.handlers\n") == {"os", "logging"}


def test_kernels_are_imported_inside_functions_only() -> None:
    """No module of ours imports the kernels while it is being imported itself."""
    offenders = []
    for folder in ("megascale_ops", "agents"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "megascale_kernels" not in text:
                continue
            top_level = ast.Module(
                body=[node for node in ast.parse(text).body if _runs_at_import(node)],
                type_ignores=[],
            )
            if "megascale_kernels" in imported_names(top_level):
                offenders.append(str(path.relative_to(ROOT)))

    assert not offenders


def _runs_at_import(node: ast.stmt) -> bool:
    return not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))


def test_every_room_stands_on_a_floor() -> None:
    """A new room must be put into the contracts before it is built."""
    contracts = (ROOT / ".importlinter").read_text(encoding="utf-8")
    package = ROOT / "megascale_ops"
    rooms = {path.name for path in package.iterdir() if (path / "__init__.py").exists()}
    rooms |= {path.stem for path in package.glob("*.py") if path.stem != "__init__"}

    assert not [room for room in sorted(rooms) if f"megascale_ops.{room}" not in contracts]


def test_programs_never_import_each_other() -> None:
    """The controller and the runner name no program of the other in an import; they share only the schema."""
    programs = {"controller": "megascale_ops.runner", "runner": "megascale_ops.controller"}
    offenders = [
        f"{path.relative_to(ROOT)} imports {other}"
        for room, other in programs.items()
        for path in (ROOT / "megascale_ops" / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(other)
    ]

    assert not offenders

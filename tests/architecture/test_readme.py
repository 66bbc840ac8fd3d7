# SPDX-License-Identifier: Apache-2.0
"""What the documents promise: every command is run, every link leads somewhere, every picture is the table's own.

``MEGASCALE_UPDATE_GOLDEN=1 pytest tests/architecture/test_readme.py`` writes the picture of recovery anew.
"""

import ast
import importlib
import os
import re
from pathlib import Path

import pytest
from megascale_docs.reference import PAGES
from megascale_docs.repository import taken_along

from megascale_ops.chaos.faults import BY_NAME as FAULTS
from megascale_ops.chaos.legitimate import WAITS
from megascale_ops.controller.record.state_machine import diagram
from megascale_ops.schema.metrics import METRICS
from tests.fakes.typed_commands import parse
from tests.real.cases import cases

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
RECOVERY, LIMITS, CHAOS = (
    DOCS / page for page in ("explanation/recovery.md", "explanation/limits.md", "how-to/break-it-on-purpose.md")
)
# 200 lines: what a newcomer reads before the first run; all else has a page.
MOST_README_LINES = 200
# What else is called so: our packages, and what the recorder puts into a training process.
NAMES = {
    "megascale_ops",
    "megascale_agents",
    "megascale_kernels",
    "megascale_dashboards",
    "megascale_docs",
    "megascale_bootstrap",
}
DOCUMENTS = sorted(
    {
        path
        for pattern in (
            "*.md",
            "docs/**/*.md",
            "megascale_ops/**/*.md",
            "agents/**/*.md",
            "kernels/**/*.md",
            "dashboards/**/*.md",
            "examples/*.md",
            "benchmarks/*.md",
            "tests/**/*.md",
        )
        for path in ROOT.glob(pattern)
        if ".venv" not in path.parts
    }
)


def shell_commands(document: Path, language: str = "sh") -> list[str]:
    """Return the commands of the ``sh`` (or ``bash``) blocks of a document, one a line."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


def commands_run_by_tests() -> set[str]:
    """Return what test files declare that they run, in module-level tuples.

    ``README_COMMANDS`` has commands; ``GUIDES`` pages whose commands the tests read out of them.
    """
    found: set[str] = set()
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    # Parsing all of them takes seconds, and nearly none has the name.
    for text in (text for text in texts if "README_COMMANDS" in text or "GUIDES" in text):
        for node in ast.parse(text).body:
            name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
            if isinstance(node, ast.Assign) and name == "README_COMMANDS":
                found.update(ast.literal_eval(node.value))
            elif isinstance(node, ast.Assign) and name == "GUIDES":
                found.update(line for page in ast.literal_eval(node.value) for line in shell_commands(ROOT / page))
    return found


def commands_run_by_ci() -> set[str]:
    """Return ``make`` targets on which ``.ci/run`` stands: the one it calls and those that one needs."""
    return {"make test", "make setup"}


def test_every_command_of_the_readme_and_of_the_site_is_run() -> None:
    """A command that a newcomer copies has been run by continuous integration or by a test."""
    documents = [README, ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    commands = {line: str(document) for document in documents for line in shell_commands(document)}
    run = commands_run_by_tests() | commands_run_by_ci()

    assert len(commands) > 10
    assert not {line: where for line, where in commands.items() if line not in run}


def test_commands_that_no_test_can_run_can_be_typed() -> None:
    """What needs docker, a cluster or GPUs stands in a ``bash`` block; our commands there have options that exist."""
    lines = [line for document in DOCS.rglob("*.md") for line in shell_commands(document, "bash")]
    ours = [found[1] for line in lines if (found := re.match(r"(?:srun )?(megascale-ops .*)", line))]

    assert len(ours) > 3
    for command in ours:
        parse(command)


def test_the_readme_is_what_a_newcomer_reads() -> None:
    """It stays short; what it has no room for has a page, which it links to."""
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_README_LINES


@pytest.mark.parametrize(
    "document", [README, *sorted(DOCS.rglob("*.md"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_examples_in_python_name_what_there_is(document: Path) -> None:
    """Blocks of Python can be read by Python, and import names that exist."""
    for block in re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]


def test_every_make_target_that_is_named_exists() -> None:
    """Documents name no target that the Makefile does not have."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        target
        for document in DOCUMENTS
        for target in re.findall(
            r"`make ([a-z-]+)[` ]|^make ([a-z-]+)$", document.read_text(encoding="utf-8"), re.MULTILINE
        )
        for target in target
        if target
    }

    assert named
    assert named <= targets


def dead_links(document: Path) -> list[str]:
    """Return the links of a document to files that do not exist, each with the document's name."""
    text = document.read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and "://" not in target and not target.startswith("mailto:")]
    missing = [target for target in local if not (document.parent / target).exists()]
    return [f"{document.name}: {target}" for target in missing if not is_made(document.parent / target)]


def is_made(path: Path) -> bool:
    """Say whether a page is one that the site is built with: the reference, or a runbook."""
    place = os.path.relpath(path, DOCS)
    return place in PAGES or place in taken_along().values()


def test_links_lead_somewhere() -> None:
    """Every link to a file of the repository points to one that exists."""
    dead = [f"{document.parent}: {link}" for document in DOCUMENTS for link in dead_links(document)]

    assert len(DOCUMENTS) > 50
    assert not dead, "\n".join(dead)


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    """The control: of a neighbour, a page elsewhere, an anchor and a file that is not there, the last one alone."""
    page = tmp_path / "page.md"
    page.write_text("[a](page.md#top) [b](https://example.org) [c](#here) [d](missing.md)", encoding="utf-8")

    assert dead_links(page) == ["page.md: missing.md"]


def test_the_picture_of_recovery_is_the_table() -> None:
    """The diagram on its page is printed from the table that the controller runs by."""
    text = RECOVERY.read_text(encoding="utf-8")
    drawn = f"<!-- recovery -->\n```mermaid\n{diagram().strip()}\n```\n<!-- /recovery -->"
    block = re.compile(r"<!-- recovery -->.*?<!-- /recovery -->", re.DOTALL)
    if os.environ.get("MEGASCALE_UPDATE_GOLDEN"):
        RECOVERY.write_text(block.sub(lambda _: drawn, text), encoding="utf-8")
        text = RECOVERY.read_text(encoding="utf-8")

    match = block.search(text)

    assert match
    assert match.group() == drawn


@pytest.mark.parametrize(
    ("area", "words"),
    [
        ("last_words", "last words"),
        ("kernel_log", "kernel logs"),
        ("flight_recorder", "flight recorder dumps"),
        ("infiniband", "trees of adapters"),
    ],
)
def test_the_count_of_inputs_of_others_is_true(area: str, words: str) -> None:
    """The limits say how many there are, and how many are read rightly."""
    found = cases(area)
    right = sum(not case.wrong_today for case in found)

    text = " ".join(LIMITS.read_text().split())

    assert f"{right} of {len(found)} {words}" in text


def test_the_number_of_faults_and_waits_is_true() -> None:
    """What ``chaos list`` names is counted."""
    faults = f"{len(FAULTS) - len(WAITS)} faults and {len(WAITS)} waits"

    assert f"names {faults}" in " ".join(CHAOS.read_text().split())
    assert faults in README.read_text()


def test_the_number_of_dashboards_and_alerts_is_true() -> None:
    """README and the page about them count what lies in ``dashboards``."""
    dashboards = len(list((ROOT / "dashboards").glob("*.json")))
    alerts = len(re.findall("- alert: ", (ROOT / "dashboards" / "rules" / "alerts.yml").read_text()))

    assert f"[{dashboards} Grafana dashboards and {alerts} alerts](" in README.read_text()
    assert f" {alerts} alerts come with a runbook each" in (DOCS / "how-to" / "prometheus-and-grafana.md").read_text()


def unknown_metrics(text: str) -> set[str]:
    """Return the names in a document that look like a metric of ours and are none; recorded series have colons."""
    named = set(re.findall(r"(?<![\w:/.-])megascale_[a-z0-9_]*[a-z0-9](?![\w:/.])", text)) - NAMES
    return {name for name in named if name not in METRICS and re.sub("_(bucket|sum|count)$", "", name) not in METRICS}


def test_documents_name_metrics_of_the_table_only() -> None:
    """A metric that is renamed is renamed where it is written about; the changelog tells of old names, too."""
    telling = [path for path in DOCUMENTS if path.name not in ("CHANGELOG.md", "CONTRIBUTING.md")]
    unknown = {str(path.relative_to(ROOT)): found for path in telling if (found := unknown_metrics(path.read_text()))}

    assert not unknown


def test_a_metric_that_is_none_is_seen() -> None:
    """The control: of a metric, a bucket of a histogram, a recorded series and a typing mistake, the last one alone."""
    text = "`megascale_jobs` megascale_controller_tick_seconds_bucket job:megascale_goodput:ratio `megascale_job{job}`"

    assert unknown_metrics(text) == {"megascale_job"}


def test_the_changelog_has_a_place_for_the_next_change() -> None:
    """CHANGELOG.md keeps the format that tools read."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert text.startswith("# Changelog\n")
    assert "## [Unreleased]" in text
    headings = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert headings <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}

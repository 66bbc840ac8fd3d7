# SPDX-License-Identifier: Apache-2.0
"""The documentation site: built as strictly as it goes, complete, and without anything from another host."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from megascale_docs.reference import PAGES
from megascale_docs.repository import taken_along

ROOT = Path(__file__).parents[2]


# To a file of the repository, to another page, to a heading, and to no place at all.
GONE = ("../no-such-file.md", "no-such-page.md", "quickstart.md#no-such-heading", "/no-such-place.md")


class Built(NamedTuple):
    """The site, and how its build ended."""

    site: Path
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the site once, which takes 4 s: with links that lead nowhere, which are told when all pages are written."""
    tree, site = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("site")
    for path in ROOT.iterdir():
        if path.name not in {"docs", "build", ".venv", ".git"}:
            (tree / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", tree / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    with (tree / "docs" / "troubleshooting.md").open("a", encoding="utf-8") as page:
        page.writelines(f"\n[gone]({target})\n" for target in GONE)
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(tree / "mkdocs.yml")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*line, "--site-dir", str(site)], capture_output=True, text=True, timeout=120, check=False, env=env
    )
    return Built(site, done)


@pytest.fixture
def site(built: Built) -> Path:
    """Return where the pages are."""
    return built.site


def test_nothing_but_links_that_lead_nowhere_ends_the_build(built: Built) -> None:
    """As strictly as it goes: a warning is an error, and no page of the repository has one."""
    said = built.done.stdout + built.done.stderr
    told = [line for line in said.splitlines() if "WARNING" in line or "ERROR" in line]

    assert built.done.returncode != 0
    assert f"Aborted with {len(GONE)} warnings in strict mode" in said
    assert len(told) == len(GONE), said
    assert not [target for target in GONE if not any(f"'{target}'" in line for line in told)], told


def test_every_page_is_built(site: Path) -> None:
    """Pages that people write, those made from code, and those that lie elsewhere in the repository."""
    written = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md") if path.name != "README.md"]
    pages = [*map(str, written), *PAGES, *taken_along().values()]
    missing = [page for page in pages if not (site / re.sub(r"\.md$", ".html", page)).is_file()]

    assert len(pages) > 100
    assert not missing


def test_every_page_that_people_write_can_be_found(site: Path) -> None:
    """The menu of the first page has each of them, and the whole reference."""
    menu = (site / "index.html").read_text(encoding="utf-8")
    written = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md") if path.name != "README.md"]
    wanted = [re.sub(r"\.md$", ".html", str(page)) for page in (*written, *PAGES)]

    assert not [page for page in wanted if f'href="{page}"' not in menu]


def test_nothing_is_fetched_from_another_host(site: Path) -> None:
    """The site can be read where there is no network: scripts, styles, fonts and pictures are its own."""
    fetched = re.compile(
        r'<(?:script|img|iframe|link rel="(?:stylesheet|preconnect)")[^>]*(?:src|href)="(https?:[^"]+)"'
    )
    pages = list(site.rglob("*.html"))

    assert not {str(page): found for page in pages if (found := fetched.findall(page.read_text(encoding="utf-8")))}
    assert fetched.search('<script src="https://example.org/mermaid.js">')

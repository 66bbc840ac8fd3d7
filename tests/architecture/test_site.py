# SPDX-License-Identifier: Apache-2.0
"""The documentation site: built as strictly as it goes, complete, and without anything from another host."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from megascale_docs.reference import PAGES
from megascale_docs.repository import taken_along

ROOT = Path(__file__).parents[2]


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a tree; a warning is an error."""
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(root / "mkdocs.yml")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [*line, "--site-dir", str(site)], capture_output=True, text=True, timeout=120, check=False, env=env
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once; it takes 4 s."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


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


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    """The control: whether it goes into the repository, to another page, to a heading or to no place at all."""
    for path in ROOT.iterdir():
        if path.name not in {"docs", "build", ".venv", ".git"}:
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    gone = ("../no-such-file.md", "no-such-page.md", "quickstart.md#no-such-heading", "/no-such-place.md")
    with (tmp_path / "docs" / "troubleshooting.md").open("a", encoding="utf-8") as page:
        page.writelines(f"\n[gone]({target})\n" for target in gone)

    done = build(tmp_path, tmp_path / "site")

    assert done.returncode != 0
    assert not [target for target in gone if f"'{target}'" not in done.stderr], done.stderr

# SPDX-License-Identifier: Apache-2.0
"""Pages of the site that lie elsewhere in the repository, and links between them, which hold in both places.

A page below ``docs/`` links to a design note as ``../kernels/README.md``, which a reader of the repository can follow.
On the site the same note is a page; the link is written anew. What is no page there (a source file) is named only.
"""

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from megascale_docs.tables import ROOT

DOCS = ROOT / "docs"
# What is taken along: where it lies -> where it is on the site.
_SINGLE = {
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "docs/README.md": "design/docs.md",
    "examples/README.md": "how-to/examples.md",
    "agents/deploy/README.md": "how-to/put-an-agent-on-every-node.md",
    "dashboards/provisioning/README.md": "how-to/provision-grafana.md",
    "dashboards/rules/README.md": "reference/alerts.md",
}
_NOTES = ("megascale_ops", "agents", "kernels", "dashboards", "benchmarks", "tests")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def taken_along() -> dict[Path, str]:
    """Return the files of the repository that are pages or pictures of the site, each with its place there."""
    found = {ROOT / path: place for path, place in _SINGLE.items()}
    for runbook in sorted((ROOT / "dashboards" / "runbooks").glob("*.md")):
        found[runbook] = f"runbooks/{runbook.name}"
    for folder in _NOTES:
        for note in sorted((ROOT / folder).rglob("README.md")):
            found.setdefault(note, f"design/{note.parent.relative_to(ROOT)}.md")
    for pattern in ("benchmarks/results/*.txt", "kernels/benchmarks/results/*"):
        found |= {path: f"results/{path.relative_to(ROOT)}" for path in sorted(ROOT.glob(pattern))}
    return found


def linked(markdown: str, source: Path, place: str) -> str:
    """Return a page with links to files of the repository that lead to where these are on the site.

    Args:
        markdown: the page's text.
        source: its file, from which its links go.
        place: where it is on the site.
    """
    known = taken_along()

    def anew(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if "://" in target or not path or target.startswith("mailto:"):
            return match[0]
        there = Path(os.path.normpath(source.parent / path))
        if there.is_dir() and (there / "README.md") in known:
            there /= "README.md"
        if there == ROOT / "README.md":
            on_site = "index.md"
        elif there in known:
            on_site = known[there]
        elif there.is_relative_to(DOCS):
            on_site = there.relative_to(DOCS).as_posix()
        elif there.exists():
            return text
        else:
            return match[0]  # mkdocs reports that it leads nowhere
        return f"{mark}[{text}]({posixpath.relpath(on_site, posixpath.dirname(place) or '.')}{hash_}{anchor})"

    return "".join(part if is_code else _LINK.sub(anew, part) for part, is_code in _parts(markdown))


def _parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a page, and of each whether it is a block of code, in which nothing is a link."""
    is_code = False
    for piece in re.split(r"^(```.*\n(?:.*\n)*?```)$", markdown, flags=re.MULTILINE):
        yield piece, is_code
        is_code = not is_code


def without_pictures_of_states(markdown: str, table: Callable[[], str]) -> str:
    """Return a page with the diagram of recovery as a table: drawing it would take a script from another host."""
    return re.sub(r"^```mermaid\n.*?^```$", lambda _: table(), markdown, flags=re.MULTILINE | re.DOTALL)

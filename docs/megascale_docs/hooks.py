# SPDX-License-Identifier: Apache-2.0
"""What mkdocs calls while it builds the site (``hooks`` in mkdocs.yml): pages are added, links written anew."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

# mkdocs loads this file by its path, wherever it is called from.
for _folder in (".", "docs", "agents", "kernels"):
    sys.path.insert(0, str(Path(__file__).parents[2] / _folder))

from mkdocs.structure.files import File, Files, InclusionLevel  # noqa: E402  after the paths

from megascale_docs.reference import PAGES  # noqa: E402  same
from megascale_docs.repository import DOCS, linked, taken_along, without_pictures_of_states  # noqa: E402  same
from megascale_docs.tables import recovery_moves  # noqa: E402  same

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page


def on_files(files: Files, config: "MkDocsConfig") -> Files:
    """Add the reference, and what lies elsewhere in the repository."""
    for place, make in PAGES.items():
        files.append(File.generated(config, place, content=make()))
    for source, place in taken_along().items():
        files.append(File.generated(config, place, abs_src_path=str(source), inclusion=InclusionLevel.INCLUDED))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: Files) -> str:
    """Write links anew, of pages that are not made here."""
    del config, files
    place = page.file.src_uri
    if place in PAGES:
        return markdown
    source = Path(page.file.abs_src_path or DOCS / place)
    return linked(without_pictures_of_states(markdown, recovery_moves), source, place)

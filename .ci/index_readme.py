# SPDX-License-Identifier: Apache-2.0
"""README.md as a package index and `pip show` get it: without what leads nowhere there.

Links into the repository and its pictures are relative, and the repository has no public address that could stand
before them. So pictures go, and a link to a file keeps its words. hatchling calls this while it builds.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class IndexReadme(MetadataHookInterface):
    """Give the project its description."""

    def update(self, metadata: dict[str, object]) -> None:
        """Set ``readme``."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_places(text)}


def without_places(text: str) -> str:
    """Return Markdown without pictures, and without links to files."""
    pictures = re.compile(r"^!\[[^\]]*\]\((?!https?://)[^)]+\)\n(?:\n\([^)]*\)\n)?\n?", re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]+\)", r"\1", pictures.sub("", text))

# SPDX-License-Identifier: Apache-2.0
"""Commands and files as a guide shows them: tests read them there, so that neither can drift from the other."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of a language in a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return found


def commands(page: str) -> list[str]:
    """Return the commands of a page in order, one a line."""
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line and not line.startswith("#")]

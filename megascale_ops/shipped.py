# SPDX-License-Identifier: Apache-2.0
"""Where the files lie that come with us and are no code: dashboards, runbooks, examples, what deploys an agent.

In an installation they are folders of the package; in a checkout they are the repository's own.
"""

from pathlib import Path
from typing import Literal

from megascale_ops.errors import MegascaleError

Name = Literal["dashboards", "examples", "deploy"]
# The repository's folder of each; pyproject.toml puts them into the wheel as megascale_ops/NAME.
_FOLDERS: dict[Name, str] = {"dashboards": "dashboards", "examples": "examples", "deploy": "agents/deploy"}


def shipped(name: Name) -> Path:
    """Return the folder.

    Raises:
        MegascaleError: it is missing from this installation.
    """
    package = Path(__file__).parent
    for folder in (package / name, package.parent / _FOLDERS[name]):
        if folder.is_dir():
            return folder
    raise MegascaleError(f"the folder {name!r} is missing from this installation: install megascale-ops again")

# SPDX-License-Identifier: Apache-2.0
"""What a verb that starts programs needs of this installation, asked before it starts one.

A program of ours that is started without its libraries says so in a log of its own, a second later, and by then a run
has a folder and companions that are started again and again.
"""

from importlib.util import find_spec


def need(*libraries: str) -> None:
    """Find libraries without loading one; of several that are missing the first is told, so the largest comes first.

    Raises:
        ModuleNotFoundError: as importing one would; the command line says which extra brings it.
    """
    for name in libraries:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

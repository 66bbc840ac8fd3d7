# SPDX-License-Identifier: Apache-2.0
"""Skip a file of tests where a library is missing, without importing the library.

Each of eight workers finds all tests of processes. ``pytest.importorskip("torch")`` is 2 s of CPU time in each of them
then, for tests whose ranks import torch themselves.
"""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
from packaging.version import Version


def needs(name: str, least: str = "0") -> None:
    """Skip the file that calls it where there is no library of this name, or an older one."""
    if find_spec(name) is None:
        pytest.skip(f"no {name} is installed here", allow_module_level=True)
    if Version(version(name)) < Version(least):
        pytest.skip(f"{name} {version(name)} is older than {least}", allow_module_level=True)


def late(name: str) -> Any:  # noqa: ANN401  a module
    """Return what stands for a module, which is imported when something of it is first asked for."""
    return _Late(name)


class _Late:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the module has
        if name.startswith(("_", "pytest")):  # pytest looks for its own in all that a file of tests has
            raise AttributeError(name)
        return getattr(import_module(self._name), name)

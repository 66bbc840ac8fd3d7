# SPDX-License-Identifier: Apache-2.0
"""Inputs that programs and machines of others produced, each a small file with its right answer.

A file names its source by project and number, its words are made anew and short. What we still get wrong stays in the
list with a reason (``wrong_today``) and is expected to fail: a fix fails the test until the line is removed.
"""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).parent
KEYS = {"source", "shows", "given", "right", "wrong_today"}


class Case(NamedTuple):
    """One input and what it should be taken for."""

    name: str
    source: str  # project and number, or the catalogue and its row
    shows: str  # one sentence: what is hard about it
    given: dict[str, Any]
    right: dict[str, Any]
    wrong_today: str  # why it is still read wrongly; empty: it is read rightly


def read_case(path: Path) -> Case:
    """Read one file; ValueError when a key is missing or unknown."""
    told = tomllib.loads(path.read_text())
    if missing := {"source", "shows", "given", "right"} - set(told):
        raise ValueError(f"{path}: {', '.join(sorted(missing))} is missing")
    if unknown := set(told) - KEYS:
        raise ValueError(f"{path}: unknown key {', '.join(sorted(unknown))}; known are {', '.join(sorted(KEYS))}")
    return Case(path.stem, told["source"], told["shows"], told["given"], told["right"], told.get("wrong_today", ""))


def cases(area: str) -> list[Case]:
    """All inputs of an area, which is a folder beside this file, by name."""
    return [read_case(path) for path in sorted((HERE / area).glob("*.toml"))]


def rows(area: str) -> list[Any]:
    """The same as parameters of a test: what is wrong today is expected to fail, and fails the test when it passes."""
    return [
        pytest.param(
            case,
            id=case.name,
            marks=[pytest.mark.xfail(reason=case.wrong_today, strict=True)] if case.wrong_today else [],
        )
        for case in cases(area)
    ]

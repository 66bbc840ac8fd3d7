# SPDX-License-Identifier: Apache-2.0
"""What `make test` holds of a family of cases, and what it leaves to `make test-matrix`.

A family walks one road of the product with many inputs. `tests/README.md` has the rule by which its cases are parted,
and a row for each test that leaves some.
"""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

Cases = list[Any]  # values, and pytest's own sets of parameters
DRAWS_ALL = "MEGASCALE_ALL_DRAWN" in os.environ  # as `make test-matrix` says


def some(drawn: int) -> int:
    """Return how many of so many drawn inputs are tried: a quarter of them, all where `make test-matrix` runs."""
    return drawn if DRAWS_ALL else -(-drawn // 4)


def wide(cases: Iterable[Any], keep: Collection[Any]) -> Cases:
    """Return the cases of a family for ``pytest.mark.parametrize``: those to keep as they are, the others marked.

    Args:
        cases: One value each, a tuple of values, or a `pytest.param`; by name where they are a mapping.
        keep: Those that stay in `make test`: the values as they stand among the cases, of a `pytest.param` its name.

    Raises:
        ValueError: None stays, all stay, or what should stay is no case.
    """
    all_cases = list(cases)
    names = [_name(case) for case in all_cases]
    if strange := [one for one in keep if one not in names]:
        raise ValueError(f"no case of this family: {', '.join(map(str, strange))}")
    if not 0 < sum(name in keep for name in names) < len(names):
        raise ValueError("some cases of a family stay in make test, and some are left to the matrix")
    return [case if name in keep else _left(case) for case, name in zip(all_cases, names, strict=True)]


def _name(case: Any) -> Any:  # noqa: ANN401 (whatever a test takes)
    return case.id if hasattr(case, "marks") else case


def _left(case: Any) -> Any:  # noqa: ANN401 (whatever a test takes)
    if hasattr(case, "marks"):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.matrix])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.matrix)

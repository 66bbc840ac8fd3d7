# SPDX-License-Identifier: Apache-2.0
"""Every input of others says where it is from, and is read by a test."""

from pathlib import Path

import pytest

from tests.real.cases import HERE, cases, read_case

AREAS = sorted(path.name for path in HERE.iterdir() if path.is_dir() and any(path.glob("*.toml")))


@pytest.mark.parametrize("area", AREAS)
def test_every_input_names_its_source_and_is_held_by_a_test_of_its_area(area: str) -> None:
    """A file that no test reads would count as right for ever."""
    found = cases(area)

    assert all(case.source and case.shows for case in found)
    assert f'rows("{area}")' in (HERE / f"test_{area}.py").read_text()


def test_a_file_that_forgets_its_source_is_refused(tmp_path: Path) -> None:
    """So that facts can be looked up where they came from."""
    (tmp_path / "x.toml").write_text('shows = "y"\n[given]\n[right]\n')

    with pytest.raises(ValueError, match="source is missing"):
        read_case(tmp_path / "x.toml")

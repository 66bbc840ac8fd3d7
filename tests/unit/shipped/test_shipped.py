# SPDX-License-Identifier: Apache-2.0
"""Where files lie that come with us: in the package where it is installed, in the repository in a checkout."""

from pathlib import Path

import pytest

from megascale_ops import shipped
from megascale_ops.errors import MegascaleError

ROOT = Path(__file__).parents[3]


def test_a_checkout_has_its_own() -> None:
    """Each folder is the repository's."""
    assert shipped.shipped("dashboards") == ROOT / "dashboards"
    assert shipped.shipped("examples") == ROOT / "examples"
    assert shipped.shipped("deploy") == ROOT / "agents" / "deploy"


def test_an_installation_has_the_package_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where something of the same name lies beside the package, as another project's ``examples`` may."""
    (tmp_path / "megascale_ops" / "examples").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "megascale_ops" / "shipped.py"))

    assert shipped.shipped("examples") == tmp_path / "megascale_ops" / "examples"


def test_what_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An incomplete installation gets a message with what to do."""
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "megascale_ops" / "shipped.py"))

    with pytest.raises(MegascaleError, match="the folder 'deploy' is missing from this installation"):
        shipped.shipped("deploy")

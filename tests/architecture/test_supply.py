# SPDX-License-Identifier: Apache-2.0
"""What comes with us: a valid bill of materials, licences that we may use, and hashes for a site that wants them."""

import json
import sys
from collections.abc import Iterator
from email.message import Message
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The scripts of .ci as modules."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    names = ("installed", "licences", "sbom", "locked")
    yield {name: import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


class Distribution(metadata.Distribution):
    """A distribution of which only the metadata is there."""

    def __init__(self, **fields: str) -> None:
        self.fields = Message()
        for name, value in {"Name": "thing", "Version": "1", **fields}.items():
            self.fields[name.replace("_", "-")] = value

    @property
    def metadata(self) -> Message:
        """What it says of itself."""
        return self.fields

    def read_text(self, filename: str) -> None:
        """It has no files."""

    def locate_file(self, path: object) -> None:
        """It has no files."""


def test_the_bill_of_materials_is_valid_and_whole(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    """By CycloneDX's own schema; every direct dependency is in it with its version, and nothing that only tests us."""
    target = tmp_path / "deep" / "bill.json"

    scripts["sbom"].main(target)

    bill = json.loads(target.read_text())
    listed = {part["name"]: part["version"] for part in bill["components"]}
    ours = bill["metadata"]["component"]
    direct = [Requirement(line) for line in metadata.requires("megascale-ops") or []]
    wanted = [one.name for one in direct if one.marker is None or 'extra == "report"' in str(one.marker)]
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert (ours["name"], ours["licenses"]) == ("megascale-ops", [{"expression": "Apache-2.0"}])
    assert len(wanted) >= 10
    assert {name: listed[name] for name in wanted} == {name: metadata.version(name) for name in wanted}
    assert "aiosignal" in listed  # which aiohttp needs
    assert not {"pytest", "hypothesis", "ruff", "mypy", "transformers"} & set(listed)
    needs = {one["ref"]: one.get("dependsOn", []) for one in bill["dependencies"]}
    assert f"aiohttp@{listed['aiohttp']}" in needs[ours["bom-ref"]]
    assert f"aiosignal@{listed['aiosignal']}" in needs[f"aiohttp@{listed['aiohttp']}"]


def test_a_bill_that_is_not_valid_is_not_written(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the schema's check: a bill without its version of the format."""
    whole = scripts["sbom"].JsonV1Dot6.output_as_string

    def broken(writer: object, **options: object) -> str:
        return str(whole(writer, **options)).replace('"specVersion"', '"specversion"')

    monkeypatch.setattr(scripts["sbom"].JsonV1Dot6, "output_as_string", broken)

    with pytest.raises(ValueError, match="the bill of materials is not valid"):
        scripts["sbom"].main(tmp_path / "bill.json")

    assert list(tmp_path.iterdir()) == []


def test_what_is_installed_stands_under_licences_that_we_may_use(scripts: dict[str, ModuleType]) -> None:
    """What ``make lint`` asks."""
    assert scripts["licences"].complaints(scripts["installed"].distributions()) == []


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"License_Expression": "GPL-3.0-only"}, "GPL-3.0-only is not among"),
        ({"License_Expression": "MIT AND AGPL-3.0-only"}, "is not among"),
        ({"License_Expression": "MIT OR"}, "ends too early"),
        ({"License_Expression": "(MIT"}, "lacks a bracket"),
        ({"License_Expression": "MIT; and more"}, "is no licence expression"),
        ({"License": "my own terms"}, "names no licence that is known"),
        ({"Classifier": "License :: Other/Proprietary License"}, "LicenseRef-Proprietary is not among"),
        ({}, "names no licence that is known"),
    ],
)
def test_another_licence_is_told(scripts: dict[str, ModuleType], fields: dict[str, str], sentence: str) -> None:
    """The negative control: what would slip in with a new dependency."""
    (told,) = scripts["licences"].complaints({"thing": Distribution(**fields)})

    assert told.startswith("thing 1: ")
    assert sentence in told


@pytest.mark.parametrize(
    "expression", ["MIT", "GPL-3.0-only OR MIT", "Apache-2.0 WITH LLVM-exception AND (GPL-2.0-only OR BSD-3-Clause)"]
)
def test_of_two_licences_one_that_we_may_use_suffices(scripts: dict[str, ModuleType], expression: str) -> None:
    """OR is the user's choice, AND is not."""
    assert scripts["licences"].complaints({"thing": Distribution(License_Expression=expression)}) == []


def test_hashes_are_those_that_pip_reports(scripts: dict[str, ModuleType]) -> None:
    """One line for each file, in the form that ``--require-hashes`` reads; a folder has none."""
    file = {"archive_info": {"hashes": {"sha256": "ab"}}, "url": "https://x/a.whl"}
    report = {
        "install": [
            {"metadata": {"name": "b", "version": "2"}, "download_info": file},
            {"metadata": {"name": "A", "version": "1"}, "download_info": file},
            {
                "metadata": {"name": "megascale-ops", "version": "0"},
                "download_info": {"dir_info": {}, "url": "file:///"},
            },
        ]
    }

    assert scripts["locked"].lines(report) == ["A==1 --hash=sha256:ab", "b==2 --hash=sha256:ab"]

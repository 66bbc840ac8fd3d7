# SPDX-License-Identifier: Apache-2.0
"""The wheel that is put together again: all that was installed from it, nothing that an installer added."""

import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PathDistribution
from io import BytesIO
from pathlib import Path

import pytest

import megascale_ops
from megascale_ops.grafana.own_wheel import own_wheel, packed

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel as it is released."""
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=120, capture_output=True)
    return next(folder.glob("*.whl"))


def installed(wheel: Path, folder: Path, *options: str) -> Distribution:
    """Install a wheel as pip does: with byte code, scripts and an INSTALLER in its list."""
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*line, *options, str(wheel)], check=True, timeout=120, capture_output=True)
    return PathDistribution(next(folder.glob("megascale_ops-*.dist-info")))


@pytest.fixture(scope="module")
def found(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    """What pip made of it: half of that time compiles every file of ours."""
    return installed(wheel, tmp_path_factory.mktemp("installed"))


def test_it_holds_what_the_first_one_held(wheel: Path, found: Distribution) -> None:
    """File for file and byte for byte, but for the list; the same installation gives the same bytes."""
    again, once_more = packed(found), packed(found)

    assert again is not None
    assert again == once_more
    assert again.name == wheel.name
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(BytesIO(again.data)) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())
        for name in first.namelist():
            assert name.endswith("RECORD") or first.read(name) == second.read(name), name
        listed = [archive.read(f"{found._path.name}/RECORD").split(b"\n") for archive in (first, second)]  # type: ignore[attr-defined]
    assert len(listed[0]) == len(listed[1])


def test_an_installer_takes_it(found: Distribution, tmp_path: Path) -> None:
    """Pip checks every digest of its list, and finds nothing wrong."""
    again = packed(found)
    assert again is not None
    (tmp_path / again.name).write_bytes(again.data)

    taken = installed(tmp_path / again.name, tmp_path / "second", "--no-compile")

    assert taken.version == megascale_ops.__version__
    assert (tmp_path / "second" / "megascale_ops" / "deploy" / "slurm" / "prolog.sh").is_file()


def test_a_checkout_has_none(tmp_path: Path) -> None:
    """An editable installation lists a path file and no code: there is nothing to put together."""
    folder = tmp_path / "megascale_ops-0.1.0.dist-info"
    folder.mkdir()
    (folder / "RECORD").write_text("_megascale_ops.pth,,\nmegascale_ops-0.1.0.dist-info/RECORD,,\n")

    assert packed(PathDistribution(folder)) is None
    assert own_wheel() is None or own_wheel() == own_wheel()

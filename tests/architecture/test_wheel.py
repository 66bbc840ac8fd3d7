# SPDX-License-Identifier: Apache-2.0
"""What a user gets from ``pip install``: one wheel with three packages and the files that are not Python."""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel without a network and open it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=120, capture_output=True)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_wheel_holds_the_three_packages(wheel: zipfile.ZipFile) -> None:
    """The packages lie at the top, under their import names; nothing else of the repository comes along."""
    tops = {name.partition("/")[0] for name in wheel.namelist()}

    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "megascale_ops",
        "megascale_agents",
        "megascale_kernels",
    }


@pytest.mark.parametrize(
    "name",
    [
        "megascale_ops/blackbox/blackbox.h",
        "megascale_ops/recorder/bootstrap/sitecustomize.py",
        "megascale_ops/recorder/nccl_profiler/entries.c",
        "megascale_ops/recorder/nccl_profiler/plugin.h",
        "megascale_ops/controller/live/web/app.js",
        "megascale_ops/controller/live/web/index.html",
        "megascale_ops/py.typed",
        "megascale_agents/py.typed",
        "megascale_agents/config.py",
        "megascale_kernels/__init__.py",
    ],
)
def test_wheel_holds_what_is_needed_at_run_time(wheel: zipfile.ZipFile, name: str) -> None:
    """Headers, the bootstrap that instruments a script, and the marks for type checkers are installed."""
    assert name in wheel.namelist()


def test_wheel_holds_the_dashboards_and_what_belongs_to_them(wheel: zipfile.ZipFile) -> None:
    """`dashboards export` and `push` work without a checkout; what makes and tests the dashboards stays at home."""
    root = ROOT / "dashboards"
    patterns = (
        "*.json",
        "*.yml",
        "rules/*.yml",
        "alertmanager/*.yml",
        "runbooks/*.md",
        "provisioning/*/*.yaml",
        "image/Dockerfile",
    )
    expected = {f"megascale_ops/dashboards/{path.relative_to(root)}" for one in patterns for path in root.glob(one)}
    shipped = {name for name in wheel.namelist() if name.startswith("megascale_ops/dashboards/")}

    assert expected
    assert expected <= shipped
    assert not [name for name in shipped if name.endswith(".py") or "/tests/" in name]


def test_wheel_holds_what_examples_copies(wheel: zipfile.ZipFile) -> None:
    """All scripts, and all that puts an agent on a node."""
    scripts = {f"megascale_ops/examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    deploy = ROOT / "agents" / "deploy"
    files = {f"megascale_ops/deploy/{path.relative_to(deploy)}" for path in deploy.rglob("*") if path.is_file()}

    assert len(scripts) == 6
    assert len(files) > 10
    assert scripts | files <= set(wheel.namelist())


def test_the_description_leads_nowhere_wrong(wheel: zipfile.ZipFile) -> None:
    """On a package index a relative link or picture is broken: the description has none, and all of README's words."""
    metadata = email.message_from_string(
        next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith("METADATA"))
    )
    text = str(metadata.get_payload())

    assert metadata["Description-Content-Type"] == "text/markdown"
    assert text.startswith("# MegaScale Ops")
    assert "Licence: Apache-2.0." in text
    assert not re.findall(r"\]\((?!https?://)[^)]*\)", text)
    assert "made-up ranks" not in text


def test_the_source_distribution_is_complete(tmp_path: Path) -> None:
    """It contains what the repository tracks: tests, pages, benchmarks, and what builds and checks them."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=120, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    tracked = set(listed.stdout.split("\n")) - {""}

    assert {"docs/page.png", "mkdocs.yml", "SECURITY.md", ".ci/run", "benchmarks/results/agent.txt"} <= names
    assert not sorted(path for path in tracked - names if (ROOT / path).exists())


def test_every_python_file_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    """No module is left behind by a pattern."""
    expected = {
        str(path.relative_to(root))
        for root, package in ((ROOT, "megascale_ops"), (ROOT / "agents", "megascale_agents"))
        for path in (root / package).rglob("*.py")
        if "__pycache__" not in path.parts
    }

    assert expected <= set(wheel.namelist())


def test_wheel_names_its_entry_points(wheel: zipfile.ZipFile) -> None:
    """The console script and torch's rendezvous backend are registered."""
    text = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith("entry_points.txt"))

    assert "megascale-ops = megascale_ops.cli.__main__:start" in text
    assert "[torchrun.handlers]" in text
    assert "megascale = megascale_ops.runner.rendezvous:get_handler" in text


def test_base_install_draws_no_torch(wheel: zipfile.ZipFile) -> None:
    """A node that only runs the agent installs neither torch nor numpy: they come with extras alone."""
    metadata = email.message_from_string(
        next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith("METADATA"))
    )
    base = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]

    assert base
    assert not [line for line in base if line.split(">")[0].strip() in {"torch", "triton", "numpy"}]

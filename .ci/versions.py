# SPDX-License-Identifier: Apache-2.0
"""Hold ours to the versions of Python, torch and Triton that users install: `make test-versions`.

    python .ci/versions.py benchmarks/results/versions.txt
    python .ci/versions.py --only 3.14 TABLE      # rows in which one of these words stands

One environment a row, one after the other, made by uv, which keeps each file once for all of them: some 4 GB a row
would be written otherwise. torch comes as the index has it, on most rows with CUDA, and is imported on a CPU; where
UV_FIND_LINKS names a folder with a build for CPUs, that one is taken. Rows are kept in VERSIONS_FOLDER (default
/tmp/megascale-versions) until the next run. The table is written after each row, so a run that is ended tells what it
has seen. A row fails or can't be installed: the table says which and why, and the exit code is 1.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from megascale_ops.whole_file import write_whole

ROOT = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("VERSIONS_FOLDER", "/tmp/megascale-versions"))  # noqa: S108 (gigabytes that may go)
INSTALL_S = 1800  # some 4 GB by a slow line
PATIENCE_S = 1800  # a row takes a minute or two, and ten times that where others use the cores
TESTS_NEED = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-randomly", "pytest-xdist", "hypothesis")


class Row(NamedTuple):
    """What is installed together.

    Attributes:
        python: its version, as uv finds or fetches it.
        torch: its release.
        triton: its release: the one that this torch asks for, unless a reason stands beside the row.
    """

    python: str
    torch: str
    triton: str


ROWS = (
    Row("3.11", "2.11.0", "3.6.0"),
    Row("3.11", "2.12.1", "3.7.1"),
    Row("3.11", "2.13.0", "3.6.0"),  # what constraints.txt pins
    Row("3.11", "2.14.1", "3.8.0"),
    Row("3.11", "2.15.0", "3.9.0"),
    Row("3.12", "2.15.0", "3.9.0"),
    Row("3.13", "2.15.0", "3.9.0"),
    Row("3.14", "2.15.0", "3.9.0"),
)

_COMPILED = "tests/unit/kernels/test_hopper_codegen.py"
# Name of a line: what pytest gets. All groups of a row are one run, which imports torch once.
GROUPS = {
    "recorder": ("tests/unit/recorder",),
    "runner": ("tests/unit/runner", "tests/unit/cli/test_run_options.py"),
    "two ranks": (
        "tests/processes/test_recovery.py::test_a_rank_that_dies_is_named_and_training_goes_on[sigkill-killed]",
    ),
    "emulated": tuple(
        f"tests/unit/kernels/test_{name}.py" for name in ("emulate_language", "gemm_ar_emulated", "moe_emulated")
    ),
    "sm_90": (
        f"{_COMPILED}::test_plain_kernels_run_wgmma_and_hardly_spill",
        f"{_COMPILED}::test_tma_stores_are_drained_before_their_flag_is_released",
    ),
}

_FACTS = """
import importlib.metadata as m, platform, torch, triton
import megascale_ops.recorder, megascale_ops.runner, megascale_agents, megascale_kernels
nccl = [d.version for d in m.distributions() if (d.name or "").startswith("nvidia-nccl-cu")]
print(platform.python_version(), torch.__version__, triton.__version__, *(nccl or ["-"]), m.version("numpy"))
"""


class CannotInstallError(Exception):
    """A row can't be had here; the message says why, in one line."""


def last_line(text: str) -> str:
    """The line that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "it said nothing"


def call(command: Iterable[str], patience_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program in the checkout; one that takes too long has failed and says so.

    A row's Python must not find what the caller's environment offers.
    """
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    line = list(command)
    try:
        return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=patience_s, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(line, 124, "", f"no end within {patience_s:g} s")
    except FileNotFoundError:
        return subprocess.CompletedProcess(line, 127, "", f"there is no {line[0]}: make test-versions installs it")


def installed(row: Row, uv: str) -> Path:
    """Make the environment of a row.

    Returns:
        Its Python.

    Raises:
        CannotInstallError: no such Python, or pip's index has not what is asked for.
    """
    folder = FOLDER / f"py{row.python}-torch{row.torch}-triton{row.triton}"
    python = folder / "bin/python"
    exactly = FOLDER / f"{folder.name}.txt"
    FOLDER.mkdir(parents=True, exist_ok=True)
    # What torch and we ask for does not count: a row is there to find out whether it should.
    exactly.write_text(f"torch=={row.torch}\ntriton=={row.triton}\n", encoding="utf-8")
    numpy = ("numpy<2.4",) if row.triton.startswith("3.6.") else ()  # its interpreter breaks on newer scalars
    ours = f"{ROOT}[controller,train,kernels]"
    for step in (
        (uv, "venv", "--quiet", "--clear", "--python", row.python, str(folder)),
        (
            uv,
            "pip",
            "install",
            "--quiet",
            "--python",
            str(python),
            "--overrides",
            str(exactly),
            "-e",
            ours,
            *TESTS_NEED,
            *numpy,
        ),
    ):
        done = call(step, INSTALL_S)
        if done.returncode != 0:
            raise CannotInstallError(last_line(done.stderr))
    return python


def held(python: Path) -> dict[str, str]:
    """How many tests of each group passed, or which failed."""
    pytest = (str(python), "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not gpu and not matrix")
    done = call((*pytest, "-rpfE", *(path for paths in GROUPS.values() for path in paths)), PATIENCE_S)
    ends = re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return {group: _result(paths, ends) or f"FAILED: {_why(done)}" for group, paths in GROUPS.items()}


def _result(paths: tuple[str, ...], ends: list[tuple[str, str]]) -> str:
    files = tuple(path.partition("::")[0] for path in paths)
    ours = [(end, name) for end, name in ends if name.startswith(files)]
    failed = sorted({name.rpartition("/")[2] for end, name in ours if end != "PASSED"})
    if failed:
        return f"{len(failed)} FAILED: {', '.join(failed[:3])}{', ...' if len(failed) > 3 else ''}"
    return f"{len(ours)} passed" if ours else ""


def _why(done: subprocess.CompletedProcess[str]) -> str:
    return last_line(done.stderr if done.returncode in (124, 127) else done.stdout or done.stderr)


def lines_of(row: Row, uv: str) -> Iterator[tuple[bool, str]]:
    """The table's lines about a row, each with whether all is well."""
    name = f"Python {row.python}, torch {row.torch}, Triton {row.triton}"
    began = time.monotonic()
    try:
        python = installed(row, uv)
    except CannotInstallError as error:
        yield False, f"{name}: could not be installed: {error}"
        return
    facts = call((str(python), "-c", _FACTS), PATIENCE_S)
    if facts.returncode != 0:
        yield False, f"{name}: FAILED to import: {last_line(facts.stderr)}"
        return
    words = dict(zip(("Python", "torch", "Triton", "NCCL", "NumPy"), facts.stdout.split(), strict=True))
    yield True, ", ".join(f"{key} {value}" for key, value in words.items())
    for group, result in held(python).items():
        yield "FAILED" not in result, f"    {group:10} {result}"
    sys.stderr.write(f"{name}: {time.monotonic() - began:.0f} s\n")


def main(target: Path, words: list[str]) -> int:
    """Hold all rows, or those with one of these words, and write the table."""
    rows = [row for row in ROWS if not words or any(word in row for word in words)]
    if not rows:
        sys.stderr.write(f"no row has {' or '.join(words)}; rows: {', '.join(' '.join(row) for row in ROWS)}\n")
        return 2
    uv = os.environ.get("UV", "uv")
    table = [f"{time.strftime('%Y-%m-%d')}, Linux {os.uname().machine}, no GPU", "$ make test-versions", ""]
    all_well = True
    for row in rows:
        for is_well, line in lines_of(row, uv):
            all_well = all_well and is_well
            table.append(line)
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, ("\n".join(table) + "\n").encode())
    return 0 if all_well else 1


if __name__ == "__main__":
    given = sys.argv[1:]
    chosen = given[given.index("--only") + 1 : -1] if "--only" in given else []
    if not given or given[-1].startswith("-"):
        sys.exit("usage: python .ci/versions.py [--only WORD ...] TABLE")
    sys.exit(main(Path(given[-1]), chosen))

# SPDX-License-Identifier: Apache-2.0
"""A run tells its ranks which profiler plugin NCCL shall load, and goes on where there is none."""

import os
import time
from pathlib import Path

import pytest

from megascale_ops.runner.services.profiler import Profiler
from tests.processes.launch import Launch

pytestmark = pytest.mark.processes

SCRIPT = "import os; print('plugin:', os.environ.get('NCCL_PROFILER_PLUGIN', 'none'))"


def plugin_of(launch: Launch, tmp_path: Path, *options: str) -> tuple[str, str]:
    """Run a script that prints which plugin it was told; return that and all other output."""
    script = tmp_path / "show.py"
    script.write_text(SCRIPT)
    launch.env["XDG_CACHE_HOME"] = str(tmp_path / "cache")

    done = launch.command("run", *options, "--", str(script))

    assert done.returncode == 0, done.stderr
    (said,) = [line.split("plugin: ")[1] for line in done.stdout.splitlines() if "plugin: " in line]
    return said, done.stderr


def command_of(pid: int) -> bytes:
    """Return what a process runs; nothing of one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_ranks_are_told_where_the_plugin_lies(launch: Launch, tmp_path: Path) -> None:
    """Built for this run into the user's cache, without a word."""
    said, output = plugin_of(launch, tmp_path, "--nccl-profiler=on")

    assert Path(said).is_file()
    assert Path(said).parent == tmp_path / "cache" / "megascale-ops" / "nccl_profiler"
    assert "NCCL" not in output


def variables_of(tmp_path: Path, setting: str, **environ: str) -> dict[str, str]:
    """Return what a run would tell its ranks, without the run."""
    told = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **environ}
    return Profiler(setting, told, has_device=True).variables()


def test_off_means_off(tmp_path: Path) -> None:
    """Nothing is built, nothing is set."""
    assert variables_of(tmp_path, "off") == {}
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_builds_nothing(launch: Launch, tmp_path: Path) -> None:
    """NCCL never runs there; the start must not be slower for it."""
    said, _ = plugin_of(launch, tmp_path)

    assert said == "none"
    assert not (tmp_path / "cache").exists()


def test_without_a_compiler_the_run_goes_on_and_says_so_once(launch: Launch, tmp_path: Path) -> None:
    """One sentence for all ranks."""
    launch.env["CC"] = "no-such-compiler"

    said, output = plugin_of(launch, tmp_path, "--nccl-profiler=on")

    assert said == "none"
    assert output.count("NCCL's collectives are not recorded: CC names no-such-compiler, which is not there") == 1


def test_a_users_own_plugin_is_left_alone(launch: Launch, tmp_path: Path) -> None:
    """And it is said how to have both."""
    launch.env["NCCL_PROFILER_PLUGIN"] = "inspector"

    said, output = plugin_of(launch, tmp_path, "--nccl-profiler=on")

    assert said == "inspector"
    assert output.count("name it in MEGASCALE_CHAIN_PROFILER") == 1


def test_the_plugin_of_an_outer_run_is_no_users_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run started by a rank of another one inherits its variable, and gets a plugin like any run."""
    outer = "/home/u/.cache/megascale-ops/nccl_profiler/0123456789abcdef0123.so"

    plugin = Path(variables_of(tmp_path, "on", NCCL_PROFILER_PLUGIN=outer)["NCCL_PROFILER_PLUGIN"])

    assert plugin.parent == tmp_path / "cache" / "megascale-ops" / "nccl_profiler"
    assert caplog.records == []


def test_nccls_word_for_no_profiler_is_obeyed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is no second plugin that could be had beside ours."""
    assert variables_of(tmp_path, "on", NCCL_PROFILER_PLUGIN="none") == {}
    (record,) = caplog.records
    assert record.getMessage().endswith("is left alone, so NCCL's collectives are not recorded")


def test_the_path_arrives_whatever_surrounds_it(tmp_path: Path) -> None:
    """A folder whose name is no text, and a Python that greets."""
    (tmp_path / "sitecustomize.py").write_text("import sys; print('hello'); sys.stderr.write('hello\\n')")
    path = f"{tmp_path}:{os.environ['PYTHONPATH']}" if "PYTHONPATH" in os.environ else str(tmp_path)
    cache = tmp_path / os.fsdecode(b"caf\xe9")

    profiler = Profiler("on", {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(cache)}, has_device=False)

    plugin = Path(profiler.variables()["NCCL_PROFILER_PLUGIN"])
    assert plugin.is_file()
    assert plugin.parent == cache / "megascale-ops" / "nccl_profiler"


def test_a_compiler_that_was_given_up_leaves_nothing_running(tmp_path: Path) -> None:
    """Its driver is gone, its parts are still there: they go with the builder."""
    compiler = tmp_path / "mycc"
    compiler.write_text(f"#!/bin/sh\nsleep 600 >/dev/null 2>&1 &\necho $! > {tmp_path}/pid\nexit 1\n")
    compiler.chmod(0o700)

    profiler = Profiler(
        "on", {**os.environ, "CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}, has_device=False
    )

    assert profiler.variables() == {}
    part = int((tmp_path / "pid").read_text())
    deadline_s = time.monotonic() + 90
    while (command := command_of(part)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert command == b""


def test_plain_words_for_a_setting_that_is_none(launch: Launch, tmp_path: Path) -> None:
    """On the command line and in the environment."""
    script = tmp_path / "empty.py"
    script.touch()

    done = launch.command("run", "--nccl-profiler=maybe", "--", str(script))
    launch.env["MEGASCALE_RUN_NCCL_PROFILER"] = "maybe"
    also = launch.command("run", "--", os.fspath(script))

    for one in (done, also):
        assert one.returncode != 0
        assert "maybe" in one.stderr
        assert "Traceback" not in one.stderr
